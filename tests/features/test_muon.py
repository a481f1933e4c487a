"""Muon on several ranks: the numbers of one process, and the work shared."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from optimizer_runs import Counter, given_gradients, words
from own_optimizers import Own
from ranks import on_ranks
from tiny import make_run, moments_of, parameters_of, save
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from dist_amp.optimizers import muon
from dist_amp.world import World

SIZES = (8, 10, 10, 10, 10, 2, 10, 1)  # rows that no number of ranks shares evenly, or too few


class Stack(Own):
    """Seven matrices, three of one shape."""

    def __init__(self, sizes=SIZES):
        super().__init__("muon")
        self.sizes = sizes

    def build_model(self):
        pairs = zip(self.sizes, self.sizes[1:], strict=False)
        return nn.Sequential(*(nn.Sequential(nn.Linear(*pair), nn.Tanh()) for pair in pairs))


def run_of(world, strategy, *more, task=None):
    return make_run(world, task or Stack(), *words("unused", strategy, "--use_amp", "false", *more))


def stepped(run, steps):
    for step in steps:
        given_gradients(run.parallel.module, step)
        if step == 1:
            run.parallel.module[1][0].weight.grad = None
        run.optimizer.step()
    return [*parameters_of(run).values(), *moments_of(run)]


def after_three_steps(world, strategy, at_once=None):
    """(parameters and moments, collectives of the third step): the same gradients everywhere."""
    run = run_of(world, strategy)
    context = patch.object(muon, "AT_ONCE", at_once) if at_once else nullcontext()
    with context:
        stepped(run, (0, 1))
        with Counter("alltoall") as all_to_alls, Counter("allgather") as gathers:
            given_gradients(run.parallel.module, 2)
            run.optimizer.step()
    return [*parameters_of(run).values(), *moments_of(run)], all_to_alls.count, gathers.count


def assert_equal(tensors, expected):
    for a, b in zip(tensors, expected, strict=True):
        # Each matrix is orthogonalised in one piece, and on a CPU alike in a batch of any size;
        # AdamW's kernel rounds a shard's tail differently.
        rtol = 0 if a.ndim == 2 else 2**-22
        torch.testing.assert_close(a, b, rtol=rtol, atol=0)


LAYOUTS = [
    (2, "ddp", 0, 1),
    (3, "ddp", 0, 1),
    (2, "fsdp", 2, 0),
    (3, "fsdp", 2, 0),
    (4, "hsdp", 2, 1),
]


@pytest.mark.parametrize(("ranks", "strategy", "all_to_alls", "gathers"), LAYOUTS)
def test_ranks_that_share_the_matrices_equal_one_process_bit_for_bit(
    ranks, strategy, all_to_alls, gathers
):
    expected, *none = after_three_steps(World(), "single")
    assert none == [0, 0]
    for tensors, *counts in on_ranks(ranks, after_three_steps, strategy):
        assert_equal(tensors, expected)
        assert counts == [all_to_alls, gathers], "for all seven matrices"


@pytest.mark.parametrize(("strategy", "calls"), [("ddp", [0, 3]), ("fsdp", [6, 0])])
def test_more_than_fits_at_a_time_is_exchanged_in_parts(strategy, calls):
    expected, *_ = after_three_steps(World(), "single")
    for tensors, *counts in on_ranks(2, after_three_steps, strategy, 100):
        assert_equal(tensors, expected)
        assert counts == calls


def flops_of_a_step(world, strategy, task):
    run = run_of(world, strategy, task=task)
    given_gradients(run.parallel.module, 0)
    with FlopCounterMode(display=False) as counter:
        run.optimizer.step()
    return counter.get_total_flops()


@pytest.mark.parametrize(("ranks", "strategy"), [layout[:2] for layout in LAYOUTS])
def test_a_rank_orthogonalises_its_share_of_the_matrices_and_at_most_one_more(ranks, strategy):
    task = Stack((8, 32, 32, 16, 32, 16, 16, 16, 16, 16, 1))
    total = flops_of_a_step(World(), "single", task)
    # Five times X X', its square, and a product with X.
    largest = 5 * 2 * 3 * 32**3
    work = on_ranks(ranks, flops_of_a_step, strategy, task)
    assert sum(work) == total
    assert max(work) <= total / ranks + largest
    assert min(work) > 0


def saved_or_resumed(world, strategy, folder, steps):
    more = ["--run.dir", str(folder), "--run.resume", "auto", "--train.global_batch_size", 24]
    run = run_of(world, strategy, *more)
    assert run.step == steps[0]
    tensors = stepped(run, steps)
    run.step = steps[-1] + 1
    save(run)
    return tensors


def test_a_run_resumes_on_other_ranks_and_strategies(tmp_path):
    expected = stepped(run_of(World(), "single"), range(4))
    on_ranks(2, saved_or_resumed, "fsdp", tmp_path, (0,))
    on_ranks(3, saved_or_resumed, "ddp", tmp_path, (1,))
    on_ranks(4, saved_or_resumed, "hsdp", tmp_path, (2,))
    for tensors in on_ranks(3, saved_or_resumed, "fsdp", tmp_path, (3,)):
        assert_equal(tensors, expected)


def columns_refused(world):
    mesh = init_device_mesh("cpu", (2,))
    matrix = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]))
    matrix.grad = torch.ones_like(matrix)
    with pytest.raises(ValueError, match=r"Muon takes matrices that are sharded by rows, once"):
        muon.Muon([{"params": [matrix]}]).step()


def test_matrices_that_are_sharded_otherwise_are_refused():
    on_ranks(2, columns_refused)
