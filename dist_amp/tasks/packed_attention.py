"""Attention within packed documents: torch's kernel for variable-length sequences, or a mask."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import flash_sdp_enabled, is_flash_attention_available

from dist_amp.errors import ConfigError

PackedAttention = Literal["auto", "varlen", "mask"]
DTYPES = (torch.float16, torch.bfloat16)  # that the kernel supports


class Documents(NamedTuple):
    positions: Tensor  # [B, T] int64: of each token in its document
    bounds: Tensor  # see document_bounds
    mask: Tensor | None  # see document_mask; None: use the kernel
    required: bool  # use the kernel even for a dtype or width that it rejects with an error

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
    """[B, 1, T, T] bool: a token attends to its own document, up to itself."""
    document = (positions == 0).cumsum(1)
    same = document[:, :, None] == document[:, None, :]
    return same.tril().unsqueeze(1)


def document_bounds(positions: Tensor) -> Tensor:
    """Starts of documents in the flattened rows, then the end: int32. Call it in collate."""
    starts = (positions.flatten() == 0).nonzero().flatten()  # synchronises a GPU
    # Pad with empty documents to a power of two, so that few shapes occur. Not with more of them:
    # backward allocates memory for 128 tokens per document.
    count = 1 << (len(starts) - 1).bit_length()
    bounds = starts.new_full((count + 1,), positions.numel(), dtype=torch.int32)
    bounds[: len(starts)] = starts
    return bounds


def attend(
    qkv: tuple[Tensor, Tensor, Tensor],
    documents: Documents | None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor | None, Tensor | None]:
    """Attention of query, key and value [B, heads, T, width]. Returns (result, None) if torch's
    kernel ran; else (None, mask) for another kernel, where a mask of None means causal.
    """
    if documents is None:
        return None, None
    if documents.mask is not None:
        return None, documents.mask
    query, _, value = qkv
    device = query.device.type
    dtype = value.dtype
    if torch.is_autocast_enabled(device):  # autocast does not cast the kernel's inputs
        dtype = torch.get_autocast_dtype(device)
    width = query.shape[3]
    fits = dtype in DTYPES and width % 8 == 0 and width <= 256
    if dropout and documents.required:
        raise ConfigError(
            "task.args.packed_attention=varlen, but its kernel has no dropout; use auto, or set "
            "the model's attention dropout to 0"
        )
    if dropout or not (fits or documents.required):
        return None, document_mask(documents.positions)
    from torch.nn.attention.varlen import varlen_attn  # slow: this imports torch's compiler

    query, key, value = (part.to(dtype).transpose(1, 2).flatten(0, 1) for part in qkv)
    bounds = (documents.bounds, documents.bounds)
    rows, length = documents.positions.shape
    # Causal attention is a window of all earlier tokens and none after the token itself.
    options: Any = {"scale": scale, "window_size": (-1, 0), "enable_gqa": True}
    out: Any = varlen_attn(query, key, value, *bounds, length, length, **options)
    return out.unflatten(0, (rows, length)).transpose(1, 2), None
