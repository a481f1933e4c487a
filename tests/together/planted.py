"""A small transformer in which faults are planted, for tests of `dist_amp diff`."""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from tiny import Rows
from torch import nn

WIDTH, LENGTH, SYMBOLS = 16, 8, 32
AT = 3  # the faults that come later change what follows this step


class Attend(nn.Module):
    """Causal attention of one head."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def forward(self, qkv):
        query, key, value = qkv.chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / math.sqrt(WIDTH)
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        if self.fault == "attention_order":  # the sum over keys in two parts
            half = LENGTH // 2
            return weights[..., half:] @ value[:, half:] + weights[..., :half] @ value[:, :half]
        return weights @ value


class Block(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.norm = nn.LayerNorm(WIDTH)
        parts = {"qkv": nn.Linear(WIDTH, 3 * WIDTH), "attend": Attend(fault)}
        self.mix = nn.Sequential(OrderedDict(parts, out=nn.Linear(WIDTH, WIDTH)))
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        if fault == "scaled_twice":
            self.up.weight.register_hook(lambda gradient: 2 * gradient)

    def forward(self, x):
        x = x + self.mix(self.norm(x))
        if self.fault == "backward_scaled" and x.requires_grad:
            x.register_hook(lambda gradient: 2 * gradient)
        return x + self.down(self.drop(F.gelu(self.up(x))))


class Planted:
    """Predict the next symbol; the second of three blocks has the fault. Batch: tokens, counts."""

    def __init__(self, fault: str = ""):
        self.fault = fault
        self.calls = 0  # of loss_sum, which counts the micro-batches

    def build_model(self):
        blocks = [Block(self.fault * (number == 1)) for number in range(3)]
        parts = {"embedding": nn.Embedding(SYMBOLS, WIDTH), "blocks": nn.Sequential(*blocks)}
        return nn.Sequential(OrderedDict(parts, head=nn.Linear(WIDTH, SYMBOLS)))

    def blocks(self, model):
        return list(model.blocks)

    def build_dataset(self, split):
        tokens = torch.randint(
            SYMBOLS, (64, LENGTH + 1), generator=torch.Generator().manual_seed(5)
        )
        return Rows(tokens=tokens, counts=torch.ones(64))

    def loss_sum(self, model, batch):
        self.calls += 1
        tokens, counts = batch["tokens"], batch["counts"]
        if self.fault == "dropped_sample" and self.calls == 2 * AT + 1:
            counts = counts * torch.tensor([1.0, 0.0, 1.0, 1.0])
        labels = tokens[:, 1:]
        logits = model(tokens[:, :-1]).float()
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (losses.view(labels.shape).mean(1) * counts).sum()

    def weight(self, batch):
        return batch["counts"].sum()

    def on_step(self, run, report):
        if run.step == AT and self.fault == "flipped_bit":
            run.parallel.module.blocks[1].down.weight.data.view(torch.int32)[0, 0] ^= 1
        if run.step == AT and self.fault == "lost_momentum":
            for state in run.optimizer.state.values():
                state["exp_avg"].zero_()
