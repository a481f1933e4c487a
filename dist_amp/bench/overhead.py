"""python -m dist_amp.bench overhead: what a step costs against the loop that an expert would write by hand.

All loops run in one process per rank, in rounds: in each, every loop takes its blocks of ten steps, in an order drawn
anew. A round gives each loop's fastest step, and its fastest block, divided by the bare loop's of the same round; the
table has the median of these ratios with its 95 % interval. The bare loop runs twice per round: "bare again" shows what
is noise. Times are the process's CPU time, of the slowest rank; wall-clock times stand in the JSON beside them.
"""

import argparse
import gc
import itertools
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import torch

from dist_amp.bench.harness import HostReads, median_interval, on_ranks
from dist_amp.bench.loops import Loop, RandomBytes, Setup, TwoLayers, bare, dist_amp, dist_amp_with_telemetry
from dist_amp.config import ConfigError, Failure
from dist_amp.data import DataConfig, build_batches, build_split
from dist_amp.proof.compare import whole
from dist_amp.proof.reference import relative_error
from dist_amp.run import load_config
from dist_amp.runtime import World, report_failure

BLOCK = 10  # steps; with all figures logged every so many
ACCUMULATION = 4
PARITY_STEPS = 20  # from the same weights, before anything is timed
PRECISIONS = ("bf16", "fp16", "fp32")
STRATEGIES = ("ddp", "fsdp")


@dataclass(frozen=True)
class Workload:
    """A model to train, and how much of it makes a round."""

    about: str
    task: Callable[[], Any]
    micro_batch_size: int
    blocks: int  # per round
    parity: float  # how far the parameters may be from the bare loop's


WORKLOADS = {
    "tiny": Workload("two linear layers of 64", TwoLayers, 16, 20, 1e-6),
    "deep": Workload("a GPT of 12 layers, 64 wide", partial(RandomBytes, DataConfig(), 16, 64, 12, 4), 1, 3, 1e-5),
    "gpt": Workload("a GPT of 4 layers, 256 wide", partial(RandomBytes, DataConfig(), 32, 256, 4, 4), 2, 1, 1e-5),
}


@dataclass(frozen=True)
class Cell:
    workload: str
    precision: str
    ranks: int
    strategy: str

    @property
    def name(self) -> str:
        return f"{self.workload} {self.precision} {self.ranks} {self.strategy}"


def target(cell: Cell, loop: str) -> float | None:
    """What the ratio to the bare loop is to be, at most; None where nothing is promised."""
    if loop == "dist_amp":
        if cell.workload == "tiny" and cell.ranks == 1:
            return {"bf16": 0.95, "fp16": 0.88}.get(cell.precision)
        if cell.workload == "tiny" and cell.strategy == "ddp":
            return 0.98
        if cell.workload == "deep" and cell.ranks == 1:
            return 0.99
    if loop == "dist_amp, full telemetry" and cell.workload == "tiny" and cell.ranks == 1 and cell.precision != "fp32":
        return 0.97
    return None


def build_setup(cell: Cell, world: World) -> Setup:
    workload = WORKLOADS[cell.workload]
    words = ["--parallel.strategy", cell.strategy, "--train.micro_batch_size", workload.micro_batch_size]
    words += ["--train.accumulation_steps", ACCUMULATION, "--train.steps", 20_000, "--optim.warmup_steps", 10]
    words += ["--use_amp", "false"] if cell.precision == "fp32" else ["--precision.dtype", cell.precision]
    words += ["--run.dir", "unused", "--run.resume", "never", "--eval.every", "off", "--checkpoint.every", "off"]
    words += ["--metrics.log_every", BLOCK, "--run.device", world.device.type]
    return Setup(load_config([str(word) for word in words], environ={}), world, workload.task())


def build_loops(setup: Setup, folder: Path) -> dict[str, Loop]:
    return {
        "bare": bare(setup),
        "bare again": bare(setup),
        "dist_amp": dist_amp(setup),
        "dist_amp, full telemetry": dist_amp_with_telemetry(setup, folder),
    }


def measure(world: World, cell: Cell, rounds: int) -> dict[str, Any]:
    """One cell's parity, host reads and times; every rank calls it."""
    setup = build_setup(cell, world)
    data = steps_of_data(setup)
    with tempfile.TemporaryDirectory() as folder:
        loops = build_loops(setup, Path(folder))
        for loop in loops.values():
            for micro_batches in itertools.islice(itertools.cycle(data), PARITY_STEPS):
                loop.step(micro_batches)
        parameters = {name: parameters_of(loop) for name, loop in loops.items()}
        parity = {name: relative_error(values, parameters["bare"]) for name, values in parameters.items()}
        reads = {name: host_reads(loop, data) for name, loop in loops.items()}
        times = timed_rounds(world, loops, data, rounds, WORKLOADS[cell.workload].blocks)
    counted = {"parameters": sum(p.numel() for p in loops["bare"].module.parameters())}
    counted["tensors"] = len(list(loops["bare"].module.parameters()))
    return {**asdict(cell), **counted, "parity": parity, "host_reads": reads, "seconds": times}


def steps_of_data(setup: Setup) -> list[list[Any]]:
    """Eight steps' micro-batches of this rank, the same for every loop."""
    config, world = setup.config, setup.world
    split = build_split(setup.task, "train", world)
    size = config.train.micro_batch_size
    return list(
        itertools.islice(build_batches(config.data, setup.task, split, size, ACCUMULATION, config.run.seed, world), 8)
    )


def parameters_of(loop: Loop) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in loop.module.named_parameters()}


def host_reads(loop: Loop, data: Sequence[Any]) -> list[int]:
    """What each of ten steps reads back from the device; one of them is a logging step where the loop has any."""
    counts = []
    for number in range(BLOCK):
        with HostReads() as seen:
            loop.step(data[number % len(data)])
        counts.append(seen.count)
    return counts


MEASURES = ("step_cpu", "step_wall", "block_cpu", "block_wall")


def timed_rounds(
    world: World, loops: dict[str, Loop], data: Sequence[Any], rounds: int, blocks: int
) -> dict[str, dict[str, list[float]]]:
    """{loop: {measure: seconds per step, one per round}}: each round's fastest step and block, of the slowest rank.

    The loops take turns block by block: what else the machine does falls on all alike.
    """
    order, names = random.Random(0), list(loops)  # the same on all ranks
    seconds = torch.zeros(rounds, len(names), blocks, len(MEASURES), dtype=torch.float64)
    gc.collect()
    gc.freeze()
    for number in range(rounds):
        gc.collect()
        gc.disable()
        for block in range(blocks):
            for name in order.sample(names, len(names)):
                world.barrier()
                seconds[number, names.index(name), block] = timed_block(world, loops[name], data)
        gc.enable()
    gc.unfreeze()
    fastest = json.dumps(seconds.amin(dim=2).tolist())
    slowest = torch.tensor([json.loads(text) for text in world.gather_texts(fastest)]).amax(dim=0)
    return {
        name: {measure: slowest[:, i, j].tolist() for j, measure in enumerate(MEASURES)} for i, name in enumerate(names)
    }


def timed_block(world: World, loop: Loop, data: Sequence[Any]) -> torch.Tensor:
    """MEASURES of one block of steps: [4] float64, seconds per step."""
    marks = [now()]
    for micro_batches in itertools.islice(itertools.cycle(data), BLOCK):
        loop.step(micro_batches)
        world.wait_for_device()
        marks.append(now())
    steps = torch.tensor(marks, dtype=torch.float64).diff(dim=0) * 1e-9
    return torch.cat([steps.amin(dim=0), steps.mean(dim=0)])


def now() -> tuple[int, int]:
    """Nanoseconds of this process's CPU time, and of the wall's."""
    return time.process_time_ns(), time.perf_counter_ns()


HEADER = (
    f"{'workload':<8} {'precision':<9} {'ranks':>5} {'strategy':<8} {'loop':<26} {'us/step':>9}  "
    f"{'ratio [95 % interval]':<22} {'reads':>6} {'parity':>8} {'target':>7}  verdict"
)


def rows_of(cell: Cell, told: dict[str, Any]) -> list[dict[str, Any]]:
    """The table's rows of a cell."""
    rows = []
    for name, seconds in told["seconds"].items():
        # A fastest step would hide the logging step: what has one is compared by whole blocks of ten.
        measure = "block_cpu" if "telemetry" in name else "step_cpu"
        base = told["seconds"]["bare"][measure]
        ratio, low, high = median_interval([a / b for a, b in zip(seconds[measure], base, strict=True)])
        most, limit = target(cell, name), WORKLOADS[cell.workload].parity
        reads = told["host_reads"][name]
        row = {
            "loop": name,
            "us_per_step": 1e6 * median_interval(seconds[measure])[0],
            "ratio": ratio,
            "interval": [low, high],
            "host_reads": reads,
            "parity": told["parity"][name],
            "target": most,
        }
        if name.startswith("dist_amp"):
            missed = ["ratio"] * (most is not None and ratio > most) + ["parity"] * (row["parity"] > limit)
            missed += ["reads"] * (sum(reads) > ("telemetry" in name))
            row["verdict"] = f"missed: {', '.join(missed)}" if missed else "met"
        rows.append(row)
    return rows


def line(cell: Cell, row: dict[str, Any]) -> str:
    low, high = row["interval"]
    reads = f"{min(row['host_reads'])}" + (f" / {max(row['host_reads'])}" if len(set(row["host_reads"])) > 1 else "")
    most = "" if row["target"] is None else f"<= {row['target']:.2f}"
    interval = "" if row["loop"] == "bare" else f"{row['ratio']:.3f} [{low:.3f}, {high:.3f}]"
    parity = "" if row["loop"] == "bare" else f"{row['parity']:.0e}"
    return (
        f"{cell.workload:<8} {cell.precision:<9} {cell.ranks:>5} {cell.strategy:<8} {row['loop']:<26} "
        f"{row['us_per_step']:>9,.0f}  {interval:<22} {reads:>6} {parity:>8} {most:>7}  {row.get('verdict', '')}"
    ).rstrip()


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see python -m dist_amp.bench overhead --help")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m dist_amp.bench overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), help="default: all")
    add("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="default: all")
    add("--ranks", nargs="+", type=int, default=[1, 2], metavar="N", help="default: 1 2")
    add("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES),
        help="of two ranks and more; default: both")  # fmt: skip
    add("--rounds", type=int, default=20, metavar="N", help="at least 6, for an interval; default: 20")
    add("--out", type=Path, metavar="DIR", help="where to leave overhead.json and overhead.txt; default: nowhere")
    options = parser.parse_args(argv)
    if min(options.ranks) < 1:
        raise ConfigError(f"--ranks {min(options.ranks)} must be at least 1")
    if options.rounds < 6:
        raise ConfigError(f"--rounds {options.rounds} must be at least 6: fewer have no interval of 95 %")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 measured, 64 an argument."""
    try:
        return bench(parse(sys.argv[1:] if argv is None else argv))
    except Failure as error:
        return report_failure(error, None)[0]
    except SystemExit as reported:  # --help
        return int(reported.code or 0)


def bench(options: argparse.Namespace) -> int:
    report: dict[str, Any] = {"machine": machine(), "versions": versions(), "rounds": options.rounds, "cells": []}
    lines: list[str] = []

    def say(text: str) -> None:
        print(text, flush=True)
        lines.append(text)

    say(HEADER)
    for cell in cells_of(options):
        told = on_ranks(cell.ranks, measure, cell, options.rounds)
        told["rows"] = rows_of(cell, told)
        report["cells"].append(told)
        for row in told["rows"]:
            say(line(cell, row))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "overhead.json").write_text(json.dumps(report, indent=1) + "\n")
        (options.out / "overhead.txt").write_text("\n".join(lines) + "\n")
    return 0


def cells_of(options: argparse.Namespace) -> list[Cell]:
    return [
        Cell(workload, precision, ranks, strategy)
        for workload in options.workloads
        for ranks in options.ranks
        for strategy in (options.strategies if ranks > 1 else ["single"])
        for precision in options.precisions
    ]


def machine() -> dict[str, Any]:
    model = next(
        (text.split(":", 1)[1].strip() for text in _lines("/proc/cpuinfo") if text.startswith("model name")),
        platform.processor(),
    )
    return {"cpu": model, "cores": os.cpu_count(), "platform": platform.platform(), "load": os.getloadavg()}


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:  # no /proc outside Linux
        return []


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "accelerate", "lightning-fabric"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


if __name__ == "__main__":
    sys.exit(main())
