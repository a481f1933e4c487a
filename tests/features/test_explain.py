"""Errors of torch or the system, such as out of memory, end in one line with what to change."""

import errno
import json
import re

import pytest
import torch
from tiny import Tiny, make_run

from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError, DataError, Failure
from dist_amp.precision import Precision
from dist_amp.settings import PrecisionConfig
from dist_amp.step import evaluate
from dist_amp.supervise.explain import (
    explain_copies,
    explain_disk,
    explain_half,
    explain_memory,
    is_out_of_memory,
)
from dist_amp.train import main
from dist_amp.world import World

ALLOCATING = "DefaultCPUAllocator: can't allocate memory: you tried to allocate"


def test_the_state_is_measured_and_the_error_is_read():
    run = make_run(World(), Tiny(), "--train.micro_batch_size", 4, "--train.accumulation_steps", 2)
    error = RuntimeError(f"{ALLOCATING} 8000 bytes. Error code 12")
    explained = explain_memory(error, run.config, World(), run)
    count = sum(p.numel() for p in run.model.parameters())
    size = f"{4 * count:,} bytes" if 4 * count < 1024 else f"{4 * count / 1024:.2f} KiB"
    assert isinstance(explained, Failure)
    assert "rank 0 ran out of memory in step 1: asked for 7.81 KiB more than the " in str(explained)
    assert f"parameters take {size}, gradients {size}, optimizer state " in str(explained)
    assert "\n" not in str(explained)
    error = MemoryError("Unable to allocate 7.00 GiB for an array with shape (1, 2)")  # numpy's
    text = str(explain_memory(error, run.config, World(), run))
    assert "ran out of memory in step 1: asked for 7.00 GiB more than the " in text
    other = RuntimeError("expected scalar type Float")
    assert explain_memory(other, run.config, World(), run) is other


class TooLarge(Tiny):
    """A model that the device has no room for."""

    def build_model(self):
        model = torch.nn.Linear(1000, 1000, bias=False)
        model.to = out_of_memory
        return model


def out_of_memory(*args):
    raise RuntimeError(f"{ALLOCATING} 1000000 bytes.")


def explanation(call, config, run=None):
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(explain_memory(caught.value, config, World(), run))


def test_what_did_not_fit_is_named():
    config = load_config([], environ={})
    text = explanation(lambda: make_run(World(), TooLarge()), config)
    said = (
        r"ran out of memory before the first step \(test_explain.py, line \d+\): asked for 976.56 "
    )
    assert re.search(said, text)
    state = "; 1,000,000 parameters take 3.81 MiB, gradients 3.81 MiB, "
    state += "optimizer state 7.63 MiB; use a smaller model"
    assert state in text
    text = explanation(out_of_memory, config)
    assert text.endswith("there was no model yet; use a smaller model")
    run = make_run(World(), Tiny(), "--eval.every", 1)
    run.step = 7
    run.task.loss_sum = out_of_memory
    text = explanation(lambda: evaluate(run), run.config, run)
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
    error = explain_disk(OSError(errno.ENOSPC, "No space left", "run/summary.json"), tmp_path)
    assert isinstance(error, Failure)
    assert "run/summary.json can't be written (No space left" in str(error)
    other = OSError(errno.ENOENT, "no such file")
    assert explain_disk(other, tmp_path) is other


@pytest.mark.bad_input("half precision that a CPU's library has no kernel for")
def test_a_layer_that_a_cpu_can_not_compute_in_half_precision_is_one_line():
    words = "could not create a primitive descriptor for the LSTM forward propagation primitive."
    precision = Precision(PrecisionConfig(), "autocast", World().device)
    explained = explain_half(RuntimeError(words), precision, 1)
    assert isinstance(explained, ConfigError)
    assert str(explained).startswith("rank 1: this CPU can't compute the model in bf16 (RuntimeErr")
    assert str(explained).endswith("; use --use_amp false")
    whole = Precision(PrecisionConfig(use_amp=False), "nothing", World().device)
    assert explain_half(explained, whole, 1) is explained


def test_an_average_of_the_model_under_fsdp_is_explained():
    words = "aten.copy_.default got mixed torch.Tensor and DTensor, need to convert"
    error = DataError("the task's on_step(run, report) failed after step 1: it; fix it")
    error.__cause__ = RuntimeError(words)
    message = str(explain_copies(error))
    assert message.startswith("the task's on_step(run, report) failed after step 1: it; FSDP2's")
    assert "use optim.ema for an average of the weights" in message
