"""What a step holds at its highest point, of a contender alone, though others stand in the same memory."""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dist_amp.run import Run
from dist_amp.verify.dtypes import tensors_in


def peak_in_training(device: torch.device, run: Run | None, before: int, step: Callable[[], object]) -> int | None:
    """Bytes of weights, moments, gradients and activations.

    On a GPU by torch's allocator: above what was held `before` the contender was built. On a CPU its state, and by how
    much torch's memory rises within the step; None for the loop by hand (run: None), whose state is not known there.
    """
    if device.type == "cuda":
        return highest_on_gpu(device, step) - before
    if run is None:
        return None
    moments = size_of(run.optimizer.state.values())
    return size_of_model(run.parallel.module) + moments + rise_on_host(step)


def peak_in_inference(device: torch.device, module: nn.Module, forward: Callable[[], object]) -> int:
    """Bytes of weights and activations: moments may be there, and are not counted."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        return highest_on_gpu(device, forward) - before + size_of_model(module)
    return size_of_model(module) + rise_on_host(forward)


def highest_on_gpu(device: torch.device, call: Callable[[], object]) -> int:
    """Bytes that torch has handed out, at most, during a call."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def size_of_model(module: nn.Module) -> int:
    return size_of([*module.parameters(), *module.buffers()])


def size_of(tensors: Any) -> int:
    """Bytes of the tensors in a collection, however nested."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(list(tensors)))


def rise_on_host(call: Callable[[], object]) -> int:
    """By how many bytes torch's memory on the CPU rises, at most, in the midst of a call."""
    on_cpu = [torch.profiler.ProfilerActivity.CPU]
    with mute(), torch.profiler.profile(activities=on_cpu, profile_memory=True) as profiler:
        call()
    events: Any = profiler.profiler
    handed = sorted((e.start_ns(), e.nbytes()) for e in events.kineto_results.events() if e.name() == "[memory]")
    return max(itertools.accumulate((size for _, size in handed), initial=0))


@contextmanager
def mute() -> Iterator[None]:
    """Without what libraries in C++ write to stderr, past Python."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
