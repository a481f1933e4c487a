"""python -m dist_amp.bench overhead: what a step costs against the loop that an expert would write by hand.

On CPU processes, where nothing hides what the host does. All loops run in one process per rank, in rounds: in each,
every loop takes one block of ten steps, in an order drawn anew, and its fastest step (its mean, where one of them logs)
is divided by the bare loop's of the same round. The table has the median of these ratios with its 95 % interval.
"bare again" shows what is noise. Parity is how far a loop drifts from the bare one in 20 steps, relative to the largest
parameter: the sum of what its steps do otherwise, each taken from the bare loop's parameters. Left alone, two bf16 runs
from weights that differ in the last place are 1e-4 apart by then.
"""

import argparse
import gc
import itertools
import json
import math
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from dist_amp.bench.harness import HostReads, on_ranks
from dist_amp.bench.loops import (
    Loop,
    RandomBytes,
    Setup,
    TwoLayers,
    bare,
    dist_amp,
    dist_amp_with_telemetry,
    update_by_hand,
    update_of_dist_amp,
)
from dist_amp.bench.machine import about
from dist_amp.bench.overhead_report import AGAIN, HEADER, OUR_UPDATE, TELEMETRY, UPDATE, Cell, base, line, rows_of
from dist_amp.bench.peers import accelerate, fabric
from dist_amp.bench.report import BARE, OURS, PEERS, save
from dist_amp.commands.command_line import Parser, exit_status
from dist_amp.config.load import load_config
from dist_amp.data import build_batches, build_split
from dist_amp.errors import ConfigError, first_line
from dist_amp.fast.fused import local
from dist_amp.precision import DTYPES
from dist_amp.settings import DataConfig
from dist_amp.world import World

BLOCK = 10  # steps; with all figures logged every so many
ACCUMULATION = 4
# A loop gets so many seconds for each of the rounds that are asked for: short steps then make up to 20 of one.
ROUND_SECONDS, MOST_ROUNDS = 0.3, 20
PARITY_STEPS = 20  # from the same weights, before anything is timed
PRECISIONS = ("bf16", "fp16", "fp32")
STRATEGIES = ("ddp", "fsdp")
PACKAGES = ("accelerate", "lightning-fabric")  # whose versions are told
Steps = list[list[torch.Tensor]]  # parameters, after each step


@dataclass(frozen=True)
class Workload:
    """A model to train."""

    about: str
    task: Callable[[], Any]
    micro_batch_size: int


WORKLOADS = {
    "tiny": Workload("two linear layers of 64", TwoLayers, 16),
    "deep": Workload("a GPT of 12 layers, 64 wide", partial(RandomBytes, DataConfig(), 16, 64, 12, 4), 1),
    "gpt": Workload("a GPT of 4 layers, 256 wide", partial(RandomBytes, DataConfig(), 32, 256, 4, 4), 2),
}


def build_setup(cell: Cell, world: World) -> Setup:
    workload = WORKLOADS[cell.workload]
    words = ["--parallel.strategy", cell.strategy, "--train.micro_batch_size", workload.micro_batch_size]
    words += ["--train.accumulation_steps", ACCUMULATION, "--train.steps", 20_000, "--optim.warmup_steps", 10]
    words += ["--use_amp", "false"] if cell.precision == "fp32" else ["--precision.dtype", cell.precision]
    words += ["--run.dir", "unused", "--run.resume", "never", "--eval.every", "off", "--checkpoint.every", "off"]
    words += ["--metrics.log_every", BLOCK, "--run.device", "cpu"]
    return Setup(load_config([str(word) for word in words], environ={}), world, workload.task())


def makers(cell: Cell, folder: Path, first_step: Sequence[Any]) -> dict[str, Callable[[Setup], Loop]]:
    """Every loop of a cell, by its name in the table; those of `PEERS` may turn out not to be able to."""
    loops: dict[str, Callable[[Setup], Loop]] = {
        BARE: bare,
        AGAIN: bare,
        OURS: dist_amp,
        TELEMETRY: partial(dist_amp_with_telemetry, folder=folder),
        PEERS[0]: accelerate,
        PEERS[1]: fabric,
    }
    if cell.strategy == "fsdp":
        loops[UPDATE] = partial(update_by_hand, micro_batches=first_step)
        loops[OUR_UPDATE] = partial(update_of_dist_amp, micro_batches=first_step)
    return loops


def measure(world: World, cell: Cell, rounds: int) -> dict[str, Any]:
    """One cell's parity, host reads and times, or why a loop has none; every rank calls it, rank 0's counts."""
    setup = build_setup(cell, world)
    data = steps_of_data(setup)
    loops: dict[str, Loop] = {}
    cant: dict[str, str] = {}
    parity: dict[str, float] = {}
    paths: dict[str, Steps] = {UPDATE: [], BARE: []}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what matters of them is looked for: see followed
        to_make = makers(cell, Path(folder), data[0])
        for name, make in to_make.items():
            loop, drift, why = followed(setup, make, data, paths[base(name)], may_fail=name in PEERS)
            whys, drifts = world.gather_texts(why), world.gather_texts(str(drift))
            if loop is None or any(whys):
                cant[name] = next(filter(None, whys))
            else:
                loops[name], parity[name] = loop, max(map(float, drifts))
        told = {
            **asdict(cell),
            "loops": list(to_make),
            "cant": cant,
            "parity": parity,
            "host_reads": {
                name: host_reads(loop, data, BLOCK if name == TELEMETRY else 1) for name, loop in loops.items()
            },
            "collectives": {name: collectives(loop) for name, loop in loops.items() if name in (UPDATE, OUR_UPDATE)},
        }
        # Many short rounds tell more than few long ones: what disturbs a moment is in all of its ratio, or in none.
        bare_seconds = float(timed_block(loops[BARE], data)[MEASURES.index("block_wall")]) * BLOCK
        more = int(world.from_main(str(min(max(round(ROUND_SECONDS / bare_seconds), 1), MOST_ROUNDS))))
        return {**told, "seconds": timed_rounds(world, loops, data, rounds * more)}


def followed(
    setup: Setup, make: Callable[[Setup], Loop], data: Sequence[Any], path: Steps, may_fail: bool
) -> tuple[Loop | None, float, str]:
    """The loop after its first steps, and its drift; or why it can't do this cell: what it raises, or does in silence.

    path: this rank's parameters after each step of the loop that goes first, which fills it.
    """
    seen: list[torch.dtype] = []
    try:
        loop = make(setup)
        if setup.strategy == "fsdp" and not all(isinstance(p, DTensor) for p in loop.module.parameters()):
            return None, math.nan, "can't: shards nothing"
        first = next(part for part in loop.module.modules() if isinstance(part, nn.Linear))
        hook = first.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        drift = follow(loop, data, path)
        hook.remove()
    except Exception as error:
        if not may_fail:
            raise
        if isinstance(error, ImportError):
            return None, math.nan, "not installed: pip install 'dist_amp[bench]'"
        return None, math.nan, f"can't: {first_line(error).split('. ')[0]}"
    if set(seen) - {DTYPES[setup.precision]}:
        return loop, drift, f"can't: trains in {str(seen[0]).removeprefix('torch.')}"
    return loop, drift, ""


@torch.no_grad()
def follow(loop: Loop, data: Sequence[Any], path: Steps) -> float:
    """The drift of the loop's first steps, each from where the path was."""
    sums = [torch.zeros_like(local(parameter)) for parameter in loop.module.parameters()]
    for number, micro_batches in enumerate(itertools.islice(itertools.cycle(data), PARITY_STEPS)):
        loop.prepare()
        with torch.enable_grad():
            loop.step(micro_batches)
        own = [local(parameter) for parameter in loop.module.parameters()]
        if number == len(path):
            path.append([tensor.clone() for tensor in own])
        for tensor, there, total in zip(own, path[number], sums, strict=True):
            total += tensor - there
            tensor.copy_(there)
    drift = max(float(total.abs().max()) for total in sums if total.numel())
    return drift / max(float(there.abs().max()) for there in path[-1] if there.numel())


def steps_of_data(setup: Setup) -> list[list[Any]]:
    """Eight steps' micro-batches of this rank, the same for every loop."""
    config, world = setup.config, setup.world
    split = build_split(setup.task, "train", world)
    size = config.train.micro_batch_size
    return list(
        itertools.islice(build_batches(config.data, setup.task, split, size, ACCUMULATION, config.run.seed, world), 8)
    )


def host_reads(loop: Loop, data: Sequence[Any], steps: int) -> list[int]:
    """What each of so many steps reads back from the device."""
    counts = []
    for micro_batches in itertools.islice(itertools.cycle(data), steps):
        loop.prepare()
        with HostReads() as seen:
            loop.step(micro_batches)
        counts.append(seen.count)
    return counts


def collectives(loop: Loop) -> int:
    """How often a step meets the other ranks."""
    loop.prepare()
    with CommDebugMode() as seen:
        loop.step([])
    return seen.get_total_counts()


MEASURES = ("step_cpu", "step_wall", "block_cpu", "block_wall")


def timed_rounds(
    world: World, loops: dict[str, Loop], data: Sequence[Any], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """{loop: {measure: seconds per step, one per round}}, of the slowest rank; one block of each loop is a round."""
    order, names = random.Random(0), list(loops)  # the same on all ranks
    seconds = torch.zeros(rounds, len(names), len(MEASURES), dtype=torch.float64)
    gc.collect()
    gc.freeze()
    for number in range(rounds):
        gc.collect()
        gc.disable()
        for name in order.sample(names, len(names)):
            world.barrier()
            seconds[number, names.index(name)] = timed_block(loops[name], data)
        gc.enable()
    gc.unfreeze()
    of_ranks = world.gather_texts(json.dumps(seconds.tolist()))
    slowest = torch.tensor([json.loads(text) for text in of_ranks], dtype=torch.float64).amax(dim=0)
    return {
        name: {measure: slowest[:, i, j].tolist() for j, measure in enumerate(MEASURES)} for i, name in enumerate(names)
    }


def timed_block(loop: Loop, data: Sequence[Any]) -> torch.Tensor:
    """MEASURES of one block of steps, its fastest and its mean: [4] float64, seconds per step."""
    clock = []
    for micro_batches in itertools.islice(itertools.cycle(data), BLOCK):
        loop.prepare()
        before = now()
        loop.step(micro_batches)
        clock.append((before, now()))
    began, ended = torch.tensor(clock, dtype=torch.float64).unbind(dim=1)
    steps = (ended - began) * 1e-9
    return torch.cat([steps.amin(dim=0), steps.mean(dim=0)])


def now() -> tuple[int, int]:
    """Nanoseconds of this process's CPU time, and of the wall's."""
    return time.process_time_ns(), time.perf_counter_ns()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("python -m dist_amp.bench overhead", __doc__)
    add = parser.add_argument
    add("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), help="default: all")
    add("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="default: all")
    add("--ranks", nargs="+", type=int, default=[1, 2], metavar="N", help="default: 1 2")
    add("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES),
        help="of two ranks and more; default: both")  # fmt: skip
    add(
        "--rounds",
        type=int,
        default=20,
        metavar="N",
        help="at least 6, for an interval; short steps make more of them; default: 20",
    )
    add("--out", type=Path, metavar="DIR", help="where to leave overhead.json and overhead.txt; default: nowhere")
    options = parser.parse_args(argv)
    if min(options.ranks) < 1:
        raise ConfigError(f"--ranks {min(options.ranks)} must be at least 1")
    if options.rounds < 6:
        raise ConfigError(f"--rounds {options.rounds} must be at least 6: fewer have no interval of 95 %")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 measured, 64 an argument."""
    return exit_status(measure_all, argv)


def measure_all(words: Sequence[str]) -> None:
    """The cells that the words ask for, one after the other, each in processes of its own."""
    options = parse(words)
    report: dict[str, Any] = {**about(torch.device("cpu"), *PACKAGES), "rounds": options.rounds, "cells": []}
    lines: list[str] = []

    def say(text: str) -> None:
        print(text, flush=True)
        lines.append(text)

    say(head(options, report))
    for cell in cells_of(options):
        told = on_ranks(cell.ranks, measure, cell, options.rounds)
        told["rows"] = rows_of(cell, told)
        report["cells"].append(told)
        for row in told["rows"]:
            say(line(cell, row))
        if options.out is not None:  # after each cell: all of them may take an hour
            save(report, "\n".join(lines) + "\n", options.out, "overhead", "txt")


def head(options: argparse.Namespace, report: dict[str, Any]) -> str:
    """What stands above the table."""
    found = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    lines = [f"{report['machine']['cpu']}, {report['machine']['cores']} cores; {found}"]
    for name in options.workloads:
        workload = WORKLOADS[name]
        parameters = list(workload.task().build_model().parameters())
        size = f"{sum(p.numel() for p in parameters):,} parameters in {len(parameters)} tensors"
        batch = f"{ACCUMULATION} micro-batches of {workload.micro_batch_size}"
        lines.append(f"{name:<6} {workload.about}: {size}, {batch}")
    lines.append(
        f"us/step: the process's CPU time, of the slowest rank: the fastest of {BLOCK} steps, or their mean with full "
        f"telemetry;\nmedian of {options.rounds} rounds or more. ratio: to the bare loop's in the same round"
    )
    return "\n".join([*lines, "", HEADER])


def cells_of(options: argparse.Namespace) -> list[Cell]:
    return [
        Cell(workload, precision, ranks, strategy)
        for workload in options.workloads
        for ranks in options.ranks
        for strategy in (options.strategies if ranks > 1 else ["single"])
        for precision in options.precisions
    ]


if __name__ == "__main__":
    sys.exit(main())
