"""Observers: the interface of everything that watches a run, such as metrics, console and EMA.

An observer defines the methods of `Observer` that it needs; subclassing is optional. Every rank
calls them, in the order in which the observers were added. `train_step` calls before_step and
after_step, only on observers that define them, so that other observers cost nothing. Evaluations,
log steps, checkpoints and the end of a run call the other methods. A run takes the same steps
without observers. Some, such as EMA, stay for the whole run; others are dropped by the next fit().

If a user's observer raises, it is removed, and its error is kept as `problem`: train.py stops all
ranks after the same step and saves. An error in a built-in observer ends the run at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from dist_amp.errors import Failure, in_one_line
from dist_amp.telemetry.step_report import LogRow, StepReport


class Observer:
    """The methods that an observer may define. Every rank calls each at the same step."""

    def before_step(self, micro_batches: Sequence[Any]) -> None:
        """Called before a step on `micro_batches`; `run.step` doesn't count this step yet."""

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        """Called after a step, before any evaluation or checkpoint; `run.step` counts this step."""

    def during_evaluation(self, done: int, steps: int) -> None:
        """Called when an evaluation begins (done is 0), and after each of its `steps` steps."""

    def after_evaluation(self) -> None:
        """Called after a completed evaluation, which has averaged batch norm's statistics."""

    def tags(self, row: LogRow) -> Mapping[str, Any]:
        """Values to log at a log step: numbers to TensorBoard; on rank 0, all to metrics.jsonl."""
        return {}

    def rank_tags(self, row: LogRow) -> Mapping[str, Any]:
        """{tag: array [ranks]}: a value per rank at a log step; return the same on all ranks."""
        return {}

    def on_log(self, row: LogRow) -> None:
        """Called after a log step's metrics are written: at this step or one step later."""

    def summary(self, failed: bool) -> Mapping[str, Any]:
        """Entries of summary.json. failed: the device and other ranks may hang: use neither."""
        return {}

    def state_dict(self) -> Any:
        """This rank's state for a checkpoint: tensors, numbers, strings, lists and dicts."""

    def load_state_dict(self, state: Any) -> None:
        """Continue from what `state_dict` returned; not called if the checkpoint has no state."""

    def close(self, error: BaseException | None = None) -> None:
        """Called at the end of a fit. error: what ended it; other ranks may be gone then."""


class Observers:
    """The observers of a run, in order. problem: the first error raised by a user's observer."""

    def __init__(self) -> None:
        self.before_step: Sequence[Callable[..., None]] = ()
        self.after_step: Sequence[Callable[..., None]] = ()
        self.problem: Failure | None = None
        self._run: Any = None  # until the first fit
        self._of_run: list[Any] = []  # stay for the whole run
        self._of_fit: list[Any] = []  # dropped when the next fit begins
        self._resting: list[Any] = []  # not called before and after steps

    def __iter__(self) -> Iterator[Any]:
        return iter([*self._of_run, *self._of_fit])

    def begin(self, run: Any) -> None:
        """Drop the observers of an earlier fit; called at the start of a fit."""
        self._run = run
        self._of_fit = []
        self._resting = []
        self.problem = None

    def add(self, observer: Any, stays: bool = False) -> None:
        """Add an observer for this fit or, if it `stays`, for the run."""
        (self._of_run if stays else self._of_fit).append(observer)
        self._find_step_calls()

    def rest(self, *observers: Any) -> None:
        """Stop calling these observers before and after steps."""
        self._resting += observers
        self._find_step_calls()

    def close(self, error: BaseException | None) -> None:
        """Call every close(error), in reverse order. `summary` may still be called afterwards."""
        self.rest(*self._of_fit)
        with ExitStack() as closing:
            for observer in self:
                if defines(observer, "close"):
                    closing.callback(self.call, observer, "close", error)

    def tell(self, method: str, *values: Any) -> dict[str, Any]:
        """Call a method of every observer that defines it; returns their dicts, merged."""
        entries: dict[str, Any] = {}
        for observer in self:
            if defines(observer, method):
                entries |= self.call(observer, method, *values) or {}
        return entries

    def call(self, observer: Any, method: str, *values: Any) -> Any:
        """Call the method. A user's observer that raises in a fit is removed; then returns None."""
        try:
            return getattr(observer, method)(*values)
        except Exception as error:
            if self._run is None or type(observer).__module__.startswith("dist_amp."):
                raise
            self.problem = self.problem or Failure(
                f"the observer {type(observer).__name__} failed in {method}() at step "
                f"{self._run.step}: {in_one_line(error)}; fix it, or leave it out of run.observers"
            )
            self._of_run = [each for each in self._of_run if each is not observer]
            self._of_fit = [each for each in self._of_fit if each is not observer]
            self._find_step_calls()

    def _find_step_calls(self) -> None:
        active = [each for each in self if each not in self._resting]
        self.before_step, self.after_step = (
            [partial(self.call, each, method) for each in active if defines(each, method)]
            for method in ("before_step", "after_step")
        )


def defines(observer: Any, method: str) -> bool:
    """Whether the observer's class has the method, other than as inherited from `Observer`."""
    own = getattr(type(observer), method, None)
    return own is not None and own is not getattr(Observer, method, None)
