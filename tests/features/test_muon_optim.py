"""Core as test_optim.py tests it, with muon."""

import copy

import pytest
import torch
from optimizer_runs import given_gradients
from test_optim import Grouped
from tiny import make_run
from torch import nn

from dist_amp.optim import build_optimizer
from dist_amp.optimizers.muon import Muon
from dist_amp.precision import takes_grad_scale
from dist_amp.settings import OptimConfig
from dist_amp.world import World


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (None, {"betas": (0.8, 0.9), "eps": 1e-6}),
        (Muon, {"use_muon": False, "betas": (0.8, 0.9)}),
    ],
)
def test_a_group_takes_the_options_of_its_optimizer(make, options):
    groups = [
        {"name": "all", "params": ["*.weight"], **options},
        {"name": "biases", "params": "*.bias"},
    ]
    run = make_run(World(), Grouped(lambda model: groups, make))
    assert {key: run.optimizer.param_groups[0][key] for key in options} == options


# Muon.


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
    config = OptimConfig(name="muon", fused=fused)
    layers = {"embedding": nn.Embedding(4, 8), "hidden": nn.Linear(8, 8), "head": nn.Linear(8, 1)}
    model = nn.ModuleDict(layers)
    optimizer = build_optimizer(model, config)
    assert takes_grad_scale(optimizer) == fused
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {
        group["name"]: [names[id(p)] for p in group["params"]] for group in optimizer.param_groups
    }
    assert groups == {
        "hidden matrices": ["hidden.weight"],
        "matrices": ["embedding.weight", "head.weight"],
        "vectors": ["hidden.bias", "head.bias"],
    }
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False, False]
