"""One step is the step that one process takes with the whole batch; a skipped step changes
nothing.
"""

import pytest
import torch
from messages import message_of
from optimizer_runs import LAYOUTS, Operations
from ranks import on_ranks
from tiny import Changed, Overflow, Tiny, make_run, moments_of, parameters_of, take_steps, variant
from torch import nn

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
    task = variant(loss_sum=lambda model, batch: loss(Tiny().loss_sum(model, batch)))
    assert said in message_of(65, take_steps, make_run(World(), task), 1)


@pytest.mark.bad_input("`train_step` without micro-batches")
def test_a_step_without_micro_batches_is_refused():
    said = message_of(65, train_step, make_run(World(), Tiny()), [])
    assert "got no micro-batches; pass it next(run.data)" in said


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


def with_a_pretrained_trunk(model):
    """In evaluation mode under a new head, as from_pretrained returns it."""
    for part in model[:2]:
        part.append(Moded())
    model[0].eval()


def with_a_trunk_that_stays_in_evaluation_mode(model):
    """As a part of a detector."""
    with_a_pretrained_trunk(model)
    model[0] = KeptInEvaluationMode(*model[0])


def modes_with_an_evaluation(world, task, strategy):
    run = make_run(world, task, "--parallel.strategy", strategy, "--eval.every", 1)
    take_steps(run, 1)
    evaluate(run)
    take_steps(run, 1)
    return [m.modes for m in run.parallel.module.modules() if isinstance(m, Moded)]


@pytest.mark.parametrize(
    ("change", "trunk"),
    [
        (with_a_pretrained_trunk, [True, False, True]),
        (with_a_trunk_that_stays_in_evaluation_mode, [False]),
    ],
)
@pytest.mark.parametrize(("ranks", "strategy"), LAYOUTS)
def test_modes_are_those_of_a_loop_with_train_and_eval_and_a_part_that_leaves_its_own_is_named(
    change, trunk, ranks, strategy, capfd
):
    modes = on_ranks(ranks, modes_with_an_evaluation, Changed(change), strategy)
    assert modes == [[trunk, [True, False, True]]] * ranks
    capfd.readouterr()
    make_run(World(), Changed(change))
    said = "module 0 is put into training mode, as in any training loop; to keep its batch "
    said += "statistics fixed, or dropout off, override its train() (docs/recipes.md)"
    assert (said in capfd.readouterr().out) == (change is with_a_pretrained_trunk)
