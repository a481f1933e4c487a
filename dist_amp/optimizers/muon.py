"""Muon: momentum, orthogonalised, for hidden matrices; AdamW for the other parameters.

Source: Keller Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; scaled as in Liu et
al. 2025, arXiv:2502.16982. One process computes what torch.optim.Muon does. Under FSDP2 each step
gathers each matrix's update once, in bfloat16; every rank orthogonalises it and keeps its part.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from dist_amp.world import local

# Of the quintic iteration; Keller Jordan's, as in torch.optim.Muon.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5

Group = dict[str, Any]


class Muon(torch.optim.Optimizer):
    """groups: dicts as for any torch optimizer. One with `use_muon` true gets Muon, others AdamW.

    use_muon: by default where all of the group's parameters are matrices. momentum: of Muon, which
    is Nesterov's; betas, eps: of AdamW. fused: whether it unscales and skips by itself, without a
    host read.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    takes_device_lr = True
    _step_supports_amp_scaling = True

    def __init__(
        self,
        groups: Iterable[Group],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool = True,
    ):
        # Holds AdamW's options; in `step` it gets this optimizer's state and AdamW groups.
        unused = [torch.zeros(1)]
        self._adamw = torch.optim.AdamW(unused, lr, betas, eps, weight_decay, fused=fused)
        copies = []
        for group in groups:
            parameters = list(group["params"])
            matrices_only = all(p.ndim == 2 for p in parameters)
            copy = {"use_muon": matrices_only, **group, "params": parameters}
            if any(p.is_meta for p in parameters):  # only planned with; no fused kernel takes them
                copy["fused"] = False
            if copy["use_muon"] and not matrices_only:
                other = next(p for p in parameters if p.ndim != 2)
                raise ValueError(
                    f"Muon takes matrices, not a parameter of shape {list(other.shape)}: "
                    "use_muon=False"
                )
            copies.append(copy)
        super().__init__(copies, {**self._adamw.defaults, "momentum": momentum})
        self._step_supports_amp_scaling = fused

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        adamw: Any = self._adamw
        adamw.param_groups = [group for group in self.param_groups if not group["use_muon"]]
        adamw.state = self.state
        adamw.grad_scale = self.grad_scale
        adamw.found_inf = self.found_inf
        adamw.step()
        for group in self.param_groups:
            if group["use_muon"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)

    def _update(self, parameter: Tensor, group: Group) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = local(state["momentum_buffer"])
        part = local(parameter)
        assert parameter.grad is not None
        gradient = local(parameter.grad)
        lr = group["lr"]
        weight: Any = 1 - group["momentum"]
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        if self.found_inf is not None:
            # A skipped step moves by 0 times a finite update: zeros replace the gradients.
            applied = 1 - self.found_inf
            gradient = torch.where(self.found_inf > 0, 0.0, gradient)
            lr = lr * applied
            weight = (weight * applied).to(buffer.dtype)
        buffer.lerp_(gradient, weight)
        update = gradient.lerp(buffer, group["momentum"])
        update = orthogonalised_part(update.bfloat16(), parameter)
        ratio = 0.2 * math.sqrt(max(parameter.shape))  # the RMS of AdamW's updates
        part.mul_(1 - lr * group["weight_decay"])
        part.sub_(update.to(part) * (lr * ratio))


def muon_groups(model: nn.Module, weight_decay: float) -> list[Group]:
    """Hidden matrices for Muon; embeddings, the last matrix (the output) and vectors for AdamW."""
    trained = [p for p in model.parameters() if p.requires_grad]
    two_d = [p for p in trained if p.ndim == 2]
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    by_adamw = {*(embedding.weight for embedding in embeddings), *two_d[-1:]}
    hidden = [p for p in two_d if p not in by_adamw]
    others = [p for p in trained if p.ndim > 2 or p in by_adamw]
    vectors = [p for p in trained if p.ndim < 2]
    groups: list[Group] = [
        {"name": "hidden matrices", "params": hidden, "use_muon": True},
        {"name": "matrices", "params": others, "use_muon": False},
        {"name": "vectors", "params": vectors, "use_muon": False},
    ]
    for group in groups:
        group["weight_decay"] = weight_decay
    groups[-1]["weight_decay"] = 0.0
    return [group for group in groups if group["params"]]


def orthogonalised(matrix: Tensor) -> Tensor:
    """Roughly the nearest semi-orthogonal matrix: singular values end between 0.7 and 1.2.

    [rows, columns] bfloat16. Newton-Schulz iteration with the coefficients of Keller Jordan 2024.
    """
    a, b, c = COEFFICIENTS
    is_tall = len(matrix) > matrix.shape[1]
    x = matrix
    if is_tall:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    if is_tall:
        return x.T
    return x


def orthogonalised_part(part: Tensor, like: Tensor) -> Tensor:
    """This rank's part of an orthogonalised matrix, sharded as `like` is: one all-gather."""
    if not isinstance(like, DTensor):
        return orthogonalised(part)
    mesh = like.device_mesh
    size: Group = {"shape": like.shape, "stride": like.stride()}
    sharded = DTensor.from_local(part, mesh, like.placements, run_check=False, **size)
    full = orthogonalised(sharded.full_tensor())
    whole = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=like.placements).to_local()
