"""Health of this rank's GPU and of its host, at log steps: clocks, throttling, power, temperature,
ECC errors, memory.

GPUs are read through NVML (nvidia-ml-py, `pip install -e '.[gpu]'`), so AMD's are not. A thread
reads: some calls may take milliseconds, or on a lost GPU never return (assumed). What it read at
one log step is written with the next one's metrics.
"""

import os
import platform
import resource
import sys
import threading
from contextlib import suppress
from typing import Any

import torch

from dist_amp.telemetry.log_row import LogRow
from dist_amp.telemetry.metrics import Metrics
from dist_amp.telemetry.step_report import Observer
from dist_amp.world import World

GIB = 2**30
# Why clocks are lower than they could be. Source: NVML API reference, nvmlClocksEventReasons. Left
# out: idle, clocks set by the user, synchronised boost, display. The power cap is the normal state
# of a busy GPU, and no fault.
POWER_CAP = 0x4
THROTTLED = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "external power brake",
}
EXIT_SECONDS = 1.0  # what the run's end waits for the last reading


class Health(Observer):
    """Adds this rank's gpu/*, host/* and memory/host_rss_GiB to the metrics."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._world = metrics.world
        self._gpu, problem = open_gpu(self._world.device)
        if self._world.device.type == "cuda":
            say_problems(problem, self._world)
        self._host = Host(writes_machine=self._world.local_rank == 0)
        self._warned: set[str] = set()
        self._thread = threading.Thread()
        # Made by the thread, taken by this one: step, tags, warnings.
        self._reading: tuple[int, dict[str, float], list[str]] | None = None
        metrics.more_tags.append(self.tags)

    def tags(self, row: LogRow) -> dict[str, float]:
        """What was read at the last log step; starts reading for the next one."""
        _, tags = self._take_reading()
        if not self._thread.is_alive():  # else it still waits for the driver
            self._thread = threading.Thread(target=self._read, args=(row.step,), daemon=True)
            self._thread.start()
        return tags

    def __exit__(self, *error: object) -> None:
        if self._thread.ident is not None:
            self._thread.join(EXIT_SECONDS)
        self._metrics.write_rank_scalars(*self._take_reading())

    def _read(self, step: int) -> None:
        self._reading = (step, *health_tags(self._gpu, self._host))

    def _take_reading(self) -> tuple[int, dict[str, float]]:
        """(step, tags); prints what is warned of for the first time."""
        if self._reading is None:
            return 0, {}
        step, tags, warnings = self._reading
        self._reading = None
        for text in warnings:
            if text not in self._warned:
                self._warned.add(text)
                where = f"rank {self._world.rank} ({platform.node()})"
                print(f"warning: {where}, step {step}: {text}", file=sys.stderr, flush=True)
        return step, tags


def health_tags(gpu: "Gpu | None", host: "Host") -> tuple[dict[str, float], list[str]]:
    """(tags, warnings). What fails is left out, and warned of where it worked before; nothing is
    raised.
    """
    if gpu is None:
        return host.tags(), []
    tags, warnings = gpu.tags()
    return tags | host.tags(), warnings


def say_problems(problem: str, world: World) -> None:
    """One line of rank 0 about all ranks on whose GPU something can't be read; every rank calls it.

    problem: this rank's; "" if there is none.
    """
    texts = world.gather_texts(f"{platform.node()}: {problem}" if problem else "")
    problems = [text for text in texts if text]
    if not problems:
        return
    line = f"health {problems[0]}"
    if len(problems) < world.world_size:
        line += f" on {len(problems)} of {world.world_size} ranks"
    world.say(line)


def open_gpu(device: torch.device) -> tuple["Gpu | None", str]:
    """(this rank's GPU, what of it can't be read) or (None, why nothing can; "" on a CPU)."""
    if device.type != "cuda":
        return None, ""
    if torch.version.hip:
        return None, "no gpu/* tags: AMD's GPUs have no NVML"
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        gpu = Gpu(nvml, handle_of(nvml, torch.cuda.get_device_properties(device)))
    except ImportError:
        fix = "pip install -e '.[gpu]' in the clone's folder"
        return None, f"no gpu/* tags: nvidia-ml-py is missing; {fix}"
    except Exception as error:
        # A driver without NVML, a container without the device, another package of that name.
        return None, f"no gpu/* tags: NVML failed ({type(error).__name__}: {error})"
    if gpu.unsupported:
        return gpu, f"no {', '.join(gpu.unsupported)}: not supported by this GPU or driver"
    return gpu, ""


def handle_of(nvml: Any, properties: Any) -> Any:
    """NVML's handle of a device of torch, by what names the hardware: CUDA_VISIBLE_DEVICES reorders
    the numbers.
    """
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        for name in (f"GPU-{uuid}", f"MIG-{uuid}"):
            with suppress(nvml.NVMLError):
                return nvml.nvmlDeviceGetHandleByUUID(name)
    place = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    return nvml.nvmlDeviceGetHandleByPciBusId("{:08X}:{:02X}:{:02X}.0".format(*place))


class Gpu:
    """One GPU through NVML. unsupported: the tags that could not be read at the start; they are
    left out.
    """

    def __init__(self, nvml: Any, handle: Any):
        self._nvml = nvml
        self._handle = handle
        ecc = ("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
        # The function with its arguments; where there are two, the first that works.
        calls: dict[str, list[tuple[Any, ...]]] = {
            "gpu/sm_clock_MHz": [("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)],
            "gpu/memory_clock_MHz": [("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM)],
            "gpu/power_W": [("nvmlDeviceGetPowerUsage",)],  # in mW, as the limit
            "gpu/power_limit_W": [("nvmlDeviceGetEnforcedPowerLimit",)],
            "gpu/temperature_C": [
                ("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
                ("nvmlDeviceGetTemperatureV", nvml.NVML_TEMPERATURE_GPU),
            ],
            "gpu/utilisation_pct": [("nvmlDeviceGetUtilizationRates",)],
            "gpu/throttled": [
                ("nvmlDeviceGetCurrentClocksEventReasons",),
                ("nvmlDeviceGetCurrentClocksThrottleReasons",),  # before driver 535
            ],
            "gpu/ecc_uncorrected": [(*ecc, nvml.NVML_VOLATILE_ECC)],
            "gpu/ecc_uncorrected_lifetime": [(*ecc, nvml.NVML_AGGREGATE_ECC)],
        }
        self._calls: dict[str, tuple[Any, ...]] = {}
        for tag, alternatives in calls.items():
            for call in filter(self._works, alternatives):
                self._calls.setdefault(tag, call)
        self.unsupported = [tag for tag in calls if tag not in self._calls]
        self._ecc_at_start = 0.0
        if "gpu/ecc_uncorrected" in self._calls:
            self._ecc_at_start = self._value(*self._calls["gpu/ecc_uncorrected"])

    def _value(self, name: str, *arguments: Any) -> float:
        value = getattr(self._nvml, name)(self._handle, *arguments)
        return float(getattr(value, "gpu", value))  # utilisation has another one, the memory's

    def _works(self, call: tuple[Any, ...]) -> bool:
        try:
            self._value(*call)
        except (AttributeError, self._nvml.NVMLError):
            return False
        return True

    def tags(self) -> tuple[dict[str, float], list[str]]:
        """(tags, warnings): of throttling, ECC errors since the start, and a call that fails, which
        ends them all.
        """
        tags: dict[str, float] = {}
        warnings: list[str] = []
        for tag, call in self._calls.items():
            try:
                tags[tag] = self._value(*call)
            except Exception as error:  # a lost GPU's other calls would fail, too, or never return
                self._calls = {}
                why = f"{type(error).__name__}: {error}"
                warnings.append(f"no more gpu/* tags: {call[0]} failed ({why})")
                break
            if tag.endswith("_W"):
                tags[tag] /= 1000
        if "gpu/throttled" in tags:
            bits = int(tags["gpu/throttled"])
            reasons = [name for bit, name in THROTTLED.items() if bits & bit]
            tags["gpu/throttled"] = float(bool(reasons))
            tags["gpu/power_capped"] = float(bool(bits & POWER_CAP))
            warnings += [f"the GPU is throttled: {name}" for name in reasons]
        if "gpu/ecc_uncorrected" in tags:
            tags["gpu/ecc_uncorrected"] -= self._ecc_at_start
            if tags["gpu/ecc_uncorrected"] > 0:
                warnings.append(
                    "the GPU had uncorrected memory errors since the run's start; test or replace "
                    "it"
                )
        return tags, warnings


class Host:
    """Memory of this process and, for one rank of a machine, of the machine or its container."""

    def __init__(self, writes_machine: bool, root: str = ""):
        self._writes_machine = writes_machine
        self._root = root

    def tags(self) -> dict[str, float]:
        """{tag: GiB}; only what the system shows: outside of Linux nothing."""
        tags: dict[str, float] = {}
        with suppress(OSError, ValueError, IndexError):
            pages = int(self._read("/proc/self/statm").split()[1])
            tags["memory/host_rss_GiB"] = pages * resource.getpagesize() / GIB
        if self._writes_machine:
            with suppress(OSError, ValueError):
                used, available = self._machine()
                tags |= {"host/memory_used_GiB": used / GIB, "host/available_GiB": available / GIB}
        return tags

    def _machine(self) -> tuple[int, int]:
        """(used, available) bytes. In a container with a limit, of that: its cache can be freed."""
        text = self._read("/proc/meminfo")
        available = 1024 * number(b"MemAvailable:", text)
        used = 1024 * number(b"MemTotal:", text) - available
        group = "/sys/fs/cgroup/memory"
        with suppress(OSError, ValueError):  # not in a container, or its limit is "max"
            limit = int(self._read(f"{group}.max"))
            cache = number(b"inactive_file", self._read(f"{group}.stat"))
            in_container = int(self._read(f"{group}.current")) - cache
            if limit - in_container < available:
                return in_container, limit - in_container
        return used, available

    def _read(self, path: str) -> bytes:
        file = os.open(self._root + path, os.O_RDONLY)  # a tenth of the cost of opening it as text
        try:
            return os.read(file, 2**16)
        finally:
            os.close(file)


def number(name: bytes, text: bytes) -> int:
    """The number after a name. Errors: ValueError if it is not there."""
    return int(text[text.index(name) + len(name) :].split(None, 1)[0])
