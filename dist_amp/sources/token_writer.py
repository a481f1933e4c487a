"""Writes the files of tokens that token_shards.py describes: shard by shard, so that an interrupted run goes on."""

import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from dist_amp.errors import DataError, Failure
from dist_amp.runtime.files import sync_folder
from dist_amp.sources.token_shards import INDEX, Manifest, Split, TokenShard, counted_file, tokens_file


class SplitWriter:
    """Writes one split, after the shards that the manifest lists. Errors: Failure where the folder can't be written."""

    _file: BinaryIO | None

    def __init__(self, folder: Path, name: str, manifest: Manifest):
        self.folder, self.name, self.manifest = folder, name, manifest
        known = 24 * self.split.total("documents")
        if known and (folder / name / INDEX).stat().st_size < known:
            raise DataError(f"{folder / name / INDEX} has less than {known:,} bytes; remove {folder} and start again")
        with writing(folder):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._begin()

    @property
    def split(self) -> Split:
        return self.manifest.splits[self.name]

    def add(self, row: int, ids: np.ndarray[Any, Any], counted: np.ndarray[Any, Any]) -> None:
        """Add the document of a row: ids [n], and which of them count, bool [n]: not the first, at least one other."""
        if self._tokens and self._tokens + len(ids) > self.manifest.shard_tokens:
            self.finish_shard(row)
        self._index.extend((self._start + self._tokens, len(ids), int(counted.argmax())))
        self._counted += counted.tobytes()
        self._tokens += len(ids)
        with writing(self.folder):
            if self._file is None:
                self._file = self._temporary_tokens.open("wb")
            self._file.write(ids.astype(self.manifest.dtype).tobytes())

    def finish_shard(self, end_row: int) -> None:
        """Complete the shard, which ends before this row, and list it in the manifest."""
        number, inside = len(self.split.shards), self.folder / self.name
        counted = np.frombuffer(self._counted, bool)
        index = np.array(self._index, "<i8").tobytes()
        documents, total = len(self._index) // 3, int(counted.sum())
        assert self._file is not None
        with writing(self.folder):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            files = [tokens_file(number)]
            if total != self._tokens - documents:  # all but each document's first
                files.append(counted_file(number))
                _write(_temporary(inside / files[1]), np.packbits(counted).tobytes())
            _append(inside / INDEX, 24 * self.split.total("documents"), index)
            hashes = {name: _hashed(_temporary(inside / name)) for name in files}
            for name in files:
                _temporary(inside / name).replace(inside / name)
            sync_folder(inside)
            shard = TokenShard(end_row, documents, self._tokens, total, xxhash.xxh3_128_hexdigest(index), hashes)
            split = replace(self.split, shards=(*self.split.shards, shard))
            self.manifest = replace(self.manifest, splits={**self.manifest.splits, self.name: split})
            self.manifest.write(self.folder)
        self._begin()

    def close(self) -> None:
        """Remove a shard that is not complete."""
        if self._file is not None:
            with suppress(OSError):  # it was raised before
                self._file.close()
                self._temporary_tokens.unlink(missing_ok=True)

    @property
    def _temporary_tokens(self) -> Path:
        return _temporary(self.folder / self.name / tokens_file(len(self.split.shards)))

    def _begin(self) -> None:
        self._start, self._tokens = self.split.total("tokens"), 0
        self._index = array("q")  # of each document: its first token in the split, tokens, and the first that counts
        self._counted = bytearray()
        self._file = None


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Inside, an OSError is a Failure that names the folder."""
    try:
        yield
    except OSError as error:
        raise Failure(
            f"the tokens in {folder} can't be written ({error.strerror}); make room or name another folder: the same "
            "command then goes on after the last complete shard"
        ) from error


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.writing")


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _append(path: Path, at: int, data: bytes) -> None:
    """Write at a place in a file, and nothing after it: an interrupted run may have left more."""
    with path.open("r+b" if path.exists() else "wb") as file:
        file.truncate(at)
        file.seek(at)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _hashed(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = xxhash.xxh3_128()
        while block := file.read(2**20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "xxh3": digest.hexdigest()}
