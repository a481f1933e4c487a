"""A rank's time is split into phases that add up: its own, its waits for other ranks, and what
interrupts the steps.
"""

import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from ranks import on_ranks
from tiny import Tiny, log, make_run, take_steps

from dist_amp import clock as clocks
from dist_amp.clock import OWN_PHASES, PHASES, STEP_PHASES, PhaseClock
from dist_amp.world import World


class FakeTime:
    """perf_counter that moves only when it is told to."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def at(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr(clocks, "time", fake)
    return fake


def seconds(clock):
    return {phase: value for phase, value in clock.lap().seconds().items() if value}


def test_every_second_belongs_to_one_phase(at):
    clock = PhaseClock()
    at.now = 1.0
    clock.enter("forward")
    at.now = 3.0
    clock.enter("backward")
    at.now = 6.0
    assert seconds(clock) == {"other": 1.0, "forward": 2.0, "backward": 3.0}
    at.now = 10.0
    assert seconds(clock) == {"backward": 4.0}, "the phase goes on after a lap"


def test_a_wait_inside_of_a_phase_is_taken_out_of_it(at):
    clock = PhaseClock()
    clock.enter("backward")
    at.now = 1.0
    with clock.phase("communication"):
        at.now = 5.0
    at.now = 6.0
    assert seconds(clock) == {"backward": 2.0, "communication": 4.0}


def test_all_of_an_evaluation_is_evaluation_whatever_is_entered_in_it(at):
    clock = PhaseClock()
    clock.enter("other")
    with clock.hold("evaluation"):
        at.now = 1.0
        clock.enter("forward")
        at.now = 2.0
        with clock.hold("checkpoint"), clock.phase("data"):
            at.now = 4.0
        at.now = 5.0
    at.now = 7.0
    assert seconds(clock) == {"evaluation": 5.0, "other": 2.0}


def test_a_phase_ends_with_an_error_too(at):
    clock = PhaseClock()
    with pytest.raises(KeyError), clock.hold("evaluation"):
        raise KeyError
    at.now = 1.0
    assert seconds(clock) == {"other": 1.0}


class FakeEvent:
    """A CUDA event: the device reaches it `late` seconds after the host recorded it."""

    at: FakeTime
    reached = float("inf")

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.when = self.at.now

    def query(self):
        return self.when <= FakeEvent.reached

    def elapsed_time(self, end):
        assert end.query(), "reading it would wait for the device"
        return 1000 * (end.when - self.when)


@pytest.fixture
def on_gpu(at, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "at", at, raising=False)
    monkeypatch.setattr(FakeEvent, "reached", float("inf"))
    return PhaseClock(torch.device("cuda"))


def test_on_a_gpu_a_lap_is_read_from_events_once_the_device_has_passed_them(
    on_gpu, at, monkeypatch
):
    monkeypatch.setattr(FakeEvent, "reached", -1.0)
    on_gpu.enter("forward")
    at.now = 2.0
    on_gpu.enter("backward")
    at.now = 5.0
    lap = on_gpu.lap()
    monkeypatch.setattr(FakeEvent, "reached", 5.0)
    assert {phase: value for phase, value in lap.seconds().items() if value} == {
        "forward": 2.0,
        "backward": 3.0,
    }


def test_a_loop_that_never_logs_keeps_a_limited_number_of_events(on_gpu, at):
    for step in range(3 * clocks.MANY_MARKS):
        at.now = float(step)
        on_gpu.enter(("forward", "backward")[step % 2])
    assert len(on_gpu._lap._marks) <= clocks.MANY_MARKS
    assert sum(on_gpu.lap().seconds().values()) == pytest.approx(at.now)


def test_events_that_the_device_has_not_passed_are_never_read(on_gpu, at, monkeypatch):
    monkeypatch.setattr(FakeEvent, "reached", 10.0)
    for step in range(2 * clocks.MANY_MARKS):
        at.now = float(step)
        on_gpu.enter("forward")
    assert sum(on_gpu.so_far().values()) == pytest.approx(10.0)


class SleepsInForward(Tiny):
    """Rank 1 sleeps in each forward."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def loss_sum(self, model, batch):
        time.sleep(0.05 if self.rank == 1 else 0.0)
        return super().loss_sum(model, batch)


def split(world, strategy, accumulation):
    words = (
        "--parallel.strategy",
        strategy,
        "--train.accumulation_steps",
        accumulation,
        "--use_amp",
        "false",
    )
    run = make_run(world, SleepsInForward(world.rank), *words)
    take_steps(run, 2)  # DDP makes its buckets anew
    world.barrier()
    world.clock.lap()
    began = time.perf_counter()
    take_steps(run, 3)
    whole, phases = time.perf_counter() - began, world.clock.lap().seconds()
    log(run)
    return whole, phases


@pytest.mark.parametrize(("strategy", "accumulation"), [("ddp", 2), ("fsdp", 1)])
def test_a_slow_ranks_time_is_its_forward_and_the_other_rank_waits(strategy, accumulation):
    (whole, quick), (_, slow) = on_ranks(2, split, strategy, accumulation)
    slept = 0.05 * 3 * accumulation
    assert sum(quick[phase] for phase in STEP_PHASES) == pytest.approx(whole, rel=0.05)
    assert slow["forward"] >= slept
    # The other rank may sleep through a part of the wait if the machine has no core for it.
    assert quick["communication"] >= 0.6 * slept
    assert sum(quick[phase] for phase in OWN_PHASES) < sum(slow[phase] for phase in OWN_PHASES)


def test_one_process_waits_for_nobody():
    run = make_run(World(), Tiny())
    take_steps(run, 3)
    phases = run.world.clock.lap().seconds()
    assert list(phases) == list(PHASES)
    assert phases["communication"] == 0
    assert all(phases[name] > 0 for name in ("data", "forward", "backward", "optimizer"))


def parameters_of(world, named):
    """Of a small model after two steps, with or without FSDP2's private names."""
    from unittest.mock import patch

    from dist_amp.scaling import hooks

    without = (
        patch.object(hooks, "WAITS", ("renamed",)),
        patch.object(hooks, "ENGINE", None),
    )
    with ExitStack() as patches:
        for one in () if named else without:
            patches.enter_context(one)
        run = make_run(world, Tiny(), "--parallel.strategy", "fsdp", "--use_amp", "false")
        take_steps(run, 2)
    return [p.full_tensor().tolist() for p in run.parallel.parameters]


def test_steps_are_the_same_where_torch_has_other_private_names():
    assert on_ranks(2, parameters_of, False) == on_ranks(2, parameters_of, True)


def waits_of_a_group(on_gpu):
    from dist_amp.scaling import hooks
    from dist_amp.scaling.hooks import WAITS, time_gathers

    group = SimpleNamespace(**dict.fromkeys(WAITS, lambda: None))
    before = dict(vars(group))
    model = SimpleNamespace()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "fsdp_groups", lambda model: [group])
        time_gathers(model, SimpleNamespace(on_gpu=on_gpu))
    return [name for name in WAITS if getattr(group, name) is not before[name]]


def test_on_a_gpu_what_only_queues_a_gather_is_no_wait_and_what_waits_for_a_reduction_is():
    assert waits_of_a_group(on_gpu=False) == [
        "unshard",
        "wait_for_unshard",
        "post_backward",
        "finalize_backward",
    ]
    assert waits_of_a_group(on_gpu=True) == [
        "wait_for_unshard",
        "post_backward",
        "finalize_backward",
    ]


def test_a_failed_device_is_not_asked_for_times(on_gpu, at, monkeypatch):
    def fails(self):
        raise RuntimeError("CUDA error: device-side assert triggered")

    on_gpu.enter("forward")
    monkeypatch.setattr(FakeEvent, "record", fails)
    with pytest.raises(KeyError), on_gpu.phase("backward"):
        raise KeyError("the task's own error stays")
