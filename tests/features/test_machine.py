"""GPUs that torch can't use are refused before anything trains."""

import pytest
import torch

from dist_amp.distributed import machine, process
from dist_amp.distributed.machine import (
    check_architecture,
    check_gpus_are_used,
    driver_branch,
    runs_on,
    why_unused,
)
from dist_amp.errors import ConfigError
from dist_amp.settings import RunConfig

OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  "
    "Release Build  (dvs-builder@U16)\nGCC 11.4\n"
)
CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The root of a machine with two NVIDIA GPUs that torch, built for CUDA 13.0, does not find."""
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
    why = f"this machine has 2 NVIDIA GPUs, and torch {torch.__version__} is a build for the CPU"
    fix = "install one for CUDA (pytorch.org); or train on the CPU with --run.device cpu"
    assert str(error.value) == f"run.device=auto: {why} alone; {fix}"


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
    needed = machine.OLDEST_DRIVER[int(cuda.split(".")[0])]
    why = f"their driver {branch} is too old for torch {torch.__version__}, built for CUDA {cuda}"
    fix = f"install driver {needed} or newer, or torch built for CUDA {fits}.x (pytorch.org)"
    assert why_unused(root).endswith(f"{why}; {fix}")


@pytest.mark.bad_input("GPUs, and CUDA fails for another reason")
def test_what_cuda_says_is_shown_where_the_driver_is_new_enough(root, monkeypatch):
    (root / "proc/driver/nvidia/version").write_text(OPEN.replace("570", "590"))

    def init():
        raise RuntimeError("CUDA unknown error - this may be due to\nmore")

    monkeypatch.setattr(torch.cuda, "init", init)
    said = "but CUDA can't be used (CUDA unknown error - this may be due to)"
    assert said in why_unused(root)
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
    monkeypatch.setattr(machine, "why_unused", lambda _: why_unused(root))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    auto = r"^run.device=auto: this machine has 2 NVIDIA GPUs, and their driver 570 is"
    cuda = r"^run.device=cuda, but this machine has 2 NVIDIA GPUs, .*use run.device=cpu"
    for device, said in (("auto", auto), ("cuda", cuda)):
        with pytest.raises(ConfigError, match=said):
            process.place_of(RunConfig(device=device))
    assert process.place_of(RunConfig(device="cpu"))[-1].type == "cpu"


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
    ("gpu", "built", "said"),
    [
        ((7, 0), CUDA_13, "sm_70, .*; torch 2.11 to 2.14 built for CUDA 12.6 has code for sm_50"),
        ((9, 0), ["sm_75", "sm_80"], "sm_90, .*; install a newer torch, or one built for a newer"),
        ((9, 0), ["sm_75", "compute_80"], ""),
        ((8, 9), CUDA_13, ""),
    ],
)
def test_a_gpu_that_the_build_has_no_code_for_is_refused_with_a_build_that_has(
    gpu, built, said, monkeypatch
):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    if not said:
        check_architecture(torch.device("cuda", 0))
        return
    fix = "; or train on the CPU with --run.device cpu"
    with pytest.raises(ConfigError, match=f"^Some GPU is {said}.*{fix}$"):
        check_architecture(torch.device("cuda", 0))
