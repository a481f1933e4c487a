"""Data: a dataset's samples as this rank's micro-batches, in an order that is a pure function of seed and position.

The samples of all epochs form one sequence. A step takes the next `global_batch_size` of them, or what is left of the
epoch, and shards them over ranks and micro-batches: the step's set of samples is the same at every world size, and
resuming needs one number, how many samples were consumed.
"""

import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, tee
from typing import Any, Literal

import torch

from dist_amp.config.validate import check_length
from dist_amp.errors import DataError
from dist_amp.runtime.loader import Fetch, Request, load
from dist_amp.runtime.nested import to_device
from dist_amp.runtime.permutation import Order, epoch_order, look_up, shuffled_order
from dist_amp.runtime.random_state import seed_all
from dist_amp.settings import DataConfig
from dist_amp.task import Task
from dist_amp.world import World


class Padding:
    """A micro-batch that counts for nothing: for a rank with no sample left, so that all ranks run the same steps."""

    def __init__(self, batch: Any):
        self.batch = batch


@dataclass(frozen=True)
class Shard:
    """One micro-batch of one rank, by its samples' indices."""

    indices: tuple[int, ...]
    counts: bool = True  # False: padding


def shard_step(window: Sequence[int], world_size: int, micro_batch_size: int, rank: int) -> list[Shard]:
    """One step's samples, or positions -> this rank's micro-batches: the same number on every rank.

    None has a single sample, on which batch norm fails, if they can be split otherwise; some ranks get padding instead.
    """
    length, padding = len(window), tuple(window[: min(2, micro_batch_size)])
    count = math.ceil(length / (world_size * micro_batch_size))
    used = max(min(count * world_size, length // 2), math.ceil(length / micro_batch_size))  # of count * world_size
    shards = []
    for first in range(0, count * world_size, world_size):
        last = min(first + world_size, used)
        share = window[first * length // used : last * length // used]
        mine = tuple(share[rank :: last - first]) if rank < last - first else ()
        shards.append(Shard(mine) if mine else Shard(padding, counts=False))
    return shards


@dataclass(frozen=True)
class Plan:
    """Which samples this rank takes, step after step."""

    length: int
    global_batch_size: int
    micro_batch_size: int
    world_size: int
    rank: int
    seed: int
    order: Order
    drop_last: bool = False  # leave out the last step of an epoch if it is not full

    def steps(self, position: int) -> Iterator[tuple[int, list[Shard]]]:
        """(samples consumed after the step, micro-batches) from `position` on, epoch after epoch without end."""
        epoch, offset = divmod(position, self.length)
        size, full = self.global_batch_size, self.global_batch_size if self.drop_last else 1
        while True:
            starts = range(offset, self.length - full + 1, size)
            windows = (range(start, min(start + size, self.length)) for start in starts)
            steps, again = tee(shard_step(one, self.world_size, self.micro_batch_size, self.rank) for one in windows)
            order = epoch_order(self.order, self.length, self.seed, epoch)
            samples = look_up(order, ([shard.indices for shard in step] for step in again))
            for start, step, indices in zip(starts, steps, samples, strict=True):
                shards = [replace(shard, indices=own) for shard, own in zip(step, indices, strict=True)]
                yield epoch * self.length + min(start + size, self.length), shards
            epoch, offset = epoch + 1, 0

    def requests(self, position: int, limit: int | None) -> Iterator[Request]:
        """Each micro-batch of the next `limit` steps: the seed of its random augmentations, and its samples."""
        for consumed, shards in islice(self.steps(position), limit):
            for number, shard in enumerate(shards):
                yield hash((self.seed, consumed, number, self.rank)) % 2**63, shard.indices


class Batches:
    """This rank's micro-batches, one list per step, on the device. Iterate it; set `position` first to resume.

    `items`, `tokens` and `wait_seconds` add up what was yielded and how long the loop waited for it; `handed_out` is
    the last step's micro-batches with their samples' indices.
    """

    def __init__(
        self, dataset: Any, task: Task, plan: Plan, workers: int, device: torch.device, split: str = "training"
    ):
        self.plan = plan
        self.position = 0  # samples consumed by the steps that were yielded
        self.device = device
        self.items = 0
        self.tokens = 0
        self.wait_seconds = 0.0
        self.handed_out: list[tuple[Any, tuple[int, ...]]] = []
        self.fingerprint = ""  # of rank 0's dataset, once checkpoint/ has computed it
        self.fetch = Fetch(dataset, task, split)
        self.split = split
        self.close: Callable[[], Any] = lambda: None  # ends the loader's workers
        self._count_tokens = getattr(task, "tokens", None)
        self._workers = workers
        self._batches: Iterator[Any] | None = None
        self._steps: Iterator[tuple[int, list[Shard]]] = iter(())

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> list[Any]:
        if self._batches is None:
            self._open(limit=None)
        position, shards = next(self._steps)
        step = []
        for shard in shards:
            started = time.perf_counter()
            batch = self.receive()
            self.wait_seconds += time.perf_counter() - started
            if shard.counts:
                self.items += len(shard.indices)
                self.tokens += self._count_tokens(batch) if self._count_tokens else 0
            batch = to_device(batch, self.device)
            step.append(batch if shard.counts else Padding(batch))
        self.position = position
        self.handed_out = [(batch, shard.indices) for batch, shard in zip(step, shards, strict=True)]
        return step

    def receive(self) -> Any:
        """Wait for the next micro-batch. Errors: DataError for a sample that can't be read."""
        assert self._batches is not None
        try:
            return self._checked(next(self._batches))
        except (OSError, EOFError):  # a worker died as it sent: the signal that reports it raises the better error
            time.sleep(1)
            raise

    def _checked(self, batch: Any) -> Any:
        if isinstance(batch, DataError):
            raise DataError(f"rank {self.plan.rank}: {batch}")
        return batch

    def one_epoch(self, limit: int | Literal["all"]) -> Iterator[list[Any]]:
        """The steps of the first epoch, at most `limit` of them: for evaluation, in the same order each time."""
        steps = math.ceil(self.plan.length / self.plan.global_batch_size)
        steps = steps if limit == "all" else min(limit, steps)
        self.position = 0
        self._open(steps)
        try:
            for _ in range(steps):
                yield next(self)
            self.handed_out = []
        finally:
            self.close()

    def at(self, position: int) -> list[tuple[Any, tuple[int, ...]]]:
        """The micro-batches of the step that begins at `position`, with their samples' indices, fetched here again.

        The running loader and the counts are left alone; random augmentations draw from this process's generators.
        """
        _, shards = next(self.plan.steps(position))
        step = []
        for shard, (seed, indices) in zip(shards, self.plan.requests(position, 1), strict=True):
            if self._workers:
                seed_all(seed)  # as the worker did
            batch = to_device(self._checked(self.fetch[seed, indices]), self.device)
            step.append((batch if shard.counts else Padding(batch), indices))
        return step

    def _open(self, limit: int | None) -> None:
        """Start loading from `position`, for at most `limit` steps."""
        self._steps = self.plan.steps(self.position)
        requests = partial(self.plan.requests, self.position, limit)
        pin_memory = self.device.type == "cuda"
        self._batches, close = load(self.fetch, requests, self._workers, pin_memory, self.plan.seed, self.plan.rank)
        self.close = weakref.finalize(self, close)  # also at exit: workers ignore the SIGTERM that Python sends


def build_split(task: Task, split: Literal["train", "validation"], world: World) -> Any:
    """The task's dataset of a split, each node's first rank first: it fills the caches that the others read."""
    with world.one_per_node_first():
        dataset = task.build_dataset(split)
    by_index = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if dataset is not None and (not by_index or isinstance(dataset, str | bytes | Mapping)):
        raise DataError(
            f"the task's build_dataset({split!r}) returned a {type(dataset).__name__}, not samples by number; "
            "return a map-style dataset (streaming ones can be saved to disk and loaded)"
        )
    return dataset


def build_batches(
    config: DataConfig,
    task: Task,
    dataset: Any,
    micro_batch_size: int,
    accumulation_steps: int,
    seed: int,
    world: World,
) -> Batches:
    """The training batches. Errors: DataError for a dataset that does not fill one global batch."""
    global_batch_size = micro_batch_size * accumulation_steps * world.world_size
    length = len(dataset) if dataset is not None else 0
    check_length(length, micro_batch_size, accumulation_steps, world)
    ranks = (world.world_size, world.rank)
    order = shuffled_order(length) if config.shuffle else "dataset"
    plan = Plan(length, global_batch_size, micro_batch_size, *ranks, seed, order, config.drop_last)
    return Batches(dataset, task, plan, config.workers, world.device)


def build_validation(
    config: DataConfig, task: Task, dataset: Any, micro_batch_size: int, world: World
) -> Batches | None:
    """The held-out batches, in the dataset's order; None where the task holds nothing out."""
    if dataset is None or len(dataset) == 0:
        return None
    window = micro_batch_size * world.world_size
    plan = Plan(len(dataset), window, micro_batch_size, world.world_size, world.rank, seed=0, order="dataset")
    return Batches(dataset, task, plan, config.workers, world.device, split="validation")
