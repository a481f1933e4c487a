"""`python -m dist_amp.bench amp` measures what it says, and draws the right conclusions; no test asserts a time."""

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny import Rows, Tiny
from torch import nn

from dist_amp.bench import harness
from dist_amp.bench import report as reports
from dist_amp.bench.amp import __main__ as amp
from dist_amp.bench.amp import measure as measuring
from dist_amp.bench.amp.experiments import EXPERIMENTS, INFERENCE, MODES, TRAIN, Experiment, Linear, Target
from dist_amp.bench.amp.measure import BASELINES, COMPILED, EAGER, FP32, RECIPES, measure, peak_rise
from dist_amp.bench.amp.parity import drift, parity, tolerance, windows
from dist_amp.bench.amp.report import (
    COLOURS,
    REDUCED_BANNER,
    draw_losses,
    illustrate,
    markdown,
    table_of,
    verdict_table,
    write_tensorboard,
)
from dist_amp.bench.amp.roofline import Ceilings, count
from dist_amp.bench.amp.verdict import best, verdict
from dist_amp.bench.report import si
from dist_amp.errors import ConfigError, DataError
from dist_amp.runtime.clock import PhaseClock
from dist_amp.world import World

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
CEILINGS = Ceilings({"fp32": 1e12, "tf32": 4e12, "bf16": 1e13, "fp16": 1e13}, 1e11, 1e-6)
ASKED = ("fp32", "bf16", "fp16", "fp16_unscaled")
ROUNDS = 2
LINEAR = EXPERIMENTS["linear"].reduced()
# As in the command's reduced form.
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The device is not measured; and as in the command, garbage is not searched for in all modules each time."""
    monkeypatch.setattr(amp, "measure_ceilings", lambda world: CEILINGS)
    gc.freeze()
    yield
    gc.unfreeze()


FALLING = [1.0 - 0.009 * step for step in range(100)]
FLAT = [windows(FALLING)[0]] * 100
BUMP = [loss + (0.5 if 40 <= step < 50 else 0) for step, loss in enumerate(FALLING)]  # right at the end


@pytest.mark.parametrize(
    ("name", "curve", "reference", "expected"),
    [
        ("bf16", FLAT, FALLING, "drifts"),
        ("bf16", BUMP, FALLING, "drifts"),
        ("fp16", [*FALLING[:-1], math.nan], FALLING, "diverges"),
        ("fp16", [*FALLING[:-1], math.inf], FALLING, "diverges"),
        ("bf16", FALLING, [1.0] * 100, "nothing to compare"),
        ("bf16", [1.0, 0.5], [2.0, 1.0], "drifts"),  # two steps are a curve
    ],
)
def test_a_curve_that_is_not_float32s_is_recognised(name, curve, reference, expected):
    assert parity(name, curve, reference)["verdict"] == expected


def test_drift_is_the_share_that_was_not_learned_in_any_unit_of_the_loss():
    assert drift(FLAT, FALLING) == pytest.approx(1)
    assert drift([1000 * loss + 5 for loss in FLAT], [1000 * loss + 5 for loss in FALLING]) == pytest.approx(1)


def test_a_curve_drifts_just_outside_the_tolerance_of_its_precision():
    learned = windows(FALLING)[0] - windows(FALLING)[-1]
    for name in ("bf16", "fp16", "fp32_scaled"):
        for share, expected in ((0.99, "within"), (1.01, "drifts")):
            shifted = [loss + share * tolerance(name) * learned for loss in FALLING]
            assert parity(name, shifted, FALLING)["verdict"] == expected
    assert (round(tolerance("bf16"), 4), round(tolerance("fp16"), 4)) == (0.0391, 0.0049)
    assert tolerance("fp32_scaled") == tolerance("tf32") == tolerance("fp16")


ROWS, INSIDE, OUTSIDE = 4, 16, 8
FLOPS = 2 * ROWS * INSIDE * OUTSIDE  # of one product


def a_layer():
    """x, weight, and the gradient of the output, of a linear layer without a bias."""
    weight = nn.Parameter(torch.randn(OUTSIDE, INSIDE))
    return torch.randn(ROWS, INSIDE), weight, torch.randn(ROWS, OUTSIDE)


def work(flops, size, operations):
    return {"flops": flops, "bytes": size, "operations": operations}


def test_a_linear_layers_forward_and_backward_are_two_products():
    x, weight, upstream = a_layer()
    # Each reads two of (x, weight, output's gradient), and writes the output, or the weight's gradient.
    one = 4 * (ROWS * INSIDE + OUTSIDE * INSIDE + ROWS * OUTSIDE)
    counted = count(lambda: F.linear(x, weight).backward(upstream), CPU, tf32=False)
    assert counted == work({"fp32": 2 * FLOPS}, 2 * one, 2)
    assert count(lambda: F.linear(x, weight), CPU, tf32=True)["flops"] == {"tf32": FLOPS}


def test_under_autocast_the_products_are_in_half_precision_and_the_casts_count():
    x, weight, upstream = a_layer()
    half, autocast = upstream.bfloat16(), torch.autocast("cpu", dtype=torch.bfloat16)
    one = 2 * (ROWS * INSIDE + OUTSIDE * INSIDE + ROWS * OUTSIDE)
    casts = (4 + 2) * (ROWS * INSIDE + 2 * OUTSIDE * INSIDE)  # x, weight, and the weight's gradient back
    counted = count(lambda: autocast(F.linear)(x, weight).backward(half), CPU, tf32=False)
    assert counted == work({"bf16": 2 * FLOPS}, 2 * one + casts, 2 + 3)


def test_only_memory_that_is_read_or_written_counts():
    x, wide = torch.randn(ROWS, INSIDE), torch.ones(1, 16).expand(64, 16)
    views = lambda: x.view(-1).reshape(INSIDE, ROWS).T.unsqueeze(0).expand(3, -1, -1)[0, 1:]  # noqa: E731
    for call in (views, lambda: x.detach(), lambda: torch.empty(5)):
        assert count(call, CPU, tf32=False) == work({}, 0, 0)
    assert count(lambda: wide + 1, CPU, tf32=False)["bytes"] == 4 * (16 + 64 * 16), "an expanded tensor is read once"
    weight = nn.Parameter(torch.ones(100))
    weight.grad = torch.ones(100)
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    # It reads weight and gradient and, by torch's schema, writes both: its kernel may unscale gradients.
    assert count(optimizer.step, CPU, tf32=False) == work({}, 4 * 400, 1)


def test_memory_on_the_host_is_its_highest_point_in_bytes():
    def call():
        first, second = torch.empty(1000), torch.empty(2000)
        del first
        return second, torch.empty(500)

    assert peak_rise(CPU, call) == 4 * (1000 + 2000)
    assert peak_rise(CPU, lambda: None) == 0


def row(seconds, peak=2**30, rounds=10, **more):
    """All rounds equal, where float32 takes 0.1 s."""
    return {"seconds": [seconds] * rounds, "speedup": [0.1 / seconds] * rounds, "peak_bytes": peak, **more}


NO_TARGETS = Experiment("made-up", "Made up.", "--train.steps 100")


def a_result(curves=(), work=(), inference=(), **rows):
    """An experiment's result: float32 takes 0.1 s a step, and all precisions learn the same."""
    rows = {FP32: row(0.1), **rows}
    result = {"name": "made-up", "steps": 100, "micro_batch_size": 8, "accumulation": 1, "left_out": [], "again": []}
    result |= {"about": "Made up.", "arguments": "--train.steps 100", "parameters": 1}
    place = {"form": EAGER, "micro_batch_size": 8}
    groups = {TRAIN: rows, INFERENCE: dict(inference)}
    result["groups"] = [{"mode": mode, **place, "rows": found} for mode, found in groups.items() if found]
    result["curves"] = {name: FALLING for name in rows if name in RECIPES} | dict(curves)
    result["work"] = {TRAIN: dict(work), INFERENCE: {}}
    result["verdict"] = verdict(result, NO_TARGETS, CEILINGS)
    return result


def says(result, experiment=NO_TARGETS):
    return "\n".join(verdict(result, experiment, CEILINGS))


NOISY = row(0.09) | {"speedup": [0.8, 0.9, 1.1, 1.2, 1.3, 1.4]}
USE_BF16 = "train: use bf16. 2.000 [2.000, 2.000] times the speed of fp32, 50 % of the memory saved."
USE_FP32 = "train: use fp32. No other that was measured is 1.05 times as fast, or smaller and not slower"


@pytest.mark.parametrize(
    ("result", "name", "sentence"),
    [
        # As fast as fp16, and without a loss scale.
        (a_result(bf16=row(0.05, 2**29), fp16=row(0.049, 2**29), tf32=row(0.08)), "bf16", USE_BF16),
        (a_result(bf16=row(0.05), fp16=row(0.04)), "fp16", "train: use fp16. 2.500"),
        (a_result(bf16=row(0.099), fp16=row(0.2, 2**20)), FP32, f"{USE_FP32}."),
        (a_result(bf16=row(0.1, 2**29)), "bf16", "1.000 [1.000, 1.000] times the speed of fp32, 50 %"),
        (a_result(bf16=NOISY), FP32, USE_FP32),
        # The fastest is not recommended if it does not learn.
        (a_result({"fp16": [1.0] * 100}, fp16=row(0.01), bf16=row(0.05)), "bf16", "fp16 DRIFTS: its loss is"),
        (a_result({"fp16": [math.nan] * 100}, fp16=row(0.01)), FP32, "fp16 DIVERGES: its loss is not finite."),
        (a_result({"fp16": [math.nan] * 100}, fp16=row(0.01)), FP32, f"{USE_FP32} (excluded: fp16: diverges)."),
    ],
)
def test_the_fastest_precision_that_learns_is_recommended_with_its_numbers(result, name, sentence):
    assert best(result, TRAIN) == name
    assert sentence in says(result)
    for word in ("DRIFTS", "DIVERGES"):
        assert word not in says(result) or word.lower() in table_of(result).lower()


@pytest.mark.parametrize(
    ("counted", "sentence"),
    [
        (work({"fp32": 8 * 10**10}, 10**9, 100), "matrix-bound: 80 GFLOP of matrix products take at least 80 ms"),
        (work({"fp32": 10**10}, 8 * 10**9, 100), "8 GB of memory traffic 80 ms"),
        (work({"fp32": 10**6}, 10**6, 80_000), "launching 80000 operations 80 ms. The longest of these explains 80 %"),
    ],
)
def test_the_limit_is_what_takes_longest_with_its_counts_and_how_much_it_explains(counted, sentence):
    assert sentence in says(a_result(work={FP32: counted}))


def test_a_missed_target_is_attributed_to_train_step_or_to_the_device():
    experiment = replace(NO_TARGETS, targets=(Target(TRAIN, "bf16", 2.3, 0.49), Target(INFERENCE, "fp16", 1.5)))
    what = "Expected of an H200, train bf16: 2.30 times the speed of fp32; here"
    for theirs, cause in ((2.5, "train_step"), (1.6, "the device")):
        rows = {"bf16": row(0.05, 2**31), "fp32 baseline": row(0.1), "bf16 baseline": row(0.1 / theirs)}
        text = says(a_result(**rows), experiment)
        assert f"{what} 2.00, MISSED." in text
        assert f"The baseline loop reaches {theirs:.2f}: {cause} is the cause." in text
        assert "train bf16: 0.49 of the memory saved; here -1.00, MISSED." in text
        assert "inference fp16: 1.50 times the speed of fp32; not measured." in text
    assert f"{what} 2.50, met." in says(a_result(bf16=row(0.04)), experiment)


def test_the_scaler_and_train_step_are_judged_by_their_ratios():
    rows = {"fp16": row(0.05, skipped_steps=1), "fp16_unscaled": row(0.04), "fp16 baseline": row(0.049)}
    text = says(a_result(**rows))
    assert "fp16 runs at 0.800 [0.800, 0.800] of its speed without the loss scaler, which skipped 1 steps." in text
    assert "Speed of train_step relative to the baseline loop: 0.980 [0.980, 0.980] in fp16." in text


def test_without_a_float32_that_fits_nothing_is_recommended():
    why = "out of memory; use smaller micro-batches"
    result = a_result(bf16={"seconds": [0.1], "peak_bytes": 1}, fp32={"note": why}, curves={FP32: []})
    assert says(result).startswith(f"train: there is no fp32 to compare with ({why}).")


@pytest.mark.parametrize(
    ("seconds", "peak", "cells"),
    [
        (0.05, 2**30, ["50 ms", "2.000 [2.000, 2.000]", "1 GiB", "50 %"]),
        (0.2, 2**31 + 2**29, ["200 ms", "0.500 [0.500, 0.500]", "2.5 GiB", "-25 %"]),
        (0.0004, 3 * 2**20, ["400 µs", "250.000 [250.000, 250.000]", "3 MiB", "100 %"]),
    ],
)
def test_a_row_has_the_speedup_over_float32_and_units_of_its_own(seconds, peak, cells):
    *_, line = table_of(a_result(fp32=row(0.1, 2**31), bf16=row(seconds, peak))).splitlines()
    assert [cell.strip() for cell in line.split("|")[5:9]] == cells


def verdict_cells(*results, **report):
    lines = verdict_table({"experiments": results, "left_out": [], **report}).splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def test_the_report_begins_with_what_to_use_and_the_method_is_its_appendix():
    faster = a_result({"fp16": [1.0] * 100}, {}, {FP32: row(0.1)}, bf16=row(0.05, 2**29), fp16=row(0.01))
    assert verdict_cells(faster, a_result(bf16=row(0.2)), {"name": "cnn", "note": "failed: x"}, left_out=["gpt"]) == [
        ["made-up, train", "bf16", "2.000 [2.000, 2.000]", "50 %", "yes, 0 % (3.9 %); fp16 drifts"],
        ["made-up, inference", FP32, "1", "0 %", "reference; fp16 drifts"],
        ["made-up, train", FP32, "1 (bf16: 0.500 [0.500, 0.500])", "0 %", "reference"],
        ["cnn", "failed: x", "", "", ""],
        ["gpt", "left out, no time", "", "", ""],
    ]
    ((_, use, *_),) = verdict_cells(a_result(bf16=row(0.05), fp32={"note": "out of memory"}, curves={FP32: []}))
    assert use == "none: float32 diverges, or was not measured"
    report = {"reduced": False, "command": "", "started": "", "seconds": 0.0, "rounds": 1, "left_out": [], "dtypes": {}}
    report |= {"machine": {"cpu": "a CPU", "cores": 2, "load": [0.0]}, "versions": {}, "ceilings": CEILINGS._asdict()}
    text = markdown(report | {"experiments": [faster]})
    places = [
        text.index(part) for part in ("| experiment ", "## made-up", "## Appendix: how it was measured", "drift =")
    ]
    assert places == sorted(places)
    assert "time ratio" not in text


def test_a_number_has_its_units_prefix():
    assert [si(value, "s") for value in (0.0031, 2.5e12, 0.0, 4e-7, 12.0)] == [
        "3.1 ms",
        "2.5 Ts",
        "0 s",
        "400 ns",
        "12 s",
    ]


def test_the_precisions_curves_share_a_tag_and_a_second_report_replaces_the_first(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):
        write_tensorboard(a_result(bf16=row(0.05)), tmp_path)
    for name in (FP32, "bf16"):
        board = EventAccumulator(str(tmp_path / name)).Reload()
        assert board.Tags()["scalars"] == ["loss/made-up"]
        assert [event.value for event in board.Scalars("loss/made-up")] == pytest.approx(FALLING, rel=1e-6)


@pytest.mark.parametrize("result", [a_result(), a_result(inference={FP32: row(0.1)}) | {"curves": {}, "parity": {}}])
def test_a_report_of_few_results_can_be_written(result):
    report = {"reduced": False, "command": "", "started": "", "seconds": 0.0, "rounds": 1, "left_out": [], "dtypes": {}}
    report |= {"machine": {"cpu": "a CPU", "cores": 2, "load": [2.0]}, "versions": {}, "ceilings": CEILINGS._asdict()}
    text = markdown(report | {"experiments": [result]})
    assert "## made-up" in text
    assert "busy at the start: a load of 2.0 on 2 cores" in text
    assert REDUCED_BANNER not in text


def test_the_picture_shows_what_was_measured_unless_matplotlib_is_missing(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    partly = a_result({"fp16": [math.nan] * 100}, bf16=row(0.05), fp16=row(0.04), tf32={"note": "out of memory"})
    assert Path(illustrate(partly, tmp_path, reduced=True)).read_bytes()[:4] == b"\x89PNG"
    assert illustrate(a_result() | {"curves": {}}, tmp_path, reduced=False).endswith(".png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    why = "no picture, since matplotlib is not installed: pip install -e '.[bench]' in the clone's folder"
    assert illustrate(a_result(), tmp_path, reduced=False) == why


class Watched(Tiny):
    """A linear layer whose gradients are too small for fp16, with a frozen part; it records how it is called."""

    losses: list[tuple[bool, bool, bool, bool]]  # whether the clock ran; with gradients; in training; frozen part too
    timing = False
    SMALL = 2.0**-26  # a quarter of fp16's smallest number

    def build_model(self):
        return nn.Sequential(nn.Linear(10, 1), nn.Dropout(0.0).eval())

    def build_dataset(self, split):
        Watched.datasets += 1
        return Rows(x=Linear().build_dataset(split).tensors[0])

    def loss_sum(self, model, batch):
        x = batch["x"]
        loss = F.mse_loss(model(x).float(), x.mean(dim=1, keepdim=True), reduction="sum") * self.SMALL
        Watched.losses.append((Watched.timing, loss.requires_grad, model.training, model[1].training))
        return loss

    def weight(self, batch):
        return len(batch["x"])


class WatchedClock(PhaseClock):
    def __init__(self, device):
        super().__init__(device)
        Watched.timing = True

    def lap(self):
        Watched.timing = False
        return super().lap()


STEPS, BATCH = 15, 4
# The gradients reach 2^20 at this scale: a few steps are skipped until the scale is found. The settings after it must
# not leak into the precisions.
OWN_WORDS = (
    f"--task.target test_bench_amp:Watched --train.steps {STEPS} --train.micro_batch_size {BATCH} "
    f"--train.clip_by off --optim.name sgd --optim.lr {0.1 / Watched.SMALL} --optim.momentum 0 --optim.weight_decay 0 "
    f"--optim.schedule constant --precision.scaler.init_scale {2.0**46} "
    "--precision.tf32 true --compile.blocks true --use_amp false"
).split()


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """(report, its Markdown, train_step's calls) of the command on `Watched`."""
    folder, calls = tmp_path_factory.mktemp("amp"), []
    Watched.losses, Watched.datasets = [], 0
    step = measuring.train_step

    def train_step(run, micro_batches):
        calls.append(
            argparse.Namespace(
                way=(run.precision.name, run.scaler.scales),
                timed=Watched.timing,
                scale=float(run.scaler.scale_tensor),
                others=(run.config.precision.tf32, run.config.compile.blocks),
                samples=[batch["x"].tolist() for batch in micro_batches],
            )
        )
        return step(run, micro_batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "train_step", train_step)
        patch.setattr(harness, "PhaseClock", WatchedClock)
        patch.setattr(amp, "measure_ceilings", lambda world: CEILINGS)
        words = ["--reduced", "--precisions", *ASKED, "--forms", "eager"]
        assert amp.main([*words, "--out", str(folder), *OWN_WORDS]) == 0
    return json.loads((folder / "amp.json").read_text()), (folder / "amp.md").read_text(), calls


def calls_of(calls, name):
    return [call for call in calls if call.way == (name.removesuffix("_unscaled"), name == "fp16")]


def test_every_cell_is_timed_through_train_step(own):
    report, _, calls = own
    (result,) = report["experiments"]
    (training, inference) = result["groups"]
    assert list(training["rows"]) == [*ASKED, *BASELINES]
    assert list(inference["rows"]) == ["fp32", "bf16", "fp16"]
    for group in result["groups"]:
        for one in group["rows"].values():
            assert len(one["seconds"]) == len(one["speedup"]) == ROUNDS
    timed = Counter(call.way for call in calls if call.timed)
    assert set(timed) == {("fp32", False), ("bf16", False), ("fp16", True), ("fp16", False)}
    assert len(set(timed.values())) == 1, "all take equally many turns"
    assert timed["fp32", False] >= 2 * measuring.STEPS_OF_DATA + ROUNDS
    assert Watched.datasets == 2, "one for all precisions, and one for the report of dtypes"


def test_inference_keeps_no_graph_and_each_mode_has_the_model_in_its_own(own):
    timed = Counter(loss[1:] for loss in Watched.losses if loss[0])
    in_training, in_inference = (True, True, False), (False, False, False)
    assert timed.keys() == {in_training, in_inference}
    assert timed[in_training] * 3 == timed[in_inference] * (len(ASKED) + len(BASELINES))


def test_a_skipped_step_is_repeated_on_the_same_samples(own):
    _, _, calls = own

    def learned(name):
        """The samples of the steps before the first that is timed."""
        found = calls_of(calls, name)
        return [call.samples for call in found[: next(n for n, call in enumerate(found) if call.timed)]]

    once, again = learned("bf16"), learned("fp16")
    assert learned("fp32") == once * 2, "float32 learns a second time, to show how far it drifts from itself"
    assert len(once) == STEPS < len(again)
    assert [samples for n, samples in enumerate(again) if n == 0 or samples != again[n - 1]] == once


def test_gradients_that_vanish_without_the_scaler_are_reported(own):
    report, text, _ = own
    (result,) = report["experiments"]
    verdicts = {name: row["verdict"] for name, row in result["parity"].items()}
    assert verdicts == {"fp32": "within", "bf16": "within", "fp16": "within", "fp16_unscaled": "drifts"}
    assert result["parity"]["fp16_unscaled"]["drift"] > 0.5, "it learned nothing; the rest is the samples' noise"
    assert "- fp16_unscaled DRIFTS: its loss is" in text
    assert "`python -m dist_amp.train --task.target test_bench_amp:Watched --train.steps 15" in text
    assert report["dtypes"]["target"] == "test_bench_amp:Watched"


def test_settings_of_ones_own_do_not_change_the_precisions(own):
    report, _, calls = own
    assert len(calls_of(calls, "bf16")) == len(calls_of(calls, "fp32")) - STEPS, "not float32 for all"
    assert {call.others for call in calls} == {(False, False)}
    counted = report["experiments"][0]["work"][TRAIN]
    assert [list(counted[name]["flops"]) for name in ASKED] == [["fp32"], ["bf16"], ["fp16"], ["fp16"]]


def a_bench(*precisions, modes=MODES):
    words = ["linear", "--reduced", "--forms", EAGER, "--precisions", *precisions, "--modes", *modes]
    return amp.AmpBench(World(), amp.parse(words))


def measured(bench):
    measure(bench, LINEAR, result := {})
    return result


def test_a_precision_that_does_not_fit_costs_the_others_nothing(monkeypatch):
    build = measuring.build_run

    def build_run(config, *args):
        if config.precision.name == "bf16":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return build(config, *args)

    monkeypatch.setattr(measuring, "build_run", build_run)
    rows = measured(a_bench("fp32", "fp16_unscaled", "bf16", modes=[TRAIN]))["groups"][0]["rows"]
    assert rows["bf16"] == {"note": "out of memory; use smaller micro-batches"}
    for name in ("fp32", "fp16_unscaled", "fp32 baseline", "bf16 baseline"):
        assert rows[name]["speedup"], f"{name} took its turns"


def test_what_there_is_no_time_for_is_named(tmp_path, capsys):
    bench = a_bench("fp32", modes=[INFERENCE])
    bench.ends = time.monotonic() - 1
    assert measured(bench)["groups"][0]["rows"] == {FP32: {"note": "left out: no time"}}
    assert amp.main(["linear", "--reduced", "--minutes", "0.001", "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "amp.json").read_text())["left_out"] == ["linear"]
    assert "| linear       | left out, no time |" in (tmp_path / "amp.md").read_text()
    assert "linear\nleft out: no time" in capsys.readouterr().out


def test_a_precision_that_a_device_does_not_support_is_named():
    result = measured(a_bench("fp32", "tf32", modes=[INFERENCE]))
    assert result["left_out"] == ["tf32, which this device does not support"]
    assert list(result["groups"][0]["rows"]) == ["fp32"]


def test_a_precision_sets_its_scaler():
    task = measuring.SharedTask(Linear())
    precisions = measuring.Precisions(a_bench("fp32"), LINEAR, task, {"micro_batch_size": 4}, EAGER, 4, MODES)
    for name in RECIPES:
        scaler, scaled = precisions.build_run(name).scaler, name in ("fp16", "fp32_scaled")
        assert (scaler.scales, float(scaler.scale_tensor)) == (scaled, 65536.0 if scaled else 1.0)


def test_a_failed_experiment_is_reported_and_the_next_goes_on(tmp_path, monkeypatch):
    def fill(bench, experiment, result):
        result |= a_result() | {"name": experiment.name}
        if experiment.name == "linear":
            raise RuntimeError("cuDNN error")

    monkeypatch.setattr(amp, "measure", fill)
    assert amp.main(["mlp", "linear", "--reduced", "--out", str(tmp_path)]) == 1
    text = (tmp_path / "amp.md").read_text()
    assert "failed: cuDNN error" in text
    assert text.count("| train  | eager") == 2, "what was measured before is kept"
    report = json.loads((tmp_path / "amp.json").read_text())
    assert [result["name"] for result in report["experiments"]] == ["linear", "mlp"]


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["linaer"], ConfigError, "there is no experiment 'linaer'; did you mean linear?"),
        (["linear", "--minuts", "3"], ConfigError, "--minuts 3 is no option, and linear has its own settings"),
        (["--zzzzzz"], ConfigError, "unknown key zzzzzz on the command line"),
        (["--minutes", "nan"], ConfigError, "--minutes: nan must be at least 0"),
        (["--task.target", "tiny:Tine"], ConfigError, "did you mean Tiny?"),
        (["--task.target", "tiny:Tiny", "--train.micro_batch_size", "65"], DataError, "has 64 samples, fewer than"),
        (["--task.target", "tiny:HalfLoss"], DataError, "HalfLoss: the task's loss_sum returned torch.bfloat16"),
        (["linear", "--out", f"{__file__}/amp"], ConfigError, "can't be written: Not a directory; choose another"),
    ],
)
def test_a_mistake_is_refused_in_one_line(words, status, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert amp.main([*words, "--reduced"]) == status.exit_code
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert last.startswith("error: ")
    assert says in last


def test_it_runs_in_one_process(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert amp.main(["linear", "--reduced"]) == ConfigError.exit_code
    assert "bench amp runs in one process, but 2 were launched; run it without torchrun" in capsys.readouterr().err


def test_names_and_settings_choose_the_experiments(monkeypatch):
    monkeypatch.setenv("DIST_AMP_TRAIN__STEPS", "7")
    (own,) = amp.parse(["--task.target", "tiny:Tiny"]).experiments
    named = amp.parse(["--reduced", "linear", "cnn"]).experiments
    assert [one.name for one in named] == ["linear", "cnn"]
    assert (own.config().train.steps, named[0].config().train.steps) == (7, 15)


def launch(folder, *words):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dist_amp.bench", "amp", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_the_reduced_form_runs_every_code_path_and_says_that_its_times_are_meaningless(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = launch(tmp_path, "--reduced")
    assert done.returncode == 0, done.stderr[-2000:]
    out = tmp_path / "runs/amp_reduced"
    report, text = json.loads((out / "amp.json").read_text()), (out / "amp.md").read_text()
    assert done.stdout.startswith(REDUCED_BANNER.strip("*"))
    assert REDUCED_BANNER in text
    assert [result["name"] for result in report["experiments"]] == list(EXPERIMENTS)
    assert [row["x @ y.T"] for row in report["dtypes"]["rows"]] == ["fp32", "bf16", "fp16"]
    for result in report["experiments"]:
        name, learned = result["name"], [*ASKED, *(["fp32_scaled"] if result["name"] == "mlp" else [])]
        assert not [row for group in result["groups"] for row in group["rows"].values() if "note" in row], name
        verdicts = {one: row["verdict"] for one, row in result["parity"].items()}
        assert verdicts == dict.fromkeys(learned, "within"), name
        cells = {(group["mode"], group["form"]) for group in result["groups"]}
        assert cells == {(mode, form) for mode in MODES for form in (EAGER, COMPILED)}
        for one in learned:
            board = EventAccumulator(str(out / "tensorboard" / name / one)).Reload()
            assert len(board.Scalars(f"loss/{name}")) == result["steps"]
        sizes = {group["micro_batch_size"] for group in result["groups"]}
        assert sizes == {result["micro_batch_size"], *EXPERIMENTS[name].smaller_batches}
    pytest.importorskip("matplotlib")
    assert {path.stem for path in out.glob("*.png")} == {f"amp_{name}" for name in EXPERIMENTS}


@pytest.mark.slow
def test_a_task_of_ones_own_is_taken_from_a_file(tmp_path):
    text = "from dist_amp.bench.amp.experiments import Linear\n\n\nclass Mine(Linear):\n    pass\n"
    (tmp_path / "my_file.py").write_text(text)
    words = ["--task.target", "my_file.py:Mine", "--train.steps", "20", "--train.micro_batch_size", "4"]
    done = launch(tmp_path, "--reduced", *words, "--out", "here")
    assert done.returncode == 0, done.stderr[-2000:]
    (result,) = json.loads((tmp_path / "here/amp.json").read_text())["experiments"]
    assert (result["name"], result["target"], result["steps"]) == ("Mine", "my_file.py:Mine", 20)
    assert result["parity"]["bf16"]["verdict"] == "within"
    # The main job's files are not left there.
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["here", "my_file.py"]


def test_labels_are_clear_of_bars_and_intervals_and_equal_curves_all_show():
    figures = pytest.importorskip("matplotlib.figure")
    figure = figures.Figure()
    bars, lines = figure.subplots(1, 2)
    wide = reports.Bar(0.5, "0.50   80 ms", 0.1, 40.0)
    reports.draw_bars([bars], {"train, eager": {FP32: [reports.Bar(1.0, "1.00   40 ms")], "bf16": [wide]}}, COLOURS)
    figure.canvas.draw()
    right = bars.get_window_extent().x1
    labels = [text for text in bars.texts if "ms" in text.get_text()]
    assert all(label.get_window_extent().x0 > right for label in labels)
    assert bars.get_xlim()[1] <= 2.0, "an interval does not squeeze the bars"
    draw_losses(lines, dict.fromkeys((FP32, "bf16", "fp16"), FALLING))
    pale, *dashed = lines.lines
    assert pale.get_linewidth() > dashed[0].get_linewidth()
    patterns = [line._unscaled_dash_pattern for line in dashed]
    assert patterns == [(0, (3, 3)), (3, (3, 3))], "one's dashes are where the other's gaps are"
