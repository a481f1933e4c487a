"""Models without memory for their parameters until they are sharded.

They are filled from files, a checkpoint, or rank 0, which alone draws a sharded model's initial
weights: the bits that one process gets. Buffers are real from the start: no file has them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dist_amp.distributed.process import random_state, set_random_state
from dist_amp.errors import DataError, in_one_line, some_of
from dist_amp.scaling.float32 import to_float32
from dist_amp.task import Task, attributes_of, built_model
from dist_amp.world import World, local

SHOWN = 5  # names in an error


def build_module(task: Task) -> nn.Module:
    """The task's model in its own modes; with a task's `load`, its parameters are on meta."""
    if not hasattr(task, "load"):
        return built_model(task)
    with parameters_on_meta():
        return built_model(task)


def build_whole(
    task: Task, device: torch.device, frozen_too: bool = False, resumes: bool = False
) -> nn.Module:
    """The model with its first weights, whole, on one device, after train(); see `to_float32`."""
    module = build_module(task)
    module.train()
    to_float32(module, frozen_too)
    module = materialise(module, device).to(device)
    load_parameters(task, module, World(device=device), resumes)
    return module


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Move every parameter to the meta device as its module registers it; a tied one stays one."""
    register: Any = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: Any) -> None:
        if param is not None and not param.is_meta:
            if not hasattr(param, "on_meta"):  # it may be registered a second time
                param.on_meta = like(param, param.detach().to("meta"))
            param = param.on_meta
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
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


def like(parameter: nn.Parameter, content: Tensor) -> nn.Parameter:
    """A parameter of this content, with attributes of the other one, such as `no_decay`."""
    made = nn.Parameter(content, parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


@torch.no_grad()
def load_parameters(task: Any, module: nn.Module, world: World, resumes: bool = False) -> None:
    """Call task.load(model) on every rank; if it `resumes`, for frozen parameters alone."""
    if not hasattr(task, "load"):
        return
    if resumes and all(p.requires_grad for p in module.parameters()):
        return
    for parameter in module.parameters():
        if parameter.is_floating_point():
            local(parameter).fill_(float("nan"))
    task.load(module)
    parts = {name: local(p) for name, p in module.named_parameters() if p.is_floating_point()}
    flags = torch.stack([part.isnan().any() for part in parts.values()]).tolist()
    on_any_rank = map(any, zip(*world.gather(flags), strict=True))
    unset = [name for name, flag in zip(parts, on_any_rank, strict=True) if flag]
    if unset:
        raise DataError(
            f"the task's load(model) leaves {len(unset)} of {len(parts)} parameters unset or nan: "
            f"{some_of(unset, SHOWN)}; fill each from the files, or initialise it in load"
        )


def build_on_ranks(task: Task, world: World, resumes: bool) -> nn.Module:
    """The task's model, on every rank but the first with its parameters on the meta device.

    resumes: a checkpoint is loaded next; if that fills all parameters, rank 0's are on meta too. A
    model that can't be built so is built whole on every rank, with a warning of what that costs.
    """
    start = random_state(world.device)
    module: nn.Module | None = None
    problem = ""
    if not world.is_main or resumes:
        module, problem = built_on_meta(task)
    problem = next(filter(None, world.gather(problem)), "")
    # No checkpoint fills frozen parameters.
    has_frozen = module is not None and any(not p.requires_grad for p in module.parameters())
    if module is None or problem or (world.is_main and has_frozen):
        set_random_state(start, world.device)
        module = built_model(task)
    world.wait_long()  # rank 0 may draw for minutes
    if problem:
        size = sum(p.numel() * p.element_size() for p in module.parameters()) / 2**30
        world.warn(
            f"each of the {world.world_size} ranks holds the whole model, {size:.2f} GiB, in host "
            "memory until it is sharded, because build_model can't run without memory for the "
            f"parameters: {problem}"
        )
    return module


@cache
def register_fused_updates() -> None:
    """Tell torch that fused updates return nothing, for tensors without memory.

    DTensor runs each operation on such tensors to learn the shape of its result. Without this it
    runs the first update, whose learning rate is a tensor, on zeros of the whole model's size: 16
    bytes per parameter on every rank. Measured with torch 2.13 and 2.14.
    """
    for name in ("adam_.tensor_lr", "adamw_.tensor_lr", "sgd_", "sgd_.tensor_lr"):
        with suppress(RuntimeError):  # a release that has no such operation, or a rule for it
            torch.library.register_fake(f"aten::_fused_{name}", lambda *args, **kwargs: None)


class _Draws(TorchDispatchMode):
    """Notes whether random numbers are drawn with memory: a draw on meta leaves its generator
    behind rank 0's, so that later ones would differ.
    """

    with_memory = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and not tree_leaves(result)[0].is_meta:
            self.with_memory = True
        return result


def built_on_meta(task: Task) -> tuple[nn.Module | None, str]:
    """Returns (the model with parameters on meta, or None; "" or why it can't be built there)."""
    draws = _Draws()
    try:
        with parameters_on_meta(), draws:
            module = built_model(task)
    except Exception as error:
        return None, in_one_line(error)
    for name, parameter in module.named_parameters():
        if not parameter.is_meta or type(parameter) is not nn.Parameter:
            return module, f"the parameter {name} has its memory all the same"
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            return module, f"the buffer {name} is computed from parameters"
    for name, leaves in attributes_of(task, module).items():
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            return module, f"the task keeps parameters beside the model, in its attribute {name}"
    if draws.with_memory:
        return module, (
            "it draws random numbers besides its parameters, which would differ from rank 0's"
        )
    return module, ""


def placement(module: nn.Module, world: World) -> Callable[[nn.Module], None]:
    """A function that puts a part on the device, with rank 0's weights; every rank calls both."""
    on_meta = any(p.is_meta for p in module.parameters())
    on_meta_by_rank = world.gather(on_meta)
    from_rank_0 = any(on_meta_by_rank) and not on_meta_by_rank[0]

    @torch.no_grad()
    def place(part: nn.Module) -> None:
        materialise(part, world.device)
        for parameter in part.parameters():
            if from_rank_0 and local(parameter) is parameter and parameter.numel():
                parameter.data = parameter.data.to(world.device)
                # As bytes: gloo does not have every dtype.
                dist.broadcast(parameter.data.view(-1).view(torch.uint8), src=0)

    return place
