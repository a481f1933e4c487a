"""A task's parameter groups, optimizer and schedule: checked, and made to work on shards."""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from dist_amp.errors import ConfigError, first_line, nearest_name
from dist_amp.optimizers.sgd import on_cpu_in_half
from dist_amp.settings import OptimConfig
from dist_amp.task import call_task

Group = dict[str, Any]

# Of a group; other keys are the optimizer's.
GROUP_KEYS = ("params", "name", "lr_scale", "weight_decay", "use_muon")

# What DTensor says of an operation that it can't compute on shards, in torch 2.11 to 2.13.
NOT_ON_SHARDS = re.compile(r"sharding strategy|placement|Sharding propagation|DTensor")


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """{name: parameter} of those that are trained; a tied one has all its names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: p for name, p in named if p.requires_grad}


def task_groups(task: Any, model: nn.Module, config: OptimConfig) -> list[Group]:
    """The task's groups(model), with tensors in place of names and patterns, and the defaults.

    Errors: ConfigError for a malformed group, and a parameter that is missed or in two groups.
    """
    what = "the task's groups(model)"
    given_groups = call_task(ConfigError, "groups(model)", task.groups, model)
    if isinstance(given_groups, str | Mapping) or not isinstance(given_groups, Iterable):
        raise ConfigError(f"{what} returned {type(given_groups).__name__}; return a list of dicts")
    parameters = trained_parameters(model)
    groups: list[Group] = []
    owner: dict[Tensor, str] = {}
    # A generator runs in `list`.
    for given in call_task(ConfigError, "groups(model)", list, given_groups):
        if not isinstance(given, Mapping):
            kind = type(given).__name__
            raise ConfigError(f'{what} gave {kind} as a group; give a dict with "params"')
        if "params" not in given:
            keys = sorted(map(str, given))
            raise ConfigError(f"{what} gave a group with {keys}, but no params")
        group = {"name": f"group {len(groups)}", "lr_scale": 1.0, **given}
        group.setdefault("weight_decay", config.weight_decay)
        text = _in_words(group)
        if "lr" in group:
            raise ConfigError(f"{text} has an lr; give lr_scale, which multiplies optim.lr")
        for key in ("lr_scale", "weight_decay"):
            if not _is_factor(group[key]):
                raise ConfigError(f"{text} has {key}={group[key]!r}; give a number, 0 or more")
        names = _names(given["params"], parameters, text)
        group["params"] = list(dict.fromkeys(parameters[name] for name in names))
        for name in names:
            other = owner.setdefault(parameters[name], group["name"])
            if other != group["name"]:
                raise ConfigError(
                    f"{what} put the parameter {name} into two groups, {other} and "
                    f"{group['name']}; name it in one"
                )
        if any(group["name"] == other["name"] for other in groups):
            raise ConfigError(
                f"{what} gave two groups the name {group['name']}; name each differently"
            )
        groups.append(group)
    if missed := [name for name, p in parameters.items() if p not in owner]:
        raise ConfigError(
            f"{what} leave out {_first(missed)}; put each trained parameter into one group, or set "
            "requires_grad=False"
        )
    return groups


def _in_words(group: Mapping[str, Any]) -> str:
    name = str(group["name"])
    if not name.startswith("group "):  # its number
        name = f"group {name}"
    return f"the task's {name}"


def _is_factor(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < float("inf")


def _names(params: Any, parameters: Mapping[str, Tensor], text: str) -> list[str]:
    """The names of the trained parameters that a group's names, patterns and tensors refer to."""
    entries = [params]
    if isinstance(params, Iterable) and not isinstance(params, str | Tensor | nn.Module):
        entries = call_task(ConfigError, "groups(model)", list, params)
    names: list[str] = []
    for entry in entries:
        if isinstance(entry, Tensor):
            found = [name for name, p in parameters.items() if p is entry]
            if not found and entry.requires_grad:
                raise ConfigError(
                    f"{text} holds a tensor of shape {list(entry.shape)} that is no parameter of "
                    "the model that groups(model) got; take it from there, after sharding replaced "
                    "the parameters"
                )
        elif isinstance(entry, str):
            found = [name for name in parameters if fnmatchcase(name, entry)]
            if not found:
                raise ConfigError(
                    f"{text} names {entry!r}, which matches no trained parameter; the first are "
                    f"{', '.join(list(parameters)[:3])}"
                )
        else:
            raise ConfigError(
                f'{text} has {type(entry).__name__} in its "params"; use .parameters() or name '
                "patterns"
            )
        names += found
    return names


def check_keys(given: Sequence[Group], optimizer: Optimizer) -> None:
    """Errors: ConfigError for a key of the groups given to the optimizer that nothing reads."""
    kind = type(optimizer).__name__.removeprefix("Fused")
    known = (*GROUP_KEYS, *(key for key in optimizer.defaults if key != "lr"))
    for group in given:
        for key in group:
            if key not in known:
                hint = f"it takes {', '.join(known)}"
                if near := nearest_name(str(key), known):
                    hint = f"did you mean {near}?"
                raise ConfigError(
                    f"{_in_words(group)} has the key {key!r}, which {kind} does not read; {hint}"
                )


def task_optimizer(task: Any, groups: list[Group], lr: float, model: nn.Module) -> Optimizer:
    """What the task's optimizer(groups, lr) returned, checked. Errors: ConfigError."""
    given = [group["name"] for group in groups]
    optimizer = call_task(ConfigError, "optimizer(groups, lr)", task.optimizer, groups, lr)
    if not isinstance(optimizer, Optimizer):
        what = f"an object of {type(optimizer).__name__}"
        if isinstance(optimizer, type):
            what = f"the class {optimizer.__name__}"
        raise ConfigError(
            f"the task's optimizer(groups, lr) returned {what}, not a torch optimizer; return one "
            "made of the groups, as torch.optim.SGD(groups, lr=lr)"
        )
    kind = type(optimizer).__name__
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError as error:
        raise ConfigError(
            f"the task's optimizer {kind} needs a closure in step(), and train_step calls it "
            "without one; use another optimizer, or a loop of your own (docs/own_loop.md)"
        ) from error
    held = {p for group in optimizer.param_groups for p in group["params"]}
    missed = [name for name, p in trained_parameters(model).items() if p not in held]
    why = ""
    if missed:
        why = f"leaves out {_first(missed)}"
    elif [group.get("name") for group in optimizer.param_groups] != given:
        why = "has other groups than it was given"
    if why:
        raise ConfigError(
            f"the task's optimizer {kind} {why}; make it of the groups, as {kind}(groups, lr=lr)"
        )
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if fused and isinstance(optimizer, torch.optim.SGD) and any(map(on_cpu_in_half, held)):
        raise ConfigError(
            f"the task's optimizer {kind} has fused=True, which on a CPU silently leaves "
            "half-precision parameters as they are (pytorch#191763); use fused=False"
        )
    return optimizer


def _first(names: Sequence[str]) -> str:
    text = f"the parameter {names[0]}"
    if len(names) > 1:
        text += f" ({len(names)} in all)"
    return text


def task_factor(task: Any, step: int) -> float:
    """What the task's schedule multiplies optim.lr by after `step` applied ones; or ConfigError."""
    factor = call_task(ConfigError, f"schedule({step})", task.schedule, step)
    number = -1.0
    with suppress(TypeError, ValueError, RuntimeError):  # of a tensor of several elements
        if not isinstance(factor, str | bytes):
            number = float(factor)
    if not _is_factor(number):
        raise ConfigError(
            f"the task's schedule({step}) returned {factor!r}; return a number, 0 or more"
        )
    return number


def refuse_changed_options(optimizer: Optimizer) -> None:
    """Make saving raise ConfigError if its options have changed: no checkpoint has them."""

    def options(optimizer: Optimizer) -> dict[str, float]:
        return {
            f"{key} of {group.get('name')}": float(value)
            for group in optimizer.param_groups
            for key, value in group.items()
            if key != "lr" and isinstance(value, int | float | Tensor)
        }

    def check(saved: Optimizer) -> None:
        now = options(saved)
        for key, value in start.items():
            if now.get(key) != value:
                raise ConfigError(
                    f"the optimizer {type(saved).__name__} changed {key} from {value:g} to "
                    f"{now.get(key)} in training, and a checkpoint does not hold it; let it keep "
                    "such values in its state, or use checkpoint.every=off"
                )

    start = options(optimizer)
    optimizer.register_state_dict_pre_hook(check)


class _Permissive(TorchFunctionMode):
    """Lets an optimizer that was written for whole tensors step on DTensors.

    They refuse to change a tensor in place where the result would be laid out in another way: a
    norm that is still to be summed over the ranks, or a sharded state that moves towards a value
    that is not, as in torch.optim.Adafactor. This sums partial results at once, and does out of
    place what can't be done in place.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            out = function(*args, **kwargs)
        except RuntimeError as error:  # before anything was changed: the layouts alone decide
            name = getattr(function, "__name__", "")
            if "placement" not in str(error) or not name.endswith("_") or name.endswith("__"):
                raise
            target = args[0]
            value = getattr(Tensor, name[:-1])(*args, **kwargs)
            return target.copy_(value.redistribute(placements=target.placements))
        if isinstance(out, DTensor) and any(p.is_partial() for p in out.placements):
            whole = [Replicate() if p.is_partial() else p for p in out.placements]
            out = out.redistribute(placements=whole)
        return out


def step_on_shards(optimizer: Optimizer) -> None:
    """Change the optimizer's step for sharded parameters, if it has any."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(isinstance(p, DTensor) for p in parameters):
        return
    step = optimizer.step

    @wraps(step)
    def permissive(*args: Any, **kwargs: Any) -> Any:
        try:
            with _Permissive():
                return step(*args, **kwargs)
        except RuntimeError as error:
            if not NOT_ON_SHARDS.search(str(error)):
                raise
            raise ConfigError(
                f"the task's optimizer {type(optimizer).__name__} does not work on sharded "
                "parameters, as torch says: "
                f"{first_line(error).partition('. ')[0].rstrip('.')}; use parallel.strategy=ddp, "
                "or another optimizer"
            ) from error

    optimizer.step = permissive  # type: ignore[method-assign]
