"""A dataset by micro-batches: in this process, or in workers that end with their rank."""

import faulthandler
import multiprocessing
import multiprocessing.queues
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader, default_collate, get_worker_info

from dist_amp.distributed.process import die_with_parent, seed_host
from dist_amp.errors import DataError, in_one_line, some_of
from dist_amp.loading.plan import Shard

# A fork can leave a worker stuck before its first line, once in some thousand forks: Python 3.11
# takes a lock there that another thread of the parent may hold. It is forked again.
START_SECONDS = 20.0
START_ATTEMPTS = 3


class Fetch:
    """Map-style view of a dataset by micro-batches, so that a loader worker collates what it reads.

    A DataError in a micro-batch's place is raised by the rank: a worker's own reaches it as text.
    """

    def __init__(self, dataset: Any, task: Any, split: str):
        self.dataset = dataset
        self.collate = getattr(task, "collate", default_collate)
        self.split = split
        self.augment: Any = getattr(task, "augment", None) if split == "training" else None
        self.always_seeds = False  # in the training process too
        self._generator = torch.Generator()

    def __getitem__(self, shard: Shard) -> Any:
        if self.always_seeds or get_worker_info() is not None:
            # A worker's own random numbers would depend on how many workers there are.
            seed_host(shard.seed)
        indices = shard.indices
        try:
            samples = list(read(self.dataset, indices))
        except Exception as error:
            return self._unreadable(indices, error)
        if self.augment is not None and (failed := self._augment(samples, shard)):
            return failed
        try:
            return self.collate(samples)
        except Exception as error:
            return DataError(
                f"{samples_text(indices)} of the {self.split} split do not make one batch: "
                f"{self._odd_column(samples, indices)}{in_one_line(error)}; give all samples the "
                "same keys, shapes and types, or the task a collate(samples)"
            )

    def _augment(self, samples: list[Any], shard: Shard) -> DataError | None:
        for place, index in enumerate(shard.indices):
            rng = self._generator.manual_seed(hash((shard.augmentation, index)))
            try:
                samples[place] = self.augment(samples[place], rng)
            except Exception as error:
                failed = f"the task's augment(sample, rng) failed on sample {index}"
                return DataError(f"{failed}: {in_one_line(error)}; fix it")
        return None

    def _odd_column(self, samples: Sequence[Any], indices: Sequence[int]) -> str:
        """What torch can't collate, as "x is Tensor [3] in sample 7, Tensor [8] in 4: "; or ""."""
        if self.collate is not default_collate or not all(isinstance(s, Mapping) for s in samples):
            return ""
        for index, sample in zip(indices, samples, strict=True):
            for key in {**samples[0], **sample}:
                kind = kind_of(sample, key)
                first = kind_of(samples[0], key)
                if kind != first or "None" in kind:
                    found = f"{key} is {kind} in {self.row_of(index)}"
                    return f"{found}, {first} in {self.row_of(indices[0])}: "
        return ""

    def row_of(self, index: int) -> str:
        """A sample, and its row in the data's files where a part of them is held out."""
        chosen = getattr(getattr(self.dataset, "rows", self.dataset), "_indices", None)
        if chosen is None:
            return f"sample {index}"
        return f"sample {index} (row {chosen.column(0)[index]} of the data)"

    def _unreadable(self, indices: tuple[int, ...], error: Exception) -> DataError:
        """The error for samples that can't be read; it names the first that can't be read alone."""
        for index in indices:
            try:
                read(self.dataset, (index,))
            except Exception as error_of_one:
                indices = (index,)
                error = error_of_one
                break
        reason = f"{file_of(error)}{in_one_line(error)}; fix or remove it"
        if isinstance(error, DataError):
            reason = str(error)
        unread = f"{samples_text(indices)} of the {self.split} split could not be read"
        return DataError(f"{unread}: {reason}")


def kind_of(sample: Mapping[Any, Any], key: Any) -> str:
    if key not in sample:
        return "missing"
    value = sample[key]
    name = type(value).__name__
    if hasattr(value, "shape"):
        return f"{name} {list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"{name} [{len(value)}]"
    return name


def file_of(error: BaseException) -> str:
    """The file that a library, such as PIL, had open when it failed: "FILE: "; "" if unknown."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = getattr(frame.f_locals.get("self"), "filename", None)
        if isinstance(name, str) and name and name not in str(error):
            return f"{name}: "
    return ""


def read(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """The samples of a map-style dataset, all at once if it can."""
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(list(indices))
    return [dataset[index] for index in indices]


def samples_text(indices: Sequence[int]) -> str:
    """As "sample 3" or "samples 3, 7", with at most 64 of them."""
    if len(indices) == 1:
        return f"sample {indices[0]}"
    return f"samples {some_of([*map(str, indices)], 64)}"


def load(
    fetch: Any,
    requests: Callable[[], Iterable[Any]],
    *,
    workers: int,
    pin_memory: bool,
    rank: int,
) -> tuple[Iterator[Any], Callable[[], None]]:
    """(fetch[request] for each of requests(), in order; what ends the workers); or DataError."""
    if not workers:
        return map(fetch.__getitem__, requests()), lambda: None
    for _ in range(START_ATTEMPTS):
        started = multiprocessing.Semaphore(0)
        loader: DataLoader[Any] = DataLoader(
            fetch,
            batch_size=None,
            sampler=requests(),  # type: ignore[arg-type]  # anew: a failed attempt took the first
            collate_fn=lambda batch: batch,
            num_workers=workers,
            pin_memory=pin_memory,
            # The loader draws a number when it starts: not from the generator of dropout.
            generator=torch.Generator(),
            worker_init_fn=partial(_start_worker, started),
        )
        batches: Any = iter(loader)
        if all(started.acquire(timeout=START_SECONDS) for _ in range(workers)):
            return batches, partial(_shut_down, batches)
        _shut_down(batches)
        for worker in getattr(batches, "_workers", ()):
            worker.kill()  # a stuck one does not notice the shutdown
    raise DataError(
        f"rank {rank}: the loader workers do not start; use data.workers=0, or check the load"
    )


def _shut_down(batches: Any) -> None:
    """Let the workers finish, and wait for them; by a private method of torch, if it is there."""
    with suppress(RuntimeError):  # a worker has died already
        getattr(batches, "_shutdown_workers", lambda: None)()


def _start_worker(started: Any, worker: int) -> None:
    # As torch does, which would lose conjugation and negation.
    ForkingPickler.register(Tensor, lambda t: reduce_tensor(t.resolve_conj().resolve_neg()))
    from dist_amp.distributed.signals import ignore_stop_signals

    ignore_stop_signals()
    faulthandler.register(signal.SIGUSR2, file=2)  # prints where it hangs, for the watchdog
    # It holds its rank's sockets as well: other ranks would take a dead rank for alive.
    die_with_parent(signal.SIGKILL)
    # Python prints the errors of the threads that send batches, and the rank would wait for ever.
    queue: Any = multiprocessing.queues.Queue
    queue._on_queue_feeder_error = staticmethod(lambda error, batch: _end_worker(error))
    sys.excepthook = lambda kind, error, trace: _end_worker(error)
    started.release()


def _end_worker(error: BaseException) -> NoReturn:
    """End with the number of the error that kept a batch from being sent."""
    print(
        f"loader worker: a batch can't be sent: {in_one_line(error)}", file=sys.stderr, flush=True
    )
    os._exit(getattr(error, "errno", None) or 1)
