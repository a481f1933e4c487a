"""Reads a checkpoint without running any code from it.

torch.distributed.checkpoint unpickles `.metadata` and every entry that is not a tensor, so a
hostile checkpoint could run code. Here `.metadata` is unpickled through an allow-list, with classes
that are private to torch since its checkpoints contain them, and the entries with weights_only.
"""

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors

from dist_amp.checkpoint.format import CheckpointRejected, read_manifest, reason
from dist_amp.distributed.process_group import without_timeout
from dist_amp.errors import DataError
from dist_amp.world import World

# Everything that torch's checkpoints pickle into `.metadata`: plain containers without behaviour.
ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "torch": {
        "Size",
        *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)),
    },
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in ("PosixPath", "WindowsPath"):
            # A string has no attributes that a pickle could set.
            return lambda *parts: "/".join(parts)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member  # how some Python releases pickle an enum's member
        if name not in ALLOWED.get(module, ()):
            raise CheckpointRejected(
                f".metadata asks for {module}.{name}, which no checkpoint needs; nothing was run"
            )
        return super().find_class(module, name)


def _enum_member(owner: Any, name: str) -> Any:
    if owner is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise CheckpointRejected(
            f".metadata asks for {name} of {owner}, which no checkpoint needs; nothing was run"
        )
    return _MEM_FORMAT_ENCODING[name]


class Reader(FileSystemReader):
    """torch's reader of a folder, limited to allowed classes and to the files of the manifest."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.folder = folder
        self.manifest = read_manifest(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            with (self.folder / ".metadata").open("rb") as file:
                metadata = _Unpickler(file).load()
        except CheckpointRejected:
            raise
        except Exception as error:  # whatever damaged bytes make of a pickle
            raise CheckpointRejected(f".metadata can't be read ({error})") from None
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise CheckpointRejected(".metadata is not that of a checkpoint")
        for place in metadata.storage_data.values():
            if place.relative_path not in self.manifest.files:
                raise CheckpointRejected(
                    f".metadata points to {place.relative_path!r}, which the manifest does not list"
                )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Planner(DefaultLoadPlanner):
    """torch's load planner, restricted to plain data for entries that are not tensors."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        # Raises for anything else, which the base class would unpickle.
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def read_into(state: dict[str, Any], reader: Reader, world: World | None = None) -> None:
    """Fill the tensors of `state`; every rank calls it. Errors: CheckpointRejected, or DCP's."""
    world = world or World()
    silence_single_process_warning()
    try:
        with without_timeout(world.control):  # one rank's disk may be slow
            read_tensors(
                state,
                storage_reader=reader,
                planner=Planner(),
                process_group=world.control,
                no_dist=world.world_size == 1,
            )
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if isinstance(failure, CheckpointRejected):
                raise failure from None
        raise


@contextmanager
def rejection_as_data_error(path: Path) -> Iterator[None]:
    """Errors: DataError that names the checkpoint, in place of what reading it raises."""
    try:
        yield
    except CheckpointRejected as error:
        raise DataError(f"checkpoint {path} is rejected: {error}") from None
    except CheckpointException as error:
        raise DataError(f"checkpoint {path} can't be loaded: {reason(error)}") from error


def silence_single_process_warning() -> None:
    """No process group is fine here. Set for good, because threads share warning filters."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
