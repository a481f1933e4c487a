"""GPU and host health: the right GPU is read, faults are named once, and NVML ends no run."""

import sys
import threading
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from tiny import watched

from dist_amp.telemetry import health
from dist_amp.telemetry.health import Health, host_tags, open_gpu
from dist_amp.telemetry.metrics import resident_bytes
from dist_amp.world import World

GPU = torch.device("cuda", 0)
PROPERTIES = SimpleNamespace(uuid="aa-1")
CLOCKS = (1980, 2619)
HEALTHY = {"sm_clock_MHz": 1980, "memory_clock_MHz": 2619, "power_W": 412.5, "power_limit_W": 700}
HEALTHY |= {"temperature_C": 61, "utilisation_pct": 97, "throttled": 0, "power_capped": 0}
HEALTHY |= {"ecc_uncorrected": 0}


class FakeError(Exception):
    pass


def fake_nvml(**more):
    """pynvml with one GPU. more: what else its functions return or raise."""
    return Mock(
        **{
            "NVMLError": FakeError,
            "nvmlDeviceGetHandleByUUID.return_value": "handle",
            "nvmlDeviceGetClockInfo.side_effect": lambda gpu, kind: CLOCKS[kind],
            "nvmlDeviceGetPowerUsage.return_value": 412_500,
            "nvmlDeviceGetEnforcedPowerLimit.return_value": 700_000,
            "nvmlDeviceGetTemperature.return_value": 61,
            "nvmlDeviceGetUtilizationRates.return_value": SimpleNamespace(gpu=97, memory=40),
            "nvmlDeviceGetCurrentClocksEventReasons.return_value": 0,
            "nvmlDeviceGetTotalEccErrors.return_value": 0,
            "NVML_CLOCK_SM": 0,
            "NVML_CLOCK_MEM": 1,
            **more,
        }
    )


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


@pytest.mark.parametrize("known", ["GPU-aa-1", "MIG-aa-1"])
def test_the_gpu_or_its_part_is_found_by_its_uuid_and_each_tag_has_its_unit(known, install):
    def handle_of(uuid):
        if uuid != known:
            raise FakeError
        return "handle"

    nvml = install(fake_nvml(**{"nvmlDeviceGetHandleByUUID.side_effect": handle_of}))
    gpu, problem = open_gpu(GPU)
    assert problem == ""
    assert gpu.tags() == ({f"gpu/{tag}": value for tag, value in HEALTHY.items()}, [])
    assert nvml.method_calls[0] == call.nvmlInit()
    nvml.nvmlDeviceGetPowerUsage.assert_called_with("handle")


NO_HANDLE = fake_nvml(**{"nvmlDeviceGetHandleByUUID.side_effect": FakeError("?")})
NO_ECC = fake_nvml(**{"nvmlDeviceGetTotalEccErrors.side_effect": FakeError("Not Supported")})


@pytest.mark.bad_input("a GPU without nvidia-ml-py, driver or NVML, or that lacks some counters")
@pytest.mark.parametrize(
    ("nvml", "device", "hip", "message"),
    [
        (None, GPU, None, "no gpu/* tags: nvidia-ml-py is missing; pip install nvidia-ml-py"),
        (NO_HANDLE, GPU, None, "no gpu/* tags: NVML failed (FakeError: ?) (1 of 1 ranks)"),
        (NO_ECC, GPU, None, ""),
        (NO_HANDLE, GPU, "7.0", ""),
        (fake_nvml(), torch.device("cpu"), None, ""),
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


@pytest.mark.bad_input("a GPU that is throttled, has new uncorrected memory errors, or is lost")
def test_what_is_wrong_is_said_once_with_rank_host_and_step(install, capsys, monkeypatch):
    monkeypatch.setattr(health.platform, "node", lambda: "host-b")
    nvml = install(fake_nvml(**{"nvmlDeviceGetTotalEccErrors.return_value": 2}))
    metrics = Metrics(rank=3, local_rank=1, device=GPU)
    reasons = {10: 0x1, 20: 0x40, 30: 0x4, 40: 0x8 | 0x40, 50: 0x20 | 0x4 | 0x80}
    with watched(Health(metrics)) as observer:
        for step, bits in reasons.items():
            nvml.nvmlDeviceGetCurrentClocksEventReasons.return_value = bits
            metrics.log(observer, step)
        nvml.nvmlDeviceGetTotalEccErrors.return_value = 3
        metrics.log(observer, 60, 70)
        nvml.nvmlDeviceGetPowerUsage.side_effect = FakeError("GPU is lost")
        metrics.log(observer, 80)
        nvml.reset_mock()
        metrics.log(observer, 90, 100)
    assert nvml.method_calls == [], "it is not asked again"
    ecc = "the GPU has had uncorrected memory errors since the run started; test or replace it"
    assert capsys.readouterr().err.splitlines() == [
        "warning: rank 3 (host-b), step 20: the GPU is throttled: hardware thermal slowdown",
        "warning: rank 3 (host-b), step 40: the GPU is throttled: hardware slowdown",
        "warning: rank 3 (host-b), step 50: the GPU is throttled: software thermal slowdown",
        "warning: rank 3 (host-b), step 50: the GPU is throttled: external power brake",
        f"warning: rank 3 (host-b), step 60: {ecc}",
        "warning: rank 3 (host-b), step 80: no more gpu/* tags: gpu/power_W failed (GPU is lost)",
    ]
    written = dict(metrics.written)  # at a step: what was read at the one before
    assert [written[step]["gpu/throttled"] for step in (20, 30, 40, 50, 60)] == [0, 1, 0, 1, 1]
    # A busy GPU is at its power limit, and that is no fault.
    assert [written[step]["gpu/power_capped"] for step in (20, 30, 40, 50, 60)] == [0, 0, 1, 0, 1]
    assert [written[step]["gpu/ecc_uncorrected"] for step in (60, 70)] == [0, 1]
    assert ["gpu/power_W" in written[step] for step in (80, 90, 100)] == [True, False, False]


@pytest.mark.bad_input("NVML not returning from a call")
def test_a_call_that_never_returns_holds_up_neither_a_step_nor_the_end(install, monkeypatch):
    monkeypatch.setattr(health, "EXIT_SECONDS", 0.05)
    nvml, metrics, release = install(fake_nvml()), Metrics(device=GPU), threading.Event()
    with watched(Health(metrics)) as observer:
        # Neither torch.cuda nor the device's stream is used after the start.
        monkeypatch.setattr(torch.cuda, "get_device_properties", pytest.fail)
        monkeypatch.setattr(torch.cuda, "synchronize", pytest.fail)
        metrics.log(observer, 10)
        nvml.nvmlDeviceGetTemperature.side_effect = lambda *_: release.wait(60)
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
    tags = host_tags(with_machine=True, root=str(tmp_path))
    assert tags.pop("memory/host_rss_GiB") == pytest.approx(resident_bytes()[1] / 2**30, rel=0.1)
    assert tags == {"host/memory_used_GiB": used, "host/available_GiB": available}
    assert list(host_tags(with_machine=False)) == ["memory/host_rss_GiB"]
