"""This process: its rank and device, logging, determinism, TF32 and random generators."""

import ctypes
import json
import logging
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from dist_amp.errors import ConfigError, masked
from dist_amp.files import present
from dist_amp.settings import RunConfig

T = TypeVar("T")

LAUNCHER = "DIST_AMP_LAUNCHER"  # environment variable of ranks: the launcher's process id


def environment_number(name: str, default: int) -> int:
    """A non-negative integer from the environment. Raises ConfigError for anything else."""
    text = os.environ.get(name, str(default))
    if not text.isdigit():
        raise ConfigError(
            f"{name}={text!r} in the environment is not a whole number; start with torchrun, or "
            "unset it"
        )
    return int(text)


def cpu_cores() -> int:
    return len(os.sched_getaffinity(0))


def attempt() -> int:
    """How many times torchrun has restarted the ranks; 0 in the first attempt."""
    return environment_number("TORCHELASTIC_RESTART_COUNT", 0)


def tell_launcher(status: int, text: str = "", **facts: object) -> None:
    """Write this rank's exit status and error to torchrun's error file, if torchrun started it.

    torchrun prints `text`; `dist_amp launch` reads the rest, since a signal hides exit statuses.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"timestamp": str(int(time.time())), "status": status, **facts}
        # Rename the complete file: torchrun fails on one that a killed rank has half written.
        temporary = Path(f"{path}.tmp")
        temporary.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
        temporary.replace(path)


def has_any_rank_reported() -> bool:
    """Whether a rank on this machine has ended by itself, so that its launcher ends the others."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return path is not None and any(Path(path).parent.parent.glob("*/error.json"))


def place_of(config: RunConfig) -> tuple[int, int, int, int, torch.device]:
    """This process's (rank, local_rank, world_size, local_world_size, device)."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGTERM)  # if torchrun is killed, stop as after any SIGTERM
    rank, world_size = _rank_and_world_size()
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    if config.device != "cpu" and not gpus and present("distributed.machine"):
        from dist_amp.distributed.machine import check_gpus_are_used

        check_gpus_are_used(device=config.device)
    if config.device == "cuda" and not gpus:
        raise ConfigError("run.device=cuda, but torch finds no GPU; use run.device=cpu")
    # Not every launcher says how many ranks a machine has. If not, assume one per GPU.
    local_world_size = environment_number("LOCAL_WORLD_SIZE", min(world_size, gpus or world_size))
    local_rank = environment_number("LOCAL_RANK", rank % local_world_size)
    if not gpus:
        return rank, local_rank, world_size, local_world_size, torch.device("cpu")
    # Some launchers make only its own GPU visible to each process; torchrun makes all visible.
    has_own_gpu = gpus == 1 and "TORCHELASTIC_RUN_ID" not in os.environ
    if local_world_size > gpus and not has_own_gpu:
        raise ConfigError(
            f"{local_world_size} processes on this machine (nproc_per_node) are more than its "
            f"{gpus} GPUs; use --nproc_per_node={gpus}, or --run.device cpu"
        )
    device = torch.device("cuda", local_rank % gpus)
    return rank, local_rank, world_size, local_world_size, device


def _rank_and_world_size() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    missing = {"RANK", "WORLD_SIZE"} - os.environ.keys()
    if len(missing) == 1:
        raise ConfigError(
            f"of RANK and WORLD_SIZE, {missing.pop()} is not set; start with torchrun, or set both"
        )
    if "WORLD_SIZE" not in os.environ:
        from dist_amp.distributed.launchers import refuse_copies

        refuse_copies()
    rank = environment_number("RANK", 0)
    world_size = environment_number("WORLD_SIZE", 1)
    if rank >= world_size:
        raise ConfigError(f"RANK={rank} must be below WORLD_SIZE={world_size}; start with torchrun")
    return rank, world_size


def configure_logging(rank: int) -> None:
    """Print the messages of the logger "dist_amp" on rank 0; on other ranks only errors."""
    logger = logging.getLogger("dist_amp")
    logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        handler.addFilter(_without_secrets)
        logger.addHandler(handler)


def _without_secrets(record: logging.LogRecord) -> bool:
    record.msg = masked(record.getMessage())
    record.args = ()
    return True


def warn(text: str) -> None:
    """Print a warning; on rank 0 only, once `configure_logging` has been called."""
    if logging.getLogger("dist_amp").isEnabledFor(logging.WARNING):
        print(f"warning: {masked(text)}", file=sys.stderr, flush=True)


def hide_progress_bars() -> None:
    hidden = os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1") == "1"
    if hidden and "datasets" in sys.modules:
        sys.modules["datasets"].disable_progress_bars()


def set_determinism(on: bool) -> None:
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    if torch.are_deterministic_algorithms_enabled() != on:  # the call imports torch's compiler
        torch.use_deterministic_algorithms(on)


def set_tf32(on: bool) -> None:
    """Use TF32 or float32 for both matmuls and convolutions on CUDA; torch's defaults differ."""
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


def die_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this signal when the parent process ends, even if killed: prctl(2)."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch, including the GPU's."""
    seed_host(seed)
    torch.manual_seed(seed)


def seed_host(seed: int) -> None:
    """Seed all but the GPU's, for which torch.manual_seed takes 0.1 ms more (measured)."""
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


def in_time(seconds: float, call: Callable[[], T]) -> T:
    """Run call() in a thread, and wait at most `seconds`. Raises its errors, or TimeoutError."""
    return in_thread(call).result(seconds)


def in_thread(call: Callable[[], T], name: str | None = None) -> "Future[T]":
    """Run call() in a daemon thread. Python's exit would wait for a ThreadPoolExecutor's thread."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome
