"""Goodput: the share of the run folder's whole life in which steps were applied, over restarts."""

import json
import shutil
import time
from datetime import UTC, datetime
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import Tiny, log, make_run, take_steps

from dist_amp.clock import PHASES
from dist_amp.files import read_rows
from dist_amp.supervise.lifecycle import write_summary
from dist_amp.telemetry.goodput import Goodput, process_start_time, spent
from dist_amp.telemetry.step_report import RANK_METRICS, LogRow
from dist_amp.train import main
from dist_amp.world import World


def goodput_of(folder):
    return Goodput(make_run(World(), Tiny()).metrics, folder)


def test_a_folders_life_begins_with_its_first_process_and_only_applied_steps_count(
    tmp_path, monkeypatch
):
    now = time.time()
    assert 0 < now - process_start_time() < 24 * 3600
    monkeypatch.setattr("dist_amp.telemetry.goodput.time", SimpleNamespace(time=lambda: now))
    first = datetime.fromtimestamp(now - 1000, UTC)
    (tmp_path / "started.txt").write_text(f"{first.isoformat()}\n")
    goodput = goodput_of(tmp_path)
    logged = {"forward": 240.0, "communication": 80.0, "evaluation": 5.0, "checkpoint": 2.0}
    logged |= {"applied_in_interval": 3, "skipped_in_interval": 1}
    table = np.array([[logged.get(name, 0.0) for name in RANK_METRICS]])
    tags = goodput.tags(LogRow(10, table))
    assert goodput.seconds.tolist() == [240.0, 80.0, 5.0, 2.0, 0.0]
    assert tags["perf/goodput_pct"] == pytest.approx(24)
    summary = goodput.summary(failed=True)
    assert (summary["goodput"], summary["wall_seconds"]) == pytest.approx((0.24, 1000))
    assert summary["spent_seconds"]["elsewhere"] == pytest.approx(673)
    assert spent(dict.fromkeys(PHASES, 0.0), 0, 0).sum() == 0, "an interval without steps"


@pytest.mark.bad_input("a `started.txt` that is damaged, or lies in the future")
@pytest.mark.parametrize("content", ["not a time\n", "2999-01-01T00:00:00+00:00\n"])
def test_a_damaged_started_txt_ends_no_run(tmp_path, content):
    (tmp_path / "started.txt").write_text(content)
    assert 0 <= goodput_of(tmp_path).summary(failed=True)["goodput"] <= 1


def logs_of(folder):
    return {row["step"]: row for row in read_rows(folder / "metrics.jsonl")[0] if "ranks" in row}


def test_steps_that_are_taken_again_count_once(tmp_path, monkeypatch):
    monkeypatch.setattr("dist_amp.telemetry.goodput.process_start_time", time.time)
    words = "--task.target tiny:Tiny --metrics.log_every 2 --eval.every 8 --train.steps 8"
    words = [*words.split(), "--run.dir", str(tmp_path)]
    assert main([*words, "--checkpoint.every", "4"]) == 0
    fourth = logs_of(tmp_path)[4]
    shutil.rmtree(tmp_path / "checkpoints/step_00000008")
    (tmp_path / "summary.json").unlink()
    began = (tmp_path / "started.txt").read_text()
    assert main(words) == 0
    logs = logs_of(tmp_path)
    assert logs[6]["spent_seconds"]["applied_steps"] > fourth["spent_seconds"]["applied_steps"]
    assert (tmp_path / "started.txt").read_text() == began
    summary = json.loads((tmp_path / "summary.json").read_text())
    in_all = summary["spent_seconds"]
    added = sum(line["ranks"][0]["time/step_seconds"] * 2 for line in logs.values())
    assert in_all["applied_steps"] == pytest.approx(added, rel=0.01), "of four lines, each once"
    share = in_all["applied_steps"] / summary["wall_seconds"]
    assert summary["goodput"] == pytest.approx(share, abs=1e-5)  # of numbers rounded to 1e-6
    assert min(in_all["evaluation"], in_all["checkpoint"], in_all["elsewhere"]) > 0


def test_after_a_failure_the_summary_asks_the_device_for_nothing(tmp_path, monkeypatch):
    run = make_run(World(), Tiny(), "--run.dir", tmp_path)
    run.observers.add(Goodput(run.metrics, tmp_path))
    for report in take_steps(run, 2):
        run.metrics.after_step(report)
    log(run)
    monkeypatch.setattr(run.world.clock, "so_far", lambda: pytest.fail("the device may not answer"))
    write_summary(tmp_path, run, "failed", 1, "a rank hangs")
    assert json.loads((tmp_path / "summary.json").read_text())["spent_seconds"]["applied_steps"] > 0


@pytest.mark.parametrize("same_world", [True, False])
def test_counts_of_an_interval_that_a_checkpoint_cuts_continue(same_world):
    words = ("--use_amp", "false", "--train.max_grad_norm", 1e-6)
    run, again = (make_run(World(), Tiny(), *words) for _ in range(2))
    for report in take_steps(run, 3):
        run.metrics.after_step(report)
    again.metrics.resume_unfinished(run.metrics.unfinished_sums(run.data)[None], same_world)
    for report in take_steps(again, 2):
        again.metrics.after_step(report)
    again.schedule.counters[0] += 3
    logged = log(again)
    names = ("applied_in_interval", "skipped_in_interval", "clipped_in_interval")
    assert [logged[name] for name in names] == [5, 0, 5]
