"""One experiment in every precision: its loss curve, its memory, and the time of its steps.

Each precision first learns: train_step on the run's own data, in the main job's order, from the same weights. Then all
that fit are in memory together and take turns on micro-batches that are on the device already: training, then
inference, which is forward and loss in evaluation mode without gradients.
"""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dist_amp.bench.amp.experiments import INFERENCE, TRAIN, Experiment
from dist_amp.bench.amp.roofline import count
from dist_amp.bench.harness import Arena, Bench, NoTime, note_of, release, timed_block
from dist_amp.bench.loops import Loop, Setup, baseline
from dist_amp.config.task_class import build_task
from dist_amp.config.validate import accumulation_steps
from dist_amp.data import build_batches, build_split
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
    scaler: bool | None = None  # None: as in the main job, in fp16 only


FP32 = "fp32"
FULL, AUTO = "--precision.tf32 false --use_amp false", "--precision.tf32 false --use_amp true --precision.dtype"
RECIPES = {
    FP32: Recipe(FULL, 2**-24, "float32, without TF32"),
    "tf32": Recipe("--precision.tf32 true --use_amp false", 2**-11, "float32 with products in TF32"),
    "bf16": Recipe(f"{AUTO} bf16", 2**-8, "autocast to bfloat16"),
    "fp16": Recipe(f"{AUTO} fp16", 2**-11, "autocast to float16, with the loss scaler"),
    "fp16_unscaled": Recipe(f"{AUTO} fp16", 2**-11, "autocast to float16, without the loss scaler", scaler=False),
    "fp32_scaled": Recipe(FULL, 2**-24, "float32, with the loss scaler", scaler=True),
}
USUAL = (FP32, "tf32", "bf16", "fp16")  # in every form and mode
TO_TRAIN = (*USUAL, "fp16_unscaled")  # and `Experiment.precisions`
BASELINES = {f"{name} baseline": name for name in (FP32, "bf16", "fp16")}  # the hand-written loop


def unsupported(name: str, device: torch.device) -> str:
    """Why a device can't run a precision; "" if it can."""
    if name != "tf32":
        return ""
    if device.type != "cuda":
        return "only on GPUs"
    old = not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 0)
    return "not on GPUs before Ampere" if old else ""


def set_scaler(run: Run, recipe: Recipe) -> None:
    """Remove the loss scaler, or give float32 one; the main job offers neither, since neither is useful."""
    if recipe.scaler is not None:
        run.scaler.scales = recipe.scaler
        run.scaler.scale_tensor.fill_(run.config.precision.scaler.init_scale if recipe.scaler else 1.0)


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
    operations; pictures: what the models draw. Errors: Failure in the settings, the task or the data.
    """
    options, device = bench.options, bench.world.device
    to_device = ("--run.device", device.type)
    config = experiment.config(*to_device)
    asked = [name for name in (*TO_TRAIN, *experiment.precisions) if name in options.precisions]
    names = [name for name in asked if not unsupported(name, device)]
    left_out = [f"{name}, {unsupported(name, device)}" for name in asked if name not in names]
    baselines = [name for name, precision in BASELINES.items() if precision in names]
    lacks = {
        "parallel.activation_checkpointing": config.parallel.activation_checkpointing != "none",
        "train.clip_by=value": config.train.clip_by == "value",
        "optim.fused=false": not config.optim.fused,
    }
    if differs := next((name for name, is_set in lacks.items() if is_set), ""):
        left_out, baselines = [*left_out, f"the baseline loop, which does not support {differs}"], []
    if experiment.wants_ranks(*to_device):
        left_out.append("parallel.strategy, since the bench runs in one process")
    size, micro_batches = config.train.micro_batch_size, accumulation_steps(config.train, 1)
    found |= {"steps": config.train.steps, "micro_batch_size": size, "accumulation": micro_batches}
    found |= {"target": config.task.target, "left_out": left_out, "model": {}, "groups": [], "curves": {}, "again": []}
    found |= {"work": {mode: {} for mode in options.modes}, "pictures": {}}
    task, usual = SharedTask(build_task(config.task, config.data)), [name for name in names if name in USUAL]
    arena = partial(Precisions, bench, experiment, task, found)
    learns = TRAIN in options.modes
    arenas = [arena(EAGER, size, options.modes, [*names, *baselines] if learns else usual, is_main=True)]
    arenas += [arena(form, size, options.modes, usual) for form in options.forms if form != EAGER]
    arenas += [arena(EAGER, n, [TRAIN], usual) for n in experiment.batches if n != size and learns]
    for each in arenas:
        each.batches()
    for each in arenas:
        for mode, rows in each.rows.items():
            group = {"mode": mode, "form": each.form, "micro_batch_size": each.size}
            found["groups"].append({**group, "samples_per_step": each.size * micro_batches, "rows": rows})
        # torch counts graphs by the forward's source, which the blocks of all precisions and modes share.
        with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS) if each.form == COMPILED else nullcontext():
            each.measure(each.names)
        if each.form == COMPILED:
            torch.compiler.reset()  # otherwise compiled code is reused in the next experiment


class Precisions(Arena):
    """The precisions of one form and micro-batch size. is_main: also learns and counts, into `found`."""

    def __init__(
        self,
        bench: Bench,
        experiment: Experiment,
        task: SharedTask,
        found: dict[str, Any],
        form: str,
        size: int,
        modes: Sequence[str],
        names: Sequence[str],
        is_main: bool = False,
    ):
        super().__init__(bench, FP32, modes, base_may_leave=True)
        self.experiment, self.task, self.found, self.names = experiment, task, found, names
        self.form, self.size, self.is_main = form, size, is_main

    def config(self, name: str) -> Config:
        words = ["--run.device", self.device.type, *RECIPES[BASELINES.get(name, name)].words.split()]
        words += ["--precision.cast_by", "auto", "--train.micro_batch_size", str(self.size)]
        words += ["--compile.blocks", str(self.form == COMPILED).lower()]
        words += ["--compile.backend", self.bench.options.backend] if self.form == COMPILED else []
        return self.experiment.config(*words)

    def batches(self) -> Any:
        """The training batches. Errors: Failure if the data do not fill a step."""
        config, split = self.config(FP32), build_split(self.task, "train", self.world)
        self.most_steps = min(STEPS_OF_DATA, len(split) // (self.size * accumulation_steps(config.train, 1)))
        micro_batches, seed = accumulation_steps(config.train, 1), config.run.seed
        return build_batches(config.data, self.task, split, self.size, micro_batches, seed, self.world)

    def is_fatal(self, name: str, error: Exception) -> bool:
        """An error in eager float32 comes from the task or the data."""
        return name == FP32 and self.form == EAGER and not isinstance(error, NoTime) and not is_out_of_memory(error)

    def enter(self, name: str) -> dict[str, Loop]:
        config = self.config(name)
        if not self.data:
            with closing(self.batches()) as batches:
                self.data = list(itertools.islice(batches, self.most_steps))
        held = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        run = None if name in BASELINES else self.build_run(name)
        if run is None:
            loop = baseline(Setup(config, self.world, self.task))
        else:
            loop = Loop(run.parallel.module, lambda micro_batches: train_step(run, micro_batches))
        loops = {TRAIN: Loop(loop.module, loop.step, training_mode(loop.module, config.precision.tf32))}
        self.found["model"]["parameters"] = sum(p.numel() for p in loop.module.parameters())
        if run is not None:
            loops[INFERENCE] = inference_loop(run)
            if self.is_main and TRAIN in self.rows:
                loops[TRAIN].prepare()
                self.learn(name, run)
        loops = {mode: loops[mode] for mode in self.rows if mode == TRAIN or name in USUAL}
        for mode, loop in loops.items():
            self.rows[mode][name] = self.first_steps(name, run, loop, mode, held)
        return loops

    def build_run(self, name: str) -> Run:
        run = build_run(self.config(name), self.world, self.task)
        set_scaler(run, RECIPES[name])
        return run

    def learn(self, name: str, run: Run) -> None:
        """Record the loss curve, in float32 of a second run too, and what the model draws after it."""
        curves, ends = self.found["curves"], self.bench.ends
        seconds = LEARNING * self.bench.seconds_left / (len(self.names) - len(curves) + 1)
        curves[name] = learn(run, len(curves.get(FP32, ())) or run.config.train.steps, seconds, ends)
        if name == FP32:
            again = self.build_run(FP32)
            with torch.no_grad():
                for parameter in again.parallel.module.parameters():  # one unit in the last place, up or down
                    direction = torch.where(torch.rand_like(parameter) < 0.5, -math.inf, math.inf)
                    parameter.copy_(torch.nextafter(parameter, direction))
            self.found["again"] = learn(again, len(curves[FP32]), math.inf, ends, seed=1)
            del again
            release(self.device)  # before anyone's memory is measured
        if self.experiment.draws:
            with run.parallel.evaluating(), run.precision.autocast():
                self.found["pictures"][name] = run.task.sample(run.parallel.module)  # type: ignore[attr-defined]

    def first_steps(self, name: str, run: Run | None, loop: Loop, mode: str, held: int) -> dict[str, Any]:
        """A row with the loop's memory, inference loss and skipped steps; its work is counted too."""
        row: dict[str, Any] = {"step_seconds": timed_block(self.world, loop, self.data, len(self.data))}
        step = partial(loop.step, self.data[0])
        if self.device.type == "cuda":
            # In inference, gradients and moments may exist, and are not counted.
            others = torch.cuda.memory_allocated(self.device) - size_of_model(loop.module)
            row["peak_bytes"] = peak_on_gpu(self.device, step) - (held if mode == TRAIN else others)
            row["resident_bytes"] = torch.cuda.memory_allocated(self.device) - held
            row["step_seconds"] = timed_block(self.world, loop, self.data, len(self.data))  # compiled by now
        elif run is not None:  # the baseline's optimizer state is not known here
            moments = size_of(run.optimizer.state.values()) if mode == TRAIN else 0
            row["peak_bytes"] = size_of_model(loop.module) + moments + peak_on_cpu(step)
        if run is not None and mode == TRAIN:
            row["skipped_steps"] = int(run.schedule.skipped_steps)
        if run is not None and mode == INFERENCE and self.form == EAGER:
            row["loss"] = self.inference_loss(run)
        if run is not None and self.is_main:
            try:
                self.found["work"][mode][name] = count(step, self.device, run.config.precision.tf32)
            except Exception as error:  # operations that can't be traced are no reason to lose the times
                self.found["work"][mode][name] = {"note": note_of(error)}
        return row

    def inference_loss(self, run: Run) -> float:
        """The mean loss of float32's weights, computed in the precision of `run`."""
        weights = self.loops[FP32][INFERENCE].module if FP32 in self.loops else run.parallel.module
        weights.eval()  # training_mode undoes it
        batches = tree_map(lambda part: part, list(self.data[0]))
        with torch.no_grad(), run.precision.autocast():
            total = sum(float(self.task.loss_sum(weights, batch)) for batch in batches)
        return total / sum(float(self.task.weight(batch)) for batch in batches)


# --- loops and loss curves


def training_mode(module: nn.Module, tf32: bool) -> Callable[[], None]:
    """Prepares for training steps: puts those modules into training mode that are in it now."""
    training = [part for part in module.modules() if part.training]

    def prepare() -> None:
        set_tf32(tf32)
        for part in training:
            part.training = True

    return prepare


def inference_loop(run: Run) -> Loop:
    """Forward and loss as in an evaluation: without dropout, and without a graph for backward."""

    def prepare() -> None:
        set_tf32(run.config.precision.tf32)
        run.parallel.module.eval()

    def step(micro_batches: Sequence[Any]) -> None:
        for batch in micro_batches:
            with torch.no_grad(), run.precision.autocast():
                run.task.loss_sum(run.model, batch)

    return Loop(run.parallel.module, step, prepare)


def learn(run: Run, most_steps: int, seconds: float, ends: float, seed: int = 0) -> list[float]:
    """The loss of each step of the main job: `most_steps`, or as many as there is time for in `seconds`.

    A skipped step is repeated on the same samples, so that curves are compared update by update, without the first
    steps in which the scaler finds its scale. Each attempt draws the same random numbers in every precision; another
    `seed` draws others. Errors: NoTime at `ends`, by time.monotonic().
    """
    curve, started = [], time.monotonic()
    with closing(run.data):
        for number in range(most_steps):
            if number >= LEAST_STEPS and time.monotonic() - started > seconds:
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
    run.data.handed_out = []  # it holds the last batch, which is on the device
    return curve


# --- memory


def size_of(tensors: Any) -> int:
    """Bytes of the tensors in a collection, however nested."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(list(tensors)))


def size_of_model(module: nn.Module) -> int:
    return size_of([*module.parameters(), *module.buffers()])


def peak_on_gpu(device: torch.device, call: Callable[[], object]) -> int:
    """Bytes allocated by torch, at most, during a call."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def peak_on_cpu(call: Callable[[], object]) -> int:
    """By how many bytes torch's memory rises during a call, at most."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with silent_stderr(), torch.profiler.profile(activities=cpu, profile_memory=True) as profiler:
        call()
    events: Any = profiler.profiler
    changes = sorted((e.start_ns(), e.nbytes()) for e in events.kineto_results.events() if e.name() == "[memory]")
    return max(itertools.accumulate((size for _, size in changes), initial=0))


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Without what C++ libraries write to stderr, bypassing Python."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
