"""What rank 0 prints: a line per log step, with the time left."""

import json
import math
import re
from statistics import median

import numpy as np
import pytest
from test_fit import OFTEN, end_of
from test_metrics import random_row
from test_script_run import built, same
from test_train import TINY, losses, summary_of

from dist_amp.clock import OWN_PHASES, STEP_PHASES
from dist_amp.config.load import load_config
from dist_amp.files import read_rows
from dist_amp.precision import Clip
from dist_amp.run import build_run
from dist_amp.telemetry import console as consoles
from dist_amp.telemetry.console import Console, columns
from dist_amp.telemetry.metrics import Metrics
from dist_amp.telemetry.step_report import MAX_RANK_FOLDERS, RANK_METRICS, LogRow
from dist_amp.train import fit, main
from dist_amp.world import World


def row(step=5, ranks=2, **values):
    usual = {"steps": 5.0, "applied_in_interval": 5.0, "forward": 1.0, "items": 10.0}
    usual |= {"loss_sum": 3.0, "weight_sum": 4.0, "grad_norm": 0.5, "lr": 1e-3}
    usual |= {"loss_scale": 1.0, "peak_bytes": 2.0**20}
    every = {**dict.fromkeys(RANK_METRICS, 0.0), **usual, **values}
    return LogRow(step, np.array([[every[name] for name in RANK_METRICS]] * ranks))


def test_a_log_interval_in_columns():
    usual = ["loss 1.5000", "items/s 20", "peak 1 MiB", "grad_norm 0.5", "lr 1.00e-03"]
    assert columns(row(), 1.0) == usual
    with_tokens = ["loss 1.5000", "tokens/s 200", *usual[2:], "items/s 20"]
    assert columns(row(tokens=100.0), 1.0) == with_tokens
    assert columns(row(loss_scale=2.0**16), 2.0**16)[3] == "scale 65536"
    assert columns(row(loss_scale=2.0**17), 2.0**16)[3] == "scale 65536 -> 131072"


def test_skipped_steps_are_shown_with_the_reason_and_the_scale_and_no_nan():
    none = {"applied_in_interval": 0.0, "loss_sum": 0.0, "weight_sum": 0.0, "grad_norm": np.nan}
    skipped = columns(row(**none, skipped_in_interval=5.0, loss_scale=2.0**35), 2.0**40)
    assert skipped[0] == "skipped 5 (gradients not finite)"
    assert "scale 1.09951e+12 -> 3.43597e+10" in skipped
    assert "nan" not in " ".join(skipped)
    some = row(applied_in_interval=3.0, skipped_in_interval=2.0)
    assert columns(some, 1.0)[:2] == ["loss 1.5000", "skipped 2 (gradients not finite)"]


def test_lines_in_a_pipe_have_elapsed_and_remaining_time_also_in_a_long_evaluation(
    monkeypatch, capsys
):
    now = [100.0]
    monkeypatch.setattr(consoles.time, "monotonic", lambda: now[0])
    console = Console(Metrics(World(), Clip("off", math.inf)), 0, 20, 1.0)
    for step in (0, 5, 10):
        console.on_log(row(step=step))
        now[0] += 40.0 if step == 0 else 10.0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("step      0/20   0%  0:00  loss"), "no step has been timed yet"
    assert second.startswith("step      5/20  25%  0:40 eta 2:00  loss 1.5000")
    assert third.startswith("step     10/20  50%  0:50 eta 0:50")
    for seconds in (0.1, 1.0):  # the quick one is silent
        for done in range(100):
            console.during_evaluation(done, 100)
            now[0] += seconds
    assert capsys.readouterr().out.splitlines() == [
        "evaluation: batch 30 of 100, 0:30 eta 1:10",
        "evaluation: batch 60 of 100, 1:00 eta 0:40",
        "evaluation: batch 90 of 100, 1:30 eta 0:10",
    ]


@pytest.mark.parametrize("ranks", [1, 2, 1000])
def test_what_is_computed_for_all_ranks_at_once_is_what_each_rank_gives(ranks):
    row, each = random_row(ranks)
    rates = [own["items"] / sum(own[phase] for phase in STEP_PHASES) for own in each]
    tags = row.global_tags()
    expected = {"train/loss": sum(own["loss_sum"] for own in each) / each[0]["weight_sum"]}
    if ranks > 1:
        expected["ranks/items_per_second_min"] = min(rates)
        expected["ranks/items_per_second_median"] = median(rates)
        expected["ranks/peak_bytes_max"] = max(own["peak_bytes"] for own in each)
        expected["ranks/data_wait_seconds_max"] = max(own["data"] / own["steps"] for own in each)
    if ranks > MAX_RANK_FOLDERS:
        local = [sum(own[phase] for phase in OWN_PHASES) / own["steps"] for own in each]
        expected["ranks/slowest_rank"] = local.index(max(local))
    # Sums in another order; seconds are rounded to 0.1 us.
    assert {tag: tags[tag] for tag in expected} == pytest.approx(expected, rel=1e-12, abs=1e-7)
    assert ("ranks/forward_seconds_median" in tags) == (ranks > MAX_RANK_FOLDERS)
    assert f"items/s {sum(rates):,.0f}" in columns(row, 1.0)
    assert json.loads(json.dumps(tags)) == tags, "plain numbers"


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_launcher_runs_the_main_job_in_a_default_folder_with_time_and_id_shared_by_all_ranks(
    launch, tmp_path, torchrun
):
    words = [*TINY, "--train.steps", "4", "--parallel.strategy", "fsdp"]
    words += ["--precision.dtype", "fp16", "--precision.scaler.init_scale", "256"]
    done = launch(2, *words) if torchrun else launch.each(2, *words)[0]
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{6}", folder.name)
    assert f'dir = "runs/{folder.name}"' in (folder / "config.toml").read_text()
    assert done.returncode == 0, done.stderr[-2000:]
    summary = summary_of(folder)
    expected = {"stopped_by": "completed", "exit_code": 0, "cause": "", "steps": 4}
    expected |= {"applied_steps": 4, "skipped_steps": 0, "world_size": 2, "resumed_from_step": None}
    assert summary | expected == summary
    assert summary["final_loss"] == losses(folder)[4]
    rows = [row for row in read_rows(folder / "metrics.jsonl")[0] if "ranks" in row]
    for rank, entry in enumerate(summary["ranks"]):
        assert entry["rank"] == rank
        assert entry["items_per_second"] > 0
        assert entry["peak_memory_bytes"] > 2**20
        seconds = [row["ranks"][rank]["time/local_seconds"] for row in rows]
        # The lines are rounded to 0.1 us.
        assert entry["local_seconds"] == pytest.approx(sum(seconds) / len(seconds), abs=2e-7)
    assert len(list((folder / "tensorboard").iterdir())) == 2
    assert (folder / "checkpoints/step_00000004").is_dir()
    for said in ("step      4/4", "local s/step", "done: 4 steps (4 applied, 0 skipped)"):
        assert said in done.stdout


def test_the_command_ends_bit_for_bit_as_fit_does_and_both_show_each_step(tmp_path, capfd):
    words = ["--run.dir", f"{tmp_path}/run", "--task.target", "tests/core/test_script_run.py:Noisy"]
    words += ["--train.steps", "6", "--optim.lr", "1e-2", *map(str, OFTEN)]
    run = built(World(), tmp_path / "fit", *OFTEN)
    for start in (lambda: main(words), lambda: fit(run)):
        capfd.readouterr()
        start()
        said = capfd.readouterr().out
        # A step's line comes before the evaluation and the checkpoint that follow it.
        shown = re.findall(r"^(step|eval) +(\S+)", said, re.MULTILINE)
        assert " ".join(map("".join, shown)) == "step2/6 eval3 step4/6 step6/6 eval6"
        assert "done: 6 steps" in said
    by_command = build_run(load_config(words, environ={}))
    by_command.resume()
    assert same(list(end_of(by_command)), list(end_of(run)))
    assert fit(run)["stopped_by"] == "completed"
    assert f"{run.folder} is finished: it took 6 of train.steps=6" in capfd.readouterr().out
