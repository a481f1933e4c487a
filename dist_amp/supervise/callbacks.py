"""The task's optional callbacks. The train command and fit(run) call them; train_step does not.

    on_step(run, report)        on every rank after a step; reading the StepReport waits for the
                                device
    on_evaluation(run, values)  on every rank after an evaluation, also by run.evaluate(); values:
                                {name: number}, equal on all ranks; entries that it adds are logged
    train_metrics(run, report)  on every rank at log steps -> {name: number or scalar tensor},
                                written as train/NAME to the rank's TensorBoard folder, and rank
                                0's to metrics.jsonl

    observers(run)              more observers, besides those that the setting run.observers lists

on_step and on_evaluation return None or "stop". If one returns "stop" on any rank, all ranks save
and end the run as completed: at once after on_evaluation, one step later after on_step.

Docs: docs/recipes.md
"""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dist_amp.config.task_class import find_class
from dist_amp.errors import ConfigError, DataError, nearest_name
from dist_amp.optimizers.groups import call_back
from dist_amp.run import Run
from dist_amp.supervise.stop import AgreedStop
from dist_amp.task import call_task
from dist_amp.telemetry.observer import Observer, defines
from dist_amp.telemetry.step_report import LogRow, StepReport
from dist_amp.world import as_scalar

METHODS = [name for name in vars(Observer) if name[0] != "_"]

OPTIONAL = (
    *("collate", "augment", "blocks", "units", "tokens", "flops_per_item", "metrics", "load"),
    *("export", "sample", "groups", "optimizer", "schedule", "on_step", "on_evaluation"),
    *("train_metrics", "state_dict", "load_state_dict", "observers"),
)

# For misspelt methods: finds sheduler and metric, but not helpers such as tokenize or load_files.
MIN_SIMILARITY = 0.8

RESERVED = ("loss", "grad_norm", "lr")  # names in train/NAME that the run writes itself


class Callbacks(Observer):
    """Calls the task's on_step, and ends the run if that returns "stop". Raises DataError."""

    def __init__(self, run: Run, stop: AgreedStop):
        for name, near_name in misspelt_methods(run.task).items():
            run.world.warn(
                f"the run does not call the task's method {name}; if it is meant for {near_name}, "
                "rename it"
            )
        self._run = run
        self._stop = stop
        self._has_on_step = hasattr(run.task, "on_step")
        if self._has_on_step:
            stop.every_poll = True
        else:
            run.observers.rest(self)

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        if self._has_on_step:
            self._stop.end(call_back(self._run, "on_step(run, report)", report))

    def on_log(self, row: LogRow) -> None:
        if self._has_on_step:
            check_trained(self._run, row.step)


def check_trained(run: Run, step: int) -> None:
    """Raises DataError if a parameter was frozen or added after the optimizer was built."""
    trained = set(run.parallel.parameters)
    for name, parameter in run.parallel.module.named_parameters():
        if parameter.requires_grad != (parameter in trained):
            raise DataError(
                f"the parameter {name} was frozen or added to the model by step {step}, after the "
                "optimizer was built; do it in build_model, in a new run from an export of this "
                "one's weights"
            )


def train_metrics(run: Run, report: StepReport) -> dict[str, Tensor]:
    """{train/NAME: scalar on the device} from the task; does not wait for it. Raises DataError."""
    name = "train_metrics(run, report)"
    method = run.task.train_metrics  # type: ignore[attr-defined]
    values = call_task(DataError, name, method, run, report, when=f" after step {run.step}")
    scalars = {}
    for key, value in values.items():
        if key in RESERVED:
            raise DataError(
                f"the task's {name} returned {key}, but the run writes train/{key} itself; choose "
                "another name"
            )
        if isinstance(value, Tensor) and value.ndim:
            raise DataError(
                f"the task's {name} returned {key}={value!r:.60}; return a number or scalar tensor"
            )
        if hasattr(value, "full_tensor"):  # a DTensor, computed from sharded parameters
            value = value.full_tensor()
        scalars[f"train/{key}"] = as_scalar(value, run.world.device).detach()
    return scalars


def misspelt_methods(task: Any) -> dict[str, str]:
    """{name of a method that the run does not call: the optional method that was likely meant}."""
    missing = [known for known in OPTIONAL if not hasattr(task, known)]
    found = {}
    for name, method in sorted(vars(type(task)).items()):
        near_name = nearest_name(name, missing, MIN_SIMILARITY)
        is_public = inspect.isfunction(method) and not name.startswith("_")
        if near_name and is_public and name not in OPTIONAL:
            found[name] = near_name
    return found


def add_own_observers(run: Run) -> None:
    """Add the observers from run.observers and the task, once per run. Raises ConfigError."""
    if any(not type(each).__module__.startswith("dist_amp.") for each in run.observers):
        return  # added in an earlier fit
    own: list[Any] = []
    for target in run.config.run.observers:
        cls: Any = find_class(target, "run.observers")
        own.append(cls(run))
    if hasattr(run.task, "observers"):
        own += call_task(DataError, "observers(run)", run.task.observers, run)
    for observer in own:
        if not any(defines(observer, method) for method in METHODS):
            raise ConfigError(
                f"the observer {type(observer).__name__} has none of {', '.join(METHODS)}; add one"
            )
        run.observers.add(observer, stays=True)
