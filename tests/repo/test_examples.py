"""Each file in examples/ is short, trains by the command that it names, and learns."""

import ast
import re
import shlex

import pytest
from conftest import ROOT

from benchmarks.amp import EXPERIMENTS
from dist_amp.record import Record
from dist_amp.train import main

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LESS_WORK = {
    "cnn": "--task.args.samples 320 --train.micro_batch_size 16",
    "mlp": "--task.args.width 16 --task.args.samples 1024",
}
examples = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def arguments_of(path):
    """The words of the command in the docstring that follow `python -m dist_amp.train`."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    (command,) = re.findall(r"^python -m dist_amp\.train (.*?)\n\n", text + "\n\n", re.M | re.S)
    return shlex.split(command.replace("\\\n", " "))


@examples
def test_an_example_learns_by_its_own_command(path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [*arguments_of(path), *LESS_WORK.get(path.stem, "").split(), "--use_amp", "false"]
    words += ["--train.steps", "20", "--run.device", "cpu", "--metrics.log_every", "2"]
    assert main([*words, "--run.dir", str(tmp_path / "run")]) == 0
    rows = Record(tmp_path / "run").rows
    losses = [row["train/loss"] for row in rows if "train/loss" in row]  # not of the evaluation
    assert losses[-1] < 0.95 * losses[0]


@examples
def test_an_example_is_short_and_is_what_the_benchmark_of_its_name_runs(path):
    assert 25 <= len(path.read_text().splitlines()) <= 60
    assert sorted(arguments_of(path)) == sorted(EXPERIMENTS[path.stem].arguments.split())
