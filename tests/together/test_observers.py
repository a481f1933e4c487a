"""What watches a run changes none of its steps."""

import io
import json
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from tiny import Overflow, Tiny, make_run, moments_of, parameters_of, take_steps
from torch import nn

from dist_amp.checkpoint.state import load
from dist_amp.supervise.stop import AgreedStop
from dist_amp.train import main, train
from dist_amp.world import World


class Residual(nn.Module):
    """With an in-place module, batch statistics and dropout."""

    def __init__(self):
        super().__init__()
        relu = nn.ReLU(inplace=True)
        self.inner = nn.Sequential(nn.Linear(8, 8), relu, nn.BatchNorm1d(8), nn.Dropout(0.3))

    def forward(self, x):
        return x + self.inner(x)


class Restless(Overflow):
    """Sample 5 is infinite, so that some steps are skipped."""

    def __init__(self):
        super().__init__(bad=(5,), samples=32)

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 8), Residual(), nn.Linear(8, 1))


OFF = ["--debug.nonfinite", "off"]
WATCHED = ["--debug.nonfinite", "step", "--debug.numerics", "true", "--debug.profile", 2]


def final_states(world, words):
    """What runs end with that are not watched, by default, and by everything."""
    states = []
    for more in (OFF, [], WATCHED):
        run = make_run(world, Restless(), *words, *more)
        with AgreedStop(world) as stop:
            train(run, stop)
        run.data.close()
        tensors = [*parameters_of(run).values(), *moments_of(run), *run.parallel.module.buffers()]
        tensors += [run.scaler.scale_tensor, run.schedule.counters, torch.get_rng_state()]
        states.append([run.data.position, *(tensor.numpy().tobytes() for tensor in tensors)])
        assert all(p.grad is None for p in run.parallel.parameters)
    return states


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [(1, "single"), (2, "fsdp"), pytest.param(2, "ddp", marks=pytest.mark.slow)],
)
def test_a_run_that_is_watched_ends_bit_for_bit_as_one_that_is_not(tmp_path, ranks, strategy):
    words = ["--parallel.strategy", strategy, "--precision.dtype", "fp16", "--run.dir", tmp_path]
    words += ["--precision.cast_by", "autocast", "--precision.scaler.init_scale", 256]
    words += ["--train.micro_batch_size", 2, "--train.accumulation_steps", 2]
    words += ["--data.shuffle", "false", "--train.steps", 4, "--metrics.log_every", 2]
    for plain, default, watched in on_ranks(ranks, final_states, words):
        assert default == plain
        assert watched == plain
    assert (tmp_path / "nonfinite/reports.jsonl").exists()
    assert len(list((tmp_path / "profile").glob("*.gz"))) == ranks


# ---- observers of a user's own

WORDS = ["--use_amp", "false", "--run.device", "cpu", "--eval.every", "2", "--metrics.log_every"]
WORDS += ["2", "--checkpoint.every", "3"]


@pytest.fixture
def trained(tmp_path, capfd):
    """trained(observer, ...): (status, errors) of the main job with the task tiny:Tiny."""

    def run(observer, *words):
        words = [*WORDS, "--run.observers", observer, "--run.dir", f"{tmp_path}/run", *words]
        status = main(["--task.target", "tiny:Tiny", "--train.steps", "6", *words])
        return status, capfd.readouterr().err

    return run


RAISES = """
class Raises:
    def __init__(self, run):
        if METHOD == "__init__":
            raise ValueError("planted")

def planted(self, *_):
    raise ValueError("planted")

METHOD = {method!r}
if METHOD != "__init__":
    setattr(Raises, METHOD, planted)
"""


@pytest.mark.bad_input("an observer that raises in one of its methods")
@pytest.mark.parametrize(
    "method",
    [
        *("__init__", "before_step", "after_step", "during_evaluation", "after_evaluation", "tags"),
        *("rank_tags", "on_log", "state_dict", "summary", "close"),
    ],
)
def test_an_observer_that_raises_is_named_the_run_saved_and_the_status_1(tmp_path, trained, method):
    (tmp_path / "raises.py").write_text(RAISES.format(method=method))
    status, errors = trained(f"{tmp_path}/raises.py:Raises")
    sys.modules.pop("raises")
    assert status == 1
    name = "Raises(run) failed" if method == "__init__" else f"Raises failed in {method}() at step "
    assert name in errors
    assert "ValueError: planted (raises.py, line " in errors.splitlines()[-1]
    if method != "__init__":  # else there was nothing to save
        summary = json.loads((tmp_path / "run/summary.json").read_text())
        assert (summary["stopped_by"], summary["exit_code"]) == ("failed", 1)
        assert (tmp_path / f"run/checkpoints/step_{summary['steps']:08d}").is_dir()


class Counts:
    """Its state is the steps that it saw, of this rank."""

    def __init__(self, run):
        self.seen = 0

    def after_step(self, report, micro_batches):
        self.seen += 1

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]

    def summary(self, failed):
        return {"seen": self.seen}


class Watched(Tiny):
    def observers(self, run):
        return [Counts(run)]


class Forgets(Counts):
    def load_state_dict(self, state):
        raise ValueError("planted")


def test_an_own_observers_state_is_resumed_and_it_writes_into_the_summary(tmp_path, trained):
    by_task = ["--task.target", "test_observers:Watched", "--run.observers"]
    for name, words in (("test_observers:Counts", []), ("", by_task)):
        for steps in (3, 5):
            run = f"{tmp_path}/{len(words)}"
            assert trained(name, *words, "--train.steps", str(steps), "--run.dir", run)[0] == 0
            assert json.loads(Path(run, "summary.json").read_text())["seen"] == steps
    assert trained("test_observers:Forgets", "--train.steps", "2")[0] == 0
    status, errors = trained("test_observers:Forgets", "--train.steps", "5")
    said = "the observer Forgets failed in load_state_dict() at step 0: ValueError: planted"
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
    assert "no state of the observer Counts; it starts with its first values" in first[2]


@pytest.mark.bad_input("`run.observers` that names no class, or one without a method")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "run.observers=nothing must be module:Class or path/to/file.py:Class"),
        ("tiny:Nothing", "run.observers=tiny:Nothing: there is no class Nothing in tiny"),
        ("ranks:RankFailed", "the observer RankFailed has none of before_step, after_step"),
    ],
)
def test_a_name_that_is_no_observers_is_refused(trained, name, said):
    status, errors = trained(name)
    assert (status, said in errors) == (64, True), errors
