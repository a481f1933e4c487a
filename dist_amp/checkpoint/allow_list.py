"""Reads untrusted checkpoints: nothing in one can run code.

torch pickles `.metadata`, and unpickling can call any function. So only classes on an allow-list
are unpickled, and entries that are not tensors are read by torch.load with weights_only=True.
"""

import pickle
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from dist_amp.errors import CheckpointRejected

# Everything that torch pickles into `.metadata`: plain containers, some of them private to torch.
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
            # Returns a string, whose attributes a pickle can't set.
            return lambda *parts: "/".join(parts)
        if (module, name) == ("builtins", "getattr"):
            # Some Python releases pickle enum members as getattr calls: allow this enum's only.
            return lambda _owner, member: _MEM_FORMAT_ENCODING[member]
        if name not in ALLOWED.get(module, ()):
            raise CheckpointRejected(
                f".metadata asks for {module}.{name}, which no checkpoint needs; nothing was run"
            )
        allowed: Any = super().find_class(module, name)
        if isinstance(allowed, torch.dtype) or allowed is torch.Size:  # immutable
            return allowed
        if name == "OrderedDict":
            return dict
        if not hasattr(allowed, "__dataclass_fields__"):
            return lambda value: allowed(value)
        # A pickle can set attributes of a class, so it gets a stand-in, whose instances are real.
        new: Any = lambda _, *args: allowed(*args) if args else object.__new__(allowed)  # noqa: E731
        return type(name, (), {"__new__": new})


def read_metadata(folder: Path, files: Mapping[str, Any]) -> Metadata:
    """The content of `.metadata`. files: the manifest's; each tensor must be stored in one of them.

    Raises CheckpointRejected for anything that torch would not write.
    """
    try:
        with (folder / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointRejected(".metadata is not that of a checkpoint")
        _check_storage(metadata, files)
    except CheckpointRejected:
        raise
    except Exception as error:  # damaged bytes may raise anything
        raise CheckpointRejected(f".metadata can't be read ({error})") from None
    return metadata


def _check_storage(metadata: Metadata, files: Mapping[str, Any]) -> None:
    """Raises CheckpointRejected for a tensor that is stored in another file, or incompletely."""
    for place in metadata.storage_data.values():
        if place.relative_path not in files:
            raise CheckpointRejected(
                f".metadata points to {place.relative_path!r}, which the manifest does not list"
            )
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        indices = [MetadataIndex(name, chunk.offsets) for chunk in entry.chunks]
        places = [metadata.storage_data.get(index) for index in indices]
        elements = prod(entry.size)
        is_whole = None not in places and min(entry.size, default=0) >= 0
        is_whole = is_whole and elements == sum(prod(chunk.sizes) for chunk in entry.chunks)
        stored = sum(files[place.relative_path]["bytes"] for place in places if place)
        if not is_whole or elements * entry.properties.dtype.itemsize > stored:
            raise CheckpointRejected(f".metadata has {name} of {[*entry.size]} without its content")


class Planner(DefaultLoadPlanner):
    """torch's load planner, with only plain data allowed for entries that are not tensors."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        # Raises for anything but plain data, which the base class would unpickle.
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
