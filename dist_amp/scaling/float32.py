"""Converts trained parameters to float32: stored in bf16 or fp16, they would lose small updates."""

from collections import Counter

import torch
from torch import Tensor, nn


@torch.no_grad()
def to_float32(module: nn.Module, frozen_too: bool) -> str:
    """Convert trained floating-point parameters to float32, in place; return a line to log, or "".

    Parameters stay the same objects, so tied ones stay tied. Buffers of the same modules, such as
    batch norm's statistics, are converted too. frozen_too: also convert frozen parameters.
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
    return f"build_model returned {counts}: stored in float32, cast to precision.dtype to compute"


def needs_conversion(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float32
