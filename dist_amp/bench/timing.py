"""How loops are timed on a device: from idle to idle, by turns, in rounds; and what is done before and after."""

import gc
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dist_amp.bench.loops import Loop
from dist_amp.failure import first_line
from dist_amp.interval import Clock
from dist_amp.runtime import World

OUT_OF_MEMORY = "out of memory; use smaller micro-batches"


def prime(device: torch.device) -> None:
    """Let the libraries take their workspaces before anybody's memory is measured."""
    layer = nn.Linear(64, 64, device=device)
    with torch.autocast(device.type, dtype=torch.float16):  # which every GPU knows
        layer(torch.ones(64, 64, device=device)).float().sum().backward()


def release(device: torch.device) -> None:
    """Give back what nobody holds."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def timed_block(world: World, loop: Loop, data: Sequence[Any], steps: int) -> float:
    """Seconds per step, from a device that has nothing to do to one that has done all of it."""
    loop.prepare()
    world.wait_for_device()
    clock = Clock(world.device)
    for micro_batches in itertools.islice(itertools.cycle(data), steps):
        loop.step(micro_batches)
    spans = clock.lap()
    world.wait_for_device()
    return clock.seconds(spans) / steps


def in_turns(
    world: World, loops: Mapping[str, Loop], data: Sequence[Any], rounds: int, steps: int, in_time: Callable[[], bool]
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """({loop: seconds per step, one number a round}, {loop that failed: why}); the order is drawn anew each round.

    steps: of a block. It ends, after one round at least, when it is not `in_time` any more.
    """
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    failed: dict[str, str] = {}
    for number in range(-1, rounds):  # the first is not counted: memory is handed out anew in it
        if number > 0 and not in_time():
            break
        gc.collect()
        gc.disable()
        for name in order.sample(list(seconds), len(seconds)):
            try:
                taken = timed_block(world, loops[name], data, steps if number >= 0 else 1)
            except Exception as error:
                failed[name] = why_not(error)
                del seconds[name]
                continue
            if number >= 0:
                seconds[name].append(taken)
        gc.enable()
    return seconds, failed


def why_not(error: Exception) -> str:
    """Why a loop or a cell has no figures, in one line."""
    if isinstance(error, ImportError):
        return "not installed: pip install 'dist_amp[bench]'"
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    return f"can't: {first_line(error).split('. ')[0][:160] or type(error).__name__}"
