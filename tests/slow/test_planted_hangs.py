"""A rank that hangs anywhere, from the start to the end: it is named, and all ranks end."""

import json
import re
import signal

import pytest
from test_train import TINY

PLANTED = """
import importlib, os, re, time
from tiny import Tiny
from torch.utils.data import default_collate

def hangs(*_, **__):
    while True:
        time.sleep(3600)

def works(*_, **__):
    end = time.monotonic() + 3 * TIMEOUT
    while time.monotonic() < end:
        pass

TIMEOUT = float(os.environ.get("TIMEOUT", 0))

def keeps_the_interpreter(*_, **__):
    re.match(r"(a+)+$", "a" * 60 + "b")

class Planted(Tiny):
    def build_dataset(self, split):
        return super().build_dataset(split)

    def on_step(self, run, report):
        if run.step == run.config.train.steps:
            self.at_last_step()

    def at_last_step(self):
        pass

    def collate(self, samples):
        return default_collate(samples)

    def metrics(self, model, batch):
        return {"target": batch["y"].sum()}

    def on_evaluation(self, run, values):
        pass

    def sample(self, model):
        return "text"

    def state_dict(self):
        return {"kept": 1}

    def load_state_dict(self, state):
        pass

module, name, rank, what = os.environ["PLANT"].split(":")
if os.environ["RANK"] in rank.split(","):
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
EVALUATES = ("--eval.every", "2")
SAVES_NOTHING = ("--checkpoint.every", "off")
# (what hangs, the rank, settings)
HANGS = [
    (f"{SAVER}:take_snapshot", 0, ()),
    ("planted:build_dataset", 0, ()),
    ("dist_amp.telemetry.metrics:Metrics.close", 1, ()),
]
MORE_HANGS = [
    ("planted:metrics", 1, EVALUATES),
    ("planted:on_evaluation", 0, EVALUATES),
    ("planted:sample", 1, EVALUATES),
    ("planted:state_dict", 1, ()),
    ("planted:collate", 1, ()),
    ("dist_amp.optimizers.ema:Ema.evaluating", 1, ("--optim.ema", "0.9", *EVALUATES)),
    ("dist_amp.telemetry.writers:TensorBoardWriter.write", 1, ()),
    ("dist_amp.supervise.preflight:only_process", 0, ()),
    ("dist_amp.checkpoint.background:Staging.copy", 1, IN_BACKGROUND),
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
    ("planted:load_state_dict", 1, ()),
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
    # Two where the second rank is slow: the store, by which only one reports, ends with rank 0.
    lines = [line for line in said.splitlines() if line.startswith(f"error: rank {rank} (proc")]
    assert lines
    for line in lines:
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
def test_two_ranks_of_three_that_hang_are_named_together(launch):
    ends = launch.each(3, *words_of(launch.folder), PLANT="planted:at_last_step:1,2:hangs")
    assert [rank.returncode for rank in ends] == [1, 1, 1]
    cause = json.loads((launch.folder / "run/summary.json").read_text())["cause"]
    assert re.match(r"rank 1 \(process \d+ on .*\), 2 \(process", cause)
    assert "in hangs (planted.py, line " in cause


@pytest.mark.slow
@pytest.mark.bad_input("a collate that hangs in a loader worker")
def test_the_stack_of_a_loader_worker_that_hangs_is_printed(launch):
    where = "planted:collate:0:hangs"
    ends = launch.each(2, *words_of(launch.folder, "--data.workers", "1"), PLANT=where)
    assert [rank.returncode for rank in ends] == [1, 1]
    assert re.search(r'planted.py", line \d+ in hangs', ends[0].stderr)
    summary = json.loads((launch.folder / "run/summary.json").read_text())
    assert "in _receive (data.py, line " in summary["cause"]


@pytest.mark.slow
@pytest.mark.bad_input("a call that never returns and keeps Python's interpreter lock")
@pytest.mark.parametrize("where", ["build_dataset:1", "at_last_step:1", "at_last_step:0"])
def test_a_rank_that_keeps_the_interpreter_is_named_with_its_stack_and_ended(launch, where):
    where = f"planted:{where}:keeps_the_interpreter"
    ends = launch.each(2, *words_of(launch.folder), PLANT=where, timeout=60)
    rank = int(where.split(":")[2])
    assert (ends[rank].returncode, ends[1 - rank].returncode) == (-signal.SIGKILL, 1)
    assert re.search(r'planted.py", line \d+ in keeps_the_interpreter', ends[rank].stderr)
    cause = json.loads((launch.folder / "run/summary.json").read_text())["cause"]
    assert cause.startswith(f"rank {rank} (process")


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
