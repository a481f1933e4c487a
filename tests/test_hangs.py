"""A rank that dies or hangs is named, and every rank ends, whatever its main thread is blocked in."""

import errno
import itertools
import json
import os
import resource
import signal
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from forked import context
from ranks import on_ranks
from test_train import TINY
from tiny import Tiny, make_run, take_steps

from dist_amp.checkpoint import reader
from dist_amp.checkpoint.saver import Saver, save
from dist_amp.diagnostics.profiling import Profile
from dist_amp.errors import ConfigError
from dist_amp.fast import flight_recorder, process_group
from dist_amp.fast.flight_recorder import Entered
from dist_amp.runtime import process
from dist_amp.runtime.process import raise_open_files
from dist_amp.supervise import liveness, verdict, watchdog
from dist_amp.supervise.liveness import Liveness, Process, this_process
from dist_amp.supervise.signals import AgreedStop
from dist_amp.supervise.verdict import Court, Report, judge
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
        # In the shards' group of ranks 2 and 3, rank 2 is behind because it waits for rank 1 elsewhere.
        ([report("runs", step=41), report("runs", ("step", 42), step=42, shards=7), report("runs", ("shards", 8),
          step=42, shards=8)], [1]),
        ([report("runs")], [1]),  # torch records nothing: it is the one whose collective does not time out
    ],
)  # fmt: skip
def test_a_rank_hangs_if_it_waits_nowhere_and_others_are_in_a_collective_that_it_has_not_entered(others, at_fault):
    reports = dict(enumerate([WAITING, *others]))
    assert judge(reports, timed_out=True).at_fault == at_fault
    assert judge(reports, timed_out=False).hanging == [], "after a closed connection, a rank that runs is just busy"


def test_the_line_says_in_which_collective_the_ranks_wait_and_who_is_missing():
    line = judge({0: WAITING, 1: report("runs", step=40), 2: WAITING}, timed_out=True).where
    assert line == "ranks 0, 2 wait in all_reduce 42 of group step; rank 1 has entered 40 of them, in step 8"
    elsewhere = report("runs", ("other", 3), step=41, other=3)
    assert "; rank 1 is in all_reduce 3 of another group" in judge({0: WAITING, 1: elsewhere}, timed_out=True).where
    other = Report("waited", 7, WAITING.groups, Entered("step", 42, "broadcast"))
    assert judge({0: WAITING, 1: WAITING, 2: other}, timed_out=True).where == (
        "ranks 0, 1 wait in all_reduce 42 of group step; rank 2 in broadcast there"
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
    courts = [Court(stores[rank], "test", rank, size) for rank in range(size)]
    here, found = this_process(), {}

    def explain(rank):
        courts[rank].report(WAITING if rank else report("runs", step=41))
        courts[rank].call("timed out")
        found[rank] = courts[rank].verdict(True, [here] * size, 5.0).at_fault

    threads = [threading.Thread(target=explain, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(size), [0])
    # Its key, the report, the event, the judge's turn; then 9 tries, of two requests once the verdict is there.
    assert max(each.requests for each in stores) <= 16


# --- who is alive


def test_a_neighbour_that_is_dead_or_gives_no_sign_is_lost_and_one_that_lives_is_not(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(liveness.time, "monotonic", lambda: now[0])
    store, here = dist.HashStore(), this_process()
    ranks = [Liveness(store, "test", rank, limit_seconds=8.0) for rank in range(3)]
    for each in ranks:
        each.watch([Process(f"host-{rank}", 1, f"machine-{rank}") for rank in range(3)])
    for _ in range(20):
        now[0] += 1.0
        assert [each.lost() for each in ranks] == [None] * 3
    seen = []
    for _ in range(12):  # rank 2 gives no sign from here on
        now[0] += 1.0
        seen.append([each.lost() for each in ranks[:2]])
    assert seen[5] == [None, None]
    assert seen[-1] == [None, 2]
    dead = context.Process(target=time.sleep, args=(0,))
    dead.start()
    dead.join()
    ranks[0].watch([here, Process(here.host, dead.pid, here.machine), here])
    assert ranks[0].lost() == 1
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


def test_a_rank_that_is_blocked_forever_ends_after_a_peers_death_with_the_dead_rank_named(launch, tmp_path):
    (tmp_path / "blocked.py").write_text(BLOCKED.format(fate="os.kill(os.getpid(), signal.SIGKILL)"))
    words = [*TINY, "--task.target", "blocked:Blocked", "--run.timeout_seconds", "12", "--run.dir", "run"]
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
    words = [*TINY, "--task.target", "blocked:Blocked", "--run.timeout_seconds", "6", "--run.dir", "run"]
    first, second = launch.each(2, *words)
    assert [first.returncode, second.returncode] == [1, 1]
    assert "error: rank 1 (process" in first.stderr
    assert "did not take part in a collective in time" in first.stderr
    assert "; rank 0 waits in gloo:all_reduce" in first.stderr
    assert "of them, in step 5 (rank 0 got:" in first.stderr
    assert "error: rank 1 hangs; its stacks:" in second.stderr
    assert "loss_sum" in second.stderr
    for rank in range(2):
        recorded = json.loads((tmp_path / f"run/flight_recorder/rank0000{rank}.json").read_text())
        assert recorded["gloo"]["entries"]
