"""What a report says of where it was made: the machine, its GPU, and the versions of what ran there."""

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

MISSING = "not installed"


def about(device: torch.device, *packages: str) -> dict[str, Any]:
    """{"machine": the host's facts and the device's, "versions": of Python, torch and these packages}."""
    return {"machine": machine() | gpu(device), "versions": versions(*packages)}


def machine() -> dict[str, Any]:
    model = next(
        (text.split(":", 1)[1].strip() for text in _lines("/proc/cpuinfo") if text.startswith("model name")),
        platform.processor(),
    )
    return {"cpu": model, "cores": os.cpu_count(), "platform": platform.platform(), "load": os.getloadavg()}


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:  # no /proc outside Linux
        return []


def gpu(device: torch.device) -> dict[str, Any]:
    """The GPU, its driver and its limits; empty on a CPU."""
    if device.type != "cuda":
        return {}
    properties = torch.cuda.get_device_properties(device)
    asked = ("driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit")
    return {
        "gpu": torch.cuda.get_device_name(device),
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda or f"HIP {torch.version.hip}",
        "nvidia_smi": nvidia_smi(device, *asked),
    }


def clocks(device: torch.device) -> dict[str, str]:
    """What the GPU runs at; empty on a CPU."""
    asked = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
    return nvidia_smi(device, *asked) if device.type == "cuda" else {}


def nvidia_smi(device: torch.device, *names: str) -> dict[str, str]:
    """{name: value} of one GPU; empty where the program is not there, or does not answer."""
    with suppress(OSError, subprocess.SubprocessError, AttributeError):
        number = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", f"--id={number}"]
        line = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
        return dict(zip(names, (value.strip() for value in line.split(",")), strict=False))
    return {}


def versions(*packages: str) -> dict[str, str]:
    """Of Python, torch and these packages; `MISSING` for one that is not installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = MISSING
    return found
