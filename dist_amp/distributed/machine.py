"""The hardware of this machine: its GPUs, and the precisions that it computes natively.

Docs: docs/launching.md
"""

import os
import re
from contextlib import suppress
from pathlib import Path

import torch

from dist_amp.errors import ConfigError, first_line

# The lowest compute capability that computes in a dtype natively; a lower one emulates it, or has a
# fraction of float32's rate. Source: CUDA C++ programming guide, arithmetic instructions.
CAPABILITY = {"bf16": (8, 0), "fp16": (7, 0)}

# Flags of CPUs that compute in a dtype natively, on x86 and Arm. Measured with torch 2.13: with
# them bf16 takes 0.7 to 1.0 times as long as float32; without, 3 (AVX-512) or 30 times (AVX2).
FLAGS = {"bf16": {"avx512_bf16", "amx_bf16", "bf16"}, "fp16": {"avx512_fp16", "amx_fp16"}}


# ---- GPUs ----


def check_gpus_are_used(device: str = "auto") -> None:
    """For when torch finds no GPU. Raises ConfigError if the machine has NVIDIA GPUs."""
    if reason := reason_unused():
        instead = "use run.device=cpu to train on the CPU"
        raise ConfigError(f"run.device={device}: {reason}; or {instead}")


def reason_unused(root: Path = Path("/")) -> str:
    """Why torch does not use this machine's GPUs, and what to install; "" if there are none."""
    count = len(list((root / "dev").glob("nvidia[0-9]*")))
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1", "NoDevFiles")
    if not count or is_hidden or torch.version.hip:
        return ""
    problem = "it is a build for CPUs only"
    if torch.version.cuda is not None:
        driver = driver_branch(root) or "unknown"
        problem = f"it is built for CUDA {torch.version.cuda}, and the driver is {driver}"
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:  # such as a driver that is too old
            problem += f": {first_line(error)}"
    return (
        f"this machine has {count} NVIDIA GPUs that torch {torch.__version__} can't use ({problem})"
        "; check that `nvidia-smi` works, and install a newer driver or another build of torch "
        "(pytorch.org)"
    )


def driver_branch(root: Path = Path("/")) -> int:
    """The first number of the NVIDIA driver's version, such as 580; 0 if it can't be read."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return 0
    version = re.search(r"Kernel Module.*?\s(\d+)\.\d+", text)
    return int(version[1]) if version else 0


# ---- precisions ----


def is_native(dtype: str, device: torch.device, root: Path = Path("/")) -> bool:
    """Whether the device computes in bf16 or fp16 natively; True for all ROCm GPUs."""
    if device.type == "cuda":
        is_rocm = torch.version.hip is not None
        return is_rocm or torch.cuda.get_device_capability(device) >= CAPABILITY[dtype]
    with suppress(OSError):  # the file exists on Linux only
        return not FLAGS[dtype].isdisjoint((root / "proc/cpuinfo").read_text().split())
    return False


def check_dtype(dtype: str, device: torch.device) -> str:
    """A warning if the device only emulates the dtype; else ""."""
    if is_native(dtype, device):
        return ""
    instead = "--use_amp false"
    if device.type == "cuda" and is_native("fp16", device):
        instead = "--precision.dtype fp16"
    return f"{name_of(device)} only emulates {dtype}, which is slower than float32; use {instead}"


def name_of(device: torch.device) -> str:
    return "this CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)


def wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
