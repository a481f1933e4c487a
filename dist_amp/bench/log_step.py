"""What a log step costs the host of each rank, on 2 to 4,096 imagined ranks; a process group without peers stands in.

python -m dist_amp.bench log_step

Targets at 1,024 ranks, without the gather: 2 ms on rank 0, and 20 us more on every rank than at 2 ranks.
"""

import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dist_amp.commands.command_line import Parser, exit_status
from dist_amp.diagnostics.consistency import check_metrics_agree
from dist_amp.precision import Clip
from dist_amp.settings import MetricsConfig
from dist_amp.telemetry.log_row import GLOBAL, RANK_METRICS, LogRow
from dist_amp.telemetry.metrics import Metrics
from dist_amp.world import World

SIZES = (2, 64, 1024, 4096)
ROUNDS = 200


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return exit_status(measure_all, argv)


def measure_all(words: Sequence[str]) -> None:
    """Print a line per number of ranks."""
    Parser("python -m dist_amp.bench log_step", __doc__).parse_args(words)
    print("CPU time in us    gather, without a network   read and check, every rank   write, rank 0")
    for size in SIZES:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        try:
            gather, read, write = (1e6 * seconds for seconds in measure(size))
        finally:
            dist.destroy_process_group()
        print(f"{size:>6,} ranks {gather:>29.0f} {read:>28.0f} {write:>15.0f}")


def measure(size: int) -> tuple[float, float, float]:
    """Median seconds of CPU time: of the gather, of what every rank does with it, and of what rank 0 writes."""
    metrics = Metrics(MetricsConfig(), World(), Clip("norm", 1.0))
    metrics.world = world = World(world_size=size, control=dist.group.WORLD)
    metrics._totals = metrics._totals.repeat(size, axis=0)
    rows = torch.rand(size, len(RANK_METRICS), dtype=torch.float64)
    rows[:, GLOBAL] = 1.0
    real, seconds = World.gather, []

    def gather(self: World, row: torch.Tensor) -> torch.Tensor:
        """The group has no peers to fill the result."""
        seconds.append(timed(lambda: real(self, row)))
        return rows

    state: Any = SimpleNamespace(last_lr=torch.ones(()), counters=torch.ones(3), scale_tensor=torch.ones(()))
    state.items = state.tokens = state.position = 0
    state.plan = SimpleNamespace(length=1)

    def read() -> None:
        row = metrics.read()
        assert row is not None
        check_metrics_agree(row)

    reads, writes = [], []
    with tempfile.TemporaryDirectory() as folder, patch.object(World, "gather", gather):
        metrics.open(Path(folder), 0, "")
        for step in range(ROUNDS):
            metrics.begin(step, state, state, state)
            reads.append(timed(read))
            row: LogRow = metrics.last  # type: ignore[assignment]
            with contextlib.redirect_stdout(io.StringIO()):
                writes.append(timed(lambda row=row: metrics.write(row, ROUNDS)))  # type: ignore[misc]
        metrics.close()
    assert world.is_main
    return median(seconds), median(r - g for r, g in zip(reads, seconds, strict=True)), median(writes)


def timed(work: Callable[[], Any]) -> float:
    """Seconds of CPU time of this thread, which does not depend on what else the machine does."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


if __name__ == "__main__":
    sys.exit(main())
