"""While a collective waits: who is missing is said long before the timeout; nothing is said of
waits that are legal.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_guards import watchdog_of
from test_hangs import WAITING, CountingStore, report
from test_train import TINY, wait_for
from tiny import Tiny, make_run, take_steps

from dist_amp.checkpoint import saver
from dist_amp.config.load import load_config
from dist_amp.distributed import flight_recorder
from dist_amp.distributed.flight_recorder import Entered
from dist_amp.supervise import watchdog
from dist_amp.supervise.rank_reports import Board, Process, Verdict, main_thread_is_in
from dist_amp.supervise.watchdog import Heartbeat
from dist_amp.world import World

# --- in real runs: ranks that do something else in their fifth and sixth micro-batch

TASK = """
import os, time
import torch
import torch.distributed as dist
from dist_amp.supervise import watchdog
from tiny import Tiny

watchdog.POLL_SECONDS, watchdog.ANSWER_SECONDS, watchdog.BEAT_SECONDS = 0.1, 0.5, 0.3
watchdog.COMPARED, watchdog.NAMED = 1 / 60, 1 / 40  # of 60 s

def sleep_in_the_forward():
    while not os.path.exists("go"):
        time.sleep(0.05)

class Task(Tiny):
    taken = 0
    def loss_sum(self, model, batch):
        Task.taken += 1
        if Task.taken == 5:
            {first} if os.environ["RANK"] == "0" else {second}
        if Task.taken == 6 and os.environ["RANK"] == "1":
            {then}
        return super().loss_sum(model, batch)
"""


@pytest.fixture
def start(launch, tmp_path):
    """start(first, second, then, strategy): two ranks of a run, and what they do."""
    started = []

    def run(first="None", second="None", then="None", strategy="ddp"):
        (tmp_path / "own.py").write_text(TASK.format(first=first, second=second, then=then))
        words = [*TINY, "--task.target", "own:Task", "--run.timeout_seconds", "60"]
        words += ["--run.dir", "run", "--train.steps", "8", "--parallel.strategy", strategy]
        started.extend(launch.start_each(2, *words))
        return started

    yield run
    for process in started:
        process.kill()


def said(process):
    path = process._output / "stderr"
    return path.read_text() if path.exists() else ""


def named(process, times=1):
    """The last line about a missing rank, once there are so many."""
    wait_for(lambda: said(process).count("the run ends if this lasts") == times, "the line", 60)
    return [line for line in said(process).splitlines() if line.startswith("warning: rank")][-1]


def stacks(folder, rank):
    path = folder / f"run/stacks/rank{rank:05d}.txt"
    wait_for(lambda: path.exists() and path.read_text().count("\n") > 5, f"rank {rank}'s stacks")
    return path.read_text()


@pytest.mark.bad_input("a rank that keeps the others waiting in a collective")
@pytest.mark.bad_input("a rank that is stopped (SIGSTOP)")
def test_a_rank_that_sleeps_or_is_stopped_is_named_and_the_run_continues_when_it_does(
    start, tmp_path
):
    first, second = start(second="sleep_in_the_forward()", then="os.kill(os.getpid(), 19)")
    line = named(first)
    assert line.startswith("warning: rank 0 of 2 has waited "), line
    assert f"; rank 1 (process {second.pid} on " in line
    assert "has not arrived (entered " in line
    assert "in step 5, in sleep_in_the_forward (own.py, line " in line
    assert (
        "; stacks of all ranks in run/stacks; the run ends if this lasts for run.timeout_seconds=60"
        in line
    )
    assert "in sleep_in_the_forward" in stacks(tmp_path, 1)
    assert "in train_step" in stacks(tmp_path, 0)
    assert line.removeprefix("warning: ") in stacks(tmp_path, 1)
    (tmp_path / "go").touch()
    line = named(first, times=2)
    assert "the ranks continue: they had waited " in said(first)
    assert f"; rank 1 (process {second.pid} on " in line
    assert " is stopped (SIGSTOP); " in line
    os.kill(second.pid, signal.SIGCONT)
    assert [process.wait(300) for process in (first, second)] == [0, 0]
    assert said(first).count("warning: rank") == 2
    assert "warning: rank" not in said(second), "one line for all ranks"


@pytest.mark.bad_input("a rank that calls another collective than the others, or skips one")
@pytest.mark.parametrize(
    ("first", "second", "waits", "instead", "strategy"),
    [
        # The sender of a gather does not wait: it is in the next collectives of the step.
        (
            "dist.all_reduce(torch.ones(4))",
            "dist.gather(torch.ones(4), dst=0)",
            "all_reduce",
            "gather",
            "fsdp",
        ),
        # The next collective of the step takes its place.
        ("dist.barrier()", "None", "barrier", "all_", "ddp"),
    ],
)
def test_a_rank_that_does_another_collective_or_skips_one_is_named_with_both(
    start, tmp_path, first, second, waits, instead, strategy
):
    ranks = start(first, second, strategy=strategy)
    wait_for(lambda: any("the run ends if" in said(rank) for rank in ranks), "the line", 60)
    (line,) = [line for rank in ranks for line in said(rank).splitlines() if "the run ends" in line]
    second = ranks[1]
    assert f" s in gloo:{waits} " in line, line
    assert f"; rank 1 (process {second.pid} on " in line
    assert f" entered gloo:{instead}" in line
    assert " instead, and is in step 5, in " in line
    assert all("train_step" in stacks(tmp_path, rank) for rank in range(2))


# --- by a clock, and reports that are planted


class Job:
    """Ranks in one process that poll once a second, in a run whose collectives may take 300 s."""

    def __init__(self, monkeypatch, folder, size):
        self.now = 1000.0
        self.step = 5
        self.stores = []
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.started = [0.0] * size  # when each rank's collective was started; 0: it waits in none
        self.reports = [report("alive", step=41)] * size
        self.boards = []
        self.ranks = []
        store = dist.HashStore()
        config = load_config([], environ={})
        for rank in range(size):
            self.stores.append(CountingStore(store))
            self.boards.append(Board(self.stores[rank], rank, size))
            supervised = SupervisedRank(config, World(rank, 0, size), folder, self)
            processes = [Process(f"host-{n}", 1, f"machine-{n}") for n in range(size)]
            beat = Heartbeat(supervised, self.boards[rank], processes, partial(self.report, rank))
            self.ranks.append(beat)

    def report(self, rank):
        waited = self.now - self.started[rank] if self.started[rank] else 0.0
        return replace(self.reports[rank], waited_seconds=waited)

    def wait_in(self, ranks, timeout_seconds=300.0, number=42, operation="all_reduce"):
        last = Entered("step", number, operation)
        waiting = replace(WAITING, state="alive", groups={"step": ("", [], last)}, waits_in=last)
        waiting = replace(waiting, timeout_seconds=timeout_seconds)
        for rank in ranks:
            self.reports[rank] = waiting
            self.started[rank] = self.now

    def continue_at(self, number):
        size = len(self.ranks)
        self.reports = [report("alive", step=number)] * size
        self.started = [0.0] * size

    def seconds(self, count, silent=()):
        for _ in range(count):
            self.now += 1.0
            for rank, (each, board) in enumerate(zip(self.ranks, self.boards, strict=True)):
                if rank not in silent:
                    each.poll(board.store.get("stall").decode())


class SupervisedRank(NamedTuple):
    config: Any
    world: World
    folder: Any
    of: Job

    @property
    def steps_taken(self):
        return self.of.step


@pytest.fixture
def job(monkeypatch, tmp_path):
    def make(size=4):
        made = Job(monkeypatch, tmp_path, size)
        made.seconds(6)
        made.step += 1  # beyond the process's first step
        made.seconds(6)
        return made

    return make


def test_a_missing_rank_is_named_after_a_fifth_of_the_timeout_once_and_its_arrival_is_said(
    job, capfd, tmp_path
):
    ranks = job()
    ranks.wait_in([0, 1, 3])
    ranks.seconds(59)
    assert capfd.readouterr().err == ""
    ranks.seconds(20)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: ranks 0, 1, 3 of 4 have waited 6")
    assert "; rank 2 (process " in line
    assert sorted(path.name for path in (tmp_path / "stacks").iterdir()) == [
        f"rank0000{rank}.txt" for rank in range(4)
    ]
    assert {each.stacks_folder for each in ranks.ranks} == {str(tmp_path / "stacks")}
    ranks.seconds(100)
    assert capfd.readouterr().err == ""
    ranks.continue_at(42)
    ranks.step += 1
    ranks.seconds(30)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("the ranks continue: they had waited 18")
    assert {each.stacks_folder for each in ranks.ranks} == {""}
    ranks.wait_in([1, 2], number=43)
    ranks.seconds(80)
    assert capfd.readouterr().err.startswith("warning: ranks 1, 2 of 4 have waited ")


def test_ranks_in_two_collectives_of_one_number_are_named_as_soon_as_they_compare(job, capfd):
    ranks = job()
    ranks.wait_in([0, 1, 3])
    ranks.wait_in([2], operation="broadcast")
    ranks.seconds(30)
    assert " entered broadcast as number 42 instead" in capfd.readouterr().err


@pytest.mark.parametrize("silent", [0, 2])
def test_a_rank_that_does_not_answer_is_named_by_another_one(job, capfd, silent):
    ranks = job()
    ranks.wait_in(set(range(4)) - {silent})
    ranks.seconds(90, silent=[silent])
    (line,) = capfd.readouterr().err.splitlines()
    assert f"; rank {silent} (process " in line
    assert " does not answer; stacks of all ranks in " in line


def legal_wait(ranks, wait):
    if wait == "one rank fills a cache in wait_long":
        ranks.wait_in([1, 2, 3], timeout_seconds=86_400.0)
        ranks.seconds(1000)
    elif wait == "the first step compiles":
        ranks.wait_in([1, 2, 3])
        ranks.seconds(140)
    elif wait == "every rank has entered it: a GPU computes for long":
        ranks.wait_in([0, 1, 2, 3])
        ranks.seconds(290)
    elif wait == "nobody is in a collective, as in an evaluation":
        ranks.seconds(1000)
    elif wait == "short ones in turn":
        for number in range(42, 62):
            ranks.wait_in([0, 1, 3], number=number)
            ranks.seconds(25)
            ranks.continue_at(number)
            ranks.seconds(1)


@pytest.mark.parametrize(
    "wait",
    [
        "one rank fills a cache in wait_long",
        "the first step compiles",
        "every rank has entered it: a GPU computes for long",
        "nobody is in a collective, as in an evaluation",
        "short ones in turn",
    ],
)
def test_nothing_is_said_of_a_long_wait_that_is_legal(job, capfd, tmp_path, wait):
    ranks = job()
    if wait == "the first step compiles":
        for each in ranks.ranks:
            each._first_step = ranks.step
    legal_wait(ranks, wait)
    assert capfd.readouterr().err == ""
    assert not (tmp_path / "stacks").exists()


@pytest.mark.parametrize("folder", ["run/stacks", ""])
def test_the_error_that_ends_the_run_says_where_the_stacks_are(folder):
    ranks = watchdog_of(World())
    ranks._heartbeat = SimpleNamespace(stacks_folder=folder, close=lambda: None)
    text = ranks._text(Verdict([], [0], "rank 1 of 2 waits"), "timed out")
    assert text.endswith(
        "; rank 1 of 2 waits" + ("; stacks of all ranks in run/stacks" if folder else "")
    )


@pytest.mark.parametrize("size", [4, 64])
def test_a_stall_costs_each_rank_a_request_per_second_and_a_few_per_beat_whatever_the_number_of_ranks(
    job, capfd, size
):
    ranks = job(size)
    before = [each.requests for each in ranks.stores]
    ranks.wait_in(range(1, size))
    ranks.seconds(100)
    assert "has not arrived" in capfd.readouterr().err
    beats = 100 // 5
    # A beat: a report and the neighbour's; one rank reads all of them, and says what it found.
    requests = [each.requests - old for each, old in zip(ranks.stores, before, strict=True)]
    assert max(requests) <= 100 + 4 * beats


def entry(number, operation="nccl:all_reduce", group="0", done=False, age=0.0, **more):
    """A collective as both recorders of torch describe it."""
    return {"collective_seq_id": number, "profiling_name": operation, "process_group": [group, "default_pg"],
            "retired": done, "state": "completed" if done else "started", "is_p2p": False, "timeout_ms": 360_000,
            "time_created_ns": time.time_ns() - int(age * 1e9), **more}  # fmt: skip


def test_of_a_recorders_entries_the_first_unfinished_one_is_where_a_rank_waits(monkeypatch):
    """Under NCCL the host has started later ones, too."""
    old = [entry(number, done=True, age=100 - number) for number in range(1, 41)]
    sent = entry(7, "nccl:send", age=55, is_p2p=True)
    new = [entry(41, age=50), entry(42, "nccl:broadcast", age=40)]
    written = entry(3, "gloo:gather", group="5", age=60)
    monkeypatch.setattr(flight_recorder, "_members", lambda _: [])
    found = flight_recorder.progress(
        {"nccl": {"entries": [*old, sent, *new]}, "gloo": {"entries": [written]}}, {"5"}
    )
    assert found.waits_in == Entered("0", 41, "nccl:all_reduce")
    assert (round(found.waited_seconds), found.timeout_seconds) == (50, 360.0)
    assert found.latest == Entered("0", 42, "nccl:broadcast")
    assert [*found.recent["0"]] == [str(number) for number in range(35, 43)]
    unknown = entry(1, age=50)
    del unknown["timeout_ms"]  # of another release: it is never too late
    assert flight_recorder.progress(
        {"nccl": {"entries": [unknown]}}, set()
    ).timeout_seconds == float("inf")


def waits_during_a_save(world, folder):
    """Where the watchdog sees rank 0's main thread while its writer waits for rank 1's, which takes
    its time.
    """
    run = make_run(world, Tiny(), "--run.dir", folder, "--checkpoint.every", 1)
    take_steps(run, 1)
    real, found = saver.write, []

    def later(*args):
        time.sleep(1.0 * world.rank)
        real(*args)

    ranks = watchdog_of(world)
    with patch.object(saver, "write", later), saver.Saver(run) as saving:
        saving.save(wait=False)
        if world.rank == 0:
            writer = {run.world.background.group_name}
            deadline = time.monotonic() + 60
            while flight_recorder.progress(flight_recorder.dump(), set()).waits_in is None:
                assert time.monotonic() < deadline
            now = flight_recorder.progress(flight_recorder.dump(), set()).waits_in
            found = [now is None or now.group in writer, ranks._own_report("alive").waits_in]
    ranks.__exit__()
    return found


def test_a_checkpoint_that_takes_one_rank_long_is_not_taken_for_a_wait_of_the_others(tmp_path):
    assert on_ranks(2, waits_during_a_save, tmp_path)[0] == [True, None]


def waits_of(world):
    """(how long the collective may take that rank 0 waits in, inside wait_long and outside), by the
    flight recorder.
    """
    found, control = [], dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
    own = World(world.rank, 0, 2, 2, control=control)
    for wait in (own.wait_long, own.barrier):
        if world.rank == 0:
            waiting = ThreadPoolExecutor(1).submit(wait)
            deadline = time.monotonic() + 60
            while (
                now := flight_recorder.progress(flight_recorder.dump(), set())
            ).waited_seconds < 0.2:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            found.append((now.waits_in.operation, now.timeout_seconds))
            dist.send(torch.ones(1), 1)
            waiting.result(60)
        else:
            dist.recv(torch.ones(1), 0)
            wait()
    return found


def test_the_recorder_says_how_long_the_collective_may_take_in_which_a_rank_waits():
    assert on_ranks(2, waits_of)[0] == [("gloo:barrier", 86_400.0), ("gloo:barrier", 20.0)]


def test_where_the_main_thread_is_leaves_out_libraries():
    with ThreadPoolExecutor(1) as pool:
        assert (
            pool.submit(main_thread_is_in)
            .result()
            .startswith("test_where_the_main_thread_is_leaves_out_libraries (")
        )
