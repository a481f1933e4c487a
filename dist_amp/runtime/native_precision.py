"""Which precision this machine computes natively: measured on a CPU, known from the compute capability of a GPU."""

import os
import time
from collections.abc import Mapping, Sequence
from functools import cache

import torch

from dist_amp.config.sources import collect
from dist_amp.errors import ConfigError

# (native from, works from): CUDA compute capabilities. Source: CUDA C++ programming guide, arithmetic instructions.
# Between the two, arithmetic is emulated or runs at a fraction of float32's rate.
CAPABILITY = {"bf16": ((8, 0), (5, 3)), "fp16": ((7, 0), (5, 3))}

# Measured on an AVX-512 CPU with torch 2.13: native bf16 takes 0.7 to 1.0 times float32's time, bf16 by AVX-512 without
# its bf16 instructions 3.1, bf16 by AVX2 27 to 33, emulated fp16 14 to 25.
EMULATED = 2.0

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SIZE, _REPEATS = 128, 5


@cache
def cpu_slowdown(dtype: str) -> float:
    """How many times as long as in float32 a matrix product takes on this CPU; EMULATED or more: not native.

    Timed, because a CPU's flags do not say what the libraries make of them: oneDNN says that it supports bf16 wherever
    there is AVX-512. On one thread and by the thread's own clock, so that other processes do not count: 10 to 40 ms,
    once per process.
    """
    generator = torch.Generator().manual_seed(0)  # leaves the process's random state alone
    matrix = torch.randn(_SIZE, _SIZE, generator=generator)
    halved, threads = matrix.to(_HALF[dtype]), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            seconds = [(_seconds(matrix), _seconds(halved)) for _ in range(1 + _REPEATS)][1:]  # the first warms up
    finally:
        torch.set_num_threads(threads)
    full, half = map(min, zip(*seconds, strict=True))
    return half / full


def _seconds(matrix: torch.Tensor) -> float:
    began = time.thread_time()
    matrix @ matrix
    return time.thread_time() - began


def native_precision() -> tuple[str, str]:
    """("bf16", "fp16" or "fp32", why): the first of them that the first GPU, or else the CPU, computes natively."""
    if not torch.cuda.is_available():
        slowdown = cpu_slowdown("bf16")
        if slowdown < EMULATED:
            return "bf16", "native on this CPU"
        return "fp32", f"this CPU only emulates bf16 ({slowdown:.0f}x slower)"
    if torch.version.hip:
        return "bf16", "native on ROCm's GPUs"
    capability = torch.cuda.get_device_capability()
    dtype = next((dtype for dtype, (native, _) in CAPABILITY.items() if capability >= native), "fp32")
    return dtype, "native on GPUs of compute capability {}.{}".format(*capability)


def suggestion(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> str:
    """The native precision and the reason, as `fp32 this CPU only emulates bf16 (30x slower)`, for launch/demo.sh.

    argv: arguments of dist_amp.train. "" where they, their config files or the environment set anything in [precision].
    """
    try:
        keys = collect(argv, environ)
    except ConfigError:
        return ""  # dist_amp.train reports it
    chosen = any(key == "use_amp" or key.startswith("precision.") for key in keys)
    return "" if chosen else " ".join(native_precision())
