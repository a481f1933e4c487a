"""Data: a dataset's samples as this rank's micro-batches, in an order that is a pure function of seed and position.

The samples of all epochs form one sequence. A step takes the next `global_batch_size` of them, or what is left of the
epoch, and shards them over ranks and micro-batches (runtime/plan.py): the step's set of samples is the same at every
world size, and resuming needs one number, how many samples were consumed.
"""

import math
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal

import torch

from dist_amp.config.validate import check_length
from dist_amp.errors import DataError
from dist_amp.runtime.clock import PhaseClock
from dist_amp.runtime.loader import Fetch, load
from dist_amp.runtime.nested import to_device
from dist_amp.runtime.permutation import shuffled_order
from dist_amp.runtime.plan import Plan, Shard
from dist_amp.runtime.prefetch import Copies, Fetched
from dist_amp.runtime.random_state import seed_all
from dist_amp.settings import DataConfig
from dist_amp.sources.length_groups import grouped
from dist_amp.task import Task
from dist_amp.world import World


class Padding:
    """A micro-batch that counts for nothing: for a rank with no sample left, so that all ranks run the same steps."""

    def __init__(self, batch: Any):
        self.batch = batch


class Batches:
    """This rank's micro-batches, one list per step, on the device. Iterate it; set `position` first to resume.

    `items` and `tokens` add up what was yielded; `handed_out` is the last step's micro-batches with their samples'
    indices. clock: of the loop, which spends its time here as "data".
    """

    def __init__(
        self, dataset: Any, task: Task, plan: Plan, workers: int, device: torch.device, split: str = "training",
        clock: PhaseClock | None = None,
    ):  # fmt: skip
        self.plan = plan
        self.position = 0  # samples consumed by the steps that were yielded
        self.device = device
        self.items = 0
        self.tokens = 0
        self._clock = clock or PhaseClock()
        self.handed_out: list[tuple[Any, tuple[int, ...]]] = []
        self.fingerprint = ""  # of rank 0's dataset, once checkpoint/ has computed it
        self.fetch = Fetch(dataset, task, split)
        self.split = split
        self.close: Callable[[], Any] = lambda: None  # ends the loader's workers
        self._count_tokens = getattr(task, "tokens", None) if split == "training" else None
        self._workers = workers
        self._copies = Copies(device)
        self._ahead: Future[Fetched] | None = None  # the step after the one handed out
        self._batches: Iterator[Any] | None = None
        self._steps: Iterator[tuple[int, list[Shard]]] = iter(())

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> list[Any]:
        fetched = self._ahead.result() if self._ahead is not None else self._fetch()
        self._ahead = None
        self.position = fetched.position
        self.items += fetched.items
        self.tokens += fetched.tokens
        batches = zip(self._copies.hand_out(fetched.copied), fetched.shards, strict=True)
        step = [(batch if shard.counts else Padding(batch), shard.indices) for batch, shard in batches]
        self.handed_out = step
        return [batch for batch, _ in step]

    def prefetch(self) -> None:
        """Fetch the next step and start its copy, while a GPU computes this one: call it after `train_step`.

        Does nothing on a CPU, or without workers: samples read in this process may draw from its random generators.
        An error is raised by the step's own `next`.
        """
        if self.device.type == "cpu" or not self._workers or self._ahead is not None:
            return
        self._ahead = Future()
        try:
            self._ahead.set_result(self._fetch())
        except Exception as error:
            self._ahead.set_exception(error)

    def _fetch(self) -> Fetched:
        """Wait for the next step's micro-batches, and start their copy."""
        if self._batches is None:
            self._open(limit=None)
        position, shards = next(self._steps)
        with self._clock.phase("data"):
            batches = [self.receive() for _ in shards]
        real = [(batch, shard) for batch, shard in zip(batches, shards, strict=True) if shard.counts]
        items = sum(len(shard.indices) for _, shard in real)
        tokens = sum(self._count_tokens(batch) for batch, _ in real) if self._count_tokens else 0
        return Fetched(position, shards, self._copies.start(batches), items, tokens)

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
        for shard, request in zip(shards, self.plan.requests(position, 1), strict=True):
            if self._workers:
                seed_all(request.seed)  # as the worker did
            batch = to_device(self._checked(self.fetch[request]), self.device)
            step.append((batch if shard.counts else Padding(batch), shard.indices))
        return step

    def _open(self, limit: int | None) -> None:
        """Start loading from `position`, for at most `limit` steps."""
        self._steps, self._ahead = self.plan.steps(self.position), None
        requests = partial(self.plan.requests, self.position, limit)
        pin_memory = self.device.type == "cuda"
        self._batches, close = load(self.fetch, requests, self._workers, pin_memory, self.plan.seed, self.plan.rank)
        self.close = weakref.finalize(self, close)  # also at exit: workers ignore the SIGTERM that Python sends


def build_batches(
    config: DataConfig, task: Task, dataset: Any, micro_batch_size: int, accumulation_steps: int, seed: int,
    world: World,
) -> Batches:  # fmt: skip
    """The training batches. Errors: DataError for a dataset that does not fill one global batch."""
    global_batch_size = micro_batch_size * accumulation_steps * world.world_size
    check_length(length := len(() if dataset is None else dataset), micro_batch_size, accumulation_steps, world)
    dataset = grouped(config, dataset)
    order, own_order = shuffled_order(length) if config.shuffle else "dataset", None
    if config.shuffle and hasattr(dataset, "shuffled"):  # see sources/: such as row groups read by one rank each
        order, own_order = dataset.shuffled(global_batch_size, world.world_size)
    ranks = (world.world_size, world.rank)
    plan = Plan(length, global_batch_size, micro_batch_size, *ranks, seed, order, config.drop_last, own_order)
    return Batches(dataset, task, plan, config.workers, world.device, clock=world.clock)


def build_validation(
    config: DataConfig, task: Task, dataset: Any, micro_batch_size: int, world: World
) -> Batches | None:
    """The held-out batches, in the dataset's order; None where the task holds nothing out."""
    if dataset is None or len(dataset) == 0:
        return None
    window = micro_batch_size * world.world_size
    plan = Plan(len(dataset), window, micro_batch_size, world.world_size, world.rank, seed=0, order="dataset")
    return Batches(dataset, task, plan, config.workers, world.device, split="validation")
