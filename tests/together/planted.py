"""A small transformer in which faults are planted, for tests of `dist_amp diff`."""

import math

import torch
import torch.nn.functional as F
from tiny import Rows
from torch import nn

WIDTH, LENGTH, SYMBOLS = 16, 8, 32
AT = 3  # the faults that come later change what follows this step


class Mix(nn.Module):
    """Causal attention of one head."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.attend = Attend(fault)

    def forward(self, x):
        return self.out(self.attend(self.qkv(x)))


class Attend(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def forward(self, qkv):
        query, key, value = qkv.chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / math.sqrt(WIDTH)
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(2 - (self.fault != "mask"))
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        if self.fault == "attention_order":  # the sum over keys in two parts
            half = LENGTH // 2
            return weights[..., half:] @ value[:, half:] + weights[..., :half] @ value[:, :half]
        return weights @ value


class RoundedLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x).bfloat16().float()


class Gain(nn.Module):
    """Times a factor that is kept in a buffer and grows in each forward."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        if self.training and not (self.fault == "stale_buffer" and self.steps >= 2 * AT):
            self.steps = self.steps + 1
        return x * (1 + 0.01 * self.steps)


class Block(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = Mix(fault)
        self.gain = Gain(fault)
        self.up = (RoundedLinear if fault == "rounding" else nn.Linear)(WIDTH, 2 * WIDTH)
        self.act = nn.GELU("tanh" if fault == "kernel" else "none")
        self.drop = nn.Dropout(0.0 if fault == "dropout_off" else 0.1)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.fault = fault

    def forward(self, x):
        if self.fault == "detached":
            x = x.detach() + 0.0
        x = x + self.gain(self.mix(self.norm(x)))
        if self.fault == "backward_scaled" and x.requires_grad:
            x.register_hook(lambda gradient: 2 * gradient)
        return x + self.down(self.drop(self.act(self.up(x))))


class Net(nn.Module):
    """Three blocks; the fault is in the second one."""

    def __init__(self, fault):
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.blocks = nn.ModuleList(Block(fault * (number == 1)) for number in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LocalNorm(torch.optim.AdamW):
    """Clips by the norm of the first half of each gradient's rows, as a rank that holds these."""

    def step(self, *args, **kwargs):
        parameters = [p for group in self.param_groups for p in group["params"]]
        halves = [p.grad[: max(1, len(p) // 2)].norm() for p in parameters]
        factor = 0.1 / torch.stack(halves).norm().clamp(min=0.1)
        for p in parameters:
            p.grad.mul_(factor)
        return super().step(*args, **kwargs)


class GlobalNorm(torch.optim.AdamW):
    def step(self, *args, **kwargs):
        parameters = [p for group in self.param_groups for p in group["params"]]
        factor = 0.1 / torch.stack([p.grad.norm() for p in parameters]).norm().clamp(min=0.1)
        for p in parameters:
            p.grad.mul_(factor)
        return super().step(*args, **kwargs)


class Planted:
    """Predict the next symbol. Batch: tokens [B, LENGTH + 1]."""

    def __init__(self, fault: str = ""):
        self.fault = fault
        self.calls = 0  # of loss_sum, which counts the micro-batches
        if fault == "decayed_biases":
            self.groups = self.one_group
        if fault.endswith("_norm"):
            self.optimizer = self.clipping_optimizer
        if fault == "schedule":
            self.schedule = lambda step: 1.0 / (step + 2)
        if fault == "no_schedule":
            self.schedule = lambda step: 1.0 / (step + 1)

    def build_model(self):
        net = Net(self.fault)
        up = net.blocks[1].up
        if self.fault == "scaled_twice":
            up.weight.register_hook(lambda gradient: 2 * gradient)
        if self.fault == "frozen":
            up.requires_grad_(False)
        if self.fault == "initial_weights":
            up.weight.data.mul_(1.5)
        return net

    def blocks(self, model):
        return list(model.blocks)

    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(5 + (self.fault == "data"))
        return Rows(tokens=torch.randint(SYMBOLS, (64, LENGTH + 1), generator=generator))

    def collate(self, samples):
        tokens = torch.stack([sample["tokens"] for sample in samples])
        counts = torch.ones(len(tokens))
        if self.fault == "swapped":
            tokens = tokens.flip(0)
        return {"tokens": tokens, "counts": counts}

    def loss_sum(self, model, batch):
        self.calls += 1
        tokens = batch["tokens"]
        logits = model(tokens[:, :-1]).float()
        labels = tokens[:, 1:]
        counts = batch["counts"]
        if self.fault == "dropped_sample" and self.calls == 2 * AT + 1:
            counts = counts * torch.tensor([1.0, 0.0, 1.0, 1.0])
        if self.fault == "label_shift":
            labels = tokens[:, :-1]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        loss = (losses.view(labels.shape).mean(1) * counts).sum()
        if self.fault == "micro_batches" and self.calls % 2 == 0:
            loss = loss.detach() + 0.5 * (loss - loss.detach())
        return loss

    def weight(self, batch):
        return batch["counts"].sum() * (0.5 if self.fault == "local_weight" else 1.0)

    def one_group(self, model):
        return [{"params": list(model.parameters()), "weight_decay": 0.1, "name": "all"}]

    def clipping_optimizer(self, groups, lr):
        cls = LocalNorm if self.fault == "local_norm" else GlobalNorm
        return cls(groups, lr=lr)

    def on_step(self, run, report):
        if run.step != AT:
            return
        block = run.parallel.module.blocks[1]
        if self.fault == "flipped_bit":
            block.down.weight.data.view(torch.int32)[0, 0] ^= 1
        elif self.fault == "dropout_left_off":
            run.parallel.module.eval()
        elif self.fault == "lost_momentum":
            for state in run.optimizer.state.values():
                state["exp_avg"].zero_()
        elif self.fault == "flipped_gradient":
            self.hook = block.mix.out.weight.register_hook(flip_first)


def flip_first(gradient):
    gradient = gradient.clone()
    gradient.view(torch.int32)[0, 0] ^= 1
    return gradient
