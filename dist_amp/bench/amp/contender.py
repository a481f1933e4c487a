"""One precision of an experiment, ready to be looked at: what it learns, and the loops that are timed."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dist_amp.bench.amp.recipes import BY_HAND, RECIPES, set_scaler
from dist_amp.bench.loops import Loop, Setup, bare
from dist_amp.run import Run, build_run
from dist_amp.runtime.process import set_tf32
from dist_amp.runtime.random_state import seed_all
from dist_amp.settings import Config
from dist_amp.step import train_step
from dist_amp.world import World

MOST_SKIPS = 20  # in a row; a scale of 2^16 is below 1 by then
LEAST_STEPS = 10  # of a curve


class NoTime(Exception):
    """The bench's minutes are over."""


class SharedTask:
    """A task that all precisions share: its datasets are built once; and a mean loss, as the loop by hand wants it."""

    def __init__(self, task: Any):
        self._task = task
        self.build_dataset = cache(task.build_dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def loss(self, model: nn.Module, batch: Any, reduction: str) -> Tensor:
        return self._task.loss_sum(model, batch) / self._task.weight(batch)


@dataclass
class Contender:
    """run: None for the loop by hand. held_before: bytes on the device before it came."""

    training: Loop
    run: Run | None
    held_before: int
    tf32: bool
    seconds: dict[str, float] = field(default_factory=dict)  # per step, roughly, by mode

    @property
    def inference(self) -> Loop:
        """Forward and loss as an evaluation takes them: without dropout, and without a graph for backward."""
        run = self.run
        assert run is not None

        def prepare() -> None:
            set_tf32(self.tf32)
            run.parallel.module.eval()

        def step(micro_batches: Sequence[Any]) -> None:
            for batch in micro_batches:
                with torch.no_grad(), run.precision.autocast():
                    run.task.loss_sum(run.model, batch)

        return Loop(run.parallel.module, step, prepare)


def build(name: str, config: Config, task: SharedTask, world: World) -> Contender:
    held = torch.cuda.memory_allocated(world.device) if world.device.type == "cuda" else 0
    tf32 = config.precision.tf32
    if name in BY_HAND:
        loop, run = bare(Setup(config, world, task)), None
    else:
        run = build_run(config, world, task)
        set_scaler(run, RECIPES[name])
        loop = Loop(run.parallel.module, lambda micro_batches: train_step(run, micro_batches))
    return Contender(Loop(loop.module, loop.step, ready_to_train(loop.module, tf32)), run, held, tf32)


def ready_to_train(module: nn.Module, tf32: bool) -> Callable[[], None]:
    """What goes before training steps: the modules that train now do so again, and those that are frozen don't."""
    training = [part for part in module.modules() if part.training]

    def prepare() -> None:
        set_tf32(tf32)
        for part in training:
            part.training = True

    return prepare


def learn(run: Run, most_steps: int, seconds: float, ends: float, seed: int = 0) -> list[float]:
    """The loss of each step of the main job, of `most_steps` or as many as there is time for in `seconds`.

    A skipped step is taken again on the same samples, a few times: so curves are compared update by update, and the
    scaler's first steps, in which it finds its scale, count for nothing. Each attempt draws the same random numbers, in
    every precision; `seed` makes them others. Errors: NoTime at `ends`, by time.monotonic().
    """
    curve, began = [], time.monotonic()
    with closing(run.data):
        for number in range(most_steps):
            if number >= LEAST_STEPS and time.monotonic() - began > seconds:
                break
            micro_batches = next(run.data)
            for _ in range(MOST_SKIPS if run.scaler.scales else 1):
                if time.monotonic() > ends:
                    raise NoTime
                seed_all(run.config.run.seed + seed * most_steps + number)
                report = train_step(run, tree_map(lambda part: part, micro_batches))
                if bool(report.applied):
                    break
            curve.append(float(report.loss_sum / report.weight))
    run.data.handed_out = []  # the last batch, which is on the device
    return curve


def nudge(module: nn.Module) -> None:
    """Move each weight by one last place, up or down: as if everything had been rounded once more."""
    with torch.no_grad():
        for parameter in module.parameters():
            either = torch.where(torch.rand_like(parameter) < 0.5, -math.inf, math.inf)
            parameter.copy_(torch.nextafter(parameter, either))


def mean_loss(weights: Run, contender: Contender, micro_batches: Sequence[Any]) -> float:
    """The loss of a run's weights, computed as the contender computes its inference."""
    run = contender.run
    assert run is not None
    contender.inference.prepare()
    weights.parallel.module.eval()
    total, weight = 0.0, 0.0
    for batch in tree_map(lambda part: part, list(micro_batches)):
        with torch.no_grad(), run.precision.autocast():
            total += float(weights.task.loss_sum(weights.model, batch))
        weight += float(weights.task.weight(batch))
    return total / weight
