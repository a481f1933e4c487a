"""A rank that hangs anywhere, from the start to the end: it is named, and all ranks end."""

import json
import re
import signal
import time

import pytest
from test_train import TINY

PLANTED = """
import importlib, os, re, signal, threading, time
from tiny import Tiny
from torch.utils.data import default_collate

lock = threading.Lock()

def hangs(*_, **__):
    while True:
        time.sleep(3600)

def hangs_in_a_lock(*_, **__):
    for _ in range(2):
        lock.acquire()

def hangs_once_it_is_told_to_stop(*_, **__):
    os.kill(os.getpid(), signal.SIGTERM)
    hangs()

def works(*_, **__):
    end = time.monotonic() + 3 * TIMEOUT
    while time.monotonic() < end:
        pass

TIMEOUT = float(os.environ.get("TIMEOUT", 0))

def keeps_the_interpreter(*_, **__):
    re.match(r"(a+)+$", "a" * 60 + "b")

class Planted(Tiny):
    build_dataset = Tiny.build_dataset

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
METRICS = "dist_amp.telemetry.metrics:Metrics"
IN_BACKGROUND = ("--checkpoint.async_save", "true")
EVALUATES = ("--eval.every", "2")
SAVES_NOTHING = ("--checkpoint.every", "off")
# (what hangs, the rank, settings)
HANGS = [
    (f"{SAVER}:take_snapshot", 0, ()),
    ("planted:build_dataset", 0, ()),
    (f"{METRICS}.close_files", 1, ()),
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
    ("dist_amp.loading.workers:_shut_down", 0, ("--data.workers", "1")),
    (f"{METRICS}.close_files", 0, SAVES_NOTHING),
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

# Before the task is imported.
STARTS = """
import os, sys
import planted
from dist_amp.train import main

if os.environ["RANK"] != os.environ.get("MISSING"):
    sys.exit(main())
"""

# Of the only rank: (what hangs, how, the line, settings).
HANGS_HERE = "in hangs (planted.py, "
TOLD_TO_STOP = "hangs_once_it_is_told_to_stop"
ALONE = [("planted:loss_sum", TOLD_TO_STOP, f"in step 1, {HANGS_HERE}", ())]
MORE_ALONE = [
    ("planted:loss_sum", "hangs_in_a_lock", "in step 1, in hangs_in_a_lock (planted.py, ", ()),
    ("planted:collate", "hangs", f"in step 1, {HANGS_HERE}", ()),
    ("planted:collate", "hangs", "in step 1, in _receive (data.py, ", ("--data.workers", "1")),
    ("planted:build_dataset", "hangs", f"at the start, {HANGS_HERE}", ()),
    ("planted:metrics", "hangs", f"in step 3, {HANGS_HERE}", EVALUATES),
    ("planted:on_evaluation", "hangs", f"in step 3, {HANGS_HERE}", EVALUATES),
    ("planted:at_last_step", "hangs", f"in step 5, {HANGS_HERE}", ()),
    (f"{SAVER}:take_snapshot", "hangs", f"in step 3, {HANGS_HERE}", ()),
    (f"{METRICS}.close_files", "hangs", f"in step 5, {HANGS_HERE}", ()),
]


def with_slow(quick, more):
    return [*quick, *(pytest.param(*row, marks=pytest.mark.slow) for row in more)]


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
@pytest.mark.parametrize(("where", "rank", "words"), with_slow(HANGS, MORE_HANGS))
def test_a_rank_that_hangs_outside_of_a_step_is_named_and_all_ranks_end(launch, where, rank, words):
    check_hang(launch, where, rank, words)


@pytest.mark.bad_input("a hang of the only rank, with a signal to stop")
@pytest.mark.parametrize(("where", "what", "line", "words"), with_slow(ALONE, MORE_ALONE))
def test_the_only_rank_is_named_and_ended_where_it_hangs(launch, where, what, line, words):
    start = time.monotonic()
    words = words_of(launch.folder, *words)
    (end,) = launch.each(1, *words, timeout=60, PLANT=f"{where}:0:{what}")
    assert end.returncode == 1, end.stderr[-3000:]
    assert time.monotonic() - start < 3 * TIMEOUT + 15
    assert "error: rank 0 hangs; its stacks:" in end.stderr
    assert re.search(rf'planted.py", line \d+ in {what}', end.stderr)
    summary = json.loads((launch.folder / "run/summary.json").read_text())
    assert (summary["stopped_by"], summary["exit_code"]) == ("failed", 1)
    hangs = r"rank 0 \(process \d+ on .*\) hangs: it has used no processor for run.timeout_seconds"
    assert re.fullmatch(rf"{hangs}={TIMEOUT}; {re.escape(line)}line \d+\)", summary["cause"])
    assert f"error: {summary['cause']}\n" in end.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("where", "rank", "words"), RESUMED_HANGS)
def test_a_rank_that_hangs_while_it_resumes_is_named_and_all_ranks_end(launch, where, rank, words):
    more = ("--train.steps", "6", "--optim.schedule", "constant")
    first = launch.each(2, *words_of(launch.folder, *more[2:]), PLANT="planted:build_model:2:hangs")
    assert [rank.returncode for rank in first] == [0, 0], first[0].stderr
    (launch.folder / "run/summary.json").unlink()
    check_hang(launch, where, rank, (*words, *more))


def check_start(launch, rank, said, **environ):
    (launch.folder / "starts.py").write_text(STARTS)
    words = words_of(launch.folder, timeout=4)
    ends = launch.each(2, *words, module="starts.py", timeout=60, **environ)
    other = ends[1 - rank]
    assert other.returncode == 1
    assert re.match(said, other.stderr.splitlines()[-1]), other.stderr
    assert "Traceback" not in other.stderr
    return ends[rank]


@pytest.mark.bad_input("a rank that hangs between the rendezvous and the process groups")
@pytest.mark.parametrize(
    ("name", "rank"),
    with_slow(
        [("init_process_group", 1)],
        [("init_process_group", 0), ("new_group", 0), ("new_group", 1)],
    ),
)
def test_a_rank_that_hangs_before_it_connects_is_named_and_all_ranks_end(launch, name, rank):
    said = rf"error: rank {rank} of 2 has joined \(process \d+ on .*\), but not connected within "
    said += rf"run.timeout_seconds=4: it hangs, .* \(rank {1 - rank} got: wait timeout"
    hangs = check_start(launch, rank, said, PLANT=f"torch.distributed:{name}:{rank}:hangs")
    assert hangs.returncode == 1
    assert re.search(r'planted.py", line \d+ in hangs', hangs.stderr)


@pytest.mark.bad_input("a rank that does not start")
@pytest.mark.parametrize(
    ("rank", "said"),
    [(0, "no rank 0 at .* (Connection refused); start"), (1, "rank 1 of 2 has not joined at ")],
)
def test_a_rank_that_does_not_start_is_named_by_the_other_one(launch, rank, said):
    said = f"error: {said}".replace("(", r"\(").replace(")", r"\)")
    check_start(launch, rank, said, MISSING=str(rank), PLANT="planted:build_model:2:hangs")


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
