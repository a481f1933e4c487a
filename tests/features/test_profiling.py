"""Which steps are profiled, on which ranks, and what is written."""

import gzip
import json
from collections import Counter
from contextlib import suppress

import pytest
import torch
from tiny import Tiny, make_run, take_steps, watched

from dist_amp.diagnostics.profiling import MAX_ALLOCATIONS, Profile, memory_history, window
from dist_amp.train import main
from dist_amp.world import World


def steps_of(world, folder, steps, *words):
    """A run that took `steps` steps with a Profile, as in the main job."""
    run = make_run(world, Tiny(), "--run.dir", folder, "--train.micro_batch_size", 2, *words)
    take_profiled(run, steps)
    return run


def take_profiled(run, steps):
    with watched(Profile(run)) as profile:
        run.observers.add(profile)
        take_steps(run, steps)


def test_a_step_of_the_main_job_is_a_range_in_the_trace_and_operations_are_in_the_table(
    tmp_path, capsys
):
    words = ["--task.target", "tiny:Tiny", "--train.steps", "15", "--train.accumulation_steps", "3"]
    words += ["--debug.profile", "2", "--eval.every", "15", "--run.dir", str(tmp_path)]
    assert main([*words, "--run.device", "cpu"]) == 0
    name = "rank00000_step_00000013-00000014"
    written = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert written == [f"{name}.json.gz", f"{name}_table.txt"]
    with gzip.open(tmp_path / f"profile/{name}.json.gz") as file:
        events = json.load(file)["traceEvents"]
    found = Counter(one["name"] for one in events if one.get("cat") == "user_annotation")
    steps = {label: count for label, count in found.items() if label.startswith("Profiler")}
    assert steps == {"ProfilerStep#13": 1, "ProfilerStep#14": 1}
    assert "Optimizer.step#AdamW.step" in found
    table = (tmp_path / f"profile/{name}_table.txt").read_text()
    assert table.startswith("steps 13 to 14 of rank 0 of 1\n")
    assert "aten::addmm" in table
    said = f"profile  steps 13 to 14 of rank 0 of 1\n         {tmp_path}/profile/{name}.json.gz o"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("done", "last_step", "count", "expected"),
    [
        (0, 100, 3, (13, 15)),
        (50, 100, 3, (63, 65)),  # counted from where this process started
        (0, 9, 3, (7, 9)),  # a short run's last steps
        (0, 3, 5, (2, 3)),  # at least one step for the profiler's warm-up
        (0, 1, 1, (2, 1)),  # nothing
    ],
)
def test_the_recorded_steps_start_after_a_warm_up(done, last_step, count, expected):
    assert window(done, last_step, count) == expected


@pytest.mark.bad_input("a run that ends before the steps of `debug.profile` do")
def test_a_run_that_ends_early_writes_what_was_recorded_or_says_that_nothing_was(tmp_path, capsys):
    words = ["--train.steps", 100, "--debug.profile", 5]
    steps_of(World(), tmp_path, 14, *words)
    assert "profile  steps 13 to 14 of rank 0 of 1\n" in capsys.readouterr().out
    assert len(list((tmp_path / "profile").iterdir())) == 2
    steps_of(World(), tmp_path, 12, *words)
    said = "debug.profile=5 recorded nothing: the run ended after step 12"
    assert said in capsys.readouterr().err


def test_neither_a_failure_in_a_recorded_step_nor_one_to_write_hides_another(tmp_path, capsys):
    (tmp_path / "profile").write_text("a file in its place")
    words = ["--run.dir", tmp_path, "--train.steps", 100, "--debug.profile", 5]
    run = make_run(World(), Tiny(), *words)

    def fail_in_step_14(*_):
        if run.step == 13:
            raise ZeroDivisionError

    run.optimizer.register_step_pre_hook(fail_in_step_14)
    with pytest.raises(ZeroDivisionError):
        take_profiled(run, 20)
    assert steps_of(World(), tmp_path, 3, "--train.steps", 3, "--debug.profile", 2).step == 3
    warning = "warning: rank 0: the profile could not be written: FileExistsError"
    assert warning in capsys.readouterr().err


def test_memory_history_starts_before_the_model_and_is_written_if_memory_runs_out(
    tmp_path, capsys, monkeypatch
):
    calls = []
    memory = "torch.cuda.memory"
    monkeypatch.setattr(f"{memory}._record_memory_history", lambda **given: calls.append(given))
    monkeypatch.setattr(f"{memory}._dump_snapshot", calls.append)
    with memory_history(tmp_path, World()):
        assert calls == []
    world = World(rank=1, world_size=2, device=torch.device("cuda"))
    with suppress(torch.OutOfMemoryError), memory_history(tmp_path, world):
        assert calls == [{"max_entries": MAX_ALLOCATIONS, "stacks": "python"}]
        raise torch.OutOfMemoryError
    snapshot = str(tmp_path / "profile/rank00001_out_of_memory.pickle")
    assert calls[1:] == [snapshot, {"enabled": None}]
    assert "open it at pytorch.org/memory_viz" in capsys.readouterr().out
