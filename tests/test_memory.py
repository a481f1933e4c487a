"""Out of memory: one line with what was requested, what takes how much, and what would fit."""

import json
from dataclasses import replace

import pytest
import torch
from tiny import Tiny, make_run

from dist_amp.config.load import load_config
from dist_amp.errors import Failure
from dist_amp.step import evaluate
from dist_amp.supervise.explain import (
    Shortage,
    explain_memory,
    is_out_of_memory,
    message,
    suggestions,
)
from dist_amp.train import main
from dist_amp.world import World

GIB = 2**30
ALLOCATING = "DefaultCPUAllocator: can't allocate memory: you tried to allocate"
# 400 million parameters with activations of 2.3 GiB a sample, on one of eight 80 GB GPUs.
GPU = Shortage(
    world=World(3, 3, 8, 8, torch.device("cuda", 3)),
    when="in step 1",
    capacity=79 * GIB,
    peak=78 * GIB,
    requested=2 * GIB,
    parameters=int(1.5 * GIB),
    gradients=int(1.5 * GIB),
    optimizer_state=3 * GIB,
    gradients_allocated=int(1.5 * GIB),
    strategy="ddp",
    micro_batch_size=32,
    micro_batches=1,
)


def test_the_line_has_the_request_what_takes_the_rest_and_the_settings_that_fit():
    assert message(GPU) == (
        "rank 3 ran out of GPU memory in step 1: asked for 2.00 GiB more than the 78.00 GiB in "
        "use, of 79.00 GiB available; parameters take 1.50 GiB, gradients 1.50 GiB, optimizer "
        "state 3.00 GiB, a micro-batch of 32 at least 74.00 GiB; use train.micro_batch_size=16 "
        "instead of 32 (with train.accumulation_steps=2 a step stays the same), or "
        "parallel.activation_checkpointing=selective or full, or parallel.strategy=fsdp (768.00 "
        "MiB of the model on each)"
    )


@pytest.mark.parametrize(
    ("size", "micro_batches", "activations", "expected"),
    [
        (32, 1, 74, 16),  # 2.3 GiB a sample: 29 would fit, but only half was measured
        (32, 1, 200, 8),  # 6.25 GiB a sample: 11 fit, and 8 is what divides 32
        (10, 3, 100, 5),
        (10, 3, 200, 3),  # of 30 samples: 10 micro-batches of 3
        (7, 1, 300, 1),
        (4, 2, 4 * 70, 0),  # 70 GiB a sample and 6 of the state: more than 95 % of 79
        (1, 4, 80, 0),
    ],
)
def test_the_micro_batch_that_fits_divides_the_samples_of_a_step(
    size, micro_batches, activations, expected
):
    peak = (6 + activations - 2) * GIB
    short = replace(GPU, micro_batch_size=size, micro_batches=micro_batches, peak=peak)
    assert short.activations == activations * GIB
    assert short.fitting_micro_batch == expected
    if expected:
        steps = f"train.accumulation_steps={size * micro_batches // expected} a step"
        assert steps in suggestions(short)[0]
        assert short.state + expected * short.sample <= 0.95 * short.capacity


def test_gradients_that_are_not_allocated_yet_do_not_count_as_activations():
    first_forward = replace(GPU, gradients_allocated=0)
    assert first_forward.activations == GPU.activations + GPU.gradients
    assert first_forward.state == GPU.state, "what a step will need"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # 48 GiB of state, already sharded.
        (
            {
                "strategy": "fsdp",
                "optimizer_state": 45 * GIB,
                "micro_batch_size": 1,
                "checkpointing": "full",
            },
            [
                "parallel.cpu_offload=true (which moves 48.00 GiB of each rank to the host)",
                "a smaller model, or more ranks",
            ],
        ),
        # One GPU: FSDP would need a second.
        (
            {
                "world": World(device=torch.device("cuda", 0)),
                "optimizer_state": 45 * GIB,
                "checkpointing": "full",
            },
            [
                "train.micro_batch_size=16 instead of 32 (with train.accumulation_steps=2 a step "
                "stays the same)",
                "parallel.strategy=fsdp over 2 ranks (24.00 GiB of the model on each)",
            ],
        ),
        # 700 GiB before the first step, with 8 GPUs of 75 GiB to use.
        (
            {
                "parameters": 175 * GIB,
                "gradients": 175 * GIB,
                "optimizer_state": 350 * GIB,
                "micro_batch_size": 0,
            },
            [
                "parallel.strategy=fsdp over 10 ranks (70.00 GiB of the model on each)",
                "a smaller model",
            ],
        ),
        # Free memory in fragments.
        (
            {
                "unused": 9 * GIB,
                "checkpointing": "full",
                "micro_batch_size": 1,
                "optimizer_state": 0,
                "strategy": "fsdp",
            },
            [
                "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment (9.00 GiB are "
                "reserved "
                "but fragmented)",
                "a smaller model, or more ranks",
            ],
        ),
    ],
)
def test_if_no_smaller_micro_batch_helps_the_other_settings_are_suggested_with_their_numbers(
    changes, expected
):
    assert suggestions(replace(GPU, **changes)) == expected


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"outside_torch": 20 * GIB}, "and memory outside torch (other processes, NCCL) 20.00 GiB"),
        ({"global_batch_size": 256}, "with train.global_batch_size=256 a step stays the same"),
    ],
)
def test_memory_of_other_processes_and_a_global_batch_are_named(change, said):
    assert said in message(replace(GPU, **change))


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
    assert "before the first step, with a model of 1,000,000 parameters: asked for 976.5" in text
    state = "parameters take 3.81 MiB, gradients 3.81 MiB, optimizer state 7.63 MiB; use a smaller "
    assert state in text
    text = explanation(out_of_memory, config)
    assert "before the first step: asked for 976.56 KiB more than the " in text
    assert text.endswith("there was no model yet; use a smaller model")
    run = make_run(World(), Tiny(), "--eval.every", 1)
    run.step = 7
    run.task.loss_sum = out_of_memory
    text = explanation(lambda: evaluate(run), run.config, run)
    assert "ran out of memory in the evaluation after step 7: asked" in text


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
    words = "--task.target test_memory:Greedy --run.dir run --run.device cpu"
    assert main(words.split()) == 1
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    said = "error: rank 0 ran out of memory in step 1: asked for 3,725,290.30 GiB more than the "
    assert text.startswith(said)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["stopped_by"], summary["exit_code"]) == ("failed", 1)
    assert summary["cause"] == text[len("error: ") : -1]


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
    said = "error: rank 1 ran out of memory in step 1: asked for 512.00 MiB more than the "
    assert line.startswith(said)
    assert ", of 8.00 GiB available; " in line
