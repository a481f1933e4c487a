"""A dataset's samples as this rank's micro-batches; the order depends on seed and position only.

A step takes the next `global_batch_size` samples, or the rest of the epoch, and distributes them
over ranks and micro-batches (loading/plan.py), so a step has the same samples at every world size.
To resume, one number is enough: the position, which is how many samples all ranks have consumed.
"""

import math
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from dist_amp.clock import PhaseClock
from dist_amp.config.auto import accumulation_steps
from dist_amp.config.validate import check_coupled, check_length
from dist_amp.distributed.process import seed_all
from dist_amp.errors import DataError
from dist_amp.loading.loader import Fetch, load
from dist_amp.loading.nested import CopyStream
from dist_amp.loading.plan import Deal, Plan, Shard, shuffled_order
from dist_amp.settings import Config
from dist_amp.task import Task
from dist_amp.world import World

Indexed = list[tuple[Any, tuple[int, ...]]]  # micro-batches with their samples' indices


class Padding:
    """A micro-batch of weight 0 for a rank without samples, so that it runs all collectives too."""

    def __init__(self, batch: Any):
        self.batch = batch


class Batches:
    """Iterator over steps: this rank's list of micro-batches, on the device.

    Set `position` to resume. The run's clock counts as "data" how long training waits for them.
    bad_samples: a BadSamples that leaves out unreadable samples; None: they end the run.
    """

    def __init__(
        self,
        dataset: Any,
        task: Task,
        plan: Plan,
        workers: int,
        world: World,
        split: str = "training",
        bad_samples: Any = None,
    ):
        self.plan = plan
        self.position = 0  # samples that all ranks have consumed in the yielded steps
        self.items = 0  # samples of this rank since the last log step, as are `tokens`
        self.tokens = 0
        self.last_step: Indexed = []
        self.fingerprint = ""  # of rank 0's dataset; set by checkpoint/
        fetch_class = Fetch if bad_samples is None else bad_samples.fetch
        self.fetch = fetch_class(dataset, task, split, seeds=plan.deal is not None)  # bit_exact
        self.split = split
        self._end_workers: Callable[[], Any] = lambda: None
        self.bad_samples = bad_samples
        self._clock = world.clock if split == "training" else PhaseClock()  # the second is not read
        self._count_tokens: Callable[[Any], int] = lambda batch: 0
        if split == "training" and hasattr(task, "tokens"):
            self._count_tokens = task.tokens
        self.workers = workers
        self._pin_memory = world.device.type == "cuda"
        self.to_device: Callable[[Any], Any] = lambda batches: batches  # nothing to do on a CPU
        if self._pin_memory:
            self.to_device = CopyStream(world.device)
        self._batches: Iterator[Any] | None = None
        self._steps: Iterator[tuple[int, list[Shard]]] = iter(())

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> list[Any]:
        if self._batches is None:
            self._open(limit=None)
        position, shards = next(self._steps)
        with self._clock.phase("data"):
            batches = [self._receive() for _ in shards]
        self.position = position
        if self.bad_samples is not None:
            batches, shards = self.bad_samples.leave_out(self, batches, shards, is_new=True)
        for batch, shard in zip(batches, shards, strict=True):
            if shard.counts:
                self.items += len(shard.indices)
                self.tokens += self._count_tokens(batch)
        self.last_step = indexed(self.to_device(batches), shards)
        return [batch for batch, _ in self.last_step]

    def _receive(self) -> Any:
        """Wait for the next micro-batch. Raises DataError for a sample that can't be read."""
        assert self._batches is not None
        try:
            return self._checked(next(self._batches))
        except (OSError, EOFError):
            # A worker died while sending: wait, so that SIGCHLD's handler raises a better error.
            time.sleep(1)
            raise

    def _checked(self, batch: Any) -> Any:
        if isinstance(batch, DataError):
            raise DataError(f"rank {self.plan.rank}: {batch}")
        return batch

    def steps_in_one_epoch(self, limit: int | Literal["auto", "all"]) -> int:
        steps = math.ceil(self.plan.length / self.plan.global_batch_size)
        return min(limit, steps) if isinstance(limit, int) else steps

    def one_epoch(self, limit: int | Literal["auto", "all"]) -> Iterator[list[Any]]:
        """For evaluation: the first epoch's steps, at most `limit`, in the same order each time."""
        steps = self.steps_in_one_epoch(limit)
        self.position = 0
        self._open(steps)
        try:
            for _ in range(steps):
                yield next(self)
            self.last_step = []
        finally:
            self.close()

    def at(self, position: int) -> Indexed:
        """The micro-batches of the step that begins at `position`, fetched in this process."""
        _, shards = next(self.plan.steps(position))
        return self.fetched(shards)

    def fetched(self, shards: list[Shard]) -> Indexed:
        """Fetch these micro-batches in this process; random transforms use its generators."""
        batches = []
        for shard in shards:
            if self.workers:
                seed_all(shard.seed)  # as the worker did
            batches.append(self._checked(self.fetch[shard]))
        if self.bad_samples is not None:
            batches, shards = self.bad_samples.leave_out(self, batches, shards, is_new=False)
        return indexed(self.to_device(batches), shards)

    def _open(self, limit: int | None) -> None:
        """Start loading from `position`, for at most `limit` steps."""
        self._steps = self.plan.steps(self.position)
        self._batches, close = load(
            self.fetch,
            partial(self.plan.micro_batches, self.position, limit),
            workers=self.workers,
            pin_memory=self._pin_memory,
            rank=self.plan.rank,
        )
        # Runs at exit too, where Python sends the workers a SIGTERM that they ignore.
        self._end_workers = weakref.finalize(self, close)

    def close(self) -> None:
        """End the loader's workers; the next step begins at `position` again."""
        self._end_workers()
        self._batches = None


def indexed(batches: list[Any], shards: list[Shard]) -> Indexed:
    """[(micro-batch, its samples' indices)]; a micro-batch that does not count becomes Padding."""
    pairs = []
    for batch, shard in zip(batches, shards, strict=True):
        if not shard.counts:
            batch = Padding(batch)
        pairs.append((batch, shard.indices))
    return pairs


def build_batches(
    config: Config,
    task: Task,
    dataset: Any,
    world: World,
    deal: Deal | None = None,
    bad_samples: Any = None,
) -> Batches:
    """The training batches. deal: see `loading.plan.Plan`. Raises DataError, ConfigError."""
    length = len(dataset)
    micro_batch_size = config.train.micro_batch_size
    micro_batches = accumulation_steps(config.train, world.world_size)
    check_length(length, micro_batch_size, micro_batches, config.data.drop_last, world)
    global_batch_size = micro_batch_size * micro_batches * world.world_size
    if not config.data.drop_last:
        check_coupled(task, "training", length, global_batch_size, world)
    if config.data.group_by_length != "off":
        from dist_amp.loading.length_groups import grouped

        dataset = grouped(config.data, dataset)
    order: str = shuffled_order(length) if config.data.shuffle else "dataset"
    dataset_order = None
    if config.data.shuffle and hasattr(dataset, "shuffled"):  # shuffles itself: Parquet, buckets
        order, dataset_order = dataset.shuffled(global_batch_size, world.world_size)
    plan = Plan(
        length,
        global_batch_size,
        micro_batch_size,
        world.world_size,
        world.rank,
        config.run.seed,
        order,
        config.data.drop_last,
        dataset_order,
        deal,
    )
    return Batches(dataset, task, plan, config.data.workers, world, bad_samples=bad_samples)


def build_validation(
    task: Task, dataset: Any, workers: int, world: World, training: Batches
) -> Batches | None:
    """The validation batches, in the dataset's order; None without validation samples."""
    if dataset is None or len(dataset) == 0:
        return None
    size = training.plan.micro_batch_size * world.world_size
    check_coupled(task, "validation", len(dataset), size, world)
    if training.plan.deal is not None:  # bit-exact: the same batches on any number of ranks
        size = training.plan.global_batch_size
    plan = replace(training.plan, length=len(dataset), global_batch_size=size, seed=0)
    plan = replace(plan, order="dataset", drop_last=False, dataset_order=None)
    return Batches(dataset, task, plan, workers, world, "validation", training.bad_samples)
