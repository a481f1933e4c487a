"""An experiment in every precision: what it learns, what memory it takes, and how long its steps are.

A precision learns first: train_step on the run's own data, from the same weights, in the order of the main job. Then
all of them stand in memory together, as many as fit, and take turns on micro-batches that lie on the device already:
training, then inference, which is forward and loss in evaluation mode without gradients.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from dist_amp.bench.amp.experiment import TRAIN, Experiment
from dist_amp.bench.amp.roofline import count
from dist_amp.bench.amp.ways import BY_HAND, FP32, TO_TRAIN, USUAL, WAYS, cant, set_scaler
from dist_amp.bench.loops import Loop, Setup, bare
from dist_amp.bench.timing import OUT_OF_MEMORY, in_turns, release, timed_block, why_not
from dist_amp.config import Failure
from dist_amp.data import Padding, build_batches, build_split
from dist_amp.precision import set_tf32
from dist_amp.proof.dtypes import tensors_in
from dist_amp.run import Config, Run, build_run
from dist_amp.runtime import World
from dist_amp.step import accumulation_steps, train_step
from dist_amp.task import build_task

FIRST_STEPS = 3  # of a loop: they compile, and take memory that is not needed again
STEPS_OF_DATA = 4  # that lie on the device, again and again
MOST_SKIPS = 20  # in a row; a scale of 2^16 is below 1 by then
MOST_GRAPHS = 1000  # of one class of blocks
EAGER, COMPILED = "eager", "compiled"
FORMS = (EAGER, COMPILED)


@dataclass(frozen=True)
class Effort:
    """What is looked at, how closely, and until when."""

    world: World
    words: Sequence[str]  # on top of an experiment's settings
    backend: str  # of torch.compile
    forms: Sequence[str]
    modes: Sequence[str]
    ways: Sequence[str]
    rounds: int
    block_seconds: float  # of steps between two clocks; 0: one step
    ends: float  # time.monotonic()

    @property
    def seconds_left(self) -> float:
        return self.ends - time.monotonic()


class NoTime(Exception):
    """The bench's minutes are over."""


class WithMeans:
    """A task as the loop by hand wants it: a mean loss of each micro-batch."""

    def __init__(self, task: Any):
        self._task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def loss(self, model: nn.Module, batch: Any, reduction: str) -> Tensor:
        return self._task.loss_sum(model, batch) / self._task.weight(batch)


@dataclass
class Contender:
    """One precision, ready to be timed; run: None for the loop by hand."""

    loop: Loop
    run: Run | None
    base_bytes: int  # on the device before it came
    tf32: bool
    seconds: dict[str, float] = field(default_factory=dict)  # per step, roughly, by mode


def measure(effort: Effort, experiment: Experiment) -> dict[str, Any]:
    """The experiment's groups of figures, curves, work and pictures; what there is no time for is named.

    Errors: Failure in the settings, the task or the data, which no precision can do with.
    """
    config = experiment.config(*effort.words)
    asked = [name for name in (*TO_TRAIN, *experiment.ways) if name in effort.ways]
    why_not_here = {name: why for name in asked if (why := cant(name, effort.world.device))}
    names = [name for name in asked if name not in why_not_here]
    usual = [name for name in names if name in USUAL]
    told: dict[str, Any] = {
        "steps": config.train.steps,
        "micro_batch_size": config.train.micro_batch_size,
        "accumulation": accumulation_steps(config.train, 1),
        "target": config.task.target,
        "left_out": [f"{name}, {why}" for name, why in why_not_here.items()],
    }
    task, size = build_task(config.task, config.data), config.train.micro_batch_size
    task.build_dataset = cache(task.build_dataset)  # type: ignore[method-assign] # one for all precisions
    arena = partial(Arena, effort, experiment, task)
    main = arena(EAGER, size, effort.modes, learns=True)
    others = [arena(form, size, effort.modes) for form in effort.forms if form != EAGER]
    others += [arena(EAGER, n, [TRAIN]) for n in experiment.batches if n != size and TRAIN in effort.modes]
    for each in (main, *others):
        each.check_data()
    trained = [*names, *(name for name, way in BY_HAND.items() if way in names)]
    main.measure(trained if TRAIN in effort.modes else usual)
    for other in others:
        other.measure(usual)
    told |= {"parameters": main.parameters, "curves": main.curves, "work": main.work, "pictures": main.pictures}
    return told | {"groups": [group for each in (main, *others) for group in each.groups]}


class Arena:
    """The precisions of one form and micro-batch size, beside each other."""

    def __init__(
        self,
        effort: Effort,
        experiment: Experiment,
        task: Any,
        form: str,
        size: int,
        modes: Sequence[str],
        learns: bool = False,
    ):
        self.effort, self.experiment, self.task = effort, experiment, task
        self.form, self.size, self.learns = form, size, learns
        self.device = effort.world.device
        self.data: list[list[Any]] = []
        self.parameters = 0
        self.contenders: dict[str, Contender] = {}
        self.rows: dict[str, dict[str, dict[str, Any]]] = {mode: {} for mode in modes}
        self.curves: dict[str, list[float]] = {}
        self.work: dict[str, dict[str, Any]] = {mode: {} for mode in modes}
        self.pictures: dict[str, Tensor] = {}

    @property
    def groups(self) -> list[dict[str, Any]]:
        about = {"form": self.form, "micro_batch_size": self.size}
        return [{"mode": mode, **about, "rows": rows} for mode, rows in self.rows.items() if rows]

    def config(self, name: str) -> Config:
        words = [*self.effort.words, *WAYS[BY_HAND.get(name, name)].words]
        words += ["--train.micro_batch_size", str(self.size)]
        words += ["--compile.blocks", str(self.form == COMPILED).lower()]
        if self.form == COMPILED:
            words += ["--compile.backend", self.effort.backend]
        return self.experiment.config(*words)

    def check_data(self) -> None:
        """Errors: Failure where they do not fill a step."""
        config, world = self.config(FP32), self.effort.world
        split, micro_batches = build_split(self.task, "train", world), accumulation_steps(config.train, 1)
        build_batches(config.data, self.task, split, self.size, micro_batches, config.run.seed, world)

    def measure(self, names: Sequence[str]) -> None:
        """All of it, for each of the names; those that have no room beside the others come after them."""
        first_mode = next(iter(self.rows))
        # Torch counts by a forward's source, which all precisions' blocks share, in training and in evaluation.
        with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS) if self.form == COMPILED else nullcontext():
            for name in names:
                why = self.enter(name)
                if why == OUT_OF_MEMORY and len(self.contenders) > 1:  # perhaps because of the others
                    self.time_all()
                    self.leave(but=FP32)
                    why = self.enter(name)
                if why:
                    self.rows[first_mode][name] = {"cant": why}
            self.time_all()
        self.leave()
        if self.form == COMPILED:
            torch.compiler.reset()  # the code would be taken for the next experiment's
        self.data = []
        release(self.device)

    def enter(self, name: str) -> str:
        """Build it, let it learn, and look at its memory; returns why that can't be, "" if it can."""
        release(self.device)
        try:
            if self.effort.seconds_left < 0:
                raise NoTime
            contender = self.build(name)
            if contender.run is not None and self.learns and TRAIN in self.rows:
                self.curves[name] = self.learn(contender.run)
                self.draw(name, contender.run)
            for mode in self.rows:
                if mode == TRAIN or name in USUAL:
                    self.rows[mode][name] = self.warm(contender, mode)
        except NoTime:
            return "left out: no time"
        except Failure as error:
            if name == FP32 and self.learns:  # in the settings, the task or the data
                raise
            return why_not(error)
        except Exception as error:  # which is not kept: it would hold what is on the device
            return why_not(error)
        self.contenders[name] = contender
        return ""

    def build(self, name: str) -> Contender:
        config, world = self.config(name), self.effort.world
        self.data = self.data or first_steps(config, self.task, world)
        base = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        tf32 = config.precision.tf32
        if name in BY_HAND:
            loop = bare(Setup(config, world, WithMeans(self.task)))
            return Contender(Loop(loop.module, loop.step, ready_to_train(loop.module, tf32)), None, base, tf32)
        run = build_run(config, world, self.task)
        set_scaler(run, WAYS[name])
        self.parameters = sum(p.numel() for p in run.parallel.module.parameters())
        module = run.parallel.module
        loop = Loop(module, lambda batches: train_step(run, batches), ready_to_train(module, tf32))
        return Contender(loop, run, base, tf32)

    def learn(self, run: Run) -> list[float]:
        """The loss of each step of the main job.

        A skipped step is taken again on the same samples, a few times: so curves are compared update by update, and
        the scaler's first steps, in which it finds its scale, count for nothing.
        """
        curve = []
        with closing(run.data):
            for micro_batches in itertools.islice(run.data, run.config.train.steps):
                for _ in range(MOST_SKIPS):
                    if self.effort.seconds_left < 0:
                        raise NoTime
                    report = train_step(run, micro_batches)
                    if bool(report.applied):
                        break
                curve.append(report.loss_sum / report.weight)
        return torch.stack(curve).tolist()

    def draw(self, name: str, run: Run) -> None:
        """What the model draws once it has learned, and before the timed steps, which teach it more."""
        if self.experiment.draws:
            with run.parallel.evaluating(), run.precision.autocast():
                self.pictures[name] = run.task.sample(run.parallel.module)  # type: ignore[attr-defined]

    def warm(self, contender: Contender, mode: str) -> dict[str, Any]:
        """First steps, which are not counted; then one that is, for its memory."""
        loop, run = self.loop(contender, mode), contender.run
        contender.seconds[mode] = timed_block(self.effort.world, loop, self.data, FIRST_STEPS)
        row: dict[str, Any] = {}
        if (peak := peak_bytes(self.device, contender, mode, lambda: loop.step(self.data[0]))) is not None:
            row["peak_bytes"] = peak
        if self.device.type == "cuda":  # without what was compiled in the first ones
            contender.seconds[mode] = timed_block(self.effort.world, loop, self.data, FIRST_STEPS)
        if run is not None and mode == TRAIN:
            row["skipped_steps"] = int(run.optimizer.skipped_steps)
        return row

    def loop(self, contender: Contender, mode: str) -> Loop:
        """What is timed in a mode."""
        run = contender.run
        return contender.loop if mode == TRAIN or run is None else inference(run, contender.tf32)

    def time_all(self) -> None:
        """By turns; and what each of them counts."""
        effort = self.effort
        for mode, rows in self.rows.items():
            loops = {name: self.loop(contender, mode) for name, contender in self.contenders.items() if name in rows}
            slowest = max((self.contenders[name].seconds[mode] for name in loops), default=1.0)
            steps = max(1, round(effort.block_seconds / slowest))
            seconds, failed = in_turns(
                effort.world, loops, self.data, effort.rounds, steps, lambda: effort.seconds_left > 0
            )
            for name, why in failed.items():
                rows[name]["cant"] = why
            for name, own in seconds.items():
                rows[name].setdefault("seconds", []).extend(own)
                if FP32 in seconds:
                    speeds = [theirs / mine for theirs, mine in zip(seconds[FP32], own, strict=True)]
                    rows[name].setdefault("of_fp32", []).extend(speeds)
            for name in loops if self.learns else ():
                if name not in self.work[mode] and name not in BY_HAND and name not in failed:
                    step = partial(loops[name].step, self.data[0])
                    loops[name].prepare()
                    self.work[mode][name] = count(step, self.device, self.contenders[name].tf32)

    def leave(self, but: str = "") -> None:
        """Make room."""
        for name in [name for name in self.contenders if name != but]:
            contender = self.contenders.pop(name)
            if contender.run is not None:
                contender.run.data.close()
        release(self.device)


def first_steps(config: Config, task: Any, world: World) -> list[list[Any]]:
    """The micro-batches of the first few steps, on the device, as many as are whole."""
    split, size = build_split(task, "train", world), config.train.micro_batch_size
    micro_batches = accumulation_steps(config.train, 1)
    with closing(build_batches(config.data, task, split, size, micro_batches, config.run.seed, world)) as batches:
        return list(itertools.islice(batches, min(STEPS_OF_DATA, len(split) // (size * micro_batches))))


def ready_to_train(module: nn.Module, tf32: bool) -> Callable[[], None]:
    """What goes before training steps: the modules that train now do so again, and those that are frozen don't."""
    training = [part for part in module.modules() if part.training]

    def prepare() -> None:
        set_tf32(tf32)
        for part in training:
            part.training = True

    return prepare


def inference(run: Run, tf32: bool) -> Loop:
    """Forward and loss as an evaluation takes them: without dropout, and without a graph for backward."""

    def prepare() -> None:
        set_tf32(tf32)
        run.parallel.module.eval()

    def step(micro_batches: Sequence[Any]) -> None:
        for batch in micro_batches:
            with torch.no_grad(), run.precision.autocast():
                run.task.loss_sum(run.model, batch.batch if isinstance(batch, Padding) else batch)

    return Loop(run.parallel.module, step, prepare)


def peak_bytes(device: torch.device, contender: Contender, mode: str, step: Callable[[], object]) -> int | None:
    """What a step holds at its highest point: for training with weights and moments, for inference with weights alone.

    On a GPU by torch's allocator. On a CPU by what its profiler sees handed out and taken back within the step, and the
    state's size; None for the loop by hand, whose state is not known there.
    """
    run = contender.run
    weights = size_of([*contender.loop.module.parameters(), *contender.loop.module.buffers()])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
        return peak - contender.base_bytes if mode == TRAIN else peak - held + weights
    if run is None:
        return None
    moments = size_of(run.optimizer.torch_optimizer.state.values()) if mode == TRAIN else 0
    return weights + moments + rise_on_host(step)


def size_of(tensors: Any) -> int:
    """Bytes of the tensors in a collection, however nested."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(list(tensors)))


def rise_on_host(call: Callable[[], object]) -> int:
    """By how many bytes torch's memory on the CPU rises, at most, in the midst of a call."""
    on_cpu = [torch.profiler.ProfilerActivity.CPU]
    with mute(), torch.profiler.profile(activities=on_cpu, profile_memory=True) as profiler:
        call()
    events: Any = profiler.profiler
    handed = sorted((e.start_ns(), e.nbytes()) for e in events.kineto_results.events() if e.name() == "[memory]")
    return max(itertools.accumulate((size for _, size in handed), initial=0))


@contextmanager
def mute() -> Iterator[None]:
    """Without what libraries in C++ write to stderr, past Python."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
