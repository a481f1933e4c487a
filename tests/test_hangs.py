"""A rank that dies or hangs is named, and every rank ends, whatever its main thread is blocked in."""

import itertools
import json
import os
import re
import resource
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from forked import context
from ranks import on_ranks
from test_train import TINY
from tiny import Tiny, make_run, take_steps

from dist_amp.checkpoint import reader, saver
from dist_amp.checkpoint.saver import save
from dist_amp.config.load import load_config
from dist_amp.distributed import flight_recorder, process_group
from dist_amp.distributed.flight_recorder import Entered
from dist_amp.distributed.rendezvous import raise_open_files
from dist_amp.errors import ConfigError
from dist_amp.supervise import watchdog
from dist_amp.supervise.rank_reports import (
    Board,
    Process,
    Report,
    common_verdict,
    judge,
    where_they_wait,
)
from dist_amp.supervise.stop import AgreedStop
from dist_amp.train import train
from dist_amp.world import World, locate

# --- who is at fault


def report(state, waits=None, **last):
    """A report of a rank that has entered so many collectives of each group, and waits in one."""
    groups = {name: ("", [], Entered(name, number, "all_reduce")) for name, number in last.items()}
    return Report(state, 7, groups, Entered(*waits, "all_reduce") if waits else None)


WAITING = report("waited", ("step", 42), step=42)


@pytest.mark.parametrize(
    ("others", "at_fault"),
    [
        ([report("runs", step=41)], [1]),
        ([report("runs", ("step", 42), step=42)], []),  # entered later, and waits too
        ([report("runs", step=42)], []),  # has entered all that the others wait in: it is the network
        ([report("runs", ("step", 42), step=42), None], [2]),
        ([None, report("runs", step=41)], [1, 2]),
        ([report("failed", step=41), None], []),  # it reports its own error
        # In the shards' group of ranks 2 and 3, rank 2 is behind because it waits for rank 1
        # elsewhere.
        ([report("runs", step=41), report("runs", ("step", 42), step=42, shards=7), report("runs", ("shards", 8),
          step=42, shards=8)], [1]),
        ([report("runs")], [1]),  # torch records nothing: it is the one whose collective does not time out
    ],
)  # fmt: skip
def test_a_rank_hangs_if_it_waits_nowhere_and_others_are_in_a_collective_that_it_has_not_entered(
    others, at_fault
):
    reports = dict(enumerate([WAITING, *others]))
    assert judge(reports, timed_out=True).at_fault == at_fault
    assert judge(reports, timed_out=False).hanging == [], (
        "after a closed connection, a rank that runs is just busy"
    )


@pytest.mark.bad_input("ranks that wait in different collectives")
def test_the_line_says_in_which_collective_the_ranks_wait_and_who_is_missing():
    line = judge({0: WAITING, 1: report("runs", step=40), 2: WAITING}, timed_out=True).where
    assert line == (
        "ranks 0, 2 of 3 wait in all_reduce 42 of group step; rank 1 has not arrived (entered 40 "
        "of them), in step 8"
    )
    elsewhere = report("runs", ("other", 3), step=41, other=3)
    line = judge({0: WAITING, 1: elsewhere}, timed_out=True).where
    assert line.endswith("; rank 1 is in all_reduce 3 of group other, in step 8")
    other = Report("waited", 7, WAITING.groups, Entered("step", 42, "broadcast"))
    assert judge({0: WAITING, 1: WAITING, 2: other}, timed_out=True).where == (
        "ranks 0, 1 of 3 wait in all_reduce 42 of group step; rank 2 entered broadcast as number "
        "42 instead, and is in step 8"
    )


def test_a_rank_that_has_left_another_collective_in_place_of_the_others_is_named_with_both():
    """The sender of a gather does not wait: it is in the next collective, or in none, while the
    others wait.
    """
    waiting, left = replace(WAITING, state="runs"), report("runs", step=43)
    left = replace(
        left,
        recent={"step": {"41": "all_reduce", "42": "gather"}},
        main_thread_is_in="loss (own.py, line 3)",
    )
    assert judge({0: waiting, 1: left}, timed_out=True).where == (
        "rank 0 of 2 waits in all_reduce 42 of group step; rank 1 entered gather as number 42 "
        "instead, and is in step 8, in loss (own.py, line 3)"
    )


def test_of_many_ranks_those_that_do_the_same_are_named_together_and_the_one_that_keeps_them_waiting_is_among_them():
    processes = [
        Process(f"host-{rank // 8}", 100 + rank, f"machine-{rank // 8}") for rank in range(64)
    ]
    reports = {rank: WAITING if rank < 56 else None for rank in range(64)}
    assert where_they_wait(reports, processes) == (
        "ranks 0-55 of 64 wait in all_reduce 42 of group step; ranks 56-63 (process 156 on host-7, "
        "process 157 on host-7, ...) do not answer"
    )
    # 60 ranks wait in a group of their own for rank 4, which waits in another one for rank 0; that
    # waits nowhere.
    own = {"step": ("", [*range(4, 64)], Entered("step", 42, "all_reduce"))}
    reports = {rank: replace(report("runs", ("step", 42)), groups=own) for rank in range(5, 64)}
    reports |= {rank: report("runs", ("shards", 7), shards=7) for rank in range(1, 5)} | {
        0: report("runs", shards=6)
    }
    assert where_they_wait(reports) == (
        "ranks 1-4 of 64 wait in all_reduce 7 of group shards; rank 0 has not arrived (entered 6 "
        "of them), in step 8; ranks 5-63 are in all_reduce 42 of group step, in step 8"
    )


def test_a_report_survives_the_store():
    assert Report.from_text(WAITING.to_text()) == WAITING


class CountingStore:
    """The requests to a store, by rank of the thread that makes them."""

    def __init__(self, store):
        self.store, self.requests = store, 0

    def __getattr__(self, name):
        def call(*args):
            self.requests += 1
            return getattr(self.store, name)(*args)

        return call


@pytest.mark.parametrize("size", [4, 64])
def test_explaining_a_failure_asks_the_store_equally_often_for_4_and_for_64_ranks(size):
    store = dist.HashStore()
    stores = [CountingStore(store) for _ in range(size)]
    boards = [Board(stores[rank], rank, size) for rank in range(size)]
    here, found = Process.this(), {}

    def explain(rank):
        boards[rank].report(WAITING if rank else report("runs", step=41))
        stores[rank].compare_set("event", "", "timed out")
        found[rank] = common_verdict(boards[rank], True, [here] * size, 5.0).at_fault

    threads = [threading.Thread(target=explain, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [*found.values()] == [[0]] * size
    # Its key, the report, the event, its turn to read; then 9 tries, of two requests once the
    # verdict is there.
    assert max(each.requests for each in stores) <= 16


# --- who is alive


def heartbeats(store, processes, folder=None, timeout_seconds=10.0, report=None):
    """The heartbeat of each rank, all of them in this process."""
    size = len(processes)
    config = load_config(["--run.timeout_seconds", str(timeout_seconds)], environ={})
    beats = []
    for rank in range(size):
        job = SimpleNamespace(
            config=config, world=World(rank, 0, size), folder=folder, steps_taken=5
        )
        board = Board(store, rank, size)
        beats.append(watchdog.Heartbeat(job, board, processes, report or (lambda: WAITING)))
    return beats


def test_a_neighbour_that_is_dead_or_gives_no_sign_is_lost_and_one_that_lives_is_not(monkeypatch):
    dead = context.Process(target=time.sleep, args=(0,))
    dead.start()
    dead.join()
    now = [0.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    here = Process.this()
    elsewhere = [Process(f"host-{rank}", 1, f"machine-{rank}") for rank in range(3)]
    ranks = heartbeats(dist.HashStore(), elsewhere)  # lost after 8 s
    for _ in range(20):
        now[0] += 1.0
        assert [each.poll("") for each in ranks] == [None] * 3
    seen = []
    for _ in range(12):  # rank 2 gives no sign from here on
        now[0] += 1.0
        seen.append([each.poll("") for each in ranks[:2]])
    assert seen[5] == [None, None]
    assert seen[-1] == [None, 2]
    dead_neighbour = [here, Process(here.host, dead.pid, here.machine), here]
    assert heartbeats(dist.HashStore(), dead_neighbour)[0].poll("") == 1
    # Another container on the same host has a process table of its own.
    assert not Process(here.host, dead.pid, "another table").is_dead


# --- in real runs

BLOCKED = """
import os, signal, time
from tiny import Tiny

class Blocked(Tiny):
    taken = 0
    def loss_sum(self, model, batch):
        Blocked.taken += 1
        if Blocked.taken == 5:
            if os.environ["RANK"] == "1":
                {fate}
            while True:  # as in a launch while the GPU's queue is full: no error ever comes
                time.sleep(3600)
        return super().loss_sum(model, batch)
"""


@pytest.mark.bad_input("a rank that dies while another is blocked in a call that never returns")
def test_a_rank_that_is_blocked_forever_ends_after_a_peers_death_with_the_dead_rank_named(
    launch, tmp_path
):
    (tmp_path / "blocked.py").write_text(
        BLOCKED.format(fate="os.kill(os.getpid(), signal.SIGKILL)")
    )
    words = [
        *TINY,
        "--task.target",
        "blocked:Blocked",
        "--run.timeout_seconds",
        "12",
        "--run.dir",
        "run",
    ]
    first, second = launch.each(2, *words)
    assert second.returncode == -signal.SIGKILL
    assert first.returncode == 1, first.stderr
    assert "error: rank 1 (process" in first.stderr
    assert "died without an error: it was killed" in first.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["stopped_by"], summary["exit_code"]) == ("failed", 1)
    assert "rank 1 (process" in summary["cause"]


def test_a_hanging_rank_is_named_with_the_collective_that_it_has_not_entered_and_both_dumps_are_written(
    launch, tmp_path
):
    (tmp_path / "blocked.py").write_text(
        BLOCKED.replace("while True", 'while os.environ["RANK"] == "1"').format(fate="pass")
    )
    words = [
        *TINY,
        "--task.target",
        "blocked:Blocked",
        "--run.timeout_seconds",
        "6",
        "--run.dir",
        "run",
    ]
    first, second = launch.each(2, *words)
    assert [first.returncode, second.returncode] == [1, 1]
    assert "error: rank 1 (process" in first.stderr
    assert "did not take part in a collective in time" in first.stderr
    assert "; rank 0 of 2 waits in gloo:all_reduce" in first.stderr
    assert re.search(
        r"in step 5, in loss_sum .blocked.py, line \d+.(; stacks of all ranks in run/stacks)? .rank 0 got:",
        first.stderr,
    )
    assert "error: rank 1 hangs; its stacks:" in second.stderr
    assert "loss_sum" in second.stderr
    for rank in range(2):
        recorded = json.loads((tmp_path / f"run/flight_recorder/rank0000{rank}.json").read_text())
        assert recorded["gloo"]["entries"]


def ended_by_the_thread(world, monkeypatch_seconds):
    """What the watchdog of rank 0 ends its process with while NCCL reports a collective that does
    not end.
    """
    from test_guards import watchdog_of

    job_world = World(
        world.rank,
        0,
        2,
        2,
        torch.device("cuda"),
        control=world.control,
        background=world.background,
    )
    ended, exits = threading.Event(), []

    def exit(status):
        exits.append(status)
        ended.set()
        raise SystemExit

    def end(error):
        exits.append(str(error))
        return 1

    patches = [
        patch.object(
            flight_recorder, "unfinished_on_gpu", lambda: {"0": "41"} if world.rank == 0 else {}
        ),
        patch.object(watchdog, "abort_process_groups", lambda: exits.append("aborted")),
        patch.object(watchdog.os, "_exit", exit),
        patch.object(watchdog, "POLL_SECONDS", 0.05),
        patch.object(watchdog.faulthandler, "dump_traceback", lambda **_: exits.append("stacks")),
        patch.object(
            flight_recorder, "progress", lambda recorded, leave_out: progress_of(world.rank)
        ),
    ]
    for each in patches:
        each.start()
    try:
        ranks = watchdog_of(job_world, end, seconds=monkeypatch_seconds)
        ranks._answer_seconds = 3.0  # on a busy machine a quarter of a second is not enough
        assert ended.wait(60)
        ranks._closed.set()
    finally:
        for each in patches:
            each.stop()
    world.barrier()
    return exits


def progress_of(rank):
    last = Entered("0", 42 - rank, "nccl:_reduce_scatter_base")
    return flight_recorder.Progress({"0": ("default_pg", [], last)}, None if rank else last, last)


def test_a_rank_that_nccl_blocks_ends_by_its_watchdog_and_the_one_that_hangs_shows_its_stacks():
    first, second = on_ranks(2, ended_by_the_thread, 1.0)
    assert second == ["stacks", 1]
    aborted, error, status = first
    assert (aborted, status) == ("aborted", 1)
    assert error.startswith("rank 1 (process")
    assert (
        "; rank 0 of 2 waits in nccl:_reduce_scatter_base 42 of the default group; rank 1 has not "
        "arrived" in error
    )


def test_a_collective_that_does_not_end_is_noticed_and_a_busy_gpu_is_not(monkeypatch):
    from test_guards import watchdog_of

    now, finished = [0.0], itertools.count()
    ranks = watchdog_of(World(device=torch.device("cuda")), seconds=10.0)
    ranks._heartbeat = SimpleNamespace(poll=lambda stall: None)
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
    content = {"pg_status": {
        group: {"last_enqueued_collective": enqueued, "last_completed_collective": completed}
        for group, (enqueued, completed) in status.items()
    }}  # fmt: skip
    module = torch._C._distributed_c10d
    monkeypatch.setattr(
        module, "_dump_nccl_trace_json", lambda *_: json.dumps(content).encode(), raising=False
    )
    assert flight_recorder.unfinished_on_gpu() == {"0": "41", "2": "-1"}
    for name in flight_recorder.DUMPS.values():
        monkeypatch.delattr(module, name, raising=False)
    assert (flight_recorder.dump(), flight_recorder.unfinished_on_gpu()) == ({}, {})
    assert flight_recorder.progress({}, set()) == flight_recorder.Progress({}, None, None)


def test_what_is_set_for_torchs_own_supervision_comes_later_and_leaves_the_users_values(
    monkeypatch,
):
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    assert process_group.collective_timeout(False, 900.0) == timedelta(seconds=900)
    assert process_group.collective_timeout(True, 900.0) == timedelta(seconds=960)
    assert [os.environ[name] for name in names] == ["2000", "960"]
    assert process_group.collective_timeout(True, 9000.0) == timedelta(seconds=9060)
    assert [os.environ[name] for name in names] == ["2000", "960"]


# --- timeouts, and which thread uses which group


def timeouts(world, strategy):
    """{group's description: seconds} of all groups, after a step."""
    world = locate(make_run(world, Tiny()).config.run)  # with meshes of its own
    run = make_run(world, Tiny(), "--parallel.strategy", strategy, "--parallel.replicas", 1)
    take_steps(run, 1)
    groups = {g for mesh in world._meshes.values() for g in mesh.get_all_groups()} | {
        dist.group.WORLD
    }
    return {group.group_desc: process_group.timeout_of(group).total_seconds() for group in groups}


def test_every_group_of_a_mesh_has_the_timeout_of_the_default_group():
    for found in on_ranks(2, timeouts, "hsdp"):
        assert len(found) >= 2
        assert set(found.values()) == {30.0}, found  # of ranks.py


def slow_barrier(world):
    """Whether rank 0 bears with rank 1 in wait_long for longer than its timeout, and has the
    timeout afterwards.
    """
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
    world = World(world.rank, 0, 2, 2, control=control)
    if world.rank == 1:
        time.sleep(2)
    world.wait_long()
    return process_group.timeout_of(control).total_seconds()


def test_a_long_wait_outlasts_the_timeout_and_leaves_it_as_it_was():
    assert on_ranks(2, slow_barrier) == [1.0, 1.0]


def patient_restore(world, folder):
    """The step that is resumed, and the control group's timeout in seconds while a rank reads, and
    afterwards.
    """
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    own = World(world.rank, 0, 2, 2, control=control, background=world.background)
    words = ["--run.dir", folder, "--parallel.strategy", "fsdp", "--checkpoint.every", 1]
    run = make_run(own, Tiny(), *words)
    take_steps(run, 1)
    save(run)
    real, found = reader.Reader.read_data, []

    def noted(self, plan, planner):
        found.append(process_group.timeout_of(control).total_seconds())
        return real(self, plan, planner)

    with patch.object(reader.Reader, "read_data", noted):
        resumed = make_run(own, Tiny(), *words, "--run.resume", "auto").resumed_from_step
    return resumed, *found, process_group.timeout_of(control).total_seconds()


def test_a_rank_may_read_its_part_of_a_checkpoint_for_longer_than_the_timeout(tmp_path):
    """What a lifted timeout does is the test above; a timeout of a second here would fail on a busy
    machine.
    """
    assert on_ranks(2, patient_restore, tmp_path) == [(1, 86_400.0, 30.0)] * 2


def users_of_groups(world, folder):
    """The threads that used the control and the background group in turn, in a run that saves,
    evaluates, profiles.
    """
    often = [
        "--checkpoint.every",
        3,
        "--eval.every",
        8,
        "--metrics.log_every",
        1,
        "--debug.profile",
        2,
    ]
    run = make_run(
        world,
        Tiny(),
        "--run.dir",
        folder,
        "--train.steps",
        24,
        "--train.micro_batch_size",
        2,
        *often,
    )
    before = {entry["record_id"] for entry in flight_recorder.dump()["gloo"]["entries"]}
    with AgreedStop(world) as stop:
        assert train(run, stop) == "completed"
    entries = sorted(
        flight_recorder.dump()["gloo"]["entries"], key=lambda entry: entry["time_created_ns"]
    )
    entries = [entry for entry in entries if entry["record_id"] not in before]
    return [
        [
            thread
            for thread, _ in itertools.groupby(
                e["thread_id"] for e in entries if e["process_group"][0] == name
            )
        ]
        for name in (world.control.group_name, world.background.group_name)
    ]


def test_no_two_threads_use_one_group_in_a_run_that_saves_evaluates_and_profiles(tmp_path):
    for control, background in on_ranks(2, users_of_groups, tmp_path):
        assert len(control) == 1, "the main thread's own"
        # A thread per save, which the next one waits for; the last save is the main thread's.
        assert background[-1] == control[0]
        assert control[0] not in background[:-1]
        assert len(background) > 1


def wait_during_a_save(world, folder):
    """A long wait of the main threads while a checkpoint is being written, which rank 1's thread
    starts later.
    """
    run = make_run(world, Tiny(), "--run.dir", folder, "--checkpoint.every", 1)
    take_steps(run, 1)
    real = saver.write

    def later(*args):
        time.sleep(0.3 * world.rank)
        real(*args)

    with patch.object(saver, "write", later), saver.Saver(run) as saving:
        saving.save(wait=False)
        time.sleep(0.3 * (1 - world.rank))
        world.wait_long()
    return saver.checkpoint_folder(folder, 1).exists()


def test_a_long_wait_while_a_checkpoint_is_written_is_no_deadlock(tmp_path):
    assert on_ranks(2, wait_during_a_save, tmp_path, timeout_seconds=60) == [True, True]


def refusal(pipe, ranks):
    """What is said under a limit of 1,024, and the limit afterwards; in a process of its own, which
    can't undo it.
    """
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))
    said = ""
    try:
        raise_open_files(ranks)
    except ConfigError as error:
        said = str(error)
    pipe.send((said, resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


@pytest.mark.bad_input("a hard limit of open files below what so many ranks need")
@pytest.mark.parametrize(("ranks", "refused"), [(64, False), (275, False), (1024, True)])
def test_a_limit_of_open_files_is_raised_and_refused_where_so_many_ranks_need_more(ranks, refused):
    here, there = context.Pipe()
    child = context.Process(target=refusal, args=(there, ranks))
    child.start()
    said, limit = here.recv()
    child.join()
    assert limit == 1024
    text = "1024 ranks need 3069 sockets and 200 other open files per process, and the limit is 1024; raise it: ulimit "
    text += (
        "-Hn 3269 before the launch, LimitNOFILE= of the service, docker run --ulimit nofile=3269"
    )
    assert said == (text if refused else "")


# --- the stop flag


def polls(world, seconds, signal_at, rank_that_gets_it):
    """(exchanges, the poll at which each rank stops) where a step takes `seconds` by a clock that
    is planted.
    """
    from dist_amp.supervise import stop as stop_module

    clock, exchanges, real = [0.0], [], dist.all_reduce

    def counted(*args, **kwargs):
        exchanges.append(1)
        return real(*args, **kwargs)

    with (
        patch.object(stop_module.time, "monotonic", lambda: clock[0]),
        patch.object(dist, "all_reduce", counted),
    ):
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


def polls_with_evaluation(world):
    """The polls of an evaluation, of steps before it, at which the flags were exchanged."""
    stop = AgreedStop(world)
    for _ in range(200):
        stop.poll()
    interval = stop._interval
    stop.poll("evaluation")
    return interval, stop._exchange is not None


def test_an_evaluation_exchanges_at_its_first_poll_because_its_pace_is_another():
    for interval, exchanged in on_ranks(2, polls_with_evaluation):
        assert interval > 1
        assert exchanged
