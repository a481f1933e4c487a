"""What a step of the main job calls, by component: python -m benchmarks overhead --explain.

Counts, unlike times, are the same on every machine. A component is a function that `train_step` or
the training loop calls: an observer, a part of the step, the poll for signals. Its row counts
everything that it calls, except for the clock, the model's forward with its loss, and backward,
which have rows of their own.

calls        of Python functions, including torch's
C calls      of built-in functions
operations   on tensors, as torch dispatches them; allocations: those that create a new tensor
collectives  of torch.distributed
at a log     additional calls and operations of a log step, together with the step after it
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from itertools import chain, cycle, product
from pathlib import Path
from statistics import median_low
from types import CodeType, FrameType
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import harness, loops, report
from benchmarks.loops import Setup
from dist_amp import clock
from dist_amp.run import build_run
from dist_amp.settings import Config
from dist_amp.train import fit
from dist_amp.world import World

PACKAGE = str(Path(clock.__file__).parent)
LOG_EVERY = 10
WARM_UP = 2 * LOG_EVERY  # steps; torch and the observers of the first steps have settled by then
INTERVALS = 3  # log intervals that are counted
CELLS = (("single", 1), ("ddp", 2), ("fsdp", 2))  # strategy and ranks
KINDS = ("calls", "C calls", "operations", "allocations", "collectives")
SHOWN = (*KINDS, "calls at a log", "operations at a log")
CALL_EVENTS = {"call": "calls", "c_call": "C calls"}
FORWARD, BACKWARD, CLOCK = "forward and loss", "backward", "clock"
OF_MODEL = (FORWARD, BACKWARD)
ITSELF = {"train_step": "train_step itself", "loop": "the loop itself"}
PASSED_ON = ("Observers.call", "Observers.tell")  # the component is what these call

Counts = Counter[tuple[str, str]]  # by component and kind


class Tally(TorchDispatchMode):
    """Counts between `start` and `stop`: tensor operations if `of_tensors`, else function calls."""

    def __init__(self, of_tensors: bool) -> None:
        super().__init__()
        self._of_tensors = of_tensors
        self.counts: Counts = Counter()

    def start(self) -> None:
        if self._of_tensors:
            self.__enter__()
        else:
            sys.setprofile(self._on_call)

    def stop(self) -> None:
        if self._of_tensors:
            self.__exit__(None, None, None)
        else:
            sys.setprofile(None)

    def _on_call(self, frame: FrameType, event: str, function: Any) -> None:
        kind = CALL_EVENTS.get(event)
        if kind and function is not sys.setprofile and (component := component_of(frame)):
            self.counts[component, kind] += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches again on its local tensors
        component = component_of(sys._getframe(1))
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[component, "collectives"] += 1
        else:
            self.counts[component, "operations"] += 1
            new = [value for value in func._schema.returns if value.alias_info is None]
            self.counts[component, "allocations"] += bool(new)
        return func(*args, **(kwargs or {}))


def component_of(frame: FrameType | None) -> str:
    """The component that this frame belongs to, from the functions that called it; "" for none."""
    below = ""  # the last of the package's functions on the way
    while frame is not None:
        code = frame.f_code
        if code.co_filename == __file__:
            return ""
        if place := PLACES.get(code) or place_of(code):
            if place in (FORWARD, BACKWARD, CLOCK):
                return place
            if place in ITSELF:
                return below or ITSELF[place]
            if place not in PASSED_ON:
                below = place
        frame = frame.f_back
    return below


PLACES: dict[CodeType, str] = {}


def place_of(code: CodeType) -> str:
    """FORWARD, BACKWARD or CLOCK for their functions; the function's name if it is dist_amp's."""
    file, name = code.co_filename, code.co_qualname
    place = ""
    if file.startswith(f"{PACKAGE}/"):
        place = CLOCK if file == clock.__file__ else name.replace(".<locals>", "")
    elif name.endswith(".loss_sum"):
        place = FORWARD
    elif name == "Tensor.backward":
        place = BACKWARD
    elif file == loops.__file__:
        place = "train_step"  # the step of the hand-written loop
    PLACES[code] = place
    return place


class CountedSteps:
    """An observer of a run that counts from the end of each step to the end of the next."""

    def __init__(self, of_tensors: bool) -> None:
        self._of_tensors = of_tensors
        self._tally: Tally | None = None
        self._step = 0
        self.by_step: dict[int, Counts] = {}

    def after_step(self, *_: object) -> None:
        if self._tally is not None:
            self._tally.stop()
            self.by_step[self._step] = self._tally.counts
        self._step += 1
        self._tally = Tally(self._of_tensors)
        self._tally.start()

    def close(self, error: BaseException | None = None) -> None:
        if self._tally is not None:
            self._tally.stop()


def costs(world: World, strategy: str, precision: str, accumulation: int) -> dict[str, Any]:
    """{loop: {component: {kind: number}}} per step and per log. Every rank must call it."""
    rows: dict[str, Any] = {}
    for of_tensors in (False, True):
        setup = Setup(config_of(strategy, precision, accumulation), world, loops.TwoLayers())
        by_step = {"dist_amp": main_job(setup, of_tensors), "by hand": by_hand(setup, of_tensors)}
        for name, steps in by_step.items():
            for (component, kind), number in per_step(steps).items():
                rows.setdefault(name, {}).setdefault(component, {})[kind] = number
    return rows


def config_of(strategy: str, precision: str, accumulation: int) -> Config:
    words = f"--parallel.strategy {strategy} --metrics.log_every {LOG_EVERY}"
    config = loops.config_of("cpu", precision, 16, accumulation, words)
    return replace(config, train=replace(config.train, steps=WARM_UP + INTERVALS * LOG_EVERY + 1))


def main_job(setup: Setup, of_tensors: bool) -> dict[int, Counts]:
    """The counts of the main job's steps, as `fit` runs them, from after_step to after_step."""
    world = setup.world
    steps = CountedSteps(of_tensors)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        folder = world.from_main(folder)
        config = replace(setup.config, run=replace(setup.config.run, dir=f"{folder}/run"))
        run = build_run(config, world, setup.task)
        run.observers.add(steps, stays=True)
        fit(run)
        world.barrier()  # before rank 0 removes the folder
    return steps.by_step


def by_hand(setup: Setup, of_tensors: bool) -> dict[int, Counts]:
    """The counts of the hand-written loop's steps, without reading its data."""
    loop = loops.baseline(setup)
    steps = CountedSteps(of_tensors)
    data = cycle(loops.steps_of_data(setup))
    for _ in range(setup.config.train.steps):
        micro_batches = next(data)
        steps.after_step()
        loop.step(micro_batches)
    steps.close()
    return steps.by_step


def per_step(by_step: Mapping[int, Counts]) -> Counts:
    """The counts of the median step, and how far a log interval exceeds so many median steps."""
    first = range(WARM_UP, WARM_UP + INTERVALS * LOG_EVERY, LOG_EVERY)
    intervals = [[by_step[step + number] for number in range(LOG_EVERY)] for step in first]
    keys = {key for interval in intervals for counts in interval for key in counts}
    medians: Counts = Counter()
    for component, kind in keys:
        numbers = [[counts[component, kind] for counts in interval] for interval in intervals]
        usual = median_low(chain(*numbers))
        medians[component, kind] = usual
        excess = [sum(interval) - LOG_EVERY * usual for interval in numbers]
        medians[component, f"{kind} at a log"] = median_low(excess)
    return medians


def tables(precisions: Sequence[str], accumulation: int) -> str:
    """This file's explanation, and a Markdown table for each strategy and precision."""
    parts = [(__doc__ or "").strip()]
    for (strategy, ranks), precision in product(CELLS, precisions):
        rows = harness.on_ranks(ranks, costs, strategy, precision, accumulation)
        head = f"{strategy} on {ranks}, {precision}, {accumulation} micro-batches: two layers of 64"
        parts += [head, table_of(rows["dist_amp"], rows["by hand"])]
    return report.document(*parts)


Costs = Mapping[str, Mapping[str, int]]  # {component: {kind: number}}


def total(loop: Costs, without: Collection[str] = ()) -> Counter[str]:
    return sum((Counter(loop[name]) for name in loop if name not in without), Counter[str]())


def table_of(rows: Costs, by_hand: Costs) -> str:
    """A row for each component, most calls first, then the sums of both loops."""

    def line(name: str, numbers: Mapping[str, int]) -> dict[str, str]:
        cells = {kind: str(numbers.get(kind) or "") for kind in SHOWN}
        return {"component": name, **cells}

    ordered = sorted(rows, key=lambda name: -rows[name].get("calls", 0))
    return report.table(
        [
            *(line(name, rows[name]) for name in ordered),
            line("all but forward and backward", total(rows, OF_MODEL)),
            line("by hand, likewise", total(by_hand, OF_MODEL)),
            line("forward and backward by hand", total(by_hand) - total(by_hand, OF_MODEL)),
        ],
        left=1,
    )
