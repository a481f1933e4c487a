"""Core as test_guards.py tests it, with watchdog."""

import os
import platform
import time

import pytest
from ranks import on_ranks

from dist_amp.config.load import load_config
from dist_amp.supervise import watchdog
from dist_amp.supervise.lifecycle import Job
from dist_amp.supervise.rank_reports import Process
from dist_amp.supervise.watchdog import Watchdog
from dist_amp.world import World


def watchdog_of(world, end=None, seconds=300.0):
    config = load_config(["--run.timeout_seconds", str(seconds)], environ={})
    job = Job(config, world)
    return Watchdog(job, end)


def what_ranks_say(world, of_rank_1, error):
    """What rank 0 reports of a failed collective, if rank 1 failed by itself, waited too, or is
    silent.
    """
    watchdog.ANSWER_SECONDS = 1.0 if of_rank_1 == "silent" else 100.0
    ranks = watchdog_of(world)
    if of_rank_1 != "silent" or world.rank == 0:  # else as if the whole process were stopped
        ranks.start()
    world.barrier()
    report = None
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
        ("waited", TIMED_OUT, TIMED_OUT),
        ("silent", CLOSED, "rank 1 (process {pid} on {host}) died without an error"),
    ],
)
def test_a_failed_collective_names_the_rank_that_does_not_answer_unless_another_failed_by_itself(
    of_rank_1, error, said
):
    pid = on_ranks(2, process_of)[1]
    report = on_ranks(2, what_ranks_say, of_rank_1, error)[0]
    assert report.startswith(said.format(pid=pid, host=platform.node()))


@pytest.mark.bad_input("a machine that loses the network during training")
def test_a_rank_whose_store_does_not_answer_names_rank_0_and_what_may_be_wrong(monkeypatch):
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(Watchdog, "_judge", lambda *args: time.sleep(3600))
    for name, value in {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"}.items():
        monkeypatch.setenv(name, value)
    ranks = watchdog_of(World())
    ranks._job.world, ranks._rank = World(rank=1, world_size=2), 1
    ranks._processes = [Process("host-a", 7, "host-a"), Process("host-b", 8, "host-b")]
    cause = "[gloo/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation"
    error = ranks.explain(RuntimeError(cause))
    assert str(error).startswith(
        "rank 0 (process 7 on host-a) and the store on its machine at 10.0.0.1:29400 do not "
        "answer: it is stopped, its machine is down, or the network to it is (rank 1 (process 8 on "
        "host-b) got: [gloo/unbound_buffer.cc"
    )


def process_of(world):
    return os.getpid()
