"""Finds the user's task by `task.target`, checks its constructor's arguments and builds it."""

import importlib
import inspect
import re
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import MISSING, field, is_dataclass, make_dataclass
from enum import Enum
from functools import cache, partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, get_type_hints

from dist_amp.errors import ConfigError, first_line
from dist_amp.files import missing
from dist_amp.settings import Config

SIGNATURES = {
    "build_model": "build_model(self) -> nn.Module",
    "build_dataset": "build_dataset(self, split) -> dataset",
    "loss_sum": "loss_sum(self, model, batch) -> Tensor",
    "weight": "weight(self, batch) -> number",
}

INJECTED = "data"  # a constructor's parameter of this name gets the data section; no setting

GIVEN = "given:"  # instead of a module, for a task object that no config can rebuild


# ---- the class


def find_task(target: str) -> type:
    """The class that `target` names. Raises ConfigError if it is missing or lacks a method."""
    cls = find_class(target, "task.target")
    for method, signature in SIGNATURES.items():
        if not callable(getattr(cls, method, None)):
            raise ConfigError(
                f"task.target={target} lacks the method {method}; add `def {signature}`"
            )
    return cls


def find_class(target: str, key: str) -> type:
    """The class that a setting names as module:Class. Raises ConfigError if it is missing."""
    module_name, _, class_name = new_target(target).partition(":")
    if not (module_name and class_name):
        raise ConfigError(f"{key}={target} must be module:Class or path/to/file.py:Class")
    if target.startswith(GIVEN):
        raise ConfigError(
            f"task.target={target}: the run's task was an object that a script or notebook gave to "
            "build_run; name its class and its arguments, as --task.target my_file:"
            f"{target.rpartition('.')[2].removeprefix(GIVEN)} --task.args.NAME VALUE"
        )
    module = _import(module_name, target, key)
    cls = getattr(module, class_name, None)
    if not inspect.isclass(cls):
        members = inspect.getmembers(module, inspect.isclass)
        classes = [name for name, kind in members if kind.__module__ == module.__name__]
        raise ConfigError(
            f"{key}={target}: there is no class {class_name} in {module_name}, which has "
            f"{', '.join(classes) or 'none'}"
        )
    return cls


def new_target(target: str) -> str:
    """The target; that of a task that was moved to examples/ is replaced by the new one."""
    return re.sub(r"^dist_amp.tasks.(sinusoid|preference|image_text):", r"examples/\1.py:", target)


def _import(module_name: str, target: str, key: str) -> Any:
    """Import a module by dotted name, also from the working directory, or by its file's path."""
    path = Path(module_name)
    name = module_name
    folder = str(Path.cwd())
    if module_name.endswith(".py"):
        if not path.is_file():
            raise ConfigError(f"{key}={target}: there is no file {path}; check the path")
        name = path.stem
        folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        fix = "fix it"
        if isinstance(error, ModuleNotFoundError):
            fix = f"pip install {error.name}, or check the path: {folder} was searched too"
            if str(error.name).startswith("dist_amp."):
                # In a project without tasks the error names the missing package, dist_amp.tasks.
                absent = name if name.startswith(f"{error.name}.") else str(error.name)
                fix = missing(absent.removeprefix("dist_amp."))
        cause = f"importing it failed with {type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"{key}={target}: {cause}; {fix}") from error
    file = getattr(module, "__file__", None) or "built in"
    if module_name.endswith(".py") and Path(file).resolve() != path.resolve():
        raise ConfigError(
            f"{key}={target}: another module has the name {name} ({file}); rename {module_name}"
        )
    return module


def check_saved_target(target: str, folder: Path) -> None:
    """Print where a saved config's task is imported from, since a checkpoint must not run own code.

    folder: the run's or export's, resolved. Raises ConfigError for code in that folder, or for a
    file outside the current folder.
    """
    module = target.partition(":")[0]
    here = place = Path.cwd()
    if module.startswith("dist_amp."):
        return
    if module.endswith(".py"):
        place = Path(module).resolve()
        is_outside = not place.is_relative_to(here)
    else:  # its package, found without importing it
        spec: Any = PathFinder.find_spec(module.partition(".")[0], [str(here), *sys.path])
        if spec is not None:
            place = Path(next(iter(spec.submodule_search_locations or [spec.origin]))).resolve()
        is_outside = False
    if is_outside or here.is_relative_to(folder) or place.is_relative_to(folder):
        raise ConfigError(
            f"task.target={target} is only named by the config in {folder}, and would be imported "
            f"from {place}, which can run any code; check the code, then add --task.target {target}"
        )
    print(f"task   {target}, named by the saved config, from {place}", file=sys.stderr)


# ---- the arguments of its constructor


@cache
def args_dataclass(cls: type) -> type:
    """A dataclass with the constructor's parameters, to check `task.args` and to print --help."""
    checks = {"arbitrary_types_allowed": True, "extra": "forbid"}
    constructor: Any = inspect.getattr_static(cls, "__init__")
    try:
        hints = get_type_hints(constructor, include_extras=True)
    except NameError as error:
        raise ConfigError(
            f"{cls.__name__}: unknown type in its constructor: {error}; import it"
        ) from error
    declared = vars(cls).get("__dataclass_fields__", {})  # if the task is a dataclass
    args: list[Any] = []
    for name, parameter in inspect.signature(cls).parameters.items():
        default = parameter.default
        if name == INJECTED or parameter.kind.name.startswith("VAR"):  # *args and **kwargs
            continue
        if default is parameter.empty:
            args.append((name, hints.get(name, int | float | str)))
            continue
        factory = partial(deepcopy, default)  # so that tasks don't share a list, for example
        if name in declared and declared[name].default_factory is not MISSING:
            factory = declared[name].default_factory
        unannotated = str | None if default is None else type(default)
        args.append((name, hints.get(name, unannotated), field(default_factory=factory)))
    namespace = {"__pydantic_config__": checks}
    return make_dataclass("Args", args, frozen=True, kw_only=True, namespace=namespace)


def args_of(task: Any) -> dict[str, Any] | None:
    """The constructor's arguments, from attributes of the same names, to rebuild the task; None if
    an argument is missing or not plain data, or if the class can't be imported.
    """
    cls = type(task)
    if cls.__module__ == "__main__" or "." in cls.__qualname__:
        return None
    names = [name for name in inspect.signature(cls).parameters if name != INJECTED]
    args = {name: getattr(task, name, ...) for name in names}
    return args if all(map(is_plain, args.values())) else None


def is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, str | int | float | Path | Enum)


def build_task(config: Config) -> Any:
    """Construct the task with its arguments; a parameter called `data` gets the data section."""
    target = config.task.target
    cls = find_task(target)
    args: Mapping[str, Any] = config.task.args
    if is_dataclass(args):
        args = vars(args)
    if INJECTED in inspect.signature(cls).parameters:
        args = {**args, INJECTED: config.data}
    from dist_amp.distributed.process import seed_all  # imports torch: slow, and settings need none

    seed_all(config.run.seed)  # a constructor draws the same numbers on every rank
    try:
        return cls(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"task.target={target} rejects its task.args: {error}") from error
