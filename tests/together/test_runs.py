"""dist_amp runs, plot and report: what a folder of runs says at a glance."""

import io
import json
import re
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from tiny import make_run, take_steps

from dist_amp.commands import diff, plot, report, runs
from dist_amp.config.text import to_toml
from dist_amp.files import only_process
from dist_amp.record import Record
from dist_amp.supervise.lifecycle import add_observers, open_run, write_summary
from dist_amp.supervise.stop import AgreedStop
from dist_amp.world import World


def write_run(folder, *words, stopped_by="", cause="", steps=4):
    """A run that has logged each of its steps."""
    task = ["--task.target", "tiny:Tiny", "--train.steps", "4", "--metrics.log_every", "1"]
    with redirect_stdout(io.StringIO()):
        run = make_run(World(), None, "--run.dir", folder, *task, *words)
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.toml").write_text(to_toml(run.config))
        open_run(run)
        with AgreedStop(run.world) as stop:
            add_observers(run, stop)
    for taken in take_steps(run, steps):
        run.metrics.after_step(taken)
        run.metrics.begin(run.step, run.schedule, run.scaler, run.data)
        run.metrics.write(run.metrics.read())
    if stopped_by:
        write_summary(folder, run, stopped_by, int(stopped_by == "failed"), cause)
    run.close()
    return folder


def add_lines(folder, *rows):
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def listed(capsys):
    """listed(folder, ...): the rows of `dist_amp runs --json`, which is strict JSON."""

    def rows(folder, *words):
        capsys.readouterr()
        assert runs.main([str(folder), "--json", *words]) == 0
        return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)

    return rows


def test_runs_shows_how_each_run_ended_with_its_cause(tmp_path, listed, capsys):
    write_run(tmp_path / "a", stopped_by="completed")
    write_run(tmp_path / "b", stopped_by="preempted", steps=2)
    write_run(tmp_path / "c", stopped_by="failed", cause="rank 1: no more memory", steps=1)
    write_run(tmp_path / "d", steps=3)
    killed = write_run(tmp_path / "e", stopped_by="preempted", steps=2)
    # A start after that summary; the torn line does not count.
    add_lines(killed, Record(killed).rows[-1] | {"step": 3}, '{"step": 4, "train/lo')
    (write_run(tmp_path / "f", steps=0) / "started.txt").unlink()
    running = write_run(tmp_path / "g", stopped_by="completed", steps=1)
    with only_process(running / ".lock"):
        rows = listed(tmp_path)
    assert {row["run"]: (row["state"], row["cause"], row["step"]) for row in rows} == {
        "a": ("done", "", 4),
        "b": ("preempted", "", 2),
        "c": ("failed", "rank 1: no more memory", 1),
        "d": ("killed", "", 3),
        "e": ("killed", "", 3),
        "f": ("not started", "", 0),
        "g": ("running", "", 1),
    }
    (empty,) = [row for row in rows if row["run"] == "f"]
    assert (empty["loss"], empty["best"], empty["goodput"]) == (None, None, None)
    assert runs.main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "failed: rank 1: no more memory" in text
    assert f"{Record(tmp_path / 'a').rows[-1]['train/loss']:.4f}" in text


def test_settings_that_differ_and_the_lowest_held_out_loss_are_shown_in_the_wanted_order(
    tmp_path, listed
):
    for name, depth in (("a", 2), ("b", 3)):
        words = ("--optim.lr", "0.5", "--optim.eps", f"1e-{depth}")
        folder = write_run(tmp_path / name, *words, "--task.args.depth", str(depth))
        losses = ((1, 3.0), (2, 4.5 - depth), (3, "nan"), (4, 4.0))
        add_lines(folder, *({"step": step, "eval/loss": loss} for step, loss in losses))
    write_run(tmp_path / "c", "--optim.lr", "0.5", "--optim.eps", "1e-2", steps=0)
    rows = listed(tmp_path, "--sort", "best")
    assert [(row["run"], row["best"]) for row in rows] == [("b", 1.5), ("a", 2.5), ("c", None)]
    assert rows[0]["settings"] == {"optim.eps": 0.001, "task.args.depth": 3}
    assert rows[1]["settings"] == {"optim.eps": 0.01, "task.args.depth": 2}
    (alone,) = listed(tmp_path / "a")
    assert alone["settings"]["optim.lr"] == 0.5, "of one run what differs from the defaults"
    assert "task.args.depth" not in alone["settings"], "no other run of the task has another value"


@pytest.mark.bad_input("`dist_amp runs` of a folder without runs, or with a damaged one")
def test_a_folder_without_runs_is_refused_and_a_damaged_one_is_named(tmp_path, listed, capsys):
    assert runs.main([str(tmp_path)]) == 65
    said = f"error: {tmp_path} holds no run; give the folder that contains your runs\n"
    assert capsys.readouterr().err == said
    folder = write_run(tmp_path / "a", stopped_by="completed")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/config.toml").write_text("not = [TOML")
    (folder / "summary.json").write_text('{"steps": "x"}')
    assert runs.main([str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert [(row["run"], row["state"]) for row in json.loads(out)] == [("a", "killed")]
    assert f"warning: {tmp_path / 'b'} is not the folder of a run" in err


@pytest.mark.bad_input("a torn or damaged line in metrics.jsonl")
def test_damaged_lines_of_metrics_are_left_out_and_named_once(tmp_path, capsys):
    folder = write_run(tmp_path / "a")
    rows = Record(folder).rows
    for line in ('{"step": 4, "trai', '{"train/loss": 1}', '{"step": "4"}', "5"):
        lines = [*map(json.dumps, rows), line]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        assert Record(folder).rows == rows, line
    other = shutil.copytree(folder, tmp_path / "other")
    for command, *words in ((runs, folder), (report, folder), (diff, folder, other)):
        capsys.readouterr()
        assert command.main([*map(str, words)]) == 0
        said = f"warning: {folder}: damaged lines of metrics.jsonl are left out: 5\n"
        assert capsys.readouterr().err.count(said) == 1


@pytest.mark.bad_input("`dist_amp plot` of an unknown metric, without matplotlib")
def test_runs_are_drawn_on_one_chart_and_what_can_not_be_drawn_is_said(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # for short names
    folders = [write_run(tmp_path / name).name for name in ("a", "b")]
    assert plot.main([*folders, "--metric", "train/grad_norm"]) == 0
    assert capsys.readouterr().out == "plot.png\n"
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert plot.main(["a", "--out", "loss.svg"]) == 0
    assert (tmp_path / "loss.svg").read_bytes().startswith(b"<?xml")
    assert plot.main(["a", "--metric", "train/los"]) == 65
    said = "error: --metric train/los: a has no finite value of it; it has amp/loss_scale, "
    assert said in capsys.readouterr().err
    shutil.copytree("b", "c")
    Path("c/metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    assert plot.main(["a", "c", "--metric", "train/grad_norm"]) == 0
    said = "warning: --metric train/grad_norm: c has no finite value of it; it has train/loss\n"
    assert said in capsys.readouterr().err
    nans = [{"step": 1, "train/loss": "nan"}, {"step": 2, "train/loss": 1.0}]
    assert plot.finite_series(nans, "train/loss") == ([2], [1.0])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot.main(["a"]) == 64
    assert "plot needs matplotlib: pip install matplotlib\n" in capsys.readouterr().err


def test_a_report_has_curves_settings_ranks_and_the_sample_and_loads_nothing(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 65
    assert f"{tmp_path} is not the folder of a run or checkpoint: config" in capsys.readouterr().err
    folder = write_run(tmp_path / "a", "--optim.lr", "0.25", stopped_by="completed")
    (folder / "sample.txt").write_text("<script>alert(1)</script>")
    assert report.main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    text = (folder / "report.html").read_text()
    assert not re.search(r"(?i)\b(src|href|url)\b *[=(]|@import|<script", text), "it loads nothing"
    (folder / "exported").mkdir()
    (folder / "exported/config.toml").write_text((folder / "config.toml").read_text())
    assert report.report(folder) == text, "an export in the run's folder is no other run"
    assert text.count("<polyline") == text.count("<figcaption") == 6
    for shown in ("training loss", "optim.lr", "0.25", "done, step 4 of 4, world size 1, started "):
        assert shown in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_a_long_curve_keeps_its_ends_and_at_most_a_thousand_points():
    drawn = report.picture("loss", ([*range(10_001)], [1.0] * 10_001))
    points = drawn.partition('points="')[2].partition('"')[0].split()
    assert 900 <= len(points) <= 1001
    assert points[-1].startswith(f"{report.WIDTH:.1f},")
