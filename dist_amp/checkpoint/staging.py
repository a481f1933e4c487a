"""The copy of a run's state that a background save writes: in host memory that each save fills again.

Fresh memory costs more than the copy itself, because the kernel maps and clears every page. With a GPU the memory is
pinned, so that a shard crosses the bus at full speed. torch's BlockingAsyncStager can keep its memory only where it can
pin it, does not notice a change of structure, and deep-copies a DTensor on a CPU before it copies it (2.13.0).
"""

import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 2**28  # assumed: large enough to be few, small enough to waste little

ALIGNMENT = 64  # bytes: a cache line, which is also what torch's own allocator gives

Layout = list[tuple[Any, ...]]


class Staging:
    """Host memory for one copy of this rank's part of the state; it grows with the state and stays for the run."""

    def __init__(self, device: torch.device):
        self._device = device
        self._blocks: list[Any] = []  # buffers of bytes
        self._layout: Layout = []
        self._targets: list[Tensor] = []

    @torch.no_grad()
    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with every tensor in this memory, once the copies have arrived; it replaces the copy before."""
        sources = list(_tensors(state))
        layout = _layout(sources)
        if layout != self._layout:
            self._layout, self._targets = [], []
            self._targets, self._layout = self._place(sources, layout), layout
        for index, (source, target) in enumerate(zip(sources, self._targets, strict=True)):
            if layout[index][-1] == index:  # tensors that share their memory are copied once
                target.copy_(source, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return _rebuilt(state, iter(self._targets))

    def _place(self, sources: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        """A tensor in host memory for each source, of its size and strides; each has a storage of its own."""
        blocks, free = self._blocks, [0] * len(self._blocks)  # the first free byte of each
        left = sum(_aligned(source.nbytes) for source in sources)
        targets: list[Tensor] = []
        for index, (source, place) in enumerate(zip(sources, layout, strict=True)):
            if place[-1] != index:
                targets.append(targets[place[-1]])
            elif source.nbytes == 0:
                targets.append(torch.empty(source.size(), dtype=source.dtype))
            else:
                needed = _aligned(source.nbytes)
                block = next((i for i, start in enumerate(free) if start + needed <= len(blocks[i])), len(blocks))
                if block == len(blocks):
                    blocks.append(self._block(max(needed, min(BLOCK_BYTES, left))))
                    free.append(0)
                flat = torch.frombuffer(blocks[block], dtype=source.dtype, count=source.numel(), offset=free[block])
                dense = torch.empty_like(source, device="meta")  # of the same strides, if these leave no gaps
                targets.append(flat.as_strided(source.size(), dense.stride()))
                free[block] += needed
            left -= _aligned(source.nbytes)
        self._blocks = [block for block, used in zip(blocks, free, strict=True) if used]
        return targets

    def _block(self, size: int) -> Any:
        """A buffer of so many bytes: pinned if there is a GPU and the system allows it."""
        if self._device.type == "cuda":
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                print(
                    f"warning: {size:,} bytes of host memory can't be pinned for background saves ({reason}); training "
                    "waits longer for each save; give the job more host memory, or set checkpoint.async_save=false",
                    file=sys.stderr,
                    flush=True,
                )
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # DONTFORK: workers forked later would keep the old pages, and each would be copied when it is next written to.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):  # Linux
                with suppress(OSError):  # a kernel without it
                    block.madvise(getattr(mmap, advice))
        return block


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _is_copied_whole(value: Any) -> bool:
    """Whether it is a tensor of plain memory: others are made of such, or have a layout of their own."""
    return not hasattr(value, "__tensor_flatten__") and value.layout is torch.strided and not value.is_quantized


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of plain memory that nested containers and subclasses of Tensor are made of, in order."""
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):  # a DTensor, whose shard this yields; torchao's 8-bit moments
            for name in value.__tensor_flatten__()[0]:
                yield from _tensors(getattr(value, name))
        elif _is_copied_whole(value):
            yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _rebuilt(value: Any, targets: Iterator[Tensor]) -> Any:
    """The same structure, with the next of `targets` in place of each tensor that `_tensors` yields."""
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):
            names, context = value.__tensor_flatten__()
            inner = {name: getattr(value, name) for name in names}  # a device mesh may be among them
            inner |= {name: _rebuilt(part, targets) for name, part in inner.items() if isinstance(part, Tensor)}
            kind: Any = type(value)
            return kind.__tensor_unflatten__(inner, context, value.size(), value.stride())
        return next(targets) if _is_copied_whole(value) else value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _rebuilt(part, targets) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts_of = [_rebuilt(part, targets) for part in value]
        return type(value)(*parts_of) if hasattr(value, "_fields") else type(value)(parts_of)
    return deepcopy(value)


def _layout(sources: Sequence[Tensor]) -> Layout:
    """(dtype, size, strides, index of the first tensor with the same memory) of each."""
    first: dict[tuple[Any, ...], int] = {}
    layout = []
    for index, source in enumerate(sources):
        kind = source.dtype, source.size(), source.stride()
        key = source.device, source.data_ptr() if source.numel() else -index, *kind
        layout.append((*kind, first.setdefault(key, index)))
    return layout
