"""`dist_amp.follow`: every line reaches the (fake) tracker once, whatever is killed."""

import json
import math
import os
import signal
import time
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from dist_amp.commands import follow, trackers
from dist_amp.supervise.preflight import InUse
from dist_amp.telemetry.writers import JsonlWriter


class WrittenRun:
    """A run's folder as the main job writes it: takes steps, is killed and resumed, and ends."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        self.start(0)

    def start(self, step):
        """Start, or continue from the checkpoint of a step."""
        (self.folder / "config.toml").write_text('[train]\nsteps = 20\n[run]\ndir = "x"\n')
        self.log = JsonlWriter(self.folder / "metrics.jsonl", step, lambda message: None)

    def take(self, *steps, **more):
        for step in steps:
            ranks = [{"memory/peak_bytes": 2.0**20}]
            self.log.append({"step": step, "train/loss": 1 / step, "ranks": ranks, **more})

    def end(self, stopped_by="completed", **more):
        summary = {"stopped_by": stopped_by, "steps": 20, **more}
        (self.folder / "summary.json").write_text(json.dumps(summary))

    def follow(self, *actions, once=False):
        """Follow it; between two polls comes the next of the actions, and at the end a signal."""
        left = list(actions)

        def sleep(seconds):
            if not left:
                raise KeyboardInterrupt
            left.pop(0)()

        clock = SimpleNamespace(time=time.time, sleep=sleep)
        with patch.object(follow, "time", clock), suppress(KeyboardInterrupt):
            follow.Follower(self.folder, "fake", "").follow(once)


class Killed(BaseException):
    """The follower's process ends here, and nothing after it runs."""


class Fake(trackers.Tracker):
    """Keeps all runs in `runs` by id; dies at `dies_at` = (number, before or after it has it)."""

    project_variable, where = "FAKE_PROJECT", "a fake"

    def __init__(self, project, id, name, config):
        self.has_run = id in self.runs
        new = {"project": project, "config": config, "lines": {}, "ends": []}
        self.run = self.runs.setdefault(id, new)

    def log(self, number, step, seconds, values):
        if self.dies_at == (number, "before"):
            raise Killed
        assert self.run["lines"].setdefault(number, (step, values)) == (step, values)
        if self.dies_at == (number, "after"):
            raise Killed

    def end(self, step, summary, values, sample):
        self.run["ends"].append((step, summary, values, sample))


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """{id: run} of the fake tracker."""
    monkeypatch.setattr(Fake, "runs", {}, raising=False)
    monkeypatch.setattr(Fake, "dies_at", None, raising=False)
    monkeypatch.setitem(trackers.TRACKERS, "fake", Fake)
    return Fake.runs


@pytest.fixture
def run(tmp_path):
    return WrittenRun(tmp_path / "my run")


def the_only(runs):
    (run,) = runs.values()
    return run


def steps_of(run, tag="train/loss"):
    return [step for step, values in run["lines"].values() if tag in values]


def test_a_live_run_is_sent_as_it_comes_and_its_summary_at_the_end(run, runs):
    (run.folder / "sample.txt").write_text("def f(x):")
    metrics = run.folder / "metrics.jsonl"
    seen = []

    def later():
        seen.append(steps_of(the_only(runs)))
        run.take(3)
        run.log.append({"step": 3, "eval/loss": 0.25})
        metrics.write_text(metrics.read_text() + '{"step": 4, "eval/l')

    def end():
        metrics.write_text(metrics.read_text() + 'oss": 0.5}\n')
        run.end(final_loss=0.5, ranks=[{"rank": 0}])

    run.take(1, 2)
    run.follow(later, end)
    run.follow()
    assert seen == [[1, 2]]
    (identity, sent), *others = runs.items()
    assert not others
    assert identity.startswith("my-run-")
    assert (sent["project"], sent["config"]["train"]) == ("dist_amp", {"steps": 20})
    assert list(sent["lines"].values()) == [
        (1, {"train/loss": 1.0, "rank00000/memory/peak_bytes": 2.0**20}),
        (2, {"train/loss": 0.5, "rank00000/memory/peak_bytes": 2.0**20}),
        (3, {"train/loss": 1 / 3, "rank00000/memory/peak_bytes": 2.0**20}),
        (3, {"eval/loss": 0.25}),
        (4, {"eval/loss": 0.5}),
    ]
    ((step, summary, values, sample),) = sent["ends"]
    assert (step, sample) == (20, "def f(x):")
    assert values == {"summary/steps": 20.0, "summary/final_loss": 0.5}
    assert summary["ranks"] == [{"rank": 0}]


# The last step sent when the run was killed at 15, and the step from which it resumed.
@pytest.mark.parametrize(("seen", "resumed"), [(5, 10), (12, 10), (15, 10), (15, 0)])
def test_of_a_resumed_run_each_step_is_sent_once_and_none_is_lost(run, runs, seen, resumed):
    def killed_and_resumed():
        run.take(*range(seen + 1, 16))
        run.start(resumed)
        run.take(*range(resumed + 1, 14), **{"train/new": 1.0})

    run.take(*range(1, seen + 1))
    run.follow(killed_and_resumed, lambda: run.take(*range(14, 21)), run.end)
    assert steps_of(the_only(runs)) == list(range(1, 21))
    new = steps_of(the_only(runs), "train/new")
    assert new == list(range(resumed + 1, 14)), "a tag that the first attempt did not have"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", [0, 1, 4])
@pytest.mark.parametrize("writes_at_once", [True, False])
def test_a_follower_that_is_killed_sends_lines_again_under_the_same_numbers_and_misses_none(
    run, runs, monkeypatch, number, when, writes_at_once
):
    monkeypatch.setattr(Fake, "writes_within_a_second", writes_at_once)
    monkeypatch.setattr(Fake, "dies_at", (number, when))
    run.take(1, 2)
    with pytest.raises(Killed):
        run.follow(lambda: run.take(3, 4), lambda: run.take(5, 6))
    if not writes_at_once:  # what it had in memory dies with the process
        the_only(runs)["lines"].clear()
    monkeypatch.setattr(Fake, "dies_at", None)
    run.end()
    run.follow()
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert list(the_only(runs)["lines"]) == list(range(len(lines)))
    assert steps_of(the_only(runs)) == list(range(1, len(lines) + 1))


def test_a_tag_written_ahead_of_the_step_before_costs_neither_and_odd_values_and_names(run, runs):
    run.take(1)
    odd = {"amp/loss_scale": math.inf, "numerics/a[0]=b": 0.1, "what": "x", "nan": math.nan}
    run.log.append({"step": 3, **odd})
    run.take(2, 3)
    run.follow(once=True)
    assert steps_of(the_only(runs)) == [1, 2, 3]
    step, values = the_only(runs)["lines"][1]
    assert math.isnan(values.pop("nan"))
    assert (step, values) == (3, {"amp/loss_scale": math.inf, "numerics/a_0__b": 0.1})


def test_a_run_that_failed_has_ended_once_it_is_not_restarted_for_a_while(run, runs, capsys):
    def restarted():
        time.sleep(0.02)  # the clock of a file system may tick a hundred times a second only
        run.start(2)
        run.take(3)
        run.end("failed")
        long_ago = time.time() - follow.RESTART_SECONDS
        for name in ("config.toml", "summary.json"):
            os.utime(run.folder / name, (long_ago, long_ago))

    run.take(1, 2)
    run.end("failed", cause="out of memory")
    run.follow(restarted)
    assert steps_of(the_only(runs)) == [1, 2, 3]
    ((_, summary, _, _),) = the_only(runs)["ends"]
    assert "cause" not in summary, "of the attempt that was restarted"
    assert capsys.readouterr().out.splitlines()[-1].endswith("3 lines sent; failed")


# ---- the command ----


def command(run, *words):
    return follow.main([str(run.folder), "--to", "fake", *words])


def test_a_signal_stops_it_after_the_line_and_the_next_start_continues(
    run, runs, monkeypatch, capsys
):
    log = Fake.log

    def interrupted(self, number, *line):
        if number == 2:
            monkeypatch.setattr(Fake, "log", log)
            signal.raise_signal(signal.SIGTERM)
        log(self, number, *line)

    monkeypatch.setattr(Fake, "log", interrupted)
    run.take(1, 2, 3)
    run.end()
    assert command(run) == 1
    said = "error: stopped by SIGTERM; start the same command again to continue\n"
    assert capsys.readouterr().err == said
    assert (steps_of(the_only(runs)), the_only(runs)["ends"]) == ([1, 2], [])
    path = run.folder / "follow_fake.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "earlier": "0123"}))  # an old one's
    assert command(run) == 0
    assert steps_of(the_only(runs)) == [1, 2, 3]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def fails(self, *line):
    raise RuntimeError("API request failed: 500\nsome page")


def is_locked(path):
    raise InUse("process 7 on a")


ANOTHER = "is already followed to fake by another process (process 7 on a)"


@pytest.mark.bad_input("a tracker that fails, in a request or at the start")
@pytest.mark.bad_input("two `follow` of one run to one tracker")
@pytest.mark.bad_input("`follow` on a folder that is no run")
@pytest.mark.bad_input(
    "`follow` to another project than before, or to a tracker that has lost the run"
)
@pytest.mark.parametrize(
    ("change", "words", "status", "message"),
    [
        (lambda run, set: set(Fake, "log", fails), [], 1, "500; start the same command again to c"),
        (lambda run, set: set(follow, "only_process", is_locked), [], 1, ANOTHER),
        (lambda run, set: (run / "config.toml").unlink(), [], 65, "is not a run's folder: it has"),
        (lambda run, set: None, ["--project", "x"], 64, "this run goes to dist_amp; leave the opt"),
        (lambda run, set: Fake.runs.clear(), [], 64, "to which 1 lines were sent; set its server"),
    ],
)
def test_what_fails_or_can_not_be_continued_is_one_line_and_nothing_is_sent(
    run, runs, monkeypatch, capsys, change, words, status, message
):
    run.take(1)
    assert command(run, "--once") == 0
    run.take(2)
    change(run.folder, monkeypatch.setattr)
    assert command(run, "--once", *words) == status
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert all(steps_of(one) in ([1], []) for one in runs.values())


def test_a_run_that_does_not_exist_yet_is_waited_for(tmp_path):
    def sleep(seconds):
        WrittenRun(tmp_path / "run")

    with patch.object(follow, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep)):
        follow.wait_for_run(tmp_path / "run", 1000.0)
