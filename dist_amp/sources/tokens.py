"""Documents as tokens: from files of tokens, from rows that are tokenized into such files once, or
from rows that are tokenized as they are read.

`tokenize` writes shard after shard, and the manifest after each. Started again, it continues after
the last row in the manifest. The files do not depend on the number of workers.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dist_amp.errors import ConfigError, DataError, in_one_line
from dist_amp.loading.loader import load
from dist_amp.settings import DataConfig
from dist_amp.sources.conversations import (
    CHAT_ENCODING,
    LAYOUTS,
    are_chats,
    check_rows,
    columns_read,
    encode,
)
from dist_amp.sources.load import Converted, load_rows
from dist_amp.sources.token_shards import (
    FORMAT,
    IGNORE_INDEX,
    MANIFEST,
    Array,
    Manifest,
    Sample,
    Split,
    TokenShards,
    holds_tokens,
    id_type,
    read_manifest,
    short_hash,
    write_shard,
)
from dist_amp.sources.tokenizer import Tokenizer, open_tokenizer

log = logging.getLogger(__name__)
# Settings that select rows, and so have no effect if data.path holds tokens.
ROW_SETTINGS = ("name", "split", "validation_split", "text_column", "view")
SHARD_TOKENS = 2**27
CHUNK_ROWS = 128  # rows that a worker encodes at a time
PROGRESS_SECONDS = 10.0  # between lines of progress


def token_documents(data: DataConfig, split: str, tokenizer: Tokenizer, rows: Any = None) -> Any:
    """A split's `TokenShards`, or `Converted` rows of a Parquet view; None without such a split.
    rows: used instead of those that `data` names. Raises ConfigError, DataError.
    """
    if data.tokenizer not in ("auto", tokenizer.name):
        other = open_tokenizer(data.tokenizer)
        if other.identity != tokenizer.identity:
            raise ConfigError(
                f"data.tokenizer={data.tokenizer} ({other.identity}) is not the task's, "
                f"{tokenizer.name} ({tokenizer.identity}); leave data.tokenizer out"
            )
    if holds_tokens(data.path):
        for name in ROW_SETTINGS:
            if (value := getattr(data, name)) != getattr(DataConfig, name):
                raise ConfigError(
                    f"data.{name}={value} has no effect: data.path={data.path} holds tokens, whose "
                    "rows were chosen by dist_amp.tokenize; remove it"
                )
        return open_shards(Path(data.path.removeprefix("file://")), split, tokenizer)
    if rows is not None and data.view == "parquet":
        raise ConfigError("data.view=parquet reads files, and data.path names none; set data.path")
    if rows is None:
        rows = load_rows(data, split, *LAYOUTS)
    if rows is None:
        return None
    check_rows(rows, split, data.text_column, tokenizer)
    if not hasattr(rows, "map"):
        return tokenized_when_read(rows, tokenizer, data.text_column)
    import datasets

    source = source_fingerprint(rows, data.text_column)
    key_parts = (split, source, tokenizer.identity, data.text_column, FORMAT, SHARD_TOKENS)
    cache = Path(datasets.config.HF_DATASETS_CACHE).parent / "dist-amp" / "tokens"
    folder = cache / short_hash(*key_parts)
    tokenize(folder, {split: rows}, tokenizer, data.text_column, data.workers)
    return open_shards(folder, split, tokenizer)


def open_shards(folder: Path, split: str, tokenizer: Tokenizer) -> TokenShards | None:
    """The tokens of a split; None if no validation split was made."""
    manifest = read_manifest(folder)
    if manifest.identity != tokenizer.identity:
        raise ConfigError(
            f"data.path={folder} holds tokens of the tokenizer {manifest.tokenizer} "
            f"({manifest.identity}), not of {tokenizer.name} ({tokenizer.identity}); set "
            f"data.tokenizer={manifest.tokenizer}, or tokenize again"
        )
    if split == "validation" and split not in manifest.splits:
        return None
    shards = TokenShards(folder, split)
    log.info("data: %s: %s (%s)", split, shards.facts, folder)
    return shards


def source_fingerprint(rows: Any, text_column: str) -> str:
    """Identifies rows (a `datasets.Dataset` or a Parquet view), and how chats are encoded."""
    identity = str(getattr(rows, "fingerprint", None) or rows._fingerprint)
    return f"{identity} chats {CHAT_ENCODING}" if are_chats(rows, text_column) else identity


def tokenized_when_read(rows: Any, tokenizer: Tokenizer, text_column: str) -> Converted:
    """Rows tokenized as they are read: lengths unknown, some maybe without a token that counts."""
    template = getattr(tokenizer.chat, "chat_template", "")
    if "strftime_now" in str(template) and are_chats(rows, text_column):
        raise ConfigError(
            "the chat template writes today's date, so rows that are tokenized as they are read "
            "would differ after a resume; use python -m dist_amp.tokenize"
        )
    convert = partial(sample_of, tokenizer, text_column)
    documents: Any = Converted(columns_read(rows, text_column), convert)
    source = source_fingerprint(rows, text_column)
    documents.fingerprint = short_hash(source, tokenizer.identity, text_column)
    return documents  # type: ignore[no-any-return]


def sample_of(tokenizer: Tokenizer, text_column: str, row: Any) -> Sample:
    ids, labels = encode(row, tokenizer, text_column)
    if not ids:
        raise DataError(
            "the row has no tokens; remove it, or use dist_amp.tokenize, which leaves it out"
        )
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor([IGNORE_INDEX, *labels[1:]])}


def tokenize(
    folder: Path,
    splits: Mapping[str, Any],
    tokenizer: Tokenizer,
    text_column: str,
    workers: int = 0,
    shard_tokens: int = SHARD_TOKENS,
) -> Manifest:
    """Write the splits' rows as tokens, or continue an interrupted run; does nothing if complete.

    splits: {name: rows}. workers: the number of processes that encode; 0: this process.
    """
    from filelock import FileLock

    new = Manifest(
        tokenizer.name,
        tokenizer.identity,
        tokenizer.vocabulary,
        tokenizer.end,
        text_column,
        shard_tokens,
        splits={
            name: Split(
                source_fingerprint(rows, text_column), len(rows), are_chats(rows, text_column)
            )
            for name, rows in splits.items()
        },
    )
    manifest = existing_manifest(folder, new)
    if manifest is not None and manifest.complete:  # without the lock: it may be read-only
        return manifest
    log.info("data: tokenizing into %s, once no other process does", folder)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        manifest = existing_manifest(folder, new)
        if manifest is None:
            manifest = new
            manifest.write(folder)
        if not manifest.complete:
            for name, rows in splits.items():
                chunks = Chunks(rows, tokenizer, text_column)
                manifest = tokenize_split(folder, name, manifest, chunks, workers)
            manifest = replace(manifest, complete=True)
            manifest.write(folder)
        return manifest


def existing_manifest(folder: Path, new: Manifest) -> Manifest | None:
    """The folder's manifest, if any. Raises ConfigError if it belongs to other tokens."""
    # List the folder only once: another process may begin to write, with the manifest first.
    names = [path.name for path in folder.glob("[!.]*")]
    if MANIFEST not in names:
        if names:
            raise ConfigError(
                f"{folder} holds other files, such as {names[0]}; give the tokens an empty folder"
            )
        return None
    manifest = read_manifest(folder)
    splits = {name: replace(split, shards=()) for name, split in manifest.splits.items()}
    begun = asdict(replace(manifest, tokenizer=new.tokenizer, complete=False, splits=splits))
    for key, value in asdict(new).items():
        if begun[key] != value:
            problem = f"with {key} {begun[key]}, not {value}"
            if key == "splits":
                problem = "of other rows, or of rows in an older version's order"
            raise ConfigError(
                f"{folder} holds tokens {problem}; tokenize into another folder, or remove this one"
            )
    return manifest


def tokenize_split(
    folder: Path, name: str, manifest: Manifest, chunks: "Chunks", workers: int
) -> Manifest:
    """Write the rows that the split's shards still lack; returns the manifest that lists them."""
    shards = manifest.splits[name].shards
    begin = shards[-1].end_row if shards else 0
    end = len(chunks.rows)
    if begin == end:
        return manifest
    ranges = [range(row, min(row + CHUNK_ROWS, end)) for row in range(begin, end, CHUNK_ROWS)]
    documents: list[tuple[Array, Array]] = []  # (ids, loss mask) of the shard in progress
    tokens = 0
    last_report = time.monotonic()
    encoded, close = load(chunks, lambda: ranges, workers=workers, pin_memory=False, rank=0)
    try:
        for chunk, batch in zip(ranges, encoded, strict=True):
            if isinstance(batch, DataError):
                raise batch
            for row, ids, loss_mask in batch:
                if documents and tokens + len(ids) > manifest.shard_tokens:
                    manifest = write_shard(folder, name, manifest, documents, row)
                    documents = []
                    tokens = 0
                documents.append((ids, loss_mask))
                tokens += len(ids)
            if time.monotonic() - last_report >= PROGRESS_SECONDS:
                last_report = time.monotonic()
                log.info(f"data: {name}: tokenized {chunk.stop:,} of {end:,} rows")
    finally:
        close()
    if not documents:  # the loop never writes the last document, so there was none at all
        raise DataError(
            f"none of the {end:,} rows of the {name} split has a token that counts in the loss; "
            "check that their texts, answers or completions are not empty, nor of weight 0"
        )
    return write_shard(folder, name, manifest, documents, end)


class Chunks:
    """Map-style dataset: range of rows -> [(row's number, ids [n], loss mask [n] bool)], encoded in
    a loader worker. Rows without a token that counts are left out. A DataError is returned, for the
    worker's parent to raise.
    """

    def __init__(self, rows: Any, tokenizer: Tokenizer, text_column: str):
        self.rows = columns_read(rows, text_column)
        self.tokenizer = tokenizer
        self.text_column = text_column

    def __getitem__(self, chunk: range) -> list[tuple[int, Array, Array]] | DataError:
        documents = []
        try:
            rows = iter(self.rows.__getitems__(list(chunk)))
        except Exception:  # a damaged file: read row by row, to name the row
            rows = map(self.rows.__getitem__, chunk)
        for number in chunk:
            try:
                ids, labels = encode(next(rows), self.tokenizer, self.text_column)
            except Exception as error:  # templates raise errors of any type
                selection = getattr(self.rows, "_indices", None)  # a Dataset's selection of rows
                if selection is not None:
                    number = selection.column(0)[number].as_py()
                cause = str(error) if isinstance(error, DataError) else in_one_line(error)
                return DataError(f"row {number} can't be encoded: {cause}; correct or remove it")
            loss_mask = np.array([IGNORE_INDEX, *labels[1:]]) != IGNORE_INDEX
            if ids and loss_mask.any():
                dtype = id_type(self.tokenizer.vocabulary)
                documents.append((number, np.array(ids, dtype), loss_mask))
        return documents
