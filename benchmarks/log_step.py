"""CPU time of a log step on each rank, for 2 to 4,096 simulated ranks.

python -m benchmarks log_step

A fake process group without peers simulates the ranks. Targets at 1,024 ranks, without the gather:
2 ms on rank 0, and on every rank 20 us more than at 2 ranks.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.harness import command
from dist_amp.diagnostics.consistency import check_metrics_agree
from dist_amp.precision import Clip
from dist_amp.supervise.command_line import Parser
from dist_amp.telemetry.metrics import Metrics
from dist_amp.telemetry.step_report import GLOBAL, RANK_METRICS, LogRow
from dist_amp.world import World

SIZES = (2, 64, 1024, 4096)
ROUNDS = 200


@command
def main(words: Sequence[str]) -> None:
    Parser("python -m benchmarks log_step", __doc__).parse_args(words)
    print("CPU time in us    gather, no network   read and check, every rank   write, rank 0")
    for size in SIZES:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        try:
            gather, read, write = (1e6 * seconds for seconds in measure(size))
        finally:
            dist.destroy_process_group()
        print(f"{size:>6,} ranks {gather:>23.0f} {read:>28.0f} {write:>16.0f}")


def measure(size: int) -> tuple[float, float, float]:
    """Median CPU seconds: of the gather, of each rank's reading and checks, of rank 0's writing."""
    metrics = Metrics(World(), Clip("norm", 1.0))
    metrics.world = World(world_size=size, control=dist.group.WORLD)
    metrics._totals = metrics._totals.repeat(size, axis=0)
    rows = torch.rand(size, len(RANK_METRICS), dtype=torch.float64)
    rows[:, GLOBAL] = 1.0
    original_stack = World.stack
    gathers: list[float] = []
    reads: list[float] = []
    writes: list[float] = []

    def stack(world: World, row: torch.Tensor) -> torch.Tensor:
        """Times the gather, but returns made-up rows, since the group has no peers."""
        gathers.append(timed(lambda: original_stack(world, row)))
        return rows

    def read() -> None:
        row = metrics.read()
        assert row is not None
        check_metrics_agree(row)

    one = torch.ones(())
    state: Any = SimpleNamespace(
        last_lr=one, last_factor=1.0, counters=torch.ones(3), scale_tensor=one
    )
    state.items = state.tokens = state.position = 0
    state.plan = SimpleNamespace(length=1)
    with tempfile.TemporaryDirectory() as folder, patch.object(World, "stack", stack):
        metrics.open(Path(folder), 0, "")
        for step in range(ROUNDS):
            metrics.begin(step, state, state, state)
            reads.append(timed(read))
            writes.append(timed(lambda: metrics.write(cast(LogRow, metrics.last))))
        metrics.close_files()
    checks = [read - gather for read, gather in zip(reads, gathers, strict=True)]
    return median(gathers), median(checks), median(writes)


def timed(work: Callable[[], Any]) -> float:
    """Seconds of this thread's CPU time, which do not depend on the machine's other work."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


if __name__ == "__main__":
    sys.exit(main())
