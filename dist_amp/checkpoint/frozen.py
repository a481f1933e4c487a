"""Frozen parameters, such as the base of LoRA: a checkpoint holds a checksum of each in place of its values.

The task makes them again: with the run's seed in build_model, or from files. Parameters that are frozen and yet change,
such as a teacher that follows the model, are recognised and saved.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dist_amp.errors import DataError
from dist_amp.fast.fused import local
from dist_amp.parallel import Parallel

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

CHUNK = 2**20  # elements at a time, which bounds the memory it takes

SAMPLED_ELEMENTS = 2**12  # of each parameter, spread over it, that are compared to notice a change


def frozen_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not trained, by their names."""
    return {name: p for name, p in module.named_parameters() if not p.requires_grad}


def frozen_names(module: nn.Module) -> set[str]:
    """All names of these parameters in the module's state: tied ones have several."""
    return {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Scalar int64 on the tensor's device, from the bits of its elements in any order.

    The sum of two parts' checksums is the checksum of both together, so that it does not depend on the sharding; nor
    does it on the dtype, if that holds the same values.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in tensor.detach().reshape(-1).split(CHUNK):
        part = part.float() if part.is_floating_point() else part
        bits = part.view(INTEGERS[part.element_size()]).long()
        bits = (bits + 1) * -7046029254386353131  # splitmix64's constants; products wrap around
        bits = (bits ^ (bits >> 30)) * -4658895280553007687
        total += (bits ^ (bits >> 27)).sum()
    return total


def saved_checksums(module: nn.Module, metadata: Metadata, path: Path) -> dict[str, Tensor]:
    """{"frozen": a tensor to read a checkpoint's checksums into}; empty if it has none.

    Errors: DataError if it was made with another number of frozen parameters.
    """
    entry, here = metadata.state_dict_metadata.get("frozen"), len(frozen_parameters(module))
    there = entry.size[0] if isinstance(entry, TensorStorageMetadata) else 0
    stored = any(f"model.{name}" in metadata.state_dict_metadata for name in frozen_names(module))
    if there != here and not stored:
        raise DataError(
            f"checkpoint {path} does not fit this model: {there} parameters were frozen there and {here} are here; "
            "freeze the same ones as then"
        )
    return {"frozen": torch.zeros(there, dtype=torch.int64)} if there else {}


def checksums(parallel: Parallel) -> Tensor:
    """[frozen parameters] int64 on the device: the checksum of each whole parameter, equal on every rank."""
    world, frozen = parallel.world, frozen_parameters(parallel.module)
    own = torch.zeros(len(frozen), dtype=torch.int64, device=world.device)
    if frozen and world.rank < world.world_size // parallel.replicas:  # of several copies, the first one counts
        own = torch.stack([checksum(local(p)).to(world.device) for p in frozen.values()])
    return world.sum(own)


class FrozenBase:
    """What the frozen parameters of a run were before its first step, and what they still are.

    changes: whether any of them differed from that when `notice_change` was last called.
    """

    def __init__(self, parallel: Parallel):
        """Call it before anything is restored into the model."""
        self._parallel = parallel
        self._frozen = frozen_parameters(parallel.module)
        self._at_start = self._samples()
        self._checksums: Tensor | None = None
        self.changes = False

    def _samples(self) -> list[Tensor]:
        return [_spread(local(p.detach())).clone() for p in self._frozen.values()]

    def notice_change(self) -> bool:
        """Whether frozen parameters have changed on any rank since the start; every rank calls it."""
        if self._frozen and not self.changes:
            changed = any(not torch.equal(a, b) for a, b in zip(self._at_start, self._samples(), strict=True))
            self.changes = any(row[0] for row in self._parallel.world.gather_numbers([float(changed)]))
        return self.changes

    def checksums(self) -> Tensor:
        """Of the parameters at the start, [frozen parameters] int64; computed once. Every rank calls it."""
        if self._checksums is None:
            self._checksums = checksums(self._parallel)
        return self._checksums

    def check(self, saved: Tensor, path: Path) -> None:
        """Errors: DataError that names the first frozen parameter that is another than the checkpoint's."""
        differs = (self.checksums().cpu() != saved.cpu()).tolist()
        check_same(path, [name for name, other in zip(self._frozen, differs, strict=True) if other])


def check_frozen(module: nn.Module, saved: Tensor, path: Path) -> None:
    """Errors: DataError if the frozen parameters of a model in one process are others than the checkpoint's.

    parallel.param_dtype=bf16 rounded them in the run.
    """
    frozen = frozen_parameters(module)
    differing = [
        name
        for (name, p), value in zip(frozen.items(), saved.tolist(), strict=True)
        if value not in (checksum(p).item(), checksum(p.bfloat16()).item())
    ]
    check_same(path, differing)


def check_same(path: Path, differing: list[str]) -> None:
    """Errors: DataError for frozen parameters, by their names, that are others than the checkpoint's."""
    if differing:
        raise DataError(
            f"checkpoint {path} was trained on another frozen {differing[0]} ({len(differing)} such), which it does "
            "not contain; give the task the same pretrained weights, arguments and seed as then"
        )


def _spread(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED_ELEMENTS)]
