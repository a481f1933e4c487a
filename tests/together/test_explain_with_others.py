"""Errors of a loss under FSDP2 or compiled, or of a GPU's memory, end in one line with the fix."""

import pytest
import torch
import torch.nn.functional as F
from byte_model import COMPILED, nothing_compiled_yet  # noqa: F401
from ranks import on_ranks
from test_strangers import Mixture, dtypes_after_a_step
from tiny import Tiny, make_run, take_steps
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dist_amp.config.memory import size_text
from dist_amp.errors import Failure
from dist_amp.supervise import explain
from dist_amp.supervise.explain import explain_error
from dist_amp.supervise.lifecycle import Job
from dist_amp.world import World


class GradientPenalty(Tiny):
    def loss_sum(self, model, batch):
        x = batch["x"].clone().requires_grad_(True)
        output = model(x).float().squeeze(-1)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return F.mse_loss(output, batch["y"], reduction="sum") + slope.float().square().sum()


class ParameterPenalty(Tiny):
    def loss_sum(self, model, batch):
        penalty = sum(p.square().sum() for p in model.parameters())
        return super().loss_sum(model, batch) + 1e-2 * len(batch["y"]) * penalty


class Student(nn.Linear):
    def __init__(self):
        super().__init__(8, 1)
        self.register_buffer("teacher", torch.randn(1, 8))

    def forward(self, x):
        return super().forward(x) - F.linear(x, self.teacher)


class TeacherInBuffers(Tiny):
    def build_model(self):
        return nn.Sequential(nn.Linear(8, 8), Student())


DDP = ["--parallel.strategy", "ddp"]
AUTOCAST = ["--parallel.strategy", "fsdp", "--precision.cast_by", "autocast"]


def explanation(world, task, *words):
    """The line for the error of a step."""
    run = make_run(world, task, *words)
    with pytest.raises((AssertionError, RuntimeError)) as error:
        take_steps(run, 4)
    explained = explain_error(error.value, Job(run.config, world, run=run))
    assert isinstance(explained, Failure)
    return str(explained)


@pytest.mark.bad_input("a gradient penalty, or a penalty on parameters, under fsdp")
@pytest.mark.bad_input("buffers that FSDP2's policy does not cast to the model's dtype")
@pytest.mark.parametrize(
    ("task", "said", "fix", "words"),
    [
        (GradientPenalty(), "twice (create_graph), as a gradient penalty", "strategy=ddp", DDP),
        (ParameterPenalty(), "are shards, which neither can be copied", "strategy=ddp", DDP),
        (
            TeacherInBuffers(),
            "casts parameters and inputs, and not buffers (RuntimeError: ",
            "use precision.cast_by=autocast",
            AUTOCAST,
        ),
    ],
)
def test_what_sharding_rules_out_is_explained_and_works_as_it_says(task, said, fix, words):
    for message in on_ranks(2, explanation, task, "--parallel.strategy", "fsdp"):
        assert said in message
        assert fix in message
    on_ranks(2, dtypes_after_a_step, task, *words)


@pytest.mark.bad_input("idle experts under fsdp's policy with accumulation")
@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="zeros are reduced here"
)
def test_idle_experts_with_accumulation_under_fsdps_policy_are_told_what_reduces_them():
    words = ["--parallel.strategy", "fsdp", "--train.accumulation_steps", 2]
    words += ["--data.shuffle", "false", "--train.micro_batch_size", 2]
    for message in on_ranks(2, explanation, Mixture(24), *words):
        assert "had a gradient in some of the step's micro-batches only" in message
        assert "use parallel.accumulate_reduce=every" in message


@pytest.mark.bad_input("a loss that differentiates twice, with compiled blocks")
def test_a_loss_that_differentiates_compiled_blocks_twice_is_told_to_leave_them_as_they_are():
    message = explanation(World(), GradientPenalty(), *COMPILED, "--use_amp", "false")
    assert message.startswith("rank 0: the loss differentiates twice (create_graph)")
    assert "use compile.blocks=false" in message


GIB = 2**30


@pytest.mark.parametrize(
    ("ranks", "words", "expected"),
    [
        (
            1,
            [],
            "a train.micro_batch_size below 4 (with more train.accumulation_steps), or "
            "parallel.activation_checkpointing=selective or full, or a smaller model",
        ),
        (
            8,
            ["--parallel.activation_checkpointing", "full", "--train.micro_batch_size", 1],
            "parallel.strategy=fsdp, or a smaller model",
        ),
    ],
)
def test_the_line_has_the_request_what_the_model_takes_and_the_settings_that_take_less(
    monkeypatch, ranks, words, expected
):
    monkeypatch.setattr(explain, "capacity_of", lambda world: (79 * GIB, 9 * GIB))
    monkeypatch.setattr(explain, "memory_use", lambda device: (78 * GIB,))
    run = make_run(World(), Tiny(), "--train.micro_batch_size", 4, *words)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    world = World(min(3, ranks - 1), 0, ranks, ranks, torch.device("cuda", 0))
    size = 4 * sum(p.numel() for p in run.model.parameters())
    moments, size = size_text(2 * size), size_text(size)
    assert str(explain_error(error, Job(run.config, world, run=run))) == (
        f"rank {world.rank} ran out of GPU memory in step 1: asked for 2.00 GiB more than the "
        f"78.00 GiB in use, of 79.00 GiB available; parameters take {size}, gradients {size}, "
        f"optimizer state {moments}; use PYTORCH_ALLOC_CONF=expandable_segments:True in the "
        f"environment (9.00 GiB are reserved but fragmented), or {expected}"
    )
