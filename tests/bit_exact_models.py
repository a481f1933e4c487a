"""Models that bit-exact training is tried on; none was in mind when it was written."""

import random

import numpy
import torch
import torch.nn.functional as F
from tiny import Rows, Tiny
from torch import nn


class Blocks(Tiny):
    """Odd sizes, dropout, masks of other lengths per sample, two stacks of blocks, tied weights."""

    width = 13

    def __init__(self, samples: int = 75, dropout: float = 0.1):
        super().__init__(samples=samples)
        self.dropout = dropout

    def build_model(self):
        return OddModel(self.width, self.dropout)

    def blocks(self, model):
        return [*model.first, *model.second]

    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(self.seed + (split == "train"))
        tokens = torch.randint(0, 37, (self.samples, 11), generator=generator)
        mask = torch.rand(self.samples, 11, generator=generator)  # weights that are no integers
        return Rows(tokens=tokens, mask=mask)

    def loss_sum(self, model, batch):
        logits = model(batch["tokens"][:, :-1]).float()
        losses = F.cross_entropy(
            logits.flatten(0, 1), batch["tokens"][:, 1:].flatten(), reduction="none"
        )
        return (losses * batch["mask"][:, 1:].flatten()).sum()

    def weight(self, batch):
        return batch["mask"][:, 1:].sum()


class Block(nn.Module):
    def __init__(self, width, dropout, experts=3):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, 7) for _ in range(experts))
        self.out = nn.Linear(7, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        y = self.norm(x)
        # Mostly one expert takes all: the others are idle in some micro-batches.
        scores = self.router(y.mean(dim=1)).float().softmax(-1)
        chosen = scores.sum(0).argmax().item()
        y = F.gelu(self.experts[chosen](y)) * scores[:, chosen, None, None].to(y.dtype)
        return x + self.dropout(self.out(y))


class OddModel(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.embedding = nn.Embedding(37, width)
        self.first = nn.ModuleList(Block(width, dropout) for _ in range(2))
        self.second = nn.ModuleList(Block(width, dropout) for _ in range(1))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 37, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in [*self.first, *self.second]:
            x = block(x)
        return self.head(self.norm(x))


class Augmented(Blocks):
    """Draws from every global generator while samples are read."""

    def build_dataset(self, split):
        rows = super().build_dataset(split)
        if split == "train":
            return Noisy(rows)
        return rows


class Noisy:
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        drawn = random.random() + numpy.random.random() + torch.rand(()).item()
        return row | {"mask": row["mask"] * drawn}


class Convolutions(Tiny):
    """Images [B, 3, 9, 9], group norm, a scalar that is trained, double backward."""

    def build_model(self):
        return nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.SiLU(), nn.Flatten(), nn.Linear(6 * 49, 5)
        )

    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(int(split == "train"))
        x = torch.randn(75, 3, 9, 9, generator=generator)
        return Rows(x=x, y=torch.randint(0, 5, (75,), generator=generator))

    def loss_sum(self, model, batch):
        return F.cross_entropy(model(batch["x"]).float(), batch["y"], reduction="sum")

    def weight(self, batch):
        return len(batch["y"])
