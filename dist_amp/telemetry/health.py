"""Health of this rank's GPU and of its host, at log steps: clocks, throttling, power, temperature, ECC errors, memory.

GPUs are read through NVML (nvidia-ml-py, `pip install -e '.[gpu]'`), so AMD's are not. A thread of its own reads:
some calls may take milliseconds, or on a lost GPU never return (assumed). What it read at one log step is written with
the next one's metrics. To delete: this file and its entry in train.py.
"""

import os
import platform
import resource
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from dist_amp.telemetry.log_row import LogRow
from dist_amp.telemetry.observer import Observer
from dist_amp.world import World

GIB = 2**30
# Why clocks are lower than they could be. Source: NVML API reference, nvmlClocksEventReasons. Left out: idle, clocks
# set by the user, synchronised boost, display. The power cap is the normal state of a busy GPU, and no fault.
POWER_CAP = 0x4
THROTTLED = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "external power brake",
}
EXIT_SECONDS = 1.0  # what the run's end waits for the last reading

Write = Callable[[int, Mapping[str, float]], object]


class Health(Observer):
    """write(step, tags): keeps this rank's tags for the next log step's."""

    def __init__(self, world: World, write: Write):
        self._world = world
        self._write = write
        self._gpu, problem = open_gpu(world.device)
        if world.device.type == "cuda":
            say_problems(problem, world)
        self._host = Host(writes_machine=world.local_rank == 0)
        self._warned: set[str] = set()
        self._step = 0
        self._read: tuple[int, dict[str, float], list[str]] | None = None  # made by the thread, taken by this one
        self._asked, self._done, self._closed = threading.Event(), threading.Event(), False
        self._done.set()
        threading.Thread(target=self._serve, name="health", daemon=True).start()

    def on_log(self, row: LogRow) -> None:
        self._write_read()
        if self._done.is_set():  # else the thread still waits for the driver
            self._step = row.step
            self._done.clear()
            self._asked.set()

    def __exit__(self, *error: object) -> None:
        self._done.wait(EXIT_SECONDS)
        self._write_read()
        self._closed = True
        self._asked.set()

    def _write_read(self) -> None:
        """Write what the thread has read since, and print what it warns of for the first time."""
        read, self._read = self._read, None
        if read is None:
            return
        step, tags, warnings = read
        self._write(step, tags)
        for text in warnings:
            if text not in self._warned:
                self._warned.add(text)
                where = f"rank {self._world.rank} ({platform.node()})"
                print(f"warning: {where}, step {step}: {text}", file=sys.stderr, flush=True)

    def _serve(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            if self._closed:
                return
            self._read = (self._step, *health_tags(self._gpu, self._host))
            self._done.set()


def health_tags(gpu: "Gpu | None", host: "Host") -> tuple[dict[str, float], list[str]]:
    """(tags, warnings). What fails is left out, and warned of where it worked before; nothing is raised."""
    of_gpu, warnings = gpu.tags() if gpu is not None else ({}, [])
    return of_gpu | host.tags(), warnings


def say_problems(problem: str, world: World) -> None:
    """One line of rank 0 about all ranks on whose GPU something can't be read; every rank calls it."""
    problems = [text for text in world.gather_texts(f"{platform.node()}: {problem}" if problem else "") if text]
    if problems:
        which = "" if len(problems) == world.world_size else f" on {len(problems)} of {world.world_size} ranks"
        world.say(f"health {problems[0]}{which}")


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
        return None, "no gpu/* tags: nvidia-ml-py is missing; pip install -e '.[gpu]' in the clone's folder"
    except Exception as error:  # a driver without NVML, a container without the device, another package of that name
        return None, f"no gpu/* tags: NVML failed ({type(error).__name__}: {error})"
    return gpu, f"no {', '.join(gpu.unsupported)}: not supported by this GPU or driver" if gpu.unsupported else ""


def handle_of(nvml: Any, properties: Any) -> Any:
    """NVML's handle of a device of torch, by what names the hardware: CUDA_VISIBLE_DEVICES reorders the numbers."""
    uuid = str(getattr(properties, "uuid", ""))
    for name in (f"GPU-{uuid}", f"MIG-{uuid}") if uuid else ():
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(name)
    place = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    return nvml.nvmlDeviceGetHandleByPciBusId("{:08X}:{:02X}:{:02X}.0".format(*place))


class Gpu:
    """One GPU through NVML. unsupported: the tags that could not be read at the start; they are left out."""

    def __init__(self, nvml: Any, handle: Any):
        ecc = ("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
        # Clocks' event reasons had another name before driver 535.
        event, throttle = "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
        calls: dict[str, list[tuple[Any, ...]]] = {  # the function with its arguments; the second if the first fails
            "gpu/sm_clock_MHz": [("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)],
            "gpu/memory_clock_MHz": [("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM)],
            "gpu/power_W": [("nvmlDeviceGetPowerUsage",)],  # in mW, as the limit
            "gpu/power_limit_W": [("nvmlDeviceGetEnforcedPowerLimit",)],
            "gpu/temperature_C": [
                (name, nvml.NVML_TEMPERATURE_GPU) for name in ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV")
            ],
            "gpu/utilisation_pct": [("nvmlDeviceGetUtilizationRates",)],
            "gpu/throttled": [(event,), (throttle,)],
            "gpu/ecc_uncorrected": [(*ecc, nvml.NVML_VOLATILE_ECC)],
            "gpu/ecc_uncorrected_lifetime": [(*ecc, nvml.NVML_AGGREGATE_ECC)],
        }
        self._nvml = nvml
        self._handle = handle
        self._calls: dict[str, tuple[Any, ...]] = {}
        for tag, ways in calls.items():
            if (works := next(filter(self._works, ways), None)) is not None:
                self._calls[tag] = works
        self.unsupported = [tag for tag in calls if tag not in self._calls]
        ecc_call = self._calls.get("gpu/ecc_uncorrected")
        self._ecc_at_start = self._value(*ecc_call) if ecc_call else 0.0

    def _value(self, name: str, *arguments: Any) -> float:
        value = getattr(self._nvml, name)(self._handle, *arguments)
        return float(getattr(value, "gpu", value))  # of utilisation there is another one, the memory's

    def _works(self, call: tuple[Any, ...]) -> bool:
        try:
            self._value(*call)
        except (AttributeError, self._nvml.NVMLError):
            return False
        return True

    def tags(self) -> tuple[dict[str, float], list[str]]:
        """(tags, warnings): of throttling, ECC errors since the start, and a call that fails, which ends them all."""
        tags: dict[str, float] = {}
        warnings: list[str] = []
        for tag, call in self._calls.items():
            try:
                tags[tag] = self._value(*call) * (1e-3 if tag.endswith("_W") else 1)
            except Exception as error:  # a lost GPU's other calls would fail, too, or never return
                self._calls = {}
                warnings.append(f"no more gpu/* tags: {call[0]} failed ({type(error).__name__}: {error})")
                break
        if "gpu/throttled" in tags:
            bits = int(tags["gpu/throttled"])
            reasons = [name for bit, name in THROTTLED.items() if bits & bit]
            tags["gpu/throttled"], tags["gpu/power_capped"] = float(bool(reasons)), float(bool(bits & POWER_CAP))
            warnings += [f"the GPU is throttled: {name}" for name in reasons]
        if "gpu/ecc_uncorrected" in tags:
            tags["gpu/ecc_uncorrected"] -= self._ecc_at_start
            if tags["gpu/ecc_uncorrected"] > 0:
                warnings.append("the GPU had uncorrected memory errors since the run's start; test or replace it")
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
        """(used, available) bytes. In a container with a limit, of that: what it caches can be freed."""
        text = self._read("/proc/meminfo")
        total, available = 1024 * number(b"MemTotal:", text), 1024 * number(b"MemAvailable:", text)
        used, group = total - available, "/sys/fs/cgroup/memory"
        with suppress(OSError, ValueError):  # not in a container, or its limit is "max"
            limit = int(self._read(f"{group}.max"))
            own = int(self._read(f"{group}.current")) - number(b"inactive_file", self._read(f"{group}.stat"))
            if limit - own < available:
                used, available = own, limit - own
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
