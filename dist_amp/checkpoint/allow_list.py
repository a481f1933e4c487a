"""Reads untrusted checkpoints: nothing in one can run code.

`.metadata` is unpickled through an allow-list, and entries that are no tensors with weights_only.
"""

import pickle
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from dist_amp.errors import CheckpointRejected

# Everything that torch's checkpoints pickle into `.metadata`: plain containers without behaviour,
# some of them private to torch.
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
            # How some Python releases pickle an enum's member; here it gives no other attribute.
            return lambda _owner, member: _MEM_FORMAT_ENCODING[member]
        if name not in ALLOWED.get(module, ()):
            raise CheckpointRejected(
                f".metadata asks for {module}.{name}, which no checkpoint needs; nothing was run"
            )
        return super().find_class(module, name)


def read_metadata(folder: Path, files: Container[str]) -> Metadata:
    """The content of `.metadata`. Errors: CheckpointRejected, also if it points to other files."""
    try:
        with (folder / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
    except CheckpointRejected:
        raise
    except Exception as error:  # whatever damaged bytes make of a pickle
        raise CheckpointRejected(f".metadata can't be read ({error})") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointRejected(".metadata is not that of a checkpoint")
    for place in metadata.storage_data.values():
        if place.relative_path not in files:
            raise CheckpointRejected(
                f".metadata points to {place.relative_path!r}, which the manifest does not list"
            )
    return metadata


class Planner(DefaultLoadPlanner):
    """torch's load planner, restricted to plain data for entries that are not tensors."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        # Raises for anything else, which the base class would unpickle.
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
