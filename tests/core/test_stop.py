"""How soon ranks agree to stop, and how the block ends while they still exchange their flags."""

import signal
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
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


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("dist_amp.supervise.stop.time.monotonic", lambda: clock.now)
    return clock


def steps_until_agreed(clock, step_seconds, steps_before):
    step = 0
    with AgreedStop(World()) as stop:
        while not stop.agreed:
            if step == steps_before:
                stop.end("a callback")
            stop.poll()
            step += 1
            clock.now += step_seconds
    return step - 1 - steps_before


@pytest.mark.parametrize(("step_seconds", "most"), [(5.0, 1), (0.25, 4), (0.001, 32)])
def test_a_stop_is_agreed_on_within_a_second_of_steps_and_32_steps(clock, step_seconds, most):
    waits = {steps_until_agreed(clock, step_seconds, 100 + offset) for offset in range(most)}
    assert waits == {*range(1, most + 1)}


def test_a_second_ctrl_c_stops_at_once_and_one_that_the_launcher_forwards_does_not(clock):
    with AgreedStop(World()) as stop:
        for clock.now in (100.0, 101.9):
            signal.raise_signal(signal.SIGINT)
        assert stop.requested_by == "SIGINT"
        clock.now = 102.1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_rank_that_is_ended_because_another_failed_prints_nothing_after_its_error(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"{tmp_path}/0/error.json")
    (tmp_path / "1").mkdir()
    for has_failed in (False, True):
        if has_failed:
            (tmp_path / "1/error.json").write_text("{}")
        with AgreedStop(World()):
            signal.raise_signal(signal.SIGTERM)
        assert ("SIGTERM: stopping" in capfd.readouterr().err) != has_failed
