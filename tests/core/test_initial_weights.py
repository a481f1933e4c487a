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
from tiny import Tiny, make_run, save
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict


class Regression(Tiny):
    """Tiny's data for any model of [B, 8] -> [B, 1]."""

    def __init__(self, make, **options):
        super().__init__(**options)
        self.make = make

    def build_model(self):
        return self.make()


class Mixer(nn.Module):
    """Layers that are used out of a plain list of their weights too."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def value_dependent():
    model = Mixer()
    if model.head.weight.sum().item() < 100:
        model.head.bias.data.fill_(3.0)
    return model


def derived_buffer():
    model = Mixer()
    model.register_buffer("start", model.head.weight.detach().clone())
    return model


def seeded():
    torch.manual_seed(1)
    numpy.random.seed(1)  # noqa: NPY002
    random.seed(1)
    return Mixer()


def drawn_from_one_generator():
    generator = torch.Generator().manual_seed(1)
    model = Mixer()
    nn.init.normal_(model.head.weight, generator=generator)
    model.register_buffer("noise", torch.randn(4, generator=generator))
    return model


def whole_state(world, task, strategy, *words):
    """Every parameter and buffer of a new run, whole, in the names of the state."""
    run = make_run(world, task, "--parallel.strategy", strategy, "--use_amp", "false", *words)
    state = get_model_state_dict(run.model, options=StateDictOptions(full_state_dict=True))
    state |= {f"buffer {name}": value for name, value in run.parallel.module.named_buffers()}
    return {name: value.clone() for name, value in state.items()}


def heard(world, task):
    """`whole_state`, and what was printed as a warning."""
    with redirect_stderr(io.StringIO()) as output:
        state = whole_state(world, task, "fsdp")
    return state, output.getvalue()


FALLBACKS = {
    value_dependent: "meta",
    derived_buffer: "the buffer start is computed from parameters",
    drawn_from_one_generator: "it draws random numbers besides",
}


@pytest.mark.bad_input("a `build_model` that can't run on the meta device, under fsdp or hsdp")
@pytest.mark.parametrize("make", [*FALLBACKS, seeded])
def test_a_model_is_drawn_by_rank_0_alone_or_built_whole_at_a_cost_that_is_said(make):
    (expected,) = on_ranks(1, whole_state, Regression(make), "single")
    (own, warnings), (other, none) = on_ranks(2, heard, Regression(make))
    for state in (own, other):
        assert all(torch.equal(state[key], value) for key, value in expected.items())
    assert ("each of the 2 ranks holds the whole model" in warnings) == (make in FALLBACKS)
    assert FALLBACKS.get(make, "") in warnings
    assert not none


class Wide(Regression):
    """Four blocks of 64 MiB: what malloc gives back to the system at once, half of one too."""

    WIDTH = 4096

    def build_model(self):
        layers = [
            nn.Sequential(nn.Linear(self.WIDTH, self.WIDTH, bias=False), nn.ReLU())
            for _ in range(4)
        ]
        return nn.Sequential(*layers, nn.Linear(self.WIDTH, 1))

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
    words += ["--optim.name", "sgd"]
    run = make_run(world, task, *words, "--optim.momentum", 0)
    grown = peak_bytes() - before
    if saves:
        run.step = 1
        save(run)
    return grown, run.resumed_from_step


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no /proc")
def test_only_rank_0_ever_holds_more_than_its_shards_and_one_block(tmp_path):
    task, block = Wide(None), 4 * Wide.WIDTH**2
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
