"""Settings of this process: logging, determinism, TF32."""

import logging
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


def configure_logging(rank: int) -> None:
    """Show the log of "dist_amp" and its children on rank 0 only."""
    logger = logging.getLogger("dist_amp")
    logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)


def hide_progress_bars() -> None:
    """Switch off the bars of the `datasets` library, unless the user has set its variable."""
    hidden = os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1") == "1"
    if hidden and "datasets" in sys.modules:
        sys.modules["datasets"].disable_progress_bars()


def set_determinism(on: bool) -> None:
    """Use deterministic kernels, or allow others again."""
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(on)


def set_tf32(on: bool) -> None:
    """Use TF32 or true float32 on CUDA, for both matmuls and convolutions (torch's defaults
    differ).
    """
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


@contextmanager
def quiet_on_closed_pipe() -> Iterator[None]:
    """End with status 1, and no traceback, once nobody reads the output any more, as in `--help |
    head -3`.

    Errors: SystemExit.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        if not any(events & select.POLLERR for _, events in output.poll(0)):
            raise  # of another pipe
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # the interpreter flushes once more at its exit
        raise SystemExit(1) from None


@contextmanager
def without_stderr() -> Iterator[None]:
    """Discard what is written to standard error in the block, by C++ too."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def in_time(seconds: float, call: Callable[[], T]) -> T:
    """Run call() in a thread; return or raise what it does.

    Errors: TimeoutError after `seconds`; the thread continues in the background.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.result(seconds)
