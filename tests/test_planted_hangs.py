"""A rank that hangs anywhere, from the start to the end: it is named, and all ranks end."""

import json

import pytest
from test_train import TINY

PLANTED = """
import importlib, os, time
from tiny import Tiny

def hangs(*_, **__):
    while True:
        time.sleep(3600)

def works(*_, **__):
    end = time.monotonic() + 3 * TIMEOUT
    while time.monotonic() < end:
        pass

TIMEOUT = float(os.environ.get("TIMEOUT", 0))

class Planted(Tiny):
    def build_dataset(self, split):
        return super().build_dataset(split)

    def on_step(self, run, report):
        if run.step == run.config.train.steps:
            self.at_last_step()

    def at_last_step(self):
        pass

module, name, rank, what = os.environ["PLANT"].split(":")
if os.environ["RANK"] == rank:
    owner = Planted
    if module != "planted":
        owner = importlib.import_module(module)
    *more, name = name.split(".")
    for part in more:
        owner = getattr(owner, part)
    real = getattr(owner, name)

    def planted(*args, **options):
        globals()[what](*args, **options)
        return real(*args, **options)

    setattr(owner, name, planted)
"""
TIMEOUT = 8

SAVER = "dist_amp.checkpoint.saver"
IN_BACKGROUND = ("--checkpoint.async_save", "true")
SAVES_NOTHING = ("--checkpoint.every", "off")
# (what hangs, the rank, settings)
HANGS = [
    (f"{SAVER}:write_tensors", 0, ()),
    (f"{SAVER}:write_tensors", 1, IN_BACKGROUND),
    ("planted:build_dataset", 0, ()),
    ("dist_amp.telemetry.metrics:Metrics.close", 1, ()),
]
MORE_HANGS = [
    (f"{SAVER}:write_tensors", 1, ()),
    (f"{SAVER}:write_tensors", 0, IN_BACKGROUND),
    (f"{SAVER}:hash_files", 0, ()),
    (f"{SAVER}:hash_files", 1, IN_BACKGROUND),
    (f"{SAVER}:publish", 0, ()),
    (f"{SAVER}:publish", 0, IN_BACKGROUND),
    (f"{SAVER}:take_snapshot", 1, ()),
    ("planted:build_dataset", 1, ()),
    ("planted:build_model", 1, ()),
    ("planted:at_last_step", 0, ()),
    ("planted:at_last_step", 1, SAVES_NOTHING),
    ("dist_amp.loading.loader:_shut_down", 0, ("--data.workers", "1")),
    ("dist_amp.telemetry.metrics:Metrics.close", 0, SAVES_NOTHING),
    ("dist_amp.supervise.lifecycle:write_summary", 0, ()),
    ("torch.distributed:destroy_process_group", 0, ()),
    ("torch.distributed:destroy_process_group", 1, ()),
]
# After a resume.
RESUMED_HANGS = [
    ("dist_amp.checkpoint.resume:integrity_error", 0, ()),
    ("dist_amp.checkpoint.resume:integrity_error", 1, ()),
    ("dist_amp.checkpoint.format:read_tensors", 0, ()),
    ("dist_amp.checkpoint.format:read_tensors", 1, ()),
]


def words_of(folder, *words, timeout=TIMEOUT):
    (folder / "planted.py").write_text(PLANTED)
    run = ["--task.target", "planted:Planted", "--train.steps", "4", "--checkpoint.every", "2"]
    return [*TINY, *run, "--run.dir", "run", "--run.timeout_seconds", timeout, *words]


def check_hang(launch, where, rank, words):
    ends = launch.each(
        2, *words_of(launch.folder, *words), timeout=60, PLANT=f"{where}:{rank}:hangs"
    )
    hangs, other = ends[rank], ends[1 - rank]
    assert hangs.returncode == 1, hangs.stderr[-3000:]
    said = hangs.stderr + other.stderr
    assert f"error: rank {rank} hangs; its stacks:" in hangs.stderr
    (line,) = [line for line in said.splitlines() if line.startswith(f"error: rank {rank} (proc")]
    assert "in hangs (planted.py, line " in line
    at_the_end = "destroy_process_group" in where
    assert other.returncode == int(not at_the_end), other.stderr[-3000:]
    summary = json.loads((launch.folder / "run/summary.json").read_text())
    assert (summary["stopped_by"], summary["exit_code"]) == ("failed", 1)
    assert f"rank {rank} (process" in summary["cause"]


@pytest.mark.bad_input("a rank that hangs while it starts, saves or ends")
@pytest.mark.parametrize(("where", "rank", "words"), HANGS)
def test_a_rank_that_hangs_outside_of_a_step_is_named_and_all_ranks_end(launch, where, rank, words):
    check_hang(launch, where, rank, words)


@pytest.mark.slow
@pytest.mark.parametrize(("where", "rank", "words"), MORE_HANGS)
def test_a_rank_that_hangs_anywhere_is_named_and_all_ranks_end(launch, where, rank, words):
    check_hang(launch, where, rank, words)


@pytest.mark.slow
@pytest.mark.parametrize(("where", "rank", "words"), RESUMED_HANGS)
def test_a_rank_that_hangs_while_it_resumes_is_named_and_all_ranks_end(launch, where, rank, words):
    more = ("--train.steps", "6", "--optim.schedule", "constant")
    first = launch.each(2, *words_of(launch.folder, *more[2:]), PLANT="planted:build_model:2:hangs")
    assert [rank.returncode for rank in first] == [0, 0], first[0].stderr
    (launch.folder / "run/summary.json").unlink()
    check_hang(launch, where, rank, (*words, *more))


@pytest.mark.slow
def test_a_start_that_works_for_longer_than_the_timeout_says_what_it_waits_for_and_continues(
    launch,
):
    words = words_of(launch.folder, "--eval.every", "off", timeout=4)
    ends = launch.each(2, *words, PLANT="planted:build_dataset:0:works", TIMEOUT="4")
    assert [rank.returncode for rank in ends] == [0, 0], ends[0].stderr
    said = ends[0].stderr + ends[1].stderr
    assert "; not arrived (entered " in said
    assert ", at the start, in works (planted.py, line " in said
    assert "; the run ends if a missing rank does nothing for run.timeout_seconds=4" in said


@pytest.mark.slow
def test_the_launcher_ends_with_the_verdict_on_a_rank_that_hangs(launch, tmp_path):
    words = ["--max-restarts", "0", "--nproc-per-node", "2", *words_of(tmp_path)]
    where = "planted:at_last_step:1:hangs"
    done = launch.module("dist_amp.commands.launch", *words, PLANT=where, RANK="9")
    assert done.returncode == 1
    assert "reported nothing" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: rank 1 (process"), line
    assert "in hangs (planted.py, line " in line
    assert json.loads((tmp_path / "run/summary.json").read_text())["stopped_by"] == "failed"
