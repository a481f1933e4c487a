"""The one seam for all that watches a run: steps, logs, evaluations, checkpoints and the end.

An observer has those of `Observer`'s methods that it needs; every rank calls them, in the order in
which the observers were added. `train_step` calls the two around a step, and only of observers that
define them, so that the others cost nothing; the main job calls the rest. A run takes the same
steps without its observers. Some stay with the run, such as the average of its weights; others are
there for one fit, and are forgotten when the next one begins.

A user's observer that raises is not called again. Its error is kept as `problem`: the main job ends
all ranks after the same step and saves the run. An error in one of the package's ends it at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from dist_amp.errors import Failure, in_one_line
from dist_amp.telemetry.step_report import LogRow, StepReport


class Observer:
    """Watches a run; every rank calls each method at the same step."""

    def before_step(self, micro_batches: Sequence[Any]) -> None:
        """Called before a step on `micro_batches`; `run.step` counts the steps before it."""

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        """Called after a step, before any evaluation or checkpoint; `run.step` counts this step."""

    def during_evaluation(self, done: int, steps: int) -> None:
        """Called in an evaluation, of whose `steps` so many are done: 0 at first."""

    def after_evaluation(self) -> None:
        """Called after an evaluation, which averaged the batch statistics over the ranks."""

    def tags(self, row: LogRow) -> Mapping[str, Any]:
        """Values to write at a log step: on rank 0 to metrics.jsonl; if numbers, to TensorBoard."""
        return {}

    def rank_tags(self, row: LogRow) -> Mapping[str, Any]:
        """{tag: array [ranks]}: figures of every rank at a log step, the same on all ranks."""
        return {}

    def on_log(self, row: LogRow) -> None:
        """Called when the metrics of an interval are written: at the log step or one step later."""

    def summary(self, failed: bool) -> Mapping[str, Any]:
        """Entries of summary.json. failed: ask neither the device nor other ranks for anything."""
        return {}

    def state_dict(self) -> Any:
        """This rank's state for a checkpoint: tensors, numbers, texts, lists and dicts."""

    def load_state_dict(self, state: Any) -> None:
        """Continue from what `state_dict` returned; not called if a checkpoint has nothing."""

    def close(self, error: BaseException | None = None) -> None:
        """Called at the end of a fit. error: its cause, after which other ranks may be gone."""


class Observers:
    """The observers of a run, in order. problem: the first error of one that is a user's."""

    def __init__(self) -> None:
        self.before_step: Sequence[Callable[..., None]] = ()
        self.after_step: Sequence[Callable[..., None]] = ()
        self.problem: Failure | None = None
        self._run: Any = None  # in a fit
        self._kept: list[Any] = []
        self._added: list[Any] = []
        self._resting: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return iter([*self._kept, *self._added])

    def begin(self, run: Any) -> None:
        """Forget the observers of an earlier fit; called at the start of a fit."""
        self._run = run
        self._added = []
        self._resting = []
        self.problem = None

    def add(self, observer: Any, stays: bool = False) -> None:
        """Add an observer for the present fit, or for the run."""
        (self._kept if stays else self._added).append(observer)
        self._find_steps()

    def rest(self, *observers: Any) -> None:
        """Call them around no more steps."""
        self._resting += observers
        self._find_steps()

    def close(self, error: BaseException | None) -> None:
        """Close all, the last one first, which still add to summary.json. error: as they get it."""
        self.rest(*self._added)
        with ExitStack() as closing:
            for observer in self:
                if defines(observer, "close"):
                    closing.callback(self.call, observer, "close", error)

    def tell(self, method: str, *values: Any) -> dict[str, Any]:
        """Call a method of all that define it; returns all entries of the dicts they return."""
        entries: dict[str, Any] = {}
        for observer in self:
            if defines(observer, method):
                entries |= self.call(observer, method, *values) or {}
        return entries

    def call(self, observer: Any, method: str, *values: Any) -> Any:
        """Call the method; None if a user's observer raises in a fit, which drops it."""
        try:
            return getattr(observer, method)(*values)
        except Exception as error:
            if self._run is None or type(observer).__module__.startswith("dist_amp."):
                raise
            self.problem = self.problem or Failure(
                f"the observer {type(observer).__name__} failed in {method}() at step "
                f"{self._run.step}: {in_one_line(error)}; fix it, or leave it out of run.observers"
            )
            self._kept = [each for each in self._kept if each is not observer]
            self._added = [each for each in self._added if each is not observer]
            self._find_steps()

    def _find_steps(self) -> None:
        active = [each for each in self if each not in self._resting]
        self.before_step, self.after_step = (
            [partial(self.call, each, method) for each in active if defines(each, method)]
            for method in ("before_step", "after_step")
        )


def defines(observer: Any, method: str) -> bool:
    """Whether it has the method, other than as `Observer` has it."""
    own = getattr(type(observer), method, None)
    return own is not None and own is not getattr(Observer, method, None)
