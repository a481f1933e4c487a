"""Embedding and head may be units of FSDP2; without that, they may be used in any way."""

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from tiny import Rows, make_run, parameters_of, save, take_steps
from torch import nn

from dist_amp.world import World

VOCABULARY, WIDTH = 64, 16


class Text(nn.Module):
    """tokens [B, T] -> logits [B, T, VOCABULARY]; `ends` turns the last hidden state into them."""

    def __init__(self, ends):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.ends = ends

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.ends(self, self.norm(x))


def called(model, x):
    return model.head(x)


def embedded_again(model, x):
    """The embedding is called twice, and lies twice in the graph of one backward."""
    return model.head(x + model.embedding(x.argmax(-1)))


def by_the_embedding(model, x):
    """Tied in the forward, and as fused losses do: the head itself is never called."""
    return F.linear(x, model.embedding.weight) + model.head.bias + 0 * model.head.weight.sum()


class Task:
    def __init__(self, ends=called, units=()):
        self.ends, self.names = ends, units

    def build_model(self):
        return Text(self.ends)

    def blocks(self, model):
        return list(model.layers)

    def units(self, model):
        return [getattr(model, name) for name in self.names]

    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(1)
        return Rows(tokens=torch.randint(0, VOCABULARY, (64, 9), generator=generator))

    def loss_sum(self, model, batch):
        logits = model(batch["tokens"][:, :-1]).float()
        targets = batch["tokens"][:, 1:].flatten()
        return F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")

    def weight(self, batch):
        return batch["tokens"][:, 1:].numel()


BOTH = ("embedding", "head")
FEW = ["--use_amp", "false", "--optim.lr", 0.01, "--train.global_batch_size", 16]
FEW += ["--train.micro_batch_size", 4]


def trained(world, task, strategy, folder):
    """The parameters after four steps, and a save right after a forward without a backward."""
    run = make_run(world, task, "--parallel.strategy", strategy, "--run.dir", folder, *FEW)
    take_steps(run, 3)
    with run.parallel.evaluating():
        run.model(next(run.data)[0]["tokens"])
    assert save(run).name == "step_00000003", "it holds every moment"
    take_steps(run, 1)
    return parameters_of(run)


@pytest.mark.parametrize(
    ("ends", "units"),
    [(called, BOTH), (embedded_again, BOTH), (by_the_embedding, ())],
)
def test_a_head_trains_as_in_one_process_however_it_is_used_and_whatever_precedes_a_save(
    ends, units, tmp_path
):
    expected = trained(World(), Task(ends), "single", tmp_path / "alone")
    for own in on_ranks(2, trained, Task(ends, units), "fsdp", tmp_path / "ranks"):
        for name, value in expected.items():
            # Four steps of AdamW in float32, whose sums have another order on two ranks.
            torch.testing.assert_close(own[name], value, rtol=1e-4, atol=1e-5, msg=name)
