"""What test_export.py tests, with other features."""

from dataclasses import replace

import pytest
import torch
from ranks import on_ranks
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from test_export import exports, saved, saved_run
from tiny import Tiny

from dist_amp.checkpoint.format import CONFIG, MANIFEST, hash_files, read_manifest
from dist_amp.commands import export
from dist_amp.config.load import load_config
from dist_amp.config.task_class import build_task

GPT = "dist_amp.tasks.causal_lm:CausalLM"
SMALL_GPT = "--task.args.context 8 --task.args.width 16 --task.args.layers 1"
SMALL_GPT += " --task.args.sample_bytes 5"


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


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return path


@pytest.fixture
def draws(tmp_path, monkeypatch):
    """The checkpoint of a run of Draws, in an empty current folder."""
    monkeypatch.chdir(tmp_path)
    return saved(tmp_path / "run", "test_export_with_others:Draws")[0]


def loaded(out, target, words=""):
    """As in the three lines of the command's docstring."""
    config = load_config(["--task.target", target, *words.split()], environ={})
    model = build_task(config).build_model()
    load_model(model, out / "model.safetensors")
    return model


def refusal(capsys, command, *argv):
    """(exit status, the one line that it says)"""
    status = command.main([str(word) for word in argv])
    shown = capsys.readouterr()
    said = ("warning: ", "task   ")
    (line,) = [line for line in shown.err.splitlines() if not line.startswith(said)]
    return status, line


def reseal(checkpoint):
    """Make the manifest's hashes those of the files as they are."""
    manifest = read_manifest(checkpoint)
    files = hash_files(checkpoint / name for name in manifest.files)
    (checkpoint / MANIFEST).write_text(replace(manifest, files=files).to_text())


def test_an_export_of_a_sharded_model_gives_the_runs_logits(tmp_path, text):
    gpt = f"{SMALL_GPT} --data.path {text}"
    words = f"{gpt} --parallel.strategy hsdp --precision.tf32 false"
    checkpoint, logits = on_ranks(4, saved_run, tmp_path / "run", GPT, words)[0]
    inputs = torch.arange(16).reshape(2, 8)
    for dtype in ("fp32", "bf16"):
        assert exports(tmp_path / "run", "--out", tmp_path / dtype, "--dtype", dtype)
    with torch.no_grad():
        model = loaded(tmp_path / "fp32", GPT, gpt)
        assert torch.equal(model(inputs), logits)
        half = loaded(tmp_path / "bf16", GPT, gpt)
        assert torch.equal(half.bfloat16()(inputs), model.bfloat16()(inputs))
    assert (tmp_path / "fp32" / CONFIG).read_bytes() == (checkpoint / CONFIG).read_bytes()
    files = sorted(path.name for path in (tmp_path / "fp32").iterdir())
    assert files == ["README.md", CONFIG, "model.safetensors"]


def test_tied_weights_are_stored_once_and_the_file_has_metadata(tmp_path, text):
    checkpoint, _ = saved(tmp_path / "run", GPT, f"{SMALL_GPT} --data.path {text}")
    assert exports(checkpoint, "--out", tmp_path / "out", "--dtype", "bf16")
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert len({"embedding.weight", "head.weight"} & tensors.keys()) == 1
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    model = loaded(tmp_path / "out", GPT, SMALL_GPT)
    assert model.head.weight is model.embedding.weight
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        metadata = file.metadata()
    expected = {"step": "2", "dtype": "bf16", "checkpoint": "step_00000002", "format": "pt"}
    assert metadata.items() >= expected.items()


def test_a_failed_export_leaves_the_old_one(tmp_path, draws, monkeypatch, capsys):
    argv = [str(draws), "--out", "out"]
    assert exports(*argv)
    assert exports(*argv, "--dtype", "bf16")
    before = (tmp_path / "out/model.safetensors").read_bytes()
    assert b"BF16" in before

    def fails(model, name, metadata):
        raise export.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(export, "save_model", fails)
    status, line = refusal(capsys, export, *argv)
    assert status == 1
    assert line.startswith("error: --out out can't be written (I/O error: No space left on device")
    assert (tmp_path / "out/model.safetensors").read_bytes() == before
    assert not (tmp_path / ".out.writing").exists()


def test_a_task_that_has_moved_is_named_on_the_command_line(tmp_path, draws, capsys):
    (tmp_path / "moved_task.py").write_text(
        "from test_export_with_others import Draws\n\n\nclass Moved(Draws):\n    pass\n"
    )
    config = (draws / CONFIG).read_text()
    (draws / CONFIG).write_text(config.replace("test_export_with_others:Draws", "gone_task:Draws"))
    reseal(draws)
    status, line = refusal(capsys, export, draws, "--out", "out")
    assert status == 64
    assert line.startswith("error: task.target=gone_task:Draws: importing it failed")
    assert exports(draws, "--task.target", "moved_task:Moved", "--out", "out")


NO_RUN = "is not a checkpoint and holds none"


@pytest.mark.bad_input(
    "an export or sample from something that is not a checkpoint, or from another model"
)
@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("nowhere --out out", 65, "does not exist; give a run's folder or RUN/checkpoints/step_N"),
        ("empty --out out", 65, f"empty {NO_RUN}; give a run's folder"),
        ("file --out out", 65, f"file {NO_RUN}"),
        ("run --out file", 64, "--out file holds other files, and would be replaced"),
        ("run --out file/below", 1, "--out file/below can't be written"),
        ("run --out run", 64, "--out run holds other files, and would be replaced"),
        ("run --out out --dtype fp8", 64, "argument --dtype: invalid choice: 'fp8'"),
        ("run --out out --task.args.chanels 3", 64, "did you mean task.args.channels?"),
        ("run --out out --outt 3", 64, "unknown option --outt; did you mean --out?"),
        ("run stray --out out", 64, "--config stray: neither a file here nor a shipped config"),
        ("run", 64, "required: --out; see python -m dist_amp.export --help"),
        ("", 64, "required: RUN_OR_CHECKPOINT, --out"),
    ],
)
def test_bad_input_is_refused_in_one_line(tmp_path, draws, capsys, words, status, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    config = (tmp_path / "run/checkpoints/step_00000002/config.toml").read_text()
    reported, line = refusal(capsys, export, *words.split())
    assert reported == status
    assert message in line
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "run/checkpoints/step_00000002/config.toml").read_text() == config
    assert not (tmp_path / "out").exists()
