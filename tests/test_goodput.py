"""Goodput: the share of the run folder's whole life in which steps were applied, over restarts."""

import json
import time
from datetime import UTC, datetime

import numpy as np
import pytest
from tiny import Tiny, log, make_run, take_steps

from dist_amp.checkpoint.saver import save
from dist_amp.runtime.clock import PHASES
from dist_amp.telemetry.goodput import Goodput, process_started
from dist_amp.world import World


def phases(**seconds):
    return dict.fromkeys(PHASES, 0.0) | seconds


def test_skipped_steps_evaluations_and_checkpoints_are_not_applied_steps():
    goodput = Goodput()
    goodput.add(phases(forward=3.0, communication=1.0, evaluation=5.0, checkpoint=2.0), steps=4, applied=3)
    assert goodput.seconds.tolist() == [3.0, 1.0, 5.0, 2.0, 0.0]


def test_a_folders_life_goes_on_from_its_first_process(tmp_path):
    first = datetime.fromtimestamp(time.time() - 1000, UTC)
    (tmp_path / "started.txt").write_text(first.isoformat() + "\n")
    goodput = Goodput()
    goodput.open(tmp_path)
    goodput.add(phases(forward=250.0), steps=1, applied=1)
    summary = goodput.summary(np.zeros(5))
    assert summary["goodput"] == pytest.approx(0.25, abs=0.01)  # the seconds that this test takes
    spent = summary["spent_seconds"]
    assert sum(spent.values()) == pytest.approx(summary["wall_seconds"], rel=1e-3)
    assert spent["elsewhere"] == pytest.approx(750, abs=10)


@pytest.mark.parametrize("content", ["", "not a time\n", "2999-01-01T00:00:00+00:00\n"])
def test_a_damaged_started_txt_ends_no_run(tmp_path, content):
    (tmp_path / "started.txt").write_text(content)
    goodput = Goodput()
    goodput.open(tmp_path)
    assert 0 <= goodput.share <= 1


def test_a_process_was_started_before_it_asks():
    assert 0 < time.time() - process_started() < 24 * 3600


def saved_and_resumed(folder, steps_lost):
    words = ("--run.dir", folder, "--checkpoint.every", 100, "--metrics.log_every", 2, "--use_amp", "false")
    run = make_run(World(), Tiny(), *words)
    take_steps(run, 2)
    log(run)
    for report in take_steps(run, 1):  # in the middle of a log interval
        run.metrics.record(report)
    save(run)
    spent = run.metrics.goodput.seconds[0]
    take_steps(run, steps_lost)
    again = make_run(World(), Tiny(), *words, "--run.resume", "auto")
    return spent, run, again


def test_steps_that_are_taken_again_count_once_and_those_of_an_unfinished_interval_are_kept(tmp_path):
    spent, before, again = saved_and_resumed(tmp_path, steps_lost=2)
    assert again.step == 3
    resumed = again.metrics.goodput.seconds
    assert resumed[0] > spent, "with the third step, which is in no log line"
    assert resumed[0] < spent + sum(before.world.clock.lap().seconds().values())


def test_tokens_seen_go_on_after_a_resume(tmp_path):
    class Worded(Tiny):
        def tokens(self, batch):
            return 10 * len(batch["y"])

    words = ("--run.dir", tmp_path, "--checkpoint.every", 100, "--use_amp", "false", "--train.micro_batch_size", 4)
    run = make_run(World(), Worded(), *words)
    take_steps(run, 3)
    save(run)
    again = make_run(World(), Worded(), *words, "--run.resume", "auto")
    take_steps(again, 2)
    tags = log(again).global_tags()
    assert (tags["train/tokens_seen"], tags["train/samples_seen"]) == (200, 20)
    assert tags["train/epoch"] == pytest.approx(20 / again.data.plan.length)


def test_the_summary_and_the_closing_line_have_the_goodput(launch):
    words = ("--task.target", "tiny:Tiny", "--train.steps", 6, "--run.dir", launch.folder / "run", "--eval.every", 3)
    done = launch(0, *words)
    assert done.returncode == 0, done.stderr
    summary = json.loads((launch.folder / "run" / "summary.json").read_text())
    spent = summary["spent_seconds"]
    assert summary["goodput"] == pytest.approx(spent["applied_steps"] / summary["wall_seconds"], abs=1e-3)
    assert spent["evaluation"] > 0
    assert spent["checkpoint"] > 0
    assert spent["elsewhere"] > 0
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("goodput ")]
    assert line.endswith("in applied steps")
