"""The task's own callbacks in the main job, which train_step by itself does not call.

    on_step(run, report)        on every rank after a step; report: a StepReport on the device, reading it waits
    on_evaluation(run, values)  on every rank after an evaluation; values: {name: number}, equal on all ranks
    sample(model)               on every rank after an evaluation, and at the end; see sampling.py
    train_metrics(run, report)  on every rank at log steps -> {name: number or scalar tensor}, written as train/NAME to
                                the rank's TensorBoard folder, and rank 0's to metrics.jsonl

The `on_` methods return None or "stop", which ends the run early: on all ranks if any says so, saved, as completed. A
stop by on_step comes one step later, since the ranks tell each other while they take it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from dist_amp.config.task_class import as_scalar
from dist_amp.errors import DataError
from dist_amp.run import Run
from dist_amp.runtime.task_calls import call_task, misspelt_methods
from dist_amp.supervise.sampling import write_sample
from dist_amp.supervise.signals import AgreedStop
from dist_amp.telemetry.async_copy import StepReport
from dist_amp.telemetry.observer import Observer

TAKEN = ("loss", "grad_norm", "lr")  # train/NAME that the run writes itself


class Callbacks(Observer):
    """Calls the task's on_step and on_evaluation, and ends the run where one of them returns "stop"; writes samples.

    Errors: DataError for what they raise, and for any other value than None or "stop". Methods of the task that look
    like a misspelt optional one are warned of at the start.
    """

    def __init__(self, run: Run, stop: AgreedStop):
        for name, near in misspelt_methods(run.task).items():
            run.world.warn(f"nothing calls the task's method {name}; if it is meant for {near}, rename it")
        self._run = run
        self._stop = stop
        self._on_step = getattr(run.task, "on_step", None)
        stop.every_poll = self._on_step is not None
        self._on_evaluation = getattr(run.task, "on_evaluation", None)
        self._sample_warning = ""  # the last one, which is not repeated
        if self._on_evaluation is not None and run.validation is None:
            run.world.warn(
                "the task's on_evaluation is never called, because nothing is evaluated: set eval.every, and return "
                "the samples of build_dataset('validation')"
            )

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        if self._on_step is not None:
            self._act_on("on_step(run, report)", self._on_step, report)

    def after_evaluation(self) -> None:
        self._sample_warning = write_sample(self._run, self._sample_warning)
        if self._on_evaluation is not None:
            self._act_on("on_evaluation(run, values)", self._on_evaluation, dict(self._run.metrics.evaluation))

    def _act_on(self, name: str, callback: Callable[..., Any], argument: Any) -> None:
        when = f" after step {self._run.step}"
        answer = call_task(DataError, name, callback, self._run, argument, when=when)
        if answer is None:
            return
        if not isinstance(answer, str) or answer != "stop":
            raise DataError(
                f'the task\'s {name} returned {answer!r:.60} after step {self._run.step}; return None or "stop"'
            )
        rank, step = self._run.world.rank, self._run.step
        self._stop.ended_by = self._stop.ended_by or f'{name} returned "stop" on rank {rank} after step {step}'


def train_metrics(run: Run, report: StepReport) -> dict[str, Tensor]:
    """{train/NAME: scalar on the device} from the task's train_metrics; empty if it has none. Nothing is read.

    Errors: DataError for what it raises, for anything but a dict of scalars, and for a name that is taken.
    """
    name = "train_metrics(run, report)"
    if not hasattr(run.task, "train_metrics"):
        return {}
    values = call_task(DataError, name, run.task.train_metrics, run, report, when=f" after step {run.step}")
    if not isinstance(values, Mapping):
        raise DataError(f"the task's {name} returned {type(values).__name__}; return a dict of numbers or scalars")
    scalars = {}
    for key, value in values.items():
        if key in TAKEN:
            raise DataError(f"the task's {name} gave {key}, but train/{key} is the run's own; give it another name")
        if not isinstance(value, Tensor | int | float):
            raise DataError(f"the task's {name} gave {key}={value!r:.60}; give a number or a scalar tensor")
        if hasattr(value, "full_tensor"):  # computed of sharded parameters, by all ranks
            value = value.full_tensor()
        scalars[f"train/{key}"] = as_scalar(value, f"{name} gave {key}", run.world.device).detach()
    return scalars
