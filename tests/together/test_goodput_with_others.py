"""What test_goodput.py tests, with other features."""

from test_goodput import lines_of

ENDS = """
import os, signal
from tiny import Tiny

class Ends(Tiny):
    def on_step(self, run, report):
        way = os.environ.get(f"AT_{run.step}")
        if way == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        if way == "error":
            raise RuntimeError("planted")
"""


def test_an_evaluation_that_two_resumes_repeat_is_logged_once(launch):
    (launch.folder / "ends.py").write_text(ENDS)
    words = ("--task.target", "ends:Ends", "--run.dir", "run", "--metrics.log_every", 1)
    words = (*words, "--eval.every", 2, "--checkpoint.every", 4, "--train.steps", 4)
    assert launch(0, *words, AT_2="signal").returncode == 75  # saved before its evaluation
    assert launch(0, *words, AT_3="error").returncode == 65
    assert [line["step"] for line in lines_of(launch.folder / "run") if "eval/loss" in line] == [2]
    assert launch(0, *words).returncode == 0
    steps = [line["step"] for line in lines_of(launch.folder / "run") if "eval/loss" in line]
    assert steps == [2, 4]
