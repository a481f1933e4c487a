"""Emulated precisions are measured on a CPU, looked up on a GPU, and warned about."""

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
    """cpu(bf16=30.0): this CPU takes 30 times float32's time for a bf16 matrix product."""

    def make(**slowdowns):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(machine, "cpu_slowdown", slowdowns.__getitem__)
        warn_once.cache_clear()

    yield make
    warn_once.cache_clear()


# ---- detection ----


def test_the_slowdown_is_the_ratio_of_the_fastest_repeats_without_the_first_measured_once(
    monkeypatch, request
):
    request.addfinalizer(machine.cpu_slowdown.cache_clear)
    float32, half = iter([0.1, 2, 9, 1, 9, 9]), iter([0.1, 40, 30, 50, 99, 60])
    durations = {torch.float32: float32, torch.bfloat16: half}
    monkeypatch.setattr(machine, "_seconds", lambda matrix: next(durations[matrix.dtype]))
    machine.cpu_slowdown.cache_clear()
    assert machine.cpu_slowdown("bf16") == machine.cpu_slowdown("bf16") == 30


def test_measuring_leaves_threads_random_state_and_grad_mode_as_they_were():
    machine.cpu_slowdown.cache_clear()
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    assert machine.cpu_slowdown("bf16") > 0
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((8, 0), "bf16"), ((7, 0), "fp16"), ((6, 1), "float32")],
)
def test_a_gpu_gets_the_precision_of_its_compute_capability(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    assert machine.native_precision("cuda") == (dtype, "native on Some GPU")


# ---- the warning ----


def test_an_emulated_dtype_is_warned_about_once_with_its_cost_and_what_to_use(cpu, capsys):
    cpu(bf16=1.1)
    check_precision(PrecisionConfig(dtype="bf16"), False, World())
    assert capsys.readouterr().err == "", "native"
    cpu(bf16=8.8)
    for _ in range(2):
        check_precision(PrecisionConfig(dtype="bf16"), False, World())
    assert capsys.readouterr().err == (
        "warning: this CPU only emulates bf16: a matrix product takes 9 times as long as in "
        "float32; use --use_amp false\n"
    )


@pytest.mark.parametrize(("use_amp", "rank"), [(False, 0), (True, 1)])
def test_nothing_is_measured_in_float32_and_on_other_ranks(cpu, use_amp, rank):
    cpu()  # knows no dtype: asking it raises KeyError
    build_precision(PrecisionConfig(use_amp=use_amp), False, World(rank=rank, world_size=2))


@pytest.mark.parametrize(
    ("dtype", "capability", "said"),
    [
        (
            "bf16",
            (7, 5),
            "Some GPU only emulates bf16, which is slower than float32; use --pr",
        ),
        (
            "bf16",
            (6, 1),
            "Some GPU only emulates bf16, which is slower than float32; use --us",
        ),
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
    cpu(bf16=30)
    assert precision_of(folder=tmp_path) == ("fp32", "bf16")
    assert capsys.readouterr().out == (
        "precision.dtype=auto: float32, because this CPU only emulates bf16 (30 times slower); "
        "--use_amp true computes in bf16 all the same\n"
    )
    cpu(bf16=0.8)
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
    cpu()  # knows no dtype: asking it raises KeyError
    assert precision_of(*words, folder=tmp_path)[0] == name


@pytest.mark.parametrize(("amp", "slowdown", "name"), [("true", 30, "bf16"), ("false", 1, "fp32")])
def test_a_resumed_run_keeps_its_precision_on_any_cpu(cpu, tmp_path, amp, slowdown, name):
    words = ["--run.dir", tmp_path, "--checkpoint.every", 1]
    save(make_run(World(), Tiny(), *words, "--use_amp", amp))
    cpu(bf16=slowdown)
    assert precision_of(folder=tmp_path)[0] == name
    assert precision_of("--run.resume", str(tmp_path), folder=tmp_path / "new")[0] == name
