"""python -m dist_amp.bench overhead: what a step of train_step costs, compared with a hand-written loop and its peers.

The baseline (the loop that an expert writes), train_step, train_step with full telemetry, Accelerate's and Lightning
Fabric's loops share one CPU process per rank and take turns: in each round every loop runs one block of ten steps, in a
new random order. Its fastest step (with full telemetry, which logs in one of ten, the mean) counts.

us/step      processor time of the slowest rank
ratio        processor time over the baseline's of the same round: the median and its 95 % interval. The distance of
             "baseline again", the same loop a second time, from 1 is noise
wall ratio   the same of wall time
host reads   how often a step reads a value back from the device
parity       how far the parameters drift from the baseline's in 20 steps, each started from the baseline's parameters;
             relative to the largest parameter
"""

import argparse
import gc
import itertools
import json
import math
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
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from dist_amp.bench import harness, loops, machine
from dist_amp.bench.loops import Loop, Setup
from dist_amp.bench.peers import accelerate, fabric
from dist_amp.bench.report import BASELINE, OURS, PEERS, document, interval, median, median_interval, save, table
from dist_amp.commands.command_line import Parser, exit_status
from dist_amp.config.task_class import build_split
from dist_amp.data import build_batches
from dist_amp.fast.fused import local
from dist_amp.precision import DTYPES
from dist_amp.settings import DataConfig
from dist_amp.world import World

# Names of loops, next to BASELINE, OURS and PEERS.
AGAIN, TELEMETRY = "baseline again", "dist_amp, full telemetry"
UPDATE, OUR_UPDATE = "update only, baseline", "update only, dist_amp"
BLOCK = 10  # steps per round; full telemetry logs once per block
ACCUMULATION = 4
# Each loop gets this long for each round that is asked for: where steps are short, up to 20 rounds instead of one.
ROUND_SECONDS, MOST_ROUNDS = 0.3, 20
# The largest ratio of processor time on the smallest workload, by loop and strategy, then precision.
PROMISED = {
    (OURS, "single"): {"bf16": 0.95, "fp16": 0.88},
    (OURS, "ddp"): {"bf16": 0.97, "fp16": 0.97, "fp32": 0.98},
    (TELEMETRY, "single"): {"bf16": 0.97, "fp16": 0.97},
}
PARITY_STEPS = 20  # from the same initial weights, before anything is timed
PRECISIONS = ("bf16", "fp16", "fp32")
STRATEGIES = ("ddp", "fsdp")
MEANING = "us/step: processor time; ratio: of it, wall ratio: of wall time, to the baseline loop's in the same round"
RATIOS = ("ratio", "wall ratio")  # of processor time, of wall time
MEASURES = ("step_cpu", "step_wall", "block_cpu", "block_wall")  # fastest step and mean; CPU time and wall time
Steps = list[list[torch.Tensor]]  # parameters, after each step


class Workload(NamedTuple):
    about: str
    task: Callable[[], Any]
    micro_batch_size: int
    parity: float  # how far dist_amp's loops may drift from the baseline


GPT = partial(loops.RandomBytes, DataConfig(), heads=4)
DEEP, WIDE = partial(GPT, context=16, width=64, layers=12), partial(GPT, context=32, width=256, layers=4)
WORKLOADS = {
    "tiny": Workload("two linear layers of 64, 8,320 parameters", loops.TwoLayers, 16, 1e-6),
    "deep": Workload("a GPT of 12 layers, 64 wide", DEEP, 1, 1e-5),
    "gpt": Workload("a GPT of 4 layers, 256 wide", WIDE, 2, 1e-5),
}


class Cell(NamedTuple):
    workload: str
    precision: str
    ranks: int
    strategy: str


def build_setup(cell: Cell, world: World) -> Setup:
    _, task, size, _ = WORKLOADS[cell.workload]
    words = f"--parallel.strategy {cell.strategy} --metrics.log_every {BLOCK}"
    return Setup(loops.config_of("cpu", cell.precision, size, ACCUMULATION, words), world, task())


def reference_of(name: str) -> str:
    """The loop that another one is compared with."""
    return UPDATE if name in (UPDATE, OUR_UPDATE) else BASELINE


# --- measuring


def measure(world: World, cell: Cell, rounds: int) -> dict[str, Any]:
    """Every loop of a cell: parity, host reads and times, or a note; every rank calls it, rank 0's result counts."""
    setup = build_setup(cell, world)
    config, split = setup.config, build_split(setup.task, "train", world)
    size, seed = config.train.micro_batch_size, config.run.seed
    batches = build_batches(config.data, setup.task, split, size, ACCUMULATION, seed, world)
    data = list(itertools.islice(batches, 8))  # the same steps for every loop
    rows: dict[str, dict[str, Any]] = {}
    built: dict[str, Loop] = {}
    paths: dict[str, Steps] = {UPDATE: [], BASELINE: []}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they warn of is checked: see first_steps
        telemetry = partial(loops.dist_amp_with_telemetry, folder=Path(folder))
        builders: dict[str, Callable[[Setup], Loop]] = {BASELINE: loops.baseline, AGAIN: loops.baseline}
        builders |= {OURS: loops.dist_amp, TELEMETRY: telemetry, PEERS[0]: accelerate, PEERS[1]: fabric}
        if cell.strategy == "fsdp":
            builders[UPDATE] = partial(loops.update_alone, micro_batches=data[0])
            builders[OUR_UPDATE] = partial(loops.update_alone, micro_batches=data[0], is_ours=True)
        for name, build in builders.items():
            loop, drift, note = first_steps(setup, build, data, paths[reference_of(name)], may_fail=name in PEERS)
            notes, drifts = world.gather_texts(note), world.gather_texts(str(drift))
            if loop is None or any(notes):
                rows[name] = {"note": next(filter(None, notes))}
                continue
            reads = []
            for micro_batches in itertools.islice(itertools.cycle(data), BLOCK if name == TELEMETRY else 1):
                loop.prepare()
                with harness.HostReads() as counted:
                    loop.step(micro_batches)
                reads.append(counted.count)
            rows[name] = {"parity": max(map(float, drifts)), "host_reads": reads, "collectives": None}
            if name in (UPDATE, OUR_UPDATE):
                loop.prepare()
                with CommDebugMode() as calls:
                    loop.step([])
                rows[name]["collectives"] = calls.get_total_counts()
            built[name] = loop
        for name, seconds in timed_rounds(world, built, data, rounds).items():
            rows[name]["seconds"] = seconds
    return {**cell._asdict(), "loops": rows}


def first_steps(
    setup: Setup, build: Callable[[Setup], Loop], data: Sequence[Any], path: Steps, may_fail: bool
) -> tuple[Loop | None, float, str]:
    """(loop, its drift from `path`, note) after its first steps; the note says why it can't run this cell."""
    try:
        loop = build(setup)
        if setup.strategy == "fsdp" and not all(isinstance(p, DTensor) for p in loop.module.parameters()):
            raise RuntimeError("its parameters are not sharded")
        first = next(part for part in loop.module.modules() if isinstance(part, nn.Linear))
        with harness.computes_in(DTYPES[setup.precision], first):
            return loop, drift_of(loop, data, path), ""
    except Exception as error:
        if not may_fail:
            raise
        return None, math.nan, harness.note_of(error)


@torch.no_grad()
def drift_of(loop: Loop, data: Sequence[Any], path: Steps) -> float:
    """Drift of the loop's first steps, each started from the parameters in `path`, which the reference loop fills."""
    sums = [torch.zeros_like(local(parameter)) for parameter in loop.module.parameters()]
    for number, micro_batches in enumerate(itertools.islice(itertools.cycle(data), PARITY_STEPS)):
        loop.prepare()
        with torch.enable_grad():
            loop.step(micro_batches)
        own = [local(parameter) for parameter in loop.module.parameters()]
        if number == len(path):
            path.append([tensor.clone() for tensor in own])
        for tensor, reference, total in zip(own, path[number], sums, strict=True):
            total += tensor - reference
            tensor.copy_(reference)
    drift = max(float(total.abs().max()) for total in sums if total.numel())
    return drift / max(float(reference.abs().max()) for reference in path[-1] if reference.numel())


def timed_rounds(world: World, built: dict[str, Loop], data: Sequence[Any], rounds: int) -> dict[str, Any]:
    """{loop: {measure: seconds per step, one number per round}}, of the slowest rank."""

    def block(name: str, is_warm_up: bool) -> list[float]:
        """`MEASURES` of one block of steps, in seconds per step."""
        world.barrier()
        seconds = []
        for micro_batches in itertools.islice(itertools.cycle(data), BLOCK):
            built[name].prepare()
            cpu, wall = time.process_time_ns(), time.perf_counter_ns()
            built[name].step(micro_batches)
            seconds.append((1e-9 * (time.process_time_ns() - cpu), 1e-9 * (time.perf_counter_ns() - wall)))
        return [*np.min(seconds, axis=0).tolist(), *np.mean(seconds, axis=0).tolist()]

    # Many short rounds say more than few long ones: a disturbance is in both parts of a round's ratio, or in neither.
    seconds = block(BASELINE, True)[MEASURES.index("block_wall")] * BLOCK
    more = int(world.from_main(str(min(max(round(ROUND_SECONDS / seconds), 1), MOST_ROUNDS))))
    gc.freeze()
    own = harness.in_turns(built, block, rounds * more)
    gc.unfreeze()
    of_ranks = [json.loads(text) for text in world.gather_texts(json.dumps(own))]
    slowest = {name: np.max([each[name] for each in of_ranks], axis=0).T for name in built}
    return {name: dict(zip(MEASURES, values.tolist(), strict=True)) for name, values in slowest.items()}


# --- reporting


def targets(cell: Cell, loop: str) -> tuple[float | None, float | None]:
    """The largest ratios to the baseline that are promised, of processor time and of wall time; None: nothing is."""
    if loop == OUR_UPDATE:
        return 0.5, None
    if (loop, cell.workload, cell.ranks) == (OURS, "deep", 1):
        return 0.99, None
    most = PROMISED.get((loop, cell.strategy), {}).get(cell.precision) if cell.workload == "tiny" else None
    return most, most if (cell.strategy, cell.precision) == ("ddp", "bf16") else None


def judge(cell: Cell, rows: dict[str, dict[str, Any]]) -> None:
    """Add to the rows that have times: the ratios to the baseline, the targets and, where promised, a verdict."""
    for name, row in ((name, row) for name, row in rows.items() if "seconds" in row):
        # The fastest step is never the one that logs, so full telemetry is compared by the block's mean.
        part, reference = "block" if name == TELEMETRY else "step", rows[reference_of(name)]["seconds"]
        row["us_per_step"] = 1e6 * median(row["seconds"][f"{part}_cpu"])
        for clock, ratio, most in zip(("cpu", "wall"), RATIOS, targets(cell, name), strict=True):
            values = np.divide(row["seconds"][f"{part}_{clock}"], reference[f"{part}_{clock}"])
            middle, *ends = median_interval(values)
            row[ratio] = {"median": middle, "interval": ends, "rounds": values.tolist(), "target": most}
        if name in (OURS, TELEMETRY, OUR_UPDATE):
            row["verdict"] = verdict(name, row, WORKLOADS[cell.workload].parity)


def verdict(name: str, row: dict[str, Any], parity: float) -> str:
    """met, or what was missed; a ratio is judged by its median."""
    missed = [ratio for ratio in RATIOS if row[ratio]["target"] and row[ratio]["median"] > row[ratio]["target"]]
    missed += [] if row["parity"] <= parity else ["parity"]  # nan too
    missed += ["host reads"] if sum(row["host_reads"]) > (name == TELEMETRY) else []
    missed += ["collectives"] if row["collectives"] not in (None, 1) else []
    return f"missed: {', '.join(missed)}" if missed else "met"


def table_of(cells: Sequence[dict[str, Any]]) -> str:
    """A row per loop; one without times has its note in place of a verdict."""
    rows = []
    for measured, name in [(one, name) for one in cells for name in one["loops"]]:
        row = measured["loops"][name]
        line = {**{field: str(measured[field]) for field in Cell._fields}, "loop": name}
        if "seconds" in row:
            is_reference = reference_of(name) == name
            line["us/step"] = f"{row['us_per_step']:,.0f}"
            line |= {ratio: "1" if is_reference else interval(row[ratio]["rounds"]) for ratio in RATIOS}
            line["host reads"] = " / ".join(map(str, sorted(set(row["host_reads"]))))
            line["collectives"] = "" if row["collectives"] is None else str(row["collectives"])
            line["parity"] = "" if is_reference else f"{row['parity']:.0e}"
            line["target"] = " and ".join(f"{r} <= {row[r]['target']}" for r in RATIOS if row[r]["target"])
        rows.append({**line, "verdict": row.get("verdict", row.get("note", ""))})
    return table(rows, left=5)


# --- the command


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("python -m dist_amp.bench overhead", __doc__)
    harness.add_choices(parser, workloads=list(WORKLOADS), precisions=PRECISIONS, strategies=STRATEGIES)
    add, one, six = parser.add_argument, harness.at_least(1), harness.at_least(6)
    add("--ranks", nargs="+", type=one, default=[1, 2], metavar="N", help="processes; default: 1 2")
    text = "at least 6, for a 95 %% interval; where steps are short, more are taken; default: 20"
    add("--rounds", type=six, default=20, metavar="N", help=text)
    add("--out", type=Path, metavar="DIR", help="write overhead.json and overhead.txt there; default: only print")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 measured, 64 a wrong argument."""
    return exit_status(measure_all, argv)


def measure_all(words: Sequence[str]) -> None:
    """Measure each cell in new processes, one cell after the other."""
    options = parse(words)
    report: dict[str, Any] = machine.about(torch.device("cpu"), "accelerate", "lightning-fabric")
    report |= {"rounds": options.rounds, "cells": []}
    chosen = {name: WORKLOADS[name] for name in options.workloads}
    lines = [f"{name}: {about}, {ACCUMULATION} micro-batches of {size}" for name, (about, _, size, _) in chosen.items()]
    text = "\n".join([machine.machine_line(report), *lines, MEANING])
    print(text, flush=True)
    for workload, ranks in itertools.product(options.workloads, options.ranks):
        strategies = options.strategies if ranks > 1 else ["single"]
        for strategy, precision in itertools.product(strategies, options.precisions):
            cell = Cell(workload, precision, ranks, strategy)
            measured = harness.on_ranks(ranks, measure, cell, options.rounds)
            judge(cell, measured["loops"])
            report["cells"].append(measured)
            print(f"\n{table_of([measured])}", flush=True)
            if options.out is not None:  # after each cell: all of them may take an hour
                save(report, document(text, table_of(report["cells"])), options.out, "overhead.txt")


if __name__ == "__main__":
    sys.exit(main())
