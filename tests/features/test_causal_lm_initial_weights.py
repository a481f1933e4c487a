"""Core as test_initial_weights.py tests it, with causal_lm."""

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from test_initial_weights import Regression, whole_state
from tiny import Rows
from torch import nn

from dist_amp.distributed.process import seed_all
from dist_amp.scaling.meta import build_on_ranks, placement
from dist_amp.tasks.causal_lm import GPT


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


MODELS = {
    "tied": Language(),
    "class_token": Regression(WithClassToken),
    "recurrent": Regression(Recurrent),
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
