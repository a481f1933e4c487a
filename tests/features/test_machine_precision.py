"""Precisions that a CPU or GPU emulates are known, and warned about."""

import pytest
import torch
from tiny import Tiny, make_run, save

from dist_amp.checkpoint.resume import with_dtype
from dist_amp.config.load import load_config
from dist_amp.config.validate import check_precision, warn_once
from dist_amp.distributed import machine
from dist_amp.precision import build_precision
from dist_amp.settings import PrecisionConfig
from dist_amp.world import World


@pytest.fixture
def cpu(monkeypatch):
    """cpu("bf16"): this CPU computes in these dtypes natively; without any, asking it fails."""

    def make(*native):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        asks = (lambda dtype, *_: dtype in native) if native else pytest.fail
        monkeypatch.setattr(machine, "is_native", asks)

    yield make
    warn_once.cache_clear()


# ---- detection ----


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
    cpu = torch.device("cpu")
    assert [
        dtype for dtype in ("bf16", "fp16") if machine.is_native(dtype, cpu, tmp_path)
    ] == native


# ---- the warning ----


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


# ---- the default ----


def precision_of(*words, folder="unused"):
    words = ["--run.device", "cpu", "--run.dir", str(folder), *words]
    precision = with_dtype(load_config(words, {}), folder, World()).precision
    return precision.name, precision.dtype


def test_by_default_a_cpu_that_only_emulates_bf16_computes_in_float32_and_says_so(
    cpu, capsys, tmp_path
):
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
    ("words", "name"),
    [
        (["--use_amp", "true"], "bf16"),
        (["--use_amp", "false"], "fp32"),
        (["--precision.dtype", "fp16"], "fp16"),
        (["--precision.cast_by", "policy"], "bf16"),
        (["--parallel.param_dtype", "bf16"], "bf16"),
        (["--config", "fsdp_bf16"], "bf16"),
    ],
)
def test_a_precision_that_is_given_is_kept_on_any_cpu(cpu, tmp_path, words, name):
    cpu()
    assert precision_of(*words, folder=tmp_path)[0] == name


@pytest.mark.parametrize(
    ("amp", "native", "name"), [("true", "none", "bf16"), ("false", "bf16", "fp32")]
)
def test_a_resumed_run_keeps_its_precision_on_any_cpu(cpu, tmp_path, amp, native, name):
    words = ["--run.dir", tmp_path, "--checkpoint.every", 1]
    save(make_run(World(), Tiny(), *words, "--use_amp", amp))
    cpu(native)
    assert precision_of(folder=tmp_path)[0] == name
    assert precision_of("--run.resume", str(tmp_path), folder=tmp_path / "new")[0] == name
