"""The loader worker processes of a rank, run by torch's DataLoader.

Added here: workers that get stuck in their fork are started again. Workers ignore stop signals,
because the rank needs their batches until it has saved, and they die with their rank. A batch that
can't be sent ends its worker: Python would only print the error, and the rank would wait for ever.
"""

import faulthandler
import multiprocessing
import multiprocessing.queues
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader

from dist_amp.distributed.process import die_with_parent, in_thread
from dist_amp.distributed.signals import STOP_SIGNALS
from dist_amp.errors import DataError, first_line, in_one_line

# One fork in some thousands leaves a worker stuck before its first line: Python 3.11 takes a lock
# there, which another thread of the parent may have held during the fork.
START_SECONDS = 20.0
START_ATTEMPTS = 3


def start(
    fetch: Any, requests: Callable[[], Iterable[Any]], workers: int, pin_memory: bool, rank: int
) -> tuple[Iterator[Any], Callable[[], None]]:
    for _ in range(START_ATTEMPTS):
        # New requests for each attempt: a failed attempt has consumed the first ones.
        batches = _started(fetch, requests(), workers, pin_memory, rank)
        if batches is not None:
            return batches, partial(_shut_down, batches)
    raise DataError(
        f"rank {rank}: the loader workers do not start; use data.workers=0, or check the CPU load"
    )


def _started(fetch: Any, requests: Any, workers: int, pin_memory: bool, rank: int) -> Any:
    """The iterator of a DataLoader whose workers run; None if a worker is stuck in its fork.

    The start method is that of `multiprocessing`: fork; or spawn or forkserver (the default from
    Python 3.14 on), which pickle `fetch` and import the files of its classes again.
    """
    method = multiprocessing.get_start_method()
    fix = f"or use data.workers=0 in place of {workers}"
    multiprocessing.set_forkserver_preload(["__main__", __name__])  # import torch once
    started = multiprocessing.Semaphore(0)
    loader: DataLoader[Any] = DataLoader(
        fetch,
        batch_size=None,
        sampler=requests,
        collate_fn=_unchanged,
        num_workers=workers,
        pin_memory=pin_memory,
        # The loader draws a number when it starts; this keeps dropout's generator as it is.
        generator=torch.Generator(),
        worker_init_fn=partial(_start_worker, started),
    )
    # A fork server inherits this mask: a stop signal to all processes must not end it, and with it
    # the workers, before the rank has saved.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        batches: Any = iter(loader)
    except (PicklingError, AttributeError, TypeError) as error:
        raise DataError(
            f"rank {rank}: the start method {method} pickles the dataset and the task for loader "
            f"workers, and can't: {first_line(error)}; define classes and functions at the top "
            "level of a file and open files at the first read, or call "
            f"multiprocessing.set_start_method('fork') in that file, {fix}"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    processes = getattr(batches, "_workers", ())
    if method == "fork":
        if all(started.acquire(timeout=START_SECONDS) for _ in range(workers)):
            return batches
        _shut_down(batches)
        for process in processes:
            process.kill()  # a stuck worker does not notice the shutdown
        return None
    while workers:  # not yet running; without a limit, as imports may take long but don't hang
        try:
            workers -= started.acquire(timeout=1.0)
            is_alive = all(process.is_alive() for process in processes)
        except RuntimeError:  # raised by torch when a child of this process ends
            is_alive = False
        if not is_alive:
            raise DataError(
                f"rank {rank}: a loader worker ended as it started, see above; the start method "
                f"{method} imports the task, the dataset and the script again: define them in "
                "files, not in a notebook, put the script's code under if __name__ == '__main__':, "
                f"{fix}"
            )
    return batches


def _unchanged(batch: Any) -> Any:
    return batch


def _shut_down(batches: Any) -> None:
    """Let the workers end, and wait for them, by a private method of torch if it exists."""
    with suppress(RuntimeError):  # a worker has died already
        getattr(batches, "_shutdown_workers", lambda: None)()


def _start_worker(started: Any, worker: int) -> None:
    # Send tensors as torch does, which by itself would lose a tensor's conjugate and negative bits.
    ForkingPickler.register(Tensor, lambda t: reduce_tensor(t.resolve_conj().resolve_neg()))
    for number in STOP_SIGNALS:  # the rank needs its workers until it has saved
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    faulthandler.register(signal.SIGUSR2, file=2)  # the watchdog's request to print the stack
    # A worker shares its rank's sockets: if it outlived the rank, the rank would seem alive.
    die_with_parent(signal.SIGKILL)
    rank: Any = multiprocessing.parent_process()
    if rank.pid != os.getppid():  # the parent is a fork server: watch the rank in a thread
        in_thread(lambda: (rank.join(), os._exit(1)))
    queue: Any = multiprocessing.queues.Queue
    queue._on_queue_feeder_error = staticmethod(lambda error, batch: _end_worker(error))
    sys.excepthook = lambda kind, error, trace: _end_worker(error)
    started.release()


def _end_worker(error: BaseException) -> NoReturn:
    print(
        f"loader worker: a batch can't be sent: {in_one_line(error)}", file=sys.stderr, flush=True
    )
    os._exit(getattr(error, "errno", None) or 1)
