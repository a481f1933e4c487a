"""A rank that dies or hangs is named, and every rank ends, whatever blocks its main thread."""

import itertools
import json
import os
import pdb  # noqa: T100 (a debugger is what is tested)
import re
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from filelock import _api as filelock_api
from ranks import on_ranks
from test_train import TINY, wait_for
from test_watchdog_guards import watchdog_of
from tiny import Tiny, make_run, save, take_steps

from dist_amp.checkpoint import format as files
from dist_amp.checkpoint import saver
from dist_amp.config.load import load_config
from dist_amp.distributed import flight_recorder, process_group
from dist_amp.supervise import stop as stop_module
from dist_amp.supervise import watchdog
from dist_amp.supervise.rank_reports import (
    Board,
    Entered,
    Group,
    Process,
    Report,
    busy_seconds,
    is_kept_waiting,
    judge,
    main_thread_is_in,
    where_they_wait,
)
from dist_amp.supervise.stop import AgreedStop
from dist_amp.supervise.watchdog import Heartbeat
from dist_amp.train import train
from dist_amp.world import World, locate

# --- who is at fault


def report(state, waits=None, **last):
    """A report of a rank that has entered so many collectives of each group, and waits in one."""
    groups = {name: Group("", {str(number): "all_reduce"}) for name, number in last.items()}
    return Report(state, 7, groups, Entered(*waits, "all_reduce") if waits else None)


WAITING = report("waited", ("step", 42), step=42)


@pytest.mark.parametrize(
    ("others", "at_fault"),
    [
        ([report("runs", step=41)], [1]),
        ([report("runs", ("step", 42), step=42)], []),  # entered later, and waits too
        ([report("runs", step=42)], []),  # in all that the others wait in: it is the network
        ([report("runs", ("step", 42), step=42), None], [2]),
        ([None, report("runs", step=41)], [1, 2]),
        ([report("failed", step=41), None], []),  # it reports its own error
        # In the shards' group of ranks 2 and 3, rank 2 is behind because it waits for rank 1
        # elsewhere.
        (
            [
                report("runs", step=41),
                report("runs", ("step", 42), step=42, shards=7),
                report("runs", ("shards", 8), step=42, shards=8),
            ],
            [1],
        ),
        ([report("runs")], [1]),  # torch records nothing: the one whose collective does not end
    ],
)
def test_a_rank_hangs_if_it_waits_nowhere_and_others_are_in_a_collective_that_it_has_not_entered(
    others, at_fault
):
    reports = dict(enumerate([WAITING, *others]))
    assert judge(reports, timed_out=True).at_fault == at_fault
    # After a closed connection, a rank that runs is just busy.
    assert judge(reports, timed_out=False).hanging == []


# The sender of a gather does not wait: it is in the next collective, or in none.
SENT = {"step": Group("", {"41": "all_reduce", "42": "gather", "43": "all_reduce"})}
PROCESSES = [Process(f"host-{rank // 8}", 100 + rank, "") for rank in range(64)]


@pytest.mark.bad_input("ranks that wait in different collectives")
@pytest.mark.parametrize(
    ("reports", "line"),
    [
        (
            [WAITING, report("runs", step=40), WAITING],
            "waiting in all_reduce 42 of group step: ranks 0, 2 of 3; not arrived (entered 40 of "
            "them), in step 8: rank 1 (process 101 on host-0)",
        ),
        (
            [WAITING, report("runs", ("other", 3), step=41, other=3)],
            "waiting in all_reduce 42 of group step: rank 0 of 2; in all_reduce 3 of group other, "
            "in step 8: rank 1 (process 101 on host-0)",
        ),
        (
            [WAITING, replace(report("runs"), groups=SENT, main_thread_is_in="loss (own.py, l")],
            "waiting in all_reduce 42 of group step: rank 0 of 2; entered gather as number 42, in "
            "step 8, in loss (own.py, l: rank 1 (process 101 on host-0)",
        ),
        # Most wait for rank 4, which waits in another group for rank 0; that waits nowhere.
        (
            [
                report("runs", shards=6),
                *[report("runs", ("shards", 7), shards=7)] * 4,
                *[replace(WAITING, waited_seconds=62.3)] * 59,
            ],
            "waiting 62 s in all_reduce 42 of group step: ranks 5-63 of 64; not arrived (entered "
            "0 of them), in step 8: rank 0 (process 100 on host-0); in all_reduce 7 of group "
            "shards, in step 8: ranks 1-4 (process 101 on host-0, process 102 on host-0, ...)",
        ),
    ],
)
def test_the_line_says_in_which_collective_the_ranks_wait_and_what_the_others_do(reports, line):
    assert where_they_wait(dict(enumerate(reports)), PROCESSES) == line


class CountingStore:
    """The requests to a store, by rank of the thread that makes them."""

    def __init__(self, store):
        self.store, self.requests = store, 0

    def __getattr__(self, name):
        def call(*args):
            self.requests += 1
            return getattr(self.store, name)(*args)

        return call


# --- GPUs


def ended_by_the_thread(world):
    """What the watchdog ends rank 0's process with: NCCL reports a collective that does not end."""
    groups = {"control": world.control, "background": world.background}
    gpu = World(world.rank, 0, 2, 2, torch.device("cuda"), **groups)
    unfinished = {"0": "41"} if world.rank == 0 else {}
    waits_in = None if world.rank else Entered("0", 42, "nccl:_reduce_scatter_base")
    groups = {"0": Group("default_pg", {str(42 - world.rank): "nccl:_reduce_scatter_base"})}
    ended, exits = threading.Event(), []

    def exit(status):
        exits.append(status)
        ended.set()
        raise SystemExit

    def end(error):
        exits.append(str(error))
        return 1

    with (
        patch.object(flight_recorder, "unfinished_on_gpu", lambda: unfinished),
        patch.object(Report, "read", lambda state, *_: Report(state, 1, groups, waits_in)),
        patch.object(watchdog.os, "_exit", exit),
        patch.object(watchdog, "POLL_SECONDS", 0.05),
        patch.object(watchdog.faulthandler, "dump_traceback", lambda **_: exits.append("stacks")),
    ):
        ranks = watchdog_of(gpu, end, seconds=1.0)
        ranks._answer_seconds = 3.0  # on a busy machine a quarter of a second is not enough
        assert ended.wait(60)
        ranks._closed.set()
    world.barrier()
    return exits


def test_a_rank_that_nccl_blocks_ends_by_its_watchdog_and_the_one_that_hangs_shows_its_stacks():
    first, second = on_ranks(2, ended_by_the_thread)
    stacks, *second = second
    assert stacks == "stacks"
    for error, status in (first, second):
        assert status == 1
        assert error.startswith("rank 1 (process")
    assert "; waiting in nccl:_reduce_scatter_base 42 of the default group: rank 0 of 2;" in error


def test_a_collective_that_does_not_end_is_noticed_and_a_busy_gpu_is_not(monkeypatch):
    now, finished = [0.0], itertools.count()
    ranks = watchdog_of(World(device=torch.device("cuda")), seconds=10.0)
    ranks._heartbeat = SimpleNamespace(poll=lambda stall: ("", 0))
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    for unfinished in (lambda: {"0": str(next(finished))}, dict):
        monkeypatch.setattr(flight_recorder, "unfinished_on_gpu", unfinished)
        for _ in range(30):
            now[0] += 1.0
            assert ranks._alarm("") == ""
    monkeypatch.setattr(
        flight_recorder, "unfinished_on_gpu", lambda: {"0": "7", "1": str(next(finished))}
    )
    seen = []
    for _ in range(12):
        now[0] += 1.0
        seen.append(ranks._alarm(""))
    assert seen == [""] * 11 + ["timed out"]


def test_the_nccl_recorders_status_says_which_groups_have_something_unfinished(monkeypatch):
    status = {"0": ("42", "41"), "1": ("7", "7"), "2": ("1", "-1")}
    names = ("last_enqueued_collective", "last_completed_collective")
    groups = {group: dict(zip(names, numbers, strict=True)) for group, numbers in status.items()}
    content = json.dumps({"pg_status": groups}).encode()
    module = torch._C._distributed_c10d
    monkeypatch.setattr(module, "_dump_nccl_trace_json", lambda *_: content, raising=False)
    assert flight_recorder.unfinished_on_gpu() == {"0": "41", "2": "-1"}
    for name in flight_recorder.DUMPS.values():
        monkeypatch.delattr(module, name, raising=False)
    assert (flight_recorder.dump(), flight_recorder.unfinished_on_gpu()) == ({}, {})
    assert Report.read("alive", 7, {}, "").groups == {}


def test_torchs_own_supervision_comes_later_and_the_users_values_stay(monkeypatch):
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    assert flight_recorder.watched_timeout(False, 900.0) == timedelta(seconds=900)
    assert flight_recorder.watched_timeout(True, 900.0) == timedelta(seconds=960)
    assert [os.environ[name] for name in names] == ["2000", "960"]
    assert flight_recorder.watched_timeout(True, 9000.0) == timedelta(seconds=9060)
    assert [os.environ[name] for name in names] == ["2000", "960"]


# --- timeouts, and which thread uses which group


def timeouts(world, strategy):
    """{group's description: seconds} of all groups, after a step."""
    world = locate(make_run(world, Tiny()).config.run)  # with meshes of its own
    run = make_run(world, Tiny(), "--parallel.strategy", strategy, "--parallel.replicas", 1)
    take_steps(run, 1)
    groups = {group for mesh in world._meshes.values() for group in mesh.get_all_groups()}
    groups.add(dist.group.WORLD)
    return {group.group_desc: process_group.timeout_of(group).total_seconds() for group in groups}


def test_every_group_of_a_mesh_has_the_timeout_of_the_default_group():
    for found in on_ranks(2, timeouts, "hsdp"):
        assert len(found) >= 2
        assert set(found.values()) == {30.0}, found  # of ranks.py


def patient_restore(world, folder):
    """The step that is resumed; the control group's timeout while a rank reads, and afterwards."""
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    own = World(world.rank, 0, 2, 2, control=control, background=world.background)
    words = ["--run.dir", folder, "--parallel.strategy", "fsdp", "--checkpoint.every", 1]
    run = make_run(own, Tiny(), *words)
    take_steps(run, 1)
    save(run)
    real, found = files.Reader.read_data, []

    def noted(self, plan, planner):
        found.append(process_group.timeout_of(control).total_seconds())
        return real(self, plan, planner)

    with patch.object(files.Reader, "read_data", noted):
        resumed = make_run(own, Tiny(), *words, "--run.resume", "auto").resumed_from_step
    return resumed, *found, process_group.timeout_of(control).total_seconds()


def test_a_rank_may_read_its_part_of_a_checkpoint_for_longer_than_the_timeout(tmp_path):
    assert on_ranks(2, patient_restore, tmp_path) == [(1, 86_400.0, 30.0)] * 2


def users_of_groups(world, folder):
    """The threads that used the control group in turn, and of each use of the background group."""
    words = "--train.steps 8 --train.micro_batch_size 2 --checkpoint.every 2 --eval.every 4"
    words += " --metrics.log_every 1 --debug.profile 2"
    run = make_run(world, Tiny(), "--run.dir", folder, *words.split())
    before = {entry["record_id"] for entry in flight_recorder.dump()["gloo"]["entries"]}
    with AgreedStop(world) as stop:
        assert train(run, stop) == "completed"
    entries = flight_recorder.dump()["gloo"]["entries"]
    entries = [entry for entry in entries if entry["record_id"] not in before]
    entries.sort(key=lambda entry: entry["time_created_ns"])
    users = []
    for name in (world.control.group_name, world.background.group_name):
        users.append([each["thread_id"] for each in entries if each["process_group"][0] == name])
    control, background = users
    return [thread for thread, _ in itertools.groupby(control)], background


def test_no_two_threads_use_one_group_in_a_run_that_saves_evaluates_and_profiles(tmp_path):
    for control, background in on_ranks(2, users_of_groups, tmp_path):
        assert len(control) == 1, "the main thread's own"
        # A thread per save, which the next one waits for, and whose id may be that of an ended one.
        assert control[0] not in background
        assert len(background) >= 4 * 5, "four saves, of five stages"


# --- the stop flag


def polls(world, seconds, signal_at, rank_that_gets_it):
    """(exchanges, the poll at which each rank stops) by a planted clock."""
    clock, exchanges, real = [0.0], [], dist.all_reduce

    def counted(*args, **kwargs):
        exchanges.append(1)
        return real(*args, **kwargs)

    time_is = patch.object(stop_module.time, "monotonic", lambda: clock[0])
    with time_is, patch.object(dist, "all_reduce", counted):
        stop = AgreedStop(world)
        for number in range(1, 1000):
            # Rank 1's clock says something else: the slowest decides for all.
            clock[0] += seconds * (1.0 if world.rank == 0 else 0.5)
            if number == signal_at and world.rank == rank_that_gets_it:
                stop.requested_by = "SIGTERM"
            if stop.poll():
                break
    return len(exchanges), number


def polls_at_each_pace(world, paces):
    return [polls(world, seconds, signal_at=500, rank_that_gets_it=1) for seconds in paces]


def test_the_ranks_exchange_the_stop_flag_about_once_a_second_and_stop_at_the_same_step():
    most_steps = {0.001: 32, 0.05: 21, 0.4: 3, 3.0: 2}  # of a second, by the seconds of a step
    paces = list(most_steps)
    one, other = on_ranks(2, polls_at_each_pace, paces)
    assert one == other
    for (exchanges, step), most in zip(one, most_steps.values(), strict=True):
        assert 500 < step <= 500 + most + 1  # one step more, since the exchange overlaps it
        # And some at the start, until the pace is known.
        assert exchanges <= 500 / max(most - 1, 1) + 12


# --- while a collective waits: who is missing is said long before the timeout

TASK = """
import os, time
import torch
import torch.distributed as dist
from dist_amp.supervise import watchdog
from tiny import Tiny

watchdog.POLL_SECONDS, watchdog.ANSWER_SECONDS, watchdog.BEAT_SECONDS = 0.1, 0.5, 0.3
watchdog.COMPARED, watchdog.NAMED = 1 / 60, 1 / 40  # of the timeout

def sleep_in_the_forward():  # and raise no error, as a launch while the GPU's queue is full
    while not os.path.exists("go"):
        time.sleep(0.05)

class Task(Tiny):
    taken = 0
    def loss_sum(self, model, batch):
        self.taken += 1
        if self.taken == 5:
            {first} if os.environ["RANK"] == "0" else {second}
        if self.taken == 6 and os.environ["RANK"] == "1":
            {then}
        return super().loss_sum(model, batch)
"""


@pytest.fixture
def start(launch, tmp_path):
    """start(first, second, then, strategy): two ranks of a run, and what they do."""
    started = []

    def run(first="None", second="None", then="None", strategy="ddp", timeout=60):
        (tmp_path / "own.py").write_text(TASK.format(first=first, second=second, then=then))
        words = [*TINY, "--task.target", "own:Task", "--run.timeout_seconds", timeout]
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
    return [line for line in said(process).splitlines() if line.startswith("warning: waiting")][-1]


def stacks(folder, rank):
    path = folder / f"run/stacks/rank{rank:05d}.txt"
    wait_for(lambda: path.exists() and path.read_text().count("\n") > 5, f"rank {rank}'s stacks")
    return path.read_text()


@pytest.mark.bad_input("a rank that dies while another is blocked in a call that never returns")
def test_a_rank_that_is_blocked_forever_ends_after_a_peers_death_with_the_dead_rank_named(
    start, tmp_path
):
    first, second = start("sleep_in_the_forward()", "os.kill(os.getpid(), 9)", timeout=12)
    assert [first.wait(300), second.wait(300)] == [1, -signal.SIGKILL], said(first)
    assert "error: rank 1 (process" in said(first)
    assert "died without an error: it was killed" in said(first)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["stopped_by"], summary["exit_code"]) == ("failed", 1)
    assert "rank 1 (process" in summary["cause"]


@pytest.mark.bad_input("a rank that hangs")
def test_a_hanging_rank_is_named_with_the_collective_that_it_has_not_entered(start, tmp_path):
    ranks = start(second="sleep_in_the_forward()", timeout=6)
    assert [rank.wait(300) for rank in ranks] == [1, 1]
    first, second = map(said, ranks)
    assert "error: rank 1 (process" not in first, "one of them reports"
    assert "error: rank 1 (process" in second
    assert "did not take part in a collective in time" in second
    # With the seconds, if the other rank still waited when it was asked.
    assert re.search(r"; waiting (\d+ s )?in gloo:all_reduce", second), second
    assert "in step 5, in sleep_in_the_forward (own.py, line " in second
    assert "error: rank 1 hangs; its stacks:" in second
    for rank in range(2):
        path = tmp_path / f"run/flight_recorder/rank0000{rank}.json"
        assert json.loads(path.read_text())["gloo"]["entries"]


@pytest.mark.bad_input("a rank that keeps the others waiting in a collective")
@pytest.mark.bad_input("a rank that is stopped (SIGSTOP)")
def test_a_rank_that_sleeps_or_is_stopped_is_named_and_the_run_continues_when_it_does(
    start, tmp_path
):
    first, second = start(second="sleep_in_the_forward()", then="os.kill(os.getpid(), 19)")
    line = named(first)
    assert line.startswith("warning: waiting "), line
    assert ": rank 0 of 2; not arrived (entered " in line
    assert f": rank 1 (process {second.pid} on " in line
    assert "in step 5, in sleep_in_the_forward (own.py, line " in line
    assert "; stacks of all ranks in run/stacks; the run ends if this lasts for run.tim" in line
    assert "in sleep_in_the_forward" in stacks(tmp_path, 1)
    assert "in train_step" in stacks(tmp_path, 0)
    assert line.removeprefix("warning: ") in stacks(tmp_path, 1)
    (tmp_path / "go").touch()
    line = named(first, times=2)
    assert "the ranks continue: they had waited " in said(first)
    assert f"; stopped (SIGSTOP): rank 1 (process {second.pid} on " in line
    os.kill(second.pid, signal.SIGCONT)
    assert [process.wait(300) for process in (first, second)] == [0, 0]
    assert said(first).count("warning: waiting") == 2
    assert "warning: waiting" not in said(second), "one line for all ranks"


ONES = "torch.ones(4)"


@pytest.mark.bad_input("a rank that calls another collective than the others, or skips one")
@pytest.mark.parametrize(
    ("first", "second", "waits", "instead", "strategy"),
    [
        # The sender of a gather does not wait: it is in the next collectives of the step.
        pytest.param(
            f"dist.all_reduce({ONES})",
            f"dist.gather({ONES}, dst=0)",
            *("all_reduce", "gather", "fsdp"),
            marks=pytest.mark.slow,
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
    assert f" s in gloo:{waits} " in line, line
    assert f": rank 1 (process {ranks[1].pid} on " in line
    assert f" entered gloo:{instead}" in line
    assert ", in step 5, in " in line
    assert all("train_step" in stacks(tmp_path, rank) for rank in range(2))


# --- by a clock, and reports that are planted


class Job:
    """Ranks in one process that poll once a second, in a run whose collectives may take 300 s."""

    def __init__(self, monkeypatch, folder, size):
        self.now = 1000.0
        self.started = [0.0] * size  # when each rank's collective was started; 0: it waits in none
        self.reports = [report("alive", step=41)] * size
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: self.now))
        store = dist.HashStore()
        self.stores = [CountingStore(store) for _ in range(size)]
        self.boards = [Board(each, rank, size) for rank, each in enumerate(self.stores)]
        config = load_config([], environ={})
        processes = [Process(f"host-{n}", 1, f"machine-{n}") for n in range(size)]
        common = {"config": config, "folder": folder, "steps_taken": 5}
        self.jobs = [SimpleNamespace(world=World(n, 0, size), **common) for n in range(size)]
        self.ranks = [
            Heartbeat(self.jobs[n], self.boards[n], processes, partial(self.report, n))
            for n in range(size)
        ]

    def next_step(self):
        for job in self.jobs:
            job.steps_taken += 1

    def report(self, rank):
        waited = self.now - self.started[rank] if self.started[rank] else 0.0
        return replace(self.reports[rank], waited_seconds=waited)

    def wait_in(self, ranks, timeout_seconds=300.0, number=42, operation="all_reduce"):
        last = Entered("step", number, operation)
        groups = {"step": Group("", {str(number): operation})}
        waiting = Report("alive", 7, groups, last, timeout_seconds=timeout_seconds)
        for rank in ranks:
            self.reports[rank] = waiting
            self.started[rank] = self.now

    def continue_at(self, number):
        size = len(self.ranks)
        self.reports = [report("alive", step=number)] * size
        self.started = [0.0] * size

    def seconds(self, count, silent=()):
        """Poll once a second; notes each rank that is lost, by the one that misses it."""
        self.lost = {}
        for _ in range(count):
            self.now += 1.0
            for rank, (each, board) in enumerate(zip(self.ranks, self.boards, strict=True)):
                if rank not in silent:
                    event, lost = each.poll(board.store.get("stall").decode())
                    if event:
                        self.lost[rank] = (event, lost)


@pytest.fixture
def job(monkeypatch, tmp_path):
    def make(size=4):
        made = Job(monkeypatch, tmp_path, size)
        made.seconds(6)
        made.next_step()  # beyond the process's first step
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
    assert line.startswith("warning: waiting 6")
    assert "ranks 0-1, 3 of 4; not arrived (entered 41 of them), in step 8: rank 2 (proc" in line
    assert sorted(path.name for path in (tmp_path / "stacks").iterdir()) == [
        f"rank0000{rank}.txt" for rank in range(4)
    ]
    ranks.seconds(100)
    assert capfd.readouterr().err == ""
    ranks.continue_at(42)
    ranks.next_step()
    ranks.seconds(30)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("the ranks continue: they had waited 18")
    ranks.wait_in([1, 2], number=43)
    ranks.seconds(80)
    assert "in all_reduce 43 of group step: ranks 1-2 of 4; not " in capfd.readouterr().err


def test_ranks_in_two_collectives_of_one_number_are_named_as_soon_as_they_compare(job, capfd):
    ranks = job()
    ranks.wait_in([0, 1, 3])
    ranks.wait_in([2], operation="broadcast")
    ranks.seconds(30)
    assert "; entered broadcast as number 42, in step 8" in capfd.readouterr().err


@pytest.mark.parametrize("silent", [0, 2])
def test_a_rank_that_does_not_answer_is_named_by_another_one(job, capfd, silent):
    ranks = job()
    ranks.wait_in(set(range(4)) - {silent})
    ranks.seconds(90, silent=[silent])
    (line,) = capfd.readouterr().err.splitlines()
    assert f"; no answer: rank {silent} (process 1 on host-{silent}); stacks of all ranks" in line


def test_a_neighbour_that_is_dead_or_gives_no_sign_is_lost_and_one_that_lives_is_not(job):
    ranks = job(3)
    lost = []
    for _ in range(250):  # 240 s without a sign
        ranks.seconds(1, silent=[2])
        lost.append(ranks.lost)
    assert not any(lost[:230])
    assert {1: ("silent", 2)} in lost[230:]
    assert not any(0 in each for each in lost)
    dead = subprocess.Popen(["true"])
    dead.wait()
    here = Process.this()
    first = ranks.ranks[0]
    first._processes[1] = Process(here.host, dead.pid, here.machine)
    first._same_machine = [1]
    assert first.poll("") == ("lost", 1)
    # Another container on the same host has a process table of its own.
    assert not Process(here.host, dead.pid, "another table").is_dead


def planted_work(monkeypatch, works):
    """A rank uses so much of a processor, between any two polls; the others wait for it."""
    clock = itertools.count(0.0, 1.0 if works else 0.0)
    monkeypatch.setattr(watchdog, "busy_seconds", lambda: next(clock))


def test_a_rank_that_works_for_long_where_it_may_is_named_and_nothing_ends(job, capfd, monkeypatch):
    planted_work(monkeypatch, works=True)
    ranks = job()
    ranks.wait_in([1, 2, 3], timeout_seconds=86_400.0)
    for _ in range(100):
        ranks.seconds(10)
        assert ranks.lost == {}
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: waiting 6")
    said = "; the run ends if a missing rank does nothing for run.timeout_seconds=300"
    assert line.endswith(said), line


@pytest.mark.parametrize(("size", "is_kept"), [(4, False), (1, False), (1, True)])
def test_a_rank_that_does_nothing_hangs_after_the_timeout_unless_a_person_or_a_lock_keeps_it(
    job, monkeypatch, size, is_kept
):
    planted_work(monkeypatch, works=False)
    monkeypatch.setattr(watchdog, "is_kept_waiting", lambda: is_kept)
    ranks = job(size)
    ranks.wait_in(range(1, size), timeout_seconds=86_400.0)
    hangs = []
    for second in range(320):
        ranks.seconds(1)
        hangs += [(second, lost) for lost in ranks.lost.values()]
    if is_kept:
        assert hangs == []
    else:
        second, (event, rank) = hangs[0]
        assert (event, rank) == ("timed out" if size > 1 else "idle", 0)
        assert (299 if size > 1 else 285) <= second <= 310, "the timeout, and two beats"


def test_a_debugger_and_the_lock_of_a_file_keep_a_rank_waiting(tmp_path):
    def ask(*_):
        with ThreadPoolExecutor(1) as pool:
            asked.append(pool.submit(is_kept_waiting).result())
        return "continue\n"

    asked = []
    ask()
    pdb.Pdb(stdin=SimpleNamespace(readline=ask), stdout=StringIO(), nosigint=True).set_trace()
    sleeps = patch.object(filelock_api.time, "sleep", ask)
    with FileLock(tmp_path / "lock"), sleeps, suppress(Timeout):
        FileLock(tmp_path / "lock", is_singleton=False).acquire(timeout=0.1, poll_interval=0)
    assert asked[0] is False
    assert len(asked) > 2
    assert all(asked[1:])


def test_every_thread_but_the_watchdogs_and_torchs_own_counts_as_work():
    def work_until(seconds):
        while time.thread_time() < seconds:
            sum(range(1000))

    def work():
        # A thread begins with the name of the one that starts it, which torchrun's main() in an
        # earlier test of this process made torch's.
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("work")
        work_until(0.2)
        worked.set()
        done.wait()

    worked, done = threading.Event(), threading.Event()
    before = busy_seconds()
    work_until(time.thread_time() + 0.2)  # the thread that asks, as the watchdog's
    own = busy_seconds() - before
    worker = threading.Thread(target=work)
    worker.start()
    assert worked.wait(60)
    another = busy_seconds() - before - own
    done.set()
    worker.join()
    assert another > 10 * max(own, 0.001)


def the_first_step_compiles(ranks):
    for each in ranks.ranks:
        each._has_stepped = False
    ranks.wait_in([1, 2, 3])
    ranks.seconds(140)


def every_rank_has_entered_it_as_a_gpu_computes_for_long(ranks):
    ranks.wait_in([0, 1, 2, 3])
    ranks.seconds(290)


def nobody_is_in_a_collective_as_in_an_evaluation(ranks):
    ranks.seconds(1000)


def short_ones_in_turn(ranks):
    for number in range(42, 62):
        ranks.wait_in([0, 1, 3], number=number)
        ranks.seconds(25)
        ranks.continue_at(number)
        ranks.seconds(1)


@pytest.mark.parametrize(
    "wait",
    [
        the_first_step_compiles,
        short_ones_in_turn,
        every_rank_has_entered_it_as_a_gpu_computes_for_long,
        nobody_is_in_a_collective_as_in_an_evaluation,
    ],
)
def test_nothing_is_said_of_a_long_wait_that_is_legal(job, capfd, tmp_path, wait):
    wait(job())
    assert capfd.readouterr().err == ""
    assert not (tmp_path / "stacks").exists()


def test_a_stall_costs_each_rank_few_requests_whatever_the_number_of_ranks(job, capfd):
    size = 64
    ranks = job(size)
    before = [each.requests for each in ranks.stores]
    ranks.wait_in(range(1, size))
    ranks.seconds(100)
    assert "; not arrived (entered " in capfd.readouterr().err
    beats = 100 // 5
    # A beat: a report and the neighbour's; one rank reads all of them, and says what it found.
    requests = [each.requests - old for each, old in zip(ranks.stores, before, strict=True)]
    assert max(requests) <= 100 + 4 * beats


def entry(number, operation="nccl:all_reduce", group="0", done=False, age=0.0, **more):
    """A collective as both recorders of torch describe it."""
    fields = {"collective_seq_id": number, "profiling_name": operation, "is_p2p": False}
    fields |= {"process_group": [group, "default_pg"], "timeout_ms": 360_000}
    fields |= {"retired": done, "state": "completed" if done else "started"}
    return {**fields, "time_created_ns": time.time_ns() - int(age * 1e9), **more}


def test_of_a_recorders_entries_the_first_unfinished_one_is_where_a_rank_waits(monkeypatch):
    """Under NCCL the host has started later ones, too."""
    old = [entry(number, done=True, age=100 - number) for number in range(1, 41)]
    sent = entry(7, "nccl:send", age=55, is_p2p=True)
    new = [entry(41, age=50), entry(42, "nccl:broadcast", age=40)]
    written = entry(3, "gloo:gather", group="5", age=60)
    entries = {"nccl": {"entries": [*old, sent, *new]}, "gloo": {"entries": [written]}}
    found = Report.read("alive", 7, entries, "5")
    assert found.waits_in == Entered("0", 41, "nccl:all_reduce")
    assert (round(found.waited_seconds), found.timeout_seconds) == (50, 360.0)
    assert [*found.groups] == ["0"]
    assert [*found.groups["0"].recent] == [str(number) for number in range(35, 43)]
    unknown = entry(1, age=50)
    del unknown["timeout_ms"]  # of another release: it is never too late
    found = Report.read("alive", 7, {"nccl": {"entries": [unknown]}}, "")
    assert found.timeout_seconds == float("inf")
    found = Report.read("waited", 7, {"nccl": {"entries": old}}, "")
    assert found.waits_in == Entered("0", 40, "nccl:all_reduce"), "after a failure all are finished"


def progress_now():
    return Report.read("alive", 7, flight_recorder.dump(), "")


def waits_during_a_save(world, folder):
    """Where the watchdog sees rank 0's main thread while its writer waits for rank 1's."""
    run = make_run(world, Tiny(), "--run.dir", folder, "--checkpoint.every", 1)
    take_steps(run, 1)
    real, found = saver.write, []

    def later(*args, **options):
        time.sleep(1.0 * world.rank)
        real(*args, **options)

    ranks = watchdog_of(world)
    ranks._job.run = run
    with patch.object(saver, "write", later), saver.Saver(run) as saving:
        saving.save(wait=False)
        if world.rank == 0:
            wait_for(lambda: progress_now().waits_in is not None, "the writer's wait", 60)
            now = progress_now().waits_in
            is_writer = now is None or now.group == run.world.background.group_name
            found = [is_writer, ranks._report("alive").waits_in]
    ranks.__exit__()
    return found


def test_a_checkpoint_that_takes_one_rank_long_is_not_taken_for_a_wait_of_the_others(tmp_path):
    assert on_ranks(2, waits_during_a_save, tmp_path)[0] == [True, None]


def test_where_the_main_thread_is_leaves_out_libraries():
    with ThreadPoolExecutor(1) as pool:
        place = pool.submit(main_thread_is_in).result()
    assert place.startswith("test_where_the_main_thread_is_leaves_out_libraries (")
