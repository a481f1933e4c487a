"""Files of tokens: memory-mapped shards of token ids, masks of what is learned, and a manifest.

FOLDER/tokens.json              the manifest, rewritten after every shard: what it lists is complete
FOLDER/train/documents.bin      int64 [documents, 3]: first token, tokens, the first one learned
FOLDER/train/tokens_00000.bin   uint8, uint16 or uint32 by the vocabulary: ids of whole documents
FOLDER/train/counted_00000.bin  a bit per token (numpy.packbits); absent if all but each document's
                                first token are learned
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
from dist_amp.files import write_durably

FORMAT = 1  # newer ones are refused
MANIFEST = "tokens.json"
INDEX = "documents.bin"
IGNORE_INDEX = -100  # the label that cross-entropy ignores
OPEN_SHARDS = 64  # per process: a memory map keeps its file open, and the usual limit is 1,024
TOTALS = ("documents", "tokens", "counted")


@dataclass(frozen=True)
class TokenShard:
    """Whole documents of one split, up to the row `end_row` of the source."""

    end_row: int
    documents: int
    tokens: int
    counted: int  # how many are learned
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
        """The sum over the shards of one of TOTALS."""
        return sum(getattr(shard, what) for shard in self.shards)

    def __str__(self) -> str:
        documents, tokens, counted = (self.total(what) for what in TOTALS)
        text = f"{documents:,} documents, {tokens:,} tokens, of which {counted:,} count"
        if empty := self.rows - documents:
            text += f"; {empty:,} of {self.rows:,} rows have nothing to learn and are left out"
        return text

    def files(self, name: str) -> Iterator[tuple[str, int]]:
        """(path in the folder, bytes) of each file of the split of this name."""
        yield f"{name}/{INDEX}", 24 * self.total("documents")
        for shard in self.shards:
            for file, facts in shard.files.items():
                yield f"{name}/{file}", facts["bytes"]


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
        return np.min_scalar_type(self.vocabulary - 1).newbyteorder("<")

    def write(self, folder: Path) -> None:
        content = {**asdict(self), "dtype": self.dtype.name}
        for name, split in self.splits.items():  # for readers; known from the shards
            totals = {what: split.total(what) for what in TOTALS}
            content["splits"][name] = {**totals, **content["splits"][name]}
        write_durably(folder / MANIFEST, json.dumps(content, indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Errors: DataError if it is missing, damaged, or of a newer format."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if content["format"] > FORMAT:
            raise DataError(
                f"{folder} holds tokens of format {content['format']}, and this version reads up "
                f"to {FORMAT}; use a newer dist_amp, or make them again"
            )
        content.pop("dtype")
        for name, split in content["splits"].items():
            shards = tuple(TokenShard(**shard) for shard in split["shards"])
            content["splits"][name] = Split(split["source"], split["rows"], split["chats"], shards)
        return Manifest(**content)
    except OSError as error:
        raise DataError(
            f"{folder} holds no tokens: {MANIFEST} can't be read ({error.strerror}); give the "
            "folder that dist_amp.tokenize wrote"
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{folder / MANIFEST} is damaged; make the tokens again, or copy them again"
        ) from error


def holds_tokens(path: str) -> bool:
    """Whether it is a folder that dist_amp.tokenize wrote, or began to write."""
    return (Path(path.removeprefix("file://")) / MANIFEST).is_file()


class TokenShards:
    """A split's documents, read from memory-mapped shards.

    A document is {"input_ids" [n], "labels" [n]} int64; labels are the ids, or IGNORE_INDEX at
    the first token and where a token is not learned. Opening compares the sizes of all files.
    Errors: DataError for a missing or damaged file, at opening or when a document is read.
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
        self.of = manifest.splits[split]
        self.vocabulary = manifest.vocabulary
        self._dtype = manifest.dtype
        for name, size in self.of.files(split):
            if problem := size_problem(folder / name, size):
                raise DataError(
                    f"{problem}; copy it again, or make the tokens again with dist_amp.tokenize"
                )
        self._starts = [0, *accumulate(shard.tokens for shard in self.of.shards)]
        self._open = lru_cache(OPEN_SHARDS)(self._open_shard)

    def __reduce__(self) -> Any:
        return TokenShards, (self.folder, self.split)

    @cached_property
    def _index(self) -> np.ndarray[Any, Any]:
        return mapped(self.folder / self.split / INDEX, "<i8").reshape(-1, 3)

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """Tokens of each document: int64 [documents], memory-mapped."""
        return self._index[:, 1]

    @property
    def firsts(self) -> np.ndarray[Any, Any]:
        """Where in each document its first learned token is: int64 [documents], memory-mapped."""
        return self._index[:, 2]

    @cached_property
    def fingerprint(self) -> str:
        """The identity of the tokens: the same wherever and however they were made."""
        parts = [[shard.index_xxh3, shard.files] for shard in self.of.shards]
        content = json.dumps([self._dtype.name, parts], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return self._piece(number, 0, int(self.lengths[number]))

    def pieces(self, pieces: Sequence[tuple[int, int, int]]) -> list[dict[str, Tensor]]:
        """Parts of documents: (document, first token, one past its last). Nothing else is read."""
        return [self._piece(*piece) for piece in pieces]

    def _piece(self, number: int, first: int, last: int) -> dict[str, Tensor]:
        start = int(self._index[number, 0])
        length = min(int(self.lengths[number]), last) - first
        shard = bisect_right(self._starts, start) - 1
        tokens, counted = self._open(shard)
        start += first - self._starts[shard]
        ids = torch.from_numpy(tokens[start : start + length].astype(np.int64))
        where = f"document {number} of {self.folder / self.split}"
        check = f"check the files with python -m dist_amp.tokenize --check {self.folder}"
        if len(ids) != length or length == 0:
            raise DataError(f"{where} is not where {INDEX} says; {check}")
        if (largest := int(ids.max())) >= self.vocabulary:
            raise DataError(
                f"{where} holds the id {largest}, and the tokenizer's ids are below "
                f"{self.vocabulary}; {check}"
            )
        labels = ids.clone()
        if counted is not None:
            bits = np.unpackbits(counted[start // 8 : -(-(start + length) // 8)])
            learned = bits[start % 8 :][:length]
            labels[torch.from_numpy(learned == 0)] = IGNORE_INDEX
        if first == 0:
            labels[0] = IGNORE_INDEX  # it is predicted from nothing
        return {"input_ids": ids, "labels": labels}

    def _open_shard(self, number: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
        inside = self.folder / self.split
        tokens = mapped(inside / tokens_file(number), self._dtype)
        mask = counted_file(number)
        if mask not in self.of.shards[number].files:
            return tokens, None
        return tokens, mapped(inside / mask, np.uint8)


def mapped(path: Path, dtype: Any) -> np.ndarray[Any, Any]:
    """A memory map as a plain ndarray: slices of a memmap take microseconds more."""
    return np.memmap(path, dtype, "r").view(np.ndarray)


def tokens_file(number: int) -> str:
    return f"tokens_{number:05d}.bin"


def counted_file(number: int) -> str:
    return f"counted_{number:05d}.bin"


def size_problem(path: Path, size: int) -> str:
    """What is wrong with a file by its size; "" if nothing."""
    try:
        actual = path.stat().st_size
    except OSError as error:
        return f"{path} can't be read ({error.strerror})"
    return f"{path} has {actual:,} bytes, not {size:,}" if actual != size else ""


def hash_problem(folder: Path, name: str, split: Split) -> str:
    """The first file of a split whose content differs from the manifest's hash; "" if none does."""
    for file, size in split.files(name):
        if problem := size_problem(folder / file, size):
            return problem
    inside = folder / name
    with (inside / INDEX).open("rb") as index:
        for shard in split.shards:
            hashes = {INDEX: xxhash.xxh3_128_hexdigest(index.read(24 * shard.documents))}
            expected = {INDEX: shard.index_xxh3}
            for file, facts in shard.files.items():
                hashes[file] = xxhash.xxh3_128_hexdigest(mapped(inside / file, np.uint8).data)
                expected[file] = facts["xxh3"]
            for file in expected:
                if hashes[file] != expected[file]:
                    return f"{inside / file} is damaged: its hash differs from the manifest's"
    return ""
