"""GPUs that torch can't use are refused before anything trains."""

import pytest
import torch

from dist_amp.distributed import machine, process
from dist_amp.distributed.machine import check_gpus_are_used, reason_unused
from dist_amp.errors import ConfigError
from dist_amp.settings import RunConfig

OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  "
    "Release Build  (dvs-builder@U16)\nGCC 11.4\n"
)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The root of a machine with two NVIDIA GPUs that torch, built for CUDA 13.0, does not find."""
    for name in ("dev/nvidia0", "dev/nvidia1", "dev/nvidiactl", "proc/driver/nvidia/version"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(OPEN)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.mark.bad_input("GPUs, and a build of torch for the CPU alone (`run.device=auto`)")
def test_a_build_without_cuda_on_a_machine_with_gpus_is_refused_with_what_to_install(
    root, monkeypatch
):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError) as error:
        check_gpus_are_used(root)
    why = f"this machine has 2 NVIDIA GPUs, and torch {torch.__version__} is a build for the CPU"
    fix = "install one for CUDA (pytorch.org); or use run.device=cpu to train on the CPU"
    assert str(error.value) == f"run.device=auto: {why} alone; {fix}"


@pytest.mark.bad_input("a driver too old for the CUDA that torch was built for")
def test_what_torch_says_is_shown_with_the_driver_and_what_to_install(root, monkeypatch):
    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old\nmore")

    monkeypatch.setattr(torch.cuda, "init", init)
    why = f"this machine has 2 NVIDIA GPUs, but torch {torch.__version__} can't use CUDA 13.0 with"
    said = (
        f"{why} driver 570 (The NVIDIA driver on your system is too old); check that `nvidia-smi`"
    )
    assert reason_unused(root).startswith(said)
    assert "install a newer driver, or torch built for an older CUDA" in reason_unused(root)


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


def test_a_rank_refuses_such_a_machine_unless_it_is_to_train_on_the_cpu(root, monkeypatch):
    monkeypatch.setattr(machine, "reason_unused", lambda _: reason_unused(root))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    auto = r"^run.device=auto: this machine has 2 NVIDIA GPUs, but torch .* driver 570 "
    cuda = r"^run.device=cuda: this machine has 2 NVIDIA GPUs, .*use run.device=cpu"
    for device, said in (("auto", auto), ("cuda", cuda)):
        with pytest.raises(ConfigError, match=said):
            process.place_of(RunConfig(device=device))
    assert process.place_of(RunConfig(device="cpu"))[-1].type == "cpu"
