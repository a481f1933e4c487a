"""Whether torch can use this machine's GPUs: ranks would otherwise train on the CPU.

Docs: docs/launching.md
"""

import os
import re
from pathlib import Path

import torch

from dist_amp.errors import ConfigError, first_line

# CUDA's major version -> the first driver branch for it. Source: NVIDIA, CUDA compatibility, minor
# version compatibility, table 1 (CUDA 11.x, 12.x and 13.x).
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}

# Values of CUDA_VISIBLE_DEVICES that hide all GPUs from a process.
HIDDEN = ("", "-1", "NoDevFiles")

# The only builds with code for GPUs before Turing. Source: PyTorch's CUDA support matrix, releases
# 2.11 to 2.14.
FOR_OLDER_GPUS = "torch 2.11 to 2.14 built for CUDA 12.6 has code for sm_50 to sm_90 (pytorch.org)"


def check_gpus_are_used(root: Path = Path("/"), device: str = "auto") -> None:
    """Errors: ConfigError if there are device files of GPUs; call it if torch finds none."""
    reason = why_unused(root)
    if reason and device == "cuda":
        raise ConfigError(f"run.device=cuda, but {reason}; use run.device=cpu")
    if reason:
        raise ConfigError(f"run.device=auto: {reason}; or train on the CPU with --run.device cpu")


def why_unused(root: Path = Path("/")) -> str:
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
    what = "this machine has 1 NVIDIA GPU, "
    if count > 1:
        what = f"this machine has {count} NVIDIA GPUs, "
    if torch.version.cuda is None:
        return (
            f"{what}and torch {torch.__version__} is a build for the CPU alone; install one for "
            "CUDA (pytorch.org)"
        )
    driver = driver_branch(root)
    oldest = OLDEST_DRIVER.get(int(torch.version.cuda.split(".")[0]), 0)
    if 0 < driver < oldest:
        running = [cuda for cuda, first in OLDEST_DRIVER.items() if first <= driver]
        newest = max(running, default=min(OLDEST_DRIVER))
        return (
            f"{what}and their driver {driver} is too old for torch {torch.__version__}, built for "
            f"CUDA {torch.version.cuda}; install driver {oldest} or newer, or torch built for CUDA "
            f"{newest}.x (pytorch.org)"
        )
    problem = "it finds no device"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        problem = first_line(error)
    return (
        f"{what}but CUDA can't be used ({problem}); check that `nvidia-smi` works, and "
        "reinstall the driver if not"
    )


def driver_branch(root: Path = Path("/")) -> int:
    """The first number of the NVIDIA driver's version, such as 580; 0 if it can't be read."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return 0
    version = re.search(r"Kernel Module.*?\s(\d+)\.\d+", text)
    if version is None:
        return 0
    return int(version[1])


def check_architecture(device: torch.device) -> None:
    """Errors: ConfigError if this build of torch has no code for the GPU."""
    built = torch.cuda.get_arch_list()
    if torch.version.hip or not built:
        return
    major, minor = torch.cuda.get_device_capability(device)
    if any(runs_on(architecture, major, minor) for architecture in built):
        return
    fix = "install a newer torch, or one built for a newer CUDA (pytorch.org)"
    if (major, minor) < min(capability(architecture)[:2] for architecture in built):
        fix = FOR_OLDER_GPUS
    raise ConfigError(
        f"{torch.cuda.get_device_name(device)} is sm_{major}{minor}, and torch {torch.__version__} "
        f"(CUDA {torch.version.cuda}) was built for {', '.join(built)}; {fix}; or train on the CPU "
        "with --run.device cpu"
    )


def capability(architecture: str) -> tuple[int, int, str]:
    """sm_90a -> (9, 0, "a"): "a" only for this GPU, "f" for its family (NVIDIA's nvcc manual)."""
    number, letter = re.fullmatch(r"(?:sm|compute)_(\d+)([a-z]?)", architecture).groups()  # type: ignore[union-attr]
    return int(number) // 10, int(number) % 10, letter


def runs_on(architecture: str, major: int, minor: int) -> bool:
    """Whether code runs on a GPU: sm within a major version, PTX upwards (CUDA's guide)."""
    built_major, built_minor, letter = capability(architecture)
    if letter == "a":
        return (built_major, built_minor) == (major, minor)
    if architecture.startswith("compute") and not letter:
        return (built_major, built_minor) <= (major, minor)
    return built_major == major and built_minor <= minor
