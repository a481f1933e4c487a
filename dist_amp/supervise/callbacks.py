"""The task's own callbacks in the main job, which train_step by itself does not call.

    on_step(run, report)        on every rank after a step; reading the StepReport waits for the
                                device
    on_evaluation(run, values)  on every rank after an evaluation, also by run.evaluate(); values:
                                {name: number}, equal on all ranks; what it adds is logged with them
    train_metrics(run, report)  on every rank at log steps -> {name: number or scalar tensor},
                                written as train/NAME to the rank's TensorBoard folder, and rank
                                0's to metrics.jsonl

    observers(run)              objects that watch the run, as `run.observers` names them

The `on_` methods return None or "stop", which ends the run early: on all ranks if any says so,
saved, as completed. A stop by on_step comes one step later, since the ranks tell each other while
they take it.

Docs: docs/recipes.md
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dist_amp.config.task_class import find_class
from dist_amp.errors import ConfigError, DataError, Failure, in_one_line, nearest_name
from dist_amp.optimizers.groups import call_back
from dist_amp.run import Run
from dist_amp.supervise.stop import AgreedStop
from dist_amp.task import as_scalar, call_task
from dist_amp.telemetry.observer import Observer, defines
from dist_amp.telemetry.step_report import LogRow, StepReport

METHODS = [name for name in vars(Observer) if name[0] != "_"]

OPTIONAL = (
    *("collate", "augment", "blocks", "units", "tokens", "flops_per_item", "metrics", "load"),
    *("export", "sample", "groups", "optimizer", "schedule", "on_step", "on_evaluation"),
    *("train_metrics", "state_dict", "load_state_dict", "observers"),
)

# Finds sheduler and metric; a helper such as tokenize or load_files is further from any name.
CLOSE = 0.85

TAKEN = ("loss", "grad_norm", "lr")  # train/NAME that the run writes itself


class Callbacks(Observer):
    """Calls the task's callbacks, and ends the run where one returns "stop". Errors: DataError."""

    def __init__(self, run: Run, stop: AgreedStop):
        for name, near in misspelt_methods(run.task).items():
            run.world.warn(
                f"the run does not call the task's method {name}; if it is meant for {near}, "
                "rename it"
            )
        self._run = run
        self._stop = stop
        self._calls = hasattr(run.task, "on_step")
        if self._calls:
            stop.every_poll = True
        else:
            run.observers.rest(self)
        if hasattr(run.task, "on_evaluation") and run.validation is None:
            run.world.warn(
                "the task's on_evaluation is never called, because nothing is evaluated: set "
                "eval.every, and return the samples of build_dataset('validation')"
            )

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        if self._calls:
            self._stop.end(call_back(self._run, "on_step(run, report)", report))

    def on_log(self, row: LogRow) -> None:
        if self._calls:
            refuse_frozen(self._run, row.step)


def refuse_frozen(run: Run, step: int) -> None:
    """Errors: DataError for a trained parameter that was frozen, and for one that is new."""
    trained = set(run.parallel.parameters)
    advice = "in build_model, in a new run from an export of this one's weights"
    for name, parameter in run.parallel.module.named_parameters():
        if parameter.requires_grad and parameter not in trained:
            raise DataError(
                f"the parameter {name} came into the model up to step {step}, and nothing "
                f"trains it; put it there {advice}"
            )
        if parameter in trained and not parameter.requires_grad:
            raise DataError(
                f"the parameter {name} was frozen up to step {step}, which its momentum and "
                f"weight decay would ignore; freeze it {advice}"
            )


def train_metrics(run: Run, report: StepReport) -> dict[str, Tensor]:
    """{train/NAME: scalar on the device} from the task; nothing is read. Errors: DataError."""
    name = "train_metrics(run, report)"
    method = run.task.train_metrics  # type: ignore[attr-defined]
    values = call_task(DataError, name, method, run, report, when=f" after step {run.step}")
    if not isinstance(values, Mapping):
        raise DataError(
            f"the task's {name} returned {type(values).__name__}; return a dict of numbers or "
            "scalars"
        )
    scalars = {}
    for key, value in values.items():
        if key in TAKEN:
            raise DataError(
                f"the task's {name} gave {key}, but train/{key} is the run's own; give it another "
                "name"
            )
        is_scalar = isinstance(value, Tensor) and value.ndim == 0
        if not is_scalar and not isinstance(value, int | float):
            raise DataError(
                f"the task's {name} gave {key}={value!r:.60}; give a number or a scalar tensor"
            )
        if hasattr(value, "full_tensor"):  # computed of sharded parameters, by all ranks
            value = value.full_tensor()
        scalars[f"train/{key}"] = as_scalar(value, run.world.device).detach()
    return scalars


def misspelt_methods(task: Any) -> dict[str, str]:
    """{a method that no run calls: the optional one that it may be meant for}."""
    missing = [known for known in OPTIONAL if not hasattr(task, known)]
    callbacks = [known for known in missing if known.startswith("on_")]
    found = {}
    for name, method in sorted(vars(type(task)).items()):
        if name.startswith("_") or name in OPTIONAL or not inspect.isfunction(method):
            continue
        near = nearest_name(name, missing, CLOSE)
        if not near and name.startswith("on_"):
            near = nearest_name(name, callbacks)
        if near:
            found[name] = near
    return found


def add_own_observers(run: Run) -> None:
    """Add them, once per run.

    Errors: ConfigError for one that is not there or has no method; Failure if its class raises.
    """
    if any(not type(each).__module__.startswith("dist_amp.") for each in run.observers):
        return  # in an earlier fit
    own: list[Any] = []
    for target in run.config.run.observers:
        cls: Any = find_class(target, "run.observers")
        try:
            own.append(cls(run))
        except Exception as error:
            raise Failure(
                f"run.observers={target}: {cls.__name__}(run) failed: {in_one_line(error)}; fix it"
            ) from error
    if hasattr(run.task, "observers"):
        own += call_task(DataError, "observers(run)", run.task.observers, run)
    for observer in own:
        if not any(defines(observer, method) for method in METHODS):
            raise ConfigError(
                f"the observer {type(observer).__name__} has none of {', '.join(METHODS)}; name one"
            )
        run.observers.add(observer, stays=True)
