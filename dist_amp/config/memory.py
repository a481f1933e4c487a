"""Memory in bytes: the size of tensors, and the capacity of a rank's device and host."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from dist_amp.world import World

UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Total bytes of tensors; a sharded tensor counts as a whole, over all ranks."""
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)


def capacity_of(world: World) -> tuple[int, int]:
    """Returns (bytes that this process may use, bytes reserved by its allocator but unused)."""
    if world.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(world.device)
        reserved = torch.cuda.memory_reserved(world.device)
        allocated = torch.cuda.memory_allocated(world.device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(world.device))
        return min(allowed, free + reserved), reserved - allocated
    return host_memory() // world.local_world_size, 0


def host_memory() -> int:
    """Memory of the host, or the container's limit if that is lower."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError, ValueError):  # not in a container, or a container without a limit
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)


def size_text(count: float) -> str:
    """A number of bytes as text: "1.50 GiB"."""
    unit = next((name for name, bytes_in_it in UNITS.items() if count >= bytes_in_it), "bytes")
    digits = 0 if unit == "bytes" else 2
    return f"{count / UNITS[unit]:,.{digits}f} {unit}"
