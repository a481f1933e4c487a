"""Each file in examples/ is short, trains by the command that it names, and learns."""

import ast
import re
import shlex

import pytest
import torch
from conftest import ROOT
from messages import message_of

from benchmarks.amp import EXPERIMENTS
from dist_amp.checkpoint.compatibility import settings_of
from dist_amp.config.task_class import find_task
from dist_amp.record import Record
from dist_amp.settings import Config
from dist_amp.train import main
from examples.sinusoid import Sinusoid

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


def arguments_of(path):
    """The words of the command in the docstring that follow `python -m dist_amp.train`."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    (command,) = re.findall(r"^python -m dist_amp\.train (.*?)\n\n", text + "\n\n", re.M | re.S)
    return shlex.split(command.replace("\\\n", " "))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_learns_by_its_own_command(path, tmp_path, monkeypatch):
    arguments = arguments_of(path)
    lines = len(path.read_text().splitlines())
    assert lines <= (60 if path.stem in MEASURED else 200)
    if path.stem in MEASURED:
        assert sorted(arguments) == sorted(EXPERIMENTS[path.stem].arguments.split())
    if path.stem in ("preference", "image_text"):
        from test_hf_examples import EXAMPLES
        from tiny_hf import write_rows

        write_model, rows, _ = EXAMPLES[path.stem]
        write_model(tmp_path)
        write_rows(tmp_path / "rows.jsonl", rows())
    monkeypatch.chdir(tmp_path)
    words = [str(ROOT / word) if ".py:" in word else word for word in arguments]
    words += [*LESS_WORK.get(path.stem, "").split(), "--use_amp", "false", "--run.dir", "run"]
    words += ["--train.steps", "20", "--run.device", "cpu", "--metrics.log_every", "2"]
    assert main(words) == 0
    rows = Record(tmp_path / "run").rows
    losses = [row["train/loss"] for row in rows if "train/loss" in row]  # not of the evaluation
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("name", MOVED)
def test_the_old_name_of_a_task_that_moved_to_the_examples_finds_it(name, tmp_path, monkeypatch):
    old = f"dist_amp.tasks.{name}"
    new = f"examples/{name.replace(':', '.py:')}"
    monkeypatch.chdir(ROOT)
    assert find_task(old) is find_task(new)
    (tmp_path / "config.toml").write_text(f'[task]\ntarget = "{old}"\n')
    assert settings_of(tmp_path, Config())["task.target"] == new
    monkeypatch.chdir(tmp_path)
    assert "there is no file examples/" in message_of(64, find_task, old)


# ---- the sinusoid ----


def test_the_sinusoid_has_134145_parameters_four_levels_and_shows_its_drawing():
    assert sum(p.numel() for p in Sinusoid().build_model().parameters()) == 134_145
    task = Sinusoid(size=32, crop=16, width=8)
    assert task.picture["levels"].unique().tolist() == (torch.arange(4) / 3).tolist()
    with torch.no_grad():
        image = task.sample(task.build_model())
    assert image.shape == (1, 32, 64)
    assert 0 <= image.min() <= image.max() <= 1
    assert image[:, :, :32].tolist() == task.picture["levels"].tolist()
    with pytest.raises(ValueError, match="size=32 must be a multiple of crop=64: crops tile it"):
        Sinusoid(size=32, crop=64)


def test_crops_to_train_on_are_cut_from_the_picture_and_those_to_validate_on_cover_it_once():
    task = Sinusoid(size=48, crop=16, crops=50)
    dataset = task.build_dataset("train")
    whole, picture = task.picture.values()
    assert len(dataset) == 50
    for sample in dataset:
        left, top = ((sample["coordinates"][:, 0, 0] + 1) / 2 * 47).round().int().tolist()
        cut = (slice(None), slice(top, top + 16), slice(left, left + 16))
        expected = {"coordinates": whole[cut], "levels": picture[cut]}
        torch.testing.assert_close(sample, expected, rtol=0, atol=0)
    crops = [sample["coordinates"].flatten(1).T.tolist() for sample in task.build_dataset("valid")]
    pixels = [tuple(pixel) for crop in crops for pixel in crop]
    assert len(pixels) == len(set(pixels)) == 48 * 48
