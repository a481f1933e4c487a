"""Files of tokens: documents as ids in memory-mapped shards, a mask of what counts, and the manifest that names them.

FOLDER/tokens.json                 the manifest, rewritten after every shard: what it lists is complete
FOLDER/train/documents.bin         int64 [documents, 3]: first token, tokens, and the first one that counts
FOLDER/train/tokens_00000.bin      uint8, uint16 or uint32, as the vocabulary needs: the ids of whole documents
FOLDER/train/counted_00000.bin     a bit per token (numpy.packbits); not there if all but each first one count
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from dist_amp.errors import DataError
from dist_amp.runtime.files import write_durably

FORMAT = 1  # newer ones are refused
MANIFEST = "tokens.json"
INDEX = "documents.bin"
NOT_LEARNED = -100  # the label that cross-entropy ignores
OPEN_SHARDS = 64  # at a time per process: a memory map keeps its file open, and the usual limit is 1,024


@dataclass(frozen=True)
class TokenShard:
    """Whole documents of one split, up to the row `end_row` of the source."""

    end_row: int
    documents: int
    tokens: int
    counted: int
    index_xxh3: str  # of its part of documents.bin
    files: dict[str, dict[str, Any]]  # name -> {"bytes", "xxh3"}


@dataclass(frozen=True)
class Split:
    """One split's source and shards."""

    source: str  # fingerprint of its rows
    rows: int
    chats: bool
    shards: tuple[TokenShard, ...] = ()

    @property
    def end_row(self) -> int:
        return self.shards[-1].end_row if self.shards else 0

    def total(self, what: str) -> int:
        """The sum over the shards of their documents, tokens or counted tokens."""
        return sum(getattr(shard, what) for shard in self.shards)

    def __str__(self) -> str:
        documents, tokens, counted = (self.total(what) for what in ("documents", "tokens", "counted"))
        text = f"{documents:,} documents, {tokens:,} tokens, of which {counted:,} count"
        if empty := self.rows - documents:
            text += f"; {empty:,} of {self.rows:,} rows have nothing to learn and are left out"
        return text


@dataclass(frozen=True)
class Manifest:
    """What a folder of tokens holds."""

    tokenizer: str  # its name when they were made
    identity: str  # of the tokenizer
    vocabulary: int
    end: int | None
    text_column: str
    shard_tokens: int
    complete: bool = False
    splits: dict[str, Split] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def dtype(self) -> Any:
        return np.dtype(f"<u{1 if self.vocabulary <= 2**8 else 2 if self.vocabulary <= 2**16 else 4}")

    def write(self, folder: Path) -> None:
        content = asdict(self)
        for name, split in self.splits.items():  # for readers; known from the shards
            totals = {what: split.total(what) for what in ("documents", "tokens", "counted")}
            content["splits"][name] = {**totals, **content["splits"][name]}
        write_durably(folder / MANIFEST, json.dumps({**content, "dtype": self.dtype.name}, indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Errors: DataError if it is missing, damaged, or of a newer format."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if content["format"] > FORMAT:
            raise DataError(
                f"{folder} holds tokens of format {content['format']}, and this version reads up to {FORMAT}; use a "
                "newer dist_amp, or make them again"
            )
        content.pop("dtype")
        for name, split in content["splits"].items():
            shards = tuple(TokenShard(**shard) for shard in split["shards"])
            content["splits"][name] = Split(split["source"], split["rows"], split["chats"], shards)
        return Manifest(**content)
    except OSError as error:
        raise DataError(
            f"{folder} holds no tokens: {MANIFEST} can't be read ({error.strerror}); give the folder that "
            "dist_amp.tokenize wrote"
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{folder / MANIFEST} is damaged; make the tokens again, or copy them again") from error


def holds_tokens(path: str) -> bool:
    """Whether it is a folder that dist_amp.tokenize wrote, or began to write."""
    return (Path(path.removeprefix("file://")) / MANIFEST).is_file()


class TokenShards:
    """A split's documents, read from memory-mapped shards: {"input_ids" [n], "labels" [n]} int64 each.

    labels: the ids, or NOT_LEARNED where a token does not count and at the first. Opening compares the sizes of all
    files. Errors: DataError for a missing or damaged file, at opening or when a document is read.
    """

    def __init__(self, folder: Path, split: str):
        self.folder, self.split = folder, split
        manifest = read_manifest(folder)
        if not manifest.complete:
            raise DataError(f"{folder} is not complete: dist_amp.tokenize was interrupted; start it again as before")
        if split not in manifest.splits:
            raise DataError(f"{folder} has no {split} split; it has {', '.join(manifest.splits)}")
        self.of = manifest.splits[split]
        self.vocabulary = manifest.vocabulary
        self._dtype = manifest.dtype
        for name, size in files_of(split, self.of):
            if problem := size_problem(folder / name, size):
                raise DataError(f"{problem}; copy it again, or make the tokens again with dist_amp.tokenize")
        self._check = f"check the files with python -m dist_amp.tokenize --check {folder}"
        self._starts = [0, *accumulate(shard.tokens for shard in self.of.shards)]
        self._open = lru_cache(OPEN_SHARDS)(self._open_shard)

    def __reduce__(self) -> Any:
        return TokenShards, (self.folder, self.split)

    @cached_property
    def _index(self) -> np.ndarray[Any, Any]:
        return plain(np.memmap(self.folder / self.split / INDEX, "<i8", "r")).reshape(-1, 3)

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """Tokens of each document: int64 [documents], memory-mapped."""
        return self._index[:, 1]

    @property
    def firsts(self) -> np.ndarray[Any, Any]:
        """The first token of each document that counts, by its place in it: int64 [documents], memory-mapped."""
        return self._index[:, 2]

    @cached_property
    def fingerprint(self) -> str:
        """The identity of the tokens: the same wherever and however they were made."""
        parts = [[shard.index_xxh3, shard.files] for shard in self.of.shards]
        return hashlib.sha256(json.dumps([self._dtype.name, parts], sort_keys=True).encode()).hexdigest()[:32]

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return self._piece(number, 0, None)

    def pieces(self, pieces: Sequence[tuple[int, int, int]]) -> list[dict[str, Tensor]]:
        """Parts of documents: (document, first token, one past its last) each, of which nothing else is read."""
        return [self._piece(*piece) for piece in pieces]

    def _piece(self, number: int, first: int, last: int | None) -> dict[str, Tensor]:
        start, length = map(int, self._index[number][:2])
        shard = bisect_right(self._starts, start) - 1
        tokens, counted = self._open(shard)
        start, length = start - self._starts[shard] + first, (length if last is None else min(length, last)) - first
        ids = torch.from_numpy(tokens[start : start + length].astype(np.int64))
        if len(ids) != length or length == 0:
            raise DataError(f"document {number} of {self.folder / self.split} is not where {INDEX} says; {self._check}")
        if (largest := int(ids.max())) >= self.vocabulary:
            raise DataError(
                f"document {number} of {self.folder / self.split} holds the id {largest}, and the tokenizer's ids are "
                f"below {self.vocabulary}; {self._check}"
            )
        labels = ids.clone()
        if counted is not None:
            byte, end = start // 8, -(-(start + length) // 8)
            bits = np.unpackbits(counted[byte:end])[start - 8 * byte :][:length]
            labels[torch.from_numpy(bits == 0)] = NOT_LEARNED
        if first == 0:
            labels[0] = NOT_LEARNED  # it is predicted from nothing
        return {"input_ids": ids, "labels": labels}

    def _open_shard(self, number: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
        inside = self.folder / self.split
        tokens = plain(np.memmap(inside / tokens_file(number), self._dtype, "r"))
        mask = counted_file(number)
        return tokens, plain(np.memmap(inside / mask, np.uint8, "r")) if mask in self.of.shards[number].files else None


def plain(mapped: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The memory map as an ndarray: each slice of a memmap takes microseconds more."""
    return mapped.view(np.ndarray)


def tokens_file(number: int) -> str:
    return f"tokens_{number:05d}.bin"


def counted_file(number: int) -> str:
    return f"counted_{number:05d}.bin"


def files_of(split: str, of: Split) -> Iterator[tuple[str, int]]:
    """(path in the folder, bytes) of each file of a split."""
    yield f"{split}/{INDEX}", 24 * of.total("documents")
    for shard in of.shards:
        yield from ((f"{split}/{name}", facts["bytes"]) for name, facts in shard.files.items())


def size_problem(path: Path, size: int) -> str:
    """What is wrong with a file by its size; "" if nothing."""
    try:
        found = path.stat().st_size
    except OSError as error:
        return f"{path} can't be read ({error.strerror})"
    return f"{path} has {found:,} bytes, not {size:,}" if found != size else ""


def hash_problem(folder: Path, split: str, of: Split) -> str:
    """The first file of a split whose content differs from the manifest's hash; "" if none does."""
    for name, size in files_of(split, of):
        if problem := size_problem(folder / name, size):
            return problem
    with (folder / split / INDEX).open("rb") as index:
        for shard in of.shards:
            if xxhash.xxh3_128_hexdigest(index.read(24 * shard.documents)) != shard.index_xxh3:
                return f"{folder / split / INDEX} is damaged: its hash differs from the manifest's"
            for name, facts in shard.files.items():
                with (folder / split / name).open("rb") as file:
                    if hashlib.file_digest(file, xxhash.xxh3_128).hexdigest() != facts["xxh3"]:  # type: ignore[arg-type]
                        return f"{folder / split / name} is damaged: its hash differs from the manifest's"
    return ""
