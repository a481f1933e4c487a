"""What a task keeps beside the model: equal on all ranks, saved, or warned of; never lost."""

import copy
import random

import numpy as np
import pytest
import torch
from conftest import needs
from ranks import RankFailed, on_ranks
from test_checkpoint import settings
from tiny import Tiny, make_run, save, take_steps
from torch import nn

from dist_amp.checkpoint.saver import Saver
from dist_amp.checkpoint.task_state import Unsaved, check_kept, packed_state
from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError, DataError
from dist_amp.run import build_run
from dist_amp.world import World

RANKS = [(2, "ddp"), (2, "fsdp"), (4, "hsdp")]


class RandomTargets(Tiny):
    """Draws a target in its constructor and another in build_model, from every generator."""

    def __init__(self):
        super().__init__()
        self.first = [torch.rand(2), np.random.rand(2), random.random()]  # noqa: NPY002

    def build_model(self):
        model = super().build_model()
        self.second = [torch.rand(2), np.random.rand(2), random.random()]  # noqa: NPY002
        self.teacher = super().build_model().requires_grad_(False)
        return model

    def loss_sum(self, model, batch):
        with torch.no_grad():
            target = self.teacher(batch["x"]) * self.first[0][0] + self.second[0][0]
        return (model(batch["x"]).float() - target).square().sum()


def drawn(world, strategy):
    """All that such a task drew, and a step's loss over all ranks."""
    words = ["--task.target", "tests/core/test_task_state.py:RandomTargets"]
    words += ["--run.resume", "never"]
    words += ["--parallel.strategy", strategy, "--use_amp", "false", "--eval.every", "off"]
    words += ["--data.shuffle", "false"]
    size = 8 // world.world_size
    config = load_config([*words, "--train.micro_batch_size", str(size)], environ={})
    run = build_run(config, world)
    check_kept(run)
    (report,) = take_steps(run, 1)
    parts = [*run.task.first, *run.task.second, *run.task.teacher.parameters()]
    loss = world.sum(report.loss_sum) if world.world_size > 1 else report.loss_sum
    return [torch.as_tensor(part) for part in parts], loss.item()


@pytest.mark.parametrize(("ranks", "strategy"), RANKS)
def test_what_a_task_draws_and_keeps_is_equal_on_every_rank_and_strategy(ranks, strategy):
    alone, loss = drawn(World(), "single")
    for parts, there in on_ranks(ranks, drawn, strategy):
        assert all(map(torch.equal, parts, alone))
        assert there == pytest.approx(loss, rel=1e-6)  # a sum of 8 losses in another order


class Unseeded(Tiny):
    def build_model(self):
        self.target = np.random.default_rng().random(3)
        return super().build_model()


def kept_unequal(world):
    check_kept(make_run(world, Unseeded()))


@pytest.mark.bad_input("a tensor that the task keeps and that differs between ranks")
def test_a_kept_tensor_that_differs_between_ranks_is_refused_by_name():
    with pytest.raises(RankFailed, match="attribute target is not the same on ranks 0 and 1; draw"):
        on_ranks(2, kept_unequal)


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
    check_kept(make_run(World(), ScaleOnTask()))
    said = capsys.readouterr().err
    assert "the task's attribute factor holds 1 trained parameters that are not in" in said
    assert "attribute model" not in said


# ---- saved and loaded ----


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

    def weight(self, batch):
        return len(batch["x"])


class Saves(Remembers):
    def state_dict(self):
        return {"teacher": self.teacher.state_dict(), "queue": self.queue, "calls": self.calls}

    def load_state_dict(self, state):
        self.teacher.load_state_dict(state["teacher"])
        self.queue = state["queue"]
        self.calls = state["calls"]


def losses_after_a_resume(world, folder, strategy, task, background=False):
    words = settings(folder, strategy, "fp32")
    through = make_run(world, task(), *words)
    with Saver(through) as saver:
        take_steps(through, 2)
        saver.save(wait=not background)
    after = [report.loss_sum.item() for report in take_steps(through, 3)]
    resumed = make_run(world, task(), *words, "--run.resume", "auto")
    assert resumed.step == 2
    return after, [report.loss_sum.item() for report in take_steps(resumed, 3)]


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), *RANKS])
def test_what_a_task_saves_itself_is_resumed_bit_for_bit_on_every_rank(tmp_path, ranks, strategy):
    for background in (False, True):
        folder = tmp_path / str(background)
        for after, resumed in on_ranks(
            ranks, losses_after_a_resume, folder, strategy, Saves, background
        ):
            assert after == resumed


def test_what_changes_and_is_not_saved_is_warned_of_when_a_checkpoint_is_written(tmp_path, capsys):
    after, resumed = losses_after_a_resume(World(), tmp_path, "single", Remembers)
    assert after != resumed
    said = capsys.readouterr().err
    assert "the task keeps queue, calls, which changed and is in no checkpoint" in said
    assert "teacher" not in said
    assert "give the task state_dict() and load_state_dict(state), or name it in" in said


class SetAnew(Remembers):
    unsaved = ("queue", "calls")


def test_a_change_is_warned_of_once(tmp_path, capsys):
    run = make_run(World(), Remembers(), "--run.dir", tmp_path / "run")
    for _ in range(3):
        take_steps(run, 1)
        save(run)
    assert capsys.readouterr().err.count("the task keeps queue, calls") == 1


def test_what_the_task_names_as_set_anew_in_each_step_is_not_warned_of(tmp_path, capsys):
    losses_after_a_resume(World(), tmp_path, "single", SetAnew)
    assert "keeps" not in capsys.readouterr().err


@pytest.mark.bad_input("a task's `unsaved` that is no tuple of names")
@pytest.mark.parametrize("given", ["queue", 3])
def test_unsaved_that_is_no_tuple_of_names_is_refused_at_the_start(given):
    task = type("Odd", (Remembers,), {"unsaved": given})()
    with pytest.raises(ConfigError, match=rf"unsaved={given!r}: give a tuple of names"):
        make_run(World(), task)


def test_a_task_without_changes_is_not_warned_of(tmp_path, capsys):
    losses_after_a_resume(World(), tmp_path, "single", Tiny)
    assert "keeps" not in capsys.readouterr().err


def count_on_two_ranks(world, folder):
    run = make_run(world, Saves(), *settings(folder, "ddp", "fp32"))
    take_steps(run, 2)
    run.task.calls += 100 * world.rank
    save(run)
    return run.task.calls


def test_at_another_world_size_a_rank_takes_the_state_of_its_rank_modulo_the_saved(
    tmp_path, capsys
):
    calls = on_ranks(2, count_on_two_ranks, tmp_path)
    words = settings(tmp_path, "single", "fp32", "--train.accumulation_steps", 4)
    task = Saves()
    make_run(World(), task, *words, "--run.resume", "auto")
    assert task.calls == calls[0]
    assert "a state of the task for each of 2 ranks" in capsys.readouterr().err


def test_a_checkpoint_from_before_the_task_saved_anything_is_loaded_with_a_warning(
    tmp_path, capsys
):
    words = settings(tmp_path, "single", "fp32")
    save(make_run(World(), Remembers(), *words))
    make_run(World(), Saves(), *words, "--run.resume", "auto")
    assert "the checkpoint has no state of the task" in capsys.readouterr().err


class Unloadable(Saves):
    def state_dict(self):
        return {"rows": self}


@pytest.mark.bad_input("a task's `state_dict()` with an object that a checkpoint can't hold")
def test_a_state_that_could_not_be_loaded_safely_is_refused_when_it_is_saved():
    with pytest.raises(DataError, match=r"the task's state_dict\(\) .*let it hold tensors"):
        packed_state(Unloadable())


class OnlySaves(Remembers):
    def state_dict(self):
        return {}


@pytest.mark.bad_input("a task with `state_dict` and without `load_state_dict`")
def test_a_state_that_nothing_loads_is_refused_at_the_start():
    with pytest.raises(ConfigError, match=r"has state_dict, but not both .*; add the other"):
        Unsaved(make_run(World(), OnlySaves()))


# ---- optimizers ----


class TwoInOne(torch.optim.Optimizer):
    """Two optimizers in one, whose states are their own."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})
        self.parts = [torch.optim.AdamW([group], lr=lr) for group in self.param_groups]

    def step(self, closure=None):
        for part in self.parts:
            part.step()


class OptimizerOfTwo(Tiny):
    def optimizer(self, groups, lr):
        return TwoInOne(groups, lr)


@pytest.mark.bad_input("an optimizer that keeps its moments outside `state`")
def test_moments_outside_an_optimizers_state_are_warned_of(tmp_path, capsys):
    losses_after_a_resume(World(), tmp_path, "single", OptimizerOfTwo)
    said = capsys.readouterr().err
    assert "the optimizer keeps parts, which changed and is in no checkpoint" in said


@pytest.mark.parametrize(
    "name", ["adamw", "sgd", pytest.param("muon", marks=needs("optimizers.muon"))]
)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_the_named_optimizers_keep_nothing_that_is_not_saved(name, dtype, capsys):
    run = make_run(World(), Tiny(), *settings("x", "single", dtype), "--optim.name", name)
    unsaved = Unsaved(run)
    take_steps(run, 2)
    unsaved.warn_of_changes()
    assert "keeps" not in capsys.readouterr().err
