"""GPU and host health: the right GPU is read, faults are named once, and nothing that NVML does
ends or slows a run.
"""

import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from ranks import on_ranks

from dist_amp.telemetry import health
from dist_amp.telemetry.health import (
    Gpu,
    Health,
    Host,
    handle_of,
    health_tags,
    open_gpu,
    say_problems,
)
from dist_amp.world import World

GPU = torch.device("cuda", 0)
PROPERTIES = SimpleNamespace(uuid="aa-1", pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)


class FakeError(Exception):
    pass


class NotSupported(FakeError):
    pass


class FakeNvml:
    """pynvml with one GPU. values: {function: what it returns, or an exception}; calls: what was
    called.
    """

    NVMLError = FakeError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_AGGREGATE_ECC = 1, 0, 1

    def __init__(self, **values):
        self.calls = []
        self.values = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByUUID": "handle",
            "nvmlDeviceGetHandleByPciBusId": "handle by bus",
            "nvmlDeviceGetClockInfo": lambda kind: {1: 1980, 2: 2619}[kind],
            "nvmlDeviceGetPowerUsage": 412_500,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=40),
            "nvmlDeviceGetCurrentClocksEventReasons": 0,
            "nvmlDeviceGetTotalEccErrors": lambda kind, counter: {0: 0, 1: 3}[counter],
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
        self.more_tags = []
        self.written = []

    def write_rank_scalars(self, step, tags):
        self.written.append((step, tags))

    def log(self, *steps):
        """Log steps, each once the thread has read."""
        (tags_of,) = self.more_tags
        for step in steps:
            self.written.append((step, tags_of(SimpleNamespace(step=step))))
            tags_of.__self__._thread.join(10)


def test_every_tag_of_a_healthy_gpu_has_its_unit(install):
    nvml = install(FakeNvml())
    gpu, problem = open_gpu(GPU)
    assert problem == ""
    assert gpu.tags() == (
        {
            "gpu/sm_clock_MHz": 1980,
            "gpu/memory_clock_MHz": 2619,
            "gpu/power_W": 412.5,
            "gpu/power_limit_W": 700,
            "gpu/temperature_C": 61,
            "gpu/utilisation_pct": 97,
            "gpu/throttled": 0,
            "gpu/power_capped": 0,
            "gpu/ecc_uncorrected": 0,
            "gpu/ecc_uncorrected_lifetime": 3,
        },
        [],
    )
    assert nvml.calls[:2] == [("nvmlInit",), ("nvmlDeviceGetHandleByUUID", "GPU-aa-1")]


def test_the_gpu_is_found_by_what_names_the_hardware_and_never_by_its_number():
    assert handle_of(FakeNvml(), PROPERTIES) == "handle"

    def only_mig(name):
        if name != "MIG-aa-1":
            raise FakeError
        return "a part of it"

    assert handle_of(FakeNvml(nvmlDeviceGetHandleByUUID=only_mig), PROPERTIES) == "a part of it"
    nvml = FakeNvml(nvmlDeviceGetHandleByUUID=FakeError("no such UUID"))
    assert handle_of(nvml, PROPERTIES) == "handle by bus"
    assert nvml.calls[-1] == ("nvmlDeviceGetHandleByPciBusId", "00000000:1B:00.0")
    old_torch = SimpleNamespace(pci_domain_id=1, pci_bus_id=0, pci_device_id=4)
    handle_of(nvml, old_torch)
    assert nvml.calls[-1] == ("nvmlDeviceGetHandleByPciBusId", "00000001:00:04.0")


@pytest.mark.bad_input(
    "a GPU without nvidia-ml-py, driver or NVML, an AMD one, or one that lacks some counters"
)
@pytest.mark.parametrize(
    ("nvml", "message"),
    [
        (
            None,
            "no gpu/* tags: nvidia-ml-py is missing; pip install -e '.[gpu]' in the clone's folder",
        ),
        (
            FakeNvml(nvmlInit=FakeError("Driver Not Loaded")),
            "no gpu/* tags: NVML failed (FakeError: Driver Not Loaded)",
        ),
        (
            FakeNvml(
                nvmlDeviceGetHandleByUUID=FakeError("?"),
                nvmlDeviceGetHandleByPciBusId=FakeError("Not Found"),
            ),
            "no gpu/* tags: NVML failed (FakeError: Not Found)",
        ),
        (
            SimpleNamespace(),
            "no gpu/* tags: NVML failed (AttributeError: ",
        ),  # another package of that name
        (
            FakeNvml(nvmlDeviceGetTotalEccErrors=NotSupported("Not Supported")),
            "no gpu/ecc_uncorrected, gpu/ecc_uncorrected_lifetime: not supported by this GPU or "
            "driver",
        ),
    ],
)
def test_what_nvml_can_not_do_is_one_line_of_rank_0_and_the_run_goes_on(
    install, capsys, nvml, message
):
    install(nvml)
    metrics = Metrics(device=GPU)
    with Health(metrics):
        metrics.log(10, 20)
    out, err = capsys.readouterr()
    assert out.startswith("health ")
    assert message in out
    assert (out.count("\n"), err) == (1, "")
    assert [step for step, _ in metrics.written] == [10, 20, 20]
    has_tags = ["memory/host_rss_GiB" in tags for _, tags in metrics.written]
    assert has_tags == [False, True, True], "one log step later, or at the end"


def test_amd_gpus_and_cpus_have_no_gpu_tags(install, monkeypatch, capsys):
    nvml = install(FakeNvml())
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert open_gpu(GPU) == (None, "no gpu/* tags: AMD's GPUs have no NVML")
    monkeypatch.undo()
    with Health(Metrics()):
        pass
    assert capsys.readouterr() == ("", "")
    assert nvml.calls == []


def test_an_older_package_or_driver_has_the_throttle_reasons_under_their_old_name(install):
    names = {
        "nvmlDeviceGetCurrentClocksEventReasons": NotSupported("Function Not Found"),
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x40,
    }
    install(FakeNvml(**names))
    gpu, problem = open_gpu(GPU)
    assert problem == ""
    assert gpu.tags()[0]["gpu/throttled"] == 1


@pytest.mark.parametrize(
    ("bits", "throttled", "capped", "reasons"),
    [
        (0x1, 0, 0, []),  # idle
        (0x4, 0, 1, []),  # at its power limit, as busy GPUs are
        (0x8 | 0x40, 1, 0, ["hardware slowdown", "hardware thermal slowdown"]),
        (0x20 | 0x4, 1, 1, ["software thermal slowdown"]),
        (0x80, 1, 0, ["external power brake"]),
    ],
)
def test_reasons_of_throttling_are_named(bits, throttled, capped, reasons):
    tags, warnings = Gpu(FakeNvml(nvmlDeviceGetCurrentClocksEventReasons=bits), "handle").tags()
    assert (tags["gpu/throttled"], tags["gpu/power_capped"]) == (throttled, capped)
    assert warnings == [f"the GPU is throttled: {reason}" for reason in reasons]


@pytest.mark.bad_input(
    "a GPU that is throttled by heat or hardware, or has new uncorrected memory errors"
)
def test_a_reason_is_warned_of_once_with_rank_host_and_step(install, capsys, monkeypatch):
    monkeypatch.setattr(health.platform, "node", lambda: "host-b")
    nvml = install(FakeNvml())
    metrics = Metrics(rank=3, local_rank=1, device=GPU)
    with Health(metrics):
        metrics.log(10)
        for step, bits in ((20, 0x40), (30, 0), (40, 0x40), (50, 0x80)):
            nvml.values["nvmlDeviceGetCurrentClocksEventReasons"] = bits
            metrics.log(step)
    assert capsys.readouterr().err.splitlines() == [
        "warning: rank 3 (host-b), step 20: the GPU is throttled: hardware thermal slowdown",
        "warning: rank 3 (host-b), step 50: the GPU is throttled: external power brake",
    ]


def test_ecc_errors_are_counted_from_the_runs_start():
    counts = {0: 2, 1: 7}
    gpu = Gpu(FakeNvml(nvmlDeviceGetTotalEccErrors=lambda kind, counter: counts[counter]), "handle")
    assert gpu.tags()[0]["gpu/ecc_uncorrected"] == 0
    assert gpu.tags()[1] == []
    counts.update({0: 3, 1: 8})
    tags, warnings = gpu.tags()
    assert (tags["gpu/ecc_uncorrected"], tags["gpu/ecc_uncorrected_lifetime"]) == (1, 8)
    assert warnings == [
        "the GPU had uncorrected memory errors since the run's start; test or replace it"
    ]


@pytest.mark.bad_input("NVML failing in a run, as on a lost GPU")
def test_a_gpu_that_is_lost_is_said_once_and_not_asked_again(install, capsys):
    nvml, metrics = install(FakeNvml()), Metrics(device=GPU)
    with Health(metrics):
        metrics.log(10)
        nvml.values["nvmlDeviceGetPowerUsage"] = FakeError("GPU is lost")
        metrics.log(20)
        asked = len(nvml.calls)
        metrics.log(30, 40)
    assert len(nvml.calls) == asked
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "step 20: no more gpu/* tags: nvmlDeviceGetPowerUsage failed (FakeError: GPU is lost)"
    )
    assert ["gpu/power_W" in tags for _, tags in metrics.written] == [
        False,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.bad_input("NVML not returning from a call")
def test_a_call_that_never_returns_holds_up_neither_a_step_nor_the_end(install, monkeypatch):
    monkeypatch.setattr(health, "EXIT_SECONDS", 0.05)
    nvml, metrics, release = install(FakeNvml()), Metrics(device=GPU), threading.Event()
    with Health(metrics):
        metrics.log(10)
        nvml.values["nvmlDeviceGetTemperature"] = lambda sensor: release.wait(60)
        (tags_of,) = metrics.more_tags
        read = [tags_of(SimpleNamespace(step=step)) for step in range(20, 200, 10)]
    assert [bool(tags) for tags in read] == [True] + [False] * 17
    release.set()


def test_the_device_is_left_alone(install, monkeypatch):
    """Neither torch.cuda nor the device's stream is used after the start."""
    install(FakeNvml())
    metrics = Metrics(device=GPU)
    with Health(metrics):
        monkeypatch.setattr(torch.cuda, "get_device_properties", pytest.fail)
        monkeypatch.setattr(torch.cuda, "synchronize", pytest.fail)
        metrics.log(10)


# ---- host ----


def system(root, meminfo=True, **cgroup):
    """A folder like / with these files."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/statm").write_text("900 524288 10 1 0 100 0")  # pages
    if meminfo:
        kib = {"MemTotal": 64 * 2**20, "MemFree": 1, "MemAvailable": 24 * 2**20}
        (root / "proc/meminfo").write_text(
            "".join(f"{name}: {count} kB\n" for name, count in kib.items())
        )
    (root / "sys/fs/cgroup").mkdir(parents=True)
    for name, text in cgroup.items():
        (root / "sys/fs/cgroup" / name.replace("_", ".")).write_text(text)
    return root


def test_one_rank_of_a_machine_writes_its_memory_and_each_its_own(tmp_path):
    root = system(tmp_path, memory_max="max\n", memory_current="1", memory_stat="inactive_file 0\n")
    rss = 524288 * health.resource.getpagesize() / 2**30
    assert Host(writes_machine=False, root=str(root)).tags() == {"memory/host_rss_GiB": rss}
    expected = {"memory/host_rss_GiB": rss, "host/memory_used_GiB": 40, "host/available_GiB": 24}
    assert Host(writes_machine=True, root=str(root)).tags() == expected


def test_in_a_container_its_own_limit_counts_and_its_cache_is_free(tmp_path):
    stat = f"anon 5\ninactive_file {2 * 2**30}\n"
    root = system(
        tmp_path, memory_max=str(16 * 2**30), memory_current=str(12 * 2**30), memory_stat=stat
    )
    tags = Host(writes_machine=True, root=str(root)).tags()
    assert (tags["host/memory_used_GiB"], tags["host/available_GiB"]) == (10, 6)


def test_a_system_without_proc_has_no_host_tags(tmp_path):
    assert health_tags(None, Host(writes_machine=True, root=str(tmp_path))) == ({}, [])


def problems(world):
    say_problems("nvidia-ml-py is missing" if world.rank == 1 else "", world)


def say_on_ranks(world, folder):
    """What each rank prints, in a file of its own."""
    from contextlib import redirect_stdout

    with (folder / str(world.rank)).open("w") as file, redirect_stdout(file):
        problems(world)
    return (folder / str(world.rank)).read_text()


def test_rank_0_says_which_ranks_have_no_tags(tmp_path):
    first, second = on_ranks(2, say_on_ranks, tmp_path)
    assert first.endswith("nvidia-ml-py is missing on 1 of 2 ranks\n")
    assert second == ""
