"""What watches a run changes none of its steps."""

import io
import json
import random
from contextlib import nullcontext, redirect_stderr
from unittest.mock import patch

import numpy
import pytest
import torch
from ranks import on_ranks
from tiny import Overflow, Tiny, WithNoise, make_run, state_of, take_steps
from torch import nn

from dist_amp.checkpoint.state import load
from dist_amp.diagnostics import consistency
from dist_amp.diagnostics.consistency import Consistency
from dist_amp.supervise.stop import AgreedStop
from dist_amp.train import main, train
from dist_amp.world import World


class Quiet(Overflow):
    """Batches have noise, and sample 5 is infinite, so that some steps are skipped."""

    collate = WithNoise.collate
    samples_taken = 0

    def __init__(self):
        super().__init__(bad=(5,), samples=32)

    def build_model(self):
        inner = [nn.ReLU(inplace=True), nn.BatchNorm1d(8), nn.Dropout(0.3)]
        return nn.Sequential(nn.Linear(8, 8), *inner, nn.Linear(8, 1))


class Restless(Quiet):
    """Its sample draws from every generator, trains batch statistics and leaves its mode."""

    def sample(self, model):
        self.samples_taken += 1
        random.random(), numpy.random.rand()  # noqa: NPY002
        model.train()
        return f"{model(torch.randn(4, 8)).sum().item():.3f}"


def final_state(world, task, words):
    """(samples taken, the state) at the end; a quiet task's run is checked by nothing either."""
    run = make_run(world, task, *words)
    checks = nullcontext() if hasattr(task, "sample") else patch.object(Consistency, "on_log")
    with patch.object(consistency, "CHECK_EVERY", 2), checks, AgreedStop(world) as stop:
        train(run, stop)
    run.data.close()
    assert all(p.grad is None for p in run.parallel.parameters)
    tensors = [*state_of(run), torch.get_rng_state()]
    state = [run.data.position, *(tensor.numpy().tobytes() for tensor in tensors)]
    return task.samples_taken, state


WATCHED = ("--debug.nonfinite", "step", "--debug.numerics", "true", "--debug.profile", 2)


@pytest.mark.parametrize(
    ("ranks", "strategy", "watched"),
    [
        (1, "single", ()),  # by what watches by default
        (2, "fsdp", WATCHED),
        pytest.param(2, "ddp", WATCHED, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_watched_and_samples_ends_bit_for_bit_as_one_that_is_not(
    tmp_path, ranks, strategy, watched
):
    words = ["--parallel.strategy", strategy, "--precision.dtype", "fp16", "--run.dir", tmp_path]
    words += ["--precision.cast_by", "autocast", "--precision.scaler.init_scale", 256]
    words += ["--train.micro_batch_size", 2, "--train.accumulation_steps", 2, "--optim.ema", 0.9]
    words += ["--data.shuffle", "false", "--train.steps", 4, "--metrics.log_every", 2]
    words += ["--eval.every", 2]
    plain = on_ranks(ranks, final_state, Quiet(), [*words, "--debug.nonfinite", "off"])
    seen = on_ranks(ranks, final_state, Restless(), [*words, *watched])
    assert [state for _, state in seen] == [state for _, state in plain]
    assert [taken for taken, _ in plain + seen] == [0] * ranks + [2] * ranks
    assert (tmp_path / "nonfinite/reports.jsonl").exists()
    assert len(list(tmp_path.glob("profile/*.gz"))) == (ranks if watched else 0)


# ---- observers of a user's own


@pytest.fixture
def trained(tmp_path, capfd):
    """trained(observer, steps, ...): (status, errors, folder) of the main job."""

    def run(observer, steps=4, task="tiny:Tiny"):
        words = "--use_amp false --run.device cpu --eval.every 2 --metrics.log_every 2 "
        words += f"--checkpoint.every 3 --run.observers {observer} --run.dir {tmp_path}/run "
        status = main(f"{words} --task.target {task} --train.steps {steps}".split())
        return status, capfd.readouterr().err, tmp_path / "run"

    return run


class Counts:
    """Its state is the steps that it saw, of this rank."""

    tag = "seen"

    def __init__(self, run):
        self.seen = 0

    def after_step(self, report, micro_batches):
        self.seen += 1

    def tags(self, row):
        return {"seen/all": True, "seen/note": "a text", "seen/parts": {"a": self.seen}}

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]

    def summary(self, failed):
        return {self.tag: self.seen}


class OfTheTask(Counts):
    tag = "seen_by_the_task"


class Watched(Tiny):
    def observers(self, run):
        return [OfTheTask(run)]


def planted(self, *_):
    raise ValueError("planted")


@pytest.mark.bad_input("an observer that raises in one of its methods")
@pytest.mark.parametrize(
    "method",
    ["after_step", "during_evaluation", "tags", "on_log", "state_dict", "summary", "close"],
)
def test_an_observer_that_raises_is_named_the_run_saved_and_the_status_1(
    trained, monkeypatch, method
):
    monkeypatch.setattr(Counts, method, planted, raising=False)
    status, errors, folder = trained("test_observers:Counts")
    assert status == 1
    assert f"the observer Counts failed in {method}() at step " in errors
    assert "ValueError: planted (test_observers.py, line " in errors.splitlines()[-1]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["stopped_by"], summary["exit_code"]) == ("failed", 1)
    assert (folder / f"checkpoints/step_{summary['steps']:08d}").is_dir()


def test_own_observers_states_are_resumed_and_they_write_into_the_summary(trained, monkeypatch):
    for steps in (3, 5):
        status, _, folder = trained("test_observers:Counts", steps, "test_observers:Watched")
        summary = json.loads((folder / "summary.json").read_text())
        assert (status, summary["seen"], summary["seen_by_the_task"]) == (0, steps, steps)
    assert '"seen/note": "a text", "seen/parts": {"a": 5}' in (folder / "metrics.jsonl").read_text()
    monkeypatch.setattr(Counts, "load_state_dict", planted)
    status, errors, _ = trained("test_observers:Counts", 6, "test_observers:Watched")
    said = "the observer Counts failed in load_state_dict() at step 0: ValueError: planted"
    assert (status, said in errors.splitlines()[-1]) == (1, True)


class FailsOnce(Counts):
    def after_step(self, report, micro_batches):
        super().after_step(report, micro_batches)
        raise ValueError("planted")


def test_an_observer_that_rests_or_has_failed_is_called_around_no_more_steps():
    run = make_run(World(), Tiny())
    run.observers.begin(run)
    rests, fails, counts = observers = [Counts(run), FailsOnce(run), Counts(run)]
    for observer in observers:
        run.observers.add(observer, stays=observer is fails)
    take_steps(run, 1)
    run.observers.rest(rests)
    take_steps(run, 2)
    assert [observer.seen for observer in observers] == [1, 1, 3]
    assert "the observer FailsOnce failed in after_step() at step " in str(run.observers.problem)
    assert (counts in run.observers, fails in run.observers) == (True, False)


def resumed_where_one_failed(world, folder):
    """(step, what the observer has seen, warnings), resumed from a save without rank 0's."""
    run = make_run(world, Tiny(), "--run.dir", folder)
    if world.rank == 1:  # one that fails is dropped on its rank
        run.observers.add(Counts(run), stays=True)
    take_steps(run, 3)
    path = run.save()
    run = make_run(world, Tiny(), "--run.dir", folder)
    observer = Counts(run)
    run.observers.add(observer, stays=True)
    with redirect_stderr(io.StringIO()) as warnings:
        load(run, path)
    return run.step, observer.seen, warnings.getvalue()


def test_a_run_whose_observer_failed_on_one_rank_resumes_with_its_first_values(tmp_path):
    first, second = on_ranks(2, resumed_where_one_failed, f"{tmp_path}/run")
    assert first[:2] == second[:2] == (3, 0)
    assert "no state of the observer Counts, which starts from its initial state" in first[2]


class Plain:
    def __init__(self, run):
        pass


@pytest.mark.bad_input("`run.observers` that names no class, or one without a method")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "run.observers=nothing must be module:Class or path/to/file.py:Class"),
        ("tiny:Nothing", "run.observers=tiny:Nothing: there is no class Nothing in tiny"),
        ("test_observers:Plain", "the observer Plain has none of before_step, after_step"),
    ],
)
def test_a_name_that_is_no_observers_is_refused(trained, name, said):
    status, errors, _ = trained(name)
    assert (status, said in errors) == (64, True), errors
