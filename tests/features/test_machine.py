"""GPUs that torch can't use are refused before anything trains."""

import pytest
import torch

from dist_amp.distributed import machine, process
from dist_amp.distributed.machine import reason_unused
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


def too_old():
    raise RuntimeError("The NVIDIA driver on your system is too old\nmore")


@pytest.mark.bad_input("GPUs, and a build of torch for the CPU alone (`run.device=auto`)")
@pytest.mark.bad_input("a driver too old for the CUDA that torch was built for")
@pytest.mark.parametrize(
    ("cuda", "why"),
    [
        (None, "it is a build for the CPU alone"),
        ("13.0", "it is built for CUDA 13.0, and the driver is 570: The NVIDIA driver on your sys"),
    ],
)
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_rank_refuses_gpus_that_torch_can_not_use_with_what_to_install(
    root, monkeypatch, cuda, why, device
):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", too_old)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reason = reason_unused(root)
    monkeypatch.setattr(machine, "reason_unused", lambda: reason)
    with pytest.raises(ConfigError) as error:
        process.place_of(RunConfig(device=device))
    what = f"run.device={device}: this machine has 2 NVIDIA GPUs that torch {torch.__version__} can"
    assert str(error.value).startswith(f"{what}'t use ({why}")
    assert str(error.value).endswith("; or use run.device=cpu to train on the CPU")
    assert process.place_of(RunConfig(device="cpu"))[-1].type == "cpu"


def test_gpus_that_are_hidden_of_rocm_or_not_given_to_a_container_are_not_asked_about(
    root, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert reason_unused(root) == ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert reason_unused(root) == ""
    monkeypatch.setattr(torch.version, "hip", None)
    assert reason_unused(root)
    for name in ("nvidia0", "nvidia1"):  # /proc still shows the host's driver
        (root / "dev" / name).unlink()
    assert reason_unused(root) == ""
