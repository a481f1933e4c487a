"""A sharded model's initial weights: drawn by rank 0 alone, in no other rank's memory as a whole,
the same bits.
"""

import gc
import io
import random
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import numpy
import pytest
import torch
from ranks import on_ranks
from tiny import Changed, Tiny, make_run, parameters_of, save
from torch import nn

from dist_amp.telemetry.metrics import resident_bytes
from dist_amp.world import World


def value_dependent(model):
    if model[-1].weight.sum().item() < 100:
        model[-1].bias.data.fill_(3.0)


def derived_buffer(model):
    model.register_buffer("start", model[-1].weight.detach().clone())


def drawn_from_one_generator(model):
    generator = torch.Generator().manual_seed(1)
    nn.init.normal_(model[-1].weight, generator=generator)
    model.register_buffer("noise", torch.randn(4, generator=generator))


def drawn_after_own_seeds(model):
    torch.manual_seed(1)
    numpy.random.seed(1)  # noqa: NPY002
    random.seed(1)
    nn.init.normal_(model[-1].weight)


def whole_state(world, change, strategy):
    """Every parameter and buffer of a new run, whole, and what was printed as a warning."""
    words = ("--parallel.strategy", strategy, "--use_amp", "false")
    with redirect_stderr(io.StringIO()) as printed:
        run = make_run(world, Changed(change), *words)
    state = parameters_of(run) | dict(run.parallel.module.named_buffers())
    return {name: value.clone() for name, value in state.items()}, printed.getvalue()


FALLBACKS = {
    value_dependent: "meta",
    derived_buffer: "the buffer start is computed from parameters",
    drawn_from_one_generator: "it draws random numbers besides",
}


@pytest.mark.bad_input("a `build_model` that can't run on the meta device, under fsdp or hsdp")
@pytest.mark.parametrize("change", [*FALLBACKS, drawn_after_own_seeds])
def test_a_model_is_drawn_by_rank_0_alone_or_built_whole_at_a_cost_that_is_said(change):
    expected, _ = whole_state(World(), change, "single")
    (own, warnings), (other, none) = on_ranks(2, whole_state, change, "fsdp")
    for state in (own, other):
        assert all(torch.equal(state[key], value) for key, value in expected.items())
    assert ("each of the 2 ranks holds the whole model" in warnings) == (change in FALLBACKS)
    assert FALLBACKS.get(change, "") in warnings
    assert not none


class Wide(Tiny):
    """Four blocks of 64 MiB: what malloc gives back to the system at once, half of one too."""

    WIDTH = 4096

    def build_model(self):
        width = self.WIDTH
        layers = [nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU()) for _ in range(4)]
        return nn.Sequential(*layers, nn.Linear(width, 1))

    def blocks(self, model):
        return list(model[:4])


class Narrower(Wide):
    """Of 33 MiB, in shapes of its own: memory that earlier tests have freed fits none of them."""

    WIDTH = 1472


@contextmanager
def growth():
    """A list that gets, after the block, the bytes by which the resident memory grew at most."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew; source: proc(5)
    before, _ = resident_bytes()
    found = []
    yield found
    found.append(resident_bytes()[0] - before)


def growth_of_the_build(world, task, folder, saves):
    make_run(world, Tiny(), "--parallel.strategy", "fsdp")  # what torch allocates once
    words = ["--run.dir", folder, "--run.resume", "auto", "--parallel.strategy", "fsdp"]
    with growth() as grown:
        run = make_run(world, task, *words, "--optim.name", "sgd", "--optim.momentum", 0)
    if saves:
        run.step = 1
        save(run)
    return grown[0], run.resumed_from_step


def growth_in_the_first_update(world, task):
    run = make_run(world, task, "--parallel.strategy", "fsdp", "--use_amp", "false")
    run.model(torch.zeros(2, task.WIDTH)).sum().backward()
    with growth() as grown:
        run.optimizer.step()
    return grown[0]


needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no /proc")


@needs_proc
def test_only_rank_0_ever_holds_more_than_its_shards_and_one_block(tmp_path):
    task, block = Wide(), 4 * Wide.WIDTH**2
    model = 4 * block
    (first, _), (second, _) = on_ranks(2, growth_of_the_build, task, tmp_path / "run", True)
    # Rank 0 drew them all; some go into memory that earlier tests have freed.
    assert first > model / 2
    # Half of a block for what Python and the file cache take; a rank that holds all needs more than
    # 4 blocks.
    assert second < model / 2 + 1.5 * block
    (first, step), (second, _) = on_ranks(2, growth_of_the_build, task, tmp_path / "run", False)
    assert step == 1
    # Resumed, neither does: both read the shards from the file.
    assert max(first, second) < model


@needs_proc
def test_the_first_sharded_update_takes_no_memory_of_the_whole_models_size():
    # Zeros of parameters, gradients and two moments would take four times the model; a rank's
    # moments take it once.
    for grown in on_ranks(2, growth_in_the_first_update, Narrower()):
        assert grown < 2 * 4 * 4 * Narrower.WIDTH**2
