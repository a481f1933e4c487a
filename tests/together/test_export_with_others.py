"""What export and sample make of a run's folder, with other features."""

import shutil

import pytest
import torch
from messages import message_of
from PIL import Image
from ranks import on_ranks
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from test_export import exports, saved, saved_run
from test_frozen import AdapterTask, trained_run
from tiny import Tiny, average_of, make_run, parameters_of, save, seal_again, take_steps

from dist_amp.checkpoint.format import CONFIG
from dist_amp.checkpoint.weights import load_weights
from dist_amp.commands import export, sample
from dist_amp.config.load import load_config
from dist_amp.config.task_class import build_task
from dist_amp.world import World

GPT = "dist_amp.tasks.causal_lm:CausalLM"
SMALL = "--task.args.context 8 --task.args.width 16 --task.args.layers 1"


class Draws(Tiny):
    """sample gives a text with a terminal's command in it, or an image of so many channels."""

    def __init__(self, kind: str = "text", channels: int = 3):
        super().__init__()
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
    return saved(tmp_path / "run", "test_export_with_others:Draws")[0]


def refusal(capsys, command, *argv):
    """(exit status, the one line that it says)"""
    capsys.readouterr()
    status = command.main([str(word) for word in argv])
    said = ("warning: ", "task   ")
    errors = capsys.readouterr().err.splitlines()
    (line,) = [line for line in errors if not line.startswith(said)]
    return status, line


def test_an_export_of_a_sharded_model_gives_the_runs_logits(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    more = f"{SMALL} --data.path {tmp_path}/text.txt"
    words = f"{more} --parallel.strategy fsdp --precision.tf32 false"
    checkpoint, logits = on_ranks(2, saved_run, tmp_path / "run", GPT, words)[0]
    inputs = torch.arange(16).reshape(2, 8)
    config = load_config(["--task.target", GPT, *more.split()], environ={})
    models = {}
    for dtype in ("fp32", "bf16"):
        assert exports(tmp_path / "run", "--out", tmp_path / dtype, "--dtype", dtype)
        # As in the three lines of the command's docstring.
        models[dtype] = build_task(config).build_model()
        load_model(models[dtype], tmp_path / dtype / "model.safetensors")
    model, half = models["fp32"], models["bf16"].bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(model(inputs), logits, rtol=0, atol=0)
        torch.testing.assert_close(half(inputs), model.bfloat16()(inputs), rtol=0, atol=0)
    assert model.head.weight is model.embedding.weight
    assert (tmp_path / "fp32" / CONFIG).read_bytes() == (checkpoint / CONFIG).read_bytes()
    files = sorted(path.name for path in (tmp_path / "fp32").iterdir())
    assert files == ["README.md", CONFIG, "model.safetensors"]
    tensors = load_file(tmp_path / "bf16/model.safetensors")
    assert len({"embedding.weight", "head.weight"} & tensors.keys()) == 1
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    with safe_open(tmp_path / "bf16/model.safetensors", "pt") as file:
        metadata = file.metadata()
    expected = {"step": "2", "dtype": "bf16", "checkpoint": "step_00000002", "format": "pt"}
    assert metadata.items() >= expected.items()
    wider = ["--task.args.width", "32"]
    status, line = refusal(capsys, export, tmp_path / "run", "--out", tmp_path / "new", *wider)
    assert status == 65
    assert "embedding.weight is [256, 16] torch.float32 there and [256, 32] torch.float32" in line
    status, line = refusal(capsys, sample, tmp_path / "fp32", *wider)
    assert (status, "size mismatch for " in line) == (65, True)


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


@pytest.mark.bad_input("`export` over other files")
@pytest.mark.bad_input(
    "an export or sample from something that is not a checkpoint, or from another model"
)
@pytest.mark.parametrize(
    ("command", "words", "status", "message"),
    [
        (export, "file --out out", 65, "file is not a checkpoint and holds none"),
        (export, "run --out file/below", 1, "--out file/below can't be written"),
        (export, "run --out run", 64, "--out run holds other files, and would be replaced"),
        (export, "run", 64, "required: --out; see python -m dist_amp.export --help"),
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
    run = make_run(World(), None, *words, "--task.target", "test_export_with_others:Draws")
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
    assert "was trained on another frozen base.weight (1 such), which it" in text
    torch.manual_seed(0)  # run.seed
    checkpoint = tmp_path / "checkpoints/step_00000001"
    text = message_of(65, load_weights, other.build_model(), checkpoint)
    assert "another frozen base.weight" in text
    whole = trained_run(World(), tmp_path / "b", "single", 2, task=AdapterTask(freeze=False))
    run = make_run(World(), AdapterTask())
    load_weights(run.parallel.module, tmp_path / "b/checkpoints/step_00000002")
    torch.testing.assert_close(parameters_of(run), whole, rtol=0, atol=0)
