"""Half-precision or float64 parameters become float32: bf16 and fp16 would lose small updates."""

from collections import Counter

import torch
from torch import Tensor, nn


@torch.no_grad()
def to_float32(module: nn.Module, frozen_too: bool) -> str:
    """Make the trained floating-point parameters float32, in place; return a line about it, or "".

    They stay the same objects, so tied ones stay tied. Buffers beside them, such as batch norm's
    statistics, follow. frozen_too: also parameters that are not trained, where all is in float32.
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


def needs_conversion(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float32
