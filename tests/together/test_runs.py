"""dist_amp runs, plot and report: what a folder of runs says at a glance."""

import io
import json
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from html.parser import HTMLParser

import pytest
from tiny import make_run, take_steps

from dist_amp.commands import diff, plot, report, runs
from dist_amp.config.text import to_toml
from dist_amp.errors import DataError
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
        run.metrics.record(taken)
        run.metrics.begin(run.step, run.schedule, run.scaler, run.data)
        run.metrics.write(run.metrics.read())
    if stopped_by:
        write_summary(folder, run, stopped_by, int(stopped_by == "failed"), cause)
    run.close()
    return folder


def listed(folder, *words, capsys):
    assert runs.main([str(folder), "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_runs_shows_how_each_run_ended_with_its_cause(tmp_path, capsys):
    write_run(tmp_path / "a", stopped_by="completed")
    write_run(tmp_path / "b", stopped_by="preempted", steps=2)
    write_run(tmp_path / "c", stopped_by="failed", cause="rank 1: no more memory", steps=1)
    write_run(tmp_path / "d", steps=3)
    rows = {row["run"]: row for row in listed(tmp_path, capsys=capsys)}
    states = {name: (row["state"], row["cause"], row["step"]) for name, row in rows.items()}
    assert states == {
        "a": ("done", "", 4),
        "b": ("preempted", "", 2),
        "c": ("failed", "rank 1: no more memory", 1),
        "d": ("killed", "", 3),
    }
    assert runs.main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "failed: rank 1: no more memory" in text
    lines = (tmp_path / "a/metrics.jsonl").read_text().splitlines()
    assert f"{json.loads(lines[-1])['train/loss']:.4f}" in text


def test_a_run_that_was_killed_after_its_last_summary_is_not_shown_by_it(tmp_path, capsys):
    folder = write_run(tmp_path / "a", stopped_by="preempted", steps=2)
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line | {"step": 3}) + "\n" + '{"step": 4, "train/lo')
    (row,) = listed(folder, capsys=capsys)
    assert (row["state"], row["step"]) == ("killed", 3), "the torn line does not count"


def test_a_run_whose_folder_a_process_has_locked_is_running(tmp_path, capsys):
    folder = write_run(tmp_path / "a", steps=1)
    code = "import sys; from pathlib import Path; from dist_amp.files import only_process\n"
    code += "with only_process(Path(sys.argv[1])): print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(folder / ".lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as holder:
        holder.stdout.readline()
        (row,) = listed(tmp_path, capsys=capsys)
        assert row["state"] == "running"
        holder.stdin.close()
    (row,) = listed(tmp_path, capsys=capsys)
    assert row["state"] == "killed"
    with only_process(folder / ".lock"):
        pass


def test_the_settings_that_differ_and_the_lowest_held_out_loss_are_shown(tmp_path, capsys):
    for name, depth in (("a", 2), ("b", 3)):
        words = ("--optim.lr", "0.5", "--optim.eps", f"1e-{depth}")
        folder = write_run(tmp_path / name, *words, "--task.args.depth", str(depth))
        with (folder / "metrics.jsonl").open("a") as file:
            for step, loss in ((1, 3.0), (2, 1.5), (3, "nan"), (4, 2.0)):
                file.write(json.dumps({"step": step, "eval/loss": loss}) + "\n")
    first, second = listed(tmp_path, "--sort", "run", capsys=capsys)
    assert first["best"] == 1.5
    assert first["settings"] == {"optim.eps": 0.01, "task.args.depth": 2}
    assert second["settings"] == {"optim.eps": 0.001, "task.args.depth": 3}
    (alone,) = listed(tmp_path / "a", capsys=capsys)
    assert alone["settings"]["optim.lr"] == 0.5, "of one run what differs from the defaults"
    assert "task.args.depth" not in alone["settings"], "no other run of the task has another value"


def test_runs_are_sorted_by_a_column_and_those_without_a_value_come_last(tmp_path, capsys):
    write_run(tmp_path / "a", "--optim.lr", "0.1")
    write_run(tmp_path / "b", "--optim.lr", "1e-9")
    write_run(tmp_path / "c", steps=0)
    names = [row["run"] for row in listed(tmp_path, "--sort", "loss", capsys=capsys)]
    assert names == ["b", "a", "c"]
    assert listed(tmp_path / "c", capsys=capsys)[0]["state"] == "killed"
    (tmp_path / "c/started.txt").unlink()
    assert listed(tmp_path / "c", capsys=capsys)[0]["state"] == "not started"


@pytest.mark.bad_input("`dist_amp runs` of a folder without runs, or with a damaged one")
def test_a_folder_without_runs_is_refused_and_a_damaged_one_is_named_in_its_row(tmp_path, capsys):
    assert runs.main([str(tmp_path)]) == 65
    said = f"error: {tmp_path} holds no run; give the folder in which run.dir names are\n"
    assert capsys.readouterr().err == said
    folder = write_run(tmp_path / "a", stopped_by="completed")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/config.toml").write_text("not = [TOML")
    for damaged in ("[1, 2", "5", '{"step": "x"}'):
        (folder / "metrics.jsonl").write_text(f"{damaged}\n")
        assert runs.main([str(tmp_path), "--json"]) == 0
        out, err = capsys.readouterr()
        (row,) = json.loads(out)
        assert row["steps"] == 4
        assert row["cause"] == "damaged lines of metrics.jsonl are left out: 1"
        assert f"warning: {tmp_path / 'b'} is not the folder of a run" in err
    (folder / "summary.json").write_text('{"steps": "x"}')
    assert listed(tmp_path, capsys=capsys)[0]["state"] == "killed"


# ---- plot


def test_several_runs_are_drawn_on_one_chart_in_the_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for short names
    folders = [write_run(tmp_path / name).name for name in ("run_a", "run_b")]
    assert plot.main([*folders, "--metric", "train/grad_norm"]) == 0
    text = capsys.readouterr().out
    assert "train/grad_norm" in text
    assert "\x1b" not in text, "no colours in a pipe"
    for folder, marker in zip(folders, "*o", strict=True):
        (line,) = [line for line in text.splitlines() if folder in line]
        assert f"{marker}{marker} {folder}" in line


@pytest.mark.parametrize(("ending", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_chart_is_written_as_a_picture(tmp_path, ending, begins, capsys):
    folder = write_run(tmp_path / "a")
    out = tmp_path / f"loss.{ending}"
    assert plot.main([str(folder), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(begins)
    assert capsys.readouterr().out == f"{out}\n"


def test_a_run_without_the_metric_is_left_out_with_a_warning_if_another_has_it(tmp_path, capsys):
    folder, other = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    rows = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    text = "".join(json.dumps(row | {"train/loss": "nan"}) + "\n" for row in rows)
    (other / "metrics.jsonl").write_text(text)
    (cache := tmp_path / "compile_cache").mkdir()
    assert plot.main([str(folder), str(other), str(cache)]) == 0
    out, err = capsys.readouterr()
    assert "train/loss" in out
    assert str(cache) not in err, "it is the folder of no run"
    assert f"{other} has no finite value of it; all are nan or inf; left out" in err


def test_values_that_are_not_finite_are_left_out_of_a_curve():
    rows = [{"step": 1, "x": "nan"}, {"step": 2, "x": 1.0}, {"step": 3}, {"step": 4, "x": "text"}]
    assert plot.finite_series(rows, "x") == ([2], [1.0])


@pytest.mark.bad_input("`dist_amp plot` of an unknown metric, a picture's ending, or no run")
def test_plot_names_the_nearest_metric_and_what_it_can_write(tmp_path, capsys):
    folder = str(write_run(tmp_path / "a"))
    assert plot.main([folder, "--metric", "train/los"]) == 65
    assert "has no finite value of it; did you mean train/loss?" in capsys.readouterr().err
    assert plot.main([folder, "--out", str(tmp_path / "a.foo")]) == 64
    assert "use the ending .png, .svg, .pdf" in capsys.readouterr().err
    assert plot.main([folder, "--out", str(tmp_path / "no_folder/a.png")]) == 1
    assert "can't be written: No such file or directory" in capsys.readouterr().err
    assert plot.main([f"{folder}x"]) == 65
    assert f"there is no folder {folder}x" in capsys.readouterr().err
    assert plot.main([str(tmp_path)]) == 65
    assert "has logged nothing; give the folder of a run that has" in capsys.readouterr().err


@pytest.mark.bad_input("`dist_amp plot` without its packages")
@pytest.mark.parametrize(
    ("module", "words"), [("plotext", ()), ("matplotlib.figure", ("--out", "a.png"))]
)
def test_plot_says_what_to_install(tmp_path, module, words, capsys, monkeypatch):
    folder = str(write_run(tmp_path / "a"))
    monkeypatch.setitem(sys.modules, module, None)
    assert plot.main([folder, *words]) == 64
    package = {"plotext": "'plotext<6'"}.get(module, "matplotlib")
    assert capsys.readouterr().err.endswith(f": pip install {package}\n")


# ---- report


class Page(HTMLParser):
    """The tags that are open at its end, what it loads, and its text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.loads, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.loads += [value for name, value in attributes if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_a_report_has_curves_settings_ranks_and_the_sample_and_loads_nothing(tmp_path, capsys):
    folder = write_run(tmp_path / "a", "--optim.lr", "0.25", stopped_by="completed")
    (folder / "sample.txt").write_text("<script>alert(1)</script>")
    assert report.main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert (page.open, page.loads) == ([], [])
    (folder / "exported").mkdir()
    (folder / "exported/config.toml").write_text((folder / "config.toml").read_text())
    assert report.report(folder) == text, "an export in the run's folder is no other run"
    assert text.count("<polyline") == text.count("<figcaption") == 6
    assert "training loss" in page.text
    assert "optim.lr0.25" in page.text
    assert "done, step 4 of 4 on 1 rank" in page.text
    assert "<script>" not in text
    assert "<script>alert(1)</script>" in page.text


@pytest.mark.bad_input("a damaged summary.json")
@pytest.mark.parametrize("ranks", [3, [3], [{"rank": 0}], [{"peak_memory_bytes": "x"}], None])
def test_a_report_leaves_out_the_ranks_of_a_damaged_summary(tmp_path, ranks):
    folder = write_run(tmp_path / "a", stopped_by="completed")
    summary = json.loads((folder / "summary.json").read_text()) | {"ranks": ranks}
    (folder / "summary.json").write_text(json.dumps(summary))
    assert "training loss" in report.report(folder)


def test_a_long_curve_keeps_its_ends_and_at_most_a_thousand_points():
    steps = list(range(10_001))
    drawn = report.picture("loss", (steps, [1.0 / (1 + step) for step in steps]))
    points = drawn.partition('points="')[2].partition('"')[0].split()
    assert 900 <= len(points) <= 1001
    assert points[-1].startswith(f"{report.WIDTH:.1f},")
    assert "step 0" in drawn
    assert "10,000" in drawn


@pytest.mark.bad_input("`dist_amp report` of what is not a run's folder")
def test_a_report_of_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="is not a run's folder: it has no config.toml"):
        report.report(tmp_path)


def test_what_a_run_does_not_have_is_null_in_strict_json(tmp_path, capsys):
    write_run(tmp_path / "a", steps=0)
    assert runs.main([str(tmp_path), "--json"]) == 0

    def refuse(constant):
        raise AssertionError(constant)

    (row,) = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert (row["loss"], row["best"], row["goodput"]) == (None, None, None)


@pytest.mark.bad_input("a torn or damaged line, or a metric that is no number, in metrics.jsonl")
@pytest.mark.parametrize(
    "damaged",
    [
        b'{"step": 4, "trai',
        b"\xff\xfe\x00",
        b"[" * 5000,
        b"5",
        b'{"train/loss": 1}',
        b'{"step": "4"}',
        b'{"step": 4, "train/loss": "high"}',
        b'{"step": 4, "train/loss": null}',
        b'{"step": 4, "eval/loss": [1]}',
        b'{"step": 4, "ranks": 2}',
        b'{"step": 4, "ranks": [{"memory/peak_bytes": {}}]}',
    ],
)
def test_a_damaged_line_of_metrics_is_left_out_and_named_once(damaged, tmp_path, capsys):
    folder = write_run(tmp_path / "a")
    path = folder / "metrics.jsonl"
    rows = Record(folder).rows
    text = path.read_bytes()
    path.write_bytes(text + damaged + b"\n")
    other = shutil.copytree(folder, tmp_path / "other")
    assert Record(folder).rows == rows
    told = f"damaged lines of metrics.jsonl are left out: {len(text.splitlines()) + 1}"
    (row, _) = listed(tmp_path, capsys=capsys)
    assert row["cause"] == told
    for command, *words in (
        (plot, folder),
        (report, folder),
        (diff, folder, other),
    ):
        capsys.readouterr()
        assert command.main([*map(str, words)]) == 0
        assert capsys.readouterr().err.count(f"warning: {folder}: {told}\n") == 1
