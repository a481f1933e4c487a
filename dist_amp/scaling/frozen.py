"""Frozen parameters, such as LoRA's base: a checkpoint stores a checksum in place of each one.

On resume the task builds them again, and the checksums must match. If any of them changes during
training, as in a teacher that is a moving average, all of them are saved like trained ones.

Docs: docs/checkpointing.md
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dist_amp.errors import DataError
from dist_amp.world import World, local

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 2**20  # elements hashed at a time, to bound the memory
SAMPLED_ELEMENTS = 2**12  # per parameter, compared to detect a change; at most twice as many


def frozen_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if not p.requires_grad}


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Checksum of the elements in any order, so that shards' checksums add up: scalar int64."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in tensor.detach().reshape(-1).split(CHUNK):
        part = part.float() if part.is_floating_point() else part
        bits = part.view(INTEGERS.get(part.element_size(), torch.int64)).long()  # complex128: 16
        bits = (bits + 1) * -7046029254386353131  # splitmix64's constants; products wrap around
        bits = (bits ^ (bits >> 30)) * -4658895280553007687
        total += (bits ^ (bits >> 27)).sum()
    return total


def frozen_names(module: nn.Module) -> set[str]:
    """All names of the frozen parameters in the module's state dict; tied ones have several."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {name for name, p in parameters if not p.requires_grad}


def expect_checksums(
    state: dict[str, Any], module: nn.Module, metadata: Metadata, path: Path
) -> None:
    """Replace frozen parameters in the state to load by checksums, if the checkpoint has those.

    Raises DataError if the checkpoint was saved with another number of frozen parameters.
    """
    entry = metadata.state_dict_metadata.get("frozen")
    saved = entry.size.numel() if isinstance(entry, TensorStorageMetadata) else 0
    count = len(frozen_parameters(module))
    in_full = any(f"model.{name}" in metadata.state_dict_metadata for name in frozen_names(module))
    if saved != count and not in_full:
        raise DataError(
            f"checkpoint {path} has {saved} frozen parameters and this model {count}; freeze the "
            "same parameters as in the run that saved it"
        )
    if saved:
        put_checksums(state, module, torch.zeros(saved, dtype=torch.int64))


def put_checksums(state: dict[str, Any], module: nn.Module, checksums: Tensor) -> None:
    names = frozen_names(module)
    state["model"] = {name: value for name, value in state["model"].items() if name not in names}
    state["frozen"] = checksums


class FrozenBase:
    """An observer that keeps the frozen parameters' checksums, and notices if the values change."""

    section = "frozen"

    def __init__(self, module: nn.Module, world: World, replicas: int):
        """Create it before a checkpoint is loaded. replicas: how many copies the ranks hold."""
        self._world = world
        self._replicas = replicas
        self._frozen = frozen_parameters(module)
        self._at_start = self._samples()
        self._checksums: Tensor | None = None  # of each unsharded parameter, as at the start
        self._changes = False

    def _samples(self) -> list[Tensor]:
        samples = []
        for parameter in self._frozen.values():
            flat = local(parameter.detach()).reshape(-1)
            every = max(1, flat.numel() // SAMPLED_ELEMENTS)
            samples.append(flat[::every].clone())
        return samples

    def state_dict(self) -> Tensor | None:
        """The checksums to save in place of the parameters; None once any parameter has changed."""
        if not self._changes:
            changed = not all(map(torch.equal, self._at_start, self._samples()))
            self._changes = any(self._world.gather(changed))
        return None if self._changes else self.checksums().clone()

    def load_state_dict(self, saved: Tensor) -> None:
        """Raises DataError if a frozen parameter differs from its checksum in the checkpoint."""
        if len(saved):
            differs = (self.checksums().cpu() != saved.cpu()).tolist()
            names = zip(self._frozen, differs, strict=True)
            raise_if_any("the checkpoint", [name for name, is_different in names if is_different])

    def checksums(self) -> Tensor:
        """[parameters] int64, of each unsharded parameter at the start. Every rank must call it."""
        if self._checksums is None:
            device = self._world.device
            sums = torch.zeros(len(self._frozen), dtype=torch.int64, device=device)
            if self._world.rank < self._world.world_size // self._replicas:  # the first replica
                for index, parameter in enumerate(self._frozen.values()):
                    sums[index] = checksum(local(parameter)).to(device)
            self._checksums = self._world.sum(sums)
        return self._checksums


def check_frozen(module: nn.Module, saved: Tensor, path: Path) -> None:
    """Compare an unsharded model with a checkpoint's checksums; DataError if they differ."""
    frozen = frozen_parameters(module).items()
    # A run with parallel.param_dtype=bf16 has checksums of values rounded to bf16.
    differing = [
        name
        for (name, p), value in zip(frozen, saved.tolist(), strict=True)
        if value not in (checksum(p), checksum(p.bfloat16()))
    ]
    raise_if_any(f"checkpoint {path}", differing)


def raise_if_any(checkpoint: str, differing: list[str]) -> None:
    if differing:
        raise DataError(
            f"{checkpoint} was trained with another frozen {differing[0]} (differing parameters: "
            f"{len(differing)}), which it does not contain; give the task the same pretrained "
            "weights, arguments and seed as in that run"
        )
