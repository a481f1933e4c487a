"""One step is the step that one process takes with the whole batch; a skipped step changes
nothing.
"""

import pytest
import torch
from optimizer_runs import LAYOUTS, Operations
from ranks import on_ranks
from tiny import Overflow, Tiny, make_run, moments_of, parameters_of, take_steps
from torch import nn

from dist_amp.errors import DataError
from dist_amp.step import evaluate, train_step
from dist_amp.world import World

DTYPES = {
    "fp32": ["--use_amp", "false"],
    "bf16": ["--precision.dtype", "bf16"],
    "fp16": ["--precision.dtype", "fp16"],
}

# ---- skipped steps ----


def step_with_an_overflow(world, words):
    """Checks a step with an inf in one sample; returns what the scale was multiplied by."""
    run = make_run(world, Overflow(bad=(0,), samples=16), *words, "--data.shuffle", "false")
    before = parameters_of(run)
    scale = run.scaler.get_scale()
    assert not take_steps(run, 1)[0].applied
    after = parameters_of(run)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(moment.any() for moment in moments_of(run))
    assert run.schedule.counters.tolist() == [0, 1, 1]
    lr = run.schedule.lr.clone()
    ratio = run.scaler.get_scale() / scale
    assert take_steps(run, 1)[0].applied
    assert run.schedule.last_lr == lr, "the schedule moved on a skipped step"
    assert not any(torch.equal(after[name], value) for name, value in parameters_of(run).items())
    assert run.schedule.counters.tolist() == [1, 1, 0]
    return ratio


@pytest.mark.parametrize(
    ("strategy", "dtype", "optimizer", "fused"),
    [
        ("ddp", "fp16", "adamw", "true"),
        ("ddp", "fp32", "sgd", "true"),
        ("ddp", "fp16", "adamw", "false"),
        ("fsdp", "fp16", "sgd", "true"),
        ("fsdp", "bf16", "adamw", "true"),
        ("fsdp", "fp16", "sgd", "false"),
    ],
)
def test_inf_on_one_rank_skips_the_step_on_all_and_changes_nothing(
    strategy, dtype, optimizer, fused
):
    words = ["--parallel.strategy", strategy, "--optim.name", optimizer, "--optim.fused", fused]
    words += ["--train.micro_batch_size", 2, "--train.accumulation_steps", 2]
    words += ["--optim.warmup_steps", 2, *DTYPES[dtype]]
    ratio = 0.5 if dtype == "fp16" else 1.0
    assert on_ranks(2, step_with_an_overflow, words) == [ratio] * 2


def recover_from_a_huge_scale(world, strategy):
    words = ["--parallel.strategy", strategy, "--train.micro_batch_size", 2, *DTYPES["fp16"]]
    run = make_run(world, Tiny(), *words, "--precision.scaler.init_scale", 2**30)
    applied = [report.applied.item() for report in take_steps(run, 24)]
    return applied, run.schedule.counters.tolist(), run.scaler.get_scale()


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "fsdp")])
def test_fp16_with_a_scale_far_too_high_skips_and_recovers(ranks, strategy):
    results = on_ranks(ranks, recover_from_a_huge_scale, strategy)
    assert all(result == results[0] for result in results)
    applied, (applied_steps, skipped_steps, in_a_row), scale = results[0]
    assert not applied[0]
    assert sum(applied[-8:]) >= 6, "at the edge of fp16's range a step overflows now and then"
    assert (applied_steps, skipped_steps) == (sum(applied), 24 - sum(applied))
    assert (in_a_row == 0) == applied[-1]
    assert scale == 2.0 ** (30 - skipped_steps)
    assert skipped_steps >= 10


# ---- the update ----


def largest_differences(world, strategy, clip_by):
    """Those after five fp16 steps of train_step, fused and not, from torch's own calls.

    The textbook is written out here with torch's own GradScaler, on a copy of the run whose scaler
    it replaces.
    """
    words = ["--parallel.strategy", strategy, "--train.clip_by", clip_by, *DTYPES["fp16"]]
    words += ["--train.max_grad_norm", 0.05, "--train.max_grad_value", 0.005]
    words += ["--train.accumulation_steps", 3, "--train.micro_batch_size", 2]
    words += ["--data.shuffle", "false", "--precision.scaler.growth_interval", 2]
    words += ["--precision.scaler.init_scale", 256, "--optim.schedule", "constant"]
    words += ["--optim.lr", 0.01, "--train.steps", 5, "--optim.weight_decay", 0]
    task = Overflow(bad=(12,), samples=64)  # in the second step, on one rank
    textbook = make_run(world, task, *words)
    scaler = torch.amp.GradScaler("cpu", init_scale=256, growth_interval=2)
    scaler.scale(torch.zeros(()))  # makes its scale
    optim = textbook.config.optim
    parameters = list(textbook.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=optim.lr, betas=optim.betas, weight_decay=0)

    def update(_, norm, clip):
        scaler.unscale_(optimizer)
        if clip_by == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, 0.05)
        if clip_by == "value":
            torch.nn.utils.clip_grad_value_(parameters, 0.005)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        textbook.scaler.scale_tensor.fill_(scaler.get_scale())
        return norm

    textbook.scaler.unscale_and_clip = update
    textbook.scaler.step = textbook.scaler.update = lambda *args: None
    take_steps(textbook, 5)
    expected = parameters_of(textbook)
    differences = []
    for fused in ("true", "false"):
        ours = make_run(world, task, *words, "--optim.fused", fused)
        norms = [report.norm.item() for report in take_steps(ours, 5)]
        assert 0.05 < norms[0] < 100, "a norm that was not unscaled would be in the thousands"
        assert ours.schedule.skipped_steps == 1
        assert ours.scaler.get_scale() == scaler.get_scale()
        values = parameters_of(ours).items()
        differences += [(value - expected[name]).abs().max() for name, value in values]
    return max(differences)


@pytest.mark.parametrize(
    ("ranks", "strategy", "clip_by"),
    [(1, "single", "value"), (2, "ddp", "norm"), (2, "fsdp", "norm"), (2, "fsdp", "off")],
)
def test_the_update_fused_or_not_is_that_of_unscale_clip_step_update(ranks, strategy, clip_by):
    # One division in place of two moves the last bit of a gradient: lr 0.01 x 2^-23 x a few, over
    # four steps.
    assert max(on_ranks(ranks, largest_differences, strategy, clip_by)) < 1e-7


def test_autocast_casts_each_weight_once_a_step_whatever_the_number_of_micro_batches():
    words = ["--train.accumulation_steps", 4, "--train.micro_batch_size", 2, *DTYPES["bf16"]]
    run = make_run(World(), Tiny(), *words)
    for _ in range(2):
        with Operations() as seen:
            take_steps(run, 1)
        done = zip(seen.names, seen.sources, strict=True)
        casts = [source for name, source in done if name == "aten._to_copy.default"]
        assert [casts.count(id(p)) for p in run.parallel.parameters] == [1] * 6
    assert not torch.is_autocast_enabled("cpu")


# ---- the weight ----


def uneven_steps(world, strategy, micro_batch_size):
    """(weights, norms, parameters) of two epochs of steps of 16 and of 2 samples."""
    words = ["--parallel.strategy", strategy, "--train.micro_batch_size", micro_batch_size]
    run = make_run(world, Tiny(samples=18, uneven=True), *words, *DTYPES["fp32"])
    reports = take_steps(run, 4)
    return [r.weight.item() for r in reports], [r.norm.item() for r in reports], parameters_of(run)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_loss_is_divided_by_the_weight_of_all_ranks_also_where_one_has_no_samples(strategy):
    weights, norms, expected = uneven_steps(World(), "single", 16)
    assert len(set(weights)) > 2, "they differ from step to step"
    for ranks_weights, ranks_norms, parameters in on_ranks(2, uneven_steps, strategy, 8):
        assert ranks_weights == weights
        # float32 sums in another order
        assert ranks_norms == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(parameters, expected, rtol=1e-4, atol=1e-6)


# ---- what is refused ----


@pytest.mark.bad_input(
    "a loss that is not a float32 scalar, has no gradient or is on another device; a total weight "
    "of 0"
)
@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda loss: loss.expand(8), "shape [8]"),
        (lambda loss: loss.bfloat16(), "torch.bfloat16"),
        (lambda loss: loss.detach(), "requires_grad=False"),
        (lambda loss: torch.zeros((), device="meta", requires_grad=True), "on meta"),
    ],
    ids=["vector", "half", "detached", "elsewhere"],
)
def test_a_loss_that_is_no_float32_scalar_with_a_gradient_is_refused(loss, said):
    class Other(Tiny):
        def loss_sum(self, model, batch):
            return loss(super().loss_sum(model, batch))

    with pytest.raises(DataError) as error:
        take_steps(make_run(World(), Other()), 1)
    assert said in str(error.value)
    assert error.value.exit_code == 65


@pytest.mark.bad_input("`train_step` without micro-batches")
def test_a_step_without_micro_batches_is_refused():
    expected = r"got no micro-batches; give it those of next\(run.data\)"
    with pytest.raises(DataError, match=expected):
        train_step(make_run(World(), Tiny()), [])


# ---- modes ----


class Moded(nn.Module):
    """Notes the modes in which it is called."""

    def __init__(self):
        super().__init__()
        self.modes = []

    def forward(self, x):
        if self.training not in self.modes[-1:]:
            self.modes.append(self.training)
        return x


class KeptInEvaluationMode(nn.Sequential):
    def train(self, mode=True):  # without its return value, as some write it
        super().train(False)


class Partly(Tiny):
    """A model of which some is in evaluation mode: a pretrained trunk under a new head, as
    from_pretrained returns it; a part of a detector, which keeps it so by its own train(); or all.
    """

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def build_model(self):
        cls = KeptInEvaluationMode if self.kind == "detector" else nn.Sequential
        trunk = cls(nn.Linear(8, 8), Moded())
        model = nn.Sequential(trunk, nn.Tanh(), Moded(), nn.Linear(8, 1))
        part = {"pretrained": trunk, "detector": nn.Identity(), "whole": model}[self.kind]
        part.eval()
        return model


def modes_with_an_evaluation(world, task, strategy):
    run = make_run(world, task, "--parallel.strategy", strategy, "--eval.every", 1)
    take_steps(run, 1)
    evaluate(run)
    take_steps(run, 1)
    return [m.modes for m in run.parallel.module.modules() if isinstance(m, Moded)]


@pytest.mark.parametrize("kind", ["pretrained", "detector", "whole"])
@pytest.mark.parametrize(("ranks", "strategy"), LAYOUTS)
def test_modes_are_those_of_a_loop_with_train_and_eval_and_a_part_that_leaves_its_own_is_named(
    kind, ranks, strategy, capfd
):
    changes = [True, False, True]
    trunk = [False] if kind == "detector" else changes
    task = Partly(kind)
    assert on_ranks(ranks, modes_with_an_evaluation, task, strategy) == [[trunk, changes]] * ranks
    capfd.readouterr()
    make_run(World(), task)
    said = "0 left evaluation mode at model.train(), as in any training loop: for fixed batch "
    said += "statistics, or no dropout, override train() in its module"
    assert (said in capfd.readouterr().out) == (kind == "pretrained")
