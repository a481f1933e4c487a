"""Calls and checks a task's own parameter groups, optimizer, schedule and callbacks."""

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from dist_amp.config.validate import check_scalar
from dist_amp.errors import ConfigError, DataError
from dist_amp.optimizers.sgd import on_cpu_in_half
from dist_amp.settings import OptimConfig
from dist_amp.task import call_task

Group = dict[str, Any]

# Keys of a group that this project reads; all others must be options of the optimizer.
GROUP_KEYS = ("params", "name", "lr_scale", "weight_decay", "use_muon")


def task_groups(task: Any, model: nn.Module, config: OptimConfig) -> list[Group]:
    """The task's groups(model), with names and patterns replaced by parameters, defaults set."""
    source = "the task's groups(model)"
    named = model.named_parameters(remove_duplicate=False)  # a tied parameter has several names
    parameters = {name: p for name, p in named if p.requires_grad}
    groups: list[Group] = []
    owner: dict[Tensor, str] = {}
    for entry in call_task(ConfigError, "groups(model)", lambda: list(task.groups(model))):
        if not isinstance(entry, Mapping) or "params" not in entry:
            text = repr(str(entry))[:80]
            raise ConfigError(f'{source} returned {text} as a group; make it a dict with "params"')
        group = {"name": f"group {len(groups)}", "lr_scale": 1.0, **entry}
        group.setdefault("weight_decay", config.weight_decay)
        name = group["name"]
        for key in ("lr_scale", "weight_decay"):
            if not 0 <= group[key] < math.inf:
                raise ConfigError(
                    f"{source}: {name} has {key}={group[key]}; give a number, 0 or more"
                )
        paths = _matching_names(entry["params"], parameters, f"{source}: {name}")
        group["params"] = list(dict.fromkeys(parameters[path] for path in paths))
        for path in paths:
            first = owner.setdefault(parameters[path], name)
            if first != name:
                raise ConfigError(
                    f"{source} put the parameter {path} into {first} and {name}; keep it in one"
                )
        groups.append(group)
    if missed := [path for path, p in parameters.items() if p not in owner]:
        raise ConfigError(
            f"{source} left out {len(missed)} parameters, such as {missed[0]}; put each trained "
            "parameter into one group, or set requires_grad=False"
        )
    return groups


def _matching_names(params: Any, parameters: Mapping[str, Tensor], source: str) -> list[str]:
    """Names of the trained parameters that a group's names, patterns and tensors refer to."""
    entries = [params] if isinstance(params, str | Tensor | nn.Module) else list(params)
    names: list[str] = []
    for entry in entries:
        if isinstance(entry, str):
            matches = [name for name in parameters if fnmatchcase(name, entry)]
            what = repr(entry)
        else:
            matches = [name for name, p in parameters.items() if p is entry]
            what = f"a {type(entry).__name__}"
        if not matches and getattr(entry, "requires_grad", True):  # frozen parameters are ignored
            raise ConfigError(
                f"{source} has {what}, which matches no trained parameter of the model; use names "
                f"such as {', '.join(list(parameters)[:3])}, or parameters of the model that is "
                "passed to groups(model), since sharding has replaced the original ones"
            )
        names += matches
    return names


def check_keys(groups: Sequence[Group], optimizer: Optimizer) -> None:
    """Raises ConfigError for a key that neither this project nor the optimizer reads."""
    known = (*GROUP_KEYS, *(key for key in optimizer.defaults if key != "lr"))
    for group in groups:
        for key in group:
            if key not in known:
                kind = type(optimizer).__name__.removeprefix("Fused")
                raise ConfigError(
                    f"the task's groups(model): {group['name']} has the key {key!r}, which {kind} "
                    f"does not read; it takes {', '.join(known)}"
                )


def described(optimizer: Optimizer) -> str:
    groups = []
    for group in optimizer.param_groups:
        hidden = ("params", "name", "lr")
        options = [f"{key} {value}" for key, value in group.items() if key not in hidden]
        options = [option for option in options if not option.endswith(("None", "False"))]
        groups.append(f"{group['name']} ({len(group['params'])} tensors): {', '.join(options)}")
    return f"{type(optimizer).__name__}, {'; '.join(groups)}"


def task_optimizer(task: Any, groups: Sequence[Group], lr: float) -> Optimizer:
    """The optimizer that the task's optimizer(groups, lr) returns, adapted to step on shards."""
    copies = [dict(group) for group in groups]  # because an optimizer adds its defaults to a group
    make = task.optimizer
    optimizer: Optimizer = call_task(ConfigError, "optimizer(groups, lr)", make, copies, lr)
    kind = type(optimizer).__name__
    expected = [set(map(id, group["params"])) for group in groups]
    if [set(map(id, group["params"])) for group in optimizer.param_groups] != expected:
        raise ConfigError(
            f"the task's optimizer {kind} has other groups or parameters than it was given; build "
            f"it from the groups, as {kind}(groups, lr=lr)"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if fused and isinstance(optimizer, torch.optim.SGD) and any(map(on_cpu_in_half, parameters)):
        raise ConfigError(
            f"the task's optimizer {kind} has fused=True, which on a CPU silently leaves "
            "half-precision parameters unchanged (pytorch#191763); use fused=False"
        )
    if not _handles_amp_scaling(optimizer):
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        if any(isinstance(p, DTensor) for p in parameters):
            _step_on_shards(optimizer)
    if any(base.__module__.startswith("torchao.") for base in type(optimizer).__mro__):
        # With a warm AOTAutograd cache, 8-bit steps are wrong: twenty steps of torchao 0.18's
        # AdamW8bit on torch 2.13 end at a loss of 3.127 without the cache, and at 5.355 in a
        # second run with it. TORCHINDUCTOR_AUTOGRAD_CACHE=1 keeps the cache on.
        import torch._functorch.config as functorch

        functorch.enable_autograd_cache = False  # type: ignore[assignment]
    return optimizer


def _handles_amp_scaling(optimizer: Optimizer) -> bool:
    """Whether the optimizer's own step obeys grad_scale and found_inf.

    False for a subclass that overrides a fused optimizer's step, because the override may ignore
    both; and for torch's fused SGD, which leaves momentum uninitialised if it skips the first step.
    """
    kind = type(optimizer)
    if kind is torch.optim.SGD or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if "_step_supports_amp_scaling" in vars(kind):
        return True
    return kind.step.__module__.startswith("torch.optim.")


class _Permissive(TorchFunctionMode):
    """Lets an optimizer that was written for ordinary tensors, such as Adafactor, step on DTensors.

    Partial results are reduced at once. If DTensor rejects an in-place operation, because its
    result has another placement, the result is computed out of place, redistributed and copied.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            out = function(*args, **kwargs)
        except RuntimeError as error:  # about placements: raised before anything is written
            name = getattr(function, "__name__", "")
            if "placement" not in str(error) or not name.endswith("_") or name.endswith("__"):
                raise
            target = args[0]
            value = getattr(Tensor, name[:-1])(*args, **kwargs)
            return target.copy_(value.redistribute(placements=target.placements))
        if isinstance(out, DTensor) and any(p.is_partial() for p in out.placements):
            reduced = [Replicate() if p.is_partial() else p for p in out.placements]
            out = out.redistribute(placements=reduced)
        return out


def _step_on_shards(optimizer: Optimizer) -> None:
    """Replace the optimizer's step by a step that works on DTensors."""
    step = optimizer.step

    @wraps(step)  # keeps the attributes that torch's wrapper of `step` has set
    def permissive(*args: Any, **kwargs: Any) -> Any:
        with _Permissive():
            return step(*args, **kwargs)

    optimizer.step = permissive  # type: ignore[method-assign]


def task_factor(task: Any, step: int) -> float:
    """What the task's schedule multiplies optim.lr by, after `step` applied steps."""
    name = f"schedule({step})"
    factor: float = call_task(ConfigError, name, lambda: float(task.schedule(step)))
    if not 0 <= factor < math.inf:
        raise ConfigError(f"the task's {name} returned {factor}; return a number, 0 or more")
    return factor


def check_formula(schedule: Any, step: int) -> None:
    """Raises ConfigError if the task's schedule has changed since the run was built."""
    step = min(step, len(schedule.table) - 1)
    rate = schedule.table[step]
    if (now := schedule.formula(step)) != rate:
        raise ConfigError(
            f"the task's schedule({step}) makes the learning rate {now:g} now, and {rate:g} when "
            "the run was built, the only time it is read; let it depend on its argument alone, and "
            "set run.schedule.factor in on_evaluation"
        )


def check_rates(schedule: Any, optimizer: Optimizer) -> None:
    """Raises ConfigError if other code has set a group's learning rate. Waits for the device."""
    found = [float(group["lr"]) for group in optimizer.param_groups]
    schedule.factor = schedule.factor  # the setter sets the groups' rates to the schedule's
    expected = [float(group["lr"]) for group in optimizer.param_groups]
    if found != expected:
        raise ConfigError(
            f"the optimizer's learning rate was set to {found[0]:g}, but each step sets it to the "
            f"schedule's, {expected[0]:g}; change run.schedule.factor instead"
        )


def call_on_evaluation(run: Any, values: dict[str, float]) -> str:
    """Call the task's on_evaluation, if it exists, and update `values` with what it sets there.

    Returns the reason to stop, or "". Raises DataError for values that can't be logged or differ
    between ranks, ConfigError for a learning rate not set through run.schedule.factor.
    """
    if not hasattr(run.task, "on_evaluation"):
        return ""
    name = "on_evaluation(run, values)"
    extended: dict[str, Any] = dict(values)
    stop_reason = call_back(run, name, extended)
    check_formula(run.schedule, run.step)
    check_rates(run.schedule, run.optimizer)
    for key, value in extended.items():
        check_scalar(value, f"{name} set values[{key!r}] to")
        if hasattr(value, "full_tensor"):  # a DTensor, computed from sharded parameters
            value = value.full_tensor()
        values[str(key)] = float(value)
    outcome = f"{sorted(values.items())}, schedule.factor {run.schedule.factor}"
    for rank, other in enumerate(outcomes := run.world.gather(outcome)):
        if other != outcomes[0]:
            raise DataError(
                f"the task's {name} must do the same on all ranks; rank 0 has {outcomes[0]}, and "
                f"rank {rank} has {other}"
            )
    return stop_reason


def call_back(run: Any, name: str, argument: Any) -> str:
    """Call the task's on_step or on_evaluation. Returns the reason to stop, or ""."""
    when = f" after step {run.step}"
    method = getattr(run.task, name.partition("(")[0])
    answer = call_task(DataError, name, method, run, argument, when=when)
    if answer is None:
        return ""
    if answer != "stop":
        raise DataError(f'the task\'s {name} returned {answer!r:.60}{when}; return None or "stop"')
    return f'{name} returned "stop" on rank {run.world.rank}{when}'


class GroupRates:
    """Observer that logs each parameter group's learning rate, if any group has an lr_scale."""

    def __init__(self, run: Any):
        groups = run.optimizer.param_groups
        self._scales = {
            f"train/lr_{group.get('name', number)}": group.get("lr_scale", 1.0)
            for number, group in enumerate(groups)
            if run.world.is_main and any("lr_scale" in each for each in groups)
        }

    def tags(self, row: Any) -> dict[str, float]:
        return {tag: row["lr"] * scale for tag, scale in self._scales.items()}
