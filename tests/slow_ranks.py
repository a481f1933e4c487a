"""A task whose steps take 20 ms on every rank, and twice that in one phase of one rank."""

import os
from time import sleep

import torch
import torch.distributed as dist
from tiny import Rows, Tiny

SECONDS = 0.02  # slept, so that what else the machine does matters little
PHASES = ("data", "forward", "backward", "optimizer", "other")


class SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss

    @staticmethod
    def backward(ctx, gradient):
        sleep(SECONDS)
        return gradient


class SlowRows(Rows):
    seconds = 0.0

    def __getitem__(self, index):
        sleep(self.seconds)
        return super().__getitem__(index)


class SlowRank(Tiny):
    """phase: where `rank` sleeps; "nowhere" for a clean run."""

    def __init__(self, phase: str = "nowhere", rank: int = 2):
        super().__init__()
        here = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        self.phase = phase if here == rank else "nowhere"
        self.hooked = False

    def build_dataset(self, split):
        rows = SlowRows(**super().build_dataset(split).columns)
        if self.phase == "data":
            rows.seconds = SECONDS / 8  # a micro-batch has 8
        return rows

    def loss_sum(self, model, batch):
        sleep(2 * SECONDS if self.phase == "forward" else SECONDS)
        loss = super().loss_sum(model, batch)
        return SleepInBackward.apply(loss) if self.phase == "backward" else loss

    def on_step(self, run, report):
        if self.phase == "optimizer" and not self.hooked:
            self.hooked = True
            run.optimizer.register_step_post_hook(lambda *_: sleep(SECONDS))
        if self.phase == "other":
            sleep(SECONDS)
