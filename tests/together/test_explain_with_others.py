"""What test_explain.py tests, with other features."""

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from test_strangers import dtypes_after_a_step, message_of_a_step, with_forward
from tiny import Tiny, make_run, take_steps
from torch import nn

from dist_amp.config.memory import size_text
from dist_amp.errors import DataError
from dist_amp.supervise import explain
from dist_amp.supervise.explain import explain_data, explain_memory
from dist_amp.world import World


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.mm(weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient.mm(weight.t()), x.t().mm(gradient)


class OwnFunction(Tiny):
    def build_model(self):
        def forward(model, x):
            return Product.apply(model.net(x), model.weight)

        model = with_forward(forward, net=nn.Linear(8, 8))
        model.weight = nn.Parameter(torch.randn(8, 1))
        return model


@pytest.mark.bad_input("a torch.autograd.Function without custom_fwd under autocast")
def test_an_own_function_that_mixes_dtypes_under_autocast_is_explained():
    run = make_run(World(), OwnFunction(), "--precision.dtype", "bf16")
    with pytest.raises(RuntimeError) as error:
        take_steps(run, 1)
    explained = explain_data(error.value, 0)
    assert isinstance(explained, DataError)
    message = str(explained)
    assert message.startswith("rank 0: a torch.autograd.Function mixes dtypes, since autocast")
    assert "test_explain_with_others.py, line" in message
    assert "torch.amp.custom_fwd" in message


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


class FilterInFrequency(Tiny):
    def build_model(self):
        def forward(model, x):
            spectrum = torch.fft.rfft(x) * torch.view_as_complex(model.filter)
            return model.net(torch.fft.irfft(spectrum, n=8))

        model = with_forward(forward, net=super().build_model())
        model.filter = nn.Parameter(torch.randn(5, 2))
        return model


class TeacherInBuffers(Tiny):
    def build_model(self):
        def forward(model, x):
            return model.student(x) - F.linear(x, model.teacher)

        model = with_forward(forward, student=super().build_model())
        model.register_buffer("teacher", torch.randn(1, 8))
        return model


@pytest.mark.bad_input("a gradient penalty, or a penalty on parameters, under fsdp")
@pytest.mark.parametrize(
    ("task", "said"),
    [
        (GradientPenalty(), "the loss differentiates twice, as a gradient penalty does, and FSDP2"),
        (ParameterPenalty(), "the loss reads sharded parameters, as a penalty on them does; use"),
    ],
)
def test_a_loss_that_sharding_rules_out_is_explained_and_works_under_ddp(task, said):
    on_ranks(2, dtypes_after_a_step, task, "--parallel.strategy", "ddp")
    for message in on_ranks(2, message_of_a_step, task, "fsdp"):
        assert said in message
        assert "parallel.strategy=ddp" in message


@pytest.mark.bad_input("buffers or an FFT that FSDP2's policy does not cast to")
@pytest.mark.parametrize("task", [FilterInFrequency(), TeacherInBuffers()])
def test_a_dtype_that_the_policy_can_not_mix_is_explained_and_works_with_autocast(task):
    for message in on_ranks(2, message_of_a_step, task, "fsdp"):
        assert "and with what it doesn't, such as buffers (" in message
        assert message.endswith("use precision.cast_by=autocast")
    words = ["--parallel.strategy", "fsdp", "--precision.cast_by", "autocast"]
    on_ranks(2, dtypes_after_a_step, task, *words)


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
    size = size_text(0)
    assert str(explain_memory(error, run.config, world, run)) == (
        f"rank {world.rank} ran out of GPU memory in step 1: asked for 2.00 GiB more than the "
        f"78.00 GiB in use, of 79.00 GiB available; parameters take {size}, gradients {size}, "
        f"optimizer state {size}; use PYTORCH_ALLOC_CONF=expandable_segments:True in the "
        f"environment (9.00 GiB are reserved but fragmented), or {expected}"
    )
