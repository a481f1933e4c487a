"""fit(run) in a script or notebook: as the command, stopped, failed, continued, in a thread."""

import json
import os
import signal
import threading

import pytest
import torch
from ranks import on_ranks
from test_script_run import Noisy, built, loop, same
from tiny import moments_of, parameters_of

from dist_amp.checkpoint.format import all_checkpoints
from dist_amp.errors import ConfigError
from dist_amp.files import read_rows
from dist_amp.step import train_step
from dist_amp.train import fit
from dist_amp.world import World

OFTEN = ("--checkpoint.every", 2, "--eval.every", 3, "--metrics.log_every", 2)


class Stops(Noisy):
    """A signal comes in a step, and ends the run after the next; or an error is raised."""

    def __init__(self, at: int = 2, number: int = signal.SIGINT, error: str = ""):
        super().__init__()
        self.steps_left = at
        self.number = number
        self.error = error

    def loss_sum(self, model, batch):
        if model.training:
            self.steps_left -= 1
            if self.steps_left == 0 and self.error:
                raise RuntimeError(self.error)
            if self.steps_left == 0:
                os.kill(os.getpid(), self.number)
        return super().loss_sum(model, batch)

    def on_step(self, run, report):
        """With it, every step asks whether to stop."""

    def state_dict(self):  # what it counts is no part of the run
        return {}

    def load_state_dict(self, state):
        pass


def end_of(run):
    """All that a run ends with."""
    return parameters_of(run), moments_of(run), run.scaler.state_dict(), losses_of(run.folder)


def losses_of(folder):
    rows = read_rows(folder / "metrics.jsonl")[0]
    names = ("step", "train/loss", "train/grad_norm", "eval/loss", "train/tokens_seen")
    return [{name: row[name] for name in names if name in row} for row in rows]


def disturb(run):
    """What a notebook may do between two cells."""
    torch.manual_seed(5)
    torch.rand(3)
    next(run.data)
    run.evaluate()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What a run ends with that nothing interrupts."""
    run = built(World(), tmp_path_factory.mktemp("undisturbed"), *OFTEN)
    summary = fit(run)
    assert (summary["stopped_by"], summary["steps"]) == ("completed", 6)
    assert summary == json.loads((run.folder / "summary.json").read_text())
    return end_of(run)


def handlers():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize(
    ("built_again", "words"),
    [
        (False, ()),
        (False, ("--run.resume", "never")),
        (True, ("--data.workers", 1)),
    ],
    ids=["same run", "never resumes", "built again"],
)
def test_ctrl_c_saves_after_the_step_and_a_further_fit_ends_bit_for_bit(
    built_again, words, tmp_path, undisturbed, capsys
):
    run = built(World(), tmp_path, *OFTEN, *words, task=Stops(at=2))
    before = handlers()
    with pytest.raises(KeyboardInterrupt, match=r"stopped after step 3; fit\(run\) continues"):
        fit(run)
    assert handlers() == before
    assert all_checkpoints(run.folder)[-1].name == "step_00000003"
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (summary["stopped_by"], summary["exit_code"]) == ("preempted", 75)
    if built_again:
        run = built(World(), tmp_path, *OFTEN, *words, task=Stops(at=0))
    else:
        disturb(run)
    assert fit(run)["stopped_by"] == "completed"
    assert same(list(end_of(run)), list(undisturbed))
    assert "warning" not in capsys.readouterr().err
    if "never" in words:
        with pytest.raises(ConfigError, match="holds a run already"):
            fit(built(World(), tmp_path, *OFTEN, *words))


def test_a_stop_without_checkpoints_is_continued_by_the_same_run(tmp_path, undisturbed):
    run = built(World(), tmp_path, *OFTEN, "--checkpoint.every", "off", task=Stops(at=2))
    with pytest.raises(KeyboardInterrupt):
        fit(run)
    assert not all_checkpoints(run.folder)
    disturb(run)
    fit(run)
    assert same(list(end_of(run)[:3]), list(undisturbed[:3]))


def test_another_signal_ends_a_script_with_status_75(tmp_path):
    run = built(World(), tmp_path, *OFTEN, task=Stops(at=2, number=signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        fit(run)
    assert ended.value.code == 75
    assert run.step == 3


def test_after_an_error_the_run_is_built_again_and_ends_bit_for_bit(tmp_path, undisturbed, capsys):
    run = built(World(), tmp_path, *OFTEN, task=Stops(at=4, error="of the task"))
    before = handlers(), threading.enumerate()
    with pytest.raises(RuntimeError, match="of the task"):
        fit(run)
    assert "of the task" not in capsys.readouterr().err, "the notebook shows it"
    assert (handlers(), threading.enumerate()) == before
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (summary["stopped_by"], summary["exit_code"], summary["steps"]) == ("failed", 1, 3)
    assert "of the task" in summary["cause"]
    with pytest.raises(ConfigError, match="an error ended this run after step 3"):
        fit(run)
    again = built(World(), tmp_path, *OFTEN, task=Stops(at=0))
    assert fit(again)["resumed_from_step"] == 2
    assert same(list(end_of(again)), list(undisturbed))


def with_steps_of_ones_own(folder):
    run = built(World(), folder, *OFTEN)
    for _ in range(3):
        train_step(run, next(run.data))
    return run


def with_a_loop_of_ones_own(folder):
    loop(built(World(), folder, *OFTEN), until=4)
    run = built(World(), folder, *OFTEN)
    run.resume()
    disturb(run)
    return run


def after_another_run(folder):
    fit(built(World(), folder / "before", *OFTEN))
    return built(World(), folder, *OFTEN)


def left_in_evaluation_mode(folder):
    run = built(World(), folder, *OFTEN)
    run.model.eval()
    return run


PREPARED = [with_steps_of_ones_own, with_a_loop_of_ones_own, after_another_run]


@pytest.mark.parametrize("prepared", [*PREPARED, left_in_evaluation_mode])
def test_fit_takes_the_rest_of_the_steps_and_ends_bit_for_bit(prepared, tmp_path, undisturbed):
    run = prepared(tmp_path)
    fit(run)
    assert same(list(end_of(run)[:3]), list(undisturbed[:3]))
    run.evaluate()
    run.save()


@pytest.mark.bad_input("`fit(run)` of a run that an error ended, or beside another's checkpoints")
def test_steps_beside_another_runs_checkpoints_are_refused_and_change_nothing(tmp_path):
    first = built(World(), tmp_path, *OFTEN)
    fit(first)
    files = sorted(first.folder.rglob("*"))
    summary = (first.folder / "summary.json").read_text()
    run = built(World(), tmp_path, *OFTEN)
    train_step(run, next(run.data))
    with pytest.raises(ConfigError, match=r"fit\(run\) at step 1 would replace .*step_00000006"):
        fit(run)
    assert sorted(first.folder.rglob("*")) == files
    assert (first.folder / "summary.json").read_text() == summary


def test_in_a_thread_it_trains_alike_and_says_that_signals_do_not_stop_it(
    tmp_path, undisturbed, capsys
):
    run = built(World(), tmp_path, *OFTEN)
    thread = threading.Thread(target=fit, args=(run,))
    thread.start()
    thread.join()
    assert same(list(end_of(run)), list(undisturbed))
    assert "no signal can stop it after a step" in capsys.readouterr().err


def stopped_and_continued(world, folder, strategy):
    words = (*OFTEN, "--parallel.strategy", strategy)
    through = built(world, f"{folder}/through", *words)
    summary = fit(through)
    run = built(world, f"{folder}/stopped", *words, task=Stops(at=2 * world.rank))
    with pytest.raises(SystemExit):
        fit(run)
    stopped_at = run.step
    if strategy == "ddp":
        torch.rand(3)
    fit(run)
    ends = [(parameters_of(each), moments_of(each)) for each in (through, run)]
    return summary, stopped_at, ends


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_signal_to_one_of_two_ranks_stops_both_and_a_further_fit_continues(strategy, tmp_path):
    results = on_ranks(2, stopped_and_continued, tmp_path, strategy)
    (summary, stopped_at, _), (other, *_) = results
    assert summary == other
    assert stopped_at == 3
    for *_, (through, run) in results:
        assert same(list(through), list(run))


def test_a_run_is_trained_under_its_own_switches_though_another_was_built_later(tmp_path):
    run = built(World(), tmp_path / "a", *OFTEN)
    built(World(), tmp_path / "b", *OFTEN, "--run.deterministic", "true")
    assert torch.are_deterministic_algorithms_enabled()
    assert fit(run)["steps"] == 6
    assert not torch.are_deterministic_algorithms_enabled()
