"""What blocks that recompute in backward keep, and that they change no gradient or buffer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from byte_model import nothing_compiled_yet  # noqa: F401
from test_step import Operations
from tiny import Rows, Tiny
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from dist_amp.errors import ConfigError
from dist_amp.scaling.activation_checkpointing import policy, recomputed


class ConvNet(Tiny):
    """Three convolutions, each a block. Batch: x [B, 4, 6, 6], y [B]."""

    def build_model(self):
        return nn.Sequential(*(self.block() for _ in range(3)), nn.Flatten(), nn.Linear(144, 1))

    def block(self):
        convolution = nn.Conv2d(4, 4, 3, padding=1)
        return nn.Sequential(convolution, nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3))

    def blocks(self, model):
        return list(model)[:3]

    def build_dataset(self, split):
        x = torch.randn(64, 4, 6, 6, generator=torch.Generator().manual_seed(0))
        return Rows(x=x, y=x.flatten(1).sum(1).sin(), counts=torch.ones(64))


def assert_equal(ones, others):
    assert ones
    torch.testing.assert_close(ones, others, rtol=0, atol=0)


class Codebook(nn.Module):
    """Reads a buffer in its forward, and changes it: by assignment, and not in every call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.ones(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        y = torch.sin(self.linear(x) * self.mean)
        if self.calls % 2 == 0:
            self.mean = 0.5 * self.mean + 0.5 * y.detach().mean(0)
        self.calls += 1
        return y


def codebook_after(rounds, wrap):
    torch.manual_seed(0)
    block = Codebook()
    if wrap:
        block.forward = recomputed(block)
    for _ in range(rounds):
        block(torch.randn(4, 8)).square().sum().backward()
    return [block.linear.weight.grad, block.mean, block.calls]


def test_the_second_run_reads_the_buffers_that_the_first_one_read():
    assert_equal(codebook_after(4, wrap=True), codebook_after(4, wrap=False))


def test_a_buffer_that_is_first_written_to_later_is_still_updated_once():
    block = nn.BatchNorm1d(2, momentum=0.0)
    block.forward = recomputed(block)
    for momentum in (0.0, 0.5, 0.5):
        block.momentum = momentum
        block(torch.tensor([[0.0, 4.0], [4.0, 0.0]], requires_grad=True)).sum().backward()
    assert block.running_mean.tolist() == [1.5, 1.5]


class WritesLater(nn.Module):
    """Its second and later forwards change a buffer after reading it, by assignment or in place."""

    def __init__(self, in_place):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.in_place = in_place
        self.is_first = True
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        y = torch.sin(self.linear(x) * self.scale)
        if self.in_place and not self.is_first:
            self.scale.mul_(2)
        elif not self.is_first and torch.is_grad_enabled():
            self.scale = self.scale * 2
        self.is_first = False
        return y


def gradient_after_two_forwards(block):
    for _ in range(2):
        block(torch.ones(4, 8)).square().sum().backward()
    return [block.linear.weight.grad, block.scale]


def test_a_buffer_that_a_later_forward_replaces_gives_the_gradients_of_none():
    torch.manual_seed(0)
    plain = WritesLater(in_place=False)
    block = copy.deepcopy(plain)
    block.forward = recomputed(block)
    assert_equal(gradient_after_two_forwards(block), gradient_after_two_forwards(plain))


@pytest.mark.bad_input("a block that writes to a buffer in place, but not in its first forward")
def test_a_buffer_that_only_a_later_forward_writes_to_in_place_is_refused():
    block = WritesLater(in_place=True)
    block.forward = recomputed(block)
    with pytest.raises(ConfigError, match=r"WritesLater\.scale is written in place"):
        gradient_after_two_forwards(block)


class Attention(nn.Module):
    """[B, T, C] -> the same: attention and a product, each followed by dropout."""

    def __init__(self, dropout=0.3):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.dropout = dropout

    def forward(self, x):
        query, key, value = (
            part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)
        y = self.out(y.transpose(1, 2).flatten(2))
        return F.dropout(x + y, self.dropout)


def attended(wrap, dropout):
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention(dropout) for _ in range(2)))
    for block in model if wrap else ():
        block.forward = recomputed(block, selective=True)
    model(torch.randn(2, 6, 16)).square().sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_dropout_in_attention_and_after_it_gives_the_gradients_of_none(dropout):
    assert_equal(attended(True, dropout), attended(False, dropout))


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
        (Attention(0.0), (2, 6, 16), {"attention": 0, "addmm": 0}),
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
