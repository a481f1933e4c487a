"""One experiment in every precision: its loss curve, its memory, and the time of its steps."""

import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dist_amp.bench.amp.experiments import INFERENCE, TRAIN, Experiment
from dist_amp.bench.amp.roofline import count
from dist_amp.bench.harness import Arena, Bench, NoTime, note_of, release, timed_block
from dist_amp.bench.loops import Loop, Setup, baseline
from dist_amp.config.task_class import build_split, build_task
from dist_amp.config.validate import accumulation_steps
from dist_amp.data import build_batches
from dist_amp.run import Run, build_run
from dist_amp.runtime.process import set_tf32
from dist_amp.runtime.random_state import seed_all
from dist_amp.settings import Config
from dist_amp.step import train_step
from dist_amp.supervise.out_of_memory import is_out_of_memory
from dist_amp.verify.dtypes import tensors_in

EAGER, COMPILED = FORMS = ("eager", "compiled")
STEPS_OF_DATA = 4  # kept on the device and used again and again
LEARNING = 0.4  # of the remaining time, at most, for the loss curves of an experiment
LEAST_STEPS = 10  # of a loss curve
MOST_SKIPS = 20  # in a row; a scale of 2^16 is below 1 by then
MOST_GRAPHS = 1000  # of one class of blocks


class Recipe(NamedTuple):
    """One precision, as settings. roundoff: relative error of a rounded product, half a unit in the last place."""

    words: str
    roundoff: float
    about: str
    scales: bool | None = None  # with the loss scaler; None: as in the main job, in fp16 only


FP32 = "fp32"
FULL, AUTO = "--precision.tf32 false --use_amp false", "--precision.tf32 false --use_amp true --precision.dtype"
RECIPES = {
    FP32: Recipe(FULL, 2**-24, "float32, without TF32"),
    "tf32": Recipe("--precision.tf32 true --use_amp false", 2**-11, "float32 with products in TF32"),
    "bf16": Recipe(f"{AUTO} bf16", 2**-8, "autocast to bfloat16"),
    "fp16": Recipe(f"{AUTO} fp16", 2**-11, "autocast to float16, with the loss scaler"),
    "fp16_unscaled": Recipe(f"{AUTO} fp16", 2**-11, "autocast to float16, without the loss scaler", scales=False),
    "fp32_scaled": Recipe(FULL, 2**-24, "float32, with the loss scaler", scales=True),
}
USUAL = (FP32, "tf32", "bf16", "fp16")  # in every form and mode
TO_TRAIN = (*USUAL, "fp16_unscaled")  # and `Experiment.precisions`
BASELINES = {f"{name} baseline": name for name in (FP32, "bf16", "fp16")}  # the hand-written loop


class SharedTask:
    """A task for all precisions: datasets are built once, and the baseline gets a mean loss."""

    def __init__(self, task: Any):
        self._task = task
        self.build_dataset = cache(task.build_dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def loss_sum(self, model: nn.Module, batch: Any, reduction: str = "sum") -> Tensor:
        total = self._task.loss_sum(model, batch)
        return total if reduction == "sum" else total / self._task.weight(batch)


def measure(bench: Bench, experiment: Experiment, found: dict[str, Any]) -> None:
    """Fill `found` with the experiment's results as they are measured.

    groups: rows by form, mode and micro-batch size; curves: losses; again: of the second float32 run; work: counted
    operations. Errors: Failure in the settings, the task or the data.
    """
    options, device = bench.options, bench.world.device
    config = experiment.config("--run.device", device.type)
    asked = [name for name in (*TO_TRAIN, *experiment.precisions) if name in (FP32, *options.precisions)]
    has_tf32 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    names = [name for name in asked if name != "tf32" or has_tf32]
    left_out = ["tf32, which this device does not support"] if names != asked else []
    baselines = [name for name, precision in BASELINES.items() if precision in names]
    if config.parallel.activation_checkpointing != "none" or config.train.clip_by == "value":
        left_out.append("the baseline loop, which has no activation checkpointing and clips by norm only")
        baselines = []
    size = config.train.micro_batch_size
    found |= {"steps": config.train.steps, "micro_batch_size": size, "target": config.task.target, "parameters": 0}
    found |= {"accumulation": accumulation_steps(config.train, 1), "left_out": left_out, "groups": []}
    found |= {"curves": {}, "again": [], "work": {mode: {} for mode in options.modes}}
    usual, trains = [name for name in names if name in USUAL], TRAIN in options.modes
    arena = partial(Precisions, bench, experiment, SharedTask(build_task(config.task, config.data)), found)
    arenas = {arena(EAGER, size, options.modes): [*names, *baselines] if trains else usual}
    arenas |= {arena(form, size, options.modes): usual for form in options.forms if form != EAGER}
    arenas |= {arena(EAGER, n, [TRAIN]): usual for n in experiment.batches if n != size and trains}
    for each in arenas:
        each.batches()
    for each, names in arenas.items():
        place = {"form": each.form, "micro_batch_size": each.size}
        found["groups"] += [{"mode": mode, **place, "rows": rows} for mode, rows in each.rows.items()]
        # torch counts graphs by the forward's source, which the blocks of all precisions and modes share.
        with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):
            each.measure(names)
        torch.compiler.reset()  # otherwise compiled code is reused in the next experiment


class Precisions(Arena):
    """The precisions of one form and micro-batch size; those of the task itself also learn and count, into `found`."""

    def __init__(
        self, bench: Bench, experiment: Experiment, task: Any, found: dict[str, Any], form: str, size: int, modes: Any
    ):
        super().__init__(bench, FP32, modes, base_may_leave=True)
        self.experiment, self.task, self.found, self.form, self.size = experiment, task, found, form, size
        self.is_main = (form, size) == (EAGER, found["micro_batch_size"])

    def config(self, name: str) -> Config:
        words = ["--run.device", self.device.type, *RECIPES[BASELINES.get(name, name)].words.split()]
        words += ["--precision.cast_by", "auto", "--train.micro_batch_size", str(self.size)]
        words += ["--compile.blocks", str(self.form == COMPILED).lower()]
        words += ["--compile.backend", self.bench.options.backend] if self.form == COMPILED else []
        return self.experiment.config(*words)

    def batches(self) -> Any:
        """The training batches. Errors: Failure if the data do not fill a step."""
        config, split = self.config(FP32), build_split(self.task, "train", self.world)
        micro_batches = accumulation_steps(config.train, 1)
        self.most_steps = min(STEPS_OF_DATA, len(split) // (self.size * micro_batches))
        return build_batches(config.data, self.task, split, self.size, micro_batches, config.run.seed, self.world)

    def is_fatal(self, name: str, error: Exception) -> bool:
        """An error in eager float32 comes from the task or the data."""
        return name == FP32 and self.form == EAGER and not isinstance(error, NoTime) and not is_out_of_memory(error)

    def enter(self, name: str) -> dict[str, Loop]:
        if not self.data:
            with closing(self.batches()) as batches:
                self.data = list(itertools.islice(batches, self.most_steps))
        config, held, run = self.config(name), allocated(self.device), None
        if name in BASELINES:
            loop = baseline(Setup(config, self.world, self.task, config.optim.fused))
        else:
            run = self.build_run(name)
            loop = Loop(run.parallel.module, partial(train_step, run))
        self.found["parameters"] = sum(p.numel() for p in loop.module.parameters())
        both = in_both_modes(loop, run, config.precision.tf32)
        if run is not None and self.is_main and TRAIN in self.rows:
            both[TRAIN].prepare()
            self.learn(name, run)
        loops = {mode: both[mode] for mode in self.rows if mode == TRAIN or name in USUAL}
        for mode, loop in loops.items():
            self.rows[mode][name] = self.first_steps(name, run, loop, mode, held)
        return loops

    def build_run(self, name: str) -> Run:
        run, scales = build_run(self.config(name), self.world, self.task), RECIPES[name].scales
        if scales is not None:  # the main job offers neither, since neither is useful
            run.scaler.scales = scales
            run.scaler.scale_tensor.fill_(run.config.precision.scaler.init_scale if scales else 1.0)
        return run

    def learn(self, name: str, run: Run) -> None:
        """Record the loss curve, in float32 of a second run too."""
        curves = self.found["curves"]
        steps = len(curves.get(FP32, ())) or run.config.train.steps
        seconds = LEARNING * self.bench.seconds_left / (len(RECIPES) - len(curves) + 1)
        curves[name] = loss_curve(run, steps, seconds)
        if name == FP32:
            again = self.build_run(FP32)
            with torch.no_grad():
                for parameter in again.parallel.module.parameters():  # one unit in the last place, up or down
                    direction = torch.where(torch.rand_like(parameter) < 0.5, -math.inf, math.inf)
                    parameter.copy_(torch.nextafter(parameter, direction))
            self.found["again"] = loss_curve(again, len(curves[FP32]), seconds, seed=1)
            del again
            release(self.device)  # before anyone's memory is measured

    def first_steps(self, name: str, run: Run | None, loop: Loop, mode: str, held: int) -> dict[str, Any]:
        """A row with the loop's memory, inference loss and skipped steps; its work is counted too."""
        timed_block(self.world, loop, self.data, len(self.data))  # compiles
        row: dict[str, Any] = {"step_seconds": timed_block(self.world, loop, self.data, len(self.data))}
        step, model = partial(loop.step, self.data[0]), size_of([*loop.module.parameters(), *loop.module.buffers()])
        rise = peak_rise(self.device, step)
        if mode == INFERENCE:  # gradients and moments may exist, and are not counted
            row["peak_bytes"] = model + rise
        elif self.device.type == "cuda":
            row["peak_bytes"] = allocated(self.device) - held + rise
        elif run is not None:  # the baseline's optimizer state is not known here
            row["peak_bytes"] = model + size_of(run.optimizer.state.values()) + rise
        if run is None:
            return row
        if mode == TRAIN:
            row["skipped_steps"] = int(run.schedule.skipped_steps)
        elif self.form == EAGER:
            row["loss"] = self.inference_loss(run)
        if self.is_main:
            try:
                self.found["work"][mode][name] = count(step, self.device, run.config.precision.tf32)
            except Exception as error:  # operations that can't be traced are no reason to lose the times
                self.found["left_out"].append(f"counting the operations of {name}, {note_of(error)}")
        return row

    def inference_loss(self, run: Run) -> float:
        """The mean loss of float32's weights, computed in the precision of `run`."""
        weights = self.loops[FP32][INFERENCE].module if FP32 in self.loops else run.parallel.module
        weights.eval()  # undone by the loop's prepare()
        batches = tree_map(lambda part: part, list(self.data[0]))
        with torch.no_grad(), run.precision.autocast():
            total = sum(float(self.task.loss_sum(weights, batch)) for batch in batches)
        return total / sum(float(self.task.weight(batch)) for batch in batches)


def in_both_modes(loop: Loop, run: Any, tf32: bool) -> dict[str, Loop]:
    """`loop` in training; forward and loss as in an evaluation: without dropout, and without a graph for backward."""
    trained = [part for part in loop.module.modules() if part.training]

    def prepare(is_training: bool) -> None:
        set_tf32(tf32)
        for part in trained:
            part.training = is_training

    def infer(micro_batches: Sequence[Any]) -> None:
        for batch in micro_batches:
            with torch.no_grad(), run.precision.autocast():
                run.task.loss_sum(run.model, batch)

    inference = Loop(loop.module, infer, partial(prepare, False))
    return {TRAIN: replace(loop, prepare=partial(prepare, True)), INFERENCE: inference}


def loss_curve(run: Run, most_steps: int, seconds: float, seed: int = 0) -> list[float]:
    """The loss of each step of the main job: `most_steps`, or as many as there is time for in `seconds`.

    A skipped step is repeated on the same samples, so that curves are compared update by update. Each attempt draws the
    same random numbers in every precision; another `seed` draws others.
    """
    curve, started = [], time.monotonic()
    with closing(run.data):
        for number in range(most_steps):
            if number >= LEAST_STEPS and time.monotonic() - started > seconds:
                break
            micro_batches = next(run.data)
            for _ in range(MOST_SKIPS if run.scaler.scales else 1):
                seed_all(run.config.run.seed + seed * most_steps + number)
                report = train_step(run, tree_map(lambda part: part, micro_batches))
                if bool(report.applied):
                    break
            curve.append(float(report.loss_sum / report.weight))
    run.data.handed_out = []  # it holds the last batch, which is on the device
    return curve


def size_of(tensors: Any) -> int:
    """Bytes of the tensors in a collection, however nested."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(list(tensors)))


def allocated(device: torch.device) -> int:
    """Bytes of all tensors on a GPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_rise(device: torch.device, call: Callable[[], object]) -> int:
    """By how many bytes torch's memory rises during a call, at most."""
    if device.type == "cuda":
        before = allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # the profiler writes to it, bypassing Python
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            call()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
    events: Any = profiler.profiler
    changes = sorted((e.start_ns(), e.nbytes()) for e in events.kineto_results.events() if e.name() == "[memory]")
    return max(itertools.accumulate((size for _, size in changes), initial=0))
