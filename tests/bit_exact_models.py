"""Models that bit-exact training is tried on; none was in mind when it was written."""

import random

import numpy
import torch
import torch.nn.functional as F
from tiny import Rows, Tiny
from torch import nn

WIDTH, TOKENS = 13, 37


class Blocks(Tiny):
    """Odd sizes, dropout, masks of other lengths per sample, two stacks of blocks, tied weights."""

    def __init__(self, samples: int = 75):
        super().__init__(samples=samples)

    def build_model(self):
        return OddModel()

    def blocks(self, model):
        return [*model.first, *model.second]

    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(self.seed + (split == "train"))
        tokens = torch.randint(0, TOKENS, (self.samples, 11), generator=generator)
        mask = torch.rand(self.samples, 11, generator=generator)  # weights that are no integers
        return (self.rows if split == "train" else Rows)(tokens=tokens, mask=mask)

    def loss_sum(self, model, batch):
        logits = model(batch["tokens"][:, :-1]).float()
        labels = batch["tokens"][:, 1:].flatten()
        losses = F.cross_entropy(logits.flatten(0, 1), labels, reduction="none")
        return (losses * batch["mask"][:, 1:].flatten()).sum()

    def weight(self, batch):
        return batch["mask"][:, 1:].sum()


class Block(nn.Module):
    def __init__(self, experts=3):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 7) for _ in range(experts))
        self.out = nn.Linear(7, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        y = self.norm(x)
        # Mostly one expert takes all: the others are idle in some micro-batches.
        scores = self.router(y.mean(dim=1)).float().softmax(-1)
        chosen = scores.sum(0).argmax().item()
        y = F.gelu(self.experts[chosen](y)) * scores[:, chosen, None, None].to(y.dtype)
        return x + self.dropout(self.out(y))


class OddModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.first = nn.ModuleList(Block() for _ in range(2))
        self.second = nn.ModuleList([Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in [*self.first, *self.second]:
            x = block(x)
        return self.head(self.norm(x))


class Noisy(Rows):
    def __getitem__(self, index):
        row = super().__getitem__(index)
        drawn = random.random() + numpy.random.random()  # noqa: NPY002 (as older tasks do)
        drawn += torch.rand(()).item()
        return row | {"mask": row["mask"] * drawn}


class Augmented(Blocks):
    """Draws from every global generator while samples are read."""

    rows = Noisy


class Convolutions(Tiny):
    """Images [B, 3, 9, 9]: convolutions and group norm."""

    def build_model(self):
        return nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.SiLU(), nn.Flatten(), nn.Linear(6 * 49, 5)
        )

    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(int(split == "train"))
        x = torch.randn(75, 3, 9, 9, generator=generator)
        y = torch.randint(0, 5, (75,), generator=generator)
        return Rows(x=x, y=y, counts=torch.ones(75))

    def loss_sum(self, model, batch):
        return F.cross_entropy(model(batch["x"]).float(), batch["y"], reduction="sum")


class Crossed(Blocks):
    """Blocks that all read one encoding, by keys and by values; an embedding with three uses."""

    def build_model(self):
        return EncoderDecoder()

    def blocks(self, model):
        return list(model.decoder)


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.keys = nn.Linear(WIDTH, WIDTH)
        self.values = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, encoding=None):
        weights = (x @ self.keys(encoding).transpose(1, 2)).softmax(-1)
        return x + weights @ self.values(encoding)


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(Reads() for _ in range(3))

    def forward(self, tokens):
        encoding = self.norm(self.embedding(tokens))
        x = self.embedding(tokens.flip(1))
        for block in self.decoder:
            x = block(x, encoding=encoding)
        return F.linear(x, self.embedding.weight)
