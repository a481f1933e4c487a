"""Initial weights of a model that is sharded: rank 0 draws them, and no other rank ever holds the
whole model.

The other ranks build the model with its parameters on the meta device. While it is sharded, one
part at a time gets memory on all ranks, and rank 0's values. They are the bits that one process
gets from the same seed.
"""

import gc
import hashlib
import json
import pickle
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dist_amp.distributed.random_state import random_state, set_random_state
from dist_amp.errors import in_one_line
from dist_amp.scaling.meta import materialise, parameters_on_meta
from dist_amp.task import Task, built_model
from dist_amp.world import World, local

DIFFERENT = "it draws random numbers besides its parameters, such as a buffer or a permutation"


def build_on_ranks(task: Task, strategy: str, world: World, resumes: bool) -> nn.Module:
    """The task's model in training mode. If it is to be sharded, its parameters are on the meta
    device except rank 0's.

    strategy: parallel.strategy. resumes: a checkpoint is loaded next; if that fills all parameters,
    rank 0's are on the meta device too. A model that can't be built so is built whole on every
    rank, with a warning of what that costs.
    """
    start = random_state(world.device)
    module: nn.Module | None = None
    problem = ""
    drawn = False  # random numbers besides the parameters, which draw none on the meta device
    # DDP computes gradients once before it loads.
    if not world.is_main or (resumes and strategy in ("fsdp", "hsdp")):
        module, problem = built_on_meta(task)
        drawn = not problem and _has_drawn(start, world.device)
        if problem or module is None:
            module = None
        elif world.is_main and (drawn or any(not p.requires_grad for p in module.parameters())):
            module = None  # a checkpoint has neither frozen parameters nor what else is drawn
    if module is None:
        set_random_state(start, world.device)
        module = built_model(task)
    world.wait_long()  # rank 0 may draw for minutes
    report = json.dumps([*digests(module), drawn, problem])
    (tensors, everything, *_), *others = map(json.loads, world.gather_texts(report))
    problems = []
    for other_tensors, other_everything, other_drawn, problem in others:
        if other_tensors != tensors or (other_drawn and other_everything != everything):
            problem = problem or DIFFERENT
        problems.append(problem)
    if any(problems):
        size = sum(p.numel() * p.element_size() for p in module.parameters()) / 2**30
        world.warn(
            f"{sum(map(bool, problems)) + 1} ranks each hold the whole model, {size:.2f} GiB, in "
            "host memory until it is sharded, because build_model can't run without memory for the "
            f"parameters: {next(filter(None, problems))}"
        )
    on_meta = any(p.is_meta for p in module.parameters())
    if on_meta and not world.is_main and problems[world.rank - 1]:
        set_random_state(start, world.device)
        module = built_model(task)
    return module


def built_on_meta(task: Task) -> tuple[nn.Module | None, str]:
    """(the model with its parameters on the meta device, "" or why it can't be filled later); None
    if building it fails.
    """
    try:
        with parameters_on_meta() as originals:
            module = built_model(task)
    except Exception as error:
        return None, in_one_line(error)
    for name, parameter in module.named_parameters():
        if not parameter.is_meta or type(parameter) is not nn.Parameter:
            return module, f"the parameter {name} has its memory all the same"
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            return module, f"the buffer {name} is computed from parameters"
    gc.collect()
    if any(original() is not None for original in originals) or has_other_owners(module):
        return module, (
            "something besides the model's modules refers to its parameters, such as a list or a "
            "closure; sharded, it would not see what is trained"
        )
    return module, ""


def has_other_owners(module: nn.Module) -> bool:
    """Whether an object other than the model's modules refers to one of its parameters."""
    parameters = list(module.parameters())
    owners = {id(parameters)}
    for part in module.modules():
        for name in ("_parameters", "_flat_weights"):  # a recurrent layer's list, kept up to date
            owners.add(id(vars(part).get(name)))
    referrers = gc.get_referrers(*parameters)
    return any(id(one) not in owners and not isinstance(one, FrameType) for one in referrers)


def _has_drawn(start: dict[str, Tensor], device: torch.device) -> bool:
    """Whether random numbers have been drawn since `start`."""
    now = random_state(device)
    return any(not torch.equal(now[name].nan_to_num(), start[name].nan_to_num()) for name in start)


def digests(module: nn.Module) -> tuple[str, str]:
    """(a hash of the parameters' names, shapes and ties, and of all other tensors in the modules;
    one of everything).

    Everything: also what else the modules hold, as their pickles, such as a permutation in a list.
    """
    numbers: dict[int, int] = {}
    tensors = hashlib.sha256()
    everything = hashlib.sha256()
    for name, p in module.named_parameters(remove_duplicate=False):
        number = numbers.setdefault(id(p), len(numbers))
        tensors.update(f"{name} {number} {list(p.shape)} {p.dtype} {p.requires_grad}\n".encode())
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key in ("_parameters", "_modules"):
                continue
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
                    tensors.update(f"{name}.{key} {list(leaf.shape)} {leaf.dtype}\n".encode())
                    tensors.update(_bits(leaf))
                elif not isinstance(leaf, nn.Parameter | nn.Module):
                    everything.update(f"{name}.{key}\n".encode() + _pickled(leaf))
    return tensors.hexdigest(), everything.hexdigest()


def _bits(tensor: Tensor) -> bytes:
    if tensor.is_meta or tensor.layout != torch.strided:
        return b""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:  # a lambda, say: taken for different, which costs memory alone
        return repr(value).encode()


class Placement:
    """Puts parts of a model on the device, one after the other, with rank 0's initial weights if it
    drew them.
    """

    def __init__(self, module: nn.Module, world: World):
        self._world = world
        on_meta = any(p.is_meta for p in module.parameters())
        first, *others = [bool(row[0]) for row in world.gather_numbers([float(on_meta)])]
        self._from_first = any(others) and not first

    @torch.no_grad()
    def __call__(self, part: nn.Module) -> nn.Module:
        """The part, on the device; parts that are sharded already are left alone."""
        materialise(part, self._world.device)
        if self._from_first:
            for parameter in part.parameters():
                if local(parameter) is parameter and parameter.numel():
                    parameter.data = parameter.data.to(self._world.device)
                    # As bytes: gloo does not have every dtype.
                    dist.broadcast(parameter.data.view(-1).view(torch.uint8), src=0)
        return part
