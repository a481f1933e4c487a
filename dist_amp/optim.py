"""The optimizer, its parameter groups, and the learning-rate schedule by applied steps.

A skipped step changes no parameter, moment or learning rate, nor the count of applied steps. The
counts are kept on the device, so that no step needs a host-device synchronisation to read them.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dist_amp.errors import ConfigError
from dist_amp.precision import takes_grad_scale
from dist_amp.settings import OptimConfig

# wsd decays over this last fraction of train.steps. Source: Hägele et al. 2024, arXiv:2405.18392.
DECAY_RATIO = 0.2


def learning_rate(
    config: OptimConfig, applied_steps: int, total_steps: int, task: Any = None
) -> float:
    """The learning rate of the next step, after `applied_steps` applied steps."""
    if hasattr(task, "schedule"):
        from dist_amp.optimizers.groups import task_factor

        return config.lr * task_factor(task, applied_steps)
    if applied_steps < config.warmup_steps:
        return config.lr * (applied_steps + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    decay_start = config.warmup_steps
    if config.schedule == "wsd":
        decay_start = max(decay_start, total_steps - round(DECAY_RATIO * total_steps))
    progress = max(0, applied_steps - decay_start) / max(1, total_steps - decay_start)
    remaining = 1 - progress
    if config.schedule == "cosine":
        remaining = (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining)


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Two groups: matrices, with weight decay, and vectors (biases, norms), without; or Muon's."""
    if config.name == "muon":
        from dist_amp.optimizers.muon import muon_groups

        return muon_groups(model, config.weight_decay)
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"name": "matrices", "params": matrices, "weight_decay": config.weight_decay},
        {"name": "vectors", "params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: nn.Module,
    config: OptimConfig,
    task: Any = None,
    say: Callable[[str], object] = lambda text: None,
) -> Optimizer:
    """The optimizer of optim.name, or the task's; the groups of `parameter_groups`, or the task's.

    Call it after sharding, which replaces the parameters. The task's are its groups(model) and
    optimizer(groups, lr), if it has them. Raises ConfigError.
    """
    groups = parameter_groups(model, config)
    if hasattr(task, "groups"):
        from dist_amp.optimizers.groups import check_keys, task_groups

        groups = task_groups(task, model, config)
    if hasattr(task, "optimizer"):
        from dist_amp.optimizers.groups import task_optimizer

        optimizer = task_optimizer(task, groups, config.lr)
    else:
        optimizer = named_optimizer(config, [dict(group) for group in groups])
    if hasattr(task, "groups"):
        check_keys(groups, optimizer)
    if hasattr(task, "groups") or hasattr(task, "optimizer"):
        from dist_amp.optimizers.groups import described

        say(f"optimizer {described(optimizer)}")
    if config.fused and not takes_grad_scale(optimizer):
        say(
            f"optimizer {type(optimizer).__name__}: gradients are unscaled and clipped before its "
            "step, with two host-device syncs per step"
        )
    return optimizer


def named_optimizer(config: OptimConfig, groups: list[dict[str, Any]]) -> Optimizer:
    if config.name == "sgd":
        from dist_amp.optimizers.sgd import build_sgd

        return build_sgd(groups, config)
    adamw_options: Any = {name: getattr(config, name) for name in ("lr", "betas", "eps", "fused")}
    if config.name == "muon":
        from dist_amp.optimizers.muon import Muon

        return Muon(groups, momentum=config.momentum, **adamw_options)
    return torch.optim.AdamW(groups, **adamw_options)


class Schedule:
    """The learning rate by applied steps, and the counts of steps, all on the device.

    A table holds the learning rate of each step, computed by plain Python at the start; a step
    looks its rate up on the device. applied_steps, skipped_steps, skips_in_a_row: scalar int64.
    lr, last_lr: rate of the next and last step, scalar float32. A group's rate: lr * lr_scale.
    """

    _factor = 1.0

    def __init__(
        self,
        config: OptimConfig,
        optimizer: Optimizer,
        total_steps: int,
        device: torch.device,
        task: Any = None,
    ):
        self._optimizer = optimizer
        self.counters = torch.zeros(3, dtype=torch.int64, device=device)
        self.applied_steps, self.skipped_steps, self.skips_in_a_row = self.counters.unbind()
        self.formula = partial(learning_rate, config, total_steps=total_steps, task=task)
        self.table = [self.formula(step) for step in range(total_steps + 1)]
        self._rates = torch.tensor(self.table, dtype=torch.float32, device=device)  # table * factor
        self.lr = self._rates[0].clone()
        self.last_lr = self._rates[0].clone()
        scales = [group.get("lr_scale", 1.0) for group in optimizer.param_groups]
        self._scales = torch.tensor(scales, device=device)
        self._is_scaled = set(scales) != {1.0}
        self._group_rates = self.lr.expand(len(scales))  # a view of lr, unless there are scales
        if self._is_scaled:
            self._group_rates = self.lr * self._scales
        # A step updates the counters [applied, skipped, in a row] to [a + 1, s, 0] if applied, else
        # to [a, s + 1, r + 1]. The constants are tensors: passing numbers takes longer.
        updates = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]], device=device)
        self._added_if_applied, self._kept_if_applied, self._added_if_skipped = updates
        # Whether the optimizer reads its learning rate on the device, as fused kernels do.
        self._has_device_lr = takes_grad_scale(optimizer) and (
            isinstance(optimizer, torch.optim.Adam) or hasattr(optimizer, "takes_device_lr")
        )
        self.bind()

    def step(self, applied: Tensor) -> None:
        """Count a step, and look up the next learning rate: the same if this step was skipped."""
        if_applied = torch.addcmul(self._added_if_applied, self.counters, self._kept_if_applied)
        if_skipped = self.counters + self._added_if_skipped
        torch.where(applied, if_applied, if_skipped, out=self.counters)
        self.last_lr.copy_(self.lr)
        self._look_up()
        if not self._has_device_lr:
            self.bind()

    def _look_up(self) -> None:
        torch.take(self._rates, self.applied_steps.clamp(max=len(self.table) - 1), out=self.lr)
        if self._is_scaled:
            torch.mul(self.lr, self._scales, out=self._group_rates)

    def bind(self) -> None:
        """Put the current rates into the groups; call it after a load, which replaces them, too."""
        rates: Sequence[Any] = self._group_rates.unbind()  # views, which each step updates in place
        if not self._has_device_lr:
            rates = self._group_rates.tolist()
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor) and not self._has_device_lr:  # torchao's optimizers
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def load(self, counters: Tensor, factor: float) -> None:
        self.counters.copy_(counters)
        self.factor = factor

    @property
    def factor(self) -> float:
        """Factor of all later learning rates; set it on every rank. Raises ConfigError."""
        return self._factor

    @factor.setter
    def factor(self, factor: float) -> None:
        if not 0 <= factor < math.inf:
            raise ConfigError(f"run.schedule.factor={factor} must be a finite number, 0 or more")
        self._factor = float(factor)
        self._rates.copy_(torch.tensor([rate * self._factor for rate in self.table]))
        self._look_up()
        self.bind()
