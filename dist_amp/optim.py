"""The optimizer: parameter groups, and the learning-rate schedule by applied step.

A step is applied or skipped. A skipped step changes nothing: not parameters, moments, learning rate or the count of
applied steps. Precision's scaler decides which; the counts are kept on the device, so that no step waits for it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dist_amp.fast.fused import optimizer_class, takes_device_lr, takes_grad_scale
from dist_amp.optimizers.groups import check_keys, options_of, split_for_muon, task_factor, task_groups, task_optimizer
from dist_amp.optimizers.muon import Muon
from dist_amp.settings import OptimConfig


def learning_rate(config: OptimConfig, applied_steps: int, total_steps: int, task: Any = None) -> float:
    """The learning rate of the step that follows `applied_steps` applied ones."""
    if hasattr(task, "schedule"):
        return config.lr * task_factor(task, applied_steps)
    if applied_steps < config.warmup_steps:
        return config.lr * (applied_steps + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    stable = total_steps - round(config.decay_ratio * total_steps) if config.schedule == "wsd" else 0
    start = max(config.warmup_steps, stable)  # of the decay
    progress = max(0, applied_steps - start) / max(1, total_steps - start)
    left = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Matrices decay; vectors (biases, norms) do not. For muon, hidden matrices are a group of their own."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"name": "matrices", "params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"name": "vectors", "params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = split_for_muon(groups, model) if config.name == "muon" else groups
    return [group for group in groups if group["params"]]


# The settings that each optimizer takes besides lr.
OPTIONS = {"adamw": ("betas", "eps", "fused"), "sgd": ("momentum",), "muon": ("betas", "eps", "momentum", "fused")}


def build_optimizer(
    model: nn.Module, config: OptimConfig, task: Any = None, say: Callable[[str], object] = str
) -> Optimizer:
    """The task's optimizer, or the one that optim.name says. Build it after sharding, which replaces the parameters.

    Of the task it uses groups(model) and optimizer(groups, lr), if there are such methods. Errors: ConfigError.
    """
    groups = task_groups(task, model, config) if hasattr(task, "groups") else parameter_groups(model, config)
    given = [dict(group) for group in groups]  # before the optimizer adds its defaults
    if hasattr(task, "optimizer"):
        optimizer = task_optimizer(task, groups, config.lr, model)
    else:
        kind = Muon if config.name == "muon" else optimizer_class(config.name, config.fused, groups)
        optimizer = kind(groups, lr=config.lr, **{name: getattr(config, name) for name in OPTIONS[config.name]})
    check_keys(given, optimizer)
    if config.fused and not takes_grad_scale(optimizer):
        name = type(optimizer).__name__
        say(f"optimizer {name}: steps by unscale_, clip_grad_norm_ and step, with two host reads per step")
    return optimizer


class Schedule:
    """The learning rate by applied steps, and the steps' counts, all on the device.

    applied_steps, skipped_steps, skips_in_a_row: scalar int64. lr: the next step's learning rate, last_lr: the last
    step's; scalar float32. A group's rate is lr times its lr_scale.
    """

    def __init__(
        self, config: OptimConfig, optimizer: Optimizer, total_steps: int, device: torch.device, task: Any = None
    ):
        self._optimizer = optimizer
        self.options_at_start = options_of(optimizer)
        self._device_lr = takes_device_lr(optimizer)  # fused kernels read the rate on the device
        self.counters = torch.zeros(3, dtype=torch.int64, device=device)
        self.applied_steps, self.skipped_steps, self.skips_in_a_row = self.counters.unbind()
        # Constants on the device: a number from the host costs each operation more than the operation itself.
        self._if_applied, self._if_skipped, self._keeps = torch.tensor(
            [[1, 0, 0], [0, 1, 1], [1, 1, 0]], device=device
        ).unbind()
        # A table: the formula stays plain Python, and looking a rate up needs no host.
        rates = [learning_rate(config, step, total_steps, task) for step in range(total_steps + 1)]
        self._rates = torch.tensor(rates, dtype=torch.float32, device=device)
        self.lr, self.last_lr = self._rates[0].clone(), self._rates[0].clone()
        scales = [group.get("lr_scale", 1.0) for group in optimizer.param_groups]
        self._scales = torch.tensor(scales, device=device) if set(scales) != {1.0} else None
        self._group_rates = self.lr.expand(len(scales)) if self._scales is None else self.lr * self._scales
        self.bind()

    @torch.no_grad()
    def step(self, applied: Tensor) -> None:
        """Count a step, and look up the next one's learning rate: the same one again if this was skipped."""
        applied = applied.to(self.counters.device)
        moved_on = torch.addcmul(self._if_applied, self.counters, self._keeps)
        torch.where(applied, moved_on, self.counters + self._if_skipped, out=self.counters)
        self.last_lr.copy_(self.lr)
        self._look_up()
        if not self._device_lr:
            self.bind()

    def _look_up(self) -> None:
        torch.take(self._rates, self.applied_steps.clamp(max=len(self._rates) - 1), out=self.lr)
        if self._scales is not None:
            torch.mul(self.lr, self._scales, out=self._group_rates)

    def bind(self) -> None:
        """Give the optimizer's groups the live rates: loading a checkpoint leaves them tensors of their own."""
        rates = self._group_rates.unbind() if self._device_lr else self._group_rates.tolist()
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor) and not self._device_lr:  # torchao's optimizers keep a tensor
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def load_counters(self, counters: Tensor) -> None:
        """Go on from a checkpoint's counters."""
        self.counters.copy_(counters)
        self._look_up()
        self.bind()
