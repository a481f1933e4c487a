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
import torch.nn.functional as F
from ranks import on_ranks
from tiny import Rows, Tiny, make_run, save
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from dist_amp.distributed.process import seed_all
from dist_amp.scaling.meta import build_on_ranks, placement
from dist_amp.tasks.causal_lm import GPT


class Regression(Tiny):
    """Tiny's data for any model of [B, 8] -> [B, 1]."""

    def __init__(self, make, **options):
        super().__init__(**options)
        self.make = make

    def build_model(self):
        return self.make()


class Language:
    """Predict the next of 32 tokens. Batch: tokens [B, 9]."""

    def build_model(self):
        return GPT(32, 16, 16, 3, 2, tied=True)

    def build_dataset(self, split):
        return Rows(
            tokens=torch.randint(0, 32, (64, 9), generator=torch.Generator().manual_seed(1))
        )

    def loss_sum(self, model, batch):
        tokens = batch["tokens"]
        return F.cross_entropy(
            model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )

    def weight(self, batch):
        return batch["tokens"][:, 1:].numel()


class WithClassToken(nn.Module):
    """A custom initialisation, batch norm, and a tagged parameter outside of the layers."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.empty(8))
        nn.init.normal_(self.token)
        self.token.no_decay = True
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 1)
        self.apply(self.initialise)
        with torch.no_grad():
            self.head.weight[:, 0] = 0.5
        self.register_buffer("table", torch.arange(8.0).sin(), persistent=False)

    def initialise(self, part):
        if isinstance(part, nn.Linear):
            nn.init.orthogonal_(part.weight)

    def forward(self, x):
        x = x + self.token + self.table
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """Its layer keeps its parameters in a list too."""

    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(8, 8, num_layers=2)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.layers(x.unsqueeze(0))[0][0])


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


def listed():
    model = Mixer()
    model.weights = [model.head.weight]
    return model


def random_parameter():
    model = Mixer()
    model.token = nn.Parameter(torch.randn(4))
    return model


def seeded():
    torch.manual_seed(1)
    numpy.random.seed(1)  # noqa: NPY002
    random.seed(1)
    return Mixer()


def seeded_buffer():
    """Its buffer is drawn after its parameters, but from a generator that is seeded anew."""
    model = Mixer()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model.register_buffer("noise", torch.randn(4))
    model.register_buffer("order", torch.from_numpy(numpy.random.permutation(4)))  # noqa: NPY002
    return model


def drawn_before_seeding():
    model = Mixer()
    model.register_buffer("noise", torch.randn(4))
    torch.manual_seed(1)
    return model


def drawn_from_a_state_put_back():
    model = Mixer()
    state = torch.get_rng_state()
    torch.manual_seed(1)
    torch.set_rng_state(state)
    model.register_buffer("noise", torch.randn(4))
    return model


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


MODELS = {
    "tied": Language(),
    "class_token": Regression(WithClassToken),
    "recurrent": Regression(Recurrent),
}
FALLBACKS = {
    "value_dependent": (Regression(value_dependent), "meta"),
    "derived_buffer": (Regression(derived_buffer), "the buffer start is computed from parameters"),
    "random": (Regression(random_parameter), "it draws random numbers besides"),
    "before_seeding": (Regression(drawn_before_seeding), "it draws random numbers besides"),
    "state_put_back": (Regression(drawn_from_a_state_put_back), "it draws random numbers besides"),
    "one_generator": (Regression(drawn_from_one_generator), "it draws random numbers besides"),
    "listed": (Regression(listed), "something besides the model's modules refers to"),
}


def built(world, task):
    """Of build_on_ranks: which parameters are on meta, the buffers, and a parameter's attribute."""
    seed_all(0)
    module = build_on_ranks(task, world, False)
    on_meta = [p.is_meta for p in module.parameters()]
    placement(module, world)(module)
    return on_meta, dict(module.named_buffers()), getattr(module.token, "no_decay", False)


@pytest.mark.parametrize(
    ("name", "strategy", "ranks"),
    [("class_token", "fsdp", 2), ("recurrent", "fsdp", 2), ("tied", "hsdp", 4)],
)
def test_a_sharded_model_starts_with_the_bits_of_one_process(name, strategy, ranks):
    (expected,) = on_ranks(1, whole_state, MODELS[name], "single")
    for own in on_ranks(ranks, whole_state, MODELS[name], strategy):
        assert own.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(own[key], value), key


def test_only_rank_0_has_memory_for_parameters_and_buffers_are_real_everywhere():
    first, second = on_ranks(2, built, MODELS["class_token"])
    assert not any(first[0])
    assert all(second[0])
    assert first[1].keys() == second[1].keys()
    assert all(torch.equal(first[1][key], value) for key, value in second[1].items())
    assert first[2]
    assert second[2]


@pytest.mark.bad_input("a `build_model` that can't run on the meta device, under fsdp or hsdp")
@pytest.mark.parametrize("name", FALLBACKS)
def test_a_model_that_needs_its_parameters_is_built_whole_and_the_cost_is_said(name):
    task, why = FALLBACKS[name]
    (expected,) = on_ranks(1, whole_state, task, "single")
    (own, warnings), (other, none) = on_ranks(2, heard, task)
    for state in (own, other):
        assert all(torch.equal(state[key], value) for key, value in expected.items())
    assert "each of the 2 ranks holds the whole model" in warnings
    assert why in warnings
    assert not none


@pytest.mark.parametrize("make", [seeded, seeded_buffer])
def test_a_model_that_seeds_the_generators_is_still_drawn_by_rank_0_alone(make):
    (expected,) = on_ranks(1, whole_state, Regression(make), "single")
    for state, warnings in on_ranks(2, heard, Regression(make)):
        assert not warnings
        assert all(torch.equal(state[key], value) for key, value in expected.items())


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
