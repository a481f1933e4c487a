"""The doctor: a line per check with its fix, whatever the machine lacks; slow ranks are named."""

import re
import shutil
import socket
import time
from collections import namedtuple
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch

from dist_amp.commands import doctor
from dist_amp.commands.doctor import fail, ok
from dist_amp.distributed import machine

usage = namedtuple("usage", "total used free")


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "FLAGS", {"bf16": {"flags"}, "fp16": set()})  # on any CPU
    for name in "RANK WORLD_SIZE MASTER_PORT TORCHELASTIC_RUN_ID CUDA_VISIBLE_DEVICES".split():
        monkeypatch.delenv(name, raising=False)


def test_every_check_is_one_line_and_the_last_line_counts_them(capsys):
    assert doctor.main([]) == 0
    *lines, empty, last = capsys.readouterr().out.splitlines()
    assert empty == ""
    assert all(line[:6] in ("ok    ", "warn  ", "fail  ") for line in lines)
    oks = sum(line.startswith("ok") for line in lines)
    assert last == f"{oks} ok, {len(lines) - oks} warn, 0 fail: ready to train"


def version(name):
    if name == "safetensors":
        raise PackageNotFoundError(name)
    return "2.10.0+cu126" if name == "torch" else "99.0"


@pytest.mark.bad_input("`doctor`: a check that fails itself")
@pytest.mark.bad_input("`doctor`: a package that is missing or too old")
@pytest.mark.bad_input("`doctor`: a host name that does not resolve")
@pytest.mark.bad_input("`doctor`: little shared memory")
@pytest.mark.bad_input("`doctor`: a folder that can't be written, or a full disk")
def test_each_thing_that_a_machine_lacks_is_a_check_with_the_fix(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor.machine, "reason_unused", lambda: 1 / 0)
    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: time.sleep(60))
    monkeypatch.setattr(doctor, "RESOLVE_SECONDS", 0.1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(64 * 2**20, 0, 64 * 2**20))
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    full = f"{tmp_path}/runs is writable, 0.1 GiB free: little .*; choose another with --run.dir"
    for status, name, text in (
        ("warn", "gpus", r"can't be checked \(ZeroDivisionError: division by zero\)"),
        ("fail", "torch", r"2.10.0\+cu126; pip install 'torch>=2.11'"),
        ("fail", "safetensors", "not installed; pip install 'safetensors>=0.5'"),
        ("warn", "hostname", ".*no answer within 0.1 s.*torchrun --local-addr 127.0.0.1"),
        ("warn", "/dev/shm", ".*--shm-size=16g"),
        ("warn", "runs folder", full),
        ("fail", "data cache", r".*file can't be written \(Not a directory\); .* HF_HOME"),
    ):
        assert re.search(f"^{status}  {name} +{text}", out, re.M), name
    assert not (tmp_path / "runs").exists(), "it leaves nothing behind"


@pytest.mark.bad_input("`doctor`: GPUs that torch can't use, or has no code for; no NCCL")
def test_gpus_and_their_precisions_are_reported_and_what_torch_can_not_use_fails(monkeypatch):
    monkeypatch.setattr(doctor.machine, "reason_unused", lambda: "8 GPUs, and driver 525 ...")
    assert [*doctor.gpus()] == [fail("gpu", "8 GPUs, and driver 525 ...")]
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
    monkeypatch.setattr(doctor, "run_kernel", lambda device: None)
    gpu, *_, nccl = doctor.gpus()
    assert gpu == ok("gpu", "2 x Fake GPU, 80 GiB")
    assert nccl == fail("nccl", "missing in this build of torch; install one from pytorch.org")
    (on_gpu,) = doctor.precision()
    assert on_gpu.status == "warn"
    assert on_gpu.text.startswith("Fake GPU only emulates bf16, which is slower than float32; use ")

    def refuse(device):
        raise RuntimeError("CUDA error: no kernel image ...")

    monkeypatch.setattr(doctor, "run_kernel", refuse)
    expected = fail("gpu", "Fake GPU: CUDA error: no kernel image ...")
    assert next(doctor.gpus()) == expected


@pytest.mark.bad_input("`doctor`: ranks that do not find one another")
def test_ranks_that_do_not_find_one_another_are_a_failed_check(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "JOIN_SECONDS", 0.2)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "WORLD_SIZE": "2", "RANK": "1"}
    for name, value in (place | {"LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    assert doctor.main([]) == 1
    said = capsys.readouterr().out
    assert "they can't work together: no rank 0 at 127.0.0.1:9 within " in said
    assert said.endswith("1 fail: fix what failed before you train\n")


def test_what_is_wrong_on_another_machine_has_its_name(monkeypatch, capsys):
    found = [ok("gpu", "4 x A"), fail("torch", "2.0")]
    world = SimpleNamespace(gather=lambda mine: [mine, ("b", found)])
    monkeypatch.setattr(doctor, "start", lambda config: nullcontext(world))
    monkeypatch.setattr(doctor, "results_of", lambda checks, *world: [])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert re.search("^fail  torch .b. +2.0$", out, re.M)
    assert "4 x A" not in out


@pytest.mark.bad_input("`doctor`: a slow rank or link")
def test_a_rank_that_is_slower_than_the_median_is_named_with_the_factor():
    even = {"rank 0 on a": 1.0, "rank 1 on a": 0.9, "rank 2 on b": 1.1}
    check = doctor.compare("matmul", even, "TFLOP/s", 1.2)
    assert check == ok("matmul", "1 TFLOP/s (median; 0.9 to 1.1)")
    slow = even | {"rank 3 on b": 0.5, "rank 4 on b": 1.0}
    check = doctor.compare("matmul", slow, "TFLOP/s", 1.2)
    assert check.status == "warn"
    assert ": rank 3 on b is 2.0x slower; look" in check.text
