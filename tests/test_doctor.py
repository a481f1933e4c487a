"""The doctor: a line per check with its fix, whatever the machine lacks, and ranks that are slow
are named.
"""

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from forked import ROOT, Forked, finish
from ranks import on_ranks

from dist_amp.commands import doctor, doctor_machine, doctor_ranks
from dist_amp.commands.doctor_machine import Check, guarded, machine_checks

usage = namedtuple("usage", "total used free")


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor_machine, "cpu_slowdown", {"bf16": 0.9, "fp16": 14.0}.__getitem__)
    for name in (
        "RANK",
        "WORLD_SIZE",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "CUDA_VISIBLE_DEVICES",
    ):
        monkeypatch.delenv(name, raising=False)


def only(checks):
    (check,) = checks
    return check


def test_every_check_is_one_aligned_line_and_the_last_line_counts_them(capsys):
    assert doctor.main([]) == 0
    *lines, empty, last = capsys.readouterr().out.splitlines()
    assert empty == ""
    assert all(line[:6] in ("ok    ", "warn  ", "fail  ") for line in lines)
    assert len({line.index(version) for line in lines for version in (torch.__version__, platform.python_version())
                if f"  {version}" in line}) == 1  # fmt: skip
    number = len(machine_checks(1))
    assert len(lines) == number
    warned = sum(line.startswith("warn") for line in lines)
    assert last == f"{number - warned} ok, {warned} warn, 0 fail: ready to train"


def test_json_is_one_object_with_the_same_checks(capsys):
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in found["checks"]] == [
        check.name for check in machine_checks(1)
    ]
    assert found["ok"] + found["warn"] == len(found["checks"])
    assert (found["ranks"], found["fail"]) == (1, 0)


def test_a_failed_check_ends_with_status_1_and_shows_its_fix(capsys, monkeypatch):
    monkeypatch.setattr(
        doctor_machine, "version", lambda name: {"torch": "2.10.0+cu126"}.get(name, "99.0")
    )
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "fail  torch " in out
    assert "  2.10.0+cu126; the project needs >=2.11; pip install 'torch>=2.11'" in out
    assert out.splitlines()[-1].endswith("1 fail: fix what failed before you train")


@pytest.mark.bad_input("`doctor`: a check that fails itself")
def test_a_check_that_fails_itself_is_a_line(capsys, monkeypatch):
    monkeypatch.setattr(socket, "create_server", lambda *_: 1 / 0)
    monkeypatch.setattr(
        resource, "getrlimit", lambda _: (_ for _ in ()).throw(OSError("no limits here"))
    )
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert "can't be checked (ZeroDivisionError: division by zero)" in out
    assert "can't be checked (OSError: no limits here)" in out
    assert only(guarded("x", lambda: 1 / 0)).status == "warn"


# --- versions


def test_a_package_that_cannot_be_imported_is_a_line():
    code = "import sys; sys.modules['tyro'] = None; from dist_amp.commands import doctor; sys.exit(doctor.main([]))"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("fail  packages  can't be imported (import of tyro halted")
    assert done.stdout.endswith("); pip install -e . -c launch/constraints.txt\n")


@pytest.mark.bad_input("`doctor`: a package that is missing, too old, or can't be imported")
def test_a_missing_package_names_the_command_that_installs_it(monkeypatch):
    real = doctor_machine.version

    def version(name):
        if name == "tyro":
            raise doctor_machine.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor_machine, "version", version)
    found = {check.name: check for check in doctor_machine.packages()}
    assert found["tyro"] == Check("tyro", "fail", "not installed", "pip install 'tyro>=1.0'")
    assert found["torch"].status == "ok"


def test_packages_that_are_not_the_pinned_releases_are_listed(monkeypatch, tmp_path):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch/constraints.txt").write_text(
        f"# made by\ntorch=={torch.__version__.split('+')[0]}\ntyro==0.1\n"
    )
    monkeypatch.setattr(doctor_machine, "ROOT", tmp_path)
    check = only(doctor_machine.pins())
    assert check.status == "warn"
    assert check.found.startswith("not as tested: tyro ")
    assert check.found.endswith(" (0.1)")
    assert check.fix == "pip install -c launch/constraints.txt"
    (tmp_path / "launch/constraints.txt").unlink()
    assert only(doctor_machine.pins()).status == "ok"


# --- devices


@pytest.mark.bad_input("`doctor`: GPUs that torch can't use, or has no code for; no NCCL")
def test_gpus_that_torch_cannot_use_fail_with_the_reason_and_the_fix(monkeypatch):
    monkeypatch.setattr(
        doctor_machine,
        "why_unused",
        lambda: "this machine has 8 NVIDIA GPUs, and their driver 525 ...",
    )
    assert only(doctor_machine.gpus()) == Check(
        "gpu", "fail", "this machine has 8 NVIDIA GPUs, and their driver 525 ..."
    )


@pytest.fixture
def two_gpus(monkeypatch):
    """two_gpus(capability, driver): a machine with two GPUs that are equal, and torch for CUDA
    12.6.
    """

    def make(capability, driver=560, name="Fake GPU"):
        properties = namedtuple("properties", "total_memory major minor")(80 * 2**30, *capability)
        for function, value in {
            "is_available": True, "device_count": 2, "get_device_name": name, "get_device_capability": capability,
            "get_device_properties": properties, "get_arch_list": ["sm_70", "sm_80", "sm_90"],
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, function, lambda *_, value=value: value)
        monkeypatch.setattr(torch.version, "cuda", "12.6")
        monkeypatch.setattr(doctor_machine, "driver_branch", lambda: driver)

    return make


def test_gpus_are_counted_and_their_driver_is_compared_with_the_build(two_gpus):
    two_gpus((9, 0))
    gpu, driver = doctor_machine.gpus()
    assert gpu == Check("gpu", "ok", "2 x Fake GPU, 80 GiB, sm_90")
    assert driver == Check(
        "driver", "ok", "560; torch is built for CUDA 12.6, which needs 525 or newer"
    )
    two_gpus((9, 0), driver=470)
    assert doctor_machine.gpus()[1].status == "warn"


def test_a_gpu_that_the_build_has_no_code_for_fails(two_gpus):
    two_gpus((6, 0), name="Old GPU")
    gpu, _ = doctor_machine.gpus()
    assert gpu.status == "fail"
    assert gpu.found.startswith("Old GPU is sm_60, and torch ")


def test_gpus_and_no_nccl_fails(two_gpus, monkeypatch):
    two_gpus((9, 0))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert doctor_machine.communication() == [
        Check("nccl", "fail", "missing in this build of torch", "install one from pytorch.org")
    ]


@pytest.mark.parametrize(
    ("capability", "status", "text"),
    [
        ((9, 0), "ok", "bf16 native, fp16 native, fp8 native on Fake GPU"),
        ((8, 0), "ok", "bf16 native, fp16 native, fp8 none on Fake GPU"),
        ((7, 5), "warn", "bf16 emulated, fp16 native, fp8 none on Fake GPU"),
        ((5, 0), "warn", "bf16 none, fp16 none, fp8 none on Fake GPU"),
    ],
)
def test_what_a_gpu_computes_natively_is_said_per_dtype(two_gpus, capability, status, text):
    two_gpus(capability)
    gpu, cpu = doctor_machine.precisions()
    assert (gpu.status, gpu.found) == (status, text)
    assert cpu == Check(
        "precision", "ok", "bf16 native, fp16 emulated (14x slower), fp8 none on the CPU"
    )


def test_a_cpu_that_emulates_bf16_is_a_warning_where_it_trains(monkeypatch):
    monkeypatch.setattr(doctor_machine, "cpu_slowdown", lambda dtype: 30.0)
    check = only(doctor_machine.precisions())
    assert (check.status, check.fix) == ("warn", "train with --use_amp false on this CPU")


# --- network, limits, folders


@pytest.mark.bad_input("`doctor`: a host name that does not resolve")
@pytest.mark.parametrize("why", ["unknown", "silent"])
def test_a_host_name_that_does_not_resolve_warns_that_torchrun_may_hang(monkeypatch, why):
    def getaddrinfo(*_):
        if why == "silent":
            time.sleep(60)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(doctor_machine, "RESOLVE_SECONDS", 0.1)
    check = only(doctor_machine.hostname())
    assert check.status == "warn"
    assert (
        "Name or service not known" if why == "unknown" else "no answer within 0.1 s"
    ) in check.found
    assert "torchrun --local-addr 127.0.0.1" in check.fix


@pytest.mark.bad_input("`doctor`: a MASTER_PORT that is in use, or is none")
def test_a_master_port_that_is_in_use_fails_and_a_launchers_own_does_not(monkeypatch):
    with socket.create_server(("", 0)) as other:
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        check = only(doctor_machine.ports())
        assert (check.status, check.fix) == ("fail", "choose another")
        assert "(Address already in use" in check.found
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        assert only(doctor_machine.ports()).status == "ok"
        monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert only(doctor_machine.ports()).status == "ok"
    monkeypatch.setenv("MASTER_PORT", "seven")
    assert only(doctor_machine.ports()).found == "MASTER_PORT='seven' is no port"


@pytest.mark.bad_input("`doctor`: little shared memory")
def test_a_small_or_missing_dev_shm_names_what_raises_it(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(64 * 2**20, 0, 64 * 2**20))
    check = only(doctor_machine.shared_memory(tmp_path))
    assert check.status == "warn"
    assert "--shm-size=16g" in check.fix
    monkeypatch.setattr(sys, "platform", "linux")
    assert only(doctor_machine.shared_memory(tmp_path / "none")).status == "fail"


@pytest.mark.bad_input("`doctor`: too few open files for the ranks")
@pytest.mark.parametrize(
    ("hard", "ranks", "status", "text"),
    [
        (1024, 8, "ok", "1,024 per process: enough for 275 ranks"),
        (1024, 276, "fail", "1,024 per process: enough for 275 ranks"),
        (256, 2, "warn", "256 per process: enough for 19 ranks"),
        (100, 2, "fail", "100 per process: enough for 1 ranks"),
        (resource.RLIM_INFINITY, 10_000, "ok", "no limit"),
    ],
)
def test_the_limit_of_open_files_says_for_how_many_ranks_it_suffices(
    monkeypatch, hard, ranks, status, text
):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, hard))
    check = only(doctor_machine.open_files(ranks))
    assert (check.status, check.found) == (status, text)
    assert ("ulimit -Hn" in check.fix) == (status != "ok")


@pytest.mark.bad_input("`doctor`: a folder that can't be written, or a full disk")
def test_a_folder_that_cannot_be_written_fails_and_a_full_one_warns(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "file"))
    runs, cache, _ = doctor_machine.folders()
    assert runs.found.startswith(f"{tmp_path}/runs is writable, ")
    assert not (tmp_path / "runs").exists(), "it leaves nothing behind"
    assert cache == Check(
        "data cache",
        "fail",
        f"{tmp_path}/file can't be written (Not a directory)",
        "choose another by HF_HOME",
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 0, 2**30))
    runs, _, _ = doctor_machine.folders()
    assert (runs.status, runs.fix) == ("warn", "choose another by --run.dir")


# --- several ranks


def test_what_is_ok_everywhere_is_said_once_and_what_fails_on_some_machines_with_their_names():
    fine, slow = Check("memory", "ok", "20 GiB"), Check("/dev/shm", "warn", "0.06 GiB", "raise it")
    machines = [
        ("a", [fine, Check("/dev/shm", "ok", "9 GiB")]),
        ("b", [Check("memory", "ok", "21 GiB"), slow]),
    ]
    found = doctor_ranks.merged([*machines, ("c", [fine, slow])])
    assert [(check.title, check.status, check.found) for check in found] == [
        ("memory", "ok", "20 GiB; ok on 2 more machines"),
        ("/dev/shm", "ok", "9 GiB"),
        ("/dev/shm (b, c)", "warn", "0.06 GiB"),
    ]
    gpus = [Check("gpu", "ok", "4 x A"), Check("gpu", "ok", "4 x B")]
    assert doctor_ranks.merged([("a", gpus), ("b", gpus)]) == gpus


@pytest.mark.parametrize(
    ("size", "why"), [("2", "RANK is not set"), ("x", "WORLD_SIZE='x' in the environment is not a")]
)
def test_an_environment_at_odds_with_itself_is_a_failed_check(capsys, monkeypatch, size, why):
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setenv("RANK", "0") if size == "x" else None
    assert doctor.main([]) == 1
    assert f"they can't work together: {why}" in capsys.readouterr().out


def test_a_rank_whose_products_are_slow_is_named_with_its_host_and_factor():
    hosts = ["a"] * 4 + ["b"] * 4
    assert (
        only(doctor_ranks.judge_rates([1.0, 0.9, 1.1, 0.95] * 2, hosts, "bfloat16")).status == "ok"
    )
    check = only(doctor_ranks.judge_rates([1.0] * 6 + [0.5, 1.0], hosts, "bfloat16"))
    assert check.status == "warn"
    assert check.found.endswith(": rank 6 on b is 2.0x slower")


def test_a_slow_link_is_named_among_those_of_its_kind():
    hosts = ["a", "a", "b", "b", "c", "c"]  # the links to 0, 2 and 4 cross machines
    assert only(doctor_ranks.judge_links([10.0, 100.0] * 3, hosts)).found == (
        "100 GB/s in a machine, 10 GB/s between machines from each rank to the next (medians)"
    )
    check = only(doctor_ranks.judge_links([10.0, 100.0, 2.0, 100.0, 10.0, 100.0], hosts))
    assert (check.status, check.found.partition("(medians): ")[2]) == (
        "warn",
        "rank 1 on a to rank 2 on b is 5.0x slower",
    )


def rank_2_is_slow(world):
    real = torch.mm

    def slow(*args):
        time.sleep(0.05 if world.rank == 2 else 0)
        return real(*args)

    torch.mm = slow
    doctor_ranks.MATRIX["cpu"], doctor_ranks.REPEATS = 64, 5
    try:
        return doctor_ranks.ranks_checks(world)
    finally:
        torch.mm = real


@pytest.mark.bad_input("`doctor`: a slow rank or link")
def test_four_ranks_agree_on_what_they_measure_and_name_the_slow_one():
    found = on_ranks(4, rank_2_is_slow)
    assert found.count(found[0]) == 4
    code, reduce, links, matmul = found[0]
    assert (code.status, code.found) == ("ok", "4 ranks have the same code and versions")
    assert " GB/s bus bandwidth with 4 MiB; " in reduce.found
    assert " GB/s in a machine from each rank to the next" in links.found
    assert matmul.status == "warn"
    assert f"rank 2 on {platform.node()} is " in matmul.found


def other_code(world):
    from dist_amp.supervise import preflight

    real = preflight.versions
    preflight.versions = lambda: real() | ({"torch": "2.12.1"} if world.rank == 1 else {})
    try:
        return doctor_ranks.same_code(world)
    finally:
        preflight.versions = real


def test_ranks_with_other_versions_fail():
    check = only(on_ranks(2, other_code)[0])
    assert check.status == "fail"
    assert f"torch is {torch.__version__} on rank 0" in check.found
    assert "2.12.1 on rank 1" in check.found


def test_two_ranks_are_started_and_rank_0_prints(launch, tmp_path):
    """As torchrun does, with the variables that every launcher sets."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        Forked(
            ["--json"],
            tmp_path,
            launch.environ({**world, "RANK": str(r), "LOCAL_RANK": str(r)}),
            "dist_amp.doctor",
        )
        for r in range(2)
    ]
    first, second = (finish(rank, 300) for rank in ranks)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert second.stdout == ""
    found = json.loads(first.stdout)
    assert found["ranks"] == 2
    assert [check["name"] for check in found["checks"]][-4:] == [
        "same code",
        "all-reduce",
        "links",
        "matmul",
    ]


@pytest.mark.bad_input(
    "`doctor`: ranks that do not find one another, or differ in code or versions"
)
def test_ranks_that_do_not_find_one_another_are_a_failed_check(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "JOIN_SECONDS", 0.2)
    for name, value in {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": "9"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert doctor.main([]) == 1
    assert "they can't work together: no rank 0 at 127.0.0.1:9 within " in capsys.readouterr().out


def test_the_help_says_how_to_start_it_on_several_ranks(capsys):
    assert doctor.main(["--help"]) == 0
    assert "torchrun --standalone" in capsys.readouterr().out
    assert doctor.main(["--jsn"]) == 64
    assert Path("runs").exists() is False
    assert os.listdir() == []
