"""What blocks that recompute in backward keep, and that they change no gradient or buffer."""

import pytest
import torch
from optimizer_runs import Operations
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from dist_amp.errors import ConfigError
from dist_amp.scaling import activation_checkpointing
from dist_amp.scaling.activation_checkpointing import policy, recomputed


def assert_equal(ones, others):
    assert ones
    torch.testing.assert_close(ones, others, rtol=0, atol=0)


class Codebook(nn.Module):
    """Reads a buffer in its forward, and changes it, but not in the first call."""

    def __init__(self, in_place):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.in_place = in_place
        self.register_buffer("mean", torch.ones(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        y = torch.sin(self.linear(x) * self.mean.clone())
        if self.calls % 2 == 1:
            mean = 0.5 * self.mean + 0.5 * y.detach().mean(0)
            self.mean = self.mean.copy_(mean) if self.in_place else mean
        self.calls = self.calls + 1
        return y


def codebook_after(rounds, in_place, wrap):
    torch.manual_seed(0)
    block = Codebook(in_place)
    if wrap:
        block.forward = recomputed(block)
    for _ in range(rounds):
        block(torch.randn(4, 8)).square().sum().backward()
    return [block.linear.weight.grad, block.mean, block.calls]


@pytest.mark.parametrize(("in_place", "small"), [(False, 100), (True, 100), (False, 0)])
def test_the_second_run_reads_the_buffers_that_the_first_one_read(in_place, small, monkeypatch):
    monkeypatch.setattr(activation_checkpointing, "SMALL", small)
    assert_equal(codebook_after(4, in_place, True), codebook_after(4, in_place, False))


@pytest.mark.bad_input("a block that writes in place to a buffer too large to be copied")
def test_a_large_buffer_that_is_written_to_in_place_is_refused(monkeypatch):
    monkeypatch.setattr(activation_checkpointing, "SMALL", 0)
    with pytest.raises(ConfigError, match=r"Codebook\.mean, a buffer of 8 elements, is written"):
        codebook_after(2, True, True)


def attention(dropout):
    """Attention and products, each followed by dropout: [B, T, 16] -> the same."""
    return nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)


def attended(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(attention(0.3), attention(0.3))
    for block in model if wrap else ():
        block.forward = recomputed(block, selective=True)
    model(torch.randn(2, 6, 16)).square().sum().backward()
    return [p.grad for p in model.parameters()]


def test_dropout_in_attention_and_after_it_gives_the_gradients_of_none():
    assert_equal(attended(True), attended(False))


class Scores(nn.Module):
    """Attention without the fused kernel: [B, T, 8] -> the same."""

    def forward(self, x):
        scores = torch.bmm(x, x.transpose(1, 2))
        return torch.bmm(scores.softmax(-1), x).sin()


CONVOLUTIONS = nn.Sequential(nn.Conv2d(4, 4, 3), nn.GELU(), nn.Conv2d(4, 4, 3), nn.Sigmoid())


# Of the two products in Scores, each is computed again, and two more for its gradients.
@pytest.mark.parametrize(
    ("block", "shape", "recomputed_again"),
    [
        (attention(0.0), (2, 6, 16), {"attention": 0, "addmm": 0}),
        (CONVOLUTIONS, (2, 4, 6, 6), {"gelu": 1, "convolution": 0}),
        (Scores(), (2, 64, 8), {"aten.bmm": 2 + 4}),
    ],
)
def test_attention_and_convolutions_are_kept_and_what_is_cheap_or_large_is_recomputed(
    block, shape, recomputed_again
):
    block.forward = recomputed(block, selective=True)
    loss = block(torch.randn(*shape, requires_grad=True)).square().sum()
    with Operations() as operations:
        loss.backward()
    names = [name for name in operations.names if "backward" not in name]
    counts = {part: sum(part in name for name in names) for part in recomputed_again}
    assert counts == recomputed_again


@pytest.mark.parametrize(("kernel", "more"), [("flash", ()), ("efficient", (None, True))])
def test_attention_that_draws_random_numbers_is_recomputed(kernel, more):
    operation = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention").default
    inputs = ("q", "k", "v", *more)
    keep, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    assert policy(None, operation, *inputs, 0.0, True, scale=0.5) is keep
    assert policy(None, operation, *inputs, 0.1, True, scale=0.5) is again
    assert policy(None, operation, *inputs, dropout_p=0.1) is again
