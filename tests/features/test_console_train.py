"""Core as test_train.py tests it, with console."""

import re

import pytest
from test_train import TINY, losses, summary_of


def check_finished_run(folder, done, ranks):
    """What a run of four steps prints and leaves in its folder."""
    assert done.returncode == 0, done.stderr[-2000:]
    summary = summary_of(folder)
    expected = {"stopped_by": "completed", "exit_code": 0, "cause": "", "steps": 4}
    expected |= {"applied_steps": 4, "skipped_steps": 0, "world_size": ranks}
    expected["resumed_from_step"] = None
    assert {key: summary[key] for key in expected} == expected
    assert [rank["rank"] for rank in summary["ranks"]] == list(range(ranks))
    assert all(rank["items_per_second"] > 0 for rank in summary["ranks"])
    assert all(rank["peak_memory_bytes"] > 2**20 for rank in summary["ranks"])
    assert summary["final_loss"] == losses(folder)[4]
    assert len(list((folder / "tensorboard").iterdir())) == ranks
    assert (folder / "checkpoints/step_00000004").is_dir()
    assert "step      4/4" in done.stdout
    assert "done: 4 steps (4 applied, 0 skipped)" in done.stdout


FP16 = ["--precision.dtype", "fp16", "--precision.scaler.init_scale", "256"]


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_launcher_runs_the_main_job_in_a_default_folder_with_time_and_id_shared_by_all_ranks(
    launch, tmp_path, torchrun
):
    words = [*TINY, "--train.steps", "4", "--parallel.strategy", "fsdp", *FP16]
    done = launch(2, *words) if torchrun else launch.each(2, *words)[0]
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{6}", folder.name)
    assert f'dir = "runs/{folder.name}"' in (folder / "config.toml").read_text()
    check_finished_run(folder, done, 2)


@pytest.mark.bad_input("run.resume=never in a folder that holds a run")
def test_a_finished_run_says_so_and_a_longer_one_continues(launch, tmp_path):
    words = [*TINY, "--run.dir", "run", "--train.steps"]
    check_finished_run(tmp_path / "run", launch(0, *words, "4"), 1)
    again = launch(0, *words, "4")
    assert again.returncode == 0
    assert (
        "run is finished: it took 4 of train.steps=4; raise train.steps to continue" in again.stdout
    )
    assert launch(0, *words, "5").returncode == 0
    summary = summary_of(tmp_path / "run")
    assert (summary["steps"], summary["resumed_from_step"]) == (5, 4)
    refused = launch(0, *words, "9", "--run.resume", "never")
    assert refused.returncode == 64
    assert "run.dir=run holds a run already" in refused.stderr
    assert summary_of(tmp_path / "run")["stopped_by"] == "completed", "it stays as it was"
