"""What a task keeps beside the model: equal on all ranks, saved, or warned of; never lost."""

import copy
import random
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import on_ranks
from test_checkpoint import settings
from tiny import Tiny, make_run, save, take_steps, variant

from dist_amp.config.load import load_config
from dist_amp.errors import DataError
from dist_amp.run import build_run
from dist_amp.world import World


class RandomTargets(Tiny):
    """Draws targets in its constructor and in build_model, from every generator."""

    def __init__(self):
        super().__init__()
        self.first = [torch.rand(2), np.random.rand(2), random.random()]  # noqa: NPY002

    def build_model(self):
        model = super().build_model()
        self.second = [torch.rand(2), np.random.rand(2), random.random()]  # noqa: NPY002
        self.second += super().build_model().parameters()
        return model


def drawn(world, strategy):
    words = ["--task.target", "tests/core/test_task_state.py:RandomTargets"]
    run = build_run(load_config([*words, "--parallel.strategy", strategy], environ={}), world)
    return [torch.as_tensor(value).detach() for value in run.task.first + run.task.second]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_what_a_task_draws_and_keeps_is_equal_on_every_rank_and_strategy(strategy):
    alone = drawn(World(), "single")
    for there in on_ranks(2, drawn, strategy):
        assert all(map(torch.equal, there, alone))


class Remembers(Tiny):
    """Its loss depends on a teacher, a queue and a count that it keeps itself."""

    def build_model(self):
        model = super().build_model()
        self.teacher = copy.deepcopy(model).requires_grad_(False)
        self.queue = torch.zeros(4)
        self.calls = 0
        return model

    def loss_sum(self, model, batch):
        prediction = model(batch["x"]).float().squeeze(-1)
        with torch.no_grad():
            target = self.teacher(batch["x"]).squeeze(-1) + self.queue.mean() + 0.01 * self.calls
            self.queue = torch.cat([self.queue[1:], prediction.mean()[None]])
        self.calls += 1
        return (prediction - target).square().sum()


class Saves(Remembers):
    def state_dict(self):
        return {"teacher": self.teacher.state_dict(), "queue": self.queue, "calls": self.calls}

    def load_state_dict(self, state):
        self.teacher.load_state_dict(state["teacher"])
        self.queue = state["queue"]
        self.calls = state["calls"]


def losses_after_a_resume(world, folder):
    words = settings(folder, "fsdp", "fp32")
    through = make_run(world, Saves(), *words)
    with closing(through.saver) as saver:
        take_steps(through, 2)
        saver.save(wait=False)
        queue = through.task.queue
        after = [report.loss_sum.item() for report in take_steps(through, 3)]
    resumed = make_run(world, Saves(), *words, "--run.resume", "auto")
    assert resumed.step == 2
    return queue, after, [report.loss_sum.item() for report in take_steps(resumed, 3)]


def test_what_a_task_saves_itself_is_resumed_bit_for_bit_on_every_rank_and_elsewhere_by_modulo(
    tmp_path, capsys
):
    ends = on_ranks(2, losses_after_a_resume, tmp_path)
    for _, after, resumed in ends:
        assert after == resumed
    words = settings(tmp_path, "single", "fp32", "--train.accumulation_steps", 4)
    alone = make_run(World(), Saves(), *words, "--run.resume", "auto")
    assert torch.equal(alone.task.queue, ends[0][0])
    assert not torch.equal(alone.task.queue, ends[1][0])
    assert "a state of the task for each of 2 ranks" in capsys.readouterr().err


class Draws(Tiny):
    """Draws from generators that it keeps itself."""

    def __init__(self):
        super().__init__()
        self.of_torch = torch.Generator()
        self.of_numpy = np.random.default_rng(0)
        self.of_python = random.Random(0)

    def loss_sum(self, model, batch):
        torch.rand(1, generator=self.of_torch)
        self.of_numpy.random()
        self.of_python.random()
        return super().loss_sum(model, batch)


class SetAnew(Remembers):
    unsaved = ("queue", "calls")


class TwoInOne(torch.optim.Optimizer):
    """Two optimizers in one, whose states are their own."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})
        self.parts = [torch.optim.AdamW([group], lr=lr) for group in self.param_groups]
        self.param_groups[0]["k"] = 0  # as schedule-free optimizers count

    def step(self, closure=None):
        self.param_groups[0]["k"] += 1
        for part in self.parts:
            part.step()


LOST = "which changed and is in no checkpoint"
FIX = "give the task state_dict() and load_state_dict(state), or list it in"


@pytest.mark.bad_input("an optimizer that keeps its moments outside `state`")
@pytest.mark.bad_input("an optimizer that changes options of its groups in training")
@pytest.mark.parametrize(
    ("task", "said", "fix"),
    [
        (Remembers(), f"the task keeps queue, calls, {LOST}", FIX),
        (Draws(), f"the task keeps of_torch, of_numpy, of_python, {LOST}", FIX),
        (
            variant(optimizer=TwoInOne),
            f"the optimizer keeps parts, k of matrices, {LOST}",
            "keep it in optimizer.state",
        ),
        (SetAnew(), "", ""),
        (Saves(), "", ""),
        # An object of a library's class is not taken for an array by its dtype.
        (variant(foreign=SimpleNamespace(dtype=torch.bfloat16)), "", ""),
    ],
)
def test_what_changes_between_the_first_two_saves_and_is_in_no_checkpoint_is_warned_of_once(
    task, said, fix, tmp_path, capsys
):
    run = make_run(World(), task, "--run.dir", tmp_path)
    for _ in range(4):
        take_steps(run, 1)
        save(run)
    warned = capsys.readouterr().err
    assert warned.count(" keeps ") == bool(said)
    assert said in warned
    assert fix in warned


def test_a_checkpoint_from_before_the_task_saved_anything_is_loaded_with_a_warning(
    tmp_path, capsys
):
    words = settings(tmp_path, "single", "fp32")
    save(make_run(World(), Remembers(), *words))
    make_run(World(), Saves(), *words, "--run.resume", "auto")
    assert "the checkpoint has no state of the task" in capsys.readouterr().err


@pytest.mark.bad_input("a task's `state_dict()` with an object that a checkpoint can't hold")
def test_a_state_that_could_not_be_loaded_is_refused_when_it_is_saved(tmp_path):
    task = Saves()
    task.state_dict = lambda: {"rows": Tiny()}
    with pytest.raises(DataError, match=r"the task's state_dict\(\) .*return only tensors"):
        save(make_run(World(), task, "--run.dir", tmp_path))
    task = type("OnlyLoads", (Remembers,), {"load_state_dict": lambda task, state: None})()
    with pytest.raises(AttributeError, match="has no attribute 'state_dict'"):
        save(make_run(World(), task, "--run.dir", tmp_path))
