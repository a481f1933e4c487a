"""Embedding and head are units of FSDP2 of their own, however a model uses their weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from tiny import Rows, make_run, parameters_of, take_steps
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from dist_amp.config.auto import find_ends
from dist_amp.errors import DataError
from dist_amp.runtime.block_calls import BlockCalls
from dist_amp.verify.collectives import Counting

VOCABULARY, WIDTH = 64, 16


class Text(nn.Module):
    """tokens [B, T] -> logits [B, T, VOCABULARY]; `ends` turns the last hidden state into them."""

    def __init__(self, ends: Callable[..., Any]):
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


def direct(model, x):
    """As fused losses do: the head itself is never called."""
    return F.linear(x, model.head.weight, model.head.bias)


def chunked(model, x):
    return torch.cat([checkpoint(model.head, part, use_reentrant=False) for part in x.split(3, dim=1)], 1)


def by_the_embedding(model, x):
    """Tied in the forward: the embedding is called, and its weight is used again."""
    return F.linear(x, model.embedding.weight) + model.head.bias + 0 * model.head.weight.sum()


def only_on_rank_0(model, x):
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return model.head(x) if rank == 0 else direct(model, x)


class Task:
    def __init__(self, ends=called):
        self.ends = ends

    def build_model(self):
        return Text(self.ends)

    def blocks(self, model):
        return list(model.layers)

    def build_dataset(self, split):
        return Rows(tokens=torch.randint(0, VOCABULARY, (64, 9), generator=torch.Generator().manual_seed(1)))

    def loss_sum(self, model, batch):
        logits = model(batch["tokens"][:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten(), reduction="sum")

    def weight(self, batch):
        return batch["tokens"][:, 1:].numel()


FEW = ["--use_amp", "false", "--optim.lr", 0.01, "--train.global_batch_size", 16, "--train.micro_batch_size", 4]


def trained(world, ends, strategy, *words):
    run = make_run(world, Task(ends), "--parallel.strategy", strategy, *FEW, *words)
    take_steps(run, 4)
    return parameters_of(run)


@pytest.mark.parametrize("ends", [called, direct, chunked, by_the_embedding, only_on_rank_0])
def test_a_head_trains_as_in_one_process_however_it_is_used(ends):
    (expected,) = on_ranks(1, trained, ends, "single")
    for own in on_ranks(2, trained, ends, "fsdp"):
        for name, value in expected.items():
            # Four steps of AdamW in float32, whose sums have another order on two ranks.
            torch.testing.assert_close(own[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_a_head_used_by_chunks_is_reduced_once_per_step():
    assert on_ranks(2, reductions, chunked)[0][-1].count(head_bytes()) == 1


class Reductions(Counting):
    """The bytes of each reduce-scatter, in their order."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = self.collectives.copy()
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.sizes += [one.bytes_in for one in self.collectives - before if one.kind == "reduce_scatter"]
        return result


def head_bytes():
    return 4 * (VOCABULARY * WIDTH + VOCABULARY)


def reductions(world, ends):
    """Per step, the bytes of each reduce-scatter, in their order."""
    run = make_run(world, Task(ends), "--parallel.strategy", "fsdp", *FEW, "--train.micro_batch_size", 8)
    steps = []
    for _ in range(3):
        with Reductions() as counting:
            take_steps(run, 1)
        steps.append(counting.sizes)
    return steps


def test_a_heads_gradient_is_reduced_before_those_of_the_blocks():
    """From the second step on: the first shows that every rank calls it once."""
    first, second, third = on_ranks(2, reductions, called)[0]
    assert first[0] != head_bytes()
    assert second[0] == third[0] == head_bytes()
    assert sorted(first) == sorted(second)


def units(world):
    run = make_run(world, Task(), "--parallel.strategy", "fsdp")
    return [name for name, part in run.parallel.module.named_modules() if isinstance(part, FSDPModule)]


def test_embedding_and_head_are_units_of_their_own():
    assert on_ranks(2, units)[0] == ["", "embedding", "layers.0", "layers.1", "layers.2", "head"]


def test_shared_frozen_small_and_several_heads_stay_with_the_root():
    def ends_of(change):
        model = Text(called)
        change(model)
        ends = find_ends(model, list(model.layers))
        return [name for name, part in model.named_modules() if part in ends]

    assert ends_of(lambda model: None) == ["embedding", "head"]
    assert ends_of(lambda model: setattr(model.head, "weight", model.embedding.weight)) == []
    assert ends_of(lambda model: setattr(model, "other", nn.Linear(WIDTH, VOCABULARY))) == ["embedding"]
    assert ends_of(lambda model: model.embedding.requires_grad_(False)) == ["head"]
    assert ends_of(lambda model: setattr(model, "head", nn.Linear(WIDTH, 1))) == ["embedding"]


class Release:
    def __init__(self):
        self.released = []

    def release(self, end):
        self.released.append(end)


def test_a_head_that_was_called_once_must_be_called_from_then_on():
    model, release = Text(called), Release()
    BlockCalls(model, [], 1, find_ends(model, list(model.layers)), release)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    for _ in range(2):
        model(tokens)
    assert release.released == [model.embedding, model.head]
    model.ends = direct
    with pytest.raises(DataError, match="rank 1: the model's forward did not call its block head"):
        model(tokens)
