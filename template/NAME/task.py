"""An example to replace: a small language model of Python's standard library."""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Pre-norm transformer block: [B, T, width] -> [B, T, width]."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    """bytes [B, T] int64 -> logits [B, T, 256]; T is at most `context`."""

    def __init__(self, context: int, width: int, layers: int, heads: int):
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = self.bytes(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Example:
    """Predict the next byte. Batch: [B, context + 1] uint8."""

    def __init__(self, context: int = 128, width: int = 128, layers: int = 2, heads: int = 4):
        self.context = context
        self.shape = (context, width, layers, heads)

    def build_model(self) -> nn.Module:
        return GPT(*self.shape)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Modules that FSDP2 shards, and gathers one at a time."""
        return list(model.blocks)  # type: ignore[arg-type]

    def build_dataset(self, split: str) -> Tensor:
        """Rows of context + 1 bytes, [rows, context + 1] uint8; every twentieth is held out."""
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, paths))), dtype=torch.uint8)
        rows = text[: len(text) // (self.context + 1) * (self.context + 1)]
        rows = rows.view(-1, self.context + 1)
        held_out = torch.arange(len(rows)) % 20 == 0
        return rows[held_out if split == "validation" else ~held_out]

    def loss_sum(self, model: nn.Module, batch: Tensor) -> Tensor:
        logits = model(batch[:, :-1].long())
        targets = batch[:, 1:].long()
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")

    def weight(self, batch: Tensor) -> int:
        return self.tokens(batch)

    def tokens(self, batch: Tensor) -> int:
        return batch[:, 1:].numel()
