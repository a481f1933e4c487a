"""In the process on the stand-in: steps of a config, of which the allocator's peaks are exact for
kernels of an H100 without cuDNN (convolutions and batch norms take torch's own). Ranks other than
the first are imagined.
"""

import pickle
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from dist_amp.clock import PhaseClock
from dist_amp.config.load import load_config
from dist_amp.run import build_run
from dist_amp.scaling import hooks
from dist_amp.settings import RunConfig
from dist_amp.step import train_step
from dist_amp.world import World, locate

STEPS = 6


def answer(folder: str) -> None:
    """The pickled call, and what it returned."""
    torch.set_num_threads(1)
    torch.backends.cudnn.enabled = False
    function, args = pickle.loads((Path(folder) / "call").read_bytes())
    (Path(folder) / "result").write_bytes(pickle.dumps(function(*args)))


def imagined(ranks: int) -> World:
    """Rank 0 of so many, of which the others are only imagined, on machines of these GPUs."""
    if ranks == 1:
        return locate(RunConfig(device="cuda"))
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl", rank=0, world_size=ranks, store=store, device_id=device)
    per_machine = torch.cuda.device_count()
    return World(world_size=ranks, local_world_size=per_machine, device=device)


class Peaks(Counter[str]):
    """The allocator's, in bytes, by the phase of a step, from now on."""

    def __init__(self, clock: PhaseClock) -> None:
        super().__init__()
        self._phase = "other"
        self._enter = clock.enter
        clock.enter = self.enter  # type: ignore[method-assign]
        torch.cuda.reset_peak_memory_stats()

    def enter(self, phase: str) -> str:
        self[self._phase] = max(self[self._phase], torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        if phase != "communication":  # within another phase
            self._phase = phase
        return self._enter(phase)


def peaks_of(words: Sequence[str], ranks: int = 1) -> dict[str, int]:
    """The peaks of rank 0 with these settings, from its second step on. Errors: the task's."""
    # Drawn weights would take the host's memory, and never arrive.
    run = build_run(load_config(words), imagined(ranks), resumes=True)
    # It compares values, and there are none.
    with patch.object(hooks, "is_written", lambda whole, sharded: False):
        train_step(run, next(run.data))
        time.sleep(1)  # NCCL's watchdog holds DDP's first buckets until it wakes, every 100 ms
        peaks = Peaks(run.world.clock)
        for _ in range(STEPS):
            train_step(run, next(run.data))
    return dict(peaks)
