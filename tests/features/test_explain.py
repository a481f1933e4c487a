"""Errors of torch or the system, such as out of memory, end in one line with what to change."""

import errno
import json

import pytest
import torch
from tiny import Changed, Tiny, make_run

from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError, DataError, Failure
from dist_amp.step import evaluate
from dist_amp.supervise.explain import explain_error
from dist_amp.supervise.lifecycle import Job
from dist_amp.train import main
from dist_amp.world import World


def explained(error, run=None):
    config = run.config if run is not None else load_config([], environ={})
    return explain_error(error, Job(config, World(), run=run, folder="run"))


def compilers_error():
    error = ValueError("the compiler failed")
    error.__cause__ = torch.OutOfMemoryError()
    return error


LSTM = "could not create a primitive descriptor for the LSTM forward propagation primitive."
COPY = "aten.copy_.default got mixed torch.Tensor and DTensor, need to convert"


@pytest.mark.bad_input("half precision that a CPU's library has no kernel for")
@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (RuntimeError(LSTM), ConfigError, f"; use --use_amp false (RuntimeError: {LSTM})"),
        (RuntimeError(COPY), DataError, "optim.ema for an average of the weights"),
        (OSError(errno.ENOSPC, "No space left", "a/b"), Failure, "a/b can't be written (No space"),
        (MemoryError("Unable to allocate 7.00 GiB"), Failure, "asked for 7.00 GiB more than the "),
        (compilers_error(), Failure, "rank 0 ran out of memory before the first step"),
    ],
)
def test_a_known_error_is_one_line_with_the_fix(error, kind, said):
    found = explained(error)
    assert type(found) is kind
    assert said in str(found)
    assert "\n" not in str(found)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("expected scalar type Float"), OSError(errno.ENOENT, "no file"), ValueError()],
)
def test_another_error_stays(error):
    assert explained(error) is error


def out_of_memory(*args):
    allocating = "DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    raise RuntimeError(f"{allocating} 1000000 bytes. Error code 12")


def explanation(call, run=None):
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(explained(caught.value, run))


def test_what_did_not_fit_and_what_the_model_takes_are_named():
    text = explanation(out_of_memory)
    assert text.endswith("there was no model yet; use a smaller model")
    too_large = Changed(lambda model: vars(model).update(to=out_of_memory))
    text = explanation(lambda: make_run(World(), too_large))
    assert "ran out of memory before the first step: asked for 976.56 KiB" in text
    state = "; parameters take 612 bytes, gradients 612 bytes, optimizer state 1.20 KiB; use a sma"
    assert state in text
    run = make_run(World(), Tiny(), "--eval.every", 1)
    run.step = 7
    run.task.loss_sum = out_of_memory
    run.parallel.module.requires_grad_(False)
    text = explanation(lambda: evaluate(run), run)
    assert "ran out of memory in the evaluation after step 7: " in text
    assert "; parameters take 612 bytes, gradients 0 bytes, optimizer state 0 bytes; " in text


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
    said = "error: rank 0 ran out of memory in step 1: asked for "
    assert text.startswith(f"{said}3,725,290.30 GiB more than the ")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["stopped_by"], summary["exit_code"]) == ("failed", 1)
    assert summary["cause"] == text[len("error: ") : -1]
