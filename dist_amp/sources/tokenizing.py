"""Pre-tokenize rows into shards of tokens, in this process or in several.

A shard is complete once the manifest lists it; an interrupted run continues after the last one.
"""

import os
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dist_amp.errors import ConfigError, DataError, Failure
from dist_amp.files import write_durably
from dist_amp.loading.loader import load
from dist_amp.sources.conversations import are_chats, encode_row, needed_columns
from dist_amp.sources.token_shards import (
    IGNORE_INDEX,
    INDEX,
    MANIFEST,
    Manifest,
    Split,
    TokenShard,
    counted_file,
    read_manifest,
    tokens_file,
)
from dist_amp.sources.tokenizer import Tokenizer

SHARD_TOKENS = 2**27
CHUNK_ROWS = 128  # that a worker encodes at a time
SECONDS = 10.0  # between lines of progress where there is no terminal
# (row, ids [n], which are learned [n] bool)
Document = tuple[int, np.ndarray[Any, Any], np.ndarray[Any, Any]]
Say = Callable[[str], None]


def tokenize(
    folder: Path,
    splits: Mapping[str, Any],
    tokenizer: Tokenizer,
    text_column: str,
    say: Say,
    workers: int = 0,
    shard_tokens: int = SHARD_TOKENS,
) -> Manifest:
    """Write the splits' rows as tokens, or continue an interrupted run; nothing if complete.

    splits: {name: rows}. One process at a time writes a folder; others wait, and find it complete.
    workers: processes that encode; 0: this one. The files do not depend on their number, nor on
    interruptions. Errors: ConfigError if the folder holds other tokens or other files; DataError
    for a row that can't be encoded, and if no row of a split has anything to learn; Failure if the
    folder can't be written.
    """
    from filelock import FileLock, Timeout

    wanted = Manifest(
        tokenizer.name,
        tokenizer.identity,
        tokenizer.vocabulary,
        tokenizer.end,
        text_column,
        shard_tokens,
        splits={
            name: Split(source_fingerprint(rows), len(rows), are_chats(rows))
            for name, rows in splits.items()
        },
    )
    manifest = existing_manifest(folder, wanted)
    if manifest is not None and manifest.complete:
        return manifest
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; give a folder for the tokens")
    lock = FileLock(folder / ".lock")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"data: waiting for another process, which makes the tokens in {folder}")
            lock.acquire()
    with lock:
        manifest = existing_manifest(folder, wanted)
        if manifest is None:
            manifest = wanted
            with writing(folder):
                manifest.write(folder)
        if manifest.complete:
            return manifest
        for name, rows in splits.items():
            writer = SplitWriter(folder, name, manifest)
            tokenize_split(writer, rows, tokenizer, say, workers)
            manifest = writer.manifest
        manifest = replace(manifest, complete=True)
        with writing(folder):
            manifest.write(folder)
        return manifest


def existing_manifest(folder: Path, wanted: Manifest) -> Manifest | None:
    """The folder's manifest, if it has one. Errors: ConfigError if it is of something else."""
    names = os.listdir(folder) if folder.is_dir() else []
    if MANIFEST not in names:  # it is written first; one listing, since another process may begin
        if others := [name for name in names if not name.startswith(".")]:
            raise ConfigError(
                f"{folder} holds other files, such as {others[0]}; give the tokens a folder of "
                "their own"
            )
        return None
    manifest = read_manifest(folder)
    if manifest.identity == wanted.identity:  # whatever it is named
        wanted = replace(wanted, tokenizer=manifest.tokenizer)
    for before, now in zip(origin(manifest), origin(wanted), strict=True):
        if before != now:
            raise ConfigError(
                f"{folder} holds tokens of {before}, not of {now}; give another folder, or remove "
                "this one"
            )
    return manifest


def origin(manifest: Manifest) -> list[str]:
    """What decides the tokens, in words."""
    sources = (
        f"{name} {split.rows:,} rows {split.source}" for name, split in manifest.splits.items()
    )
    return [
        f"the tokenizer {manifest.tokenizer} ({manifest.identity})",
        f"the source {', '.join(sources)}",
        f"text_column={manifest.text_column} and shard_tokens={manifest.shard_tokens}",
    ]


def source_fingerprint(rows: Any) -> str:
    """The identity of rows, of a `datasets.Dataset` or a Parquet view."""
    return str(getattr(rows, "fingerprint", None) or rows._fingerprint)


def tokenize_split(
    writer: "SplitWriter", rows: Any, tokenizer: Tokenizer, say: Say, workers: int
) -> None:
    """Write the rows that the split's shards lack."""
    begin = writer.split.end_row
    end = len(rows)
    if begin == end:
        return
    starts = range(begin, end, CHUNK_ROWS)
    chunks = [range(start, min(start + CHUNK_ROWS, end)) for start in starts]
    rows_to_encode = EncodedChunks(rows, tokenizer, writer.manifest.text_column)
    empty = begin == 0
    try:
        with ExitStack() as stack:
            encoded, close = load(
                rows_to_encode, lambda: chunks, workers=workers, pin_memory=False, rank=0
            )
            stack.callback(close)
            advance = stack.enter_context(progress(writer.name, begin, end, say))
            for chunk, documents in zip(chunks, encoded, strict=True):
                if isinstance(documents, DataError):
                    raise documents
                for document in documents:
                    writer.add(*document)
                    empty = False
                advance(len(chunk))
    except (RuntimeError, OSError, EOFError) as error:
        if not workers:
            raise
        message = "a worker has died, perhaps for lack of memory; use fewer workers"
        raise Failure(message) from error
    if empty:
        raise DataError(
            f"none of the {end:,} rows of the {writer.name} split has anything to learn; check "
            "that their texts, answers or completions are not empty"
        )
    writer.finish_shard(end)


class EncodedChunks:
    """Map-style: a range of rows -> its documents in which a token is learned.

    A row that can't be encoded gives a DataError in their place, for the parent of a worker to
    raise.
    """

    def __init__(self, rows: Any, tokenizer: Tokenizer, text_column: str):
        self.rows = needed_columns(rows, text_column)
        self.tokenizer = tokenizer
        self.text_column = text_column

    def __getitem__(self, chunk: range) -> list[Document] | DataError:
        documents = []
        for number, row in zip(chunk, self.rows.__getitems__(list(chunk)), strict=True):
            try:
                ids, learned = self.encode(number, row)
            except DataError as error:
                return error
            if learned.any():
                documents.append((number, ids, learned))
        return documents

    def encode(
        self, number: int, row: dict[str, Any]
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """(ids [n], which are learned [n] bool) of a row."""
        in_source = number_in_source(self.rows, number)
        ids, labels = encode_row(in_source, row, self.tokenizer, self.text_column)
        largest = max(ids, default=0)
        if largest >= self.tokenizer.vocabulary:  # it would wrap around in the file
            raise DataError(
                f"row {in_source}: the tokenizer {self.tokenizer.name} makes the id {largest}, and "
                f"its vocabulary says that ids are below {self.tokenizer.vocabulary}; correct the "
                "tokenizer"
            )
        learned = np.array(labels) != IGNORE_INDEX
        learned[:1] = False  # the first is predicted from nothing
        return np.array(ids, np.uint32), learned


def number_in_source(rows: Any, number: int) -> int:
    """A row's number in the source's files, before rows were held out and shuffled."""
    chosen = getattr(rows, "_indices", None)  # of a `datasets.Dataset`
    return number if chosen is None else chosen.column(0)[number].as_py()


class SplitWriter:
    """Writes one split's documents, after the shards that its manifest lists.

    The shard in progress is held in memory. Errors: Failure where the folder can't be written.
    """

    def __init__(self, folder: Path, name: str, manifest: Manifest):
        self.folder = folder
        self.name = name
        self.manifest = manifest
        self._index_bytes = 24 * self.split.total("documents")
        index = folder / name / INDEX
        if self._index_bytes and index.stat().st_size < self._index_bytes:
            raise DataError(
                f"{index} has less than {self._index_bytes:,} bytes; remove {folder} and start "
                "again"
            )
        with writing(folder):
            index.parent.mkdir(parents=True, exist_ok=True)
        self._clear()

    @property
    def split(self) -> Split:
        return self.manifest.splits[self.name]

    def _clear(self) -> None:
        self._tokens = array("B")
        self._learned = array("B")
        self._index = array("q")  # per document: first token in the split, tokens, first learned

    def add(self, row: int, ids: np.ndarray[Any, Any], learned: np.ndarray[Any, Any]) -> None:
        """Add a row's document: ids [n], learned [n] bool: not the first, at least one other."""
        size = len(self._learned)
        if size and size + len(ids) > self.manifest.shard_tokens:
            self.finish_shard(row)
            size = 0
        start = self.split.total("tokens") + size
        self._index.extend((start, len(ids), int(learned.argmax())))
        self._tokens.frombytes(ids.astype(self.manifest.dtype).tobytes())
        self._learned.frombytes(learned.tobytes())

    def finish_shard(self, end_row: int) -> None:
        """Write the shard, which ends before this row, and list it in the manifest."""
        number = len(self.split.shards)
        learned = np.frombuffer(self._learned, bool)
        documents = len(self._index) // 3
        index = np.array(self._index, "<i8").tobytes()
        contents = {tokens_file(number): self._tokens.tobytes()}
        if learned.sum() != len(learned) - documents:  # not all but each document's first
            contents[counted_file(number)] = np.packbits(learned).tobytes()
        files = {
            name: {"bytes": len(content), "xxh3": xxhash.xxh3_128_hexdigest(content)}
            for name, content in contents.items()
        }
        shard = TokenShard(
            end_row,
            documents,
            len(learned),
            int(learned.sum()),
            xxhash.xxh3_128_hexdigest(index),
            files,
        )
        split = replace(self.split, shards=(*self.split.shards, shard))
        with writing(self.folder):
            for name, content in contents.items():
                write_durably(self.folder / self.name / name, content)
            append(self.folder / self.name / INDEX, self._index_bytes, index)
            self.manifest = replace(
                self.manifest, splits={**self.manifest.splits, self.name: split}
            )
            self.manifest.write(self.folder)
        self._index_bytes += len(index)
        self._clear()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Inside, an OSError is a Failure that names the folder."""
    try:
        yield
    except OSError as error:
        raise Failure(
            f"the tokens in {folder} can't be written ({error.strerror}); make room or name "
            "another folder: the same command then continues after the last complete shard"
        ) from error


def append(path: Path, at: int, content: bytes) -> None:
    """Write at this place in a file, and drop what an interrupted run left after it."""
    mode = "r+b" if path.exists() else "wb"
    with path.open(mode) as file:
        file.truncate(at)
        file.seek(at)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def progress(name: str, done: int, total: int, say: Say) -> Iterator[Callable[[int], None]]:
    """Yields what to call with a number of rows done: a bar on a terminal, else a line at times."""
    from datasets.utils import tqdm

    bar = tqdm(desc=f"{name}: tokenizing", total=total, initial=done, unit=" rows")
    start = last = time.monotonic()
    rows = 0

    def advance(count: int) -> None:
        nonlocal rows, last
        rows += count
        bar.update(count)
        now = time.monotonic()
        if bar.disable and now - last >= SECONDS:
            last = now
            rate = rows / (now - start)
            left = tqdm.format_interval((total - done - rows) / rate)
            say(
                f"data: {name}: tokenized {done + rows:,} of {total:,} rows, {rate:,.0f} rows/s, "
                f"{left} left"
            )

    with bar:
        yield advance
