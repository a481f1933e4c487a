"""The user's task: found by `task.target`, its constructor's arguments checked, and built."""

import importlib
import inspect
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from functools import cache, partial
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from dist_amp.config.suggest import nearest_name
from dist_amp.errors import ConfigError, DataError, first_line
from dist_amp.settings import Strategy, TaskConfig
from dist_amp.sources.load import hide_progress_bars
from dist_amp.task import Task
from dist_amp.world import World

SIGNATURES = {
    "build_model": "build_model(self) -> nn.Module",
    "build_dataset": "build_dataset(self, split) -> dataset",
    "loss_sum": "loss_sum(self, model, batch) -> Tensor",
    "weight": "weight(self, batch) -> number",
}

EXTRA_HF = ("transformers", "tokenizers", "peft")  # packages of the extra `hf`

INJECTED = "data"  # this constructor parameter is not a setting: it gets the data section


def find_task(target: str) -> type[Task]:
    """The class that `target` names. Errors: ConfigError if it can't be imported, is missing or lacks a method."""
    module_name, colon, class_name = target.partition(":")
    if not (module_name and colon and class_name):
        raise ConfigError(f"task.target={target} must be module:Class or path/to/file.py:Class")
    cls = getattr(_import(module_name, target), class_name, None)
    if not inspect.isclass(cls):
        module = _dotted(module_name)
        inside = vars(sys.modules[module]).items()
        classes = [name for name, value in inside if inspect.isclass(value) and value.__module__ == module]
        near = nearest_name(class_name, classes)
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"task.target={target}: there is no class {class_name} in {module_name}{hint}")
    for method, signature in SIGNATURES.items():
        if not callable(getattr(cls, method, None)):
            raise ConfigError(f"task.target={target} lacks the method {method}; add `def {signature}`")
    return cls  # type: ignore[return-value]


def _dotted(module_name: str) -> str:
    return Path(module_name).stem if module_name.endswith(".py") else module_name


def _import(module_name: str, target: str) -> Any:
    folder = str(Path(module_name).parent.resolve()) if module_name.endswith(".py") else str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(_dotted(module_name))
    except ModuleNotFoundError as error:
        if not f"{_dotted(module_name)}.".startswith(f"{error.name}."):
            fix = "pip install -e '.[hf]' in the clone's folder" if error.name in EXTRA_HF else "install that"
            raise ConfigError(f"task.target={target}: it imports {error.name}, which is missing; {fix}") from error
        raise ConfigError(
            f"task.target={target}: there is no module {module_name} in {folder}, and none is installed"
        ) from None
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"task.target={target}: importing it failed with {type(error).__name__}: {first_line(error)}"
        ) from error
    found = getattr(module, "__file__", None)
    if module_name.endswith(".py") and (found is None or Path(found).resolve() != Path(module_name).resolve()):
        raise ConfigError(
            f"task.target={target}: another module has the name {_dotted(module_name)} ({found or 'built in'}); "
            f"rename {module_name}"
        )
    return module


@cache
def args_dataclass(cls: type) -> type:
    """A dataclass of the constructor's parameters, for checking `task.args` and for --help."""
    constructor = vars(cls).get("__init__") or getattr(cls, "__init__")  # noqa: B009 (mypy doubts the plain form)
    if constructor is object.__init__:
        return make_dataclass("Args", [], frozen=True)
    try:
        hints = get_type_hints(constructor, include_extras=True)
    except NameError as error:
        raise ConfigError(f"{cls.__name__}: unknown type in its constructor: {error}; import it") from error
    items: list[Any] = []
    for parameter in list(inspect.signature(cls).parameters.values()):
        if parameter.name == INJECTED or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        default = parameter.default
        if default is parameter.empty:
            items.append((parameter.name, hints.get(parameter.name, int | float | str)))
            continue
        hint = hints.get(parameter.name, str | None if default is None else type(default))
        made_by = vars(cls).get("__dataclass_fields__", {}).get(parameter.name, field()).default_factory
        if made_by is MISSING and type(default).__hash__ is None:  # a list: every task gets a copy of its own
            made_by = partial(deepcopy, default)
        default_field: Any = field(default=default) if made_by is MISSING else field(default_factory=made_by)
        items.append((parameter.name, hint, default_field))
    required_first = sorted(items, key=len)
    return make_dataclass("Args", required_first, frozen=True, namespace={"__doc__": inspect.getdoc(cls) or ""})


def build_task(config: TaskConfig, data: Any) -> Task:
    """Construct the task with its arguments, and with the data section if it asks for it."""
    cls = find_task(config.target)
    args: Mapping[str, Any] = config.args
    if is_dataclass(args):
        args = {item.name: getattr(args, item.name) for item in fields(args)}
    known = inspect.signature(cls).parameters
    if INJECTED in known:
        args = {**args, INJECTED: data}
    try:
        return cls(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"task.target={config.target} rejects its task.args: {error}") from error


def as_scalar(value: float | Tensor, what: str, device: torch.device) -> Tensor:
    """The value as a scalar tensor. Errors: DataError for a tensor of another shape."""
    if isinstance(value, Real):
        return torch.full((), float(value), device=device)
    if not isinstance(value, Tensor):
        raise DataError(f"the task's {what} a {type(value).__name__}, not a number or a scalar tensor")
    if value.ndim != 0:
        raise DataError(
            f"the task's {what} a tensor of shape {list(value.shape)}, not a number or a scalar tensor; sum it up"
        )
    return value.to(device)


def check_weight(weight: float | Tensor, source: str = "weight(batch) returned") -> float | Tensor:
    """The weight of a batch, or of a metric. Errors: DataError if it is no number, or a number below 0."""
    if isinstance(weight, Tensor) or (isinstance(weight, Real) and not weight < 0):
        return weight
    what = f"{weight:g}" if isinstance(weight, Real) else type(weight).__name__
    raise DataError(
        f"the task's {source} {what}; return what counts in the batch: a number or scalar tensor, at least 0"
    )


def built_model(task: Task) -> nn.Module:
    """The task's model. Errors: DataError for something else, or if it has nothing to train or complex parameters."""
    module = task.build_model()
    if not isinstance(module, nn.Module):
        raise DataError(f"the task's build_model returned {type(module).__name__}; return the model, an nn.Module")
    if not any(p.requires_grad for p in module.parameters()):
        raise DataError(
            f"none of the {len(list(module.parameters()))} parameters of the task's model is trained; build_model must "
            "leave some of them with requires_grad=True"
        )
    if odd := next((name for name, p in module.named_parameters() if p.requires_grad and p.is_complex()), ""):
        raise DataError(
            f"the parameter {odd} of the task's model is {module.get_parameter(odd).dtype}, and only real ones are "
            "trained; store it with a last dimension of 2, and use torch.view_as_complex in forward"
        )
    return module


def check_loss(loss: Any, device: torch.device) -> Tensor:
    """The loss, if it is a float32 scalar with a gradient on the device. Errors: DataError; nothing is read back."""
    if not isinstance(loss, Tensor) or loss.ndim != 0 or loss.dtype != torch.float32:
        what = f"{loss.dtype} of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise DataError(
            f"the task's loss_sum returned {what}, not a float32 scalar; sum over all elements, and compute the loss "
            "in float32, as in `logits.float()`"
        )
    if loss.device != device:
        raise DataError(f"the task's loss_sum returned a loss on {loss.device}, not on {device} where its batch is")
    if not loss.requires_grad:
        raise DataError(
            "the task's loss_sum returned a loss without a gradient; it must depend on the model's parameters"
        )
    return loss


def check_model(model: nn.Module, strategy: Strategy) -> None:
    """Errors: DataError for a model that can't be called, which DDP and FSDP2 do."""
    if strategy != "single" and isinstance(model, nn.ModuleDict | nn.ModuleList):
        raise DataError(
            f"the task's build_model returned a {type(model).__name__}, which can't be called, and parallel.strategy="
            f"{strategy} works through calls; put its parts into an nn.Module with a forward"
        )


# What torch says of a part of a wrapped or sharded model that is used without a call of the whole.
OF_WRAPPED_MODELS = ("'DistributedDataParallel' object", "'FSDPCommContext' object", "mixed torch.Tensor and DTensor")


def check_model_use(error: BaseException) -> None:
    """Errors: DataError in place of one from a use of the model that works in a single process alone."""
    if any(text in str(error) for text in OF_WRAPPED_MODELS):
        raise DataError(
            f"the task's loss_sum did more with its model than call it ({first_line(error)}); over several ranks the "
            "model is wrapped or sharded: call model(...) once per batch, and choose submodules in the model's forward"
        ) from error


def build_split(task: Task, split: Literal["train", "validation"], world: World) -> Any:
    """The task's dataset of a split, each node's first rank first: it fills the caches that the others read."""
    if not (world.is_main and sys.stderr.isatty()):
        hide_progress_bars()
    if world.local_rank != 0:
        world.wait_long()
    dataset = task.build_dataset(split)
    if world.local_rank == 0:
        world.wait_long()
    by_index = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if dataset is not None and (not by_index or isinstance(dataset, str | bytes | Mapping | IterableDataset)):
        fix = "return a map-style dataset"
        if hasattr(dataset, "__iter__") and not isinstance(dataset, str | bytes | Mapping):
            fix += (
                ", since a stream can't be resumed exactly: in its place set data.path to its files, with data.view="
                "parquet for Parquet, save it with save_to_disk, or its tokens with python -m dist_amp.tokenize"
            )
        raise DataError(
            f"the task's build_dataset({split!r}) returned a {type(dataset).__name__}, not samples by number; {fix}"
        )
    return dataset
