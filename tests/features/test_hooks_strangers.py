"""Core as test_strangers.py tests it, with hooks."""

import pytest
import torch
from ranks import on_ranks
from test_strangers import BranchedModel, DropsLayers, OrderOfTheRank
from tiny import Tiny, make_run, take_steps
from torch.distributed.tensor.debug import CommDebugMode

from dist_amp.errors import DataError
from dist_amp.scaling import hooks
from dist_amp.scaling.hooks import BlockCalls
from dist_amp.world import World


class FrozenTrunk(Tiny):
    def __init__(self, frozen):
        super().__init__(depth=3)
        self.frozen = frozen

    def build_model(self):
        model = super().build_model()
        for block in model[: self.frozen]:
            block.requires_grad_(False)
        return model

    def blocks(self, model):
        return list(model[:3])


def gathers_in_a_step(world, frozen):
    run = make_run(world, FrozenTrunk(frozen), "--parallel.strategy", "fsdp", "--use_amp", "false")
    take_steps(run, hooks.COMPARED_FORWARDS)  # in which the ranks compare their blocks
    with CommDebugMode() as counted:
        take_steps(run, 1)
    return counted.get_comm_counts()[torch.ops.c10d._allgather_base_]


def test_blocks_below_everything_that_is_trained_are_gathered_for_the_forward_alone():
    assert on_ranks(2, gathers_in_a_step, 0)[0] == 4 + 2, (
        "the root and the last block stay gathered"
    )
    assert on_ranks(2, gathers_in_a_step, 2)[0] == 4 + 1, (
        "torch fetches the block below the last one ahead"
    )


def test_a_block_that_the_forward_does_not_call_is_named():
    model = DropsLayers(1).build_model()
    BlockCalls(model, [model[0], model[1]], World(rank=3))
    with pytest.raises(DataError, match="rank 3: the model's forward did not call its block 1 "):
        model(torch.zeros(1, 8))


@pytest.mark.bad_input("a block on which the loss does not depend under fsdp")
@pytest.mark.parametrize(("chosen", "block"), [(0, "3"), (3, "3"), (1, None)])
def test_a_block_on_which_the_loss_does_not_depend_is_named_unless_ranks_may_skip_blocks(
    chosen, block
):
    model = BranchedModel()
    blocks = list(model.blocks[2:])  # of the right branch
    BlockCalls(model, blocks, World(rank=3))
    loss = model(torch.zeros(1, 8), torch.tensor(chosen)).sum()
    if block is None:
        loss.backward()
        return
    with pytest.raises(DataError) as error:
        loss.backward()
    assert f"rank 3: the loss does not depend on the block blocks.{block}, whose" in str(
        error.value
    )
    assert "ranks_skip_blocks = True" in str(error.value)


def test_ranks_compare_their_blocks_in_the_first_forwards_alone():
    on_ranks(2, compare_for_some_forwards)


def compare_for_some_forwards(world):
    task = OrderOfTheRank([0, 1], [0, 1])
    run = make_run(world, task, "--parallel.strategy", "fsdp", "--use_amp", "false")
    block = run.parallel.module.blocks[0]
    before = len(block._forward_pre_hooks)
    take_steps(run, hooks.COMPARED_FORWARDS)
    assert len(block._forward_pre_hooks) == before - 1
