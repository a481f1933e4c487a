"""python -m dist_amp.bench gpu: training speed on one GPU, compared with a hand-written loop and its peers.

It measures tokens per second, MFU and peak memory of a GPT with 124 M parameters and one with 1 B, in bf16 and fp16,
with compiled blocks and without. First it takes fifty steps during which torch raises on any call that waits for the
device. All loops train on the same random tokens, which are on the GPU already. As many loops as fit are in memory
together and take turns, in a new random order each round; CUDA events time blocks of steps. Each round gives every
loop's speed relative to the baseline's of the same round; the table has the median and its 95 % interval.

compiled   torch.compile of each block: dist_amp by its own setting, the others by block.compile()
eager      no compilation
whole      the baseline with model and loss in one graph, next to the baseline compiled block by block

Whatever does not fit into --minutes is left out; the most important cells come first, and the report is written after
each of them.
"""

import argparse
import copy
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from dist_amp.bench import harness
from dist_amp.bench.gpu_report import OURS_IN_BF16, WHOLE, finish, save, table_of
from dist_amp.bench.harness import Arena, Bench, timed_block
from dist_amp.bench.loops import Loop, RandomTokens, Setup, baseline, config_of, dist_amp
from dist_amp.bench.machine import nvidia_smi
from dist_amp.bench.peers import accelerate, fabric
from dist_amp.bench.report import BASELINE, OURS, PEERS
from dist_amp.commands.command_line import Parser, exit_status
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

MODES = ("compiled", "eager", "whole")
PRECISIONS = ("bf16", "fp16")
PACKAGES = ("accelerate", "lightning-fabric", "lightning", "pytorch-lightning", "triton", "matplotlib")
# Estimates, assumed: seconds of a cell with compiled blocks, and the cost of other modes relative to that.
SECONDS, COST = {"124m": 50.0, "1b": 70.0}, {"compiled": 1.0, "eager": 0.7, "whole": 1.3}
STEPS_OF_DATA = 4  # kept on the device and used again and again
LOG_EVERY = 10
FIRST_STEPS = 3  # of a loop: they compile, and allocate memory that later steps do not need
LARGE_GPU = 100e9  # bytes; below, micro-batches are half as large
SMOKE_PEAK = 1e12  # FLOP/s: stands in for a CPU's, whose MFU is meaningless anyway
TRAIN = "train"


@dataclass(frozen=True)
class Model:
    about: str
    layers: int
    width: int
    heads: int
    micro_batch_size: int  # on a GPU with 141 GB
    mfu: float  # the target: compiled, in bf16
    context: int = 1024
    vocabulary: int = 50304


@dataclass(frozen=True)
class Effort:
    """Which models are measured, and for how long."""

    models: Mapping[str, Model]
    free_steps: int  # steps in which nothing may wait for the device
    warm_up: int  # steps before any is timed; those after FIRST_STEPS give the peak memory
    block_seconds: float  # of steps between two clock readings


GPT_124M, GPT_1B = Model("124 M", 12, 768, 12, 32, mfu=0.42), Model("1.0 B", 18, 2048, 16, 16, mfu=0.50)
ON_A_GPU = Effort({"124m": GPT_124M, "1b": GPT_1B}, free_steps=50, warm_up=10, block_seconds=0.35)
FEW = Model("few", 2, 32, 2, 2, mfu=0.42, context=32, vocabulary=512)
MORE = Model("a few more", 3, 64, 2, 2, mfu=0.50, context=32, vocabulary=512)
SMOKE = Effort({"124m": FEW, "1b": MORE}, free_steps=10, warm_up=5, block_seconds=0)


class Cell(NamedTuple):
    model: str
    mode: str
    precision: str

    def __str__(self) -> str:
        return " ".join(self)


def cells_of(options: argparse.Namespace) -> Iterator[Cell]:
    """The most important first."""
    for mode in (mode for mode in MODES if mode in options.modes):
        for precision in (name for name in PRECISIONS if name in options.precisions):
            for model in options.models:
                if mode != "whole" or precision == "bf16":
                    yield Cell(model, mode, precision)


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
        self.effort = SMOKE if options.smoke else ON_A_GPU
        super().__init__("gpu", world, options, self.effort.block_seconds, *PACKAGES)
        models = {name: asdict(self.effort.models[name]) for name in options.models}
        models = {name: {**model, "micro_batch_size": self.micro_batch_size(name)} for name, model in models.items()}
        settings = {"accumulation": options.accumulation, "loss_chunk": options.loss_chunk or "off"}
        self.report |= {"smoke": options.smoke, "models": models, "warm_up": self.effort.warm_up, **settings}
        self.report |= {"free_steps": [], "cells": []}

    def micro_batch_size(self, name: str) -> int:
        if name in self.options.micro_batch:
            return int(self.options.micro_batch[name])
        full, device = self.effort.models[name].micro_batch_size, self.world.device
        small = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory < LARGE_GPU
        return full // 2 if small else full

    def setup(self, cell: Cell, micro_batch_size: int, accumulation: int) -> Setup:
        model = self.effort.models[cell.model]
        words = f"--train.micro_batch_size {micro_batch_size} --train.accumulation_steps {accumulation} "
        words += f"--train.steps 20000 --optim.warmup_steps 10 --precision.dtype {cell.precision} "
        words += f"--run.device {self.world.device.type} "
        if cell.mode != "eager":
            words += f"--compile.blocks true --compile.backend {self.options.backend}"
        sizes = {name: getattr(model, name) for name in ("context", "width", "layers", "heads", "vocabulary")}
        chunk = self.options.loss_chunk or "off"
        task = RandomTokens(self.world.device, DataConfig(), loss_chunk=chunk, **sizes)
        return Setup(config_of(words), self.world, task)

    def peak_flops(self, precision: str) -> float:
        """FLOP/s; 0 if it is not known."""
        if self.options.peak_flops:
            return float(self.options.peak_flops)
        if self.options.smoke:
            return SMOKE_PEAK
        return known_peak(torch.cuda.get_device_name(self.world.device), precision)

    def run(self) -> None:
        harness.warm_up_libraries(self.world.device)
        for precision in self.options.precisions:
            found = self.guarded({"precision": precision}, partial(free_steps, self, precision))
            self.report["free_steps"].append(found)
            save(self.report, self.options.out)
        pace: dict[str, float] = {}  # measured over estimated seconds of a model's last cell
        for cell in cells_of(self.options):
            estimate = 0.0 if self.options.smoke else SECONDS[cell.model] * COST[cell.mode]
            if self.seconds_left < estimate * pace.get(cell.model, 1.0):
                self.report["left_out"].append(str(cell))
                continue
            found = self.guarded(cell._asdict(), partial(measure, self, cell))
            if estimate:
                pace[cell.model] = found["took_seconds"] / estimate
            self.report["cells"].append(found)
            save(self.report, self.options.out)
            self.world.say(f"{cell}, {found['took_seconds']:.0f} s\n{table_of([found])}\n")

    def guarded(self, found: dict[str, Any], measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """`found` with what is measured, or with a note; afterwards the device's memory is empty again."""
        started = time.monotonic()
        try:
            found |= measure()
        except Exception as error:  # not kept: its traceback would hold device memory
            found["note"] = harness.note_of(error)
        found["clocks"] = nvidia_smi(self.world.device, "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # otherwise compiled code is reused by the next measurement
        harness.release(self.world.device)
        found["took_seconds"] = time.monotonic() - started
        self.report["seconds"] = time.monotonic() - self.started
        return found


@contextmanager
def no_waiting(device: torch.device, reads: int = 0) -> Iterator[None]:
    """Waiting for the device raises: on a GPU in torch; on a CPU at the end, after more than `reads` host reads."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    with harness.HostReads() as counted:
        yield
    if counted.count > reads:
        raise RuntimeError(f"{counted.count} host reads")


def free_steps(bench: GpuBench, precision: str) -> dict[str, Any]:
    """Steps in which nothing may wait for the device, first recorded only, then also logged, as in the main job.

    `waits` and `waits_when_logged` are "nothing", or the error.
    """
    cell, size, steps = Cell(bench.options.models[0], "eager", precision), 2, bench.effort.free_steps
    setup = bench.setup(cell, size, accumulation=2)
    run = build_run(setup.config, bench.world, setup.task)
    data = itertools.cycle(setup.task.batches(STEPS_OF_DATA, setup.accumulation, size))

    def step() -> None:
        report = train_step(run, next(data))
        run.step += 1
        run.metrics.record(report)

    def logged_step() -> None:
        step()
        run.metrics.read()  # those started one step earlier
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
    found: dict[str, Any] = {"steps": steps, "waits": what_waits(step, 0)}
    # On a CPU a log step reads memory directly; on a GPU it reads an async copy that has arrived.
    found["waits_when_logged"] = what_waits(logged_step, steps // LOG_EVERY)
    return {**found, "applied": int(run.schedule.applied_steps), "taken": run.step}


def measure(bench: GpuBench, cell: Cell) -> dict[str, Any]:
    """One cell: every loop is warmed up, then timed in turns with the baseline, as many at a time as memory holds."""
    size, accumulation = bench.micro_batch_size(cell.model), bench.options.accumulation
    setup = bench.setup(cell, size, accumulation)
    arena = CellArena(bench, cell, setup, setup.task.batches(STEPS_OF_DATA, accumulation, size))
    tokens = sum(setup.task.tokens(micro_batch) for micro_batch in arena.data[0])
    arena.measure(arena.builders)
    with torch.device("meta"):
        model = CausalLM.build_model(setup.task)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "micro_batch_size": size,
        "accumulation": accumulation,
        "tokens_per_step": tokens,
        "flops_per_token": flops_per_item(setup.task, model) / setup.task.context,
        "peak_flops": bench.peak_flops(cell.precision),
        "groups": arena.groups,
        "loops": arena.rows[TRAIN],
    }


class CellArena(Arena):
    """The loops of one cell."""

    def __init__(self, bench: GpuBench, cell: Cell, setup: Setup, data: Sequence[Any]):
        super().__init__(bench, BASELINE, [TRAIN], base_may_leave=False)
        self.data, self.warm_up = list(data), bench.effort.warm_up
        self.builders = builders(cell, setup)

    def enter(self, name: str) -> dict[str, Loop]:
        build, setup = self.builders[name]
        before = memory_bytes(self.device)[1]
        loop = build(setup)
        dtypes: set[torch.dtype] = set()
        head = [part for part in loop.module.modules() if isinstance(part, nn.Linear)][-1]  # outside of all blocks
        hook = head.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
        if name == WHOLE:
            hook.remove()  # the head is compiled too
        timed_block(self.world, loop, self.data, FIRST_STEPS)
        hook.remove()
        if wrong := dtypes - {DTYPES[setup.precision]}:
            raise RuntimeError(f"trains in {str(wrong.pop()).removeprefix('torch.')}")
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds = timed_block(self.world, loop, self.data, self.warm_up - FIRST_STEPS)
        peak, after = (size - before for size in memory_bytes(self.device))
        # What the loop has made of its model: the mean loss, computed in the same way for all loops.
        with uncompiled(), torch.no_grad(), torch.autocast(self.device.type, dtype=DTYPES[setup.precision]):
            loss = float(setup.task.loss_sum(loop.module, self.data[0][0], "mean"))
        row = {"step_seconds": seconds, "peak_bytes": peak, "resident_bytes": after, "loss": loss}
        self.rows[TRAIN][name] = row
        return {TRAIN: loop}


# --- the command


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("python -m dist_amp.bench gpu", __doc__)
    add = parser.add_argument
    harness.add_choices(parser, models=list(ON_A_GPU.models), modes=MODES, precisions=PRECISIONS)
    text = "samples per micro-batch; default: 124m=32 1b=16, half of that on a GPU below 100 GB"
    add("--micro_batch", nargs="+", type=micro_batch, default=[], metavar="MODEL=N", help=text)
    add("--accumulation", type=harness.at_least(1), default=1, metavar="N", help="micro-batches per step; default: 1")
    text = "the task's loss_chunk, the tokens whose logits exist at a time: less memory, more time; default: off"
    add("--loss_chunk", type=int, default=0, metavar="N", help=text)
    text = "the GPU's peak FLOP/s for the MFU; default: from the table in telemetry/mfu.py"
    add("--peak_flops", type=float, default=0.0, metavar="N", help=text)
    harness.add_common(parser, 8.0, "benchmarks", "smoke", "runs/gpu_smoke")
    options = harness.with_defaults(parser.parse_args(argv), argv)
    options.micro_batch = dict(options.micro_batch)
    return options


def micro_batch(text: str) -> tuple[str, int]:
    """An argparse type: "124m=32" -> ("124m", 32)."""
    name, _, number = text.partition("=")
    if name not in ON_A_GPU.models or not number.isdecimal() or int(number) < 1:
        models = " or ".join(ON_A_GPU.models)
        raise argparse.ArgumentTypeError(f"{text} is not {models} and a number, as in 124m=32")
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
