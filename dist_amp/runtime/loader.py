"""A DataLoader whose worker processes start reliably, ignore stop signals and end with their rank."""

import gc
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from dist_amp.errors import DataError
from dist_amp.fast.dataloader import kill, shut_down
from dist_amp.runtime.process import die_with_parent, ignore_stop_signals

# A fork can leave a worker stuck before its first line: Python 3.11 takes a lock there that another thread of the
# parent may hold at that moment. Seen once in some thousand forks; a worker that does not report is forked again.
START_SECONDS = 20.0
START_ATTEMPTS = 3


def load(
    fetch: Any, requests: Callable[[], Iterable[Any]], workers: int, pin_memory: bool, seed: int, rank: int
) -> tuple[Iterator[Any], Callable[[], None]]:
    """(fetch[request] for each of requests(), in order; what ends the workers). workers=0: made in this process.

    Each attempt to start the workers calls requests() anew, since one that failed has taken the first of them.

    Errors: DataError where the workers do not start.
    """
    if not workers:
        return iter(_loader(fetch, requests(), 0, pin_memory, seed, None)), lambda: None
    for _ in range(START_ATTEMPTS):
        started = multiprocessing.Semaphore(0)
        batches: Any = iter(_loader(fetch, requests(), workers, pin_memory, seed, started))
        if all(started.acquire(timeout=START_SECONDS) for _ in range(workers)):
            return batches, partial(shut_down, batches)
        shut_down(batches)
        kill(batches)  # stuck ones do not notice the shutdown
    raise DataError(f"rank {rank}: the loader workers do not start; use data.workers=0, or check the machine's load")


def _loader(
    fetch: Any, requests: Iterable[Any], workers: int, pin_memory: bool, seed: int, started: Any
) -> DataLoader[Any]:
    return DataLoader(
        fetch,
        sampler=requests,  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=_unchanged,
        num_workers=workers,
        worker_init_fn=partial(_start_worker, started),
        pin_memory=pin_memory,
        # The loader draws a number when it starts; from a generator of its own, or it would change dropout's.
        generator=torch.Generator().manual_seed(seed),
    )


def _unchanged(batch: Any) -> Any:
    return batch


def _start_worker(started: Any, worker: int) -> None:
    gc.enable()  # the rank may collect at its own steps, which a worker does not have
    ignore_stop_signals()
    # It holds its rank's sockets as well: while it lived, no other rank would notice that this one is dead.
    die_with_parent(signal.SIGKILL)
    started.release()
