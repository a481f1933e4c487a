"""Reads a checkpoint without running any code from it."""

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors

from dist_amp.checkpoint.format import (
    Refused,
)


def be_quiet_when_alone() -> None:
    """One process without a process group is a way to run, not a reason to warn. For good: threads share filters."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")


# All that torch's checkpoints pickle into `.metadata`. Each of them only holds what it is given.
HARMLESS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in ("PosixPath", "WindowsPath"):
            return lambda *parts: "/".join(parts)  # a pickle may set attributes of what it asks for
        if (module, name) == ("builtins", "getattr"):  # by which some releases of Python pickle an enum's member
            return _member
        if name not in HARMLESS.get(module, ()):
            raise Refused(f".metadata asks for {module}.{name}, which no checkpoint of ours holds; nothing was run")
        return super().find_class(module, name)


def _member(owner: Any, name: str) -> Any:
    if owner is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise Refused(f".metadata asks for {name} of {owner}, which no checkpoint of ours holds; nothing was run")
    return _MEM_FORMAT_ENCODING[name]


class Reader(FileSystemReader):
    """torch's reader of a checkpoint's folder, which unpickles only what is harmless and reads only what is listed."""

    def __init__(self, folder: Path, files: Mapping[str, Any]):
        super().__init__(folder)
        self._folder = folder
        self._files = files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            with (self._folder / ".metadata").open("rb") as file:
                metadata = _Unpickler(file).load()
        except (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, pickle.PickleError) as error:
            raise Refused(f".metadata can't be read ({error})") from None
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise Refused(".metadata is not that of a checkpoint")
        for place in metadata.storage_data.values():
            if place.relative_path not in self._files:
                raise Refused(f".metadata points to {place.relative_path!r}, which the manifest does not list")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Planner(DefaultLoadPlanner):
    """torch's planner, whose entries that are not tensors may be plain data alone."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        torch.load(value, weights_only=True)  # raises where it is more; torch's own next line would run it
        value.seek(0)
        super().load_bytes(read_item, value)


def read_into(state: dict[str, Any], reader: Reader, alone: bool) -> None:
    """Fill the tensors of `state`; every rank calls it, unless one reads alone, without a process group.

    Errors: Refused, or torch's CheckpointException, which is no Exception.
    """
    try:
        be_quiet_when_alone()
        read_tensors(state, storage_reader=reader, planner=Planner(), no_dist=alone)
    except CheckpointException as error:
        refused = next((e for e, _ in error.failures.values() if isinstance(e, Refused)), None)
        raise refused or error from None
