"""Settings of this process: signals, logging, determinism, death with its parent."""

import ctypes
import logging
import os
import signal
import sys

import torch

from dist_amp.runtime.environment import environment_number

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def configure_logging(rank: int) -> None:
    """Tasks log to "dist_amp..."; rank 0 shows it. The datasets library's bars are for one rank on a terminal."""
    if rank != 0 or not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    logger = logging.getLogger("dist_amp")
    logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)


def set_determinism(on: bool) -> None:
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(on)


def ignore_stop_signals() -> None:
    """For loader workers: the signal is for the rank, which still needs them until its checkpoint is written."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def die_with_parent(number: signal.Signals) -> None:
    """Get this signal when the parent process ends, however it does; Linux alone can. Source: prctl(2)."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def attempt() -> int:
    """How often torchrun has started these processes again."""
    return environment_number("TORCHELASTIC_RESTART_COUNT", 0)


def set_tf32(on: bool) -> None:
    """CUDA's float32 products: TF32 or true float32, in matmuls and convolutions alike (torch's defaults differ)."""
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on
