"""Data: a dataset's samples as this rank's micro-batches, in an order that is a pure function of seed and position.

The samples of all epochs form one sequence. A step takes the next `global_batch_size` of them, or what is left of the
epoch, and shards them over ranks and micro-batches: the step's set of samples is the same at every world size, and
resuming needs one number, how many samples were consumed.
"""

import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch.utils.data import default_collate, get_worker_info

from dist_amp.errors import DataError, in_one_line
from dist_amp.runtime import loader
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


Request = tuple[int, tuple[int, ...]]  # seed, samples' indices


def epoch_order(length: int, seed: int, epoch: int, shuffle: bool) -> torch.Tensor:
    """The samples' order in one epoch: [length] int64."""
    if not shuffle:
        return torch.arange(length)
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(length, generator=generator)


def shard_step(window: Sequence[int], world_size: int, micro_batch_size: int, rank: int) -> list[Shard]:
    """One step's samples -> this rank's micro-batches: the same number on every rank, the last one split evenly."""
    size = world_size * micro_batch_size
    shards = []
    for start in range(0, len(window), size):
        mine = tuple(window[start : start + size][rank::world_size])
        shards.append(Shard(mine) if mine else Shard((window[start],), counts=False))
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
    shuffle: bool

    def steps(self, position: int) -> Iterator[tuple[int, list[Shard]]]:
        """(samples consumed after the step, micro-batches) from `position` on, epoch after epoch without end."""
        epoch, offset = divmod(position, self.length)
        while True:
            order = epoch_order(self.length, self.seed, epoch, self.shuffle)
            while offset < self.length:
                window = order[offset : offset + self.global_batch_size].tolist()
                offset += len(window)
                shards = shard_step(window, self.world_size, self.micro_batch_size, self.rank)
                yield epoch * self.length + offset, shards
            epoch, offset = epoch + 1, 0

    def requests(self, position: int, limit: int | None) -> Iterator[Request]:
        """Each micro-batch of the next `limit` steps: the seed of its random augmentations, and its samples."""
        for consumed, shards in islice(self.steps(position), limit):
            for number, shard in enumerate(shards):
                yield hash((self.seed, consumed, number, self.rank)) % 2**63, shard.indices


class Fetch:
    """Map-style view of a dataset by micro-batches, so that a loader worker collates what it reads.

    A sample that can't be read gives a DataError in the micro-batch's place, for the rank to raise: what a worker
    raises reaches it as text, with the traceback in it.
    """

    def __init__(self, dataset: Any, task: Task, split: str):
        self.dataset = dataset
        self.collate = getattr(task, "collate", default_collate)
        self.split = split

    def __getitem__(self, request: Request) -> Any:
        seed, indices = request
        if get_worker_info() is not None:
            # A worker's own random numbers would depend on how many workers there are and when they were started.
            seed_all(seed)
        try:
            samples = self.read(indices)
        except Exception as error:
            return self._unreadable(indices, error)
        try:
            return self.collate(samples)
        except Exception as error:
            return DataError(
                f"{samples_text(indices)} of the {self.split} split do not make one batch: {in_one_line(error)}; give "
                "all samples the same keys, shapes and types, or the task a collate(samples)"
            )

    def read(self, indices: tuple[int, ...]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            return self.dataset.__getitems__(list(indices))
        return [self.dataset[index] for index in indices]

    def _unreadable(self, indices: tuple[int, ...], error: Exception) -> DataError:
        """The error for samples that can't be read; it names the first that can't be read alone."""
        for index in indices:
            try:
                self.read((index,))
            except Exception as own_error:
                indices, error = (index,), own_error
                break
        what = f"{samples_text(indices)} of the {self.split} split"
        return DataError(f"{what} could not be read: {in_one_line(error)}; fix or remove it")


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
        self._batches, close = loader.load(
            self.fetch, requests, self._workers, pin_memory, self.plan.seed, self.plan.rank
        )
        self.close = weakref.finalize(self, close)  # also at exit: workers ignore the SIGTERM that Python sends


def to_device(batch: Any, device: torch.device) -> Any:
    """Tensors in nested dicts, lists and tuples moved to the device; from pinned memory without waiting."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


def samples_text(indices: Sequence[int]) -> str:
    shown = ", ".join(map(str, indices[:64])) + (", ..." if len(indices) > 64 else "")
    return f"sample{'s' if len(indices) > 1 else ''} {shown}"


def build_split(task: Task, split: Literal["train", "validation"], world: World) -> Any:
    """The task's dataset of a split, each node's first rank first: it fills the caches that the others read."""
    with world.one_per_node_first():
        dataset = task.build_dataset(split)
    if dataset is not None and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"the task's build_dataset({split!r}) returned a {type(dataset).__name__} without len() and []; "
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
    if length == 0:
        raise DataError(
            "the training dataset is empty; check data.name, data.path, data.split and the task's build_dataset"
        )
    if length < global_batch_size:
        raise DataError(
            f"the training dataset has {length} samples, fewer than one global batch of {global_batch_size} = "
            f"micro_batch_size {micro_batch_size} x {world.world_size} ranks x accumulation_steps "
            f"{accumulation_steps}; use more data or a smaller batch"
        )
    plan = Plan(length, global_batch_size, micro_batch_size, world.world_size, world.rank, seed, config.shuffle)
    return Batches(dataset, task, plan, config.workers, world.device)


def build_validation(
    config: DataConfig, task: Task, dataset: Any, micro_batch_size: int, world: World
) -> Batches | None:
    """The held-out batches, in the dataset's order; None where the task holds nothing out."""
    if dataset is None or len(dataset) == 0:
        return None
    window = micro_batch_size * world.world_size
    plan = Plan(len(dataset), window, micro_batch_size, world.world_size, world.rank, seed=0, shuffle=False)
    return Batches(dataset, task, plan, config.workers, world.device, split="validation")
