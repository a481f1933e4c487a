"""python -m dist_amp.bench gpu: what one GPU makes of dist_amp, of the loop written by hand, and of its peers.

Tokens per second, MFU and peak memory of a GPT of 124 M parameters and one of 1 B, with blocks compiled and as they are
written, in bf16 and fp16; before it, fifty steps in which torch raises at whatever waits for the device. All train on
the same random tokens, which lie on the GPU. The loops of a cell stand in memory together, as many as fit, and take
turns, in an order drawn anew each round, with blocks of steps that CUDA events time; a round gives each loop's speed
over the bare loop's of the same round, and the table the median of these with its 95 % interval.

compiled   torch.compile of each block: dist_amp by its own settings, the others by block.compile()
eager      as it is written
whole      the bare loop with model and loss in one graph, beside the same compiled block by block: what that leaves

What does not fit into --minutes is left out, the most important cells come first, and the files are written after each.
"""

import argparse
import gc
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dist_amp.bench.gpu_cells import MODES, ON_A_GPU, PRECISIONS, SHARE, SMOKE, Cell, Contender, cells_of, contenders
from dist_amp.bench.gpu_report import WHOLE, finish, save, table
from dist_amp.bench.harness import HostReads
from dist_amp.bench.loops import Loop, RandomTokens, Setup
from dist_amp.bench.machine import about, clocks
from dist_amp.bench.report import BARE
from dist_amp.bench.timing import OUT_OF_MEMORY, fits, in_turns, prime, release, timed_block, why_not
from dist_amp.commands.command_line import Parser, exit_status
from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError, in_one_line
from dist_amp.fast.compile import uncompiled
from dist_amp.precision import DTYPES
from dist_amp.run import build_run
from dist_amp.settings import DataConfig, RunConfig
from dist_amp.step import train_step
from dist_amp.tasks.causal_lm import CausalLM
from dist_amp.telemetry.metrics import memory_bytes
from dist_amp.telemetry.mfu import flops_per_item, known_peak
from dist_amp.world import World, start

# Whose versions are told; Fabric comes in three packages.
PACKAGES = ("accelerate", "lightning-fabric", "lightning", "pytorch-lightning", "triton", "matplotlib")
STEPS_OF_DATA = 4  # that lie on the device, again and again
LOG_EVERY = 10
SPARE_SECONDS = 20  # of --minutes, for what a cell takes longer than was thought, and for the picture
FIRST_STEPS = 3  # of a loop: they compile, and take memory that is not needed again
ROOMY = 100e9  # bytes of a device; with less, micro-batches are half as large
NO_TIME = "left out: no time"
SMOKE_PEAK = 1e12  # FLOP/s: a CPU has none in the table, and the figures mean nothing anyway


class Bench:
    """One run of the command: its settings, its time and its report."""

    def __init__(self, world: World, options: argparse.Namespace):
        self.world = world
        self.options = options
        self.effort = SMOKE if options.smoke else ON_A_GPU
        self.began = time.monotonic()
        self.pace: dict[str, float] = {}
        self.report: dict[str, Any] = {
            "smoke": options.smoke,
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python -m dist_amp.bench gpu", *options.words]),
            **about(world.device, *PACKAGES),
            "models": {
                name: {**asdict(self.effort.models[name]), "micro_batch_size": self.micro_batch_size(name)}
                for name in options.models
            },
            "accumulation": options.accumulation,
            "backend": options.backend,
            "loss_chunk": options.loss_chunk or "off",
            "rounds": options.rounds,
            "warm_up": self.effort.warm_up,
            "minutes": options.minutes,
            "seconds": 0.0,
            "free_steps": [],
            "cells": [],
            "left_out": [],
        }

    @property
    def seconds_left(self) -> float:
        return self.options.minutes * 60 - SPARE_SECONDS - (time.monotonic() - self.began)

    def micro_batch_size(self, name: str) -> int:
        if name in self.options.micro_batch:
            return int(self.options.micro_batch[name])
        full, device = self.effort.models[name].micro_batch_size, self.world.device
        small = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory < ROOMY
        return full // 2 if small else full

    def setup(self, cell: Cell, micro_batch_size: int, accumulation: int) -> Setup:
        model = self.effort.models[cell.model]
        words = ["--train.micro_batch_size", micro_batch_size, "--train.accumulation_steps", accumulation]
        words += ["--train.steps", 20_000, "--optim.warmup_steps", 10]
        words += ["--precision.dtype", cell.precision, "--run.device", self.world.device.type]
        words += ["--run.dir", "unused", "--run.resume", "never", "--eval.every", "off", "--checkpoint.every", "off"]
        if cell.mode != "eager":
            words += ["--compile.blocks", "true", "--compile.backend", self.options.backend]
        sizes = {name: getattr(model, name) for name in ("context", "width", "layers", "heads", "vocabulary")}
        chunk = self.options.loss_chunk or "off"
        task = RandomTokens(self.world.device, DataConfig(), loss_chunk=chunk, **sizes)
        return Setup(load_config([str(word) for word in words], environ={}), self.world, task)

    def peak_flops(self, precision: str) -> float:
        """FLOP/s; 0 where it is not known."""
        if self.options.peak_flops:
            return float(self.options.peak_flops)
        if self.options.smoke:
            return SMOKE_PEAK
        return known_peak(torch.cuda.get_device_name(self.world.device), precision)

    def estimate(self, cell: Cell) -> float:
        """Seconds that a cell takes; by what was assumed, and by how far the last one of its model was from that."""
        return self.effort.models[cell.model].seconds * SHARE[cell.mode] * self.pace.get(cell.model, 1.0)

    def run(self) -> None:
        prime(self.world.device)
        for precision in self.options.precisions:
            told = self.tell(lambda: free_steps(self, precision))  # noqa: B023 (it is called at once)
            self.report["free_steps"].append({"precision": precision, **told})
            save(self.report, self.options.out)
        for cell in cells_of(self.options):
            if self.seconds_left < (expected := self.estimate(cell)):
                self.report["left_out"].append(str(cell))
                continue
            told = {**asdict(cell), **self.tell(lambda: measure(self, cell))}  # noqa: B023
            if expected:
                self.pace[cell.model] = told["took_seconds"] / expected * self.pace.get(cell.model, 1.0)
            self.report["cells"].append(told)
            save(self.report, self.options.out)
            self.world.say(f"{cell}, {told['took_seconds']:.0f} s\n{table([told])}\n")

    def tell(self, what: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What it tells, or why it can't; afterwards the device's memory is empty again."""
        began = time.monotonic()
        try:
            told = what()
        except Exception as error:  # which is not kept: it would hold what was on the device
            told = {"cant": why_not(error)}
        told["clocks"] = clocks(self.world.device)
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # the code would be taken for the next cell's
        release(self.world.device)
        told["took_seconds"] = time.monotonic() - began
        self.report["seconds"] = time.monotonic() - self.began
        return told


@contextmanager
def no_waiting(device: torch.device, reads: int = 0) -> Iterator[None]:
    """What waits for the device raises: on a GPU in torch; on a CPU, at the end, if there were more host reads."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    with HostReads() as seen:
        yield
    if seen.count > reads:
        raise RuntimeError(f"{seen.count} host reads")


def free_steps(bench: "Bench", precision: str) -> dict[str, Any]:
    """Steps in which nothing may wait for the device: their outcomes are noted, then logged too, as the main job does.

    Tells what waited: "nothing", or the error.
    """
    cell, size, steps = Cell(bench.options.models[0], "eager", precision), 2, bench.effort.free_steps
    setup = bench.setup(cell, size, accumulation=2)
    run = build_run(setup.config, bench.world, setup.task)
    data = itertools.cycle(setup.task.batches(STEPS_OF_DATA, setup.accumulation, size))

    def step() -> None:
        report = train_step(run, next(data))
        run.step += 1
        run.metrics.record(report)

    def step_with_figures() -> None:
        step()
        run.metrics.read()  # those begun a step before
        if run.step % LOG_EVERY == 0:
            run.metrics.begin(run.step, run.schedule, run.scaler, run.data)

    def what_waits(step: Callable[[], None], reads: int) -> str:
        try:
            with no_waiting(bench.world.device, reads):
                for _ in range(steps):
                    step()
        except Exception as error:
            return in_one_line(error)
        return "nothing"

    for _ in range(3):
        step()
    run.metrics.log(run.step, run.schedule, run.scaler, run.data)
    told: dict[str, Any] = {"steps": steps, "waits": what_waits(step, 0)}
    # On a CPU its own memory is what a log step reads; on a GPU what was sent there, and has arrived.
    told["waits_when_logged"] = what_waits(step_with_figures, steps // LOG_EVERY)
    return {**told, "applied": int(run.schedule.applied_steps), "taken": run.step}


def measure(bench: "Bench", cell: Cell) -> dict[str, Any]:
    """One cell: every loop built, warmed up, and timed beside the bare one, as many at a time as memory holds."""
    device, entrants = bench.world.device, contenders(cell)
    size, accumulation = bench.micro_batch_size(cell.model), bench.options.accumulation
    setup = bench.setup(cell, size, accumulation)
    data = setup.task.batches(STEPS_OF_DATA, accumulation, size)
    rows: dict[str, dict[str, Any]] = {}
    groups: list[list[str]] = []
    resident: dict[str, Loop] = {}

    def time_and_clear() -> None:
        groups.append(list(resident))
        time_together(bench, resident, rows, data)
        for name in [name for name in resident if name != BARE]:
            del resident[name]
        release(device)

    for name, contender in entrants.items():
        if rows and bench.seconds_left < 0:
            rows[name] = {"cant": NO_TIME}
            continue
        if len(resident) > 1 and not fits(device, rows.values()):
            time_and_clear()
        rows[name] = warmed(bench, name, contender, setup, data, resident)
        release(device)
        if rows[name].get("cant") == OUT_OF_MEMORY and len(resident) > 1:  # perhaps because of the others
            time_and_clear()
            rows[name] = warmed(bench, name, contender, setup, data, resident)
            release(device)
    if len(resident) > 1 or not groups:  # the bare loop alone was timed already
        time_and_clear()
    with torch.device("meta"):
        model = CausalLM.build_model(setup.task)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "micro_batch_size": size,
        "accumulation": accumulation,
        "tokens_per_step": sum(setup.task.tokens(micro_batch) for micro_batch in data[0]),
        "flops_per_token": flops_per_item(setup.task, model) / setup.task.context,
        "peak_flops": bench.peak_flops(cell.precision),
        "groups": groups,
        "loops": rows,
    }


def warmed(
    bench: "Bench", name: str, contender: Contender, setup: Setup, data: Sequence[Any], resident: dict[str, Loop]
) -> dict[str, Any]:
    """Take a loop's first steps and make it resident; returns its memory and loss, or why it can't."""
    world, own = bench.world, contender.own(setup)
    before = memory_bytes(world.device)[1]
    try:
        loop = contender.make(own)
        seen: list[torch.dtype] = []
        head = [part for part in loop.module.modules() if isinstance(part, nn.Linear)][-1]  # in no block
        hook = head.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        if name == WHOLE:
            hook.remove()  # it is compiled as well
        timed_block(world, loop, data, FIRST_STEPS)
        hook.remove()
        if set(seen) - {DTYPES[own.precision]}:
            return {"cant": f"can't: trains in {str(seen[0]).removeprefix('torch.')}"}
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(world.device)
        seconds = timed_block(world, loop, data, bench.effort.warm_up - FIRST_STEPS)
        peak, after = memory_bytes(world.device)
        loss = loss_of(own, loop, data[0][0])
    except Exception as error:
        return {"cant": why_not(error)}
    resident[name] = loop
    return {"step_seconds": seconds, "peak_bytes": peak - before, "resident_bytes": after - before, "loss": loss}


def loss_of(setup: Setup, loop: Loop, batch: Any) -> float:
    """What the loop has made of its model, to compare with the others': mean loss, computed alike for all."""
    with uncompiled(), torch.no_grad(), torch.autocast(setup.world.device.type, dtype=DTYPES[setup.precision]):
        return float(setup.task.loss(loop.module, batch, "mean"))


def time_together(bench: "Bench", loops: dict[str, Loop], rows: dict[str, dict[str, Any]], data: Sequence[Any]) -> None:
    """Note in the rows each loop's seconds per step, one number a round, and its speed over the bare loop's there.

    A loop that fails leaves, with its reason in its row.
    """
    slowest = max((rows[name]["step_seconds"] for name in loops), default=1.0)
    steps = max(1, round(bench.effort.block_seconds / slowest))
    seconds, failed = in_turns(bench.world, loops, data, bench.options.rounds, steps, lambda: bench.seconds_left >= 0)
    for name, why in failed.items():
        rows[name]["cant"] = why
        del loops[name]
    for name, own in seconds.items():
        rows[name].setdefault("seconds", []).extend(own)
        if BARE in seconds:
            speeds = [theirs / mine for theirs, mine in zip(seconds[BARE], own, strict=True)]
            rows[name].setdefault("of_bare", []).extend(speeds)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("python -m dist_amp.bench gpu", __doc__)
    add, models = parser.add_argument, list(ON_A_GPU.models)
    add("--models", nargs="+", choices=models, default=models, help="default: all")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    add("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="default: both")
    add("--micro_batch", nargs="+", default=[], metavar="MODEL=N",
        help="samples in a micro-batch; default: 124m=32 1b=16, half of it below 100 GB")  # fmt: skip
    add("--accumulation", type=int, default=1, metavar="N", help="micro-batches in a step; default: 1")
    add("--loss_chunk", type=int, default=0, metavar="N",
        help="the task's own, tokens whose logits exist at a time: less memory, more time; default: off")  # fmt: skip
    add("--backend", help="of torch.compile; default: inductor, with --smoke aot_eager")
    add("--peak_flops", type=float, default=0.0, metavar="N", help="FLOP/s; default: from the table of peaks.py")
    add("--rounds", type=int, default=0, metavar="N", help="default: 10, with --smoke 2")
    add("--minutes", type=float, default=8.0, metavar="N", help="default: 8")
    add("--out", type=Path, metavar="DIR", help="default: benchmarks, with --smoke runs/gpu_smoke")
    add("--smoke", action="store_true", help="on a CPU, models reduced: tries every path; its figures mean nothing")
    options = parser.parse_args(argv)
    options.words = list(argv)
    options.rounds = options.rounds or (2 if options.smoke else 10)
    options.backend = options.backend or ("aot_eager" if options.smoke else "inductor")
    options.out = options.out or Path("runs/gpu_smoke" if options.smoke else "benchmarks")
    options.micro_batch = dict(micro_batch(text, models) for text in options.micro_batch)
    for name in ("accumulation", "rounds"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} {getattr(options, name)} must be at least 1")
    return options


def micro_batch(text: str, models: Sequence[str]) -> tuple[str, int]:
    """("124m", 32) of "124m=32"."""
    name, _, number = text.partition("=")
    if name not in models or not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"--micro_batch {text} is not one of {' or '.join(models)}, and a number, as in 124m=32")
    return name, int(number)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 measured, 64 an argument or no GPU."""
    return exit_status(measure_all, argv)


def measure_all(words: Sequence[str]) -> None:
    """What the words ask for, cell by cell. Errors: ConfigError for a word, or without a GPU."""
    options = parse(words)
    if not options.smoke and not torch.cuda.is_available():
        raise ConfigError(
            "the bench gpu needs a GPU, and torch finds none; run it where there is one, or add --smoke to try its "
            "paths on this CPU, which measures nothing"
        )
    with start(RunConfig(device="cpu" if options.smoke else "cuda")) as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of compilers, schedulers and half precision: they repeat for each loop
        if world.world_size > 1:
            raise ConfigError(f"the bench gpu is for one process, and here are {world.world_size}; leave out torchrun")
        bench, threads = Bench(world, options), torch.get_num_threads()
        torch.set_num_threads(1 if options.smoke else threads)  # its models are too small to share
        gc.freeze()  # modules: they would be looked at in each of a hundred collections
        try:
            bench.run()
        finally:  # stopped by hand, too
            gc.unfreeze()
            torch.set_num_threads(threads)
            world.say(finish(bench.report, options.out))


if __name__ == "__main__":
    sys.exit(main())
