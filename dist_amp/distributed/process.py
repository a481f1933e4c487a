"""Settings of this process: logging, determinism, TF32, the state of its random generators."""

import logging
import math
import os
import random
import select
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor

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
    """Use TF32 or true float32 on CUDA, for matmuls and convolutions (torch's defaults differ)."""
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch, the GPU's included."""
    seed_host(seed)
    torch.manual_seed(seed)


def seed_host(seed: int) -> None:
    """All but the GPU's, for which torch.manual_seed formats the stack, in 0.1 ms (measured)."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # noqa: NPY002 (a task may draw from the global generator)
    torch.default_generator.manual_seed(seed)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of the generators of Python, NumPy, torch and the device, as tensors."""
    _, numbers, gauss = random.getstate()
    numpy_state: Any = numpy.random.get_state(legacy=True)  # noqa: NPY002
    _, keys, position, has_gauss, cached = numpy_state
    state = {
        "python": torch.tensor(numbers),
        "python_gauss": torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
        "numpy": torch.from_numpy(keys.astype(numpy.int64)),
        "numpy_gauss": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore what `random_state` returned."""
    gauss: Any = state["python_gauss"].item()
    if math.isnan(gauss):
        gauss = None
    numbers = tuple(state["python"].tolist())
    random.setstate((3, numbers, gauss))
    position, has_gauss, cached = state["numpy_gauss"].tolist()
    keys = state["numpy"].numpy().astype(numpy.uint32)
    numpy.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def quiet_on_closed_pipe() -> Iterator[None]:
    """End with status 1 and no traceback once nobody reads the output, as in `--help | head -3`."""
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
        # The interpreter flushes once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


@contextmanager
def without_stderr() -> Iterator[None]:
    """Discard what is written to standard error in the block, by C++ too."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
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
