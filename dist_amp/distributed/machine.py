"""What this machine can train on: its GPUs, and the precisions that it computes natively.

A run refuses or warns by it at its start, and `doctor` shows it. A GPU's precisions are looked up;
a CPU's are measured.

Docs: docs/launching.md
"""

import os
import re
import time
from functools import cache
from pathlib import Path

import torch

from dist_amp.errors import ConfigError, first_line

# The compute capability of GPUs from which on a dtype is native; before, arithmetic is emulated or
# runs at a fraction of float32's rate. Source: CUDA C++ programming guide, arithmetic instructions.
CAPABILITY = {"bf16": (8, 0), "fp16": (7, 0)}

# Measured on an AVX-512 CPU with torch 2.13: native bf16 takes 0.7 to 1.0 times float32's time,
# bf16 by AVX-512 without its bf16 instructions 3.1, bf16 by AVX2 27 to 33, emulated fp16 14 to 25.
EMULATED = 2.0

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
SIZE, REPEATS = 128, 5  # of the matrix products that are timed


# ---- GPUs ----


def check_gpus_are_used(root: Path = Path("/"), device: str = "auto") -> None:
    """Errors: ConfigError if there are device files of GPUs; call it if torch finds none."""
    if reason := reason_unused(root):
        instead = "use run.device=cpu to train on the CPU"
        raise ConfigError(f"run.device={device}: {reason}; or {instead}")


def reason_unused(root: Path = Path("/")) -> str:
    """Why torch does not use this machine's GPUs, and what to install; "" if there are none."""
    count = len(list((root / "dev").glob("nvidia[0-9]*")))
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1", "NoDevFiles")
    if not count or is_hidden or torch.version.hip:
        return ""
    what = f"this machine has {count} NVIDIA GPU{'s' if count > 1 else ''}"
    if torch.version.cuda is None:
        return (
            f"{what}, and torch {torch.__version__} is a build for the CPU alone; install one for "
            "CUDA (pytorch.org)"
        )
    problem = "it finds no device"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # such as a driver that is too old
        problem = first_line(error)
    return (
        f"{what}, but torch {torch.__version__} can't use CUDA {torch.version.cuda} with driver "
        f"{driver_branch(root) or 'unknown'} ({problem}); check that `nvidia-smi` works, and "
        "install a newer driver, or torch built for an older CUDA (pytorch.org)"
    )


def driver_branch(root: Path = Path("/")) -> int:
    """The first number of the NVIDIA driver's version, such as 580; 0 if it can't be read."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return 0
    version = re.search(r"Kernel Module.*?\s(\d+)\.\d+", text)
    return int(version[1]) if version else 0


def check_kernels(device: torch.device) -> None:
    """Run a kernel. Errors: ConfigError if this build of torch has none for the GPU."""
    try:
        torch.ones(1, device=device).add_(1).item()
    except RuntimeError as error:
        if "no kernel image" not in str(error):
            raise
        capability = "{}{}".format(*torch.cuda.get_device_capability(device))
        raise ConfigError(
            f"{torch.cuda.get_device_name(device)} is sm_{capability}, and torch "
            f"{torch.__version__} (CUDA {torch.version.cuda}) was built for "
            f"{', '.join(torch.cuda.get_arch_list())}; install a build that has it (pytorch.org): "
            "a newer one, or for GPUs before Turing torch 2.11 to 2.14 for CUDA 12.6; or train on "
            "the CPU with --run.device cpu"
        ) from error


# ---- precisions ----


@cache
def cpu_slowdown(dtype: str) -> float:
    """A matrix product's time on this CPU over float32's; EMULATED or more: not native.

    Timed, in 10 to 40 ms, since oneDNN claims bf16 wherever there is AVX-512.
    """
    generator = torch.Generator().manual_seed(0)  # leaves the process's random state alone
    matrix = torch.randn(SIZE, SIZE, generator=generator)
    halved = matrix.to(HALF[dtype])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            seconds = [(_seconds(matrix), _seconds(halved)) for _ in range(1 + REPEATS)]
    finally:
        torch.set_num_threads(threads)
    full, half = map(min, zip(*seconds[1:], strict=True))  # the first warms up
    return half / full


def _seconds(matrix: torch.Tensor) -> float:
    began = time.thread_time()
    matrix @ matrix
    return time.thread_time() - began


def is_native(dtype: str, capability: tuple[int, int]) -> bool:
    """Whether a GPU of this compute capability computes in a dtype; ROCm's compute in both."""
    return torch.version.hip is not None or capability >= CAPABILITY[dtype]


def check_dtype(dtype: str, device: torch.device) -> str:
    """What to warn of where the device only emulates a dtype, or ""."""
    if device.type == "cpu":
        slowdown = cpu_slowdown(dtype)
        if slowdown < EMULATED:
            return ""
        return (
            f"this CPU only emulates {dtype}: a matrix product takes {slowdown:.0f} times as long "
            "as in float32; use --use_amp false"
        )
    capability = torch.cuda.get_device_capability(device)
    if is_native(dtype, capability):
        return ""
    instead = "--precision.dtype fp16" if is_native("fp16", capability) else "--use_amp false"
    name = torch.cuda.get_device_name(device)
    return f"{name} only emulates {dtype}, which is slower than float32; use {instead}"


def native_precision(device_type: str) -> tuple[str, str]:
    """("bf16", "fp16" or "float32", why): the first that the CPU, or the GPU, has natively."""
    if device_type == "cpu":
        slowdown = cpu_slowdown("bf16")
        if slowdown < EMULATED:
            return "bf16", "native on this CPU"
        return "float32", f"this CPU only emulates bf16 ({slowdown:.0f} times slower)"
    capability = torch.cuda.get_device_capability()
    native = [dtype for dtype in CAPABILITY if is_native(dtype, capability)]
    return [*native, "float32"][0], f"native on {torch.cuda.get_device_name()}"
