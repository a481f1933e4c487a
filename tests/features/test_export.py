"""A checkpoint of any layout becomes one safetensors file, and what its model makes is seen."""

from pathlib import Path

import test_security
import torch
from ranks import on_ranks
from safetensors.torch import load_file, load_model
from test_script_run import Noisy, trained
from tiny import Tiny, make_run, save, take_steps
from torch import nn

from dist_amp.checkpoint.format import CONFIG
from dist_amp.checkpoint.weights import load_weights
from dist_amp.commands import export
from dist_amp.commands.export import build_model
from dist_amp.config.load import load_config
from dist_amp.config.task_class import build_task
from dist_amp.world import World

# Fixtures.
hostile = test_security.hostile

FEW_STEPS = "--train.steps 10 --train.micro_batch_size 2 --use_amp false --optim.lr 0.1"


class Counted(nn.Module):
    """Buffers of all kinds, and two parameters on one memory, as some ways of tying leave them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.one = nn.Parameter(torch.randn(1))
        self.two = nn.Parameter(self.one.data)
        self.register_buffer("calls", torch.tensor(2**40 + 1))
        self.register_buffer("scale", torch.ones(1))
        # The same only if the seed is.
        self.register_buffer("drawn", torch.rand(1), persistent=False)

    def forward(self, x):
        return self.layer(x) * self.scale * self.drawn + self.one


class WithBuffers(Tiny):
    """Has a state of its own, which is no part of the weights."""

    def build_model(self):
        return Counted()

    def state_dict(self):
        return {"kept": 1}

    def load_state_dict(self, state):
        assert state == {"kept": 1}


def inputs_for(task):
    if hasattr(task, "context"):
        return torch.arange(16).reshape(2, 8)
    return torch.linspace(-1, 1, 24).reshape(3, 8)


def saved_run(world, folder, target, words=""):
    """Train `target` two steps and save; returns the checkpoint and the model's answer."""
    words = f"--run.dir {folder} --task.target {target} {FEW_STEPS} {words}"
    run = make_run(world, None, *words.split())
    take_steps(run, 2)
    checkpoint = save(run)
    with torch.no_grad(), run.evaluating():
        return checkpoint, run.parallel.module(inputs_for(run.task))


def saved(folder, target, words=""):
    return saved_run(World(), folder, target, words)


def exports(*words):
    return export.main([str(word) for word in words]) == 0


def test_an_export_holds_what_is_trained_in_its_dtype_and_gives_the_runs_answer(tmp_path):
    checkpoint, answer = saved(tmp_path / "run", "test_export:WithBuffers", "--run.seed 7")
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        out = tmp_path / name
        assert exports(tmp_path / "run", "--out", out, "--dtype", name)
        tensors = load_file(out / "model.safetensors")
        assert tensors["calls"] == torch.tensor(2**40 + 1)
        assert {tensors[name].dtype for name in ("scale", "layer.weight")} == {dtype}
        assert {"one", "two"} & tensors.keys()
        modes = {path.stat().st_mode for path in out.iterdir()}
        assert len(modes) == 1, "whoever may read the config may read the weights"
    config = load_config([f"--config={checkpoint / CONFIG}"])
    model, exported = (build_model(build_task(config), config) for _ in range(2))
    assert load_weights(model, checkpoint) == (2, "model")
    load_model(exported, out / "model.safetensors")
    with torch.no_grad():
        for each in (model, exported):
            torch.testing.assert_close(each(inputs_for(None)), answer, rtol=0, atol=0)


def test_parameters_that_were_trained_in_bf16_are_exported(tmp_path):
    words = "--parallel.strategy fsdp --parallel.param_dtype bf16 --use_amp true"
    on_ranks(2, saved_run, tmp_path / "run", "tiny:Tiny", words)
    assert exports(tmp_path / "run", "--out", tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")
    rounded = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
    torch.testing.assert_close(tensors, rounded, rtol=0, atol=0)


def test_a_run_of_an_object_is_exported_by_the_command_that_it_prints(
    tmp_path, monkeypatch, capsys
):
    trained(tmp_path, Noisy(samples=32))
    assert capsys.readouterr().out.endswith(f"next: dist_amp export {tmp_path}/run --out model\n")
    monkeypatch.chdir(Path(__file__).parent)
    assert exports(f"{tmp_path}/run", "--out", f"{tmp_path}/exported")
    assert (tmp_path / "exported/model.safetensors").exists()


def test_a_target_of_the_command_line_is_taken_whatever_the_checkpoint_names(hostile, capsys):
    folder = hostile("../runs/mine/evil.py:Task", "evil.py")
    assert exports(folder, "--out", "out", "--task.target", "tiny:Tiny")
    assert "named by" not in capsys.readouterr().err
