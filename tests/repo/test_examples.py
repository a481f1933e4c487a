"""Each file in examples/ is short, trains by the command that it names, and learns."""

import ast
import re
import shlex

import pytest
from conftest import ROOT
from messages import message_of

from benchmarks.amp import EXPERIMENTS
from dist_amp.checkpoint.compatibility import settings_of
from dist_amp.config.load import load_config
from dist_amp.record import Record
from dist_amp.settings import Config
from dist_amp.train import main

MOVED = ("sinusoid:Sinusoid", "preference:DPO", "image_text:ImageText")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LESS_WORK = {
    "cnn": "--task.args.samples 320 --train.micro_batch_size 16",
    "image_text": "--data.path rows.jsonl --task.args.model . --optim.lr 0.02",
    "mlp": "--task.args.width 16 --task.args.samples 1024",
    "preference": "--data.path rows.jsonl --task.args.model . --optim.lr 0.01",
    "sinusoid": "--task.args.crop 4 --task.args.size 32 --task.args.width 32 --task.args.crops 256",
}
MEASURED = ("cnn", "linear", "mlp")  # by `python -m benchmarks amp`, as they stand
examples = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def arguments_of(path):
    """The words of the command in the docstring that follow `python -m dist_amp.train`."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    (command,) = re.findall(r"^python -m dist_amp\.train (.*?)\n\n", text + "\n\n", re.M | re.S)
    return shlex.split(command.replace("\\\n", " "))


def write_model_and_rows(example, folder):
    """What the examples for models of transformers are run on: a tiny model and its rows."""
    if example == "preference":
        import test_example_preference as tests
        from tiny_hf import make_model, make_tokenizer, write_rows

        make_tokenizer(make_model(folder, "llama"))
        write_rows(folder / "rows.jsonl", tests.pairs())
    if example == "image_text":
        import test_example_image_text as tests
        from tiny_hf import write_rows

        tests.write_model_and_images(folder)
        write_rows(folder / "rows.jsonl", tests.questions())


@examples
def test_an_example_learns_by_its_own_command(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model_and_rows(path.stem, tmp_path)
    arguments = [str(ROOT / word) if ".py:" in word else word for word in arguments_of(path)]
    words = [*arguments, *LESS_WORK.get(path.stem, "").split(), "--use_amp", "false"]
    words += ["--train.steps", "20", "--run.device", "cpu", "--metrics.log_every", "2"]
    assert main([*words, "--run.dir", "run"]) == 0
    rows = Record(tmp_path / "run").rows
    losses = [row["train/loss"] for row in rows if "train/loss" in row]  # not of the evaluation
    assert losses[-1] < 0.95 * losses[0]


@examples
def test_an_example_is_short_and_is_what_the_benchmark_of_its_name_runs(path):
    lines = len(path.read_text().splitlines())
    if path.stem not in MEASURED:
        assert lines <= 200
        return
    assert 25 <= lines <= 60
    assert sorted(arguments_of(path)) == sorted(EXPERIMENTS[path.stem].arguments.split())


@pytest.mark.bad_input("`task.target` names a task that is in `examples/` now")
@pytest.mark.parametrize("name", MOVED)
def test_the_old_name_of_a_task_that_moved_is_refused_with_the_new_one(name, tmp_path):
    old = f"dist_amp.tasks.{name}"
    new = f"examples/{name.replace(':', '.py:')}"
    message = message_of(64, load_config, ["--task.target", old], {})
    assert message.count("\n") == 0
    assert f"give --task.target {new}, in a clone" in message
    (tmp_path / "config.toml").write_text(f'[task]\ntarget = "{old}"\n')
    assert settings_of(tmp_path, Config())["task.target"] == new
