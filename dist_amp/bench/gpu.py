"""python -m dist_amp.bench gpu: training speed on one GPU, compared with a hand-written loop and its peers.

It measures tokens per second, MFU and peak memory of a GPT with 124 M parameters and one with 1 B, in bf16 and fp16.
First it takes fifty steps during which torch raises on any call that waits for the device. All loops train on the same
random tokens, which are on the GPU already, and take turns, in a new random order each round. The report is written
after each cell of model, mode and precision; whatever does not fit into --minutes is left out.

compiled   torch.compile of each block: dist_amp by its own setting, the others by block.compile()
eager      no compilation
whole      the baseline with model and loss in one graph, next to the baseline compiled block by block
"""

import argparse
import copy
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from dist_amp.bench import harness
from dist_amp.bench.gpu_report import OURS_IN_BF16, WHOLE, finish, save, table_of
from dist_amp.bench.harness import Arena, Bench, timed_block
from dist_amp.bench.loops import Loop, RandomTokens, Setup, baseline, config_of, dist_amp
from dist_amp.bench.machine import nvidia_smi
from dist_amp.bench.peers import accelerate, fabric
from dist_amp.bench.report import BASELINE, OURS, PEERS, Report
from dist_amp.commands.command_line import Parser, exit_status
from dist_amp.errors import ConfigError, in_one_line
from dist_amp.fast.compile import uncompiled
from dist_amp.precision import DTYPES
from dist_amp.run import build_run
from dist_amp.settings import DataConfig, RunConfig
from dist_amp.step import train_step
from dist_amp.tasks.causal_lm import CausalLM
from dist_amp.telemetry.metrics import memory_use
from dist_amp.telemetry.mfu import flops_per_item, known_peak
from dist_amp.world import World, start

MODES = ("compiled", "eager", "whole")
PRECISIONS = ("bf16", "fp16")
NOT_COMPARED = ("whole", "fp16")  # mode and precision
PACKAGES = ("accelerate", "lightning-fabric", "lightning", "pytorch-lightning", "triton", "matplotlib")
STEPS_OF_DATA = 4  # kept on the device and used again and again
LOG_EVERY = 10
FIRST_STEPS = 3  # of a loop: they compile, and allocate memory that later steps do not need
SMOKE_PEAK = 1e12  # FLOP/s: stands in for a CPU's, whose MFU is meaningless anyway
TRAIN = "train"


# about: its parameters; micro_batch_size: on a GPU with 141 GB; mfu: the target, compiled, in bf16.
SIZES = ("about", "layers", "width", "heads", "micro_batch_size", "mfu", "context", "vocabulary")
MODELS = {"124m": ("124 M", 12, 768, 12, 32, 0.42, 1024, 50304), "1b": ("1.0 B", 18, 2048, 16, 16, 0.50, 1024, 50304)}
SMALL_MODELS = {"124m": ("few", 2, 32, 2, 2, 0.42, 32, 512), "1b": ("a few more", 3, 64, 2, 2, 0.50, 32, 512)}


# Steps in which nothing may wait; steps before any is timed, of which those after FIRST_STEPS give the peak memory; and
# seconds of steps between two clock readings.
ON_A_GPU, SMOKE = (50, 10, 0.35), (10, 5, 0.0)


class Cell(NamedTuple):
    model: str
    mode: str
    precision: str


def builders(cell: Cell, setup: Setup) -> dict[str, tuple[Callable[[Setup], Loop], Setup]]:
    """{loop: (how to build it, from what)} of a cell; the baseline is first."""
    if cell.mode == "whole":
        return {BASELINE: (baseline, setup), WHOLE: (baseline_in_one_graph, setup)}
    in_bf16 = replace(setup, config=replace(setup.config, precision=replace(setup.config.precision, dtype="bf16")))
    return {
        BASELINE: (baseline, setup),
        OURS: (dist_amp, setup),
        **({OURS_IN_BF16: (dist_amp, in_bf16)} if cell.precision == "fp16" else {}),
        PEERS[0]: (accelerate, setup),
        # Fabric refuses to clip with fused AdamW and the scaler.
        PEERS[1]: (fabric, replace(setup, fused=cell.precision != "fp16")),
    }


def baseline_in_one_graph(setup: Setup) -> Loop:
    """The baseline with model and loss compiled as one graph, so that the loss is fused too."""
    options, task = setup.config.compile, copy.copy(setup.task)
    task.loss_sum = torch.compile(task.loss_sum, backend=options.backend, dynamic=options.dynamic)
    return baseline(replace(setup, task=task, config=replace(setup.config, compile=replace(options, blocks=False))))


class GpuBench(Bench):
    """One run of the command."""

    def __init__(self, world: World, options: argparse.Namespace):
        self.free_steps, self.warm_up, block_seconds = SMOKE if options.smoke else ON_A_GPU
        super().__init__("gpu", world, options, block_seconds, *PACKAGES)
        known = SMALL_MODELS if options.smoke else MODELS
        models: dict[str, dict[str, Any]] = {
            name: dict(zip(SIZES, known[name], strict=True)) for name in options.models
        }
        for name, model in models.items():
            model["micro_batch_size"] = options.micro_batch.get(name, model["micro_batch_size"])
        self.report |= {
            "smoke": options.smoke,
            "models": models,
            "warm_up": self.warm_up,
            "free_steps": [],
            "cells": [],
        }

    def setup(self, cell: Cell, micro_batch_size: int, accumulation: int) -> Setup:
        model = self.report["models"][cell.model]
        blocks = f"--compile.blocks true --compile.backend {self.options.backend}" if cell.mode != "eager" else ""
        config = config_of(self.world.device.type, cell.precision, micro_batch_size, accumulation, blocks)
        sizes = {name: model[name] for name in ("context", "width", "layers", "heads", "vocabulary")}
        return Setup(config, self.world, RandomTokens(self.world.device, DataConfig(), **sizes))

    def run(self) -> None:
        options, report = self.options, self.report
        harness.warm_up_libraries(self.world.device)
        for precision in options.precisions:
            report["free_steps"].append(self.guarded(free_steps, Cell(options.models[0], "eager", precision)))
        longest = 0.0  # seconds of a cell
        for mode, precision, model in itertools.product(MODES, PRECISIONS, options.models):  # the most important first
            if mode not in options.modes or precision not in options.precisions or (mode, precision) == NOT_COMPARED:
                continue
            cell = Cell(model, mode, precision)
            if self.seconds_left < longest:
                report["left_out"].append(" ".join(cell))
                continue
            found = self.guarded(measure, cell)
            longest = max(longest, found["took_seconds"])
            report["cells"].append(found)
            save(report, options.out)
            self.world.say(f"{' '.join(cell)}, {found['took_seconds']:.0f} s\n{table_of([found])}\n")

    def guarded(self, measure: Callable[["GpuBench", Cell], Report], cell: Cell) -> dict[str, Any]:
        """What is measured of a cell, or a note; afterwards the device's memory is empty again."""
        started, found = time.monotonic(), cell._asdict()
        try:
            found |= measure(self, cell)
        except Exception as error:  # not kept: its traceback would hold device memory
            found["note"] = harness.note_of(error)
        found["clocks"] = nvidia_smi(self.world.device, "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # otherwise compiled code is reused by the next measurement
        harness.release(self.world.device)
        found["took_seconds"] = time.monotonic() - started
        self.report["seconds"] = time.monotonic() - self.started
        return found


def free_steps(bench: GpuBench, cell: Cell) -> dict[str, Any]:
    """Steps in which nothing may wait for the device, first recorded only, then also logged, as in the main job.

    `waits` and `waits_when_logged` are "nothing", or the error.
    """
    size, steps = 2, bench.free_steps
    setup = bench.setup(cell, size, accumulation=2)
    run = build_run(setup.config, bench.world, setup.task)
    data = itertools.cycle(setup.task.batches(STEPS_OF_DATA, 2, size))

    def step() -> None:
        report = train_step(run, next(data))
        run.metrics.record(report)

    def logged_step() -> None:
        step()
        run.metrics.read()  # those started one step earlier
        if run.step % LOG_EVERY == 0:
            run.metrics.begin(run.step, run.schedule, run.scaler, run.data)

    def what_waits(step: Callable[[], None], reads: int) -> str:
        """On a GPU torch raises where a step waits; on a CPU, more host reads than `reads` count as waiting."""
        on_gpu = bench.world.device.type == "cuda"
        try:
            if on_gpu:
                torch.cuda.set_sync_debug_mode("error")
            with harness.HostReads() as counted:
                for _ in range(steps):
                    step()
        except Exception as error:
            return in_one_line(error)
        finally:
            if on_gpu:
                torch.cuda.set_sync_debug_mode("default")
        return "nothing" if on_gpu or counted.count <= reads else f"{counted.count} host reads"

    for _ in range(3):
        step()
    run.metrics.log(run.step, run.schedule, run.scaler, run.data)
    found: dict[str, Any] = {"steps": steps, "waits": what_waits(step, 0)}
    # On a CPU a log step reads memory directly; on a GPU it reads an async copy that has arrived.
    found["waits_when_logged"] = what_waits(logged_step, steps // LOG_EVERY)
    return {**found, "applied": int(run.schedule.applied_steps), "taken": run.step}


def measure(bench: GpuBench, cell: Cell) -> dict[str, Any]:
    """One cell: every loop is warmed up, then timed in turns with the baseline."""
    size = bench.report["models"][cell.model]["micro_batch_size"]
    setup = bench.setup(cell, size, accumulation=1)
    arena = CellArena(bench, BASELINE, [TRAIN], base_may_leave=False)
    arena.data, arena.builders = setup.task.batches(STEPS_OF_DATA, 1, size), builders(cell, setup)
    tokens = sum(setup.task.tokens(micro_batch) for micro_batch in arena.data[0])
    arena.measure(arena.builders)
    with torch.device("meta"):
        model = CausalLM.build_model(setup.task)
    is_cuda = bench.world.device.type == "cuda"
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_step": tokens,
        "flops_per_token": flops_per_item(setup.task, model) / setup.task.context,
        "peak_flops": known_peak(torch.cuda.get_device_name(), cell.precision) if is_cuda else SMOKE_PEAK,
        "loops": arena.rows[TRAIN],
    }


class CellArena(Arena):
    """The loops of one cell, by their builders."""

    bench: GpuBench
    builders: dict[str, tuple[Callable[[Setup], Loop], Setup]]

    def enter(self, name: str) -> dict[str, Loop]:
        build, setup = self.builders[name]
        before = memory_use(self.device)[1]
        loop = build(setup)
        head = [part for part in loop.module.modules() if isinstance(part, nn.Linear)][-1]  # outside of all blocks
        with nullcontext() if name == WHOLE else harness.computes_in(DTYPES[setup.precision], head):
            timed_block(self.world, loop, self.data, FIRST_STEPS)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds = timed_block(self.world, loop, self.data, self.bench.warm_up - FIRST_STEPS)
        peak = memory_use(self.device)[0] - before
        # What the loop has made of its model: the mean loss, computed in the same way for all loops.
        with uncompiled(), torch.no_grad(), torch.autocast(self.device.type, dtype=DTYPES[setup.precision]):
            loss = float(setup.task.loss_sum(loop.module, self.data[0][0], "mean"))
        self.rows[TRAIN][name] = {"step_seconds": seconds, "peak_bytes": peak, "loss": loss}
        return {TRAIN: loop}


# --- the command


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("python -m dist_amp.bench gpu", __doc__)
    harness.add_choices(parser, models=list(MODELS), modes=MODES, precisions=PRECISIONS)
    text = "samples per micro-batch; default: 124m=32 1b=16, which need 141 GB"
    parser.add_argument("--micro_batch", nargs="+", type=micro_batch, default=[], metavar="MODEL=N", help=text)
    harness.add_common(parser, 8.0, "benchmarks", "smoke", "runs/gpu_smoke")
    options = harness.with_defaults(parser.parse_args(argv), argv)
    options.micro_batch = dict(options.micro_batch)
    return options


def micro_batch(text: str) -> tuple[str, int]:
    """An argparse type: "124m=32" -> ("124m", 32)."""
    name, _, number = text.partition("=")
    if name not in MODELS or not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not {' or '.join(MODELS)} and a number, as in 124m=32")
    return name, int(number)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 measured, 64 a wrong argument or no GPU."""
    return exit_status(measure_all, argv)


def measure_all(words: Sequence[str]) -> None:
    """Measure cell by cell. Errors: ConfigError for a wrong argument, or without a GPU."""
    options = parse(words)
    if not options.smoke and not torch.cuda.is_available():
        raise ConfigError("bench gpu needs a GPU, and torch finds none; add --smoke to test its code paths on this CPU")
    with start(RunConfig(device="cpu" if options.smoke else "cuda")) as world, harness.quiet_process(options.smoke):
        harness.single_process("gpu", world.world_size)
        bench = GpuBench(world, options)
        try:
            bench.run()
        finally:  # after Ctrl-C too
            world.say(finish(bench.report, options.out))


if __name__ == "__main__":
    sys.exit(main())
