"""GPU and host health: the right GPU is read, faults are named once, and NVML ends no run."""

import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from tiny import watched

from dist_amp.telemetry import health
from dist_amp.telemetry.health import Gpu, Health, handle_of, host_tags, open_gpu
from dist_amp.telemetry.metrics import resident_bytes
from dist_amp.world import World

GPU = torch.device("cuda", 0)
PROPERTIES = SimpleNamespace(uuid="aa-1")
HEALTHY = {"sm_clock_MHz": 1980, "memory_clock_MHz": 2619, "power_W": 412.5, "power_limit_W": 700}
HEALTHY |= {"temperature_C": 61, "utilisation_pct": 97, "throttled": 0, "power_capped": 0}
HEALTHY |= {"ecc_uncorrected": 0}


class FakeError(Exception):
    pass


class FakeNvml:
    """pynvml with one GPU. values: {function: result or error}; calls: what was called."""

    NVMLError = FakeError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    def __init__(self, **values):
        self.calls = []
        self.values = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByUUID": "handle",
            "nvmlDeviceGetClockInfo": lambda kind: {1: 1980, 2: 2619}[kind],
            "nvmlDeviceGetPowerUsage": 412_500,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=40),
            "nvmlDeviceGetCurrentClocksEventReasons": 0,
            "nvmlDeviceGetTotalEccErrors": lambda kind, counter: {0: 0}[counter],
            **values,
        }

    def __getattr__(self, name):
        if name.startswith("__") or name not in self.values:
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append((name, *arguments))
            value = self.values[name]
            if isinstance(value, Exception):
                raise value
            own = arguments[1:] if arguments[:1] == ("handle",) else arguments
            return value(*own) if callable(value) else value

        return call


@pytest.fixture
def install(monkeypatch):
    """install(nvml): make it the module `pynvml`, beside a GPU that torch sees."""

    def installed(nvml):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: PROPERTIES)
        return nvml

    return installed


class Metrics:
    """Of a run, as far as Health uses it. written: [(step, tags)] at each log step and the end."""

    def __init__(self, **world):
        self.world = World(**world)
        self.written = []

    def write_rank_scalars(self, step, tags):
        self.written.append((step, tags))

    def log(self, health, *steps):
        """Log steps, each once the thread has read."""
        for step in steps:
            self.written.append((step, health.tags(SimpleNamespace(step=step))))
            health._thread.join(10)


def test_the_gpu_is_found_by_its_uuid_and_each_tag_has_its_unit(install):
    nvml = install(FakeNvml())
    gpu, problem = open_gpu(GPU)
    assert problem == ""
    assert gpu.tags() == ({f"gpu/{tag}": value for tag, value in HEALTHY.items()}, [])
    assert nvml.calls[:2] == [("nvmlInit",), ("nvmlDeviceGetHandleByUUID", "GPU-aa-1")]

    def only_mig(name):
        if name != "MIG-aa-1":
            raise FakeError
        return "a part of it"

    assert handle_of(FakeNvml(nvmlDeviceGetHandleByUUID=only_mig), PROPERTIES) == "a part of it"


NO_HANDLE = FakeNvml(nvmlDeviceGetHandleByUUID=FakeError("?"))
NO_ECC = FakeNvml(nvmlDeviceGetTotalEccErrors=FakeError("Not Supported"))


@pytest.mark.bad_input(
    "a GPU without nvidia-ml-py, driver or NVML, an AMD one, or one that lacks some counters"
)
@pytest.mark.parametrize(
    ("nvml", "device", "hip", "message"),
    [
        (None, GPU, None, "no gpu/* tags: nvidia-ml-py is missing; pip install nvidia-ml-py"),
        (NO_HANDLE, GPU, None, "no gpu/* tags: NVML failed (FakeError: ?) (1 of 1 ranks)"),
        (NO_ECC, GPU, None, ""),
        (NO_HANDLE, GPU, "7.0", ""),
        (FakeNvml(), torch.device("cpu"), None, ""),
    ],
)
def test_what_nvml_can_not_do_is_one_line_of_rank_0_and_the_run_goes_on(
    install, monkeypatch, capsys, nvml, device, hip, message
):
    install(nvml)
    monkeypatch.setattr(torch.version, "hip", hip)
    metrics = Metrics(device=device)
    with watched(Health(metrics)) as observer:
        metrics.log(observer, 10, 20)
    out, err = capsys.readouterr()
    assert message in out
    assert (out.count("\n"), err) == (bool(message), "")
    assert [step for step, _ in metrics.written] == [10, 20, 20]
    has_tags = ["memory/host_rss_GiB" in tags for _, tags in metrics.written]
    assert has_tags == [False, True, True], "one log step later, or at the end"


@pytest.mark.parametrize(
    ("bits", "throttled", "capped", "reasons"),
    [
        (0x1, 0, 0, []),  # idle
        (0x4, 0, 1, []),  # at its power limit, as busy GPUs are
        (0x8 | 0x40, 1, 0, ["hardware slowdown", "hardware thermal slowdown"]),
        (0x20 | 0x4 | 0x80, 1, 1, ["software thermal slowdown", "external power brake"]),
    ],
)
def test_reasons_of_throttling_are_named(bits, throttled, capped, reasons):
    gpu = Gpu(FakeNvml(nvmlDeviceGetCurrentClocksEventReasons=bits), "handle")
    tags, warnings = gpu.tags()
    assert (tags["gpu/throttled"], tags["gpu/power_capped"]) == (throttled, capped)
    assert warnings == [f"the GPU is throttled: {reason}" for reason in reasons]


@pytest.mark.bad_input(
    "a GPU that is throttled by heat or hardware, or has new uncorrected memory errors"
)
@pytest.mark.bad_input("NVML failing in a run, as on a lost GPU")
def test_what_is_wrong_is_said_once_with_rank_host_and_step(install, capsys, monkeypatch):
    monkeypatch.setattr(health.platform, "node", lambda: "host-b")
    counts = {0: 2}
    nvml = install(FakeNvml(nvmlDeviceGetTotalEccErrors=lambda kind, counter: counts[counter]))
    metrics = Metrics(rank=3, local_rank=1, device=GPU)
    with watched(Health(metrics)) as observer:
        metrics.log(observer, 10)
        for step, bits in ((20, 0x40), (30, 0), (40, 0x40)):
            nvml.values["nvmlDeviceGetCurrentClocksEventReasons"] = bits
            metrics.log(observer, step)
        counts[0] = 3
        metrics.log(observer, 50, 60)
        nvml.values["nvmlDeviceGetPowerUsage"] = FakeError("GPU is lost")
        metrics.log(observer, 70)
        asked = len(nvml.calls)
        metrics.log(observer, 80, 90)
    assert len(nvml.calls) == asked, "it is not asked again"
    ecc = "the GPU had uncorrected memory errors since the run's start; test or replace it"
    assert capsys.readouterr().err.splitlines() == [
        "warning: rank 3 (host-b), step 20: the GPU is throttled: hardware thermal slowdown",
        f"warning: rank 3 (host-b), step 50: {ecc}",
        "warning: rank 3 (host-b), step 70: no more gpu/* tags: gpu/power_W failed (GPU is lost)",
    ]
    written = dict(metrics.written)
    assert [written[step]["gpu/ecc_uncorrected"] for step in (50, 60)] == [0, 1]
    assert ["gpu/power_W" in written[step] for step in (70, 80, 90)] == [True, False, False]


@pytest.mark.bad_input("NVML not returning from a call")
def test_a_call_that_never_returns_holds_up_neither_a_step_nor_the_end(install, monkeypatch):
    monkeypatch.setattr(health, "EXIT_SECONDS", 0.05)
    nvml, metrics, release = install(FakeNvml()), Metrics(device=GPU), threading.Event()
    with watched(Health(metrics)) as observer:
        # Neither torch.cuda nor the device's stream is used after the start.
        monkeypatch.setattr(torch.cuda, "get_device_properties", pytest.fail)
        monkeypatch.setattr(torch.cuda, "synchronize", pytest.fail)
        metrics.log(observer, 10)
        nvml.values["nvmlDeviceGetTemperature"] = lambda sensor: release.wait(60)
        read = [observer.tags(SimpleNamespace(step=step)) for step in range(20, 200, 10)]
    assert [bool(tags) for tags in read] == [True] + [False] * 17
    release.set()


MEMINFO = f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {24 * 2**20} kB\n"


@pytest.mark.parametrize(
    ("limit", "used", "available"), [("max\n", 40, 24), (f"{16 * 2**30}\n", 10, 6)]
)
def test_one_rank_of_a_machine_writes_its_memory_or_its_containers_and_each_its_own(
    tmp_path, limit, used, available
):
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    (group / "memory.max").write_text(limit)
    (group / "memory.current").write_text(str(12 * 2**30))
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {2 * 2**30}\n")  # cache, so free
    tags = host_tags(of_machine=True, root=str(tmp_path))
    assert tags.pop("memory/host_rss_GiB") == pytest.approx(resident_bytes()[1] / 2**30, rel=0.1)
    assert tags == {"host/memory_used_GiB": used, "host/available_GiB": available}
    assert list(host_tags(of_machine=False)) == ["memory/host_rss_GiB"]
