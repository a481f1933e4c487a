"""Health of this rank's GPU and host, at log steps: clocks, power, temperature, errors, memory.

A thread reads the GPU through NVML (nvidia-ml-py), because a call may never return if the GPU is
lost (assumed). The values read at one log step are written with the metrics of the next.

Docs: docs/metrics.md
"""

import platform
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dist_amp.telemetry.metrics import Metrics, resident_bytes
from dist_amp.telemetry.observer import Observer
from dist_amp.telemetry.step_report import LogRow, Tags

GIB = 2**30
# Bits of the reasons for reduced clocks. Source: NVML API reference, nvmlClocksEventReasons. Left
# out: idle, clocks set by the user, synchronised boost, display. POWER_CAP, the power limit, is
# normal for a busy GPU and no fault.
POWER_CAP = 0x4
THROTTLED = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "external power brake",
}
EXIT_SECONDS = 1.0  # how long the end of the run waits for the last reading

# {tag: function that reads its value, from the module pynvml and the handle of a GPU}
READINGS: dict[str, Callable[[Any, Any], float]] = {
    "gpu/sm_clock_MHz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "gpu/memory_clock_MHz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    "gpu/power_W": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "gpu/power_limit_W": lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    "gpu/temperature_C": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(
        gpu, nvml.NVML_TEMPERATURE_GPU
    ),
    "gpu/utilisation_pct": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "gpu/throttled": lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu),
    "gpu/ecc_uncorrected": lambda nvml, gpu: nvml.nvmlDeviceGetTotalEccErrors(
        gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    ),
}


class Health(Observer):
    """Adds this rank's gpu/*, host/* and memory/host_rss_GiB to the metrics."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._world = metrics.world
        self._gpu: Gpu | None = None
        if self._world.device.type == "cuda" and not torch.version.hip:  # AMD has no NVML
            self._gpu, problem = open_gpu(self._world.device)
            problems = [text for text in self._world.gather(problem) if text]
            if problems:
                ranks = f"{len(problems)} of {self._world.world_size} ranks"
                self._world.say(f"health no gpu/* tags: {problems[0]} ({ranks})")
        self._warned: set[str] = set()
        self._thread: threading.Thread | None = None
        self._reading: tuple[int, Tags] = (0, {})  # (step, tags) of the thread's last reading

    def tags(self, row: LogRow) -> Tags:
        """Return what was read at the last log step, and start a thread that reads for the next."""
        if self._thread is not None and self._thread.is_alive():  # it still waits for the driver
            return {}
        _, tags = self._reading
        self._thread = threading.Thread(target=self._read, args=(row.step,), daemon=True)
        self._thread.start()
        return tags

    def close(self, error: BaseException | None = None) -> None:
        if self._thread is not None:
            self._thread.join(EXIT_SECONDS)
            if not self._thread.is_alive():
                self._metrics.write_rank_scalars(*self._reading)

    def _read(self, step: int) -> None:
        tags = host_tags(with_machine=self._world.local_rank == 0)
        if self._gpu is not None:
            gpu_tags, warnings = self._gpu.tags()
            tags |= gpu_tags
            for text in warnings:
                if text not in self._warned:
                    self._warned.add(text)
                    where = f"rank {self._world.rank} ({platform.node()})"
                    print(f"warning: {where}, step {step}: {text}", file=sys.stderr, flush=True)
        self._reading = (step, tags)


def open_gpu(device: torch.device) -> tuple["Gpu | None", str]:
    """Returns (this rank's GPU, ""), or (None, the reason why it can't be read)."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        return Gpu(nvml, handle_of(nvml, torch.cuda.get_device_properties(device))), ""
    except ImportError:
        return None, "nvidia-ml-py is missing; pip install nvidia-ml-py"
    except Exception as error:
        # Such as: no NVML in the driver, no device in the container, another package named pynvml.
        return None, f"NVML failed ({type(error).__name__}: {error})"


def handle_of(nvml: Any, properties: Any) -> Any:
    """NVML's handle of a torch device, found by UUID: CUDA_VISIBLE_DEVICES reorders indices."""
    with suppress(nvml.NVMLError):
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
    return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{properties.uuid}")


class Gpu:
    def __init__(self, nvml: Any, handle: Any):
        self._nvml = nvml
        self._handle = handle
        self._at_start: Tags = {}  # only of the tags that this GPU and driver support
        for tag, read in READINGS.items():
            with suppress(AttributeError, nvml.NVMLError):
                self._at_start[tag] = read(nvml, handle)
        self._tags = list(self._at_start)

    def tags(self) -> tuple[Tags, list[str]]:
        """Returns (tags, warnings). Once a call fails, reads nothing more: the next may hang."""
        tags = {}
        warnings = []
        for tag in self._tags:
            try:
                tags[tag] = float(READINGS[tag](self._nvml, self._handle))
            except Exception as error:
                self._tags = []
                warnings.append(f"no more gpu/* tags: {tag} failed ({error})")
                break
        if "gpu/throttled" in tags:
            bits = int(tags["gpu/throttled"])
            reasons = [name for bit, name in THROTTLED.items() if bits & bit]
            tags["gpu/throttled"] = float(bool(reasons))
            tags["gpu/power_capped"] = float(bool(bits & POWER_CAP))
            warnings += [f"the GPU is throttled: {name}" for name in reasons]
        if "gpu/ecc_uncorrected" in tags:
            tags["gpu/ecc_uncorrected"] -= self._at_start["gpu/ecc_uncorrected"]
            if tags["gpu/ecc_uncorrected"] > 0:
                text = "the GPU has had uncorrected memory errors since the run started"
                warnings.append(f"{text}; test or replace it")
        return tags, warnings


def host_tags(with_machine: bool, root: str = "/") -> Tags:
    """{tag: GiB} of this process; with_machine: also of the machine, or of its container."""
    tags = {"memory/host_rss_GiB": resident_bytes()[1] / GIB}
    if not with_machine:
        return tags
    with suppress(OSError, LookupError, ValueError):
        sizes = numbers(Path(root, "proc/meminfo"))
        available = 1024 * sizes["MemAvailable:"]
        used = 1024 * sizes["MemTotal:"] - available
        cgroup = Path(root, "sys/fs/cgroup")
        with suppress(OSError, LookupError, ValueError):  # no container, or one without a limit
            limit = int((cgroup / "memory.max").read_text())
            cache = numbers(cgroup / "memory.stat")["inactive_file"]  # the kernel can reclaim it
            in_container = int((cgroup / "memory.current").read_text()) - cache
            if limit - in_container < available:
                used = in_container
                available = limit - in_container
        tags |= {"host/memory_used_GiB": used / GIB, "host/available_GiB": available / GIB}
    return tags


def numbers(path: Path) -> dict[str, int]:
    """{name: number}: the first two words of each line in a file."""
    rows = map(str.split, path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows}
