"""`follow` into real trackers, offline: what they have after it was killed and started again."""

import json
import os
import sqlite3
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import ROOT
from test_follow import WrittenRun

pytestmark = [pytest.mark.slow, pytest.mark.engine]
STEPS = range(1, 31)
LOSSES = {step: 1 / step for step in STEPS}
QUERY = "select step, metrics from metrics"


def start(run, tracker):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"WANDB_MODE": "offline", "TRACKIO_DIR": f"{run.folder.parent}/trackio"}
    environment.pop("MLFLOW_TRACKING_URI", None)  # mlflow.db in the current folder
    command = [sys.executable, "-m", "dist_amp.follow", str(run.folder), "--to", tracker]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=run.folder.parent, env=environment, stdout=pipe, stderr=pipe, text=True
    )


def killed_and_resumed(tmp_path, tracker):
    """The folder of a run killed at step 20 and resumed from 15, its follower killed at 13."""
    pytest.importorskip(tracker)
    run = WrittenRun(tmp_path / "a run")
    run.take(*range(1, 11))
    follower = start(run, tracker)
    assert "a run: " in follower.stdout.readline()  # it has opened the tracker
    run.take(11, 12, 13)
    time.sleep(2)  # before or after it has sent and noted these: both must do
    follower.kill()
    follower.communicate()
    run.take(*range(14, 21))
    run.start(15)
    run.take(*range(16, 31))
    (run.folder / "sample.txt").write_text("def f(x):")
    run.end(final_loss=1 / 30, exit_code=0)
    output, errors = (follower := start(run, tracker)).communicate(timeout=300)
    assert follower.returncode == 0, errors
    assert "lines sent; completed" in output
    return tmp_path


def test_trackio_has_each_step_once_and_the_config_and_summary(tmp_path):
    (path,) = (killed_and_resumed(tmp_path, "trackio") / "trackio").rglob("dist_amp.db")
    with sqlite3.connect(path) as database:
        rows = [(step, json.loads(text)) for step, text in database.execute(QUERY)]
        ((config,),) = database.execute("select config from configs")
    losses = sorted((step, row["train/loss"]) for step, row in rows if "train/loss" in row)
    assert losses == list(LOSSES.items())
    ranks = [row["rank00000/memory/peak_bytes"] for _, row in rows if "train/loss" in row]
    assert set(ranks) == {2**20}
    assert json.loads(config)["train"] == {"steps": 20}
    (summary,) = [row for _, row in rows if "summary/final_loss" in row]
    assert "def f(x):" in str(summary["sample"])


def test_mlflow_has_each_step_once_and_the_config_and_summary(tmp_path, monkeypatch):
    monkeypatch.chdir(killed_and_resumed(tmp_path, "mlflow"))
    from mlflow import MlflowClient

    client = MlflowClient("sqlite:///mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("dist_amp").experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((metric.step, metric.value) for metric in history) == list(LOSSES.items())
    ranks = client.get_metric_history(run.info.run_id, "rank00000/memory/peak_bytes")
    assert sorted(metric.step for metric in ranks) == list(STEPS)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "a run")
    assert run.data.params["train.steps"] == "20"
    assert run.data.metrics["summary/final_loss"] == 1 / 30
    artifacts = Path(run.info.artifact_uri.removeprefix("file://"))
    assert (artifacts / "sample.txt").read_text() == "def f(x):"
    assert json.loads((artifacts / "summary.json").read_text())["stopped_by"] == "completed"


def records_of(path):
    """The records of a .wandb file: LevelDB's format, blocks of 32 KiB after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block is too small for a record
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def values_of(items):
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_wandb_has_each_step_under_one_number_and_the_config_and_summary(tmp_path):
    files = sorted((killed_and_resumed(tmp_path, "wandb") / "wandb").glob("offline-run-*/*.wandb"))
    records = [record for file in files for record in records_of(file)]
    runs = [record.run for record in records if record.HasField("run")]
    (identity,) = {run.run_id for run in runs}
    assert identity.startswith("a-run-")
    assert {run.project for run in runs} == {"dist_amp"}
    assert values_of(runs[0].config.update)["train"] == {"steps": 20}
    histories = [record.history for record in records if record.HasField("history")]
    # What a killed follower had in memory is sent again: a line may be in two folders, under one
    # number.
    of_number = {}
    for one in histories:
        values = values_of(one.item)
        line = {tag: value for tag, value in values.items() if not tag.startswith("_")}
        assert of_number.setdefault(one.step.num, line) == line
    losses = sorted((row["step"], row["train/loss"]) for row in of_number.values())
    assert losses == list(LOSSES.items())
    globs = {record.metric.step_metric for record in records if record.metric.glob_name == "*"}
    assert globs == {"step"}
    summaries = [values_of(one.summary.update) for one in records if one.HasField("summary")]
    ended = {"final_loss": 1 / 30, "sample": "def f(x):"}
    assert any(ended.items() <= summary.items() for summary in summaries)
    assert any(record.HasField("exit") for record in records)
