"""Hooks into FSDP2: blocks that a rank leaves out, refusals with their cause, times of waiting."""

from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from messages import message_of
from ranks import on_ranks
from test_strangers import Mixture, message_of_a_step, mixture_run, with_forward
from tiny import Tiny, make_run, parameters_of, take_steps
from torch import nn

from dist_amp.scaling import hooks, reduction
from dist_amp.scaling.hooks import BlockCalls
from dist_amp.world import World


@pytest.mark.bad_input("a block on which the loss does not depend under fsdp")
@pytest.mark.parametrize(("chosen", "block"), [(0, "3"), (3, "3"), (1, None)])
def test_a_block_on_which_the_loss_does_not_depend_is_named(chosen, block):
    model = BranchedModel()
    blocks = list(model.blocks[2:])  # of the right branch
    BlockCalls(model, blocks, World(rank=3))
    loss = model(torch.zeros(1, 8), torch.tensor(chosen)).sum()
    if block is None:
        loss.backward()
        return
    message = message_of(65, loss.backward)
    assert f"rank 3: the loss does not depend on the block blocks.{block}, whose" in message
    assert "use parallel.strategy=ddp" in message


def steps_under_a_policy(world):
    """Parameters after idle experts had bf16 gradients, reduced in every micro-batch."""
    run = mixture_run(world, Mixture(24), "fsdp", "--parallel.accumulate_reduce", "every")
    take_steps(run, 4)
    return parameters_of(run)


def test_idle_experts_under_a_bf16_policy_mix_with_accumulated_gradients():
    one, two = on_ranks(2, steps_under_a_policy)
    for name, value in one.items():
        assert value.isfinite().all(), name
        torch.testing.assert_close(two[name], value, rtol=0, atol=0)


class BranchedModel(nn.Module):
    """Four blocks of one shape, which are all called; a sample chooses from their outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x, chosen):
        x = self.first(x)
        left, right = self.blocks[1](self.blocks[0](x)), self.blocks[3](self.blocks[2](x))
        return self.head({0: left, 1: right, 2: left + right, 3: x}[chosen.item()])


def in_an_object(model, x):
    """The output in no container that torch looks into."""
    return SimpleNamespace(prediction=model.net(x))


class PlainOutput(Tiny):
    def build_model(self):
        return with_forward(in_an_object, net=super().build_model())

    def blocks(self, model):
        return []  # of which none would start the reduction

    def loss_sum(self, model, batch):
        return super().loss_sum(lambda x: model(x).prediction, batch)


def in_order(model, x, order):
    for number in order:
        x = model.blocks[number](x)
    return model.head(x)[:, :1]


class OrderOfTheRank(Tiny):
    """Each rank calls the blocks in an order of its own."""

    def __init__(self, *orders):
        super().__init__()
        self.orders = orders

    def build_model(self):
        blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        return with_forward(in_order, blocks=blocks, head=nn.Linear(8, 3))  # of 2 rows, and 1

    def loss_sum(self, model, batch):
        order = self.orders[torch.distributed.get_rank()]
        return super().loss_sum(lambda x: model(x, order), batch)


class OtherWeights(Tiny):
    def loss_sum(self, model, batch):
        weights = {name: torch.ones(p.shape) for name, p in model.named_parameters()}
        call = partial(torch.func.functional_call, model, weights)
        return super().loss_sum(lambda x: call((x,)), batch)


class Fading(nn.Linear):
    """Scales its input by a frozen parameter that it changes."""

    def __init__(self):
        super().__init__(8, 8)
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x):
        self.scale.mul_(0.9)
        return super().forward(x * self.scale.detach().clone())


class WritesInABlock(Tiny):
    def build_model(self):
        return nn.Sequential(nn.Linear(8, 8), Fading(), nn.Linear(8, 1))

    def blocks(self, model):
        return [model[0], model[1]]


@pytest.mark.bad_input("another order of blocks on a rank, or other weights in a call, under fsdp")
@pytest.mark.parametrize(
    ("task", "said"),
    [
        (PlainOutput(), "the model's output, of type SimpleNamespace, has no tensor that FSDP2 f"),
        (OrderOfTheRank([0, 1], [1, 0]), "rank 0 calls the blocks blocks.0, blocks.1 and rank 1"),
        (OrderOfTheRank([0, 1], [0, 1, 1]), "rank 1 blocks.0, blocks.1, blocks.1, but FSDP2"),
        (OrderOfTheRank([0], [0]), "did not call its block blocks.1 (1 of 2 blocks not called)"),
        (WritesInABlock(), "the model's forward changes its parameter 1.scale, but under FSDP2"),
        (OtherWeights(), "the model is called with a weight of a Linear that is not its own, as"),
    ],
)
def test_what_sharding_rules_out_is_named_before_the_ranks_part(task, said):
    for message in on_ranks(2, message_of_a_step, task, "fsdp"):
        assert said in message
        assert "use parallel.strategy=ddp" in message


def parameters_after_two_steps(world, renamed):
    waits, engine = (("renamed",), None) if renamed else (hooks.WAITS, reduction.ENGINE)
    with patch.object(hooks, "WAITS", waits), patch.object(reduction, "ENGINE", engine):
        run = make_run(world, Tiny(), "--parallel.strategy", "fsdp", "--use_amp", "false")
        take_steps(run, 2)
    return {name: p.tolist() for name, p in parameters_of(run).items()}


def test_steps_are_the_same_where_torch_has_other_private_names():
    named, renamed = (on_ranks(2, parameters_after_two_steps, change) for change in (False, True))
    assert named == renamed
