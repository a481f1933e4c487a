"""What `python -m dist_amp.bench gpu` measures: models, cells of mode and precision, and who is compared in each."""

import argparse
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dist_amp.bench.gpu_report import OURS_IN_BF16, WHOLE
from dist_amp.bench.loops import Loop, Setup, bare, dist_amp
from dist_amp.bench.peers import accelerate, fabric
from dist_amp.bench.report import BARE, OURS, PEERS

MODES = ("compiled", "eager", "whole")
PRECISIONS = ("bf16", "fp16")
SHARE = {"compiled": 1.0, "eager": 0.7, "whole": 1.3}  # of a cell's time, by its mode; assumed


@dataclass(frozen=True)
class Model:
    about: str
    layers: int
    width: int
    heads: int
    micro_batch_size: int  # on a GPU of 141 GB
    mfu: float  # the target: compiled, in bf16
    seconds: float  # what a cell with compiled blocks takes, before one was seen to; assumed
    context: int = 1024
    vocabulary: int = 50304


@dataclass(frozen=True)
class Effort:
    """How long it is looked at."""

    models: Mapping[str, Model]
    free_steps: int  # in which nothing may wait
    warm_up: int  # steps before any is timed; the last but three tell the peak memory
    block_seconds: float  # of steps between two clocks


ON_A_GPU = Effort(
    {
        "124m": Model("124 M", 12, 768, 12, 32, mfu=0.42, seconds=50),
        "1b": Model("1.0 B", 18, 2048, 16, 16, mfu=0.50, seconds=70),
    },
    free_steps=50,
    warm_up=10,
    block_seconds=0.35,
)
SMOKE = Effort(
    {
        "124m": Model("few", 2, 32, 2, 2, mfu=0.42, seconds=0, context=32, vocabulary=512),
        "1b": Model("a few more", 3, 64, 2, 2, mfu=0.50, seconds=0, context=32, vocabulary=512),
    },
    free_steps=10,
    warm_up=5,
    block_seconds=0,
)


@dataclass(frozen=True)
class Cell:
    model: str
    mode: str
    precision: str

    def __str__(self) -> str:
        return f"{self.model} {self.mode} {self.precision}"


@dataclass(frozen=True)
class Contender:
    make: Callable[[Setup], Loop]
    precision: Any  # bf16 or fp16
    fused: bool = True

    def own(self, setup: Setup) -> Setup:
        """The cell's setup, as this one takes it."""
        precision = replace(setup.config.precision, dtype=self.precision)
        return replace(setup, fused=self.fused, config=replace(setup.config, precision=precision))


def contenders(cell: Cell) -> dict[str, Contender]:
    """Who is measured in a cell, by the name in the table; the one that the others are compared with first."""
    precision = cell.precision
    if cell.mode == "whole":
        return {BARE: Contender(bare, precision), WHOLE: Contender(bare_whole, precision)}
    return {
        BARE: Contender(bare, precision),
        OURS: Contender(dist_amp, precision),
        **({OURS_IN_BF16: Contender(dist_amp, "bf16")} if precision == "fp16" else {}),
        PEERS[0]: Contender(accelerate, precision),
        # With fused AdamW and the scaler it refuses to clip.
        PEERS[1]: Contender(fabric, precision, fused=precision != "fp16"),
    }


def bare_whole(setup: Setup) -> Loop:
    """The loop by hand with model and loss in one graph, so that the loss is fused too."""
    knobs = setup.config.compile
    task = copy.copy(setup.task)
    task.loss = torch.compile(task.loss, backend=knobs.backend, dynamic=knobs.dynamic)
    return bare(replace(setup, task=task, config=replace(setup.config, compile=replace(knobs, blocks=False))))


def cells_of(options: argparse.Namespace) -> Iterator[Cell]:
    """The most important first."""
    for mode in (mode for mode in MODES if mode in options.modes):
        for precision in (name for name in PRECISIONS if name in options.precisions):
            for model in options.models:
                if mode != "whole" or precision == "bf16":
                    yield Cell(model, mode, precision)
