"""What rank 0 prints: a line per log step, with the time left; on a terminal a progress bar."""

import fcntl
import io
import json
import math
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios

import numpy as np
from forked import ROOT, TESTS

from dist_amp.errors import Failure
from dist_amp.precision import Clip
from dist_amp.supervise.failure import report_failure
from dist_amp.telemetry import console as consoles
from dist_amp.telemetry.console import Console, columns, duration, power_of_two
from dist_amp.telemetry.metrics import Metrics
from dist_amp.telemetry.step_report import RANK_METRICS, LogRow
from dist_amp.world import World


def row(step=5, ranks=2, **values):
    usual = {"steps": 5.0, "applied_in_interval": 5.0, "forward": 1.0, "items": 10.0}
    usual |= {"loss_sum": 3.0, "weight_sum": 4.0, "grad_norm": 0.5, "lr": 1e-3}
    usual |= {"loss_scale": 1.0, "peak_bytes": 2.0**20}
    every = {**dict.fromkeys(RANK_METRICS, 0.0), **usual, **values}
    return LogRow(step, np.array([[every[name] for name in RANK_METRICS]] * ranks))


def test_a_log_interval_in_columns():
    usual = ["loss 1.5000", "items/s 20", "peak 1 MiB", "grad_norm 0.5", "lr 1.00e-03"]
    assert columns(row(), 1.0) == usual
    with_tokens = ["loss 1.5000", "tokens/s 200", *usual[2:], "items/s 20"]
    assert columns(row(tokens=100.0), 1.0) == with_tokens
    assert columns(row(loss_scale=2.0**16), 2.0**16)[3] == "scale 2^16"
    assert columns(row(loss_scale=2.0**17), 2.0**16)[3] == "scale 2^16 -> 2^17"
    assert power_of_two(3.0) == "3"


def test_skipped_steps_are_shown_with_the_reason_and_the_scale_and_no_nan():
    none = {"applied_in_interval": 0.0, "loss_sum": 0.0, "weight_sum": 0.0, "grad_norm": np.nan}
    skipped = row(**none, skipped_in_interval=5.0, loss_scale=2.0**35)
    assert columns(skipped, 2.0**40)[0] == "skipped 5 (gradients not finite)"
    assert "scale 2^40 -> 2^35" in columns(skipped, 2.0**40)
    assert "nan" not in " ".join(columns(skipped, 2.0**40))
    some = row(applied_in_interval=3.0, skipped_in_interval=2.0, loss_scale=2.0**38)
    expected = ["loss 1.5000", "skipped 2 (gradients not finite)", "items/s 20"]
    assert columns(some, 2.0**40)[:3] == expected
    assert "scale 2^40 -> 2^38" in columns(some, 2.0**40)
    bf16 = row(applied_in_interval=4.0, skipped_in_interval=1.0, grad_norm=np.inf)
    assert columns(bf16, 1.0)[:2] == ["loss 1.5000", "skipped 1 (gradients not finite)"]


def test_durations():
    texts = {5: "0:05", 72: "1:12", 3600: "1:00:00", 100_000: "27:46:40"}
    assert {seconds: duration(seconds) for seconds in texts} == texts


def test_a_line_in_a_pipe_has_elapsed_and_remaining_time(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(consoles.time, "monotonic", lambda: now[0])
    console = Console(Metrics(World(), Clip("off", math.inf)), 0, 20, 1.0)
    for step in (0, 5, 10):
        console.on_log(row(step=step))
        now[0] += 40.0 if step == 0 else 10.0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("step      0/20   0%  0:00  loss"), "no step has been timed yet"
    assert second.startswith("step      5/20  25%  0:40 eta 2:00  loss 1.5000")
    assert third.startswith("step     10/20  50%  0:50 eta 0:50")


def test_a_long_evaluation_says_how_far_it_is_ever_more_rarely(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(consoles.time, "monotonic", lambda: now[0])
    console = Console(Metrics(World(), Clip("off", math.inf)), 0, 20, 1.0)
    for seconds in (0.1, 1.0):  # a quick one is silent
        for done in range(100):
            console.during_evaluation(done, 100)
            now[0] += seconds
    assert capsys.readouterr().out.splitlines() == [
        "evaluation: batch 10 of 100, 0:10 eta 1:30",
        "evaluation: batch 20 of 100, 0:20 eta 1:20",
        "evaluation: batch 40 of 100, 0:40 eta 1:00",
        "evaluation: batch 80 of 100, 1:20 eta 0:20",
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def on_a_terminal(folder, width, *words):
    """What a run writes to a terminal of that width: (exit status, text)."""
    ours, of_run = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        fcntl.ioctl(of_run, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
        environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{TESTS}", "OMP_NUM_THREADS": "1"}
        environ |= {"TERM": "xterm", "TQDM_DISABLE": "1"}  # what a user set for other programs
        command = [sys.executable, "-m", "dist_amp.train", "--task.target", "tiny:Tiny"]
        command += map(str, words)
        process = subprocess.Popen(command, cwd=folder, stdout=of_run, stderr=of_run, env=environ)
        os.close(of_run)
        text = b""
        while select.select([screen], [], [], 120)[0]:
            try:
                text += os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
        return process.wait(60), text.decode()


def test_on_a_terminal_one_bar_is_updated_and_what_is_printed_stays_above_it(tmp_path):
    words = ("--train.steps", 6, "--metrics.log_every", 2, "--eval.every", 3)
    status, text = on_a_terminal(tmp_path, 80, *words)
    assert status == 0, text
    drawn = [part for part in re.split(r"[\r\n]+", text) if part.startswith("step ")]
    assert any("6/6 100%" in part for part in drawn)
    assert max(map(len, drawn)) <= 80
    assert all(name in drawn[-1] for name in ("loss ", "items/s ", "peak "))
    lines = text.replace("\r\n", "\n").split("\n")
    screen = [line.rstrip().split("\r")[-1].rstrip() for line in lines]  # what is left of each line
    assert [line.split()[1] for line in screen if line.startswith("eval ")] == ["3", "6"]
    steps = [line.split()[1] for line in screen if line.startswith("step ")]
    assert steps == ["2/6", "4/6", "6/6", "6/6"], "the history, and the bar that is left below it"
    assert any(line.startswith("done: 6 steps") for line in screen)


def test_on_a_terminal_an_error_is_the_last_thing_on_the_screen(tmp_path):
    words = ("--train.max_skips_in_a_row", 2, "--metrics.log_every", 2, "--train.steps", 50)
    status, text = on_a_terminal(tmp_path, 200, "--task.target", "tiny:AlwaysNan", *words)
    assert status == 70, text
    last = text.replace("\r\n", "\n").rstrip().split("\n")[-1]
    assert last.split("\r")[-1].startswith("\033[Kerror: 2 steps in a row"), last


def test_torchruns_error_file_has_the_error_without_control_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    report_failure(Failure("the disk is full; free some"), None)
    assert sys.stderr.getvalue().startswith("\r\033[K")
    message = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert message == "error: the disk is full; free some"
