"""Precision: which dtype computes what, who casts to it, and the one loss scaler.

|          | parameters and their updates | forward, backward    | loss    | loss scaling |
|----------|------------------------------|----------------------|---------|--------------|
| fp32     | float32                      | float32              | float32 | none         |
| bf16     | float32 (or bf16 under FSDP) | bfloat16 where safe  | float32 | none         |
| fp16     | float32                      | float16 where safe   | float32 | one scale    |

Exactly one of two casts: `torch.autocast` chooses per operation and keeps the sensitive ones in float32; FSDP2's
`MixedPrecisionPolicy` casts whole blocks as it gathers them, which also halves what travels.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from dist_amp.config.validate import check_dtype
from dist_amp.errors import ConfigError
from dist_amp.runtime.process import set_tf32
from dist_amp.settings import PrecisionConfig, ScalerConfig
from dist_amp.world import World

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Casts, and keeps the one loss scale; the decision to skip is made for the whole world in optim.py.

    `scale`: the loss scale, scalar float32 on the device; 1 unless in fp16. Read, never written, by others.
    `scales`: whether the loss is scaled: in fp16 alone.
    """

    def __init__(
        self,
        config: PrecisionConfig,
        cast_by: Literal["autocast", "policy", "nothing"],
        device: torch.device,
        sharded: bool = False,
    ):
        self.name = config.name
        self.dtype = DTYPES[config.name]
        self.scales = config.name == "fp16"
        self.cast_by = cast_by
        self.sharded = sharded
        self.device = device
        self.scale = torch.full((), config.scaler.init_scale if self.scales else 1.0, device=device)
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)  # finite steps since it last moved
        self._knobs = config.scaler
        # Kept and entered again and again: half a microsecond cheaper per micro-batch than building it anew.
        self._autocast: AbstractContextManager[Any] = nullcontext()
        if cast_by == "autocast":
            self._autocast = torch.autocast(device.type, dtype=self.dtype)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for forward and loss; does nothing where a policy or nothing casts."""
        return self._autocast

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of the scaled loss."""
        (loss * self.scale).backward()

    @contextmanager
    def weights_cast_once(self, micro_batches: int) -> Iterator[None]:
        """Inside, autocast casts each weight at its first use alone, and not again for every micro-batch.

        Its cache is kept while the nesting is above zero; the weights must not change meanwhile. Autocast itself stays
        off outside of `autocast()`, for backward above all. Not for sharded weights, of which it would hold whole
        copies; nor for a single micro-batch, whose copies backward frees as it goes. On a GPU, activation checkpointing
        enters autocast in another thread and leaves it, which empties the cache: weights are cast more often then.
        """
        if self.cast_by != "autocast" or self.sharded or micro_batches == 1:
            yield
            return
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()

    @torch.no_grad()
    def update(self, found_inf: Tensor) -> None:
        """Move fp16's scale, once per step: back off if `found_inf` (scalar float32, 0 or 1, equal on all ranks).

        By torch.amp.GradScaler's own kernel. The rest of that class asks each rank's gradients alone, and where.
        """
        knobs = self._knobs
        torch._amp_update_scale_(
            self.scale,
            self._growth_tracker,
            found_inf,
            knobs.growth_factor,
            knobs.backoff_factor,
            knobs.growth_interval,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """The scale and the finite steps since it last moved: device tensors, empty unless in fp16."""
        return {"scale": self.scale, "growth_tracker": self._growth_tracker} if self.scales else {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self.state_dict().items():
                tensor.copy_(state[name])


def build_precision(config: PrecisionConfig, sharded: bool, world: World) -> Precision:
    """The precision of a run whose parameters are `sharded` (fsdp, hsdp) or whole (single, ddp)."""
    set_tf32(config.tf32)
    check_dtype(config, world)
    if config.cast_by == "policy" and not sharded:
        raise ConfigError(
            "precision.cast_by=policy needs parallel.strategy fsdp or hsdp; use precision.cast_by=autocast"
        )
    if config.cast_by != "auto" and not config.use_amp:
        raise ConfigError(f"precision.cast_by={config.cast_by} casts, but use_amp=false computes in float32; use auto")
    if config.scaler != ScalerConfig() and config.name != "fp16":
        world.warn(f"precision.scaler has no effect in {config.name}: only fp16 needs a loss scaler")
    if config.scaler.init_scale < config.scaler.min_scale and config.name == "fp16":
        raise ConfigError(
            f"precision.scaler.init_scale={config.scaler.init_scale:g} is below precision.scaler.min_scale="
            f"{config.scaler.min_scale:g}, at which the run ends; raise the one or lower the other"
        )
    if not config.use_amp:
        return Precision(config, "nothing", world.device)
    by_policy = config.cast_by == "policy" or (config.cast_by == "auto" and sharded)
    return Precision(config, "policy" if by_policy else "autocast", world.device, sharded)
