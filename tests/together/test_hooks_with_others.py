"""What test_hooks.py tests, with other features."""

from functools import partial

import pytest
import torch
from ranks import on_ranks
from test_hooks import BranchedModel
from test_strangers import Mixture, first_weight_after, message_of_a_step
from tiny import Rows, Tiny, make_run, parameters_of, take_steps
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from dist_amp.scaling import hooks
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
    # The root and the last block stay gathered; torch fetches the block below the last one ahead.
    assert on_ranks(2, gathers_in_a_step, 0)[0] == 4 + 2
    assert on_ranks(2, gathers_in_a_step, 2)[0] == 4 + 1


class Branched(Mixture):
    def build_model(self):
        return BranchedModel()

    def build_dataset(self, split):
        rows = Tiny.build_dataset(self, split)
        return Rows(
            **rows.columns, chosen=torch.tensor([0, 1, 2, 3, 1, 0, 3, 3]).repeat(self.samples // 8)
        )


def steps_with_branches(world, strategy, *words):
    words = [*words, "--parallel.strategy", strategy, "--data.shuffle", "false"]
    words += ["--train.micro_batch_size", 1, "--train.global_batch_size", 8]
    run = make_run(world, Branched(samples=32), *words)
    take_steps(run, 4)
    return parameters_of(run)


@pytest.mark.parametrize(("reduce", "checkpointing"), [("last", "none"), ("every", "full")])
def test_branches_that_only_some_ranks_depend_on_take_the_step_of_one_process_under_ddp(
    reduce, checkpointing
):
    words = ["--use_amp", "false", "--parallel.accumulate_reduce", reduce]
    words += ["--parallel.activation_checkpointing", checkpointing]
    alone = steps_with_branches(World(), "single", *words)
    for parameters in on_ranks(2, steps_with_branches, "ddp", *words):
        for name, value in parameters.items():
            # Rounding of float32 sums in another order, which the steps of Adam add up.
            torch.testing.assert_close(value, alone[name], rtol=0, atol=2e-6)


class Momentum(nn.Module):
    """A student, and a teacher that follows it in each forward, by one of two ways to write."""

    def __init__(self, through_data):
        super().__init__()
        self.student = nn.Linear(8, 2)  # a row on each of two ranks, so that both see the change
        self.teacher = nn.Linear(8, 2).requires_grad_(False)
        self.through_data = through_data

    @torch.no_grad()
    def follow(self):
        pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
        for old, new in pairs:
            if self.through_data:
                old.data = old.data * 0.9 + new.data * 0.1
            else:
                old.mul_(0.9).add_(new, alpha=0.1)

    def forward(self, x):
        if self.training:
            self.follow()
        return (self.student(x) - self.teacher(x).detach()).sum(-1, keepdim=True)


class FollowsInForward(Tiny):
    def __init__(self, through_data: bool = False):
        super().__init__()
        self.through_data = through_data

    def build_model(self):
        return Momentum(self.through_data)


@pytest.mark.bad_input("a teacher that the forward changes, under fsdp")
@pytest.mark.parametrize("through_data", [False, True])
def test_a_teacher_that_moves_in_forward_moves_under_ddp_and_is_refused_under_fsdp(through_data):
    task = partial(FollowsInForward, through_data)
    alone = first_weight_after(World(), task, "single")
    for parameters in on_ranks(2, first_weight_after, task, "ddp"):
        # Rounding of float32 sums in another order, which two steps of Adam add up.
        torch.testing.assert_close(
            parameters["teacher.weight"], alone["teacher.weight"], rtol=0, atol=2e-6
        )
    for message in on_ranks(2, message_of_a_step, task(), "fsdp"):
        assert "forward changes its parameter teacher.weight, which is" in message
