"""The benchmarks measure what they say and draw the right conclusions; no test asserts a time."""

import gc
import json
import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from tiny import Rows, Tiny
from torch import nn

from benchmarks import amp, explain, gpu, harness, overhead
from benchmarks.__main__ import BENCHES
from benchmarks.__main__ import main as bench
from benchmarks.amp import FP32, INFERENCE, TRAIN, parity
from benchmarks.loops import Loop, baseline, steps_of_data
from benchmarks.overhead import AGAIN, TELEMETRY, Cell, verdict
from benchmarks.report import BASELINE, PEERS, median_interval
from dist_amp.world import World

TINY = Cell("tiny", "single", 1, "bf16")
NOT_INSTALLED = "not installed: pip install -e '.[bench]' in the clone's folder"


def raises(error):
    def build(*unused):
        raise error

    return build


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """The harness collects garbage before it times: 0.3 s in a process that imported so much."""
    monkeypatch.setattr(gc, "collect", lambda *generation: 0)


@pytest.fixture(scope="module")
def in_this_process():
    """Without peers, which the commands of the docs measure, and new processes for ranks."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (overhead, gpu):
            patch.setattr(module, "accelerate", raises(ImportError()))
            patch.setattr(module, "fabric", raises(ImportError()))
        patch.setattr(overhead, "ROUND_SECONDS", 0.0)
        patch.setattr(harness, "on_ranks", lambda size, measure, *args: measure(World(), *args))
        yield


# --- commands


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["overhaed"], "there is no benchmark 'overhaed'; did you mean overhead?"),
        (["overhead", "--rounds", "5"], "--rounds: 5 must be at least 6"),
        (["amp", "gpt", "--runds", "3"], "--runds 3 is not an option, and gpt has its own set"),
    ],
)
def test_a_mistake_on_the_command_line_is_refused_in_one_line(words, error, capsys):
    assert bench(words) == 64
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert last.startswith("error: ")
    assert error in last


def test_the_command_alone_lists_the_benchmarks_and_those_of_a_gpu_are_refused_without_one(
    monkeypatch, capsys
):
    assert bench([]) == 0
    text = capsys.readouterr().out
    assert [name for name in BENCHES if f"\n{name} " not in text] == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 64
    assert "add --smoke" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert amp.main(["gpt", "--smoke"]) == 64
    assert "runs in one process, but 2 were launched" in capsys.readouterr().err


# --- statistics and harness


def test_the_median_of_twenty_lies_between_the_sixth_and_the_fifteenth():
    # David & Nagaraja's table: 6 heads or more, 14 or fewer, in 95.9 % of 20 tosses.
    assert median_interval([float(n) for n in range(20, 0, -1)]) == (10.5, 6.0, 15.0)
    assert median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (3.5, 1.0, 6.0)  # 96.9 %


def test_a_loop_that_fails_gets_a_note_and_the_base_loop_is_timed():
    def make(name):
        if name == "large":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to")
        run = raises(RuntimeError("It broke. Sorry.")) if name == "breaks" else lambda batches: None
        return Loop(nn.Linear(1, 1), run), {}

    bench = harness.Bench("amp", World(), amp.parse(["gpt", "--smoke"]), 0.0)
    rows = harness.compare(bench, "base", ("base", "large", "breaks"), make, [[]])
    assert rows["large"]["note"].startswith("out of memory; use smalle")
    assert rows["breaks"] == {"note": "failed: It broke"}
    assert len(rows["base"]["seconds"]) == 2


# --- overhead


@pytest.mark.parametrize(
    "precisions", [["fp32"], pytest.param(overhead.PRECISIONS, marks=pytest.mark.slow)]
)
def test_overhead_reports_parity_host_reads_and_a_verdict_in_every_precision(
    tmp_path, in_this_process, precisions
):
    words = ["--workloads", "tiny", "--ranks", "1", "--rounds", "6", "--out", str(tmp_path)]
    assert bench(["overhead", *words, "--precisions", *precisions]) == 0
    text = (tmp_path / "overhead.md").read_text()
    found = json.loads((tmp_path / "overhead.json").read_text())
    assert [cell["precision"] for cell in found["cells"]] == list(precisions)
    for cell in found["cells"]:
        loops = cell["loops"]
        for name in (BASELINE, AGAIN, "dist_amp", TELEMETRY):
            assert len(loops[name]["ratio"]) == 6
            assert f"| {name} " in text
        assert [loops[name]["note"] for name in PEERS] == [NOT_INSTALLED] * 2
        # A float32's last place is 6e-8 of the largest parameter: some of it per step, of 20.
        assert loops["dist_amp"]["parity"] < 1e-6
        assert loops[TELEMETRY]["parity"] < 1e-6
        assert loops[AGAIN]["parity"] == 0
        assert loops["dist_amp"]["host_reads"] == [0]
        # Metrics are read one step after they were started.
        assert loops[TELEMETRY]["host_reads"] == [1] + [0] * 9
        assert loops["dist_amp"]["verdict"].startswith(("met", "missed: ratio"))


def test_a_loop_with_another_learning_rate_drifts():
    setup = overhead.build_setup(TINY, World())
    steps = steps_of_data(setup)
    path = []
    assert overhead.drift_of(baseline(setup), steps, path) == 0
    late = replace(setup.config.optim, warmup_steps=setup.config.optim.warmup_steps + 1)
    late = replace(setup, config=replace(setup.config, optim=late))
    assert overhead.drift_of(baseline(late), steps, path) > 1e-5


def test_a_missed_target_of_the_overhead_is_named():
    row = {"ratio": [0.97], "target": 0.97, "parity": 1e-7, "host_reads": [0]}
    assert verdict(row, 1e-6, 0, []) == "met"
    row |= {"parity": math.nan, "host_reads": [1]}
    assert verdict(row, 1e-6, 0, []) == "missed: parity, host reads"
    row |= {"ratio": [0.98], "parity": 1e-7, "host_reads": [0]}
    assert verdict(row, 1e-6, 0, ["Fabric"]) == "missed: Fabric is faster, ratio"


# --- what a step calls: `python -m benchmarks overhead --explain` says which component

# Per step of 4 micro-batches, without forward and backward; the calls are those beyond the
# hand-written loop's, which reads no data (117 of them), since they differ between releases of
# torch. One log in ten steps adds a tenth of "at a log". The timed poll for signals is left out.
BUDGETS = {
    ("single", 1): {"calls": 105, "operations": 37, "collectives": 0, "calls at a log": 700},
    ("ddp", 2): {"calls": 145, "operations": 38, "collectives": 1, "calls at a log": 900},
}


def costs_in_an_interval(world, strategy):
    explain.INTERVALS = 2  # the lower of two is as good as the middle one of three
    return explain.costs(world, strategy, "bf16", 4)


@pytest.mark.parametrize(("strategy", "ranks"), BUDGETS)
def test_a_step_calls_no_more_than_its_budget(strategy, ranks):
    rows = on_ranks(ranks, costs_in_an_interval, strategy)[0]
    left_out = (*explain.OF_MODEL, "AgreedStop.poll")
    numbers = explain.total(rows["dist_amp"], left_out)
    numbers["calls"] -= explain.total(rows["by hand"], left_out)["calls"]
    above = {
        kind: (numbers[kind], most)
        for kind, most in BUDGETS[strategy, ranks].items()
        if numbers[kind] > most
    }
    assert above == {}, explain.table_of(rows["dist_amp"], rows["by hand"])


# --- gpu


@pytest.mark.slow
def test_the_smoke_form_of_gpu_runs_every_cell_and_judges_nothing(tmp_path, in_this_process):
    words = ["--smoke", "--models", "124m", "--precisions", "bf16", "--rounds", "1"]
    assert gpu.main([*words, "--modes", *gpu.MODES, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [cell["mode"] for cell in found["cells"]] == list(gpu.MODES)
    for cell in found["cells"]:
        assert list(cell["loops"]) == [BASELINE, "dist_amp", *PEERS]
        ours, reference = cell["loops"]["dist_amp"], cell["loops"][BASELINE]
        assert len(ours["seconds"]) == len(ours["speedup"]) == 1
        # Sums in half precision, in another order: see SAME_LOSS.
        assert ours["loss"] == pytest.approx(reference["loss"], rel=2e-3)
    text = (tmp_path / "gpu.md").read_text()
    assert "The speeds and memory below are meaningless" in text
    assert "not judged (smoke)" in text
    assert " met " not in text


@pytest.mark.parametrize(
    ("seconds", "loss", "verdicts"),  # by baseline, Accelerate, Fabric, MFU and loss
    [
        (0.1, 10.0, ["met", "met", "not measured", "met", "met"]),
        (0.11, 10.1, ["missed", "missed", "not measured", "missed", "missed"]),
    ],
)
def test_each_gpu_target_gets_its_verdict(seconds, loss, verdicts):
    """Where the baseline's step takes 100 ms and reaches 45 % of the peak."""

    def row(seconds, loss=10.0):
        return {"seconds": [seconds], "speedup": [0.1 / seconds], "peak_bytes": 2**30, "loss": loss}

    loops = {BASELINE: row(0.1), "dist_amp": row(seconds, loss), "Accelerate": row(0.105)}
    loops["Fabric"] = {"note": "out of memory"}
    cell = {"model": "124m", "mode": "compiled", "precision": "bf16", "tokens_per_step": 1000}
    cell |= {"flops_per_token": 1e9, "peak_flops": 1e13 / 0.45, "loops": loops}
    report = {"smoke": False, "models": {"124m": gpu.MODELS["124m"]._asdict()}, "cells": [cell]}
    lines = gpu.targets_table(report).splitlines()[2:]
    assert [line.split("|")[-2].strip() for line in lines] == verdicts


# --- amp


FALLING = [1.0 - 0.009 * step for step in range(100)]
FLAT = [sum(FALLING[:10]) / 10] * 100
LEARNED = FLAT[0] - sum(FALLING[-10:]) / 10


def shifted(roundings, eps=2**-11):
    """FALLING, off by so many roundings of what was learned."""
    return [loss + roundings * eps * LEARNED for loss in FALLING]


@pytest.mark.parametrize(
    ("name", "curve", "reference", "expected"),
    [
        ("bf16", FALLING, FALLING, "within"),
        ("bf16", FLAT, FALLING, "drifts"),
        ("fp16", [*FALLING[:-1], math.nan], FALLING, "diverges"),
        ("bf16", FALLING, [1.0] * 100, "nothing to compare"),
        ("bf16", [1.0, 0.5], [2.0, 1.0], "drifts"),  # two steps are a curve
        # The tolerance is ten roundings.
        ("bf16", shifted(9.9, 2**-8), FALLING, "within"),
        ("fp16", shifted(9.9), FALLING, "within"),
        ("fp16", shifted(10.1), FALLING, "drifts"),
    ],
)
def test_a_curve_that_is_not_float32s_is_recognised(name, curve, reference, expected):
    assert parity(name, curve, reference)["verdict"] == expected


def test_drift_is_the_share_that_was_not_learned_and_twice_float32s_own_is_tolerated():
    scaled = [[1000 * loss + 5 for loss in curve] for curve in (FLAT, FALLING)]
    assert parity("bf16", *scaled)["drift"] == pytest.approx(1)
    assert parity("fp16", shifted(20), FALLING)["verdict"] == "drifts"
    assert parity("fp16", shifted(20), FALLING, shifted(12))["verdict"] == "within"


def amp_result(curves=(), **speedups):
    """An experiment's result: all precisions learn the same unless `curves` says otherwise."""
    rows = {FP32: {"seconds": [0.1], "speedup": [1.0]}}
    for name, speedup in speedups.items():
        rows[name] = {"seconds": [0.1], "speedup": list(speedup)}
    result = {"modes": {TRAIN: rows}}
    result["curves"] = dict.fromkeys(rows, FALLING) | dict(curves)
    amp.judge(result)
    return result


@pytest.mark.parametrize(
    ("result", "name"),
    [
        (amp_result(bf16=[2.0], fp16=[2.04]), "bf16"),  # nearly as fast, and without a loss scale
        (amp_result(bf16=[2.0], fp16=[2.5]), "fp16"),
        (amp_result(bf16=[0.8, 0.9, 1.1, 1.2, 1.3, 1.4]), FP32),  # noise
        (amp_result({"fp16": [1.0] * 100}, fp16=[9.0], bf16=[2.0]), "bf16"),  # fp16 learns nothing
        (amp_result(fp16_unscaled=[9.0]), FP32),
    ],
)
def test_the_fastest_precision_that_learns_is_recommended(result, name):
    assert amp.best(result, TRAIN) == name
    assert f"train: use {name}" in result["verdict"]


class Small(Tiny):
    """A linear layer whose gradients are too small for fp16 without a loss scale."""

    SMALL = 2.0**-26  # a quarter of fp16's smallest number

    def build_model(self):
        return nn.Sequential(nn.Linear(10, 1), nn.Dropout(0.0))

    def build_dataset(self, split):
        return Rows(x=torch.randn(20, 10, generator=torch.Generator().manual_seed(0)))

    def loss_sum(self, model, batch):
        x = batch["x"]
        loss = F.mse_loss(model(x).float(), x.mean(dim=1, keepdim=True), reduction="sum")
        return loss * self.SMALL

    def weight(self, batch):
        return len(batch["x"])


def test_a_users_task_is_measured_in_each_precision_whatever_its_settings(tmp_path, monkeypatch):
    # The gradients reach 2^20 at this scale: some steps are skipped until the scale is found. The
    # last three settings must not leak into the precisions.
    words = "--task.target test_benchmarks:Small --train.steps 10 --train.micro_batch_size 4 "
    words += f"--train.clip_by off --optim.name sgd --optim.lr {0.1 / Small.SMALL} "
    words += "--optim.momentum 0 --optim.weight_decay 0 --optim.schedule constant "
    words += f"--precision.scaler.init_scale {2.0**46} --precision.tf32 true --use_amp false"
    monkeypatch.setenv("DIST_AMP_RUN__SEED", "7")
    assert amp.main(["--smoke", "--rounds", "1", "--out", str(tmp_path), *words.split()]) == 0
    (result,) = json.loads((tmp_path / "amp.json").read_text())["experiments"]
    verdicts = {name: row["verdict"] for name, row in result["parity"].items()}
    assert verdicts == dict.fromkeys((FP32, "bf16", "fp16"), "within") | {"fp16_unscaled": "drifts"}
    assert result["parity"]["fp16_unscaled"]["drift"] > 0.5, "it learned nothing"
    for mode in (TRAIN, INFERENCE):
        rows = result["modes"][mode]
        assert rows.pop("tf32") == {"note": "n/a: this device has no TF32"}
        assert list(rows) == [FP32, "bf16", "fp16", "fp16_unscaled"]
        assert {len(row["speedup"]) for row in rows.values()} == {1}
    text = (tmp_path / "amp.md").read_text()
    assert "- fp16_unscaled drifts" in text
    assert "| n/a: this device has no TF32 |" in text
    assert text.count("![amp_Small](amp_Small.png)") == 1
    assert "`test_benchmarks:Small`, module by module" in text


@pytest.mark.slow
def test_the_reduced_report_has_every_experiment_and_its_figures(tmp_path):
    assert amp.main(["--reduced", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "amp.json").read_text())["experiments"]
    assert [result["name"] for result in results] == list(amp.EXPERIMENTS)
    text = (tmp_path / "amp.md").read_text()
    chapters = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    for result in results:
        assert {row["verdict"] for row in result["parity"].values()} == {"within"}, result["name"]
        for mode in (TRAIN, INFERENCE):
            rows = result["modes"][mode]
            assert list(rows)[:5] == list(amp.USUAL)
            for precision in (FP32, "bf16", "fp16", "fp16_unscaled"):
                line = rf"^\| {mode} +\| {precision} +\| +[\d.,]+ "
                assert re.search(line, chapters[result["name"]], re.MULTILINE), line
    assert "All 11 costly operations" in chapters["dtypes"]
