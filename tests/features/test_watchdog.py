"""A rank that dies or hangs is named, and every rank ends, whatever blocks its main thread."""

import os
import pdb  # noqa: T100 (a debugger is what is tested)
import platform
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from filelock import _api as filelock_api
from ranks import on_ranks
from test_train import wait_for
from tiny import Tiny, make_run, take_steps

from dist_amp.config.load import load_config
from dist_amp.distributed import process_group
from dist_amp.supervise import rank_reports, watchdog
from dist_amp.supervise import stop as stop_module
from dist_amp.supervise.lifecycle import Job
from dist_amp.supervise.rank_reports import (
    Entered,
    Heartbeat,
    Process,
    busy_seconds,
    is_kept_waiting,
    ranks_that_hang,
    recorded_collectives,
    summary_of_waits,
)
from dist_amp.supervise.stop import AgreedStop
from dist_amp.supervise.watchdog import Watchdog
from dist_amp.train import train
from dist_amp.world import World, locate

# --- who is at fault


def beat(state, waits=None, waited_seconds=0.0, **last):
    """A rank that has entered so many collectives of each group, and waits in one."""
    entered = {name: {number: "all_reduce"} for name, number in last.items()}
    waits_in = Entered(waits[0], waits[0], waits[1], "all_reduce") if waits else None
    return Heartbeat(0.0, 7, state, entered, waits_in, waited_seconds)


WAITING = beat("waited", ("step", 42), step=42)


@pytest.mark.parametrize(
    ("others", "hanging"),
    [
        ([beat("runs", step=41)], [1]),
        ([beat("runs", ("step", 42), step=42)], []),  # entered later, and waits too
        ([beat("runs", step=42)], []),  # in all that the others wait in: it is the network
        ([None, beat("runs", step=41)], [2]),
        ([beat("left", step=41)], []),
        # In the shards' group of ranks 2 and 3, rank 2 is behind because it waits for rank 1
        # elsewhere.
        (
            [
                beat("runs", step=41),
                beat("runs", ("step", 42), step=42, shards=7),
                beat("runs", ("shards", 8), step=42, shards=8),
            ],
            [1],
        ),
    ],
)
def test_a_rank_hangs_if_it_waits_nowhere_and_others_are_in_a_collective_that_it_has_not_entered(
    others, hanging
):
    assert ranks_that_hang(dict(enumerate([WAITING, *others]))) == hanging


PROCESSES = [Process(f"host-{rank // 8}", 100 + rank, "") for rank in range(64)]


@pytest.mark.bad_input("ranks that wait in different collectives")
def test_the_line_says_in_which_collective_most_ranks_wait_and_first_for_whom_all_do():
    # Most wait for rank 4, which waits in another group for rank 0; that waits nowhere.
    waiting_for_0 = [beat("runs", ("shards", 7), shards=7)] * 4
    waiting_for_4 = [beat("waited", ("step", 42), 62.3, step=42)] * 59
    beats = [beat("runs", shards=6), *waiting_for_0, *waiting_for_4]
    assert summary_of_waits(dict(enumerate(beats)), PROCESSES) == (
        "waiting 62 s in all_reduce 42 of group step: rank 5, 6, 7 and 56 more of 64; not "
        "arrived (entered 0 of them), in step 8: rank 0 (process 100 on host-0); in all_reduce "
        "7 of group shards, in step 8: rank 1 (process 101 on host-0), 2 (process 102 on "
        "host-0), 3 (process 103 on host-0) and 1 more"
    )


# --- what each rank says of a collective that fails


def watchdog_of(world, seconds=300.0):
    config = load_config(["--run.timeout_seconds", str(seconds)], environ={})
    return Watchdog(Job(config, world), end=None)


def what_ranks_say(world, of_rank_1, error):
    """What rank 0 reports of a failed collective, if rank 1 failed by itself, waited too, or is
    silent; and rank 1's process.
    """
    ranks = watchdog_of(world, seconds=4.0 if of_rank_1 == "silent" else 300.0)
    report = os.getpid()
    with patch.object(watchdog, "POLL_SECONDS", 0.1):
        if of_rank_1 != "silent" or world.rank == 0:  # else as if the whole process were stopped
            ranks.start()
        world.barrier()
        if world.rank == 0:
            report = str(ranks.explain(RuntimeError(error)))
        elif of_rank_1 != "silent":
            ranks.explain(RuntimeError(error) if of_rank_1 == "waited" else ValueError("its own"))
            ranks.leave()
            ranks.close()
        world.barrier()
    return report


CLOSED, TIMED_OUT = "[gloo] Connection closed by peer", "[gloo] Timed out waiting 5000ms"


@pytest.mark.bad_input("a rank that is killed, without restarts")
@pytest.mark.parametrize(
    ("of_rank_1", "error", "said"),
    [
        ("failed", CLOSED, CLOSED),
        ("waited", TIMED_OUT, "waiting in gloo:"),
        ("silent", CLOSED, "rank 1 (process {pid} on {host}) gave no sign of life: it is stopped "),
    ],
)
def test_a_failed_collective_names_the_rank_that_does_not_answer_unless_another_failed_by_itself(
    of_rank_1, error, said
):
    report, pid = on_ranks(2, what_ranks_say, of_rank_1, error)
    assert report.startswith(said.format(pid=pid, host=platform.node()))


@pytest.mark.bad_input("a machine that loses the network during training")
def test_a_rank_whose_store_does_not_answer_names_rank_0_and_what_may_be_wrong(monkeypatch):
    monkeypatch.setattr(Watchdog, "_judge_failure", lambda *args: time.sleep(3600))
    for name, value in {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"}.items():
        monkeypatch.setenv(name, value)
    ranks = watchdog_of(World(), seconds=0.4)
    ranks._rank, ranks._processes = 1, PROCESSES[:2]
    text = str(ranks.explain(RuntimeError(TIMED_OUT)))
    assert text.startswith(
        "rank 0 (process 100 on host-0) and the store on its machine at 10.0.0.1:29400 do not "
        "answer: it, its launcher or its machine has stopped, or the network is down "
    )
    assert text.endswith(f" (rank 1 (process 101 on host-0) got: {TIMED_OUT})")


# --- what torch records, and its timeouts


def entry(number, operation="all_reduce", group="0", done=False, **more):
    """A collective as both recorders of torch describe it."""
    fields = {"collective_seq_id": number, "profiling_name": operation, "is_p2p": False}
    fields |= {"process_group": [group, "default_pg"], "timeout_ms": 360_000}
    fields |= {"retired": done, "state": "completed" if done else "started"}
    return {**fields, "time_created_ns": number, **more}


def test_torchs_own_supervision_comes_later_and_the_users_values_stay(monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    monkeypatch.setenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "")  # so that it is put back
    monkeypatch.delenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    assert process_group.watched_timeout(900.0) == timedelta(seconds=960)
    assert os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "1020"
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7"


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


def users_of_groups(world, folder):
    """The threads that use the control group, and the background group."""
    words = "--train.steps 8 --train.micro_batch_size 2 --checkpoint.every 2 --eval.every 4"
    words += " --metrics.log_every 1 --debug.profile 2"
    before = {each["record_id"] for each in recorded_collectives()}
    with AgreedStop(world) as stop:
        train(make_run(world, Tiny(), "--run.dir", folder, *words.split()), stop)
    entries = [each for each in recorded_collectives() if each["record_id"] not in before]
    entries = [(each["process_group"][0], each["thread_id"]) for each in entries]
    groups = (world.control.group_name, world.background.group_name)
    return [{thread for group, thread in entries if group == name} for name in groups]


def test_no_two_threads_use_one_group_in_a_run_that_saves_evaluates_and_profiles(tmp_path):
    for control, background in on_ranks(2, users_of_groups, tmp_path):
        assert len(control) == 1, "the main thread's own"
        assert background - control == background != set()


# --- the stop flag


def polls(world, seconds, signal_at):
    """(exchanges, the poll at which a rank stops) if a step takes so many seconds of a clock."""
    clock = [0.0]
    with (
        patch.object(stop_module.time, "monotonic", lambda: clock[0]),
        patch.object(dist, "all_reduce", Mock(side_effect=dist.all_reduce)) as reduces,
    ):
        stop = AgreedStop(world)
        for number in range(1, 1000):
            # Rank 1's clock says something else: the slowest decides for all.
            clock[0] += seconds * (1.0 if world.rank == 0 else 0.5)
            if number == signal_at and world.rank == 1:
                stop.requested_by = "SIGTERM"
            if stop.poll():
                break
    return reduces.call_count, number


@pytest.mark.parametrize(("seconds", "most"), [(0.001, 32), (0.05, 21), (0.4, 3), (3.0, 2)])
def test_the_ranks_exchange_the_stop_flag_about_once_a_second_and_stop_at_the_same_step(
    seconds, most
):
    first, second = on_ranks(2, polls, seconds, 500)
    assert first == second
    exchanges, step = first
    assert 500 < step <= 500 + most + 1  # one step more, since the exchange overlaps it
    assert exchanges <= 500 / max(most - 1, 1) + 12  # some at the start, until the pace is known


# --- by a clock, and records that are planted: who is missing is said long before the timeout


class PlantedRanks:
    """Ranks in one process that poll once a second, in a run whose collectives may take 300 s."""

    def __init__(self, monkeypatch, size):
        self.now = 1000.0
        self.recorded = [[entry(41, done=True)] for _ in range(size)]
        self.polled = 0
        clock = SimpleNamespace(monotonic=lambda: self.now, time_ns=lambda: int(self.now * 1e9))
        monkeypatch.setattr(watchdog, "time", clock)
        monkeypatch.setattr(
            rank_reports, "recorded_collectives", lambda: self.recorded[self.polled]
        )
        monkeypatch.setattr(watchdog, "busy_seconds", lambda: self.busy(self.polled))
        store = dist.HashStore()
        monkeypatch.setattr(dist, "HashStore", lambda: store)  # one for the ranks of this process
        config = load_config([], environ={})
        self.processes = [Process(f"host-{n}", 1, f"machine-{n}") for n in range(size)]
        self.jobs, self.ranks = [], []
        for rank in range(size):
            world = SimpleNamespace(rank=rank, world_size=size, barrier=int)
            world.background = SimpleNamespace(group_name="saves")
            world.from_main, world.gather = lambda _: "run", lambda _: list(self.processes)
            self.jobs.append(SimpleNamespace(world=world, config=config, steps_taken=5))
            self.ranks.append(Watchdog(self.jobs[-1], end=None))

    def busy(self, rank):
        """Processor seconds of a rank: all work, until a test says otherwise."""
        return self.now

    def wait_in(self, ranks, number=42, operation="all_reduce", **more):
        for rank in ranks:
            self.recorded[rank] = [entry(number, operation, timeout_ms=300_000) | more]

    def take_step(self, number):
        """All have ended the collective of this number."""
        self.recorded = [[entry(number, done=True)] for _ in self.ranks]
        for job in self.jobs:
            job.steps_taken += 1

    def seconds(self, count, silent=()):
        """Poll once a second; the first verdict's silent and hanging ranks, and its text."""
        for _ in range(count):
            self.now += 1.0
            for rank, each in enumerate(self.ranks):
                self.polled = rank
                if rank not in silent and (verdict := each._poll()):
                    return verdict
        return None


LONG_MS = 86_400_000  # the timeout of a group whose slowest rank takes as long as it takes


@pytest.fixture
def job(monkeypatch):
    def make(size=4):
        made = PlantedRanks(monkeypatch, size)
        made.seconds(6)
        made.take_step(41)
        made.seconds(6)
        return made

    return make


@pytest.mark.bad_input("a rank that keeps the others waiting in a collective")
def test_a_missing_rank_is_named_after_a_fifth_of_the_timeout_once_per_collective(job, capfd):
    ranks = job()
    ranks.wait_in([1, 3])
    ranks.recorded[0] = [entry(42, done=True)]  # it has sent what the others wait for
    ranks.seconds(59)
    assert capfd.readouterr().err == ""
    ranks.seconds(20)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: waiting 6")
    assert "rank 1, 3 of 4; not arrived (entered 41 of them), in step 7" in line
    assert ": rank 2 (process 1 on host-2); the run ends if this lasts for run.timeout_sec" in line
    ranks.seconds(100)
    ranks.take_step(42)
    ranks.seconds(30)
    assert capfd.readouterr().err == ""
    ranks.wait_in([1, 2], number=43, operation="nccl:_reduce_scatter_base")
    ranks.seconds(80)
    where = "s in nccl:_reduce_scatter_base 43 of the default group: rank 1, 2 of 4; not arrived"
    assert where in capfd.readouterr().err
    silent, hanging, text = ranks.seconds(230)
    assert (silent, hanging) == ([], [0, 3])
    fault = "3 (process 1 on host-3) did not take part in a collective in time: it hangs; waiting 3"
    assert text.startswith(f"rank 0 (process 1 on host-0), {fault}")
    assert where in text


@pytest.mark.bad_input("a rank that calls another collective than the others, or skips one")
def test_ranks_in_different_collectives_are_named_in_one_line_for_all(job, capfd):
    ranks = job(2)
    ranks.wait_in([0], operation="gloo:barrier")
    ranks.wait_in([1], operation="gloo:all_reduce")
    ranks.seconds(80)
    (line,) = capfd.readouterr().err.splitlines()
    assert " s in gloo:barrier 42 of the default group: rank 0 of 2; " in line
    assert "; entered gloo:all_reduce as number 42, in step 7, in " in line
    assert ": rank 1 (process 1 on host-1); the run ends if this lasts" in line


@pytest.mark.bad_input("a rank that is stopped (SIGSTOP)")
def test_a_stopped_process_is_named_as_such():
    with subprocess.Popen(["sleep", "60"]) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        process = Process(platform.node(), stopped.pid, Process.this().machine)
        wait_for(lambda: process.state == "T", "the stop")
        line = summary_of_waits({0: WAITING, 1: None}, [Process.this(), process])
        stopped.kill()
    assert line.endswith(f"; stopped (SIGSTOP): rank 1 ({process})")


def test_a_rank_that_gives_no_sign_is_named_and_after_four_fifths_of_the_timeout_ends_the_run(
    job, capfd
):
    ranks = job(3)
    ranks.wait_in([0, 1])
    assert ranks.seconds(230, silent=[2]) is None
    (line,) = capfd.readouterr().err.splitlines()
    assert "; no answer: rank 2 (process 1 on host-2); the run ends" in line
    silent, hanging, text = ranks.seconds(20, silent=[2])  # 240 s without a sign
    assert (silent, hanging) == ([2], [])
    assert text.startswith("rank 2 (process 1 on host-2) gave no sign of life: it is stopped or ")


def test_a_dead_process_is_noticed_at_once(job):
    ranks = job(3)
    dead = subprocess.Popen(["true"])
    dead.wait()
    here = Process.this()
    # Another container on the same host has a process table of its own.
    assert not Process(here.host, dead.pid, "another table").is_dead
    for each in ranks.ranks:
        each._processes[:] = [here, Process(here.host, dead.pid, here.machine), here]
    silent, hanging, text = ranks.seconds(1, silent=[1])
    assert (silent, hanging) == ([1], [])
    assert text.startswith(f"rank 1 (process {dead.pid} on {here.host}) died without an error")


def test_a_rank_that_was_stopped_itself_gives_the_others_time(job):
    ranks = job(3)
    ranks.wait_in(range(3))
    ranks.seconds(10)
    ranks.now += 1000
    assert ranks.seconds(200) is None


@pytest.mark.parametrize(
    ("size", "waiting", "is_idle", "is_kept", "names"),
    [
        (4, [1, 2, 3], True, False, "0 (process 1 on host-0)"),
        (4, [2, 3], True, False, "0 (process 1 on host-0), 1 (process 1 on host-1)"),
        (1, [], True, False, "0 (process 1 on host-0)"),
        (4, [1, 2, 3], False, False, ""),
        (1, [], True, True, ""),
    ],
)
def test_a_rank_that_does_nothing_hangs_after_the_timeout_but_one_that_works_or_is_kept_does_not(
    job, monkeypatch, capfd, size, waiting, is_idle, is_kept, names
):
    monkeypatch.setattr(watchdog, "is_kept_waiting", lambda: is_kept)
    ranks = job(size)
    ranks.busy = lambda rank: 0.0 if is_idle else ranks.now
    ranks.wait_in(waiting, timeout_ms=LONG_MS)
    assert ranks.seconds(285) is None
    said = "; the run ends if a missing rank does nothing for run.timeout_seconds=300\n"
    assert capfd.readouterr().err.endswith(said if waiting else "")
    verdict = ranks.seconds(30)  # the timeout, and two heartbeats
    if names:
        silent, hanging, text = verdict
        assert (silent, len(hanging)) == ([], names.count("host"))
        assert f"rank {names} hangs: it has used no CPU time for run.timeout_seconds=300" in text
    else:
        assert verdict is None


def test_a_collective_that_does_not_end_is_noticed_and_a_busy_gpu_is_not(job):
    ranks = job(2)
    for number in range(42, 60):  # the host is far ahead of the GPU
        ranks.recorded = [[entry(number), entry(number + 1)]] * 2
        assert ranks.seconds(20) is None
    assert ranks.seconds(270) is None
    silent, hanging, text = ranks.seconds(40)
    assert (silent, hanging) == ([], [])
    assert text.startswith("waiting 30")


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
        return busy_seconds()

    def work():
        # A thread begins with the name of the one that starts it, which torchrun's main() in an
        # earlier test of this process made torch's.
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("work")
        work_until(0.2)

    before = busy_seconds()
    own = work_until(time.thread_time() + 0.2) - before  # the thread that asks, as the watchdog's
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
        another = busy_seconds() - before - own
    assert another > 10 * max(own, 0.001)


@pytest.mark.parametrize(
    ("waits", "group", "seconds", "times"),
    [
        ([0, 1, 3], "0", 25, 10),  # short ones in turn
        ([0, 1, 2, 3], "0", 290, 1),  # every rank has entered it, as a GPU computes for long
        ([], "0", 400, 1),  # nobody is in a collective, as in an evaluation
        ([0, 1, 3], "saves", 400, 1),  # threads wait for one that takes long to write
    ],
)
def test_nothing_is_said_of_a_long_wait_that_is_legal(job, capfd, waits, group, seconds, times):
    ranks = job()
    for number in range(42, 42 + times):
        ranks.wait_in(waits, number, process_group=[group, ""])
        assert ranks.seconds(seconds) is None
        if times > 1:
            ranks.take_step(number)
            ranks.seconds(1)
    assert capfd.readouterr().err == ""


def read(recorded, monkeypatch, state="runs", leave_out=""):
    monkeypatch.setattr(rank_reports, "recorded_collectives", lambda: recorded)
    found = Heartbeat(0.0, state=state)
    found.read(leave_out)
    return found


def test_of_a_recorders_entries_the_first_unfinished_one_is_where_a_rank_waits(monkeypatch):
    """Under NCCL the host has started later ones, too."""
    old = [entry(number, done=True) for number in range(1, 41)]
    sent = entry(7, "nccl:send", is_p2p=True)
    new = [entry(42, "nccl:broadcast"), entry(41)]
    written = entry(3, "gloo:gather", group="5")
    found = read([*old, sent, *new, written], monkeypatch, leave_out="5")
    assert found.waits_in == Entered("0", "default_pg", 41, "all_reduce")
    assert not found.may_wait_long
    assert {group: [*recent] for group, recent in found.entered.items()} == {"0": [*range(35, 43)]}
    found = read(old, monkeypatch, state="waited")
    assert found.waits_in.number == 40, "after a failure all are finished"


def test_with_another_torch_less_is_recorded_and_nothing_is_too_late(monkeypatch):
    unknown = entry(1)
    del unknown["timeout_ms"]
    assert read([unknown], monkeypatch).may_wait_long
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        monkeypatch.delattr(torch._C._distributed_c10d, name, raising=False)
    assert recorded_collectives() == []
