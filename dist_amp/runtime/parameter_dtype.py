"""The dtype in which parameters are stored: pretrained models often come in bf16, in which small updates are lost."""

from collections import Counter

import torch
from torch import nn


@torch.no_grad()
def to_float32(module: nn.Module, frozen_too: bool) -> str:
    """Make the trained floating-point parameters float32, in place; return a line that says so, or "".

    They stay the same objects, so tied ones stay tied. The buffers beside them, as batch norm's statistics, follow.
    frozen_too: also the parameters that are not trained, where everything is computed in float32.
    """
    converted: Counter[str] = Counter()
    for part in module.modules():
        own = [p for p in part.parameters(recurse=False) if p.is_floating_point() and p.dtype != torch.float32]
        own = [p for p in own if p.requires_grad or frozen_too]
        for p in own:
            converted[str(p.dtype).removeprefix("torch.")] += p.numel()
            p.data = p.data.float()
        for buffer in part.buffers(recurse=False) if own or frozen_too else ():
            if buffer.is_floating_point() and buffer.dtype != torch.float32:
                buffer.data = buffer.data.float()
    if not converted:
        return ""
    found = ", ".join(f"{count:,} parameters in {dtype}" for dtype, count in converted.items())
    return f"build_model gave {found}: they are stored in float32, and computed in precision.dtype"
