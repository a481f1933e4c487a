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

    unsaved = ("steps_left",)

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


def end_of(run):
    rows = read_rows(run.folder / "metrics.jsonl")[0]
    names = ("step", "train/loss", "train/grad_norm", "eval/loss", "train/tokens_seen")
    losses = [{name: row[name] for name in names if name in row} for row in rows]
    return parameters_of(run), moments_of(run), run.scaler.state_dict(), losses


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
    ("every", "saved", "exit_code"),
    [(2, ["step_00000002", "step_00000003"], 75), ("off", [], 1)],
)
def test_ctrl_c_saves_after_the_step_and_a_further_fit_ends_bit_for_bit(
    every, saved, exit_code, tmp_path, undisturbed, capsys
):
    words = (*OFTEN, "--checkpoint.every", every, "--run.resume", "never")
    run = built(World(), tmp_path, *words, task=Stops(at=2))
    before = handlers()
    with pytest.raises(KeyboardInterrupt, match=r"stopped after step 3; fit\(run\) continues"):
        fit(run)
    assert handlers() == before
    assert [path.name for path in all_checkpoints(run.folder)] == saved
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (summary["stopped_by"], summary["exit_code"]) == ("preempted", exit_code)
    disturb(run)
    assert fit(run)["stopped_by"] == "completed"
    assert same(list(end_of(run)), list(undisturbed))
    assert "warning" not in capsys.readouterr().err


@pytest.mark.bad_input("`fit(run)` of a run that an error ended")
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
    with pytest.raises(ConfigError, match="holds a run already"):
        fit(built(World(), tmp_path, *OFTEN, "--run.resume", "never"))
    again = built(World(), tmp_path, *OFTEN, "--data.workers", 1, task=Stops(at=0))
    assert fit(again)["resumed_from_step"] == 2
    assert same(list(end_of(again)), list(undisturbed))


def with_own_steps_beside_a_stopped_run(folder):
    stopped = built(World(), folder, *OFTEN, task=Stops(at=2, number=signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        fit(stopped)
    assert (ended.value.code, stopped.step) == (75, 3)
    run = built(World(), folder, *OFTEN)
    for _ in range(2):  # a due evaluation would restore the mode
        train_step(run, next(run.data))
    run.model.eval()
    return run


def with_an_own_loop_after_another_run(folder):
    fit(built(World(), folder / "before", *OFTEN))
    loop(built(World(), folder, *OFTEN), until=4)
    run = built(World(), folder, *OFTEN)
    run.resume()
    disturb(run)
    return run


@pytest.mark.parametrize(
    "prepared", [with_own_steps_beside_a_stopped_run, with_an_own_loop_after_another_run]
)
def test_fit_takes_the_rest_of_the_steps_and_ends_bit_for_bit(prepared, tmp_path, undisturbed):
    run = prepared(tmp_path)
    fit(run)
    is_other = prepared is with_own_steps_beside_a_stopped_run
    assert (run.folder / "checkpoints/refused_step_00000003/manifest.json").exists() == is_other
    assert same(list(end_of(run)[:3]), list(undisturbed[:3]))
    run.evaluate()
    run.save()


def test_a_launch_that_would_restart_into_a_stale_store_is_refused_here_too(tmp_path, monkeypatch):
    run = built(World(), tmp_path)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(ConfigError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        fit(run)
    run.close()


def test_in_a_thread_it_trains_alike_under_its_own_switches(tmp_path, undisturbed):
    run = built(World(), tmp_path, *OFTEN)
    built(World(), tmp_path / "later", *OFTEN, "--run.deterministic", "true")
    assert torch.are_deterministic_algorithms_enabled()
    thread = threading.Thread(target=fit, args=(run,))
    thread.start()
    thread.join()
    assert same(list(end_of(run)), list(undisturbed))
    assert not torch.are_deterministic_algorithms_enabled()


def stopped_and_continued(world, folder):
    words = (*OFTEN, "--parallel.strategy", "fsdp")
    through = built(world, f"{folder}/through", *words)
    summary = fit(through)
    run = built(world, f"{folder}/stopped", *words, task=Stops(at=2 * world.rank))
    with pytest.raises(SystemExit):
        fit(run)
    stopped_at = run.step
    fit(run)
    ends = [[*parameters_of(each).values(), *moments_of(each)] for each in (through, run)]
    return summary, stopped_at, same(*ends)


def test_a_signal_to_one_of_two_ranks_stops_both_and_a_further_fit_continues(tmp_path):
    first, second = on_ranks(2, stopped_and_continued, tmp_path)
    assert first == second
    assert first[1:] == (3, True)
