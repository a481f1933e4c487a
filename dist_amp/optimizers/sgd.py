"""SGD with momentum by torch's fused kernel, which unscales or skips without a host-device sync."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from dist_amp.settings import OptimConfig
from dist_amp.world import local


class FusedSGD(torch.optim.SGD):
    """torch's fused SGD leaves momentum uninitialised if it skips the first step, and can't take
    sharded parameters with a learning rate on the device. Here momentum starts at zero, which gives
    the same first step if dampening is 0, and the kernel gets this rank's shards.
    """

    _step_supports_amp_scaling = True
    takes_device_lr = True
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            momenta: list[Any] = [None] * len(parameters)
            if group["momentum"]:
                for p in parameters:
                    if "momentum_buffer" not in self.state[p]:
                        self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                momenta = [local(self.state[p]["momentum_buffer"]) for p in parameters]
            sgd(
                [local(p) for p in parameters],
                [local(p.grad) for p in parameters],
                momenta,
                fused=True,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
            )


def build_sgd(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    """SGD for these groups. Fused if optim.fused is set and the kernel supports all parameters."""
    parameters = [p for group in groups for p in group["params"]]
    if config.fused and not any(on_cpu_in_half(p) for p in parameters):
        return FusedSGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)


def on_cpu_in_half(parameter: Tensor) -> bool:
    """Whether torch's fused SGD would silently leave the parameter unchanged (pytorch#191763)."""
    half = parameter.dtype in (torch.float16, torch.bfloat16)
    return half and parameter.device.type == "cpu"
