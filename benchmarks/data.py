"""How fast a config's data are read, compared with torch's DataLoader over the same dataset.

python -m benchmarks data
python -m benchmarks data --data.path 'rows/*.parquet' --data.view parquet --data.workers 2

In turns, both read micro-batches of train.micro_batch_size samples with the task's collate and
data.workers processes: dist_amp in the run's order, DataLoader with shuffle=True. Then the run
takes steps, to measure the share of the time that it waits for data; target: 1 %.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from torch.utils.data import DataLoader, default_collate

from benchmarks import harness, report
from dist_amp.data import build_batches
from dist_amp.run import Run
from dist_amp.step import train_step
from dist_amp.task import build_split

ROUNDS = 7
ROUND_SECONDS = 1.0
STEPS = 300
OURS, BARE = "dist_amp", "DataLoader"


def ours(run: Run, dataset: Any) -> Iterator[Any]:
    with closing(build_batches(run.config, run.task, dataset, run.world)) as batches:
        yield from batches


def bare(run: Run, dataset: Any) -> Iterator[Any]:
    workers = run.config.data.workers
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    collate = getattr(run.task, "collate", default_collate)
    size = run.config.train.micro_batch_size
    loader: Any = DataLoader(dataset, size, shuffle=True, collate_fn=collate, **options)
    while True:
        yield from loader


def speed(batches: Iterator[Any], ahead: int) -> float:
    """Micro-batches per second, after the first `ahead`, which workers have read in advance."""
    for _ in range(ahead):
        next(batches)
    count = 0
    began = now = time.perf_counter()
    while not count or now - began < ROUND_SECONDS:
        next(batches)
        count += 1
        now = time.perf_counter()
    batches.close()  # type: ignore[attr-defined]  # ends the workers
    return count / (now - began)


def share_of_waiting(run: Run) -> tuple[float, float]:
    """(share of the time that this rank waits for data, seconds per step)."""
    for _ in range(10):  # in which the workers fill their queues
        train_step(run, next(run.data))
    waited = 0.0
    began = time.perf_counter()
    for _ in range(STEPS):
        requested = time.perf_counter()
        micro_batches = next(run.data)
        waited += time.perf_counter() - requested
        train_step(run, micro_batches)
    seconds = time.perf_counter() - began
    return waited / seconds, seconds / STEPS


@harness.on_a_run
def main(run: Run) -> None:
    dataset = build_split(run.task, "train", run.world)
    loaders = {OURS: ours, BARE: bare}
    ahead = 1 + 2 * run.config.data.workers  # workers keep 2 batches each

    def block(name: str) -> float:
        return speed(loaders[name](run, dataset), ahead)

    speeds = harness.in_turns(loaders, block, ROUNDS)
    ratios = [rate / base for rate, base in zip(speeds[OURS], speeds[BARE], strict=True)]
    for name, rates in speeds.items():
        run.world.say(f"{name:<11}{report.digits(report.median(rates)):>8} micro-batches/s")
    run.world.say(f"dist_amp over DataLoader: {report.interval(ratios)}")
    waiting, seconds = share_of_waiting(run)
    slowest = max(run.world.gather(waiting))
    run.world.say(
        f"the slowest rank waits {slowest:.2%} of a step of {1e3 * seconds:.1f} ms for data"
    )


if __name__ == "__main__":
    sys.exit(main())
