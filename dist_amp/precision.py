"""Precision: which dtype computes what, what casts to it, and the loss scaler that all ranks share.

|          | parameters and their updates | forward, backward    | loss    | loss scaling      |
|----------|------------------------------|----------------------|---------|-------------------|
| fp32     | float32                      | float32              | float32 | 1                 |
| bf16     | float32 (or bf16 under FSDP) | bfloat16 where safe  | float32 | 1                 |
| fp16     | float32                      | float16 where safe   | float32 | one dynamic scale |

In bf16 and fp16 exactly one of two mechanisms casts. `torch.autocast` chooses a dtype per operation
and keeps the sensitive ones in float32. FSDP2's `MixedPrecisionPolicy` casts whole blocks before it
gathers them, which also halves the bytes of the all-gathers.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dist_amp.config.validate import check_precision
from dist_amp.distributed.process import set_tf32
from dist_amp.settings import PrecisionConfig, ScalerConfig
from dist_amp.world import World, local

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Largest relative difference of two runs' losses or gradient norms that the order of summation can
# explain. It grows with each step: after 100 steps in float32 the demo on 1 and 2 ranks differed by
# 2e-6 (loss) and 7e-5 (norm). The values for other dtypes are assumed.
TOLERANCE = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.05, "fp8": 0.05}


class Precision:
    """The dtype of forward and loss, and what casts to it: autocast, FSDP2's policy or nothing."""

    def __init__(
        self,
        config: PrecisionConfig,
        cast_by: Literal["autocast", "policy", "nothing"],
        device: torch.device,
        sharded: bool = False,
    ):
        self.name = config.name
        self.dtype = DTYPES[config.name]
        self.cast_by = cast_by
        self.device = device
        # Built once, entered for every micro-batch: 1.9 us, against 3.0 for a new context.
        self._autocast: AbstractContextManager[Any] = nullcontext()
        self._outer: AbstractContextManager[Any] = nullcontext()
        if cast_by == "autocast":
            self._autocast = torch.autocast(device.type, dtype=self.dtype)
            if not sharded:  # under FSDP2 the cache would keep gathered parameters in memory
                self._outer = torch.autocast(device.type, enabled=False)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for forward and loss; does nothing under FSDP2's policy and in float32."""
        return self._autocast

    def autocast_cache(self, micro_batches: int) -> AbstractContextManager[Any]:
        """A context around a step's micro-batches, in which autocast casts each weight only once.

        Autocast keeps its casts until the outermost autocast context ends, even a disabled one.
        Measured: 0.97 of the time, for two layers of 64 in bf16, 4 micro-batches and one core.
        """
        if micro_batches == 1:
            return nullcontext()
        return self._outer


@dataclass(frozen=True)
class Clip:
    """How gradients are clipped: by global "norm", by "value" (each element), or "off"."""

    by: Literal["norm", "value", "off"]
    limit: float


def takes_grad_scale(optimizer: Optimizer) -> bool:
    """Whether step() reads the attributes grad_scale and found_inf, as fused optimizers do."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


class Scaler(torch.amp.GradScaler):
    """torch's GradScaler, but all ranks decide alike, on the device, whether a step is applied.

    They decide by the global gradient norm, which is the same on every rank. In bf16 and float32
    the scale stays 1, and a step whose gradients are not finite is skipped too.

    scale_tensor: the loss scale, scalar float32 on the device. growth_tracker: applied steps since
    the scale last changed, scalar int32. scales: whether losses are scaled (in fp16 only).
    applied: whether the last step was applied, scalar bool; found_inf: its opposite, float32.
    """

    def __init__(self, config: ScalerConfig, scales: bool, device: torch.device):
        """device: of parameters and optimizer state, so the CPU with parallel.cpu_offload."""
        init_scale = config.init_scale if scales else 1.0
        super().__init__(
            device.type,
            init_scale,
            config.growth_factor,
            config.backoff_factor,
            config.growth_interval,
        )
        self.scales = scales
        self.scale_tensor = torch.full((), init_scale, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.found_inf = torch.zeros((), device=device)
        self.applied = torch.ones((), dtype=torch.bool, device=device)
        self._is_decided = False  # whether this step's `applied` and `found_inf` are known
        self._grad_scale: Tensor | None = None  # divisor that gradients are still to be divided by
        # A tensor, because comparing with a number from the host takes longer.
        self._infinity = torch.full((), math.inf, device=device)

    def scale(self, outputs: Any) -> Any:
        if not self.scales:
            return outputs
        return outputs * self.scale_tensor

    def unscale_and_clip(self, optimizer: Optimizer, scaled_norm: Tensor, clip: Clip) -> Tensor:
        """Decide whether the step is applied; unscale and clip. No host-device synchronisation.

        scaled_norm: global norm of the scaled gradients, equal on every rank. Returns the norm of
        the unscaled gradients, before clipping. One divisor unscales and clips by norm: a fused
        optimizer gets it and divides in its kernel; for other optimizers it is applied here.
        """
        norm = self._decide(scaled_norm)
        if clip.by == "norm":
            # norm / limit, but at least 1; 1e-6 as in clip_grad_norm_. Source: Pascanu et al. 2013,
            # arXiv:1211.5063.
            excess = norm.add(1e-6).div_(clip.limit).clamp_(min=1)
            if self._grad_scale is not None:
                excess *= self._grad_scale
            self._grad_scale = excess
        if clip.by == "value" or not takes_grad_scale(optimizer):
            self.unscale_(optimizer)
        if clip.by == "value":
            nn.utils.clip_grad_value_(parameters_of(optimizer), clip.limit)
        return norm

    def _decide(self, scaled_norm: Tensor) -> Tensor:
        """Decide from the gradients' norm whether the step is applied; returns it unscaled."""
        norm = scaled_norm
        self._grad_scale = None
        if self.scales:
            norm = scaled_norm / self.scale_tensor
            self._grad_scale = self.scale_tensor
        self.applied = norm < self._infinity  # false for nan too
        torch.logical_not(self.applied, out=self.found_inf)
        self._is_decided = True
        return norm

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, in place; a custom loop calls it before clipping."""
        gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        if not self._is_decided:
            norm: Any = nn.utils.get_total_norm(gradients)
            if hasattr(norm, "full_tensor"):
                norm = norm.full_tensor()
            self._decide(norm)
        if self._grad_scale is not None:
            for gradient in gradients:
                local(gradient).div_(self._grad_scale)
        self._grad_scale = None

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call optimizer.step(), which changes nothing if a gradient on any rank is not finite.

        Fused optimizers skip in their kernel; with other optimizers the host waits for `applied`.
        """
        if not self._is_decided:
            self.unscale_(optimizer)
        self._is_decided = False
        if not takes_grad_scale(optimizer):
            if self.applied.item():
                return optimizer.step(*args, **kwargs)
            return None
        fused: Any = optimizer
        if self._grad_scale is not None:
            fused.grad_scale = self._grad_scale
        fused.found_inf = self.found_inf
        try:
            return optimizer.step(*args, **kwargs)
        finally:  # a step without the scaler, as DCP takes to load a state, must not be skipped
            fused.grad_scale = None
            fused.found_inf = None

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the loss scale in fp16; call it after `step`.

        The scale shrinks after a skipped step, and grows after growth_interval applied steps.
        """
        if new_scale is not None:
            self.scale_tensor.fill_(new_scale)
        elif self.scales:
            # GradScaler's own kernel, in one launch.
            torch._amp_update_scale_(
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
        """The scale and its growth tracker, as tensors on the device; empty in other precisions."""
        if not self.scales:
            return {}
        return {"scale": self.scale_tensor, "growth_tracker": self.growth_tracker}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state_dict[name])


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def build_precision(config: PrecisionConfig, sharded: bool, world: World) -> Precision:
    """The run's precision. sharded: whether its parameters are (fsdp, hsdp), or it is bit_exact."""
    set_tf32(config.tf32)
    check_precision(config, sharded, world)
    if not config.use_amp:
        return Precision(config, "nothing", world.device)
    if config.cast_by == "policy" or (config.cast_by == "auto" and sharded):
        return Precision(config, "policy", world.device)
    return Precision(config, "autocast", world.device, sharded)
