"""An experiment in every precision: what it learns, what memory it takes, and how long its steps are.

A precision learns first: train_step on the run's own data, from the same weights, in the order of the main job. Then
all of them stand in memory together, as many as fit, and take turns on micro-batches that lie on the device already:
training, then inference, which is forward and loss in evaluation mode without gradients.
"""

import itertools
import math
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dist_amp.bench.amp.contender import Contender, NoTime, SharedTask, build, learn, mean_loss, nudge
from dist_amp.bench.amp.experiment import INFERENCE, TRAIN, Experiment
from dist_amp.bench.amp.memory_use import peak_in_inference, peak_in_training
from dist_amp.bench.amp.recipes import BY_HAND, FP32, RECIPES, TO_TRAIN, USUAL, differs_by_hand, lacks
from dist_amp.bench.amp.roofline import count
from dist_amp.bench.harness import median_interval
from dist_amp.bench.loops import Loop
from dist_amp.bench.timing import OUT_OF_MEMORY, fits, in_turns, release, timed_block, why_not
from dist_amp.config.task_class import build_task
from dist_amp.config.validate import accumulation_steps
from dist_amp.data import build_batches, build_split
from dist_amp.settings import Config
from dist_amp.supervise.out_of_memory import is_out_of_memory
from dist_amp.world import World

STEPS_OF_DATA = 4  # that lie on the device, again and again
LEARNING = 0.4  # of the time that is left, at most, for the curves of an experiment
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
    precisions: Sequence[str]
    rounds: int
    block_seconds: float  # of steps between two clocks; 0: one step
    ends: float  # time.monotonic()

    @property
    def seconds_left(self) -> float:
        return self.ends - time.monotonic()


def measure(effort: Effort, experiment: Experiment, told: dict[str, Any]) -> None:
    """Fill `told` with the experiment's groups of figures, curves, work and pictures, group by group.

    What there is no time for is named. Errors: Failure in the settings, the task or the data, which no precision can
    do with.
    """
    config = experiment.config(*effort.words)
    asked = [name for name in (*TO_TRAIN, *experiment.precisions) if name in effort.precisions]
    names = [name for name in asked if not lacks(name, effort.world.device)]
    by_hand = [name for name, precision in BY_HAND.items() if precision in names]
    left_out = [f"{name}, {lacks(name, effort.world.device)}" for name in asked if name not in names]
    if differs := differs_by_hand(config):
        left_out, by_hand = [*left_out, f"the loop by hand, which is written without {differs}"], []
    left_out += ["parallel.strategy, since one process takes all steps"] if experiment.shards(*effort.words) else []
    told |= {
        "steps": config.train.steps,
        "micro_batch_size": config.train.micro_batch_size,
        "accumulation": accumulation_steps(config.train, 1),
        "target": config.task.target,
        "left_out": left_out,
        "groups": [],
    }
    task, size = SharedTask(build_task(config.task, config.data)), config.train.micro_batch_size
    arena = partial(Arena, effort, experiment, task)
    main = arena(EAGER, size, effort.modes, learns=TRAIN in effort.modes)
    others = [arena(form, size, effort.modes) for form in effort.forms if form != EAGER]
    others += [arena(EAGER, n, [TRAIN]) for n in experiment.batches if n != size and TRAIN in effort.modes]
    for each in (main, *others):
        each.check_data()
    usual = [name for name in names if name in USUAL]
    for each in (main, *others):
        told |= {"model": main.model, "curves": main.curves, "again": main.again, "work": main.work}
        told |= {"pictures": main.pictures, "groups": [*told["groups"], *each.groups]}
        each.measure([*names, *by_hand] if each.learns else usual)


class Arena:
    """The precisions of one form and micro-batch size, beside each other."""

    def __init__(
        self,
        effort: Effort,
        experiment: Experiment,
        task: SharedTask,
        form: str,
        size: int,
        modes: Sequence[str],
        learns: bool = False,
    ):
        self.effort, self.experiment, self.task = effort, experiment, task
        self.form, self.size, self.learns = form, size, learns
        self.device = effort.world.device
        self.data: list[list[Any]] = []
        self.contenders: dict[str, Contender] = {}
        self.rows: dict[str, dict[str, dict[str, Any]]] = {mode: {} for mode in modes}
        self.model: dict[str, int] = {}  # how many parameters it has
        self.curves: dict[str, list[float]] = {}
        self.again: list[float] = []  # float32's, begun a last place aside
        self.work: dict[str, dict[str, Any]] = {mode: {} for mode in modes}
        self.pictures: dict[str, Tensor] = {}

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Each mode's figures, live: rows are added as they are measured."""
        samples = self.size * accumulation_steps(self.config(FP32).train, 1)
        about = {"form": self.form, "micro_batch_size": self.size, "samples_per_step": samples}
        return [{"mode": mode, **about, "rows": rows} for mode, rows in self.rows.items()]

    def config(self, name: str) -> Config:
        words = [*self.effort.words, *RECIPES[BY_HAND.get(name, name)].words]
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
                if len(self.contenders) > 1 and not fits(self.device, self.rows[first_mode].values()):
                    self.make_room(but=FP32)
                why = self.enter(name, len(names))
                for kept in (FP32, ""):  # perhaps because of the others, or of float32 alone
                    if why == OUT_OF_MEMORY and self.contenders.keys() - {kept}:
                        self.make_room(but=kept)
                        why = self.enter(name, len(names))
                if why:
                    self.rows[first_mode][name] = {"cant": why}
            self.make_room()
        if self.form == COMPILED:
            torch.compiler.reset()  # the code would be taken for the next experiment's
        self.data = []
        release(self.device)

    def enter(self, name: str, of: int) -> str:
        """Build it, let it learn, and look at its memory; returns why that can't be, "" if it can."""
        release(self.device)
        try:
            if self.effort.seconds_left < 0:
                raise NoTime
            config = self.config(name)
            self.data = self.data or first_steps(config, self.task, self.effort.world)
            contender = build(name, config, self.task, self.effort.world)
            self.model["parameters"] = sum(p.numel() for p in contender.training.module.parameters())
            if contender.run is not None and self.learns:
                self.learn(name, contender, of)
            for mode in self.rows:
                if mode == TRAIN or name in USUAL:
                    self.rows[mode][name] = self.warm(name, contender, mode)
        except NoTime:
            return "left out: no time"
        except Exception as error:  # which is not kept: it would hold what is on the device
            if name == FP32 and self.form == EAGER and not is_out_of_memory(error):  # the task's own, or the data's
                raise
            return why_not(error)
        self.contenders[name] = contender
        return ""

    def learn(self, name: str, contender: Contender, of: int) -> None:
        """Its curve, and float32's a second time; then what it draws, before the timed steps teach it more."""
        run, ends = contender.run, self.effort.ends
        assert run is not None
        steps = len(self.curves[FP32]) if FP32 in self.curves else run.config.train.steps
        seconds = LEARNING * self.effort.seconds_left / (of - len(self.curves) + 1)
        contender.training.prepare()
        self.curves[name] = learn(run, steps, seconds, ends)
        if name == FP32:
            again = build(FP32, self.config(FP32), self.task, self.effort.world).run
            assert again is not None
            nudge(again.parallel.module)
            self.again.extend(learn(again, len(self.curves[FP32]), math.inf, ends, seed=1))
            del again
            release(self.device)  # before anybody's memory is looked at
        if self.experiment.draws:
            with run.parallel.evaluating(), run.precision.autocast():
                self.pictures[name] = run.task.sample(run.parallel.module)  # type: ignore[attr-defined]

    def warm(self, name: str, contender: Contender, mode: str) -> dict[str, Any]:
        """First steps, which are not counted; then one that is, for its memory."""
        world, run, device, row = self.effort.world, contender.run, self.device, dict[str, Any]()
        loop = contender.training if mode == TRAIN else contender.inference
        contender.seconds[mode] = timed_block(world, loop, self.data, len(self.data))
        step = partial(loop.step, self.data[0])
        if mode == INFERENCE:
            row["peak_bytes"] = peak_in_inference(device, loop.module, step)
        elif (peak := peak_in_training(device, run, contender.held_before, step)) is not None:
            row["peak_bytes"] = peak
        if device.type == "cuda":
            row["resident_bytes"] = torch.cuda.memory_allocated(device) - contender.held_before
            contender.seconds[mode] = timed_block(world, loop, self.data, len(self.data))  # with nothing to compile
        if run is not None and mode == TRAIN:
            row["skipped_steps"] = int(run.schedule.skipped_steps)
        if run is not None and mode == INFERENCE and self.form == EAGER:
            weights = self.contenders[FP32].run if FP32 in self.contenders else run
            assert weights is not None
            row["loss"] = mean_loss(weights, contender, self.data[0])
        return row

    def make_room(self, but: str = "") -> None:
        """Time those that are there, by turns, and count what they do; then let them go."""
        for mode, rows in self.rows.items():
            loops = {
                name: contender.training if mode == TRAIN else contender.inference
                for name, contender in self.contenders.items()
                if name in rows
            }
            if loops.keys() - {but} or not any("seconds" in row for row in rows.values()):
                self.time_together(mode, loops, rows)
            for name, loop in loops.items() if self.learns or TRAIN not in self.rows else ():
                if name not in self.work[mode] and name not in BY_HAND:
                    self.work[mode][name] = self.count(name, loop)
        for name in [name for name in self.contenders if name != but]:
            del self.contenders[name]
        release(self.device)

    def time_together(self, mode: str, loops: dict[str, Loop], rows: dict[str, dict[str, Any]]) -> None:
        """Note in the rows each loop's seconds per step, one number a round, and its speed over float32's there."""
        effort = self.effort
        slowest = max((self.contenders[name].seconds[mode] for name in loops), default=1.0)
        steps = max(1, round(effort.block_seconds / slowest))
        seconds, failed = in_turns(
            effort.world, loops, self.data, effort.rounds, steps, lambda: effort.seconds_left > 0
        )
        for name, why in failed.items():
            rows[name]["cant"] = why
        alone = rows.get(FP32, {}).get("seconds")  # of before, if it had to leave
        for name, own in seconds.items():
            rows[name].setdefault("seconds", []).extend(own)
            base = seconds.get(FP32) or ([median_interval(alone)[0]] * len(own) if alone else [])
            if FP32 not in seconds and alone:
                rows[name]["cant"] = "timed apart from fp32: there is no room for both"
            rows[name].setdefault("of_fp32", []).extend(theirs / mine for theirs, mine in zip(base, own, strict=False))

    def count(self, name: str, loop: Loop) -> dict[str, Any]:
        """What a step asks of the device, or why that can't be counted."""
        loop.prepare()
        try:
            return count(partial(loop.step, self.data[0]), self.device, self.contenders[name].tf32)
        except Exception as error:  # an operation that can't be watched is no reason to lose the figures
            return {"cant": why_not(error)}


def first_steps(config: Config, task: Any, world: World) -> list[list[Any]]:
    """The micro-batches of the first few steps, on the device, as many as are whole."""
    split, size = build_split(task, "train", world), config.train.micro_batch_size
    micro_batches = accumulation_steps(config.train, 1)
    with closing(build_batches(config.data, task, split, size, micro_batches, config.run.seed, world)) as batches:
        return list(itertools.islice(batches, min(STEPS_OF_DATA, len(split) // (size * micro_batches))))
