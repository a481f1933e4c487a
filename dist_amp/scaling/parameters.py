"""A model's parameters: their number, which are shared, and the dtype in which they are stored."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn


@torch.no_grad()
def to_float32(module: nn.Module, frozen_too: bool) -> str:
    """Make the trained floating-point parameters float32, in place; return a line about it, or "".

    They stay the same objects, so tied ones stay tied. The buffers beside them, such as batch
    norm's statistics, follow. frozen_too: also the parameters that are not trained, where
    everything is computed in float32.
    """
    converted: Counter[str] = Counter()
    for part in module.modules():
        parameters = [
            p
            for p in part.parameters(recurse=False)
            if needs_conversion(p) and (p.requires_grad or frozen_too)
        ]
        for p in parameters:
            converted[str(p.dtype).removeprefix("torch.")] += p.numel()
            p.data = p.data.float()
        if parameters or frozen_too:
            for buffer in part.buffers(recurse=False):
                if needs_conversion(buffer):
                    buffer.data = buffer.data.float()
    if not converted:
        return ""
    counts = ", ".join(f"{count:,} parameters in {dtype}" for dtype, count in converted.items())
    return f"build_model gave {counts}: they are stored in float32, and computed in precision.dtype"


def needs_conversion(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float32


def shared_parameters(module: nn.Module, parts: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """{part of the module: a parameter in it that is used outside of it too}, for those parts that
    have one.
    """
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    places = Counter(id(part) for _, part in module.named_modules(remove_duplicate=False))
    names = {id(p): name for name, p in module.named_parameters()}
    shared = {}
    for part in parts:
        inside = Counter(id(p) for _, p in part.named_parameters(remove_duplicate=False))
        if outside := [
            names[p] for p, count in inside.items() if uses[p] > count * places[id(part)]
        ]:
            shared[part] = outside[0]
    return shared


def parameters_in(modules: Iterable[nn.Module]) -> int:
    """The number of parameters in these modules, each counted once."""
    return sum({id(p): p.numel() for part in modules for p in part.parameters()}.values())
