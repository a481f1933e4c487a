"""What half precision loses is measured; a collapsed loss scale ends a run."""

import contextlib
import io

import numpy as np
import pytest
import torch
from ranks import on_ranks
from tiny import Overflow, Rows, Tiny, make_run, parameters_of, take_steps
from torch import nn

from dist_amp.diagnostics.limits import Limits
from dist_amp.diagnostics.numerics import Numerics
from dist_amp.errors import NumericsError
from dist_amp.telemetry.step_report import RANK_METRICS, LogRow
from dist_amp.world import World

AUTOCAST = ["--precision.dtype", "fp16", "--precision.cast_by", "autocast"]
FP16 = [*AUTOCAST, "--precision.scaler.init_scale", 256]
FSDP = ["--parallel.strategy", "fsdp"]
BF16_STORAGE = [*FSDP, "--parallel.param_dtype", "bf16", "--optim.weight_decay", 0]
MEASURED = ["--debug.numerics", "true", "--metrics.log_every", 1, "--train.micro_batch_size", 4]


class Faint(Tiny):
    """A matrix [4, 8] and a bias [4]; the gradient of row r is 2^(-10 r)."""

    def build_model(self):
        return nn.Linear(8, 4)

    def build_dataset(self, split):
        return Rows(x=torch.ones(self.samples, 8))

    def loss_sum(self, model, batch):
        return (model(batch["x"]).float() * 2.0 ** (-10 * torch.arange(4))).sum()

    def weight(self, batch):
        return len(batch["x"])


class HalfUsed(Tiny):
    """A table of 8 rows, of which the data use 4."""

    def build_model(self):
        return nn.Embedding(8, 4)

    def build_dataset(self, split):
        return Rows(x=torch.arange(self.samples) % 4)

    def loss_sum(self, model, batch):
        return model(batch["x"]).float().square().sum()

    def weight(self, batch):
        return len(batch["x"])


def measured_steps(world, task, words, steps=1):
    """Steps as in the main job: (the run, {step: scalars}, text on standard error)."""
    run = make_run(world, task, *words)
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        numerics = Numerics(run)
        run.observers.add(numerics)
        take_steps(run, steps)
    return run, numerics.measured, stderr.getvalue()


def measurements(world, task, words, steps=1):
    """What the measured steps wrote and printed."""
    return measured_steps(world, task, words, steps)[1:]


def log_row(**values):
    usual = {"min_weight": 1.0, "loss_scale": 1.0, "skips_in_a_row": 0.0}
    row = {**dict.fromkeys(RANK_METRICS, 0.0), **usual, **values}
    return LogRow(10, np.array([[row[name] for name in RANK_METRICS]]))


@pytest.mark.bad_input("a collapsed loss scale")
def test_a_loss_scale_below_its_bound_ends_the_run_with_advice():
    limits = Limits(make_run(World(), Tiny(), *FP16, "--train.max_skips_in_a_row", 1))
    limits.on_log(log_row(loss_scale=1.0))
    with pytest.raises(NumericsError) as error:  # before the skipped steps, because it says more
        limits.on_log(log_row(loss_scale=0.5, skips_in_a_row=17))
    parts = ["the loss scale fell to 0.5", "below 1:", "bf16", "optim.lr", "--use_amp false"]
    assert [part for part in parts if part not in str(error.value)] == []
    Limits(make_run(World(), Tiny())).on_log(log_row(loss_scale=0.5))  # only fp16 has a loss scale


def measure_each(world, task, *runs):
    """`measurements` of each run's words."""
    return [measurements(world, task, words) for words in runs]


# The gradient of row r is 2^(-10 r) by the loss scale, a quarter of it on the way; fp16 ends at
# 2^-24.
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_the_gradients_that_underflow_at_the_current_scale_are_counted(ranks, strategy):
    words = [*AUTOCAST, *MEASURED, "--parallel.strategy", strategy]
    words += ["--train.accumulation_steps", 2, "--precision.scaler.init_scale"]
    high, low = on_ranks(ranks, measure_each, Faint(), [*words, 1024], [*words, 1])[0]
    for (written, _), share in ((high, 0.0), (low, 0.25)):
        tags = {tag: value for tag, value in written[1].items() if "underflow" in tag}
        groups = ("matrices", "vectors")
        assert tags == {f"numerics/underflow_share/{group}": share for group in groups}
    text = "% of the gradients of matrices underflow to zero in fp16 at loss scale"
    assert f"25 {text} 1" in low[1]
    assert text not in high[1]


def test_an_infinite_gradient_is_no_underflow_and_a_skipped_step_loses_no_update():
    written, stderr = measurements(World(), Overflow(bad=range(64)), [*FP16, *MEASURED])
    assert set(written[1].values()) == {0.0}
    assert all("underflow" in tag for tag in written[1])
    assert not stderr


def lost_by_comparison(world, words):
    """The measured shares, and those from full parameters, which all have a gradient here."""
    words = [*words, *MEASURED]
    before = parameters_of(make_run(world, Tiny(), *words))
    run, written, _ = measured_steps(world, Tiny(), words)
    same = {name: (before[name] == value).flatten() for name, value in parameters_of(run).items()}
    expected = {}
    for group, dims in {"matrices": 2, "vectors": 1}.items():
        of_group = torch.cat([same[name] for name, value in before.items() if value.ndim == dims])
        expected[f"numerics/lost_update_share/{group}"] = of_group.double().mean().item()
    return written[1], expected


def lost_by_each(world, *runs):
    return [lost_by_comparison(world, words) for words in runs]


def test_updates_lost_in_bf16_storage_are_counted_exactly_for_any_optimizer():
    words = [*BF16_STORAGE, "--optim.lr", 4e-4]
    optimizers = [("adamw", "true"), ("adamw", "false"), ("sgd", "true")]
    runs = [[*words, "--optim.name", name, "--optim.fused", fused] for name, fused in optimizers]
    for results in on_ranks(2, lost_by_each, *runs):
        for measured, expected in results:
            assert measured == expected
            assert 0.1 < expected["numerics/lost_update_share/matrices"] <= 1


def lost_at_a_low_rate(world):
    """Measured in three steps in bf16 and float32 storage; and unmeasured, at a high rate."""
    results = []
    for storage in ("bf16", "fp32"):
        words = [*BF16_STORAGE, "--parallel.param_dtype", storage]
        measured = [*words, *MEASURED, "--optim.lr", 1e-6, "--data.shuffle", "false"]
        written, stderr = measurements(world, HalfUsed(), measured, 3)
        shares = [step["numerics/lost_update_share/matrices"] for step in written.values()]
        high = measurements(world, HalfUsed(), [*words, "--optim.lr", 3e-2])
        results.append((shares, stderr, high))
    return results


def test_updates_at_lr_1e_6_are_lost_in_bf16_storage_and_none_in_float32():
    bf16, fp32 = on_ranks(2, lost_at_a_low_rate)[0]
    # Of the rows that the data use: the others have no gradient, and nothing to lose.
    assert min(bf16[0]) > 0.9
    assert max(fp32[0]) < 0.1
    warning = "% of the updates of matrices are lost to rounding: bf16 storage keeps 8 bits and lr"
    for (_, stderr, high), times in ((bf16, 1), (fp32, 0)):
        assert stderr.count(f"{warning} 1e-06 moves less; use") == times, "once, at the start"
        assert stderr.count("warning") == times
        assert high == ({}, "")
