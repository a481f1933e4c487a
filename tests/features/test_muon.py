"""Muon: torch's numbers, on any ranks those of one process, and the work shared."""

import copy
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from optimizer_runs import Counter, given_gradients, words
from own_optimizers import Own
from ranks import on_ranks
from tiny import make_run, moments_of, parameters_of, save
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dist_amp.optim import build_optimizer
from dist_amp.optimizers import muon
from dist_amp.optimizers.muon import Muon
from dist_amp.precision import takes_grad_scale
from dist_amp.settings import OptimConfig
from dist_amp.world import World

# ---- in one process ----


def test_muon_gives_the_numbers_of_torchs_own_on_matrices_and_of_adamw_on_the_others():
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8))
    other = copy.deepcopy(ours)

    def split(model):
        parameters = list(model.parameters())
        return [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim == 1]

    groups = [{"name": str(n), "params": ps} for n, ps in enumerate(split(ours))]
    mine = Muon(groups, lr=0.02, weight_decay=0.1)
    matrices, vectors = split(other)
    both = {"lr": 0.02, "weight_decay": 0.1}
    torchs = [
        torch.optim.Muon(matrices, momentum=0.95, adjust_lr_fn="match_rms_adamw", **both),
        torch.optim.AdamW(vectors, betas=(0.9, 0.95), fused=True, **both),
    ]
    for step in range(5):
        given_gradients(ours, step)
        given_gradients(other, step)
        for optimizer in (mine, *torchs):
            optimizer.step()
        for a, b in zip(ours.parameters(), other.parameters(), strict=True):
            # The momentum is the same, so the orthogonalised matrices are; two roundings of float32
            # per step differ.
            torch.testing.assert_close(a, b, rtol=0, atol=2**-22 * (step + 1))
    with pytest.raises(ValueError, match=r"Muon takes matrices, not a parameter of shape \[8\]"):
        Muon([{"params": [nn.Parameter(torch.ones(8))], "use_muon": True}])


@pytest.mark.parametrize("fused", [True, False])
def test_optim_name_muon_orthogonalises_hidden_matrices_alone(fused):
    layers = {"embedding": nn.Embedding(4, 8), "hidden": nn.Linear(8, 8), "head": nn.Linear(8, 1)}
    model = nn.ModuleDict(layers)
    optimizer = build_optimizer(model, OptimConfig(name="muon", fused=fused))
    assert takes_grad_scale(optimizer) == fused
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {
        group["name"]: [group["use_muon"], *(names[id(p)] for p in group["params"])]
        for group in optimizer.param_groups
    }
    assert groups == {
        "hidden matrices": [True, "hidden.weight"],
        "matrices": [False, "embedding.weight", "head.weight"],
        "vectors": [False, "hidden.bias", "head.bias"],
    }


# ---- on several ranks ----

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
    return [*parameters_of(run).values(), *moments_of(run)], [all_to_alls.count, gathers.count]


def assert_equal(tensors, expected):
    for a, b in zip(tensors, expected, strict=True):
        # Each matrix is orthogonalised in one piece, and on a CPU alike in a batch of any size;
        # AdamW's kernel rounds a shard's tail differently.
        rtol = 0 if a.ndim == 2 else 2**-22
        torch.testing.assert_close(a, b, rtol=rtol, atol=0)


# (ranks, strategy, elements that are exchanged at once, all-to-alls and all-gathers of a step)
LAYOUTS = [
    (2, "ddp", None, [0, 1]),
    (3, "ddp", None, [0, 1]),
    (2, "fsdp", None, [2, 0]),
    (3, "fsdp", None, [2, 0]),
    (4, "hsdp", None, [2, 1]),
    (2, "ddp", 100, [0, 3]),
    (2, "fsdp", 100, [6, 0]),
]


@pytest.mark.parametrize(("ranks", "strategy", "at_once", "collectives"), LAYOUTS)
def test_ranks_that_share_the_matrices_equal_one_process_bit_for_bit(
    ranks, strategy, at_once, collectives
):
    expected, none = after_three_steps(World(), "single")
    assert none == [0, 0]
    for tensors, counts in on_ranks(ranks, after_three_steps, strategy, at_once):
        assert_equal(tensors, expected)
        assert counts == collectives, "for all seven matrices"


def flops_of_a_step(world, strategy, task):
    run = run_of(world, strategy, task=task)
    given_gradients(run.parallel.module, 0)
    with FlopCounterMode(display=False) as counter:
        run.optimizer.step()
    return counter.get_total_flops()


@pytest.mark.parametrize(("ranks", "strategy"), [(3, "ddp"), (2, "fsdp"), (4, "hsdp")])
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
    on_ranks(4, saved_or_resumed, "ddp", tmp_path, (1,))
    on_ranks(4, saved_or_resumed, "hsdp", tmp_path, (2,))
    for tensors in on_ranks(2, saved_or_resumed, "fsdp", tmp_path, (3,)):
        assert_equal(tensors, expected)
