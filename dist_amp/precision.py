"""Precision: which dtype computes what, who casts to it, and the loss scaler that decides for all ranks.

|          | parameters and their updates | forward, backward    | loss    | loss scaling      |
|----------|------------------------------|----------------------|---------|-------------------|
| fp32     | float32                      | float32              | float32 | 1                 |
| bf16     | float32 (or bf16 under FSDP) | bfloat16 where safe  | float32 | 1                 |
| fp16     | float32                      | float16 where safe   | float32 | one dynamic scale |

Exactly one of two casts: `torch.autocast` chooses per operation and keeps the sensitive ones in float32; FSDP2's
`MixedPrecisionPolicy` casts whole blocks as it gathers them, which also halves the communication.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dist_amp.config.validate import check_precision
from dist_amp.fast.autocast_cache import keep_autocast_cache
from dist_amp.fast.fused import local, takes_grad_scale
from dist_amp.fast.kernels import update_scale
from dist_amp.runtime.process import set_tf32
from dist_amp.settings import PrecisionConfig, ScalerConfig
from dist_amp.world import World

NOTHING: AbstractContextManager[None] = nullcontext()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The dtype of forward and loss, and who casts to it: autocast, FSDP2's policy or nothing."""

    def __init__(
        self, config: PrecisionConfig, cast_by: Literal["autocast", "policy", "nothing"], device: torch.device
    ):
        self.name = config.name
        self.dtype = DTYPES[config.name]
        self.cast_by = cast_by
        self.device = device
        # Built once and entered for every micro-batch: 1.9 us in place of 3.0.
        self._autocast: AbstractContextManager[Any] = nullcontext()
        if cast_by == "autocast":
            self._autocast = torch.autocast(device.type, dtype=self.dtype)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for forward and loss; does nothing where a policy or nothing casts."""
        return self._autocast

    def cast_weights_once(self, micro_batches: int, sharded: bool) -> AbstractContextManager[None]:
        """A context around a step's micro-batches in which autocast casts each weight once, not per micro-batch.

        Not for sharded weights, of which the cache would hold full copies; nor for a single micro-batch, whose casts
        backward frees as it goes.
        """
        return keep_autocast_cache() if self.cast_by == "autocast" and not sharded and micro_batches > 1 else NOTHING


@dataclass(frozen=True)
class Clip:
    """What limits gradients: "norm" (of all together), "value" (each element), or "off"."""

    by: Literal["norm", "value", "off"]
    limit: float


class Scaler(torch.amp.GradScaler):
    """torch's GradScaler with one decision for all ranks, taken and kept on the device.

    `found_inf` comes from the global gradient norm, which is the same on every rank, so all ranks step or all skip.
    In bf16 and float32 the scale is 1 and stays 1: a step that is not finite is skipped there too.

    scale_tensor: the loss scale, scalar float32 on the device. scales: whether it can be other than 1, in fp16 alone.
    applied: whether the last step is applied, scalar bool; found_inf: its opposite, scalar float32, 0 or 1.
    """

    def __init__(self, config: ScalerConfig, scales: bool, device: torch.device, state_device: torch.device):
        """state_device: where parameters and optimizer state are, which is the host under CPU offload."""
        init_scale = config.init_scale if scales else 1.0
        super().__init__(
            device.type, init_scale, config.growth_factor, config.backoff_factor, config.growth_interval, enabled=True
        )
        self.scales = scales
        self.scale_tensor = torch.full((), init_scale, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)  # applied steps since the last change
        self.found_inf = torch.zeros((), device=device)
        self.applied = torch.ones((), dtype=torch.bool, device=device)
        self._decided = False  # whether this step's found_inf is known
        self._grad_scale: Tensor | None = None  # what the gradients are still to be divided by; None: 1
        self._state_device = state_device
        self._infinity = torch.full((), math.inf, device=device)  # cheaper than a number from the host

    def scale(self, outputs: Any) -> Any:
        """The loss times the scale."""
        return outputs * self.scale_tensor if self.scales else outputs

    @torch.no_grad()
    def unscale_and_clip(
        self, optimizer: torch.optim.Optimizer, scaled_norm: Tensor, correction: Tensor | None, clip: Clip
    ) -> Tensor:
        """Unscale and clip the gradients, and decide whether the step is applied; reads nothing from the device.

        scaled_norm: global norm of the gradients as they are, equal on every rank. correction: what they are to be
        divided by besides the scale; None: nothing. Returns the norm of the unscaled gradients, before clipping.
        A fused optimizer is only handed the factor, and divides in its own kernel; others follow the textbook.
        """
        norm, grad_scale = self._decide(scaled_norm, correction)
        if not takes_grad_scale(optimizer) or clip.by == "value":  # each unscaled element is limited
            self.unscale_(optimizer)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            if clip.by == "norm":
                nn.utils.clip_grad_norm_(parameters, clip.limit)
            elif clip.by == "value":
                nn.utils.clip_grad_value_(parameters, clip.limit)
        elif clip.by == "norm":
            # The excess over the limit, 1e-6 as in clip_grad_norm_. Source: Pascanu et al. 2013, arXiv:1211.5063.
            excess = norm.add(1e-6).div_(clip.limit).clamp_(min=1)
            self._grad_scale = excess if grad_scale is None else excess.mul_(grad_scale)
        return norm

    def _decide(self, scaled_norm: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Whether the step is applied, from the gradients' norm; returns (unscaled norm, what unscales; None: 1)."""
        grad_scale = self.scale_tensor if self.scales else None
        if correction is not None:
            grad_scale = correction if grad_scale is None else grad_scale * correction
        norm = scaled_norm if grad_scale is None else scaled_norm / grad_scale
        self.applied = norm < self._infinity  # false for nan too
        torch.logical_not(self.applied, out=self.found_inf)
        self._grad_scale, self._decided = grad_scale, True
        return norm, grad_scale

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place; in a loop of your own, once before clipping."""
        if not self._decided:
            norm: Any = nn.utils.get_total_norm(
                [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            )
            self._decide(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if self._grad_scale is not None:
            grad_scale = self._grad_scale.to(self._state_device)
            for group in optimizer.param_groups:
                for gradient in (p.grad for p in group["params"] if p.grad is not None):
                    local(gradient).div_(grad_scale)
        self._grad_scale = None

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call optimizer.step(), which changes nothing where a gradient is not finite on any rank.

        Fused optimizers skip in their kernel, by torch's own attributes; others cost one host read here.
        """
        if not self._decided:
            self.unscale_(optimizer)
        self._decided = False
        if takes_grad_scale(optimizer):
            fused: Any = optimizer
            fused.grad_scale = None if self._grad_scale is None else self._grad_scale.to(self._state_device)
            fused.found_inf = self.found_inf.to(self._state_device)
            return optimizer.step(*args, **kwargs)
        return optimizer.step(*args, **kwargs) if self.applied.item() else None

    @torch.no_grad()
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Once per step: fp16's scale backs off after a skip, and grows after growth_interval applied steps."""
        if new_scale is not None:
            self.scale_tensor.fill_(new_scale)
        elif self.scales:
            update_scale(
                self.scale_tensor,
                self.growth_tracker,
                self.found_inf,
                self.get_growth_factor(),
                self.get_backoff_factor(),
                self.get_growth_interval(),
            )

    def get_scale(self) -> float:
        """The loss scale as a number; waits for the device."""
        return self.scale_tensor.item()

    def state_dict(self) -> dict[str, Any]:
        """The scale and its growth tracker: device tensors, nothing is read; empty unless in fp16."""
        return {"scale": self.scale_tensor, "growth_tracker": self.growth_tracker} if self.scales else {}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state_dict[name])


def build_precision(config: PrecisionConfig, sharded: bool, world: World) -> Precision:
    """The precision of a run whose parameters are `sharded` (fsdp, hsdp) or whole (single, ddp)."""
    set_tf32(config.tf32)
    check_precision(config, sharded, world)
    if not config.use_amp:
        return Precision(config, "nothing", world.device)
    by_policy = config.cast_by == "policy" or (config.cast_by == "auto" and sharded)
    return Precision(config, "policy" if by_policy else "autocast", world.device)
