"""Muon: orthogonalised momentum updates for hidden matrices; AdamW for the other parameters.

Source: Keller Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; scaled as in Liu et
al. 2025, arXiv:2502.16982. One process computes what torch.optim.Muon does. With several ranks,
each matrix has one owner, the rank that orthogonalises it. A step exchanges updates in bfloat16:

    all-to-all    sends all shards of a matrix to its owner, which orthogonalises the whole matrix
    all-to-all    sends the result back to the shards
    all-gather    over the replicas (DDP, HSDP), each of which owns some of the matrices

Docs: docs/recipes.md
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from dist_amp.world import all_gather_single, local

# Keller Jordan's quintic Newton-Schulz iteration, as in torch.optim.Muon.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
# Elements that a rank gathers per exchange, 128 MiB (assumed); one matrix per owner may take more.
ELEMENTS_AT_ONCE = 2**26

Group = dict[str, Any]


# A matrix's owner, and the slice of what each rank sends to the owner that has the matrix's shard.
class Place(NamedTuple):
    matrix: Tensor
    owner: int  # replica * shards + shard, not a global rank
    start: int
    stop: int  # start + elements of a full shard; the last one may have fewer


class Muon(torch.optim.Optimizer):
    """groups: as for any torch optimizer. Groups with use_muon=True use Muon, the rest AdamW.

    use_muon defaults to whether all of the group's parameters are matrices. momentum: Muon's
    Nesterov momentum; betas, eps: AdamW's. fused: unscale and skip without a host-device sync.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    takes_device_lr = True
    matrices_at_once = 2**10  # in one batched product; another batch size may round differently
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
        # Holds AdamW's options. `step` gives it this optimizer's state and the groups for AdamW.
        unused = [torch.zeros(1)]
        self._adamw = torch.optim.AdamW(unused, lr, betas, eps, weight_decay, fused=fused)
        copies = []
        for group in groups:
            parameters = list(group["params"])
            matrices_only = all(p.ndim == 2 for p in parameters)
            copy = {"use_muon": matrices_only, **group, "params": parameters}
            if any(p.is_meta for p in parameters):  # in `dist_amp plan`; fused kernels reject them
                copy["fused"] = False
            if copy["use_muon"] and not matrices_only:
                raise ValueError("use_muon=True is for a group of 2-D parameters only; split it")
            copies.append(copy)
        super().__init__(copies, {**self._adamw.defaults, "momentum": momentum})
        self._step_supports_amp_scaling = fused
        self._planned: Any = set()  # the matrices in `_exchanges`
        self._exchanges: Any = []  # (layout, [Place of each matrix])

    def take_one_at_a_time(self) -> None:
        self.matrices_at_once = 1

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        adamw: Any = self._adamw
        adamw.param_groups = [group for group in self.param_groups if not group["use_muon"]]
        adamw.state = self.state
        adamw.grad_scale = self.grad_scale
        adamw.found_inf = self.found_inf
        adamw.step()
        with_muon = [group for group in self.param_groups if group["use_muon"]]
        groups = {p: group for group in with_muon for p in group["params"] if p.grad is not None}
        if groups.keys() != self._planned:  # not the same matrices have gradients as before
            self._planned = set(groups)
            layouts: Any = {}
            for matrix in groups:
                layouts.setdefault(layout_of(matrix), []).append(matrix)
            self._exchanges = []
            for layout, matrices in layouts.items():
                _, shards, replicas = layout
                for places in plan_exchanges(matrices, shards[1], replicas[1]):
                    self._exchanges.append((layout, places))
        for layout, places in self._exchanges:
            self._update(layout, places, groups)

    def _update(self, layout: Any, places: Any, groups: Any) -> None:
        """Update the matrices of one exchange, as described at the top of this file."""
        device, (shard_group, shards, shard), (replica_group, replicas, replica) = layout
        size = max(place.stop for place in places)
        sent = torch.empty(shards, size, dtype=torch.bfloat16, device=device)  # row i: to shard i
        for matrix, owner, start, _ in places:
            update = self._with_momentum(matrix, groups[matrix])
            if owner // shards == replica:  # otherwise another replica's ranks send it
                end = start + update.numel()
                sent[owner % shards, start:end] = update.flatten()
        gathered = sent
        if shards > 1:
            gathered = torch.empty_like(sent)
            dist.all_to_all_single(gathered, sent, group=shard_group)
        owned: Any = {}
        for matrix, owner, start, stop in places:
            if owner == replica * shards + shard:
                part = gathered[:, start:stop]  # [shards, elements of a shard]
                owned.setdefault(matrix.shape, []).append(part)
        for shape, parts in owned.items():
            self._orthogonalise(shape, parts)
        if shards > 1:
            dist.all_to_all_single(sent, gathered, group=shard_group)
        updates = sent
        if replicas > 1:
            updates = sent.new_empty(replicas * shards, size)  # row i: from owner i
            all_gather_single(updates, sent, group=replica_group)
        for matrix, owner, start, _ in places:
            end = start + local(matrix).numel()
            update = updates[owner, start:end]
            self._apply(update, matrix, groups[matrix])

    def _orthogonalise(self, shape: Any, parts: list[Tensor]) -> None:
        """Orthogonalise matrices of one shape in place: [shards, elements of a shard] each."""
        rows, columns = shape
        padded = torch.stack(parts).view(len(parts), -1, columns)  # the last shard may be short
        for matrices in padded[:, :rows].split(self.matrices_at_once):
            matrices.copy_(orthogonalised(matrices))
        for part, update in zip(parts, padded, strict=True):
            part.copy_(update.view_as(part))

    def _with_momentum(self, parameter: Tensor, group: Group) -> Tensor:
        """Update the momentum; returns this rank's shard of the update, not yet orthogonalised."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = local(state["momentum_buffer"])
        assert parameter.grad is not None
        gradient = local(parameter.grad)
        weight: Any = 1 - group["momentum"]
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        if self.found_inf is not None:
            # A skipped step keeps the momentum: weight 0, and gradient 0, because 0 * inf is nan.
            gradient = torch.where(self.found_inf > 0, 0.0, gradient)
            weight = (weight * (1 - self.found_inf)).to(buffer.dtype)
        buffer.lerp_(gradient, weight)
        return gradient.lerp(buffer, group["momentum"])

    def _apply(self, update: Tensor, parameter: Tensor, group: Group) -> None:
        part = local(parameter)
        lr = group["lr"]
        if self.found_inf is not None:
            lr = lr * (1 - self.found_inf)
        ratio = 0.2 * math.sqrt(max(parameter.shape))  # matches the RMS of AdamW's updates
        part.mul_(1 - lr * group["weight_decay"])
        part.sub_(update.view_as(part).to(part) * (lr * ratio))


def muon_groups(model: nn.Module, weight_decay: float) -> list[Group]:
    """Hidden matrices for Muon; embeddings, the last matrix (the output) and vectors for AdamW."""
    trained = [p for p in model.parameters() if p.requires_grad]
    two_d = [p for p in trained if p.ndim == 2]
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    by_adamw = {*(embedding.weight for embedding in embeddings), *two_d[-1:]}
    hidden = [p for p in two_d if p not in by_adamw]
    other_matrices = [p for p in trained if p.ndim > 2 or p in by_adamw]
    vectors = [p for p in trained if p.ndim < 2]
    groups: list[Group] = [
        {"name": "hidden matrices", "params": hidden, "use_muon": True},
        {"name": "matrices", "params": other_matrices, "use_muon": False},
        {"name": "vectors", "params": vectors, "use_muon": False, "weight_decay": 0.0},
    ]
    return [{"weight_decay": weight_decay, **group} for group in groups if group["params"]]


def orthogonalised(matrices: Tensor) -> Tensor:
    """Approximately the nearest semi-orthogonal matrices: singular values between 0.7 and 1.2.

    [count, rows, columns] bfloat16. Newton-Schulz iteration with Keller Jordan's coefficients.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices
    if is_tall:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    if is_tall:
        return x.mT
    return x


def layout_of(matrix: Tensor) -> Any:
    """Returns (device, shards, replicas) of a matrix. shards, replicas: (group, size, own rank)."""
    device: Any = matrix.device
    unsplit = None, 1, 0
    ranks: Any = {Shard(0): unsplit, Replicate(): unsplit}
    if isinstance(matrix, DTensor):
        mesh = matrix.device_mesh
        device = mesh.device_type  # of collectives; under CPU offload, the matrix is on the host
        for dimension, placement in enumerate(matrix.placements):
            if ranks.get(placement) != unsplit:
                raise ValueError(
                    f"Muon takes matrices that are sharded by rows, once, not {matrix.placements}; "
                    "set use_muon=False for them"
                )
            group = mesh.get_group(dimension)
            ranks[placement] = group, group.size(), group.rank()
    elif hasattr(matrix, "is_replicated") and dist.is_initialized():  # under DDP
        ranks[Replicate()] = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    return device, *ranks.values()


def plan_exchanges(matrices: Iterable[Tensor], shards: int, replicas: int) -> list[Any]:
    """The places by exchange; matrices, largest first, go to the least busy rank (Graham 1969)."""

    def work(matrix: Tensor) -> int:
        short, long = sorted(matrix.shape)
        return short * short * (2 * long + short)

    ranks = shards * replicas
    loads = [0] * ranks
    ends = [ELEMENTS_AT_ONCE + 1] * ranks  # of each owner's last place; at first, as if full
    exchanges: Any = []
    for matrix in sorted(matrices, key=lambda matrix: (-work(matrix), matrix.shape)):
        owner = loads.index(min(loads))
        loads[owner] += work(matrix)
        rows, columns = matrix.shape
        length = math.ceil(rows / shards) * columns
        if ends[owner] and (ends[owner] + length) * ranks > ELEMENTS_AT_ONCE:
            ends = [0] * ranks
            exchanges.append([])
        start = ends[owner]
        ends[owner] += length
        exchanges[-1].append(Place(matrix, owner, start, ends[owner]))
    return exchanges
