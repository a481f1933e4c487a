"""Token files: shards of token ids and loss masks, read by memory maps, and a manifest.

FOLDER/tokens.json              the manifest, rewritten after every shard: what it lists is complete
FOLDER/train/documents.bin      int64 [documents, 3]: start in split, length, first counted token
FOLDER/train/tokens_00000.bin   ids of whole documents; uint8, uint16 or uint32 by the vocabulary
FOLDER/train/counted_00000.bin  a bit per token (numpy.packbits): whether it counts in the loss;
                                absent if only the first token of each document does not
"""

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from dist_amp.errors import DataError
from dist_amp.files import write_durably

FORMAT = 1  # newer formats are rejected
MANIFEST = "tokens.json"
INDEX = "documents.bin"
INDEX_BYTES = 24  # per document
IGNORE_INDEX = -100  # the label that cross-entropy ignores
Array = np.ndarray[Any, Any]
Sample = dict[str, Tensor]


def id_type(vocabulary: int) -> Any:
    """The smallest dtype of ids below `vocabulary`."""
    return np.min_scalar_type(vocabulary - 1).newbyteorder("<")


@dataclass(frozen=True)
class TokenShard:
    """A shard's facts. It holds whole documents of one split."""

    end_row: int  # the source's rows before this one are in this shard or an earlier one
    documents: int
    tokens: int
    counted: int  # how many tokens count in the loss
    index_xxh3: str  # hash of its part of documents.bin
    files: dict[str, dict[str, Any]]  # name -> {"bytes", "xxh3"}


@dataclass(frozen=True)
class Split:
    source: str  # fingerprint of its rows
    rows: int  # of the source, with those that became no document
    chats: bool  # whether the rows are chats
    shards: tuple[TokenShard, ...] = ()

    def total(self, field_name: str) -> int:
        """The number of "documents", "tokens" or "counted" tokens in all shards."""
        return sum(getattr(shard, field_name) for shard in self.shards)

    def __str__(self) -> str:
        documents = self.total("documents")
        text = f"{documents:,} documents, {self.total('tokens'):,} tokens, of which "
        text += f"{self.total('counted'):,} count in the loss"
        if empty := self.rows - documents:
            text += f"; {empty:,} of {self.rows:,} rows have no token that counts and are left out"
        return text


@dataclass(frozen=True)
class Manifest:
    tokenizer: str  # its name when the tokens were made
    identity: str  # of the tokenizer
    vocabulary: int
    end: int | None  # the id that ends a document
    text_column: str
    shard_tokens: int
    complete: bool = False
    splits: dict[str, Split] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def dtype(self) -> Any:
        return id_type(self.vocabulary)

    def write(self, folder: Path) -> None:
        content = json.dumps({**asdict(self), "dtype": self.dtype.name}, indent=1)
        write_durably(folder / MANIFEST, content + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Raises DataError if it is missing, damaged, or of a newer format."""
    try:
        manifest = TypeAdapter(Manifest).validate_json((folder / MANIFEST).read_bytes())
        if manifest.format > FORMAT:
            raise ValueError(f"its format {manifest.format} is from a newer dist_amp")
    except (OSError, ValueError) as error:
        cause = " ".join(str(error).split())  # pydantic's has several lines
        raise DataError(
            f"{folder / MANIFEST} can't be read ({cause:.200}); give the folder that "
            "dist_amp.tokenize wrote, copy it again, or make the tokens again"
        ) from error
    return manifest


def holds_tokens(path: str) -> bool:
    """Whether `path` is a folder that dist_amp.tokenize wrote, or began to write."""
    return os.path.isfile(Path(path.removeprefix("file://")) / MANIFEST)  # False if unreadable


def short_hash(*facts: Any) -> str:
    return hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:32]


class TokenShards:
    """A split's documents, read from memory-mapped shards.

    A document is {"input_ids" [n], "labels" [n]} int64; masked labels are IGNORE_INDEX. `lengths`,
    `firsts`: each document's number of tokens, and its first one that counts, int64 [documents].
    """

    def __init__(self, folder: Path, split: str):
        self.folder = folder
        self.split = split
        manifest = read_manifest(folder)
        if not manifest.complete:
            raise DataError(
                f"{folder} is not complete: dist_amp.tokenize was interrupted; start it again as "
                "before"
            )
        if split not in manifest.splits:
            raise DataError(f"{folder} has no {split} split; it has {', '.join(manifest.splits)}")
        self.facts = manifest.splits[split]
        self._inside = folder / split
        index = mapped(self._inside / INDEX, INDEX_BYTES * self.facts.total("documents"))
        self._index = index.view("<i8").reshape(-1, 3)
        self.lengths = self._index[:, 1]
        self.firsts = self._index[:, 2]
        self._starts = [0, *accumulate(shard.tokens for shard in self.facts.shards)]
        self._tokens: list[Array] = []
        self._counted: list[Array | None] = []
        for shard in self.facts.shards:
            tokens, *counted = [
                mapped(self._inside / name, entry["bytes"]) for name, entry in shard.files.items()
            ]
            self._tokens.append(tokens.view(manifest.dtype))
            self._counted.append(counted[0] if counted else None)
        # Identifies the tokens: the same wherever and however they were made.
        parts = [[shard.index_xxh3, shard.files] for shard in self.facts.shards]
        self.fingerprint = short_hash(json.dumps([manifest.dtype.name, parts], sort_keys=True))

    def __reduce__(self) -> Any:
        return TokenShards, (self.folder, self.split)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, number: int) -> Sample:
        (document,) = self.pieces([(number, 0, int(self.lengths[number]))])
        return document

    def pieces(self, pieces: Sequence[tuple[int, int, int]]) -> list[Sample]:
        """Read parts of documents, each given as (document, first token, one past its last)."""
        samples = []
        for number, first, last in pieces:
            start = int(self._index[number, 0])
            shard = bisect_right(self._starts, start) - 1
            start += first - self._starts[shard]
            end = start + min(int(self.lengths[number]), last) - first
            ids = torch.from_numpy(self._tokens[shard][start:end].astype(np.int64))
            labels = ids.clone()
            counted = self._counted[shard]
            if counted is not None:
                bits = np.unpackbits(counted[start // 8 : -(-end // 8)])
                loss_mask = bits[start % 8 :][: end - start]
                labels[torch.from_numpy(loss_mask == 0)] = IGNORE_INDEX
            if first == 0:
                labels[0] = IGNORE_INDEX  # nothing predicts it
            samples.append({"input_ids": ids, "labels": labels})
        return samples

    def check_hashes(self) -> None:
        with (self._inside / INDEX).open("rb") as index:
            for shard in self.facts.shards:
                parts = [(INDEX, index.read(INDEX_BYTES * shard.documents), shard.index_xxh3)]
                for file, entry in shard.files.items():
                    parts.append((file, (self._inside / file).read_bytes(), entry["xxh3"]))
                for file, content, expected in parts:
                    if xxh3_128_hexdigest(content) != expected:
                        raise DataError(
                            f"{self._inside / file} is damaged: its hash differs from the "
                            "manifest's; copy it again, or tokenize again"
                        )


def mapped(path: Path, size: int) -> Array:
    """A memory map of a file's bytes. Raises DataError if it is missing or of another size."""
    actual = path.stat().st_size if path.is_file() else 0
    if actual != size:
        raise DataError(
            f"{path} has {actual:,} bytes, not {size:,}; copy it again, or make the tokens again "
            "with dist_amp.tokenize"
        )
    # Unlike numpy's map, torch's keeps no file open: a process may usually open only 1,024.
    return torch.from_file(str(path), size=size, dtype=torch.uint8).numpy()


def write_shard(
    folder: Path,
    name: str,
    manifest: Manifest,
    documents: list[tuple[Array, Array]],
    end_row: int,
) -> Manifest:
    """Write documents (ids [n], loss mask [n] bool) as the split's next shard; the new manifest."""
    split = manifest.splits[name]
    number = len(split.shards)
    ids, masks = zip(*documents, strict=True)
    lengths = np.array([*map(len, ids)])
    starts = split.total("tokens") + lengths.cumsum() - lengths
    firsts = [mask.argmax() for mask in masks]
    index = np.stack((starts, lengths, firsts), axis=1).astype("<i8").tobytes()
    tokens = np.concatenate(ids)
    loss_mask = np.concatenate(masks)
    counted = int(loss_mask.sum())
    contents = {f"tokens_{number:05d}.bin": tokens.tobytes()}
    if counted != len(tokens) - len(documents):  # else only each document's first does not count
        contents[f"counted_{number:05d}.bin"] = np.packbits(loss_mask).tobytes()
    files = {
        file: {"bytes": len(content), "xxh3": xxh3_128_hexdigest(content)}
        for file, content in contents.items()
    }
    (folder / name).mkdir(exist_ok=True)
    for file, content in contents.items():
        write_durably(folder / name / file, content)
    with (folder / name / INDEX).open("ab") as index_file:
        # Drop what an interrupted run has written after the manifest's last shard.
        index_file.truncate(INDEX_BYTES * split.total("documents"))
        index_file.write(index)
        index_file.flush()
        os.fsync(index_file.fileno())
    hash_of_index = xxh3_128_hexdigest(index)
    shard = TokenShard(end_row, len(documents), len(tokens), counted, hash_of_index, files)
    split = replace(split, shards=(*split.shards, shard))
    manifest = replace(manifest, splits={**manifest.splits, name: split})
    manifest.write(folder)
    return manifest
