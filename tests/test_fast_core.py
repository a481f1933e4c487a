"""What torch's private APIs make fast works without them too, with the same results."""

import pytest
import torch
from ranks import on_ranks
from tiny import Tiny, make_run, parameters_of, take_steps

from dist_amp.fast import autocast_cache, fused, kernels


def steps_without(world, strategy, words, without):
    """Parameters after four steps, with some of torch's private functions taken away."""
    private = {
        "kernels": [(fused, "_adamw_kernel"), (fused, "_sgd_kernel")],
        "norms": [(kernels, "_foreach_norm"), (kernels, "_amp_update_scale")],
        "cache": [(autocast_cache, "_raise")],
        "nothing": [],
    }[without]
    kept = [(module, name, getattr(module, name)) for module, name in private]
    for module, name in private:
        setattr(module, name, None)
    try:
        run = make_run(world, Tiny(uneven=True), "--parallel.strategy", strategy, "--optim.lr", 0.01, *words)
        take_steps(run, 4)
        return parameters_of(run)
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


@pytest.mark.parametrize("without", ["kernels", "norms", "cache"])
@pytest.mark.parametrize("words", [["--precision.dtype", "fp16"], ["--use_amp", "false", "--optim.name", "sgd"]])
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "fsdp")])
def test_without_torchs_private_functions_the_steps_are_the_same(ranks, strategy, words, without):
    words = [*words, "--train.accumulation_steps", 2, "--train.micro_batch_size", 2]
    for a, b in zip(
        on_ranks(ranks, steps_without, strategy, words, "nothing"),
        on_ranks(ranks, steps_without, strategy, words, without),
        strict=True,
    ):
        for name in a:
            # Norms and updates round in another order: lr 0.01 x 2^-23 x a few, over four steps.
            torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-7)
