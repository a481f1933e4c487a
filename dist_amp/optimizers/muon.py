"""Muon: momentum, orthogonalised, for hidden matrices; AdamW for all other parameters, in one optimizer.

Source: Keller Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. The update is scaled as in Liu et al.
2025, arXiv:2502.16982, so that AdamW's learning rate and weight decay fit. One process computes what torch.optim.Muon
does. Under FSDP2 the momentum is sharded as the parameters are; each step gathers each matrix's update once, in
bfloat16, every rank orthogonalises it and keeps its own part. Nothing is read from the device.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from dist_amp.fast.fused import Bundle, FusedAdamW

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration; Keller Jordan's, as in torch.optim.Muon


class Muon(FusedAdamW):
    """groups: dicts as for any torch optimizer. One with `use_muon` true gets Muon, the others AdamW.

    use_muon: by default where all of the group's parameters are matrices. momentum, nesterov, ns_steps, adjust_lr_fn:
    of Muon, as in torch.optim.Muon; betas, eps: of AdamW. lr, weight_decay: of both. fused: whether it unscales and
    skips by itself, reading nothing; false: the loop does, as with any other optimizer.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool = True,
    ):
        own = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        made = []
        for group in groups:
            parameters = list(group["params"])
            made.append({"use_muon": all(p.ndim == 2 for p in parameters), **own, **group, "params": parameters})
            other = next((p for p in parameters if p.ndim != 2), None)
            if made[-1]["use_muon"] and other is not None:
                raise ValueError(f"Muon takes matrices, not a parameter of shape {list(other.shape)}: use_muon=False")
        super().__init__(made, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        self.defaults.update(own)
        self._step_supports_amp_scaling = fused

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's expects a step count for every parameter

    def _initial_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        if group["use_muon"]:
            return {"momentum_buffer": torch.zeros_like(parameter)}
        return super()._initial_state(parameter, group)

    def _update_bundle(self, bundle: Bundle) -> None:
        if not bundle.group["use_muon"]:
            super()._update_bundle(bundle)
            return
        group, skips = bundle.group, self.found_inf
        # A skipped step moves by 0 times a finite update: the gradients, which are not finite, are replaced by zeros.
        applied = 1.0 if skips is None else 1 - skips
        lr, weight, momentum = group["lr"] * applied, (1 - group["momentum"]) * applied, group["momentum"]
        parts, gradients = bundle.locals()
        for whole, part, gradient, buffer in zip(
            bundle.parameters, parts, gradients, bundle.state["momentum_buffer"], strict=True
        ):
            if self.grad_scale is not None:
                gradient = gradient / self.grad_scale
            if skips is not None:
                gradient = torch.where(skips > 0, 0.0, gradient)
            buffer.lerp_(gradient, weight.to(buffer.dtype) if isinstance(weight, Tensor) else weight)
            update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
            update = own_part(orthogonalised(gathered(update.bfloat16(), whole), group["ns_steps"]), whole)
            rows, columns = whole.shape
            ratio = math.sqrt(max(1, rows / columns))
            if group["adjust_lr_fn"] == "match_rms_adamw":
                ratio = 0.2 * math.sqrt(max(rows, columns))
            part.mul_(1 - lr * group["weight_decay"])
            part.sub_(update.to(part) * (lr * ratio))


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly: singular values end between 0.7 and 1.2. [rows, columns] bfloat16.

    Newton-Schulz iteration with the coefficients of Keller Jordan 2024.
    """
    a, b, c = COEFFICIENTS
    x = matrix.T if len(matrix) > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if len(matrix) > matrix.shape[1] else x


def gathered(part: Tensor, like: Tensor) -> Tensor:
    """The full tensor of which this rank holds `part`, sharded as `like` is: one all-gather; `part` if it is whole."""
    if not isinstance(like, DTensor):
        return part
    sharded = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return sharded.full_tensor()


def own_part(full: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that all ranks hold, sharded as `like` is; no communication."""
    if not isinstance(like, DTensor):
        return full
    mesh = like.device_mesh
    whole = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=like.placements).to_local()
