"""The first steps name a loss that is a mean, and parameters that nothing trains."""

from collections import deque
from unittest.mock import patch

import pytest
import torch
from ranks import on_ranks
from test_strangers import Mixture
from tiny import AlwaysNan, Changed, Tiny, make_run, parameters_of, take_steps, variant
from torch import nn
from torch.utils.data import default_collate

from dist_amp.diagnostics.first_steps import WATCHED_STEPS, FirstSteps
from dist_amp.world import World


def moved_in_a_list(batches):
    """As to a GPU: a step's micro-batches, never one alone."""
    assert isinstance(batches, list)
    return batches


def watched_run(world, task, strategy, steps=WATCHED_STEPS, observed=True):
    """(the run after so many steps, the warnings of what watched it)"""
    words = ["--train.micro_batch_size", 2, "--use_amp", "false"]
    run = make_run(world, task, "--parallel.strategy", strategy, *words)
    run.data.to_device = moved_in_a_list
    if observed:
        run.observers.add(FirstSteps(run))
    warnings = []
    with patch.object(World, "warn", lambda world, text: warnings.append(text)):
        take_steps(run, steps)
    return run, warnings


def warnings_of(world, *args):
    return watched_run(world, *args)[1]


def warnings_and_checks(world, *args):
    """The warnings, and how many observers of a step are left."""
    run, warnings = watched_run(world, *args)
    return warnings, len(run.observers.before_step) + len(run.observers.after_step)


def forget(model):
    model.forgotten = nn.Parameter(torch.zeros(3))
    model.forward = lambda x: model[2](model[1](model[0](x)))


@pytest.mark.bad_input("a parameter that gets no gradient")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_parameter_that_never_gets_a_gradient_is_named_after_some_steps_and_no_check_follows(
    strategy,
):
    results = on_ranks(2, warnings_and_checks, Changed(forget), strategy)
    for (warning,), checks in results:
        assert warning.startswith("forgotten got no gradient in 20 steps: it counts as zero")
        assert "normal for a mixture's experts that no sample has chosen yet" in warning
        assert checks == 0


class Mean(Tiny):
    def loss_sum(self, model, batch):
        return super().loss_sum(model, batch) / self.weight(batch)


class FixedSize(Mean):
    """Takes batches of one size alone."""

    def loss_sum(self, model, batch):
        assert len(batch["x"]) == 2
        return super().loss_sum(model, batch)


@pytest.mark.bad_input("a loss_sum that returns a mean")
def test_a_loss_that_is_a_mean_is_named_after_the_first_step():
    for (warning,) in on_ranks(2, warnings_of, Mean(), "ddp", 1):
        assert "if each is given twice, though weight(batch) grows from 2 to 4" in warning
        assert "it seems to be a mean; return the sum" in warning


@pytest.mark.parametrize("task", [Tiny(), Tiny(uneven=True), Mixture(), FixedSize(), AlwaysNan()])
def test_a_sum_is_not_taken_for_a_mean_nor_is_a_batch_of_one_size_or_a_loss_of_nan(task):
    assert not warnings_of(World(), task, "single", 2)


class Queues(Mean):
    """What it keeps changes in place, in loss_sum, in collate and in the model's forward."""

    def build_model(self):
        self.queue = deque(maxlen=100)
        self.collated = [0]
        model = super().build_model()
        model.calls = []
        model.register_forward_hook(lambda module, args, output: module.calls.append(len(args[0])))
        return model

    def collate(self, samples):
        self.collated[0] += 1
        return default_collate(samples)

    def loss_sum(self, model, batch):
        self.queue.append(batch["x"].mean().item() + torch.rand(()).item())
        getattr(model, "module", model)[2].bias.data.mul_(0.9)
        return super().loss_sum(model, batch) * len(self.queue)


def kept_after_steps(world, observed):
    run, _ = watched_run(world, Queues(), "ddp", 3, observed)
    kept = [[*run.task.queue], run.task.collated, run.parallel.module.calls]
    return [*kept, {name: value.tolist() for name, value in parameters_of(run).items()}]


def test_looking_for_a_mean_changes_nothing_that_a_task_or_model_keeps_nor_the_steps():
    assert on_ranks(2, kept_after_steps, True) == on_ranks(2, kept_after_steps, False)


@pytest.mark.bad_input("a trained parameter that the task holds and the model does not")
def test_a_trained_parameter_outside_the_model_is_named_at_the_start(capsys):
    run = make_run(World(), variant(factor=nn.Parameter(torch.ones(()))))
    run.task.model = run.parallel.module
    FirstSteps(run)
    said = capsys.readouterr().err
    assert "the task's attribute factor holds 1 trainable parameters that are not in" in said
    assert "attribute model" not in said
