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
        return Rows(x=torch.ones(self.samples, 8), counts=torch.ones(self.samples))

    def loss_sum(self, model, batch):
        return (model(batch["x"]).float() * 2.0 ** (-10 * torch.arange(4))).sum()


class HalfUsed(Tiny):
    """A table of 8 rows, of which the data use 4."""

    def build_model(self):
        return nn.Embedding(8, 4)

    def build_dataset(self, split):
        return Rows(x=torch.arange(self.samples) % 4, counts=torch.ones(self.samples))

    def loss_sum(self, model, batch):
        return model(batch["x"]).float().square().sum()


def measurements(world, task, words, steps=1):
    """Steps as in the main job: ({step: scalars}, text on standard error, the parameters)."""
    run = make_run(world, task, *words)
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        numerics = Numerics(run)
        run.observers.add(numerics)
        take_steps(run, steps)
    return numerics.measured, stderr.getvalue(), parameters_of(run)


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


# The gradient of row r is 2^(-10 r) by the loss scale, a quarter of it on the way; fp16 ends at
# 2^-24.
@pytest.mark.parametrize(("scale", "share"), [(1024, 0.0), (1, 0.25)])
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_the_gradients_that_underflow_at_the_current_scale_are_counted(
    ranks, strategy, scale, share
):
    words = [*AUTOCAST, *MEASURED, "--parallel.strategy", strategy]
    words += ["--train.accumulation_steps", 2, "--precision.scaler.init_scale", scale]
    written, stderr, _ = on_ranks(ranks, measurements, Faint(), words)[0]
    tags = {tag: value for tag, value in written[1].items() if "underflow" in tag}
    groups = ("matrices", "vectors")
    assert tags == {f"numerics/underflow_share/{group}": share for group in groups}
    text = "25 % of the gradients of matrices underflow to zero in fp16 at loss scale 1;"
    assert (text in stderr) == ("underflow" in stderr) == bool(share)


def test_an_infinite_gradient_is_no_underflow_and_a_skipped_step_loses_no_update():
    written, stderr, _ = measurements(World(), Overflow(bad=range(64)), [*FP16, *MEASURED])
    assert set(written[1].values()) == {0.0}
    assert all("underflow" in tag for tag in written[1])
    assert not stderr


def lost_by_comparison(world, *words):
    """The measured shares, and those from full parameters, which all have a gradient here."""
    words = [*BF16_STORAGE, *MEASURED, "--optim.lr", 4e-4, *words]
    before = parameters_of(make_run(world, Tiny(), *words))
    written, _, after = measurements(world, Tiny(), words)
    expected = {}
    for group, dims in {"matrices": 2, "vectors": 1}.items():
        names = [name for name, value in before.items() if value.ndim == dims]
        same = torch.cat([(before[name] == after[name]).flatten() for name in names])
        expected[f"numerics/lost_update_share/{group}"] = same.double().mean().item()
    return written[1], expected


@pytest.mark.parametrize(
    ("name", "fused"), [("adamw", "true"), ("adamw", "false"), ("sgd", "true")]
)
def test_updates_lost_in_bf16_storage_are_counted_exactly_for_any_optimizer(name, fused):
    words = ["--optim.name", name, "--optim.fused", fused]
    for measured, expected in on_ranks(2, lost_by_comparison, *words):
        assert measured == expected
        assert 0.1 < expected["numerics/lost_update_share/matrices"] <= 1


@pytest.mark.parametrize(("storage", "lost"), [("bf16", (0.9, 1)), ("fp32", (0, 0.1))])
def test_updates_at_lr_1e_6_are_lost_in_bf16_storage_and_none_in_float32(storage, lost):
    words = [*BF16_STORAGE, "--parallel.param_dtype", storage, "--data.shuffle", "false"]
    low = [*words, *MEASURED, "--optim.lr", 1e-6]
    written, stderr, _ = on_ranks(2, measurements, HalfUsed(), low, 3)[0]
    # Of the rows that the data use: the others have no gradient, and nothing to lose.
    shares = [step["numerics/lost_update_share/matrices"] for step in written.values()]
    assert [lost[0] <= share <= lost[1] for share in shares] == [True] * 3
    warning = "% of the updates of matrices are lost to rounding: bf16 has 8 significant bits, too"
    times = int(storage == "bf16")
    assert stderr.count(f"{warning} few for lr 1e-06; use") == times, "once, at the start"
    assert stderr.count("warning") == times
    high = [*words, "--optim.lr", 3e-2]
    assert on_ranks(2, measurements, HalfUsed(), high)[0][:2] == ({}, "")
