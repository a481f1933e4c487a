"""What export and sample make of a run's folder, with other features."""

import shutil

import pytest
import torch
from messages import message_of
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from test_export import exports, saved
from test_frozen import AdapterTask, trained_run
from tiny import Tiny, average_of, make_run, parameters_of, save, seal_again, take_steps

from dist_amp.checkpoint.format import CONFIG
from dist_amp.checkpoint.weights import load_weights
from dist_amp.commands import export, sample
from dist_amp.world import World

DRAWS = "test_export_with_others:Draws"


class Draws(Tiny):
    """sample gives a text with a terminal's command in it, or an image of so many channels."""

    def __init__(self, kind: str = "text", channels: int = 3, depth: int = 2):
        super().__init__(depth=depth)
        self.kind = kind
        self.channels = channels

    def sample(self, model):
        assert not model.training
        out = model(torch.zeros(1, 8))
        assert not out.requires_grad
        assert out.dtype == torch.float32
        image = torch.linspace(-0.5, 1.5, 12).reshape(1, 3, 4).repeat(self.channels, 1, 1)
        return {"text": f"{out.item():.6f}\x1b[2J", "image": image, "number": 1}[self.kind]


@pytest.fixture
def draws(tmp_path, monkeypatch):
    """The checkpoint of a run of Draws, in an empty current folder."""
    monkeypatch.chdir(tmp_path)
    return saved(tmp_path / "run", DRAWS)[0]


def refusal(capsys, command, *argv):
    """(exit status, the one line that it says)"""
    capsys.readouterr()
    status = command.main([str(word) for word in argv])
    said = ("warning: ", "task   ")
    errors = capsys.readouterr().err.splitlines()
    (line,) = [line for line in errors if not line.startswith(said)]
    return status, line


def test_a_failed_export_leaves_the_old_one(tmp_path, draws, monkeypatch, capsys):
    argv = [draws, "--out", "out"]
    assert exports(*argv, "--dtype", "bf16")
    before = (tmp_path / "out/model.safetensors").read_bytes()

    def fails(model, name, metadata):
        raise export.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(export, "save_model", fails)
    status, line = refusal(capsys, export, *argv)
    assert status == 1
    assert line.startswith("error: --out out can't be written (I/O error: No space left on device")
    assert (tmp_path / "out/model.safetensors").read_bytes() == before
    assert not (tmp_path / ".out.writing").exists()


def test_a_hostile_config_starts_nothing_and_is_refused(tmp_path, draws, capsys):
    arguments = f'args = ["touch", "{tmp_path}/started"]'
    (draws / CONFIG).write_text(f'[task]\ntarget = "subprocess:Popen"\n[task.args]\n{arguments}\n')
    seal_again(draws)
    for command, words in ((export, ["--out", "out"]), (sample, [])):
        status, line = refusal(capsys, command, draws, *words)
        assert status == 64
        assert line.startswith("error: task.target=subprocess:Popen")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.bad_input("`export` over other files, or of a model that it can't write")
@pytest.mark.bad_input("an export or sample of what is no checkpoint, or of another model's")
@pytest.mark.parametrize(
    ("command", "words", "status", "message"),
    [
        (export, "file --out out", 65, "file is not a checkpoint and holds none"),
        (export, "run --out out --task.args.depth 1", 65, "1.weight is missing there and [1, 8] "),
        (export, "run --out run", 64, "--out run holds other files, and would be replaced"),
        (export, "run", 64, "required: --out; see python -m dist_amp.export --help"),
        (export, "run --out out --merge", 64, "--merge is for --format hf; add --format hf"),
        (export, "run --out out --format hf --merge", 64, "this model has no peft adapters"),
        (export, "run --out out --format hf", 64, "Sequential has no save_pretrained; add `def ex"),
        (sample, "plain", 64, "error: task.target=tiny:Tiny has no sample(model)"),
        (sample, "run --task.args.kind number", 65, "returned int; return text, or an image"),
        (sample, "run --task.args.kind image --task.args.channels 2", 65, "returned [2, 3, 4]"),
    ],
)
def test_bad_input_is_refused_in_one_line(tmp_path, draws, capsys, command, words, status, message):
    if words == "plain":
        saved(tmp_path / "plain", "tiny:Tiny")
    (tmp_path / "file").write_text("mine")
    config = (draws / CONFIG).read_text()
    found, line = refusal(capsys, command, *words.split())
    assert (found, message in line) == (status, True), line
    assert (tmp_path / "file").read_text() == "mine"
    assert (draws / CONFIG).read_text() == config
    assert not (tmp_path / "out").exists()


def test_sample_gives_the_same_from_run_checkpoint_and_export(tmp_path, draws, capsys):
    assert exports("run", "--out", "out")
    written = f"model in fp32, from step 2 ({draws.relative_to(tmp_path)})"
    assert capsys.readouterr().out.endswith(f"out: {written}\n")
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["README.md", CONFIG, "model.safetensors"]
    assert (tmp_path / "out" / CONFIG).read_bytes() == (draws / CONFIG).read_bytes()
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        metadata = file.metadata()
    expected = {"step": "2", "dtype": "fp32", "checkpoint": "step_00000002", "format": "pt"}
    assert metadata.items() >= expected.items()
    assert exports(draws, "--out", "half", "--dtype", "bf16")
    shutil.copytree(draws, "copied")
    capsys.readouterr()
    shown = []
    for path in ("run", "copied", "out", "half"):
        assert sample.main([path]) == 0
        number, hidden, rest = capsys.readouterr().out.partition("\N{REPLACEMENT CHARACTER}")
        assert (hidden + rest).endswith("\N{REPLACEMENT CHARACTER}[2J\n")
        shown.append(float(number))
    assert shown[0] == shown[1] == shown[2]
    assert shown[0] == pytest.approx(shown[3], rel=0.05), "8 bits of mantissa, three layers"
    status, line = refusal(capsys, sample, "out", "--task.args.depth", "3")
    assert (status, "key(s) in state_dict: " in line) == (65, True), line
    file = tmp_path / "out/model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    status, line = refusal(capsys, sample, "out")
    assert status == 65
    assert line.startswith("error: out/model.safetensors can't be loaded")


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (4, "RGBA")])
def test_sample_writes_an_image(tmp_path, draws, capsys, channels, mode):
    args = ["--task.args.kind", "image", "--task.args.channels", str(channels)]
    assert sample.main([str(draws), *args]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/sample.png: 4 x 3 pixels\n"
    with Image.open(tmp_path / "sample.png") as image:
        assert (image.mode, image.size) == (mode, (4, 3))
        assert image.getextrema() == ((0, 255) if channels == 1 else ((0, 255),) * channels)


def test_export_and_sample_use_the_average_unless_the_parameters_are_asked_for(tmp_path, capsys):
    words = ["--run.dir", tmp_path / "run", "--optim.ema", 0.9, "--optim.lr", 0.01]
    run = make_run(World(), None, *words, "--task.target", DRAWS)
    take_steps(run, 3)
    save(run)
    averages, parameters = average_of(run), parameters_of(run)
    shown = []
    for words, expected, said in (
        ([], averages, ": ema in"),
        (["--weights", "model"], parameters, ": model in"),
    ):
        assert exports(tmp_path / "run", "--out", tmp_path / "out", *words)
        assert said in capsys.readouterr().out
        exported = load_file(tmp_path / "out/model.safetensors")
        torch.testing.assert_close(exported, dict(expected), rtol=0, atol=0)
        assert sample.main([str(tmp_path / "run"), *words]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] != shown[1]


@pytest.mark.bad_input("a checkpoint of an adapter resumed or exported on another frozen base")
def test_weights_of_an_adapter_fit_its_base_alone_and_all_weights_some_frozen_ones(tmp_path):
    trained_run(World(), tmp_path, "single", 1)
    other = AdapterTask(base=1e-3)
    text = message_of(65, trained_run, World(), tmp_path, "single", 2, task=other)
    assert "was trained with another frozen base.weight (differing parameters: 1), which it" in text
    torch.manual_seed(0)  # run.seed
    checkpoint = tmp_path / "checkpoints/step_00000001"
    text = message_of(65, load_weights, other.build_model(), checkpoint)
    assert "another frozen base.weight" in text
    whole = trained_run(World(), tmp_path / "b", "single", 2, task=AdapterTask(freeze=False))
    run = make_run(World(), AdapterTask())
    load_weights(run.parallel.module, tmp_path / "b/checkpoints/step_00000002")
    torch.testing.assert_close(parameters_of(run), whole, rtol=0, atol=0)
