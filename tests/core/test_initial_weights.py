"""A sharded model's initial weights: drawn by rank 0 alone, in no other rank's memory as a whole,
the same bits.
"""

import gc
import io
import random
from contextlib import redirect_stderr
from pathlib import Path

import numpy
import pytest
import torch
from ranks import on_ranks
from tiny import Changed, Tiny, make_run, parameters_of, save
from torch import nn

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


def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def growth(world, task, folder, saves):
    """By how many bytes the resident memory grows at most while a run is built."""
    make_run(world, Tiny(), "--parallel.strategy", "fsdp")  # what torch allocates once
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew; source: proc(5)
    before = peak_bytes()
    words = ["--run.dir", folder, "--run.resume", "auto", "--parallel.strategy", "fsdp"]
    run = make_run(world, task, *words, "--optim.name", "sgd", "--optim.momentum", 0)
    grown = peak_bytes() - before
    if saves:
        run.step = 1
        save(run)
    return grown, run.resumed_from_step


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no /proc")
def test_only_rank_0_ever_holds_more_than_its_shards_and_one_block(tmp_path):
    task, block = Wide(), 4 * Wide.WIDTH**2
    model = 4 * block
    (first, _), (second, _) = on_ranks(2, growth, task, tmp_path / "run", True)
    # Rank 0 drew them all; some go into memory that earlier tests have freed.
    assert first > model / 2
    # Half of a block for what Python and the file cache take; a rank that holds all needs more than
    # 4 blocks.
    assert second < model / 2 + 1.5 * block
    (first, step), (second, _) = on_ranks(2, growth, task, tmp_path / "run", False)
    assert step == 1
    # Resumed, neither does: both read the shards from the file.
    assert max(first, second) < model
