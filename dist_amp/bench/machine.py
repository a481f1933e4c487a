"""Where a report was made: the machine, its GPU, and the versions of the packages that ran there."""

import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

MISSING = "not installed"


def about(device: torch.device, *packages: str) -> dict[str, Any]:
    """{"machine": facts about the host and the device, "versions": of Python, torch and these packages}."""
    machine: dict[str, Any] = {"cpu": platform.processor(), "cores": os.cpu_count(), "load": os.getloadavg()}
    with suppress(OSError, StopIteration):  # /proc is on Linux only
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        machine["cpu"] = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    machine["platform"] = platform.platform()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine |= {"gpu": properties.name, "memory_bytes": properties.total_memory}
        machine |= {
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda or f"HIP {torch.version.hip}",
        }
        machine["nvidia_smi"] = nvidia_smi(device, "driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit")
    versions = {"python": platform.python_version(), "torch": torch.__version__, **dict.fromkeys(packages, MISSING)}
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {"machine": machine, "versions": versions}


def nvidia_smi(device: torch.device, *names: str) -> dict[str, str]:
    """{name: value} of a GPU; empty on a CPU, and where nvidia-smi is missing or does not answer."""
    with suppress(OSError, subprocess.SubprocessError, AttributeError):
        if device.type == "cuda":
            number = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", f"--id={number}"]
            line = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
            return dict(zip(names, map(str.strip, line.split(",")), strict=False))
    return {}


def machine_line(report: Mapping[str, Any]) -> str:
    """The GPU and its limits, the host, and the versions of installed packages, of a report with `about`."""
    machine = report["machine"]
    facts = [machine.get("gpu", ""), f"CUDA {machine['cuda']}" if "cuda" in machine else ""]
    facts += [f"{name} {value}" for name, value in machine.get("nvidia_smi", {}).items()]
    facts += [f"{machine['cpu']}, {machine['cores']} cores"]
    facts += [f"{name} {number}" for name, number in report["versions"].items() if number != MISSING]
    return ", ".join(filter(None, facts))
