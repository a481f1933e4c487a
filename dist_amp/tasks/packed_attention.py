"""Attention in rows of packed documents: torch's kernel for sequences of any length, or a mask."""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import flash_sdp_enabled, is_flash_attention_available

from dist_amp.errors import ConfigError

PackedAttention = Literal["auto", "varlen", "mask"]
DTYPES = (torch.float16, torch.bfloat16)  # of the kernel


class Documents(NamedTuple):
    """The documents of rows [B, T]: positions int64, 0 where one begins, and `document_bounds`.

    mask: [B, 1, T, T] bool, of a token its document up to itself; None where the kernel is tried.
    required: it must take them.
    """

    positions: Tensor
    bounds: Tensor
    mask: Tensor | None
    required: bool

    @classmethod
    def of(cls, positions: Tensor, bounds: Tensor, how: PackedAttention) -> "Documents":
        """Errors: ConfigError if the kernel is required, and does not run here."""
        runs = kernel_runs_on(positions.device)
        if how == "varlen" and not runs:
            raise ConfigError(
                "task.args.packed_attention=varlen needs torch 2.13 and a GPU with flash attention "
                f"(compute capability 8.0); this is torch {torch.__version__} on "
                f"{positions.device.type}; use auto"
            )
        mask = None
        if how == "mask" or not runs:
            mask = document_mask(positions)
        return cls(positions, bounds, mask, required=how == "varlen")


def kernel_runs_on(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.__version__ >= "2.13"
        and is_flash_attention_available()
        and flash_sdp_enabled()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def document_mask(positions: Tensor) -> Tensor:
    document = (positions == 0).cumsum(1)
    return (document[:, :, None] == document[:, None, :]).tril().unsqueeze(1)


def document_bounds(positions: Tensor) -> Tensor:
    """Where documents begin in the flattened rows, then their end: int32. For collate: it reads.

    Empty ones at the end make their number a power of two, so that few shapes occur. (Not the most
    that fit: the kernel's backward takes memory for 128 tokens of each.)
    """
    starts = (positions.flatten() == 0).nonzero().flatten()
    count = 1 << (len(starts) - 1).bit_length()
    bounds = starts.new_full((count + 1,), positions.numel(), dtype=torch.int32)
    bounds[: len(starts)] = starts
    return bounds


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention, within documents if given: [B, heads, T, width] -> the same.

    Errors: ConfigError if the kernel is required, and does not take these.
    """
    grouped = query.shape[1] // key.shape[1]
    mask = None
    if documents is not None:
        mask = documents.mask
        if mask is None:
            out = by_kernel(query, key, value, documents, scale, dropout)
            if out is not None:
                return out
            mask = document_mask(documents.positions)
    if mask is not None and grouped > 1:  # no fast kernel takes both
        key = key.repeat_interleave(grouped, 1)
        value = value.repeat_interleave(grouped, 1)
        grouped = 1
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout, mask is None, scale=scale, enable_gqa=grouped > 1
    )


def by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    scale: float | None,
    dropout: float,
) -> Tensor | None:
    device = query.device.type
    dtype = value.dtype
    if torch.is_autocast_enabled(device):  # which does not know this kernel
        dtype = torch.get_autocast_dtype(device)
    query, key, value = (part.to(dtype) for part in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    width = query.shape[3]
    if dropout or dtype not in DTYPES or width % 8 or width > 256:
        if documents.required:
            raise ConfigError(
                "task.args.packed_attention=varlen needs fp16 or bf16, heads whose width is a "
                "multiple of 8 up to 256, and no dropout in attention; these are "
                f"{dtype}, {width} wide, with dropout {dropout}; use auto"
            )
        return None
    from torch.nn.attention.varlen import varlen_attn  # it imports torch's compiler

    query, key, value = (part.transpose(1, 2).flatten(0, 1) for part in (query, key, value))
    bounds = documents.bounds
    rows, length = documents.positions.shape
    # A document is at most as long as a row. The window makes it causal.
    options: Any = {"scale": scale, "window_size": (-1, 0), "enable_gqa": grouped}
    out: Any = varlen_attn(query, key, value, bounds, bounds, length, length, **options)
    y: Tensor = out.unflatten(0, (rows, length)).transpose(1, 2)
    return y
