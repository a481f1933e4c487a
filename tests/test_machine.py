"""GPUs that torch can't use are refused before anything trains, and ranks are bound to CPUs only
where that works.
"""

import os
from types import SimpleNamespace

import pytest
import torch

from dist_amp.commands import local_gpus
from dist_amp.distributed import environment, gpu_checks
from dist_amp.distributed.gpu_checks import (
    check_architecture,
    check_gpus_are_used,
    driver_branch,
    runs_on,
    why_unused,
)
from dist_amp.errors import ConfigError
from dist_amp.scaling.compile import check_compile
from dist_amp.settings import CompileConfig, RunConfig
from dist_amp.world import World

OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  "
    "Release Build  (dvs-builder@U16)\nGCC 11.4\n"
)
CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The root of a machine with two NVIDIA GPUs that torch does not find, and a build of torch for
    CUDA 13.0.
    """
    for name in ("dev/nvidia0", "dev/nvidia1", "dev/nvidiactl", "proc/driver/nvidia/version"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(OPEN)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.bad_input("GPUs, and a build of torch for the CPU alone (`run.device=auto`)")
def test_a_build_without_cuda_on_a_machine_with_gpus_is_refused_with_what_to_install(
    root, monkeypatch
):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError) as error:
        check_gpus_are_used(root)
    assert str(error.value) == (
        f"run.device=auto: this machine has 2 NVIDIA GPUs, and torch {torch.__version__} is a "
        "build for the CPU alone; install one for CUDA (pytorch.org); or train on the CPU with "
        "--run.device cpu"
    )


@pytest.mark.bad_input("a driver too old for the CUDA that torch was built for")
@pytest.mark.parametrize(
    ("text", "cuda", "branch", "fits"),
    [
        (OPEN, "13.0", 570, 12),
        (CLOSED, "13.2", 535, 12),
        (CLOSED.replace("535", "470"), "12.6", 470, 11),
    ],
)
def test_a_driver_too_old_for_the_build_is_refused_with_both_ways_out(
    root, monkeypatch, text, cuda, branch, fits
):
    (root / "proc/driver/nvidia/version").write_text(text)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert driver_branch(root) == branch
    needed = gpu_checks.OLDEST_DRIVER[int(cuda.split(".")[0])]
    said = why_unused(root)
    assert (
        f"their driver {branch} is too old for torch {torch.__version__}, built for CUDA {cuda}; "
        "install" in said
    )
    assert said.endswith(
        f"install driver {needed} or newer, or torch built for CUDA {fits}.x (pytorch.org)"
    )


@pytest.mark.bad_input("GPUs, and CUDA fails for another reason")
def test_what_cuda_says_is_shown_where_the_driver_is_new_enough(root, monkeypatch):
    (root / "proc/driver/nvidia/version").write_text(OPEN.replace("570", "590"))

    def init():
        raise RuntimeError(
            "CUDA unknown error - this may be due to an incorrectly set up environment\nmore"
        )

    monkeypatch.setattr(torch.cuda, "init", init)
    assert (
        "but CUDA can't be used (CUDA unknown error - this may be due to an incorrectly"
        in why_unused(root)
    )
    (root / "proc/driver/nvidia/version").unlink()  # a container may not show it
    assert "; check that `nvidia-smi` works" in why_unused(root)


def test_gpus_that_are_hidden_not_given_to_a_container_or_absent_are_not_asked_about(
    root, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_gpus_are_used(root)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for name in ("nvidia0", "nvidia1"):  # /proc still shows the host's driver
        (root / "dev" / name).unlink()
    check_gpus_are_used(root)


def test_rocm_is_not_judged_by_nvidias_rules(root, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    check_gpus_are_used(root)
    (root / "dev/kfd").touch()
    assert "add the user to the groups render and video" in why_unused(root)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx942"])
    check_architecture(torch.device("cuda", 0))


def test_a_rank_refuses_such_a_machine_unless_it_is_to_train_on_the_cpu(root, monkeypatch):
    monkeypatch.setattr(gpu_checks, "why_unused", lambda _: why_unused(root))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigError,
        match=r"^run.device=auto: this machine has 2 NVIDIA GPUs, and their driver 570 is",
    ):
        environment.place_of(RunConfig())
    with pytest.raises(
        ConfigError,
        match=r"^run.device=cuda, but this machine has 2 NVIDIA GPUs, .*use run.device=cpu",
    ):
        environment.place_of(RunConfig(device="cuda"))
    assert environment.place_of(RunConfig(device="cpu")).device.type == "cpu"


# ---- the GPU's architecture ----


@pytest.mark.parametrize(
    ("architecture", "gpu", "runs"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 9), True),  # machine code runs on later minor versions
        ("sm_86", (8, 0), False),
        ("sm_75", (8, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("sm_120", (12, 1), True),
        ("sm_100", (12, 0), False),
        ("compute_80", (9, 0), True),  # PTX on any later GPU
        ("compute_120", (10, 0), False),
        ("compute_90a", (10, 0), False),
    ],
)
def test_which_code_runs_on_which_gpu(architecture, gpu, runs):
    assert runs_on(architecture, *gpu) is runs


CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.mark.bad_input("a GPU of an architecture that this build of torch has no code for")
@pytest.mark.parametrize(
    ("name", "gpu", "built", "said"),
    [
        (
            "Tesla V100-SXM2-16GB",
            (7, 0),
            CUDA_13,
            "is sm_70, .*; torch 2.11 to 2.14 built for CUDA 12.6 has code for sm_50",
        ),
        (
            "NVIDIA H100",
            (9, 0),
            ["sm_75", "sm_80"],
            "is sm_90, .*; install a newer torch, or one built for a newer CUDA",
        ),
        ("NVIDIA H100", (9, 0), ["sm_75", "compute_80"], ""),
        ("NVIDIA L40S", (8, 9), CUDA_13, ""),
    ],
)
def test_a_gpu_that_the_build_has_no_code_for_is_refused_with_a_build_that_has(
    name, gpu, built, said, monkeypatch
):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    if not said:
        check_architecture(torch.device("cuda", 0))
        return
    with pytest.raises(
        ConfigError, match=f"^{name} {said}.*; or train on the CPU with --run.device cpu$"
    ):
        check_architecture(torch.device("cuda", 0))


# ---- Triton's compiler ----


@pytest.mark.bad_input(
    "`compile.blocks` on a GPU without a C compiler, or without Python's headers"
)
@pytest.mark.parametrize(
    ("cc", "found", "headers", "said"),
    [
        (
            "",
            [],
            True,
            "needs a C compiler for Triton (gcc or clang, or the one that CC names); install it, "
            "or use",
        ),
        ("", ["clang"], True, ""),
        (
            "mycc",
            ["gcc"],
            True,
            "needs a C compiler for Triton (mycc, or the one that CC names); install it",
        ),
        ("", ["gcc"], False, "/Python.h for Triton (Debian: python3-dev); install it, or use"),
    ],
)
def test_inductor_on_a_gpu_needs_what_triton_compiles_with(
    cc, found, headers, said, monkeypatch, tmp_path
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setenv("CC", cc)
    monkeypatch.setattr("shutil.which", lambda name: name if name in found else None)
    monkeypatch.setattr("sysconfig.get_path", lambda *names: str(tmp_path))
    if headers:
        (tmp_path / "Python.h").touch()
    world = World(device=torch.device("cuda", 0))
    if not said:
        check_compile(CompileConfig(blocks=True), "single", 1, world)
        return
    with pytest.raises(ConfigError) as error:
        check_compile(CompileConfig(blocks=True), "single", 1, world)
    assert said in str(error.value)


# ---- NUMA ----


@pytest.fixture
def two_nodes(tmp_path, monkeypatch):
    """The root of a machine with CPUs 0-3 and 4-7 on two nodes, and a GPU on each; all CPUs are
    allowed.
    """
    for number, (cpus, bus) in enumerate((("0-3", 1), ("4-5,6,7", 0x41))):
        node = tmp_path / f"sys/devices/system/node/node{number}"
        gpu = tmp_path / f"sys/bus/pci/devices/0000:{bus:02x}:00.0"
        node.mkdir(parents=True)
        gpu.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cpus}\n")
        (gpu / "numa_node").write_text(f"{number}\n")
    (tmp_path / "sys/devices/system/node/possible").write_text("0-1")
    gpus = [SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0) for bus in (1, 0x41)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    numactl = tmp_path / "bin/numactl"
    numactl.parent.mkdir()
    numactl.write_text('#!/bin/sh\n[ "$1" = --physcpubind=0 ] && exec true\n')
    numactl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{numactl.parent}:{os.environ['PATH']}")
    return tmp_path


def test_ranks_are_bound_where_each_has_a_cpu_on_its_gpus_node(two_nodes):
    assert local_gpus.has_nodes(two_nodes)
    assert local_gpus.cpus_of(1, two_nodes) == {4, 5, 6, 7}
    assert local_gpus.why_unbound(2, 2, two_nodes) == ""


@pytest.mark.bad_input("ranks that can't be bound to the CPUs of their GPUs' NUMA nodes")
def test_ranks_are_not_bound_where_the_cpuset_has_no_cpu_of_their_gpus_node(two_nodes, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    why = "1 ranks have their GPU on node 1, of whose CPUs this process may use 0"
    assert local_gpus.why_unbound(2, 2, two_nodes) == why
    assert local_gpus.why_unbound(1, 2, two_nodes) == "", "the first GPU's node has some"


def test_ranks_are_not_bound_where_torchrun_would_fail(two_nodes, monkeypatch):
    assert local_gpus.why_unbound(3, 2, two_nodes) == "there are 2 GPUs for 3 ranks"
    (two_nodes / "bin/numactl").write_text(
        "#!/bin/sh\necho sched_setaffinity: Operation not permitted >&2; exit 1\n"
    )
    assert (
        local_gpus.why_unbound(2, 2, two_nodes)
        == "numactl fails: sched_setaffinity: Operation not permitted"
    )
    (two_nodes / "sys/bus/pci/devices/0000:41:00.0/numa_node").unlink()
    assert local_gpus.why_unbound(2, 2, two_nodes).startswith("/sys does not show the nodes (")
    monkeypatch.setenv("PATH", "/nowhere")
    assert local_gpus.why_unbound(2, 2, two_nodes) == "numactl is not installed"


def asked(capsys, *words):
    assert local_gpus.exit_status(local_gpus.ask, words) in (0, 64)
    return capsys.readouterr()


def test_the_launchers_get_the_number_of_gpus_and_the_option_or_why_not(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(local_gpus, "has_nodes", lambda: True)
    monkeypatch.setattr(
        local_gpus, "why_unbound", lambda ranks, gpus: "" if ranks == gpus else "a reason"
    )
    assert asked(capsys).out == "2 --numa-binding=node\n"
    monkeypatch.setenv("NPROC_PER_NODE", "1")
    said = asked(capsys)
    assert said.out == "2 \n"
    assert said.err == "numa   ranks are not bound to the CPUs near their GPUs: a reason\n"
    assert asked(capsys, "--run.device", "cpu", "-h").out == "0 \n"
    monkeypatch.setattr(local_gpus, "has_nodes", lambda: False)
    assert asked(capsys).out == "2 \n"


def test_the_launchers_refuse_gpus_that_torch_cannot_use_once(root, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(local_gpus, "check_gpus_are_used", lambda: check_gpus_are_used(root))
    assert asked(capsys).err.startswith(
        "error: run.device=auto: this machine has 2 NVIDIA GPUs, and their driver 570"
    )
    assert asked(capsys, "--run.device", "cpu").out == "0 \n"
