"""torch's private kernels for many tensors at once, each with a public fallback that gives the same numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor

_foreach_norm = getattr(torch, "_foreach_norm", None)
_amp_update_scale = getattr(torch, "_amp_update_scale_", None)
_foreach_sub = getattr(torch, "_foreach_sub", None)
_foreach_zero = getattr(torch, "_foreach_zero_", None)


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """Each tensor's L2 norm: [len(tensors)] float32, in one call for all of them.

    torch.nn.utils.get_total_norm first sorts by device and dtype. Measured with the final norm, for 4 and 52 tensors of
    64 x 64 on one CPU core: 20 and 140 us, against 32 and 218.
    """
    if _foreach_norm is None:
        return torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors])
    return torch.stack(_foreach_norm(tensors, 2, dtype=torch.float32))


def update_scale(
    scale: Tensor, tracker: Tensor, found_inf: Tensor, growth: float, backoff: float, interval: int
) -> None:
    """GradScaler's rule, in place and without a host read: back off if found_inf, grow after `interval` finite steps.

    scale, found_inf: scalar float32; tracker: scalar int32, the finite steps since the scale last changed.
    """
    if _amp_update_scale is not None:
        _amp_update_scale(scale, tracker, found_inf, growth, backoff, interval)
        return
    tracker.add_(1)
    grows = (tracker == interval) & (found_inf == 0)
    grown = torch.where(grows, scale * growth, scale)
    grown = torch.where(grown.isfinite(), grown, scale)
    scale.copy_(torch.where(found_inf > 0, scale * backoff, grown))
    tracker.mul_(~(grows | (found_inf > 0)))


def zero_all(tensors: Sequence[Tensor]) -> None:
    """Fill each tensor with zeros."""
    if _foreach_zero is None:
        for tensor in tensors:
            tensor.zero_()
    elif tensors:
        _foreach_zero(tensors)


def lerp_all(starts: Sequence[Tensor], ends: Sequence[Tensor], weight: Tensor) -> None:
    """start += weight x (end - start) for each pair, in place; a weight of 0 changes nothing. weight: scalar float32.

    Allocates as much as `starts` take.
    """
    if _foreach_sub is None:
        for start, end in zip(starts, ends, strict=True):
            start.add_((end - start) * weight)
        return
    moves = _foreach_sub(list(ends), list(starts))
    torch._foreach_mul_(moves, weight)
    torch._foreach_add_(list(starts), moves)
