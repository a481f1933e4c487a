"""How loops are timed on a device: from idle to idle, by turns, in rounds; and what is done before and after."""

import gc
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from dist_amp.bench.loops import Loop
from dist_amp.errors import first_line
from dist_amp.supervise.out_of_memory import is_out_of_memory
from dist_amp.telemetry.async_copy import Clock
from dist_amp.world import World

FILLED = 0.9  # what part of the memory loops may fill together
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
    # Each step has containers of its own: a task may take its labels out of a batch.
    ready = [tree_map(lambda part: part, step) for step in itertools.islice(itertools.cycle(data), steps)]
    loop.prepare()
    world.wait_for_device()
    clock = Clock(world.device)
    for micro_batches in ready:
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
    for number in range(-1, rounds):  # the first is not counted: memory is handed out anew, and every shape compiled
        if number > 0 and not in_time():
            break
        with without_garbage():
            for name in order.sample(list(seconds), len(seconds)):
                try:
                    taken = timed_block(world, loops[name], data, steps if number >= 0 else len(data))
                except Exception as error:
                    failed[name] = why_not(error)
                    del seconds[name]
                    continue
                if number >= 0:
                    seconds[name].append(taken)
    return seconds, failed


@contextmanager
def without_garbage() -> Iterator[None]:
    """Python's garbage is collected now, and not inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def fits(device: torch.device, rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether one more loop is likely to have room beside those that are there: for itself, and for anyone's step.

    rows: of loops like it, with `resident_bytes` of what stays and `peak_bytes` of a step.
    """
    known = [row for row in rows if "peak_bytes" in row]
    if device.type != "cuda" or not known:
        return True
    resident = max(row["resident_bytes"] for row in known)
    step = max(row["peak_bytes"] - row["resident_bytes"] for row in known)
    held = torch.cuda.memory_allocated(device)
    room = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return held + resident + step < FILLED * room


def why_not(error: Exception) -> str:
    """Why a loop or a cell has no figures, in one line."""
    if isinstance(error, ImportError):
        return "not installed: pip install 'dist_amp[bench]'"
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    return f"can't: {first_line(error).split('. ')[0][:160] or type(error).__name__}"
