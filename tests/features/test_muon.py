"""Muon: torch's numbers, on any ranks those of one process, and the work shared."""

import copy
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from optimizer_runs import Operations, Own, given_gradients, words
from ranks import on_ranks
from tiny import make_run, moments_of, parameters_of
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
    both = {"lr": 0.02, "weight_decay": 0.1}
    matrices, vectors = ([p for p in other.parameters() if p.ndim == ndim] for ndim in (2, 1))
    optimizers = [
        Muon([{"name": name, "params": [p]} for name, p in ours.named_parameters()], **both),
        torch.optim.Muon(matrices, momentum=0.95, adjust_lr_fn="match_rms_adamw", **both),
        torch.optim.AdamW(vectors, betas=(0.9, 0.95), fused=True, **both),
    ]
    for step in range(5):
        given_gradients(ours, step)
        given_gradients(other, step)
        for optimizer in optimizers:
            optimizer.step()
        for a, b in zip(ours.parameters(), other.parameters(), strict=True):
            # The momentum is the same, so the orthogonalised matrices are; two roundings of float32
            # per step differ.
            torch.testing.assert_close(a, b, rtol=0, atol=2**-22 * (step + 1))
    with pytest.raises(ValueError, match="use_muon=True is for a group of 2-D parameters only"):
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
    def build_model(self):
        pairs = pairwise(SIZES)
        return nn.Sequential(*(nn.Sequential(nn.Linear(*pair), nn.Tanh()) for pair in pairs))


def after_three_steps(world, strategy, at_once):
    """(parameters and moments; collectives, host reads and flops of the third step), with the same
    gradients everywhere.
    """
    run = make_run(world, Stack("muon"), *words("unused", strategy, "--use_amp", "false"))
    module = run.parallel.module
    with patch.object(muon, "ELEMENTS_AT_ONCE", at_once or muon.ELEMENTS_AT_ONCE):
        for step in range(2):
            given_gradients(module, step)
            if step == 1:
                module[1][0].weight.grad = None
            run.optimizer.step()
        given_gradients(module, 2)
        with Operations() as done, FlopCounterMode(display=False) as flops:
            run.optimizer.step()
    kinds = ("alltoall", "allgather", "_local_scalar_dense")
    counts = [sum(kind in name for name in done.names) for kind in kinds]
    tensors = [*parameters_of(run).values(), *moments_of(run)]
    return tensors, counts, flops.get_total_flops()


# (ranks, strategy, elements that are exchanged at once, all-to-alls and all-gathers of a step)
LAYOUTS = [
    (2, "ddp", None, [0, 1]),
    (3, "fsdp", None, [2, 0]),
    (4, "hsdp", None, [2, 1]),
    (2, "ddp", 100, [0, 3]),
    (2, "fsdp", 100, [6, 0]),
]


@pytest.mark.parametrize(("ranks", "strategy", "at_once", "collectives"), LAYOUTS)
def test_ranks_that_share_the_matrices_equal_one_process_bit_for_bit(
    ranks, strategy, at_once, collectives
):
    expected, none, total = after_three_steps(World(), "single", None)
    assert none == [0, 0, 0]
    results = on_ranks(ranks, after_three_steps, strategy, at_once)
    for tensors, counts, _ in results:
        for a, b in zip(tensors, expected, strict=True):
            # Each matrix is orthogonalised in one piece, and on a CPU alike in a batch of any size;
            # AdamW's kernel rounds a shard's tail differently.
            torch.testing.assert_close(a, b, rtol=0 if a.ndim == 2 else 2**-22, atol=0)
        assert counts == [*collectives, 0], "for all seven matrices, without a host read"
    # Each is orthogonalised once, and a rank takes its share and at most one more. The largest:
    # five times X X', its square, and a product with X.
    work = [flops for *_, flops in results]
    assert sum(work) == total
    assert max(work) <= total / ranks + 5 * 2 * 3 * 10**3
    assert min(work) > 0
