"""The first steps name a loss that is a mean, a parameter without gradients, and a still model."""

from collections import deque

import numpy as np
import pytest
import torch
from ranks import on_ranks
from test_strangers import Mixture
from tiny import Tiny, make_run, parameters_of, take_steps
from torch import nn
from torch.utils.data import default_collate

from dist_amp.diagnostics.first_steps import WATCHED_STEPS, FirstSteps
from dist_amp.errors import NumericsError
from dist_amp.step import train_step
from dist_amp.world import World


class Forgotten(Tiny):
    """Has a parameter that the loss does not depend on."""

    def build_model(self):
        model = super().build_model()
        model.forgotten = nn.Parameter(torch.zeros(3))
        model.forward = lambda x: model[2](model[1](model[0](x)))
        return model


def moved_in_a_list(batches):
    """As to a GPU: a step's micro-batches, never one alone."""
    assert isinstance(batches, list)
    return batches


def watched_steps(world, task, strategy, steps=WATCHED_STEPS):
    run = make_run(world, task, "--parallel.strategy", strategy, "--train.micro_batch_size", 2)
    run.data.to_device = moved_in_a_list
    observer = FirstSteps(run)
    warnings = []
    object.__setattr__(run.world, "warn", warnings.append)
    try:
        for _ in range(steps):
            micro_batches = next(run.data)
            observer.before_step(micro_batches)
            observer.after_step(train_step(run, micro_batches), micro_batches)
    finally:
        object.__delattr__(run.world, "warn")
    return warnings


@pytest.mark.bad_input("a parameter that gets no gradient")
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_a_parameter_that_never_gets_a_gradient_is_named_after_some_steps(ranks, strategy):
    for warnings in on_ranks(ranks, watched_steps, Forgotten(), strategy):
        assert len(warnings) == 1
        assert warnings[0].startswith(
            f"forgotten got no gradient in {WATCHED_STEPS} steps: it counts as zero"
        )


def test_experts_that_no_sample_chose_are_named_and_said_to_be_harmless():
    (warning,) = watched_steps(World(), Mixture(), "single")
    assert (
        "blocks.0.experts.3.bias, blocks.1.experts.3.weight and 1 more got no gradient" in warning
    )
    assert warning.endswith("For a mixture's experts that no sample chose yet, nothing is wrong")


class Mean(Tiny):
    def loss_sum(self, model, batch):
        return super().loss_sum(model, batch) / self.weight(batch)


class FixedSize(Mean):
    """Takes batches of one size alone, and says how often its model was called."""

    def loss_sum(self, model, batch):
        assert len(batch["x"]) == 2
        return super().loss_sum(model, batch)


@pytest.mark.bad_input("a loss_sum that returns a mean")
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "ddp")])
def test_a_loss_that_is_a_mean_is_named_after_the_first_step(ranks, strategy):
    for warnings in on_ranks(ranks, watched_steps, Mean(), strategy, 1):
        assert len(warnings) == 1
        assert "for each of them twice, though weight(batch) grows from 2 to 4" in warnings[0]
        assert "it seems to be a mean; return the sum" in warnings[0]


@pytest.mark.parametrize("task", [Tiny(), Tiny(uneven=True), Mixture(), FixedSize()])
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "fsdp")])
def test_a_sum_is_not_taken_for_a_mean_nor_is_a_task_of_one_batch_size(task, ranks, strategy):
    for warnings in on_ranks(ranks, watched_steps, task, strategy, 2):
        assert not warnings


class Counting(Tiny):
    """Its loss depends on how often it was called."""

    def build_model(self):
        self.calls = 0
        return nn.Sequential(nn.Dropout(0.5), super().build_model())

    def loss_sum(self, model, batch):
        self.calls += 1
        return super().loss_sum(model, batch) * self.calls


def observed_steps(world, observed):
    run = make_run(world, Counting(), "--train.micro_batch_size", 2)
    observer = FirstSteps(run)
    for _ in range(3):
        micro_batches = next(run.data)
        observer.before_step(micro_batches)
        report = train_step(run, micro_batches)
        if observed:
            observer.after_step(report, micro_batches)
    return parameters_of(run)


@pytest.mark.parametrize("ranks", [1, 2])
def test_looking_for_a_mean_changes_nothing_in_the_run(ranks):
    plain = on_ranks(ranks, observed_steps, False)
    for one, other in zip(plain, on_ranks(ranks, observed_steps, True), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


class CountsItsCalls(nn.Linear):
    def __init__(self):
        super().__init__(8, 1)
        self.calls = 0
        self.batches = []

    def forward(self, x):
        self.calls += 1
        self.batches.append(len(x))
        return super().forward(x)


class Queues(Mean):
    """What it keeps changes in place, in every way, in loss_sum, collate and the model's forward.

    shrinks: also a parameter of the model.
    """

    def __init__(self, shrinks: bool = False):
        super().__init__()
        self.shrinks = shrinks

    def build_model(self):
        self.queue = deque(maxlen=100)
        self.kept = {"tensor": torch.zeros(2), "array": np.zeros(2), "set": set()}
        self.generator = torch.Generator()
        self.inner = Inner()
        return CountsItsCalls()

    def collate(self, samples):
        self.inner.count += 1
        return default_collate(samples)

    def loss_sum(self, model, batch):
        self.queue.append(batch["x"].mean().item())
        self.kept["set"].add(len(self.kept["set"]))
        self.kept["tensor"] += torch.rand(2, generator=self.generator)
        self.kept["array"] += 1
        if self.shrinks:
            getattr(model, "module", model).weight.data.mul_(0.9)
        return super().loss_sum(model, batch)


class Inner:
    count = 0


def kept_after_steps(world, task, strategy, observed):
    words = ["--parallel.strategy", strategy, "--train.micro_batch_size", 2]
    run = make_run(world, task, *words, "--use_amp", "false")
    observer, warnings = FirstSteps(run), []
    object.__setattr__(run.world, "warn", warnings.append)
    for _ in range(3):
        micro_batches = next(run.data)
        observer.before_step(micro_batches)
        report = train_step(run, micro_batches)
        if observed:
            observer.after_step(report, micro_batches)
    object.__delattr__(run.world, "warn")
    model = run.parallel.module
    kept = [[*task.queue], str(task.kept), task.inner.count, model.calls, model.batches]
    state = task.generator.get_state().tolist()
    weights = {name: value.tolist() for name, value in parameters_of(run).items()}
    return [*kept, state, weights], warnings


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "ddp")])
def test_what_a_task_or_model_keeps_moves_once_per_step_though_a_mean_is_looked_for(
    ranks, strategy
):
    plain = on_ranks(ranks, kept_after_steps, Queues(), strategy, False)
    observed = on_ranks(ranks, kept_after_steps, Queues(), strategy, True)
    assert [kept for kept, _ in observed] == [kept for kept, _ in plain]
    assert all("it seems to be a mean" in warnings[0] for _, warnings in observed)


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "ddp")])
def test_a_parameter_that_the_task_changes_is_changed_once_per_step(ranks, strategy):
    plain = on_ranks(ranks, kept_after_steps, Queues(True), strategy, False)
    observed = on_ranks(ranks, kept_after_steps, Queues(True), strategy, True)
    assert [kept for kept, _ in observed] == [kept for kept, _ in plain]


class Still(torch.optim.SGD):
    """An optimizer that leaves its parameters alone."""

    def step(self, closure=None):
        pass


@pytest.mark.bad_input("an applied step that changes no parameter")
def test_an_applied_step_that_changes_no_parameter_ends_the_run():
    run = make_run(World(), Tiny())
    run.optimizer = Still(run.parallel.parameters)
    observer, micro_batches = FirstSteps(run), next(run.data)
    observer.before_step(micro_batches)
    with pytest.raises(
        NumericsError, match=r"step 1 was applied with grad_norm .* but changed no parameter"
    ):
        observer.after_step(train_step(run, micro_batches), micro_batches)


class ScaleOnTask(Tiny):
    """Learns a factor that is not in the model, and holds the model itself too."""

    def build_model(self):
        self.factor = nn.Parameter(torch.ones(()))
        self.model = super().build_model()
        return self.model

    def loss_sum(self, model, batch):
        return super().loss_sum(model, batch) * self.factor


@pytest.mark.bad_input("a trained parameter that the task holds and the model does not")
def test_a_trained_parameter_outside_the_model_is_named_at_the_start(capsys):
    FirstSteps(make_run(World(), ScaleOnTask()))
    said = capsys.readouterr().err
    assert "the task's attribute factor holds 1 trained parameters that are not in" in said
    assert "attribute model" not in said


def test_a_step_after_the_first_ones_calls_no_check():
    run = make_run(World(), Tiny())
    run.observers.add(FirstSteps(run))
    take_steps(run, WATCHED_STEPS - 1)
    assert run.observers.before_step
    assert run.observers.after_step
    take_steps(run, 1)
    assert not run.observers.before_step
    assert not run.observers.after_step
