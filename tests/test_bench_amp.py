"""`python -m dist_amp.bench amp` measures what it says, and says what follows; how fast that is, no test asserts."""

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny import Rows, Tiny, make_run
from torch import nn

from dist_amp.bench import timing
from dist_amp.bench.amp import __main__ as amp
from dist_amp.bench.amp import contender as contending
from dist_amp.bench.amp import measure as measuring
from dist_amp.bench.amp.experiment import INFERENCE, MODES, TRAIN, Experiment, Published, Target
from dist_amp.bench.amp.experiments import linear, mlp
from dist_amp.bench.amp.measure import COMPILED, EAGER, Effort, measure
from dist_amp.bench.amp.memory_use import rise_on_host
from dist_amp.bench.amp.parity import band, drift, judged, windows
from dist_amp.bench.amp.pictures import illustrate, write_board
from dist_amp.bench.amp.recipes import BY_HAND, FP32, RECIPES, set_scaler
from dist_amp.bench.amp.report import REDUCED_BANNER, markdown, mebibytes, published_table, table, targets_table
from dist_amp.bench.amp.roofline import BOUNDS, Ceilings, Work, count
from dist_amp.bench.amp.verdict import add_parity, best, si, verdict
from dist_amp.bench.loops import Loop
from dist_amp.errors import ConfigError, DataError
from dist_amp.telemetry.async_copy import Clock
from dist_amp.world import World

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
CEILINGS = Ceilings({"fp32": 1e12, "tf32": 4e12, "bf16": 1e13, "fp16": 1e13}, 1e11, 1e-6)
ASKED = ("fp32", "bf16", "fp16", "fp16_unscaled")
ROUNDS = 2
# As the reduced form has it.
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def quick_collections():
    """As the command has it: garbage is collected often, and not looked for in all modules each time."""
    gc.freeze()
    yield
    gc.unfreeze()


# --- parity


FALLING = [1.0 - 0.009 * step for step in range(100)]


def test_a_curve_that_learns_nothing_drifts_by_one():
    flat = [windows(FALLING)[0]] * 100
    assert drift(flat, FALLING) == pytest.approx(1)
    assert judged("bf16", flat, FALLING) == "drifts"


def test_drift_does_not_depend_on_what_the_loss_is_measured_in():
    near = [loss + 0.001 * (step % 7) for step, loss in enumerate(FALLING)]
    other = drift([1000 * loss + 5 for loss in near], [1000 * loss + 5 for loss in FALLING])
    assert other == pytest.approx(drift(near, FALLING))
    assert 0 < other < 0.01


def test_a_curve_drifts_just_outside_the_band_of_its_precision():
    learned = windows(FALLING)[0] - windows(FALLING)[-1]
    for way in ("bf16", "fp16", "fp32_scaled"):
        for share, expected in ((0.99, "within"), (1.01, "drifts")):
            shifted = [loss + share * band(way) * learned for loss in FALLING]
            assert judged(way, shifted, FALLING) == expected
    assert (round(band("bf16"), 4), round(band("fp16"), 4)) == (0.0391, 0.0049)
    assert band("fp32_scaled") == band("tf32") == band("fp16")


def test_one_bad_stretch_is_seen_though_the_end_is_right():
    bump = [loss + (0.5 if 40 <= step < 50 else 0) for step, loss in enumerate(FALLING)]
    assert bump[-1] == FALLING[-1]
    assert judged("bf16", bump, FALLING) == "drifts"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_diverges(bad):
    assert judged("fp16", [*FALLING[:-1], bad], FALLING) == "diverges"


def test_a_float32_that_does_not_learn_compares_with_nothing():
    assert judged("bf16", FALLING, [1.0] * 100) == "nothing to compare"
    assert judged("bf16", [1.0, 0.5], [2.0, 1.0]) == "drifts", "two steps are a curve"


# --- what a step asks of a device


ROWS, INSIDE, OUTSIDE = 4, 16, 8
FLOPS = 2 * ROWS * INSIDE * OUTSIDE  # of one product


def a_layer():
    """x, weight, and the gradient of the output, as a linear layer without a bias has them."""
    weight = nn.Parameter(torch.randn(OUTSIDE, INSIDE))
    return torch.randn(ROWS, INSIDE), weight, torch.randn(ROWS, OUTSIDE)


def test_a_linear_layers_forward_and_backward_are_two_products():
    x, weight, upstream = a_layer()
    work = count(lambda: F.linear(x, weight).backward(upstream), CPU, tf32=False)
    # Each reads two of (x, weight, output's gradient), and writes the output, or the weight's gradient.
    one = 4 * (ROWS * INSIDE + OUTSIDE * INSIDE + ROWS * OUTSIDE)
    assert work == {"flops": {"fp32": 2 * FLOPS}, "bytes": 2 * one, "operations": 2}
    assert count(lambda: F.linear(x, weight), CPU, tf32=True)["flops"] == {"tf32": FLOPS}


def test_under_autocast_the_products_are_in_half_precision_and_the_casts_count():
    x, weight, upstream = a_layer()
    half = upstream.bfloat16()

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.linear(x, weight)
        y.backward(half)

    work = count(step, CPU, tf32=False)
    one = 2 * (ROWS * INSIDE + OUTSIDE * INSIDE + ROWS * OUTSIDE)
    casts = (4 + 2) * (ROWS * INSIDE + 2 * OUTSIDE * INSIDE)  # x, weight, and the weight's gradient back
    assert work == {"flops": {"bf16": 2 * FLOPS}, "bytes": 2 * one + casts, "operations": 2 + 3}


def test_views_and_fresh_memory_count_nothing():
    x = torch.randn(ROWS, INSIDE)
    for look in (lambda: x.view(-1).reshape(INSIDE, ROWS).T.unsqueeze(0).expand(3, -1, -1)[0, 1:], lambda: x.detach()):
        assert count(look, CPU, tf32=False) == asdict(Work())
    assert count(lambda: torch.empty(5), CPU, tf32=False) == asdict(Work())


def test_an_expanded_tensor_is_read_once():
    wide = torch.ones(1, 16).expand(64, 16)
    assert count(lambda: wide + 1, CPU, tf32=False)["bytes"] == 4 * (16 + 64 * 16)


def test_a_fused_optimizer_counts_what_it_writes():
    weight = nn.Parameter(torch.ones(100))
    weight.grad = torch.ones(100)
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    # It reads weight and gradient, and writes both, by torch's own word: its kernel may unscale gradients.
    assert count(optimizer.step, CPU, tf32=False) == {"flops": {}, "bytes": 4 * 400, "operations": 1}


@pytest.mark.parametrize(
    ("work", "bound"),
    [
        (Work({"fp32": 10**12}, 10**9, 100), "products"),
        (Work({"bf16": 10**12}, 10**11, 100), "traffic"),
        (Work({"fp32": 10**6}, 10**5, 100), "launches"),
    ],
)
def test_a_step_is_bound_by_what_takes_longest(work, bound):
    seconds = CEILINGS.seconds(asdict(work))
    assert CEILINGS.bound(asdict(work)) == bound == max(seconds, key=seconds.__getitem__)


# --- verdicts, on made-up figures


def row(seconds, peak=2**30, rounds=10, **more):
    """All rounds alike, where float32 takes 0.1 s."""
    return {"seconds": [seconds] * rounds, "of_fp32": [0.1 / seconds] * rounds, "peak_bytes": peak, **more}


def a_told(curves=(), work=(), inference=(), compiled=(), **rows):
    """What an experiment could tell: float32 takes 0.1 s a step, and all learn alike."""
    rows = {FP32: row(0.1), **rows}
    told = {"name": "made-up", "steps": 100, "micro_batch_size": 8, "accumulation": 1, "left_out": []}
    told |= {"model": {"parameters": 1}, "again": []}
    groups = {(TRAIN, EAGER): rows, (INFERENCE, EAGER): dict(inference), (TRAIN, COMPILED): dict(compiled)}
    told["groups"] = [
        {"mode": mode, "form": form, "micro_batch_size": 8, "samples_per_step": 8, "rows": found}
        for (mode, form), found in groups.items()
        if found
    ]
    told["curves"] = {name: FALLING for name in rows if name in RECIPES} | dict(curves)
    told["work"] = {TRAIN: dict(work), INFERENCE: {}}
    add_parity(told)
    return told


NO_TARGETS = Experiment("made-up", "Made up.", ("--train.steps", "100"))


def says(told, experiment=NO_TARGETS):
    return "\n".join(verdict(told, experiment, CEILINGS))


def test_the_fastest_precision_that_learns_is_recommended_with_its_figures():
    told = a_told(bf16=row(0.05, 2**29), fp16=row(0.049, 2**29), tf32=row(0.08))
    assert best(told, TRAIN) == "bf16", "as fast as fp16, and without a scale to watch"
    assert "train: bf16. 2.000 [2.000, 2.000] times the speed of fp32, 50 % less memory." in says(told)
    assert best(a_told(bf16=row(0.05), fp16=row(0.04)), TRAIN) == "fp16"


def test_where_nothing_helps_float32_is_recommended():
    told = a_told(bf16=row(0.099), fp16=row(0.2, 2**20))
    assert best(told, TRAIN) == FP32
    assert "train: fp32. No other precision is 1.05 times as fast, or smaller and no slower." in says(told)


def test_less_memory_at_the_same_speed_is_worth_it():
    assert best(a_told(bf16=row(0.1, 2**29)), TRAIN) == "bf16"


def test_a_gain_within_the_noise_is_none():
    noisy = row(0.09) | {"of_fp32": [0.8, 0.9, 1.1, 1.2, 1.3, 1.4]}
    assert best(a_told(bf16=noisy), TRAIN) == FP32


def test_a_precision_that_drifts_is_called_out_and_not_recommended_though_it_is_the_fastest():
    flat = [1.0] * 100
    told = a_told({"fp16": flat}, fp16=row(0.01), bf16=row(0.05))
    assert best(told, TRAIN) == "bf16"
    assert "fp16 DRIFTS: its loss curve is" in says(told)
    assert "DRIFTS" in table(told)
    diverged = a_told({"fp16": [math.nan] * 100}, fp16=row(0.01))
    assert best(diverged, TRAIN) == FP32
    assert "fp16 DIVERGES: its loss is not finite." in says(diverged)
    assert "diverges" in table(diverged)


def test_no_curve_to_compare_with_is_said():
    assert "take more steps" in says(a_told({name: [1.0] * 100 for name in (FP32, "bf16")}, bf16=row(0.05)))


@pytest.mark.parametrize(
    ("work", "sentence"),
    [
        (Work({"fp32": 8 * 10**10}, 10**9, 100), "80 GFLOP are 80 ms of products"),
        (Work({"fp32": 10**10}, 8 * 10**9, 100), "8 GB 80 ms of traffic"),
        (Work({"fp32": 10**6}, 10**6, 80_000), "80000 operations 80 ms of launching"),
    ],
)
def test_the_reason_names_the_bound_its_counts_and_how_much_it_explains(work, sentence):
    text = says(a_told(work={FP32: asdict(work)}))
    assert f"fp32 is {BOUNDS[CEILINGS.bound(asdict(work))]}: " in text
    assert sentence in text
    assert "The longest explains 80 % of the 100 ms it takes." in text


@pytest.mark.parametrize(
    ("by_hand", "cause"), [(0.1 / 2.5, "train_step is the cause"), (0.1 / 1.6, "the device is the cause")]
)
def test_a_missed_target_is_put_down_to_the_loop_or_to_the_device(by_hand, cause):
    told = a_told(**{"bf16": row(0.05), "fp32 by hand": row(0.1), "bf16 by hand": row(by_hand)})
    experiment = replace(NO_TARGETS, targets=(Target(TRAIN, "bf16", 2.3),))
    assert (
        f"train bf16: 2.00 of the 2.30 that were expected; the loop by hand reaches {0.1 / by_hand:.2f}: {cause}"
        in (says(told, experiment))
    )
    assert "missed" in targets_table(told, experiment)
    met = a_told(bf16=row(0.04))
    assert "expected" not in says(met, experiment)
    assert "met" in targets_table(met, experiment)


def test_memory_is_a_shortfall_only_where_a_saving_was_expected():
    told = a_told(bf16=row(0.04, 2**31))
    assert "memory saved" not in says(told, replace(NO_TARGETS, targets=(Target(TRAIN, "bf16", 2.3),)))
    assert "-100 % of memory saved, 49 % expected" in says(
        told, replace(NO_TARGETS, targets=(Target(TRAIN, "bf16", 2.3, 0.49),))
    )


def test_a_target_of_what_was_not_measured_is_open():
    experiment = replace(NO_TARGETS, targets=(Target(INFERENCE, "fp16", 1.5),))
    assert "open" in targets_table(a_told(), experiment)
    assert "expected" not in says(a_told(), experiment)


def test_the_scaler_and_the_loop_are_told_by_their_ratios():
    told = a_told(
        **{"fp16": row(0.05, skipped_steps=1), "fp16_unscaled": row(0.04), "fp16 by hand": row(0.049)},
    )
    assert "fp16 runs at 0.800 [0.800, 0.800] of its speed without the loss scaler, which skipped 1 step " in says(told)
    assert "Speed of train_step over the loop by hand: 0.980 [0.980, 0.980] in fp16." in says(told)


def test_what_compiling_does_is_said_of_the_recommended_precision():
    helped = a_told(bf16=row(0.05), compiled={FP32: row(0.1), "bf16": row(0.025)})
    assert "Compiling makes it 2.00 times as fast (timed apart)." in says(helped)
    assert "Compiling makes it 1.00 times as fast (timed apart)." in says(a_told(compiled={FP32: row(0.1)}))


def test_without_a_float32_that_fits_the_others_are_told_without_a_comparison():
    told = a_told(bf16={"seconds": [0.1], "peak_bytes": 1}, fp32={"cant": "out of memory; use smaller micro-batches"})
    del told["curves"]["fp32"]
    add_parity(told)
    why = "out of memory; use smaller micro-batches"
    assert says(told) == f"train: fp32 is not there to compare with ({why}); these are: bf16 (100 ms, 1 B)."


# --- the report


def test_a_mib_is_two_to_the_twenty_bytes():
    assert (mebibytes(3 * 2**20), mebibytes(2**31), mebibytes(1000)) == ("3", "2,048", "0.000954")
    told = a_told(fp32=row(0.1, 2**31), bf16=row(0.05, 2**30))
    line = next(line for line in table(told).splitlines() if "bf16" in line)
    assert [cell.strip() for cell in line.strip("|").split("|")][5:8] == ["2.000 [2.000, 2.000]", "1,024", "50 %"]


def test_published_seconds_are_beside_ours_for_as_many_steps():
    published = (Published(TRAIN, FP32, 20, 2150, 0.01), Published(TRAIN, "fp16", 8, 1350))
    told = a_told(fp32=row(0.1, 2 * 10**9), fp16=row(0.05, 10**9))
    *_, first, second = published_table(told, replace(NO_TARGETS, published=published)).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (first, second)]
    assert cells[0] == ["train fp32", "20", "10", "1.00", "1.00", "2150", "2,000", "0.01", "0.15"]
    assert cells[1][:7] == ["train fp16", "8", "5", "2.50", "2.00", "1350", "1,000"]


@pytest.mark.parametrize(
    ("value", "text"), [(0.0031, "3.1 ms"), (2.5e12, "2.5 TB"), (0.0, "0 s"), (4e-7, "400 ns"), (12.0, "12 s")]
)
def test_a_figure_has_its_units_prefix(value, text):
    assert si(value, text[-1]) == text


def test_memory_on_the_host_is_its_highest_point_in_bytes():
    def call():
        first = torch.empty(1000)
        second = torch.empty(2000)
        del first
        third = torch.empty(500)
        return second, third

    assert rise_on_host(call) == 4 * (1000 + 2000)
    assert rise_on_host(lambda: None) == 0


def test_the_precisions_curves_share_a_tag_and_a_second_report_takes_the_firsts_place(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as Pages

    for _ in range(2):
        write_board(a_told(bf16=row(0.05)), tmp_path, [])
    for way in (FP32, "bf16"):
        board = EventAccumulator(str(tmp_path / "tensorboard/made-up" / way)).Reload()
        assert board.Tags()["scalars"] == ["loss/made-up"]
        # TensorBoard keeps float32.
        assert [event.value for event in board.Scalars("loss/made-up")] == pytest.approx(FALLING, rel=1e-6)
    (report,) = Pages(str(tmp_path / "tensorboard/made-up")).Reload().Tensors("made-up/text_summary")
    assert b"train" in report.tensor_proto.string_val[0]


# --- a real run


class Watched(Tiny):
    """A linear layer whose gradients are too small for fp16, with a part that is frozen; it watches what is done."""

    reads: list[bool]  # of a sample: whether the clock ran
    losses: list[tuple[bool, bool, bool, bool]]  # whether the clock ran; with gradients; in training; frozen part too
    timing = False
    SMALL = 2.0**-26  # a quarter of fp16's smallest number

    def build_model(self):
        return nn.Sequential(nn.Linear(10, 1), nn.Dropout(0.0).eval())

    def build_dataset(self, split):
        Watched.datasets += 1
        return WatchedRows(x=linear.Linear().build_dataset(split).tensors[0])

    def loss_sum(self, model, batch):
        x = batch["x"]
        loss = F.mse_loss(model(x).float(), x.mean(dim=1, keepdim=True), reduction="sum") * self.SMALL
        Watched.losses.append((Watched.timing, loss.requires_grad, model.training, model[1].training))
        return loss

    def weight(self, batch):
        return len(batch["x"])


class WatchedRows(Rows):
    def __getitem__(self, index):
        Watched.reads.append(Watched.timing)
        return super().__getitem__(index)


class WatchedClock(Clock):
    def __init__(self, device):
        super().__init__(device)
        Watched.timing = True

    def lap(self):
        Watched.timing = False
        return super().lap()


OWN = {
    "task.target": "test_bench_amp:Watched",
    "train.steps": 15,
    "train.micro_batch_size": 4,
    "train.clip_by": "off",
    "optim.name": "sgd",
    "optim.lr": 0.1 / Watched.SMALL,
    "optim.momentum": 0,
    "optim.weight_decay": 0,
    "optim.schedule": "constant",
    # The gradients reach 2^20 then: a few steps are skipped until the scale is found.
    "precision.scaler.init_scale": 2.0**46,
    # What the precisions must not take over.
    "precision.tf32": "true",
    "compile.blocks": "true",
}
OWN_WORDS = [word for name, value in OWN.items() for word in (f"--{name}", str(value))] + ["--use_amp", "false"]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """(report, its Markdown, train_step's calls) of the command on `Watched`, with little patience."""
    folder, calls = tmp_path_factory.mktemp("amp"), []
    Watched.reads, Watched.losses, Watched.datasets = [], [], 0
    step = contending.train_step

    def train_step(run, micro_batches):
        scale = float(run.scaler.scale_tensor)
        calls.append(
            argparse.Namespace(
                way=(run.precision.name, run.scaler.scales),
                timed=Watched.timing,
                scale=scale,
                others=(run.config.precision.tf32, run.config.compile.blocks),
                samples=[batch["x"].tolist() for batch in micro_batches],
            )
        )
        return step(run, micro_batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contending, "train_step", train_step)
        patch.setattr(timing, "Clock", WatchedClock)
        patch.setattr(amp, "measure_ceilings", lambda world: CEILINGS)
        words = ["--reduced", "--precisions", *ASKED, "--forms", "eager", "--batches", "2"]
        words += ["--out", str(folder), *OWN_WORDS]
        assert amp.main(words) == 0
    return json.loads((folder / "amp.json").read_text()), (folder / "amp.md").read_text(), calls


def calls_of(calls, way):
    """With the task's own micro-batches."""
    asked = (way.removesuffix("_unscaled"), way == "fp16")
    return [call for call in calls if call.way == asked and len(call.samples[0]) == OWN["train.micro_batch_size"]]


def test_every_cell_is_timed_through_train_step(own):
    report, _, calls = own
    (told,) = report["experiments"]
    (training, inference, smaller) = told["groups"]
    assert list(training["rows"]) == [*ASKED, *BY_HAND]
    assert list(inference["rows"]) == list(smaller["rows"]) == ["fp32", "bf16", "fp16"]
    for group in told["groups"]:
        for one in group["rows"].values():
            assert len(one["seconds"]) == len(one["of_fp32"]) == ROUNDS
    blocks = 2 * measuring.STEPS_OF_DATA + ROUNDS  # the first round is not counted
    usual = {("fp32", False), ("bf16", False), ("fp16", True)}
    cells = {(way, 4) for way in (*usual, ("fp16", False))} | {(way, 2) for way in usual}
    timed = Counter((call.way, len(call.samples[0])) for call in calls if call.timed)
    assert timed == dict.fromkeys(cells, blocks)


def test_the_data_lie_ready_before_the_clock_and_are_built_once(own):
    assert Watched.reads
    assert not any(Watched.reads)
    assert Watched.datasets == 2, "and once for what autocast computes in which dtype"


def test_inference_keeps_no_graph_and_each_mode_has_the_model_in_its_own(own):
    timed = Counter(loss[1:] for loss in Watched.losses if loss[0])
    blocks = 2 * measuring.STEPS_OF_DATA + ROUNDS
    in_training, in_inference = (True, True, False), (False, False, False)
    assert timed == {in_training: blocks * (len(ASKED) + len(BY_HAND) + 3), in_inference: blocks * 3}


def test_the_scaler_is_where_its_precision_says(own):
    _, _, calls = own
    for way in ("fp32", "bf16", "fp16_unscaled"):
        assert {call.scale for call in calls_of(calls, way)} == {1.0}
    scales = [call.scale for call in calls_of(calls, "fp16")]
    assert scales[0] == 2.0**46
    assert scales[-1] < scales[0]


def test_a_skipped_step_is_taken_again_on_the_same_samples(own):
    _, _, calls = own

    def learned(way):
        """The samples of the steps before the first that is timed."""
        found = calls_of(calls, way)
        return [call.samples for call in found[: next(n for n, call in enumerate(found) if call.timed)]]

    once, again = learned("bf16"), learned("fp16")
    assert learned("fp32") == once * 2, "float32 learns a second time, to show how far it drifts from itself"
    assert len(once) == OWN["train.steps"] < len(again)
    assert [samples for n, samples in enumerate(again) if n == 0 or samples != again[n - 1]] == once


def test_gradients_that_vanish_without_the_scaler_are_called_out(own):
    report, text, _ = own
    (told,) = report["experiments"]
    verdicts = {way: row["verdict"] for way, row in told["parity"].items()}
    assert verdicts == {"fp32": "within", "bf16": "within", "fp16": "within", "fp16_unscaled": "drifts"}
    assert told["parity"]["fp16_unscaled"]["drift"] > 0.5, "it learned nothing; what is left is the samples' noise"
    assert "- fp16_unscaled DRIFTS: its loss curve is" in text


def test_settings_of_ones_own_do_not_shift_the_precisions(own):
    report, _, calls = own
    assert len(calls_of(calls, "bf16")) == len(calls_of(calls, "fp32")) - OWN["train.steps"], "not float32 for all"
    assert {call.others for call in calls} == {(False, False)}
    work = report["experiments"][0]["work"][TRAIN]
    assert {way: set(counted["flops"]) for way, counted in work.items()} == {
        "fp32": {"fp32"},
        "bf16": {"bf16"},
        "fp16": {"fp16"},
        "fp16_unscaled": {"fp16"},
    }


def test_the_report_says_what_it_is_of(own):
    report, text, _ = own
    assert report["reduced"] is True
    assert REDUCED_BANNER in text
    assert "`python -m dist_amp.train --task.target test_bench_amp:Watched --train.steps 15" in text
    assert "1. `" not in text
    assert [told["target"] for told in report["dtypes"]["operations"]] == ["test_bench_amp:Watched"]


def an_effort(**changes):
    words, far = ("--run.device", "cpu"), time.monotonic() + 600
    return replace(Effort(World(), words, "eager", (EAGER,), MODES, ASKED, ROUNDS, 0.0, far), **changes)


def measured(effort, experiment):
    told = {}
    measure(effort, experiment, told)
    return told


def test_a_precision_that_does_not_fit_loses_the_others_nothing(monkeypatch):
    build = contending.build_run

    def build_run(config, *args):
        if config.precision.name == "bf16":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return build(config, *args)

    monkeypatch.setattr(contending, "build_run", build_run)
    names = ("fp32", "fp16_unscaled", "bf16")
    told = measured(an_effort(precisions=names, modes=(TRAIN,)), linear.REDUCED)
    rows = told["groups"][0]["rows"]
    assert rows["bf16"] == {"cant": "out of memory; use smaller micro-batches"}
    for name in ("fp32", "fp16_unscaled", "fp32 by hand", "bf16 by hand"):
        assert rows[name]["of_fp32"], f"{name} took its turns"
    assert list(told["curves"]) == ["fp32", "fp16_unscaled"]


def test_a_precision_that_fails_while_it_is_timed_is_named_and_the_others_go_on(monkeypatch):
    step = contending.train_step
    left = Counter({"bf16": 15 + measuring.STEPS_OF_DATA + 2})

    def train_step(run, micro_batches):
        left[run.precision.name] -= 1
        if left[run.precision.name] == 0:
            raise torch.OutOfMemoryError
        return step(run, micro_batches)

    monkeypatch.setattr(contending, "train_step", train_step)
    told = measured(an_effort(precisions=("fp32", "bf16"), modes=(TRAIN,)), linear.REDUCED)
    rows = told["groups"][0]["rows"]
    assert rows["bf16"]["cant"] == "out of memory; use smaller micro-batches"
    assert len(rows["fp32"]["of_fp32"]) == len(rows["bf16 by hand"]["of_fp32"]) == ROUNDS


def test_what_there_is_no_time_for_is_named(tmp_path, monkeypatch, capsys):
    told = measured(an_effort(ends=time.monotonic() - 1), linear.REDUCED)
    rows = told["groups"][0]["rows"]
    assert {name: one["cant"] for name, one in rows.items()} == dict.fromkeys([*ASKED, *BY_HAND], "left out: no time")
    assert not told["curves"]
    monkeypatch.setattr(amp, "measure_ceilings", lambda world: CEILINGS)
    assert amp.main(["linear", "--reduced", "--minutes", "0.001", "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "amp.json").read_text())["left_out"] == ["linear"]
    assert "left out, no time: linear" in (tmp_path / "amp.md").read_text()
    assert "linear\nleft out: no time" in capsys.readouterr().out


def test_a_precision_that_a_device_lacks_is_named():
    told = measured(an_effort(precisions=("fp32", "tf32"), modes=(INFERENCE,)), linear.REDUCED)
    assert told["left_out"] == ["tf32, for GPUs alone"]
    assert list(told["groups"][0]["rows"]) == ["fp32"]


@pytest.mark.parametrize("way", list(RECIPES))
def test_a_precision_sets_its_scaler(way):
    run = make_run(World(), Tiny(), *RECIPES[way].words)
    set_scaler(run, RECIPES[way])
    scaled = way in ("fp16", "fp32_scaled")
    assert (run.scaler.scales, float(run.scaler.scale_tensor)) == (scaled, 65536.0 if scaled else 1.0)


def test_a_run_that_is_stopped_leaves_the_experiments_that_it_has_whole(tmp_path, monkeypatch):
    answers = iter([a_told(bf16=row(0.05))])

    def fill(effort, experiment, told):
        if (answer := next(answers, None)) is None:
            raise KeyboardInterrupt
        told |= answer | {"name": experiment.name}

    monkeypatch.setattr(amp, "measure", fill)
    monkeypatch.setattr(amp, "measure_ceilings", lambda world: CEILINGS)
    assert amp.main(["linear", "mlp", "gpt", "--reduced", "--out", str(tmp_path)]) == 130
    report = json.loads((tmp_path / "amp.json").read_text())
    assert [told["name"] for told in report["experiments"]] == ["linear", "mlp"]
    assert report["experiments"][1]["cant"] == "stopped by hand"
    assert report["experiments"][0]["verdict"][0].startswith("train: bf16.")
    assert not list(tmp_path.glob("*.new"))


def test_what_fails_in_one_experiment_is_told_and_the_next_goes_on(tmp_path, monkeypatch):
    def fill(effort, experiment, told):
        told |= a_told() | {"name": experiment.name}
        if experiment.name == "linear":
            raise RuntimeError("cuDNN error")

    monkeypatch.setattr(amp, "measure", fill)
    monkeypatch.setattr(amp, "measure_ceilings", lambda world: CEILINGS)
    assert amp.main(["mlp", "linear", "--reduced", "--out", str(tmp_path)]) == 1
    text = (tmp_path / "amp.md").read_text()
    assert "can't: cuDNN error" in text
    assert text.count("| train | eager") == 2, "what was measured before is kept"
    report = json.loads((tmp_path / "amp.json").read_text())
    assert [told["name"] for told in report["experiments"]] == ["linear", "mlp"]


@pytest.mark.parametrize("told", [a_told(), a_told(inference={FP32: row(0.1)}) | {"curves": {}, "parity": {}}])
def test_the_report_of_little_can_be_written(told):
    report = {"reduced": False, "command": "", "began": "", "seconds": 0.0, "rounds": 1, "left_out": [], "dtypes": {}}
    report |= {"machine": {"cpu": "a CPU", "cores": 2}, "versions": {}, "ceilings": asdict(CEILINGS)}
    text = markdown(report | {"experiments": [told | {"verdict": []}]}, [NO_TARGETS])
    assert "## made-up" in text
    assert REDUCED_BANNER not in text


def test_the_pictures_show_what_there_is(tmp_path):
    pytest.importorskip("matplotlib")
    partly = a_told({"fp16": [math.nan] * 100}, bf16=row(0.05), fp16=row(0.04), tf32={"cant": "out of memory"})
    drawn = {FP32: torch.rand(1, 8, 16)}
    files = illustrate(partly, replace(NO_TARGETS, published=mlp.FULL.published), drawn, tmp_path, reduced=True)
    assert [Path(file).read_bytes()[:4] for file in files] == [b"\x89PNG"] * 2


def test_without_matplotlib_the_report_says_so_and_the_curves_are_kept(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    (why,) = illustrate(a_told(), NO_TARGETS, {FP32: torch.rand(1, 8, 16)}, tmp_path, reduced=False)
    assert why == "no picture, since matplotlib is not installed: pip install 'dist_amp[bench]'"
    assert list((tmp_path / "tensorboard/made-up/fp32").iterdir())


# --- mistakes


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["linaer"], ConfigError, "there is no experiment 'linaer'; did you mean linear?"),
        (["--reduced", "linaer"], ConfigError, "there is no experiment 'linaer'; did you mean linear?"),
        (["linear", "--train.steps", "3"], ConfigError, "--train.steps 3 is a setting of a task of your own"),
        (["linear", "--minuts", "3"], ConfigError, "there is no option --minuts; did you mean --minutes?"),
        (["--zzzzzz"], ConfigError, "there is no option --zzzzzz; see python -m dist_amp.bench amp --help"),
        (["--precisions", "bf16"], ConfigError, "--precisions bf16 lacks fp32, with which others are compared; add it"),
        (["--precisions", "fp32", "bf17"], ConfigError, "invalid choice: 'bf17'"),
        (["--forms", "compiled"], ConfigError, "--forms compiled lacks eager, with which others are compared; add it"),
        (["--rounds", "0"], ConfigError, "--rounds 0 must be at least 1"),
        (["--minutes", "0"], ConfigError, "--minutes 0 must be above 0"),
        (["--minutes", "nan"], ConfigError, "--minutes nan must be above 0"),
        (["--batches", "0"], ConfigError, "--batches 0 must be at least 1"),
        (["--task.target", "nowhere:Nothing"], ConfigError, "there is no module nowhere"),
        (["--task.target", "tiny:Tine"], ConfigError, "did you mean Tiny?"),
        (["--task.target", "tiny:Tiny", "--train.stepz", "3"], ConfigError, "did you mean train.steps?"),
        (["--task.target", "tiny:Tiny", "--train.steps", "1"], ConfigError, "train.steps=1 has no loss curve"),
        (["--task.target", "tiny:Tiny", "--train.micro_batch_size", "65"], DataError, "has 64 samples, fewer than"),
        (["--task.target", "tiny:HalfLoss"], DataError, "HalfLoss: the task's loss_sum returned torch.bfloat16"),
        (["linear", "--batches", "8", "21"], DataError, "linear: the training dataset has 20 samples, fewer than"),
        (["linear", "--out", f"{__file__}/amp"], ConfigError, "can't be written: Not a directory; name another folder"),
    ],
)
def test_a_mistake_is_refused_in_one_line(words, status, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(amp, "measure_ceilings", lambda world: CEILINGS)
    assert amp.main([*words, "--reduced"]) == status.exit_code
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert last.startswith("error: ")
    assert says in last


def test_it_is_for_one_process(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert amp.main(["linear", "--reduced"]) == ConfigError.exit_code
    assert "the bench amp is for one process, and here are 2; leave out torchrun" in capsys.readouterr().err


def test_a_setting_in_the_environment_is_one_of_ones_own_task(monkeypatch):
    monkeypatch.setenv("DIST_AMP_TRAIN__STEPS", "7")
    (own,) = amp.parse(["--task.target", "tiny:Tiny"]).experiments
    assert own.config().train.steps == 7
    (named,) = amp.parse(["linear"]).experiments
    assert named.config().train.steps == 15


def test_a_name_may_stand_behind_an_option():
    assert [one.name for one in amp.parse(["--reduced", "linear", "cnn"]).experiments] == ["linear", "cnn"]
    assert [one.name for one in amp.parse(["cnn", "--rounds", "3"]).experiments] == ["cnn"]


# --- the whole command


def launch(folder, *words):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"}
    command = [sys.executable, "-m", "dist_amp.bench", "amp", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_the_reduced_form_takes_every_path_and_says_that_its_timings_mean_nothing(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    began = time.monotonic()
    done = launch(tmp_path, "--reduced")
    assert done.returncode == 0, done.stderr[-2000:]
    # The command promises three minutes, here on a machine that may do other things as well.
    assert time.monotonic() - began < 360
    out = tmp_path / "runs/amp_reduced"
    report, text = json.loads((out / "amp.json").read_text()), (out / "amp.md").read_text()
    assert done.stdout.startswith(REDUCED_BANNER.strip("*"))
    assert REDUCED_BANNER in text
    assert [told["name"] for told in report["experiments"]] == list(amp.EXPERIMENTS)
    assert [row["x @ y.T"] for row in report["dtypes"]["rows"]] == ["fp32", "bf16", "fp16"]
    assert [row["x + y"] for row in report["dtypes"]["rows"]] == ["fp32"] * 3
    for told in report["experiments"]:
        name, learned = told["name"], [*ASKED, *(["fp32_scaled"] if told["name"] == "mlp" else [])]
        notes = [row["cant"] for group in told["groups"] for row in group["rows"].values() if "cant" in row]
        assert not notes, name
        assert {way: row["verdict"] for way, row in told["parity"].items()} == dict.fromkeys(learned, "within"), name
        cells = {(group["mode"], group["form"]) for group in told["groups"]}
        assert cells == {(mode, form) for mode in MODES for form in (EAGER, COMPILED)}
        assert any(line.startswith("train: ") for line in told["verdict"])
        for way in learned:
            board = EventAccumulator(str(out / "tensorboard" / name / way)).Reload()
            assert len(board.Scalars(f"loss/{name}")) == told["steps"]
        sizes = {group["micro_batch_size"] for group in told["groups"]}
        assert sizes == {told["micro_batch_size"], *amp.EXPERIMENTS[name].REDUCED.batches}
    pytest.importorskip("matplotlib")
    pictures = sorted(path.stem for path in out.glob("*.png"))
    assert pictures == sorted([*(f"amp_{name}" for name in amp.EXPERIMENTS), "amp_sinusoid_drawn"])
    shown = EventAccumulator(str(out / "tensorboard/sinusoid")).Reload().Tags()["images"]
    assert sorted(shown) == ["pictures/amp_sinusoid", "pictures/amp_sinusoid_drawn"]


MY_FILE = """
import torch
from torch import nn


class Mine:
    def build_model(self):
        return nn.Linear(4, 1)

    def build_dataset(self, split):
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

    def loss_sum(self, model, batch):
        return (model(batch[0]).float() - batch[1]).pow(2).sum()

    def weight(self, batch):
        return len(batch[0])
"""


@pytest.mark.slow
def test_a_task_of_ones_own_is_taken_from_a_file(tmp_path):
    (tmp_path / "my_file.py").write_text(MY_FILE)
    words = ["--task.target", "my_file.py:Mine", "--train.steps", "20", "--optim.lr", "0.03"]
    done = launch(tmp_path, "--reduced", *words, "--batches", "4", "--out", "here")
    assert done.returncode == 0, done.stderr[-2000:]
    (told,) = json.loads((tmp_path / "here/amp.json").read_text())["experiments"]
    assert (told["name"], told["target"], told["steps"]) == ("Mine", "my_file.py:Mine", 20)
    assert {group["micro_batch_size"] for group in told["groups"]} == {8, 4}
    assert told["parity"]["bf16"]["verdict"] == "within"
    # Nothing of the main job's is left there.
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["here", "my_file.py"]


@pytest.mark.slow
def test_under_torchrun_it_is_refused_once(tmp_path):
    words = ["--standalone", "--local-addr", "127.0.0.1", "--nproc_per_node=2", "-m", "dist_amp.bench", "amp", "linear"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert told == ["error: the bench amp is for one process, and here are 2; leave out torchrun"]
    assert told[0].removeprefix("error: ") in done.stderr.splitlines()[-2], "torchrun's own last word"


def test_the_loop_by_hand_is_timed_as_the_others_are():
    """Seconds per step, from a device that has nothing to do to one that has done all of it."""
    told = []

    class Device(World):
        def wait_for_device(self):
            told.append("wait")

    loop = Loop(nn.Identity(), lambda batches: told.append("step"), lambda: told.append("prepare"))
    timing.timed_block(Device(), loop, [[]], 2)
    assert told == ["prepare", "wait", "step", "step", "wait"]
