"""A checkpoint of any layout becomes one safetensors file, and what its model makes is seen."""

from dataclasses import replace

import pytest
import torch
from ranks import on_ranks
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from tiny import Tiny, make_run, save, take_steps
from torch import nn

from dist_amp.checkpoint.format import CONFIG, MANIFEST, hash_files, read_manifest
from dist_amp.checkpoint.weights import load_weights
from dist_amp.commands import export
from dist_amp.commands.export import build_model
from dist_amp.config.load import load_config
from dist_amp.config.task_class import build_task
from dist_amp.errors import DataError
from dist_amp.world import World

GPT = "dist_amp.tasks.causal_lm:CausalLM"
SMALL_GPT = "--task.args.context 8 --task.args.width 16 --task.args.layers 1"
SMALL_GPT += " --task.args.sample_bytes 5"
FEW_STEPS = "--train.steps 10 --train.micro_batch_size 2 --use_amp false --optim.lr 0.1"


class Counted(nn.Module):
    """A float32 layer and buffers of all kinds."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.register_buffer("calls", torch.tensor(2**40 + 1))
        self.register_buffer("scale", torch.ones(1))
        # The same only if the seed is.
        self.register_buffer("drawn", torch.rand(1), persistent=False)

    def forward(self, x):
        return self.layer(x) * self.scale * self.drawn


class WithBuffers(Tiny):
    def build_model(self):
        return Counted()


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


def inputs_for(task):
    if hasattr(task, "context"):
        return torch.arange(16).reshape(2, 8)
    return torch.linspace(-1, 1, 24).reshape(3, 8)


def run_in(world, folder, target, words=""):
    words = f"--run.dir {folder} --task.target {target} {FEW_STEPS} {words}"
    return make_run(world, None, *words.split())


def saved_run(world, folder, target, words=""):
    """Train `target` two steps and save; returns the checkpoint and the model's answer."""
    run = run_in(world, folder, target, words)
    take_steps(run, 2)
    checkpoint = save(run)
    with torch.no_grad(), run.evaluating():
        return checkpoint, run.parallel.module(inputs_for(run.task))


def saved(folder, target, words=""):
    return saved_run(World(), folder, target, words)


def exports(*words):
    """Whether the export has worked."""
    return export.main([str(word) for word in words]) == 0


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return path


@pytest.fixture
def draws(tmp_path, monkeypatch):
    """The checkpoint of a run of Draws, in an empty current folder."""
    monkeypatch.chdir(tmp_path)
    return saved(tmp_path / "run", "test_export:Draws")[0]


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


def test_integer_buffers_stay_and_what_is_drawn_and_not_saved_is_drawn_as_in_the_run(tmp_path):
    checkpoint, answer = saved(tmp_path / "run", "test_export:WithBuffers", "--run.seed 7")
    assert exports(tmp_path / "run", "--out", tmp_path / "out", "--dtype", "bf16")
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert tensors["calls"] == torch.tensor(2**40 + 1)
    assert {tensors[name].dtype for name in ("scale", "layer.weight")} == {torch.bfloat16}
    config = load_config([f"--config={checkpoint / CONFIG}"])
    model = build_model(build_task(config), config)
    assert load_weights(model, checkpoint) == (2, "model")
    with torch.no_grad():
        assert torch.equal(model(inputs_for(None)), answer)


class Shares(nn.Module):
    """Two parameters on one memory, as some ways of tying leave them, and a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.randn(4, 2))
        self.two = nn.Parameter(self.one.data)
        self.register_buffer("own", torch.randn(4, 2))


class OfAPart(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("part", torch.zeros(10)[:5])


def write(out, model, dtype):
    export.cast(model, dtype)
    with export.replacing(out) as folder:
        (folder / CONFIG).touch()
        export.save_model(model, str(folder / export.MODEL))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_shares_memory_is_stored_once_and_loads(tmp_path, dtype):
    model, again = Shares(), Shares()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    write(tmp_path / "out", model, dtype)
    assert len(load_file(tmp_path / "out/model.safetensors")) == 2
    load_model(again, tmp_path / "out/model.safetensors")
    for name, value in again.state_dict().items():
        assert torch.equal(value, values[name].to(dtype).float()), name
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1, "whoever may read the config may read the weights"


def test_what_safetensors_can_not_store_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"amongst: \{'part'\}; let build_model make ordinary ten"):
        write(tmp_path / "out", OfAPart(), torch.float32)
    assert not list(tmp_path.iterdir())


def test_parameters_that_were_trained_in_bf16_are_exported(tmp_path):
    words = "--parallel.strategy fsdp --parallel.param_dtype bf16 --use_amp true"
    on_ranks(2, saved_run, tmp_path / "run", "tiny:Tiny", words)
    assert exports(tmp_path / "run", "--out", tmp_path / "out")
    for tensor in load_file(tmp_path / "out/model.safetensors").values():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, tensor.bfloat16().float())


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tmp_path, capsys):
    run = run_in(World(), tmp_path, "tiny:Tiny")
    take_steps(run, 1)
    older = save(run)
    take_steps(run, 1)
    newest = save(run)
    (shard,) = newest.glob("__0_*")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert exports(tmp_path, "--out", tmp_path / "out")
    shown = capsys.readouterr()
    assert f"from step 1 ({older})" in shown.out
    assert f"warning: checkpoint {newest}: {shard.name} is damaged" in shown.err
    assert "using step_00000001 instead" in shown.err


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
        "from test_export import Draws\n\n\nclass Moved(Draws):\n    pass\n"
    )
    config = (draws / CONFIG).read_text()
    (draws / CONFIG).write_text(config.replace("test_export:Draws", "gone_task:Draws"))
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
