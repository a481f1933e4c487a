"""python -m benchmarks overhead: processor time of train_step, compared with a hand-written loop
and with Accelerate's and Lightning Fabric's loops.

Two ranks or more are measured under DDP and FSDP2; under FSDP2 without the other libraries, and not
in fp16: torch's GradScaler doesn't make ranks agree on skipping a step if gradients are sharded.

All loops share one CPU process per rank and take turns: in each round, every loop runs one block of
ten steps, in a new random order. The block's fastest step counts; with full telemetry, which logs
once per block, the mean.

us/step      processor time of the slowest rank
ratio        processor time over the baseline's in the same round: median and 95 % interval. How far
             "baseline again", a second copy of the loop, is from 1 shows the noise
host reads   how often a step reads a value back from the device
parity       how far the parameters drift from the baseline's in 20 steps, each started from the
             baseline's parameters; relative to the largest parameter
"""

import itertools
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from benchmarks import explain, harness, loops, report
from benchmarks.loops import Loop, Setup
from benchmarks.peers import accelerate, fabric
from benchmarks.report import BASELINE, OURS, PEERS, interval, median
from dist_amp.precision import DTYPES
from dist_amp.settings import DataConfig
from dist_amp.supervise.command_line import Parser
from dist_amp.world import World, local

AGAIN = "baseline again"
TELEMETRY = "dist_amp, full telemetry"
BLOCK = 10  # steps per round; full telemetry logs once per block
ACCUMULATION = 4
# If steps are short, up to MOST_ROUNDS rounds are timed in place of each one asked for, until they
# take this long. Many short rounds are better: a disturbance is then in both loops, or in neither.
ROUND_SECONDS = 0.3
MOST_ROUNDS = 20
PARITY_STEPS = 20  # from the same initial weights, before anything is timed
PRECISIONS = ("bf16", "fp16", "fp32")
# {workload, strategy, loop: {precision: target for the ratio of processor time}}
TARGETS: dict[tuple[str, str, str], dict[str, float]] = {
    ("tiny", "single", OURS): {"bf16": 0.95, "fp16": 0.88},
    ("tiny", "ddp", OURS): {"bf16": 1.05, "fp16": 1.05, "fp32": 1.05},
    ("tiny", "fsdp", OURS): {"bf16": 1.00, "fp32": 1.00},
    ("deep", "single", OURS): {"bf16": 1.00, "fp16": 1.00, "fp32": 1.00},
}
Steps = list[list[torch.Tensor]]  # the parameters after each step


class Workload(NamedTuple):
    about: str
    task: Callable[[], Any]
    micro_batch_size: int
    parity: float  # how far dist_amp's loops may drift from the baseline


GPT = partial(loops.RandomBytes, DataConfig(), heads=4)
DEEP = partial(GPT, context=16, width=64, layers=12)
WIDE = partial(GPT, context=32, width=256, layers=4)
WORKLOADS = {
    "tiny": Workload("two linear layers of 64, 8,320 parameters", loops.TwoLayers, 16, 1e-6),
    "deep": Workload("a GPT of 12 layers, 64 wide", DEEP, 1, 1e-5),
    "gpt": Workload("a GPT of 4 layers, 256 wide", WIDE, 2, 1e-5),
}


class Cell(NamedTuple):
    workload: str
    strategy: str
    ranks: int
    precision: str


def cells_of(
    workloads: Sequence[str], ranks: Sequence[int], precisions: Sequence[str]
) -> list[Cell]:
    cells = []
    for workload, size in itertools.product(workloads, ranks):
        strategies = ("ddp", "fsdp") if size > 1 else ("single",)
        for strategy, precision in itertools.product(strategies, precisions):
            if (strategy, precision) != ("fsdp", "fp16"):
                cells.append(Cell(workload, strategy, size, precision))
    return cells


def build_setup(cell: Cell, world: World) -> Setup:
    _, task, size, _ = WORKLOADS[cell.workload]
    words = f"--parallel.strategy {cell.strategy} --metrics.log_every {BLOCK}"
    return Setup(loops.config_of("cpu", cell.precision, size, ACCUMULATION, words), world, task())


# --- measuring


def measure(world: World, cell: Cell, rounds: int) -> dict[str, Any]:
    """Parity, host reads and times of every loop, or a note why there are none.

    Every rank must call it; rank 0's result counts.
    """
    setup = build_setup(cell, world)
    data = loops.steps_of_data(setup)
    rows: dict[str, dict[str, Any]] = {}
    built: dict[str, Loop] = {}
    path: Steps = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # first_steps checks what the libraries warn about
        builders: dict[str, Callable[[Setup], Loop]] = {
            BASELINE: loops.baseline,
            AGAIN: loops.baseline,
            OURS: loops.dist_amp,
            TELEMETRY: partial(loops.dist_amp_with_telemetry, folder=Path(folder)),
        }
        if cell.strategy != "fsdp":
            builders |= dict(zip(PEERS, (accelerate, fabric), strict=True))
        for name, build in builders.items():
            try:
                built[name], drift = first_steps(setup, build, data, path)
            except Exception as error:
                if name not in PEERS:
                    raise
                rows[name] = {"note": harness.note_of(error)}
                continue
            steps = BLOCK if name == TELEMETRY else 1
            reads = [host_reads(built[name], data[step % len(data)]) for step in range(steps)]
            rows[name] = {"parity": max(world.gather(drift)), "host_reads": reads}
        for name, seconds in timed_rounds(world, built, data, rounds).items():
            rows[name]["seconds"] = seconds
    return {**cell._asdict(), "loops": rows}


def host_reads(loop: Loop, micro_batches: Sequence[Any]) -> int:
    loop.prepare()
    with harness.HostReads() as counted:
        loop.step(micro_batches)
    return counted.count


def first_steps(
    setup: Setup, build: Callable[[Setup], Loop], data: Sequence[Any], path: Steps
) -> tuple[Loop, float]:
    """(loop, its drift from `path`). Raises RuntimeError if it trains in another precision."""
    loop = build(setup)
    first = next(part for part in loop.module.modules() if isinstance(part, nn.Linear))
    with harness.computes_in(DTYPES[setup.precision], first):
        return loop, drift_of(loop, data, path)


@torch.no_grad()
def drift_of(loop: Loop, data: Sequence[Any], path: Steps) -> float:
    """Drift of the loop's first steps, each started from the parameters in `path`.

    The first loop, the baseline, fills `path`.
    """
    parameters = [local(parameter) for parameter in loop.module.parameters()]
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    for number, micro_batches in enumerate(itertools.islice(itertools.cycle(data), PARITY_STEPS)):
        loop.prepare()
        with torch.enable_grad():
            loop.step(micro_batches)
        updated = [local(parameter) for parameter in loop.module.parameters()]
        if number == len(path):
            path.append([tensor.clone() for tensor in updated])
        for tensor, reference, total in zip(updated, path[number], sums, strict=True):
            total += tensor - reference
            tensor.copy_(reference)
    drift = max(float(total.abs().max()) for total in sums)
    return drift / max(float(reference.abs().max()) for reference in path[-1])


def timed_rounds(
    world: World, built: dict[str, Loop], data: Sequence[Any], rounds: int
) -> dict[str, Any]:
    """{loop: {"fastest", "mean"}}: each round's processor seconds per step, of the slowest rank."""

    def block(name: str) -> list[float]:
        world.barrier()
        seconds = []
        for micro_batches in itertools.islice(itertools.cycle(data), BLOCK):
            built[name].prepare()
            started = time.process_time_ns()
            built[name].step(micro_batches)
            seconds.append(1e-9 * (time.process_time_ns() - started))
        return [min(seconds), sum(seconds) / BLOCK]

    started = time.perf_counter()
    block(BASELINE)
    factor = min(max(round(ROUND_SECONDS / (time.perf_counter() - started)), 1), MOST_ROUNDS)
    factor = world.from_main(factor)
    times = harness.in_turns(built, block, rounds * factor)
    by_rank = world.gather(times)
    found = {}
    for name in built:
        fastest, mean = np.max([times[name] for times in by_rank], axis=0).T.tolist()
        found[name] = {"fastest": fastest, "mean": mean}
    return found


# --- reporting


def judge(cell: Cell, rows: dict[str, dict[str, Any]]) -> None:
    """Add to rows with times their ratio to the baseline, and to dist_amp's rows a verdict."""
    for name, row in rows.items():
        if "seconds" in row:
            # The fastest step is never one that logs, so full telemetry is compared by the mean.
            kind = "mean" if name == TELEMETRY else "fastest"
            row["us_per_step"] = 1e6 * median(row["seconds"][kind])
            base = rows[BASELINE]["seconds"][kind]
            row["ratio"] = np.divide(row["seconds"][kind], base).tolist()
    for name in (OURS, TELEMETRY):
        targets = TARGETS.get((cell.workload, cell.strategy, name), {})
        rows[name]["target"] = targets.get(cell.precision)
        faster = []
        if cell.strategy == "ddp" and name == OURS:
            faster = [peer for peer in PEERS if is_faster(rows[peer], rows[name])]
        parity = WORKLOADS[cell.workload].parity
        rows[name]["verdict"] = verdict(rows[name], parity, int(name == TELEMETRY), faster)


def is_faster(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the row's median is lower; False for a loop that was not timed."""
    return "ratio" in row and median(row["ratio"]) < median(other["ratio"])


def verdict(row: dict[str, Any], parity: float, reads: int, faster: Sequence[str]) -> str:
    """Returns "met", or what was missed. reads: how many host reads a block may have."""
    missed = [f"{peer} is faster" for peer in faster]
    if row["target"] and median(row["ratio"]) > row["target"]:
        missed.append("ratio")
    if not row["parity"] <= parity:  # nan too
        missed.append("parity")
    if sum(row["host_reads"]) > reads:
        missed.append("host reads")
    if missed:
        return f"missed: {', '.join(missed)}"
    return "met"


def table_of(cells: Sequence[dict[str, Any]]) -> str:
    """A row per loop; without times, it has a note in place of a verdict."""
    rows = []
    for cell in cells:
        for name, row in cell["loops"].items():
            line = {**{field: str(cell[field]) for field in Cell._fields}, "loop": name}
            if "seconds" in row:
                line["us/step"] = f"{row['us_per_step']:,.0f}"
                line["ratio"] = interval(row["ratio"])
                line["host reads"] = " / ".join(map(str, sorted(set(row["host_reads"]))))
                line["parity"] = f"{row['parity']:.0e}"
            line["target"] = f"<= {row['target']:.2f}" if row.get("target") else ""
            rows.append({**line, "verdict": row.get("verdict", row.get("note", ""))})
    return report.table(rows, left=5)


# --- the command


@harness.command
def main(words: Sequence[str]) -> None:
    """Measure each cell in new processes, one cell after the other."""
    parser = Parser("python -m benchmarks overhead", __doc__)
    harness.add_choices(parser, workloads=list(WORKLOADS), precisions=PRECISIONS)
    add = parser.add_argument
    text = "processes; default: 1 2"
    add("--ranks", nargs="+", type=harness.at_least(1), default=[1, 2], metavar="N", help=text)
    text = "at least 6, for a 95 %% interval; if steps are short, more are timed; default: 20"
    add("--rounds", type=harness.at_least(6), default=20, metavar="N", help=text)
    text = "write overhead.json and overhead.md to this folder; default: only print"
    add("--out", type=Path, metavar="DIR", help=text)
    text = "count what a step of the main job calls, by component, instead of timing it"
    add("--explain", action="store_true", help=text)
    options = parser.parse_args(words)
    if options.explain:
        print(explain.tables(options.precisions, ACCUMULATION), end="")
        return
    found: dict[str, Any] = report.about(torch.device("cpu"), "accelerate", "lightning-fabric")
    found |= {"rounds": options.rounds, "cells": []}
    text = report.machine_line(found)
    for name in options.workloads:
        text += f"\n{name}: {WORKLOADS[name].about}, {ACCUMULATION} micro-batches"
    print(text, flush=True)
    for cell in cells_of(options.workloads, options.ranks, options.precisions):
        measured = harness.on_ranks(cell.ranks, measure, cell, options.rounds)
        judge(cell, measured["loops"])
        found["cells"].append(measured)
        print(f"\n{table_of([measured])}", flush=True)
        if options.out is not None:  # after each cell: all of them may take an hour
            pages = report.document(text, table_of(found["cells"]))
            report.save(found, pages, options.out, "overhead")


if __name__ == "__main__":
    sys.exit(main())
