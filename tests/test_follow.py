"""`python -m dist_amp.follow`: every line reaches the tracker once, whatever is killed. The tracker
is a fake here.
"""

import json
import math
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from written_run import WrittenRun

from dist_amp.commands import follow, followed_run, trackers
from dist_amp.errors import ConfigError, DataError, Failure
from dist_amp.files import only_process


class Killed(BaseException):
    """The follower's process ends here, and nothing after it runs."""


class Fake:
    """A tracker that keeps all runs in `runs` by id, and dies at `dies_at` = (number, before or
    after it has it).
    """

    project_variable, where = "FAKE_PROJECT", "a fake"
    can_be_asked = writes_within_a_second = True

    def __init__(self, project, id, name, config):
        self.run = self.runs.setdefault(
            id, {"project": project, "config": config, "lines": [], "ends": []}
        )

    def last_steps(self):
        if not self.can_be_asked:
            return None
        return {
            "ranks" if tag.startswith("rank0") else tag: step
            for _, step, line in self.run["lines"]
            for tag in line
        }

    def log(self, number, step, values):
        if self.dies_at == (number, "before"):
            raise Killed
        self.run["lines"].append((number, step, values))
        if self.dies_at == (number, "after"):
            raise Killed

    def end(self, step, summary, values, sample):
        self.run["ends"].append((step, summary, values, sample))

    def close(self):
        pass


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """{id: run} of the fake tracker."""
    monkeypatch.setattr(Fake, "runs", {}, raising=False)
    monkeypatch.setattr(Fake, "dies_at", None, raising=False)
    monkeypatch.setitem(trackers.TRACKERS, "fake", Fake)
    return Fake.runs


class Script(threading.Event):
    """Between two polls, the next of the actions; after the last one, a signal to stop."""

    def __init__(self, *actions):
        super().__init__()
        self.actions = list(actions)

    def wait(self, timeout=None):
        self.actions.pop(0)() if self.actions else self.set()
        return self.is_set()


class Run(WrittenRun):
    def follow(self, *actions, once=False):
        return follow.Follower(self.folder, "fake", "").follow(once, Script(*actions))


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "my run")


def the_only(runs):
    (run,) = runs.values()
    return run


def steps_of(run, tag="train/loss"):
    return [step for _, step, values in run["lines"] if tag in values]


def test_a_live_run_is_sent_as_it_comes_and_its_summary_at_the_end(run, runs):
    (run.folder / "sample.txt").write_text("def f(x):")
    seen = []

    def later():
        seen.append(steps_of(the_only(runs)))
        run.take(3)
        run.log.append({"step": 3, "eval/loss": 0.25})

    run.take(1, 2)
    assert run.follow(later, lambda: run.end(final_loss=0.5, ranks=[{"rank": 0}])) == 0
    assert seen == [[1, 2]]
    (identity, sent), *others = runs.items()
    assert not others
    assert identity.startswith("my-run-")
    assert (sent["project"], sent["config"]["train"]) == ("dist_amp", {"steps": 20})
    assert sent["lines"] == [
        (0, 1, {"train/loss": 1.0, "rank00000/memory/peak_bytes": 2.0**20}),
        (1, 2, {"train/loss": 0.5, "rank00000/memory/peak_bytes": 2.0**20}),
        (2, 3, {"train/loss": 1 / 3, "rank00000/memory/peak_bytes": 2.0**20}),
        (3, 3, {"eval/loss": 0.25}),
    ]
    ((step, summary, values, sample),) = sent["ends"]
    assert (step, values, sample) == (
        20,
        {"summary/steps": 20.0, "summary/final_loss": 0.5},
        "def f(x):",
    )
    assert summary["ranks"] == [{"rank": 0}]


def test_afterwards_it_goes_on_in_the_same_run_and_sends_nothing_twice(run, runs, capsys):
    run.take(1, 2)
    assert run.follow(once=True) == 0
    run.take(3)
    run.end()
    for _ in range(3):
        assert run.follow() == 0
    assert steps_of(the_only(runs)) == [1, 2, 3]
    assert len(the_only(runs)["ends"]) == 1
    assert "1 lines" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "seen", [5, 12, 15]
)  # the last step that was sent when the run was killed at 15
def test_of_a_resumed_run_each_step_is_sent_once_and_none_is_lost(run, runs, seen):
    def killed_and_resumed_from_step_10():
        run.take(*range(seen + 1, 16))
        run.start(10)
        run.take(*range(11, 14), **{"train/new": 1.0})

    run.take(*range(1, seen + 1))
    run.follow(killed_and_resumed_from_step_10, lambda: run.take(*range(14, 21)), run.end)
    assert steps_of(the_only(runs)) == list(range(1, 21))
    assert steps_of(the_only(runs), "train/new") == [11, 12, 13], (
        "a tag that the first attempt did not have"
    )


@pytest.mark.parametrize(
    "dies_at", [(number, when) for number in (0, 1, 4) for when in ("before", "after")]
)
def test_a_follower_that_is_killed_goes_on_without_a_gap_or_a_repetition(
    run, runs, monkeypatch, dies_at
):
    monkeypatch.setattr(Fake, "dies_at", dies_at)
    run.take(1, 2)
    with pytest.raises(Killed):
        run.follow(lambda: run.take(3, 4), lambda: run.take(5, 6))
    monkeypatch.setattr(Fake, "dies_at", None)
    run.end()
    run.follow()
    assert sorted(set(steps_of(the_only(runs)))) == list(
        range(1, max(steps_of(the_only(runs))) + 1)
    )
    assert len(steps_of(the_only(runs))) == len(set(steps_of(the_only(runs)))), steps_of(
        the_only(runs)
    )
    assert len(the_only(runs)["lines"]) == len(
        (run.folder / "metrics.jsonl").read_text().splitlines()
    )


def test_a_tracker_that_keeps_lines_in_memory_gets_all_since_it_was_closed_under_the_same_numbers(
    run, runs, monkeypatch
):
    monkeypatch.setattr(Fake, "can_be_asked", False)
    monkeypatch.setattr(Fake, "writes_within_a_second", False)
    run.take(1, 2)
    run.follow(once=True)
    the_only(runs)["lines"].clear()
    monkeypatch.setattr(Fake, "dies_at", (5, "after"))
    with pytest.raises(Killed):
        run.follow(lambda: run.take(3, 4), lambda: run.take(5, 6))
    the_only(runs)["lines"].clear()  # it dies with the process
    monkeypatch.setattr(Fake, "dies_at", None)
    run.end()
    run.follow()
    assert [(number, step) for number, step, _ in the_only(runs)["lines"]] == [
        (2, 3),
        (3, 4),
        (4, 5),
        (5, 6),
    ]


def test_a_run_that_starts_again_from_step_0_is_a_new_run_in_the_tracker(run, runs, capsys):
    def killed_before_its_first_checkpoint():
        run.start(0)
        run.take(1, 2, 3)

    run.take(1, 2)
    run.follow(killed_before_its_first_checkpoint, run.end)
    first, second = runs.values()
    assert (steps_of(first), steps_of(second)) == ([1, 2], [1, 2, 3])
    assert (len(first["ends"]), len(second["ends"])) == (0, 1)
    assert "has started again from step 0: this is a new run in fake" in capsys.readouterr().out


def test_lines_read_while_the_run_starts_again_are_not_taken_for_the_first_attempts(
    run, runs, monkeypatch
):
    read = followed_run.MetricsFile.read

    def read_late(self):
        if len(runs) == 1 and not (run.folder / "metrics_before.jsonl").exists():
            run.start(0)
            run.take(7)
        return read(self)

    run.take(1, 2)
    run.follow(lambda: monkeypatch.setattr(followed_run.MetricsFile, "read", read_late), run.end)
    assert [steps_of(one) for one in runs.values()] == [[1, 2], [7]]


def test_a_half_written_line_waits_for_its_other_half(run, runs):
    path = run.folder / "metrics.jsonl"
    run.take(1)
    line = json.dumps({"step": 2, "train/loss": 0.5})
    run.follow(
        lambda: path.write_text(path.read_text() + line[:20]),
        lambda: path.write_text(path.read_text() + line[20:] + "\n"),
        run.end,
    )
    assert steps_of(the_only(runs)) == [1, 2]


def test_a_tag_that_is_written_ahead_of_the_metrics_of_the_step_before_costs_neither(run, runs):
    run.take(1)
    run.log.append({"step": 3, "numerics/underflow": 0.1})
    run.take(2, 3)
    run.follow(once=True)
    assert (steps_of(the_only(runs)), steps_of(the_only(runs), "numerics/underflow")) == (
        [1, 2, 3],
        [3],
    )


def test_values_that_are_not_finite_and_names_that_trackers_refuse(run, runs):
    run.log.append(
        {
            "step": 1,
            "train/loss": math.nan,
            "amp/loss_scale": math.inf,
            "numerics/a[0]=b": 1.0,
            "what": "x",
        }
    )
    run.follow(once=True)
    ((_, _, values),) = the_only(runs)["lines"]
    assert math.isnan(values.pop("train/loss"))
    assert values == {"amp/loss_scale": math.inf, "numerics/a_0__b": 1.0}


@pytest.mark.parametrize(("listed", "folders", "shown"), [(2, 2, 2), (64, 64, 64), (64, 1, 0)])
def test_the_values_of_ranks_are_sent_for_up_to_64_ranks(run, runs, listed, folders, shown):
    for rank in range(folders):
        (run.folder / f"tensorboard/rank{rank:05d}").mkdir(parents=True)
    run.take(1, ranks=[{"memory/peak_bytes": float(rank)} for rank in range(listed)])
    run.follow(once=True)
    ((_, _, values),) = the_only(runs)["lines"]
    expected = {f"rank{rank:05d}/memory/peak_bytes": rank for rank in range(shown)}
    assert {tag: value for tag, value in values.items() if tag.startswith("rank")} == expected


def test_the_summary_of_an_attempt_that_was_restarted_ends_nothing(run, runs, monkeypatch):
    monkeypatch.setattr(followed_run, "RESTART_SECONDS", 60.0)

    def restarted():
        time.sleep(0.02)  # the clock of a file system may tick a hundred times a second only
        run.start(2)
        run.take(3)

    run.take(1, 2)
    run.end("failed", cause="out of memory")
    run.follow(restarted, lambda: run.take(4), run.end)
    assert steps_of(the_only(runs)) == [1, 2, 3, 4]
    ((_, summary, _, _),) = the_only(runs)["ends"]
    assert summary["stopped_by"] == "completed"


@pytest.mark.parametrize("stopped_by", ["failed", "preempted"])
def test_a_run_that_is_not_restarted_has_ended_after_a_while(run, runs, stopped_by, capsys):
    run.take(1)
    run.end(stopped_by)
    long_ago = time.time() - followed_run.RESTART_SECONDS
    os.utime(run.folder / "config.toml", (long_ago - 1, long_ago - 1))
    os.utime(run.folder / "summary.json", (long_ago, long_ago))
    assert run.follow() == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"1 lines sent; {stopped_by}")


# ---- the command ----


def command(*words):
    return follow.main([str(word) for word in words])


def error_of(capsys):
    """The last line of stderr, which is all of it but warnings."""
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    return line


def test_a_signal_stops_it_after_the_line_and_the_next_start_goes_on(
    run, runs, monkeypatch, capsys
):
    log = Fake.log

    def interrupted(self, number, step, values):
        log(self, number, step, values)
        if number == 1:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Fake, "log", interrupted)
    run.take(1, 2, 3)
    run.end()
    assert command(run.folder, "--to", "fake") == 75
    assert (
        "stopped after 2 lines; start the same command again to continue" in capsys.readouterr().out
    )
    assert (steps_of(the_only(runs)), the_only(runs)["ends"]) == ([1, 2], [])
    assert command(run.folder, "--to", "fake") == 0
    assert steps_of(the_only(runs)) == [1, 2, 3]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_project_is_the_options_or_the_trackers_own_variables(run, runs, monkeypatch):
    monkeypatch.setenv("FAKE_PROJECT", "mine")
    run.take(1)
    assert command(run.folder, "--to", "fake", "--once") == 0
    assert the_only(runs)["project"] == "mine"


@pytest.mark.bad_input("`follow` on a folder that is no run")
def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("")
    assert command(tmp_path, "--to", "fake") == DataError.exit_code
    assert (
        f"{tmp_path} is not a run's folder: it has no config.toml; give the folder that"
        in error_of(capsys)
    )
    assert command(tmp_path / "notes.txt", "--to", "fake") == DataError.exit_code
    assert "is not a run's folder" in error_of(capsys)


@pytest.mark.bad_input("`follow` on a run that does not exist")
def test_a_run_that_does_not_exist_is_waited_for_and_then_refused(
    tmp_path, monkeypatch, capsys, runs
):
    folder = tmp_path / "run"
    assert command(folder, "--to", "fake", "--once") == DataError.exit_code
    assert error_of(capsys) == f"error: {folder} does not exist; start the run, or check the path"
    monkeypatch.setattr(follow, "APPEARS_SECONDS", 0.0)
    folder.mkdir()
    assert command(folder, "--to", "fake") == DataError.exit_code
    assert "has no run yet; start the run" in error_of(capsys)
    folder.rmdir()
    started = Script(lambda: Run(folder).end())
    followed_run.wait_for_run(folder, 1000.0, started)
    assert f"waiting up to 1000 s for a run in {folder}" in capsys.readouterr().out
    assert not started.is_set()


@pytest.mark.bad_input("`follow` to a tracker that is not installed")
def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    run, monkeypatch, capsys
):
    monkeypatch.setattr(
        trackers.importlib,
        "import_module",
        lambda name: exec(f"raise ModuleNotFoundError(name='{name}')"),
    )
    for name in ("wandb", "trackio", "mlflow"):
        assert command(run.folder, "--to", name) == ConfigError.exit_code
        assert (
            error_of(capsys)
            == f"error: {name} is not installed; pip install -e '.[{name}]' in the clone's folder"
        )


@pytest.mark.bad_input("a tracker that fails, in a request or at the start")
def test_what_a_tracker_raises_is_one_line_that_says_how_to_go_on(run, monkeypatch, capsys):
    def log(self, *line):
        raise RuntimeError("API request failed: 500\nsome page")

    monkeypatch.setattr(Fake, "log", log)
    run.take(1)
    assert command(run.folder, "--to", "fake", "--once") == Failure.exit_code
    assert (
        error_of(capsys)
        == "error: fake: API request failed: 500; start the same command again to continue"
    )


def _holds(path, ready, done):
    with only_process(path):
        ready.set()
        done.wait()


@pytest.mark.bad_input("two `follow` of one run to one tracker")
def test_a_second_follower_to_the_same_tracker_is_refused(run, capsys):
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=_holds, args=(run.folder / ".follow_fake.lock", ready, done))
    other.start()
    ready.wait()
    assert command(run.folder, "--to", "fake", "--once") == Failure.exit_code
    done.set()
    other.join()
    assert "is followed to fake by another process already" in error_of(capsys)
    assert command(run.folder, "--to", "fake", "--once") == 0


@pytest.mark.bad_input("a `follow_TRACKER.json` that is damaged")
def test_a_damaged_note_of_what_was_sent_is_refused(run, capsys):
    note = run.folder / "follow_fake.json"
    for text in ("", "{", '{"id": "x"}', "[]"):
        note.write_text(text)
        assert command(run.folder, "--to", "fake", "--once") == DataError.exit_code
        assert "remove it to send the run again, as a new one" in error_of(capsys)


@pytest.mark.bad_input("a run's folder in which `follow` can't write")
def test_a_note_of_what_was_sent_that_can_not_be_written_ends_it(run, runs, monkeypatch, capsys):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(follow, "write_durably", full)
    run.take(1)
    assert command(run.folder, "--to", "fake", "--once") == Failure.exit_code
    assert (
        "follow_fake.json can't be written (No space left on device), and it has to keep"
        in error_of(capsys)
    )
    assert not runs, "nothing was sent"


@pytest.mark.bad_input(
    "`follow` to another project than before, or to a tracker that has lost the run"
)
def test_another_project_or_a_tracker_that_has_lost_the_run_is_refused(run, runs, capsys):
    run.take(1)
    assert command(run.folder, "--to", "fake", "--once") == 0
    run.take(2)
    assert (
        command(run.folder, "--to", "fake", "--once", "--project", "other") == ConfigError.exit_code
    )
    assert "--project other: this run goes to dist_amp; leave the option out" in error_of(capsys)
    runs.clear()
    assert command(run.folder, "--to", "fake", "--once") == ConfigError.exit_code
    assert "to which 1 lines were sent; set its server or folder as before, or remove" in error_of(
        capsys
    )


def test_the_documents_name_every_tracker():
    text = (Path(__file__).parent.parent / "docs/trackers.md").read_text()
    assert all(f".[{name}]" in text for name in ("wandb", "trackio", "mlflow"))
