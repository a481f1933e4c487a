"""Out of memory: one line with what was requested, what takes how much, and what would fit."""

import json
import re

import pytest
import torch
from tiny import Tiny, make_run

from dist_amp.config.load import load_config
from dist_amp.errors import Failure
from dist_amp.step import evaluate
from dist_amp.supervise.explain import explain_memory, is_out_of_memory
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


def test_numpys_lack_of_memory_is_recognised_and_without_a_traceback_no_line_is_named():
    run = make_run(World(), Tiny())
    error = MemoryError("Unable to allocate 7.00 GiB for an array with shape (1, 2)")
    text = str(explain_memory(error, run.config, World(), run))
    assert "ran out of memory in step 1: asked for 7.00 GiB more than the " in text


@pytest.mark.slow
def test_memory_that_really_runs_out_on_one_of_two_ranks_names_it_and_the_other_is_silent(
    launch, tmp_path
):
    (tmp_path / "wide.py").write_text(
        "import os, resource, torch\nfrom tiny import Tiny\n\nclass Wide(Tiny):\n"
        "    def loss_sum(self, model, batch):\n"
        "        if os.environ['RANK'] == '1':\n"
        "            resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30,) * 2)\n"
        "            held = [torch.empty(2**27) for _ in range(32)]\n"
        "        return super().loss_sum(model, batch)\n"
    )
    done = launch.each(2, "--task.target", "wide:Wide", "--run.dir", "run")
    assert [rank.returncode for rank in done] == [1, 1]
    (line,) = [text for rank in done for text in rank.stderr.splitlines() if "error: " in text[:7]]
    said = "error: rank 1 ran out of memory in step 1 (wide.py, line 8): asked for 512.00 MiB more "
    assert line.startswith(said)
    assert ", of 8.00 GiB available; " in line
