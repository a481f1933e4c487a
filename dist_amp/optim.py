"""The optimizer: parameter groups, the learning-rate schedule by applied step, and the one place that steps or skips.

A step is applied or skipped. A skipped step changes nothing: not parameters, moments, learning rate or the count of
applied steps. All of it is decided on the device, so that no step waits for it.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dist_amp.fast.fused import FusedAdamW, FusedSGD, local
from dist_amp.precision import Precision
from dist_amp.settings import OptimConfig


@dataclass(frozen=True)
class Clip:
    """By what gradients are limited: "norm" (of all together), "value" (each element), or "off"."""

    by: Literal["norm", "value", "off"]
    limit: float


def learning_rate(config: OptimConfig, applied_steps: int, total_steps: int) -> float:
    """The learning rate of the step that follows `applied_steps` applied ones."""
    if applied_steps < config.warmup_steps:
        return config.lr * (applied_steps + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    progress = (applied_steps - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    left = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, object]]:
    """Matrices decay; vectors do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"name": "matrices", "params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"name": "vectors", "params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_torch_optimizer(model: nn.Module, config: OptimConfig, lr: Tensor | float) -> torch.optim.Optimizer:
    """The torch optimizer alone; put another one here, fused or with `optim.fused=false`."""
    groups = parameter_groups(model, config)
    if config.name == "adamw":
        adamw = FusedAdamW if config.fused else torch.optim.AdamW
        return adamw(groups, lr=lr, betas=config.betas, eps=config.eps, fused=config.fused)
    sgd = FusedSGD if config.fused else torch.optim.SGD
    return sgd(groups, lr=lr, momentum=config.momentum)


def make_state(optimizer: torch.optim.Optimizer, config: OptimConfig) -> None:
    """Give every parameter its moments, at zero, before the first step.

    So they are there to be saved if the first step is skipped; and torch's fused SGD would leave whatever the memory
    held. From zero, the first step is the same as torch's own.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if config.name == "adamw":
                where = local(parameter).device if config.fused else torch.device("cpu")
                state["step"] = torch.zeros((), device=where)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            elif config.momentum:
                state["momentum_buffer"] = torch.zeros_like(parameter)
    if isinstance(optimizer, FusedAdamW | FusedSGD):
        optimizer.bind()


class Optimizer:
    """A torch optimizer with the schedule, the skip and their counters, all on the device.

    Built after sharding: it holds the parameters that are trained. `applied_steps`, `skipped_steps` and
    `skips_in_a_row` are scalar int64 tensors; `lr` is the last step's learning rate, scalar float32.
    """

    def __init__(self, config: OptimConfig, clip: Clip, model: nn.Module, total_steps: int, device: torch.device):
        self.config = config
        self.clip = clip
        self.device = device
        self.counters = torch.zeros(3, dtype=torch.int64, device=device)
        self.applied_steps, self.skipped_steps, self.skips_in_a_row = self.counters.unbind()
        # Constants on the device: a number from the host costs each operation more than the operation itself.
        self._infinity = torch.full((), math.inf, device=device)
        self._found_inf = torch.zeros((), device=device)
        self._added_if_applied, self._added_if_skipped, self._kept_if_applied = torch.tensor(
            [[1, 0, 0], [0, 1, 1], [1, 1, 0]], device=device
        ).unbind()
        # 1e-6 as in torch.nn.utils.clip_grad_norm_.
        self._epsilon = torch.full((), 1e-6 / clip.limit, device=device)
        # The whole schedule as a table: its formula stays plain Python, and looking it up needs no host.
        rates = [learning_rate(config, step, total_steps) for step in range(total_steps + 1)]
        self._rates = torch.tensor(rates, dtype=torch.float32, device=device)
        self.lr = self._rates[0].clone()
        self.torch_optimizer = build_torch_optimizer(model, config, lr=self.lr if config.fused else rates[0])
        make_state(self.torch_optimizer, config)
        self.parameters = [p for group in self.torch_optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def apply(self, norm: Tensor, divisor: Tensor, precision: Precision) -> Tensor:
        """Unscale, clip and step, or skip if `norm` is not finite; then clear the gradients.

        norm: the unscaled gradients' global norm, scalar float32, equal on every rank, hence so is the decision.
        divisor: what unscales them, scalar float32. Returns whether the step was applied: scalar bool on the device.
        """
        if self.device != norm.device:  # under CPU offload
            norm, divisor = norm.to(self.device), divisor.to(self.device)
        applied = norm < self._infinity  # and not nan
        found_inf = torch.logical_not(applied, out=self._found_inf)
        torch.take(self._rates, self.applied_steps.clamp(max=len(self._rates) - 1), out=self.lr)
        if self.clip.by == "norm":
            # The excess of the norm over the limit. Source: Pascanu et al. 2013, arXiv:1211.5063.
            divisor = torch.add(self._epsilon, norm, alpha=1 / self.clip.limit).clamp_(min=1).mul_(divisor)
        if self.config.fused:
            self._fused_step(divisor, applied, found_inf)
        else:
            self._textbook_step(divisor, applied)
        if precision.scales:
            precision.update(found_inf.to(precision.device))
        moved_on = torch.addcmul(self._added_if_applied, self.counters, self._kept_if_applied)
        torch.where(applied, moved_on, self.counters + self._added_if_skipped, out=self.counters)
        for parameter in self.parameters:
            parameter.grad = None
        return applied.to(precision.device)

    def _fused_step(self, divisor: Tensor, applied: Tensor, found_inf: Tensor) -> None:
        """One kernel divides, steps, and does nothing at all where `found_inf` is 1; no host read."""
        if self.clip.by == "value":  # limits each unscaled element, so that the division can't wait for the kernel
            self._divide_and_clamp(divisor)
            divisor = torch.ones_like(divisor)
        optimizer: Any = self.torch_optimizer
        optimizer.grad_scale, optimizer.found_inf, optimizer.applied = divisor, found_inf, applied
        optimizer.step()

    def _textbook_step(self, divisor: Tensor, applied: Tensor) -> None:
        """Divide, clamp, look whether all was finite, and step: any torch optimizer will do; one host read."""
        was_applied, lr = torch.stack([applied.float(), self.lr]).tolist()
        if not was_applied:
            return
        self._divide_and_clamp(divisor)
        for group in self.torch_optimizer.param_groups:
            group["lr"] = lr
        self.torch_optimizer.step()

    def _divide_and_clamp(self, divisor: Tensor) -> None:
        gradients = [local(p.grad) for p in self.parameters if p.grad is not None]
        if not gradients:
            return
        torch._foreach_div_(gradients, divisor)
        if self.clip.by == "value":
            torch._foreach_clamp_min_(gradients, -self.clip.limit)
            torch._foreach_clamp_max_(gradients, self.clip.limit)

    def bind_learning_rate(self) -> None:
        """Point the groups at the live learning rate again: loading a checkpoint gives them tensors of their own."""
        for group in self.torch_optimizer.param_groups:
            group["lr"] = self.lr if self.config.fused else float(self.lr)
