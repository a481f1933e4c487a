"""Models without memory for their parameters until they are sharded: filled from files, a
checkpoint or rank 0 then.

Only parameters are on the meta device, and buffers are real: tables such as rotary positions are
computed when the model is built and are in no file, so nothing could fill them later.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import Any

import torch
from torch import nn

from dist_amp.errors import DataError
from dist_amp.scaling.parameters import to_float32
from dist_amp.task import Task, built_model
from dist_amp.world import World, local

SHOWN = 5  # names in an error


def build_module(task: Task) -> nn.Module:
    """The task's model, in training mode; if the task has a `load`, its parameters are on the meta
    device.
    """
    if not hasattr(task, "load"):
        return built_model(task)
    with parameters_on_meta():
        return built_model(task)


def build_whole(
    task: Task, device: torch.device, frozen_too: bool = False, resumes: bool = False
) -> nn.Module:
    """The model with its first weights, whole and on one device.

    frozen_too: as for `to_float32`; resumes: as for `load_parameters`.
    """
    module = build_module(task)
    to_float32(module, frozen_too)
    module = materialise(module, device).to(device)
    load_parameters(task, module, World(device=device), resumes)
    return module


@contextmanager
def parameters_on_meta() -> Iterator[list[weakref.ref[nn.Parameter]]]:
    """Move every parameter to the meta device as its module registers it; a tied one stays one
    parameter.

    Gives weak references to the parameters as they were before, which only the model itself should
    have held.
    """
    register = nn.Module.register_parameter
    originals: list[weakref.ref[nn.Parameter]] = []
    nn.Module.register_parameter = partialmethod(_register_on_meta, register, originals)  # type: ignore[assignment]
    try:
        yield originals
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialise(module: nn.Module, device: torch.device) -> nn.Module:
    """Give the module's meta parameters memory on the device, with any content; returns it."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, old in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if old.is_meta:
                if id(old) not in made:
                    made[id(old)] = like(old, torch.empty_like(old, device=device))
                setattr(part, name, made[id(old)])
    return module


def like(parameter: nn.Parameter, content: torch.Tensor) -> nn.Parameter:
    """A parameter of this content, with what build_model noted on the other one, such as
    `parameter.no_decay`.
    """
    made = nn.Parameter(content, parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


@torch.no_grad()
def load_parameters(task: Any, module: nn.Module, world: World, resumes: bool = False) -> None:
    """Call task.load(model), if there is one; every rank calls it, with the module sharded or
    whole.

    resumes: a checkpoint is loaded next. It holds the parameters that are trained, so load is
    needed only for a frozen one. Errors: DataError, the same on all ranks, if load leaves a
    parameter unset, or nan.
    """
    if not hasattr(task, "load") or (resumes and all(p.requires_grad for p in module.parameters())):
        return
    for parameter in module.parameters():
        if parameter.is_floating_point():
            local(parameter).fill_(float("nan"))
    task.load(module)
    parts = {name: local(p) for name, p in module.named_parameters() if p.is_floating_point()}
    names = list(parts)
    flags = torch.stack([part.isnan().any() for part in parts.values()]).tolist()
    unset_here = [name for name, flag in zip(names, flags, strict=True) if flag]
    texts = world.gather_texts("\n".join(unset_here))
    unset = sorted({name for text in texts for name in text.split()}, key=names.index)
    if unset:
        raise DataError(
            f"the task's load(model) leaves {len(unset)} of {len(names)} parameters unset or nan: "
            f"{some(unset)}; fill each from the files, or initialise it in load"
        )


def some(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    text = ", ".join(names[:SHOWN])
    if len(names) > SHOWN:
        text += f" and {len(names) - SHOWN} more"
    return text


def _register_on_meta(
    module: nn.Module,
    register: Any,
    originals: list[Any],
    name: str,
    parameter: nn.Parameter | None,
) -> None:
    if parameter is not None and not parameter.is_meta:
        real: Any = parameter
        if not hasattr(real, "on_meta"):  # the same parameter may be registered a second time
            on_meta = like(parameter, parameter.detach().to("meta"))
            real.on_meta = on_meta
            originals.append(weakref.ref(real))
        parameter = real.on_meta
    register(module, name, parameter)
