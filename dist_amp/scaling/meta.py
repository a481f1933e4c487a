"""Build models with parameters on the meta device, which take no memory until they are sharded.

The shards are then filled from pretrained files, from a checkpoint or from rank 0. Only rank 0
draws initial weights, so that they have the same bits as in one process. Buffers are allocated from
the start, because files may lack them.
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

SHOWN = 5  # names that an error message lists


def build_module(task: Task) -> nn.Module:
    """The task's model; if the task has `load`, with its parameters on the meta device."""
    if not hasattr(task, "load"):
        return built_model(task)
    with parameters_on_meta():
        return built_model(task)


def build_whole(
    task: Task, device: torch.device, frozen_too: bool = False, resumes: bool = False
) -> nn.Module:
    """The unsharded model with its initial weights, on one device, in training mode."""
    module = build_module(task)
    module.train()
    to_float32(module, frozen_too)
    module = materialise(module, device).to(device)
    load_parameters(task, module, World(device=device), resumes)
    return module


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Context in which modules register parameters on the meta device; tied ones stay tied.

    Modules register a parameter before they initialise it, so they draw no random numbers for it.
    """
    register: Any = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: Any) -> None:
        if param is not None and not param.is_meta:
            if not hasattr(param, "on_meta"):  # if it has, it is tied and was registered before
                param.on_meta = like(param, param.detach().to("meta"))
            param = param.on_meta
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialise(module: nn.Module, device: torch.device, only_meta: bool = True) -> nn.Module:
    """Allocate the module's meta parameters on the device, uninitialised; return the module."""
    allocated: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, old in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if old.is_meta or not only_meta:
                if id(old) not in allocated:
                    allocated[id(old)] = like(old, torch.empty_like(old, device=device))
                setattr(part, name, allocated[id(old)])
    return module


def like(parameter: nn.Parameter, content: Tensor) -> nn.Parameter:
    """A parameter with this content and the attributes of `parameter`, such as `no_decay`."""
    new = nn.Parameter(content, parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    return new


@torch.no_grad()
def load_parameters(task: Any, module: nn.Module, world: World, resumes: bool = False) -> None:
    """Call task.load(model), if it exists, and check that it sets every parameter. A collective.

    resumes: a checkpoint is loaded next, so only a model with frozen parameters needs `load`.
    """
    if not hasattr(task, "load"):
        return
    if resumes and all(p.requires_grad for p in module.parameters()):
        return
    for parameter in module.parameters():
        if parameter.is_floating_point():
            local(parameter).fill_(float("nan"))  # marks parameters that `load` leaves unset
    task.load(module)
    parts = {name: local(p) for name, p in module.named_parameters() if p.is_floating_point()}
    has_nan = torch.stack([part.isnan().any() for part in parts.values()]).tolist()
    on_any_rank = map(any, zip(*world.gather(has_nan), strict=True))
    unset = [name for name, is_unset in zip(parts, on_any_rank, strict=True) if is_unset]
    if unset:
        raise DataError(
            f"the task's load(model) leaves {len(unset)} of {len(parts)} parameters unset or nan: "
            f"{some_of(unset, SHOWN)}; fill each from the files, or initialise it in load"
        )


def build_on_ranks(task: Task, world: World, resumes: bool) -> nn.Module:
    """The task's model, with its parameters on the meta device on all ranks except rank 0.

    resumes: a checkpoint is loaded next; if it fills all parameters, rank 0's are on meta too. If
    the model can't be built on meta, all ranks build it in memory and warn about its size.
    """
    initial_state = random_state(world.device)
    module: nn.Module | None = None
    problem = ""
    if not world.is_main or resumes:
        module, problem = built_on_meta(task)
    problem = next(filter(None, world.gather(problem)), "")
    # Frozen parameters are usually not in a checkpoint, so rank 0 must initialise them.
    has_frozen = module is not None and any(not p.requires_grad for p in module.parameters())
    if module is None or problem or (world.is_main and has_frozen):
        set_random_state(initial_state, world.device)
        module = built_model(task)
    world.wait_long()  # rank 0 may take minutes to draw the weights
    if problem:
        size = sum(p.numel() * p.element_size() for p in module.parameters()) / 2**30
        world.warn(
            f"each of the {world.world_size} ranks holds the whole model, {size:.2f} GiB, in host "
            "memory until it is sharded, because build_model can't run with parameters on the meta "
            f"device: {problem}"
        )
    return module


@cache
def register_fused_updates() -> None:
    """Register fake versions of the fused optimizers' updates, which return nothing.

    DTensor runs each operation on fake tensors, to learn the shape of its result. Without a fake
    version, it runs the first update, whose learning rate is a tensor, on zeros of the whole
    model's size: 16 bytes per parameter on every rank. Measured with torch 2.13 and 2.14.
    """
    for name in ("adam_.tensor_lr", "adamw_.tensor_lr", "sgd_", "sgd_.tensor_lr"):
        with suppress(RuntimeError):  # this torch lacks the operation, or has registered it itself
            torch.library.register_fake(f"aten::_fused_{name}", lambda *args, **kwargs: None)


class _DrawDetector(TorchDispatchMode):
    """Detects random draws outside of the meta device. They would differ from rank 0's, because
    draws on meta do not advance the generator.
    """

    has_real_draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and not tree_leaves(result)[0].is_meta:
            self.has_real_draws = True
        return result


def built_on_meta(task: Task) -> tuple[nn.Module | None, str]:
    """Returns (the model with parameters on meta or None, why this can't be used or "")."""
    draws = _DrawDetector()
    try:
        with parameters_on_meta(), draws:
            module = built_model(task)
    except Exception as error:
        return None, in_one_line(error)
    for name, parameter in module.named_parameters():
        if not parameter.is_meta or type(parameter) is not nn.Parameter:
            return module, f"the parameter {name} is not a plain nn.Parameter on meta"
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            return module, f"the buffer {name} is computed from parameters"
    for name, leaves in attributes_of(task, module).items():
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            return module, f"the task holds parameters outside the model, in its attribute {name}"
    if draws.has_real_draws:
        return module, (
            "it draws random numbers besides its parameters, which would differ from rank 0's"
        )
    return module, ""


def placement(module: nn.Module, world: World) -> Callable[[nn.Module], None]:
    """Returns place(part), which allocates part of the model on the device and, if only rank 0 has
    weights, broadcasts them. Every rank must call `placement` and `place`.
    """
    on_meta_by_rank = world.gather(any(p.is_meta for p in module.parameters()))
    from_rank_0 = any(on_meta_by_rank) and not on_meta_by_rank[0]

    @torch.no_grad()
    def place(part: nn.Module) -> None:
        materialise(part, world.device)
        for parameter in part.parameters():
            if from_rank_0 and local(parameter) is parameter and parameter.numel():
                parameter.data = parameter.data.to(world.device)
                # Not sharded yet. Sent as bytes, because gloo does not support every dtype.
                dist.broadcast(parameter.data.view(-1).view(torch.uint8), src=0)

    return place
