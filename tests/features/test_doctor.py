"""The doctor: a line per check with its fix, whatever the machine lacks, and ranks that are slow
are named.
"""

import json
import platform
import shutil
import socket
import time
from collections import namedtuple

import pytest
import torch

from dist_amp.commands import doctor, doctor_checks
from dist_amp.commands.doctor_checks import fail, ok, warn
from dist_amp.distributed import machine

usage = namedtuple("usage", "total used free")


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "FLAGS", {"bf16": {"flags"}, "fp16": set()})  # on any CPU
    for name in "RANK WORLD_SIZE MASTER_PORT TORCHELASTIC_RUN_ID CUDA_VISIBLE_DEVICES".split():
        monkeypatch.delenv(name, raising=False)


def test_every_check_is_one_aligned_line_the_last_line_counts_them_and_json_has_the_same(capsys):
    assert doctor.main([]) == 0
    *lines, empty, last = capsys.readouterr().out.splitlines()
    assert empty == ""
    assert all(line[:6] in ("ok    ", "warn  ", "fail  ") for line in lines)
    versions = (torch.__version__, platform.python_version())
    columns = {line.index(v) for line in lines for v in versions if f"  {v}" in line}
    assert len(columns) == 1
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in found["checks"]] == [
        check.name for check in doctor_checks.machine_checks()
    ]
    assert (found["ranks"], found["fail"], found["ok"] + found["warn"]) == (1, 0, len(lines))
    assert last == f"{found['ok']} ok, {found['warn']} warn, 0 fail: ready to train"


@pytest.mark.bad_input("`doctor`: a check that fails itself")
@pytest.mark.bad_input("`doctor`: a package that is missing or too old")
@pytest.mark.bad_input("`doctor`: a host name that does not resolve")
@pytest.mark.bad_input("`doctor`: little shared memory")
@pytest.mark.bad_input("`doctor`: a folder that can't be written, or a full disk")
def test_each_thing_that_a_machine_lacks_is_a_check_with_the_fix(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(platform, "python_version", lambda: 1 / 0)
    versions = {"torch": "2.10.0+cu126", "safetensors": ""}
    monkeypatch.setattr(doctor_checks, "installed", lambda name: versions.get(name, "99.0"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: time.sleep(60))
    monkeypatch.setattr(doctor_checks, "RESOLVE_SECONDS", 0.1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(64 * 2**20, 0, 64 * 2**20))
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "file"))
    assert doctor.main(["--json"]) == 1
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    full = f"{tmp_path}/runs is writable, 0.1 GiB free: little"
    for name, status, found, fix in (
        ("python", "warn", "can't be checked (ZeroDivisionError: division by zero)", ""),
        ("torch", "fail", "2.10.0+cu126; the project needs >=2.11", "pip install 'torch>=2.11'"),
        ("safetensors", "fail", "not installed", "pip install 'safetensors>=0.5'"),
        ("hostname", "warn", "no answer within 0.1 s", "torchrun --local-addr 127.0.0.1"),
        ("/dev/shm", "warn", "", "--shm-size=16g"),
        ("runs folder", "warn", full, "choose another by --run.dir"),
        ("data cache", "fail", "file can't be written (Not a directory)", "another by HF_HOME"),
    ):
        assert checks[name]["status"] == status, name
        assert found in checks[name]["found"]
        assert fix in checks[name]["fix"]
    assert not (tmp_path / "runs").exists(), "it leaves nothing behind"
    (missing,) = doctor_checks.shared_memory(tmp_path / "none")
    assert missing.status == "fail"


@pytest.mark.bad_input("`doctor`: GPUs that torch can't use, or has no code for; no NCCL")
def test_gpus_and_their_precisions_are_reported_and_what_torch_can_not_use_fails(monkeypatch):
    monkeypatch.setattr(doctor_checks, "reason_unused", lambda: "8 NVIDIA GPUs, and driver 525 ...")
    assert [*doctor_checks.gpus()] == [fail("gpu", "8 NVIDIA GPUs, and driver 525 ...")]
    properties = namedtuple("properties", "total_memory major minor")(80 * 2**30, 7, 5)
    for function, value in {
        "is_available": True,
        "device_count": 2,
        "get_device_name": "Fake GPU",
        "get_device_capability": (7, 5),
        "get_device_properties": properties,
    }.items():
        monkeypatch.setattr(torch.cuda, function, lambda *_, value=value: value)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr(doctor_checks, "run_kernel", lambda device: None)
    gpu, *_, nccl = doctor_checks.gpus()
    assert gpu.found == "2 x Fake GPU, 80 GiB, sm_75"
    assert (nccl.status, nccl.found) == ("fail", "missing in this build of torch")
    on_gpu, on_cpu = doctor_checks.precisions()
    assert on_gpu.status == "warn"
    assert on_gpu.found == "bf16 emulated, fp16 native on Fake GPU"
    assert on_cpu == ok("precision", "bf16 native, fp16 emulated on the CPU")

    def refuse(device):
        raise RuntimeError("CUDA error: no kernel image ...")

    monkeypatch.setattr(doctor_checks, "run_kernel", refuse)
    expected = fail("gpu", "Fake GPU: CUDA error: no kernel image ...")
    assert next(doctor_checks.gpus()) == expected


def test_what_is_ok_everywhere_is_said_once_and_what_fails_on_some_machines_with_their_names():
    gpus = [ok("gpu", "4 x A"), ok("gpu", "4 x B")]
    old, small = fail("torch", "2.0"), warn("/dev/shm", "0.06 GiB", "raise it")
    machines = [
        ("a", [*gpus, old, ok("/dev/shm", "9 GiB")]),
        ("b", [*gpus, old, small]),
        ("c", [ok("gpu", "8 x A"), old, small]),
    ]
    said = [(check.title, check.found) for check in doctor_checks.merge(machines)]
    good = [("gpu", "4 x A"), ("gpu", "4 x B"), ("/dev/shm", "9 GiB")]
    assert said == [*good, ("torch", "2.0"), ("/dev/shm (b, c)", "0.06 GiB")]


@pytest.mark.bad_input(
    "`doctor`: ranks that do not find one another, or differ in code or versions"
)
@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "no rank 0 at 127.0.0.1:9 within "),
    ],
)
def test_ranks_that_do_not_find_one_another_are_a_failed_check(capsys, monkeypatch, environ, why):
    monkeypatch.setattr(doctor, "JOIN_SECONDS", 0.2)
    place = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in (place | environ).items():
        monkeypatch.setenv(name, value)
    assert doctor.main([]) == 1
    said = capsys.readouterr().out
    assert f"they can't work together: {why}" in said
    assert said.endswith("1 fail: fix what failed before you train\n")


@pytest.mark.bad_input("`doctor`: a slow rank or link")
def test_a_rank_that_is_slower_than_the_median_is_named_with_the_factor():
    even = {"rank 0 on a": 1.0, "rank 1 on a": 0.9, "rank 2 on b": 1.1}
    check = doctor_checks.compare("matmul", even, "TFLOP/s", "look there")
    assert check == ok("matmul", "1 TFLOP/s (median; 0.9 to 1.1)")
    slow = even | {"rank 3 on b": 0.5, "rank 4 on b": 1.0}
    check = doctor_checks.compare("matmul", slow, "TFLOP/s", "look there")
    assert check.status == "warn"
    assert check.found.endswith(": rank 3 on b is 2.0x slower")
