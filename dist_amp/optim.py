"""The optimizer: parameter groups, and the learning-rate schedule by applied step.

A step is applied or skipped. A skipped step changes nothing: not parameters, moments, learning rate or the count of
applied steps. Precision's scaler decides which; the counts are kept on the device, so that no step waits for it.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from dist_amp.fast.fused import local, optimizer_class, takes_grad_scale
from dist_amp.settings import OptimConfig


def learning_rate(config: OptimConfig, applied_steps: int, total_steps: int) -> float:
    """The learning rate of the step that follows `applied_steps` applied ones."""
    if applied_steps < config.warmup_steps:
        return config.lr * (applied_steps + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    progress = (applied_steps - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    left = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Matrices decay; vectors (biases, norms) do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"name": "matrices", "params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"name": "vectors", "params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """A torch optimizer; put another one here. Build it after sharding, which replaces the parameters.

    Every parameter gets its moments now, at zero: so they can be saved if the first step is skipped, and torch's fused
    SGD would leave uninitialised memory in them then. From zero, the first step is the same as torch's own.
    """
    options: dict[str, Any] = {"momentum": config.momentum}
    if config.name == "adamw":
        options = {"betas": config.betas, "eps": config.eps, "fused": config.fused}
    kind = optimizer_class(config.name, config.fused)
    optimizer = kind(parameter_groups(model, config), lr=config.lr, **options)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if config.name == "adamw":
                where = local(parameter).device if config.fused else torch.device("cpu")
                state["step"] = torch.zeros((), device=where)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            elif config.momentum:
                state["momentum_buffer"] = torch.zeros_like(parameter)
    if hasattr(optimizer, "bind"):
        optimizer.bind()
    return optimizer


class Schedule:
    """The learning rate by applied steps, and the steps' counts, all on the device.

    applied_steps, skipped_steps, skips_in_a_row: scalar int64. lr: the next step's learning rate, last_lr: the last
    step's; scalar float32.
    """

    def __init__(self, config: OptimConfig, optimizer: torch.optim.Optimizer, total_steps: int, device: torch.device):
        self._optimizer = optimizer
        self._device_lr = takes_grad_scale(optimizer)  # fused kernels read the rate on the device
        self.counters = torch.zeros(3, dtype=torch.int64, device=device)
        self.applied_steps, self.skipped_steps, self.skips_in_a_row = self.counters.unbind()
        # Constants on the device: a number from the host costs each operation more than the operation itself.
        self._if_applied, self._if_skipped, self._keeps = torch.tensor(
            [[1, 0, 0], [0, 1, 1], [1, 1, 0]], device=device
        ).unbind()
        # A table: the formula stays plain Python, and looking a rate up needs no host.
        rates = [learning_rate(config, step, total_steps) for step in range(total_steps + 1)]
        self._rates = torch.tensor(rates, dtype=torch.float32, device=device)
        self.lr, self.last_lr = self._rates[0].clone(), self._rates[0].clone()
        self.bind()

    @torch.no_grad()
    def step(self, applied: Tensor) -> None:
        """Count a step, and look up the next one's learning rate: the same one again if this was skipped."""
        applied = applied.to(self.counters.device)
        moved_on = torch.addcmul(self._if_applied, self.counters, self._keeps)
        torch.where(applied, moved_on, self.counters + self._if_skipped, out=self.counters)
        self.last_lr.copy_(self.lr)
        torch.take(self._rates, self.applied_steps.clamp(max=len(self._rates) - 1), out=self.lr)
        if not self._device_lr:
            self.bind()

    def bind(self) -> None:
        """Give the optimizer's groups the live rate: loading a checkpoint leaves them tensors of their own."""
        lr = self.lr if self._device_lr else float(self.lr)
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def load_counters(self, counters: Tensor) -> None:
        """Go on from a checkpoint's counters."""
        self.counters.copy_(counters)
        torch.take(self._rates, self.applied_steps.clamp(max=len(self._rates) - 1), out=self.lr)
        self.bind()
