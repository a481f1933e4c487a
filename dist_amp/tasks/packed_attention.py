"""Attention in rows of packed documents: torch's kernel for sequences of any length, or a mask."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import flash_sdp_enabled, is_flash_attention_available

PackedAttention = Literal["auto", "varlen", "mask"]
DTYPES = (torch.float16, torch.bfloat16)  # of the kernel


class Documents(NamedTuple):
    """The documents of rows [B, T]."""

    positions: Tensor  # [B, T] int64: 0 where one begins
    bounds: Tensor  # see document_bounds
    mask: Tensor | None  # see document_mask; None where the kernel is tried
    required: bool  # whatever it does not take is its own error

    @classmethod
    def of(cls, positions: Tensor, bounds: Tensor, how: PackedAttention) -> "Documents":
        if how == "varlen" or (how == "auto" and kernel_runs_on(positions.device)):
            return cls(positions, bounds, None, how == "varlen")
        return cls(positions, bounds, document_mask(positions), False)


def kernel_runs_on(device: torch.device) -> bool:
    if device.type != "cuda" or torch.__version__ < "2.13":
        return False
    allowed = is_flash_attention_available() and flash_sdp_enabled()
    return allowed and torch.cuda.get_device_capability(device) >= (8, 0)


def document_mask(positions: Tensor) -> Tensor:
    """[B, 1, T, T] bool: of a token its document up to itself."""
    document = (positions == 0).cumsum(1)
    same = document[:, :, None] == document[:, None, :]
    return same.tril().unsqueeze(1)


def document_bounds(positions: Tensor) -> Tensor:
    """The starts of documents in the flattened rows, then the end: int32. For use in collate."""
    starts = (positions.flatten() == 0).nonzero().flatten()
    # Of few shapes, by empty documents; of each, the backward takes memory for 128 tokens.
    count = 1 << (len(starts) - 1).bit_length()
    bounds = starts.new_full((count + 1,), positions.numel(), dtype=torch.int32)
    bounds[: len(starts)] = starts
    return bounds


def attend(
    parts: tuple[Tensor, Tensor, Tensor],
    documents: Documents | None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns (attention of query, key and value [B, heads, T, width], None) by the kernel, or
    (None, the mask for another one).
    """
    if documents is None:
        return None, None
    if documents.mask is not None:
        return None, documents.mask
    query, _, value = parts
    device = query.device.type
    dtype = value.dtype
    if torch.is_autocast_enabled(device):  # which does not know this kernel
        dtype = torch.get_autocast_dtype(device)
    width = query.shape[3]
    fits = dtype in DTYPES and width % 8 == 0 and width <= 256
    if dropout or not (fits or documents.required):  # the kernel knows no dropout
        return None, document_mask(documents.positions)
    from torch.nn.attention.varlen import varlen_attn  # it imports torch's compiler

    query, key, value = (part.to(dtype).transpose(1, 2).flatten(0, 1) for part in parts)
    ends = (documents.bounds, documents.bounds)
    rows, length = documents.positions.shape
    # A window up to the token itself is what the kernel knows as causal.
    options: Any = {"scale": scale, "window_size": (-1, 0), "enable_gqa": True}
    out: Any = varlen_attn(query, key, value, *ends, length, length, **options)
    return out.unflatten(0, (rows, length)).transpose(1, 2), None
