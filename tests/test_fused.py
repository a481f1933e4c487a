"""The fused kernels, called on lists that are made once, do what torch's own optimizers do."""

import copy

import pytest
import torch
from ranks import on_ranks
from tiny import Tiny, make_run, moments_of, parameters_of, take_steps
from torch import nn

from dist_amp.fast.fused import FusedAdamW, FusedSGD
from dist_amp.optim import build_optimizer
from dist_amp.settings import OptimConfig

CONFIGS = {
    "adamw": OptimConfig(lr=0.01),
    "sgd": OptimConfig(name="sgd", lr=0.01),
    "sgd without momentum": OptimConfig(name="sgd", lr=0.01, momentum=0.0),
}


def two_of_them(config):
    """(model, ours), (model, torch's): equal models, and each one's optimizer."""
    ours = Tiny().build_model()
    theirs = copy.deepcopy(ours)
    mine = build_optimizer(ours, config)
    for group in mine.param_groups:
        group["lr"] = torch.tensor(config.lr)
    groups = [
        {"params": [p for p in theirs.parameters() if (p.ndim >= 2) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    if config.name == "adamw":
        torchs = torch.optim.AdamW(groups, lr=torch.tensor(config.lr), betas=config.betas, eps=config.eps, fused=True)
    else:
        torchs = torch.optim.SGD(groups, lr=torch.tensor(config.lr), momentum=config.momentum, fused=True)
    return (ours, mine), (theirs, torchs)


def give_gradients(models, seed, without=()):
    for model in models:
        generator = torch.Generator().manual_seed(seed)
        for name, p in model.named_parameters():
            gradient = torch.randn(p.shape, generator=generator)
            p.grad = None if name in without else gradient


def weights_are_equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("name", list(CONFIGS))
def test_five_steps_are_torchs_own_bit_for_bit_also_where_gradients_are_missing(name):
    (ours, mine), (theirs, torchs) = two_of_them(CONFIGS[name])
    for seed in range(5):
        without = ("0.0.weight", "2.bias") if seed in (1, 2) else ()
        give_gradients((ours, theirs), seed, without)
        mine.step()
        torchs.step()
        assert weights_are_equal(ours, theirs), seed


def test_a_parameter_that_rests_keeps_its_own_count_of_steps():
    (ours, mine), _ = two_of_them(CONFIGS["adamw"])
    counts = lambda: [mine.state[p]["step"].item() for p in ours.parameters()]  # noqa: E731
    give_gradients([ours], 0)
    mine.step()
    assert len({id(mine.state[p]["step"]) for p in ours.parameters()}) == 1, "one count serves all"
    give_gradients([ours], 1, without=("0.0.weight",))
    mine.step()
    assert counts() == [1.0] + [2.0] * (len(counts()) - 1)
    give_gradients([ours], 2)
    mine.step()
    assert counts() == [2.0] + [3.0] * (len(counts()) - 1)


def test_a_loaded_state_is_the_one_that_is_stepped():
    (ours, mine), (theirs, torchs) = two_of_them(CONFIGS["adamw"])
    give_gradients((ours, theirs), 0)
    mine.step()
    torchs.step()
    saved = copy.deepcopy(torchs.state_dict())
    for group, other in zip(saved["param_groups"], mine.param_groups, strict=True):
        group["name"] = other["name"]
    mine.load_state_dict(saved)
    for seed in (1, 2):
        give_gradients((ours, theirs), seed)
        mine.step()
        torchs.step()
    assert weights_are_equal(ours, theirs)
    assert all(mine.state[p]["step"] == 3 for p in ours.parameters())


@pytest.mark.parametrize("kind", [FusedAdamW, FusedSGD])
def test_hooks_of_a_step_are_called_around_it(kind):
    config = CONFIGS["adamw" if kind is FusedAdamW else "sgd"]
    (ours, mine), _ = two_of_them(config)
    assert type(mine) is kind
    seen = []
    mine.register_step_pre_hook(lambda optimizer, *_: seen.append(next(ours.parameters()).detach().clone()))
    mine.register_step_post_hook(lambda optimizer, *_: seen.append(next(ours.parameters()).detach().clone()))
    give_gradients([ours], 0)
    mine.step()
    before, after = seen
    assert not torch.equal(before, after)
    assert torch.equal(after, next(ours.parameters()))


def test_parameters_of_two_dtypes_are_updated_by_two_kernels():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16))
    optimizer, before = build_optimizer(model, OptimConfig(lr=0.1)), copy.deepcopy(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before.parameters(), model.parameters(), strict=True))


def sharded_steps(world, fused):
    run = make_run(world, Tiny(), "--parallel.strategy", "fsdp", "--optim.fused", fused, "--use_amp", "false")
    take_steps(run, 4)
    return parameters_of(run), moments_of(run)


def test_shards_are_updated_as_the_textbook_path_updates_them():
    for (ours, own), (theirs, their) in zip(
        on_ranks(2, sharded_steps, "true"), on_ranks(2, sharded_steps, "false"), strict=True
    ):
        for a, b in zip([*ours.values(), *own], [*theirs.values(), *their], strict=True):
            # The kernel and the loop of torch's operations round in another order.
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
