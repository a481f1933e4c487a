"""A task whose steps take a while on every rank, and twice that in one phase of one rank."""

import os
import time

import torch
from tiny import Rows, Tiny

SECONDS = 0.02  # of a step's sleep, beside which what else the machine does matters little
PHASES = ("data", "forward", "backward", "optimizer", "other")


class SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, seconds):
        ctx.seconds = seconds
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class SlowRows(Rows):
    seconds = 0.0

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return super().__getitem__(index)


class SlowRank(Tiny):
    """phase: where `rank` sleeps; "nowhere" for a clean run."""

    def __init__(self, phase: str = "nowhere", rank: int = 2, seconds: float = SECONDS):
        super().__init__()
        self.seconds = seconds
        self.phase = phase if int(os.environ.get("RANK", "0")) == rank else "nowhere"
        self.hooked = False

    def build_dataset(self, split):
        rows = SlowRows(**super().build_dataset(split).columns)
        if self.phase == "data":
            rows.seconds = self.seconds / 8  # a micro-batch has 8
        return rows

    def loss_sum(self, model, batch):
        time.sleep(2 * self.seconds if self.phase == "forward" else self.seconds)
        loss = super().loss_sum(model, batch)
        return SleepInBackward.apply(loss, self.seconds) if self.phase == "backward" else loss

    def on_step(self, run, report):
        if self.phase == "optimizer" and not self.hooked:
            self.hooked = True
            run.optimizer.register_step_post_hook(lambda *_: time.sleep(self.seconds))
        if self.phase == "other":
            time.sleep(self.seconds)
