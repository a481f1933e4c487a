"""How the block of an agreed stop ends while the ranks still exchange their flags."""

import time
from contextlib import suppress

from ranks import on_ranks

from dist_amp.supervise.stop import AgreedStop
from dist_amp.world import World


def test_a_wish_that_is_being_exchanged_when_training_ends_counts():
    with AgreedStop(World()) as stop:
        stop.end("a callback")
        stop.poll()
        assert not stop.agreed
    assert stop.agreed
    assert stop.by_task


def rank_0_fails_first(world, failed):
    """Whether rank 0 left, with an error, an exchange that rank 1 had not joined yet."""
    if world.is_main:
        with suppress(ValueError), AgreedStop(world) as stop:
            stop.poll()
            raise ValueError
        failed.touch()
        return True
    deadline = time.monotonic() + 20
    while not failed.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    left_alone = failed.exists()
    with AgreedStop(world) as stop:
        stop.poll()
    return left_alone


def test_a_rank_that_fails_does_not_wait_for_ranks_that_have_not_joined_its_exchange(tmp_path):
    left = on_ranks(2, rank_0_fails_first, tmp_path / "failed", timeout_seconds=60)
    assert left == [True, True]
