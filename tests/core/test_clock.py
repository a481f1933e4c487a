"""A rank's time is split into phases that add up: its work, its waits, and interruptions."""

import time
import warnings
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import needs
from ranks import on_ranks
from tiny import Tiny, make_run, take_steps, variant

from dist_amp import clock as clocks
from dist_amp.clock import OWN_PHASES, PHASES, STEP_PHASES, PhaseClock
from dist_amp.world import World


@pytest.fixture
def at(monkeypatch):
    """The time, which moves only when `at.now` is set."""
    fake = SimpleNamespace(now=0.0, reached=float("inf"), perf_counter=lambda: fake.now)
    monkeypatch.setattr(clocks, "time", fake)
    return fake


def seconds(lap):
    return {phase: value for phase, value in lap.seconds().items() if value}


def test_every_second_belongs_to_one_phase_and_all_of_an_evaluation_to_it_until_its_error(at):
    clock = PhaseClock()
    at.now = 1.0
    clock.enter("forward")
    at.now = 3.0
    with clock.phase("communication"):
        at.now = 5.0
    with suppress(KeyError), clock.hold("evaluation"):
        clock.enter("backward")
        at.now = 6.0
        with clock.hold("checkpoint"), clock.phase("data"):
            at.now = 9.0
        at.now = 13.0
        raise KeyError
    at.now = 14.0
    lap = seconds(clock.lap())
    assert lap == {"other": 1.0, "forward": 3.0, "communication": 2.0, "evaluation": 8.0}
    at.now = 18.0
    assert seconds(clock.lap()) == {"forward": 4.0}, "the phase goes on after a lap"


@pytest.fixture
def on_gpu(at, monkeypatch):
    """A clock of CUDA events, of which the device has passed those up to `at.reached`."""

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            if at.now < 0:
                raise RuntimeError("CUDA error: device-side assert triggered")
            self.when = at.now

        def query(self):
            return self.when <= at.reached

        def elapsed_time(self, end):
            assert end.query(), "reading it would wait for the device"
            return 1000 * (end.when - self.when)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return PhaseClock(torch.device("cuda"))


def test_on_a_gpu_a_lap_is_read_from_events_once_the_device_has_passed_them(on_gpu, at):
    at.reached = -1.0
    on_gpu.enter("forward")
    at.now = 2.0
    on_gpu.enter("backward")
    at.now = 5.0
    lap = on_gpu.lap()
    at.reached = 5.0
    assert seconds(lap) == {"forward": 2.0, "backward": 3.0}


def test_a_loop_that_never_logs_keeps_few_events_and_never_waits_for_the_device(on_gpu, at):
    for at.reached, last in ((10.0, 2), (float("inf"), 4)):
        while at.now < last * clocks.MANY_MARKS:
            at.now += 1.0
            on_gpu.enter(("forward", "backward")[int(at.now) % 2])
        kept = len(on_gpu._lap._marks)
        assert sum(on_gpu.so_far().values()) == pytest.approx(min(at.reached, at.now))
    assert kept <= clocks.MANY_MARKS


def test_a_failed_device_is_not_asked_for_times(on_gpu, at):
    at.now = -1.0
    with pytest.raises(KeyError), on_gpu.phase("backward"):
        raise KeyError("the task's own error stays")


def split(world, strategy, accumulation):
    words = ("--parallel.strategy", strategy, "--train.accumulation_steps", accumulation)

    def loss_sum(model, batch):
        time.sleep(0.05 * world.rank)
        return Tiny().loss_sum(model, batch)

    run = make_run(world, variant(loss_sum=loss_sum), *words, "--use_amp", "false")
    take_steps(run, 2)  # DDP makes its buckets anew
    world.barrier()
    world.clock.lap()
    began = time.perf_counter()
    take_steps(run, 3)
    return time.perf_counter() - began, world.clock.lap().seconds()


@pytest.mark.parametrize(
    ("strategy", "accumulation"),
    [("ddp", 2), pytest.param("fsdp", 1, marks=needs("scaling.hooks"))],
)
def test_a_slow_ranks_time_is_its_forward_and_the_other_rank_waits(strategy, accumulation):
    (whole, quick), (_, slow) = on_ranks(2, split, strategy, accumulation)
    slept = 0.05 * 3 * accumulation
    assert sum(quick[phase] for phase in STEP_PHASES) == pytest.approx(whole, rel=0.05)
    assert slow["forward"] >= slept
    # The other rank may sleep through a part of the wait if the machine has no core for it.
    assert quick["communication"] >= 0.6 * slept
    assert sum(quick[phase] for phase in OWN_PHASES) < sum(slow[phase] for phase in OWN_PHASES)


def waited_in_each_call(world):
    """Seconds of communication in each of World's collectives; rank 0 comes late to all."""
    row = torch.ones(1)
    calls = [world.barrier, partial(world.from_main, 1), partial(world.gather, 1)]
    calls += [partial(world.stack, row), partial(world.sum, row)]
    waits = []
    for call in calls:
        world.barrier()
        world.clock.lap()
        if world.is_main:
            time.sleep(0.05)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call()
        waits.append(world.clock.lap().seconds()["communication"])
    return waits


def test_a_wait_in_any_collective_is_communication_and_none_warns():
    _, waits = on_ranks(2, waited_in_each_call)
    assert min(waits) > 0.03, waits


def test_one_process_waits_for_nobody_and_reading_a_dataset_is_counted_as_data():
    def build_dataset(split):
        time.sleep(0.02)
        return Tiny().build_dataset(split)

    run = make_run(World(), variant(build_dataset=build_dataset))
    assert run.world.clock.so_far()["data"] >= 0.02
    take_steps(run, 3)
    phases = run.world.clock.lap().seconds()
    assert list(phases) == list(PHASES)
    assert phases["communication"] == 0
    assert all(phases[name] > 0 for name in ("data", "forward", "backward", "optimizer"))
