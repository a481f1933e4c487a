"""Errors of torch or the system, such as out of memory, end in one line with what to change."""

import errno
import json
import re

import pytest
import torch
from tiny import Tiny, make_run

from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError, DataError, Failure
from dist_amp.step import evaluate
from dist_amp.supervise.explain import explain_error, is_out_of_memory
from dist_amp.supervise.lifecycle import Job
from dist_amp.train import main
from dist_amp.world import World

ALLOCATING = "DefaultCPUAllocator: can't allocate memory: you tried to allocate"


def explained(error, run=None, folder=None):
    config = run.config if run is not None else load_config([], environ={})
    return explain_error(error, Job(config, World(), run=run, folder=folder))


def test_the_state_is_measured_and_the_error_is_read():
    run = make_run(World(), Tiny(), "--train.micro_batch_size", 4, "--train.accumulation_steps", 2)
    failure = explained(RuntimeError(f"{ALLOCATING} 8000 bytes. Error code 12"), run)
    count = sum(p.numel() for p in run.model.parameters())
    size = f"{4 * count:,} bytes" if 4 * count < 1024 else f"{4 * count / 1024:.2f} KiB"
    assert isinstance(failure, Failure)
    assert "rank 0 ran out of memory in step 1: asked for 7.81 KiB more than the " in str(failure)
    assert f"parameters take {size}, gradients {size}, optimizer state " in str(failure)
    assert "\n" not in str(failure)
    for parameter in run.model.parameters():
        parameter.requires_grad_(False)
    frozen = explained(RuntimeError(f"{ALLOCATING} 8000 bytes."), run)
    assert f"parameters take {size}, gradients 0 bytes, optimizer state 0 bytes; " in str(frozen)
    error = MemoryError("Unable to allocate 7.00 GiB for an array with shape (1, 2)")  # numpy's
    assert "ran out of memory in step 1: asked for 7.00 GiB more th" in str(explained(error, run))
    other = RuntimeError("expected scalar type Float")
    assert explained(other, run) is other


class TooLarge(Tiny):
    """A model that the device has no room for."""

    def build_model(self):
        model = torch.nn.Linear(1000, 1000, bias=False)
        model.to = out_of_memory
        return model


def out_of_memory(*args):
    raise RuntimeError(f"{ALLOCATING} 1000000 bytes.")


def explanation(call, run=None):
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(explained(caught.value, run))


def test_what_did_not_fit_is_named():
    text = explanation(lambda: make_run(World(), TooLarge()))
    said = "ran out of memory before the first step .test_explain.py, line .*: asked for 976.56 "
    assert re.search(said, text)
    state = "; parameters take 3.81 MiB, gradients 3.81 MiB, "
    state += "optimizer state 7.63 MiB; use a smaller model"
    assert state in text
    text = explanation(out_of_memory)
    assert text.endswith("there was no model yet; use a smaller model")
    run = make_run(World(), Tiny(), "--eval.every", 1)
    run.step = 7
    run.task.loss_sum = out_of_memory
    text = explanation(lambda: evaluate(run), run)
    assert "ran out of memory in the evaluation after step 7 (test_explain.py, line " in text


def test_a_cause_that_a_compiler_wrapped_is_recognised():
    error = ValueError("the compiler failed")
    assert not is_out_of_memory(error)
    error.__cause__ = torch.OutOfMemoryError()
    assert is_out_of_memory(error)


class Greedy(Tiny):
    def loss_sum(self, model, batch):
        return super().loss_sum(model, batch) * torch.ones(10**15).mean()


@pytest.mark.bad_input("GPU or host memory that runs out")
def test_a_step_that_asks_for_too_much_ends_in_one_line_with_status_1(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    words = "--task.target test_explain:Greedy --run.dir run --run.device cpu --use_amp false"
    assert main(words.split()) == 1
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    line = Greedy.loss_sum.__code__.co_firstlineno + 1
    said = f"error: rank 0 ran out of memory in step 1 (test_explain.py, line {line}): asked for "
    assert text.startswith(f"{said}3,725,290.30 GiB more than the ")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["stopped_by"], summary["exit_code"]) == ("failed", 1)
    assert summary["cause"] == text[len("error: ") : -1]


def test_a_full_disk_is_one_line_with_the_path(tmp_path):
    full = OSError(errno.ENOSPC, "No space left", "run/summary.json")
    error = explained(full, folder=tmp_path)
    assert isinstance(error, Failure)
    assert "run/summary.json can't be written (No space left" in str(error)
    other = OSError(errno.ENOENT, "no such file")
    assert explained(other, folder=tmp_path) is other


@pytest.mark.bad_input("half precision that a CPU's library has no kernel for")
@pytest.mark.parametrize(
    ("words", "kind", "fix"),
    [
        (
            "could not create a primitive descriptor for the LSTM forward propagation primitive.",
            ConfigError,
            "rank 0: this device can't compute the model in half precision; use --use_amp false",
        ),
        (
            "aten.copy_.default got mixed torch.Tensor and DTensor, need to convert",
            DataError,
            "use optim.ema for an average of the weights",
        ),
    ],
)
def test_a_known_error_of_torch_is_one_line_with_the_fix(words, kind, fix):
    error = explained(RuntimeError(words))
    assert isinstance(error, kind)
    assert fix in str(error)
    assert str(error).endswith(f" (RuntimeError: {words})")
