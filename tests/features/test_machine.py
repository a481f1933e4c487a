"""GPUs that torch can't use are refused before anything trains; precisions that a CPU or GPU
emulates are known, avoided by default and warned about.
"""

from unittest.mock import Mock

import pytest
import torch
from tiny import Tiny, make_run, save

from dist_amp.checkpoint.resume import with_dtype
from dist_amp.config.load import load_config
from dist_amp.config.validate import check_precision, warn_once
from dist_amp.distributed import machine, process
from dist_amp.distributed.machine import reason_unused
from dist_amp.errors import ConfigError
from dist_amp.precision import build_precision
from dist_amp.settings import PrecisionConfig, RunConfig
from dist_amp.world import World

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
TOO_OLD = "The NVIDIA driver on your system is too old\nmore"


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
@pytest.mark.bad_input("a driver too old for the CUDA that torch was built for")
@pytest.mark.parametrize(
    ("cuda", "why"),
    [
        (None, "it is a build for CPUs only"),
        ("13.0", "it is built for CUDA 13.0, and the driver is 570: The NVIDIA driver on your sys"),
    ],
)
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_rank_refuses_gpus_that_torch_can_not_use_with_what_to_install(
    root, monkeypatch, cuda, why, device
):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError(TOO_OLD)))
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


@pytest.fixture
def cpu(monkeypatch):
    """cpu("bf16"): this CPU computes in these dtypes natively; without any, asking it fails."""

    def make(*native):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        asks = (lambda dtype, *_: dtype in native) if native else pytest.fail
        monkeypatch.setattr(machine, "is_native", asks)

    warn_once.cache_clear()  # an earlier test may have warned on a CPU that emulates
    yield make
    warn_once.cache_clear()


@pytest.mark.parametrize(
    ("flags", "native"),
    [
        ("avx512f avx512_bf16", ["bf16"]),
        ("avx512_fp16 amx_bf16", ["bf16", "fp16"]),
        ("avx512f avx2", []),
        (None, []),
    ],
)
def test_a_cpu_is_known_by_its_flags(flags, native, tmp_path):
    if flags:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/cpuinfo").write_text(f"model name: some\nflags\t\t: fpu {flags} sse\n")
    device = torch.device("cpu")
    found = [name for name in ("bf16", "fp16") if machine.is_native(name, device, tmp_path)]
    assert found == native


def test_an_emulated_dtype_is_warned_about_once_with_what_to_use(cpu, capsys):
    cpu("bf16")
    check_precision(PrecisionConfig(dtype="bf16"), False, World())
    assert capsys.readouterr().err == "", "native"
    cpu("none")
    for _ in range(2):
        check_precision(PrecisionConfig(dtype="bf16"), False, World())
    assert capsys.readouterr().err == (
        "warning: this CPU only emulates bf16, which is slower than float32; use --use_amp false\n"
    )


@pytest.mark.parametrize(("use_amp", "rank"), [(False, 0), (True, 1)])
def test_nothing_is_asked_in_float32_and_on_other_ranks(cpu, use_amp, rank):
    cpu()
    build_precision(PrecisionConfig(use_amp=use_amp), False, World(rank=rank, world_size=2))


@pytest.mark.parametrize(
    ("dtype", "capability", "said"),
    [
        ("bf16", (7, 5), "Some GPU only emulates bf16, which is slower than float32; use --pr"),
        ("bf16", (6, 1), "Some GPU only emulates bf16, which is slower than float32; use --us"),
        ("fp16", (7, 0), ""),
    ],
)
def test_a_dtype_that_a_gpu_emulates_is_warned_about(monkeypatch, dtype, capability, said):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    text = machine.check_dtype(dtype, torch.device("cuda", 0))
    assert text.startswith(said)
    assert bool(text) == bool(said)


def precision_of(*words, folder="unused"):
    words = ["--run.device", "cpu", "--run.dir", str(folder), *words]
    precision = with_dtype(load_config(words, {}), folder, World()).precision
    return precision.name, precision.dtype


def test_by_default_a_cpu_that_only_emulates_bf16_computes_in_float32_and_says_so(
    cpu, capsys, tmp_path
):
    cpu()
    assert precision_of("--use_amp", "true", folder=tmp_path)[0] == "bf16", "given, so not asked"
    cpu("none")
    assert precision_of(folder=tmp_path) == ("fp32", "bf16")
    assert capsys.readouterr().out == (
        "precision.dtype=auto: float32, because this CPU only emulates bf16; "
        "--use_amp true computes in bf16 all the same\n"
    )
    cpu("bf16")
    assert precision_of(folder=tmp_path) == ("bf16", "bf16")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("amp", "native", "name"), [("true", "none", "bf16"), ("false", "bf16", "fp32")]
)
def test_a_resumed_run_keeps_its_precision_on_any_cpu(cpu, tmp_path, amp, native, name):
    words = ["--run.dir", tmp_path, "--checkpoint.every", 1]
    run = make_run(World(), Tiny(), *words, "--use_amp", amp)
    save(run)
    run.step += 1
    damaged = save(run)
    cpu(native)
    assert precision_of(folder=tmp_path)[0] == name
    (damaged / "manifest.json").write_text("{")
    assert precision_of(folder=tmp_path)[0] == name, "of the one before"
    assert precision_of("--run.resume", str(tmp_path), folder=tmp_path / "new")[0] == name
