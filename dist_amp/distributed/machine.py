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

# Values of CUDA_VISIBLE_DEVICES that hide all GPUs from a process.
HIDDEN = ("", "-1", "NoDevFiles")

# (native from, works from): CUDA compute capabilities. Source: CUDA C++ programming guide,
# arithmetic instructions. Between the two, arithmetic is emulated or runs at a fraction of
# float32's rate.
CAPABILITY = {"bf16": ((8, 0), (5, 3)), "fp16": ((7, 0), (5, 3))}

# Measured on an AVX-512 CPU with torch 2.13: native bf16 takes 0.7 to 1.0 times float32's time,
# bf16 by AVX-512 without its bf16 instructions 3.1, bf16 by AVX2 27 to 33, emulated fp16 14 to 25.
EMULATED = 2.0

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
SIZE, REPEATS = 128, 5  # of the matrix products that are timed


# ---- GPUs ----


def check_gpus_are_used(root: Path = Path("/"), device: str = "auto") -> None:
    """Errors: ConfigError if there are device files of GPUs; call it if torch finds none."""
    reason = reason_unused(root)
    if reason and device == "cuda":
        raise ConfigError(f"run.device=cuda, but {reason}; use run.device=cpu")
    if reason:
        raise ConfigError(f"run.device=auto: {reason}; or train on the CPU with --run.device cpu")


def reason_unused(root: Path = Path("/")) -> str:
    """Why torch does not use this machine's GPUs, and what to install; "" if there are none."""
    shown = (os.environ.get(f"{vendor}_VISIBLE_DEVICES") for vendor in ("CUDA", "HIP"))
    if any(devices in HIDDEN for devices in shown):
        return ""
    if torch.version.hip:
        if not (root / "dev/kfd").exists():
            return ""
        return (
            "this machine has an AMD GPU that ROCm does not find; add the user to the groups "
            "render and video"
        )
    count = len(list((root / "dev").glob("nvidia[0-9]*")))
    if not count:
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


def support(dtype: str, capability: tuple[int, int]) -> str:
    """How a GPU of this compute capability computes in a dtype: native, emulated or none."""
    native, works = CAPABILITY[dtype]
    if torch.version.hip or capability >= native:  # ROCm's GPUs compute in both
        return "native"
    return "emulated" if capability >= works else "none"


def check_dtype(dtype: str, device: torch.device) -> str:
    """What to warn of where the device only emulates a dtype, or "".

    Errors: ConfigError for a GPU that can't compute in it at all.
    """
    if device.type == "cpu":
        slowdown = cpu_slowdown(dtype)
        if slowdown < EMULATED:
            return ""
        return (
            f"this CPU only emulates {dtype}: a matrix product takes {slowdown:.0f} times as long "
            "as in float32; use --use_amp false"
        )
    capability = torch.cuda.get_device_capability(device)
    kind = support(dtype, capability)
    name = torch.cuda.get_device_name(device)
    where = "{} (compute capability {}.{})".format(name, *capability)
    if kind == "none":
        usable = [other for other in CAPABILITY if support(other, capability) != "none"]
        instead = "--use_amp false"
        if usable:
            instead = f"precision.dtype={' or '.join(usable)}, or {instead}"
        raise ConfigError(f"precision.dtype={dtype}: {where} does not support it; use {instead}")
    if kind == "native":
        return ""
    instead = "--use_amp false"
    if support("fp16", capability) == "native":
        instead = "--precision.dtype fp16"
    return f"{where} only emulates {dtype}, which is slower than float32; use {instead}"


def native_precision(device_type: str) -> tuple[str, str]:
    """("bf16", "fp16" or "float32", why): the first that the CPU, or the GPU, has natively."""
    if device_type == "cpu":
        slowdown = cpu_slowdown("bf16")
        if slowdown < EMULATED:
            return "bf16", "native on this CPU"
        return "float32", f"this CPU only emulates bf16 ({slowdown:.0f} times slower)"
    if torch.version.hip:
        return "bf16", "native on ROCm's GPUs"
    capability = torch.cuda.get_device_capability()
    native = [dtype for dtype in CAPABILITY if support(dtype, capability) == "native"]
    why = "native on GPUs of compute capability {}.{}".format(*capability)
    return [*native, "float32"][0], why
