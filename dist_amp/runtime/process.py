"""Settings of this process: logging, determinism, TF32, and which signals it gets."""

import ctypes
import logging
import os
import resource
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from dist_amp.errors import ConfigError
from dist_amp.runtime.environment import environment_number

# Open files besides gloo's sockets: libraries, loader workers' pipes, TensorBoard, a checkpoint's shards. Measured for
# two ranks on the CPU: 18, and 7 per loader worker. Assumed: a GPU and NCCL's own sockets add no more than 100.
OTHER_FILES = 200

LAUNCHER = "DIST_AMP_LAUNCHER"  # in the environment of ranks: the process id of `dist_amp launch`

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def configure_logging(rank: int) -> None:
    """Show the log of "dist_amp" and its children on rank 0 only; progress bars only on rank 0's terminal."""
    if rank != 0 or not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    logger = logging.getLogger("dist_amp")
    logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)


def set_determinism(on: bool) -> None:
    """Use deterministic kernels, or allow others again."""
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(on)


def set_tf32(on: bool) -> None:
    """Use TF32 or true float32 on CUDA, for both matmuls and convolutions (torch's defaults differ)."""
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


@contextmanager
def quiet_on_closed_pipe() -> Iterator[None]:
    """End with status 1, and no traceback, once nobody reads the output any more, as in `--help | head -3`.

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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its exit
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


def ignore_stop_signals() -> None:
    """For loader workers: their rank handles the signal, and needs them until its checkpoint is written."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def die_with_parent(number: signal.Signals) -> None:
    """Get this signal when the parent process ends, however it ends; Linux only. Source: prctl(2)."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def raise_open_files(world_size: int) -> None:
    """Let this process open as many files as it may. Errors: ConfigError if so many ranks need more of them.

    Each of the three gloo groups connects every rank to every other one: 3 x (ranks - 1) sockets.
    """
    if world_size == 1:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    if soft != hard:
        with suppress(ValueError, OSError):  # macOS refuses more than its kernel's own limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    sockets = 3 * (world_size - 1)
    if not unlimited and soft < sockets + OTHER_FILES:
        raise ConfigError(
            f"{world_size} ranks need {sockets} sockets and {OTHER_FILES} other open files per process, and the limit "
            f"is {soft}; raise it: ulimit -Hn {sockets + OTHER_FILES} before the launch, LimitNOFILE= of the service, "
            f"docker run --ulimit nofile={sockets + OTHER_FILES}"
        )


def attempt() -> int:
    """How many times torchrun has restarted these processes."""
    return environment_number("TORCHELASTIC_RESTART_COUNT", 0)
