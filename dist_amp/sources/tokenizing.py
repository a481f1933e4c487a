"""Rows to files of tokens, by one process or several; an interrupted run goes on after its last complete shard."""

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from dist_amp.errors import ConfigError, DataError, Failure
from dist_amp.runtime.loader import START_ATTEMPTS, START_SECONDS
from dist_amp.runtime.process import die_with_parent, ignore_stop_signals
from dist_amp.sources.conversations import are_chats, encode_row, needed_columns
from dist_amp.sources.token_shards import (
    MANIFEST,
    NOT_LEARNED,
    Manifest,
    Split,
    read_manifest,
)
from dist_amp.sources.token_writer import SplitWriter, writing
from dist_amp.sources.tokenizer import Tokenizer

SHARD_TOKENS = 2**27
CHUNK_ROWS = 128  # that a worker gets at a time
SECONDS = 10.0  # between lines of progress where there is no terminal
Chunk = tuple[int, list[dict[str, Any]], list[int]]  # (its first row, the rows, their numbers in the source)
Document = tuple[int, np.ndarray[Any, Any], np.ndarray[Any, Any]]  # (row, ids [n], which count [n] bool)
Say = Callable[[str], None]


def source_fingerprint(rows: Any) -> str:
    """The identity of rows, of a `datasets.Dataset` or a Parquet view."""
    return str(getattr(rows, "fingerprint", None) or rows._fingerprint)


def _origin(manifest: Manifest) -> list[tuple[Any, str]]:
    """What decides the tokens, and the same in words."""
    sources = {name: (one.rows, one.source) for name, one in manifest.splits.items()}
    settings = f"text_column={manifest.text_column} and shard_tokens={manifest.shard_tokens}"
    return [
        (manifest.identity, f"the tokenizer {manifest.tokenizer} ({manifest.identity})"),
        (sources, f"the source {', '.join(f'{name} {n:,} rows {source}' for name, (n, source) in sources.items())}"),
        (settings, settings),
    ]


def tokenize(
    folder: Path,
    splits: Mapping[str, Any],
    tokenizer: Tokenizer,
    text_column: str,
    say: Say,
    workers: int = 0,
    shard_tokens: int = SHARD_TOKENS,
) -> Manifest:
    """Write the splits' rows as tokens, or go on where an interrupted run stopped; nothing if they are complete.

    splits: {name: rows}. One process at a time writes a folder; others wait, and find it complete. workers: processes
    that encode; 0: this one. The files are the same however many there are, and however often it was interrupted.
    Errors: ConfigError if the folder holds other tokens or other files; DataError for a row that can't be encoded, and
    if no row of a split has anything to learn; Failure if the folder can't be written.
    """
    from filelock import FileLock, Timeout

    made = {name: Split(source_fingerprint(rows), len(rows), are_chats(rows)) for name, rows in splits.items()}
    facts = (tokenizer.name, tokenizer.identity, tokenizer.vocabulary, tokenizer.end, text_column, shard_tokens)
    wanted = Manifest(*facts, splits=made)
    if (there := _begun(folder, wanted)).complete:
        return there
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
        manifest = _begun(folder, wanted)
        if manifest.complete:
            return manifest
        if manifest is wanted:
            with writing(folder):
                wanted.write(folder)
        for name, rows in splits.items():
            manifest = _tokenize_split(folder, name, rows, manifest, tokenizer, say, workers)
        manifest = replace(manifest, complete=True)
        with writing(folder):
            manifest.write(folder)
        return manifest


def _begun(folder: Path, wanted: Manifest) -> Manifest:
    """What is there already, else what is wanted. Errors: ConfigError if it was made from or by something else."""
    names = [path.name for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []
    if MANIFEST not in names:  # which is written first: in one listing, as another process may begin at any moment
        if names:
            raise ConfigError(f"{folder} holds other files, such as {names[0]}; give the tokens a folder of their own")
        return wanted
    there = read_manifest(folder)
    for (was_one, was), (now_one, now) in zip(_origin(there), _origin(wanted), strict=True):
        if was_one != now_one:
            raise ConfigError(f"{folder} holds tokens of {was}, not of {now}; give another folder, or remove this one")
    return there


def _tokenize_split(
    folder: Path, name: str, rows: Any, manifest: Manifest, tokenizer: Tokenizer, say: Say, workers: int
) -> Manifest:
    """The manifest with this split's shards, all of them written."""
    begin, end = manifest.splits[name].end_row, len(rows)
    if begin == end:
        return manifest
    rows = needed_columns(rows, manifest.text_column)
    writer = SplitWriter(folder, name, manifest)
    parts = (range(at, min(at + CHUNK_ROWS, end)) for at in range(begin, end, CHUNK_ROWS))
    chunks = ((part.start, rows.__getitems__(list(part)), numbers_in_source(rows, part)) for part in parts)
    encode = partial(_encode_chunk, tokenizer=tokenizer, text_column=manifest.text_column)
    some = begin > 0
    try:
        with _progress(name, begin, end, say) as advance, _in_order(encode, chunks, workers) as encoded:
            for documents, count in encoded:
                for document in documents:
                    writer.add(*document)
                some = some or bool(documents)
                advance(count)
        if not some:
            raise DataError(
                f"none of the {end:,} rows of the {name} split has anything to learn; check that their texts, answers "
                "or completions are not empty"
            )
        writer.finish_shard(end)
    finally:
        writer.close()
    return writer.manifest


def numbers_in_source(rows: Any, part: range) -> list[int]:
    """The numbers of these rows before some were held out and the others shuffled, as in the source's files."""
    chosen = getattr(rows, "_indices", None)  # of a `datasets.Dataset`
    return list(part) if chosen is None else chosen.column(0).slice(part.start, len(part)).to_pylist()


def _encode_chunk(chunk: Chunk, tokenizer: Tokenizer, text_column: str) -> tuple[list[Document], int]:
    """(documents, number of rows): those rows in which something counts."""
    documents = []
    for at, (row, number) in enumerate(zip(*chunk[1:], strict=True), chunk[0]):
        ids, labels = encode_row(number, row, tokenizer, text_column)
        if (largest := max(ids, default=0)) >= tokenizer.vocabulary:  # it would wrap around in the file
            raise DataError(
                f"row {number}: the tokenizer {tokenizer.name} makes the id {largest}, and its vocabulary says that "
                f"ids are below {tokenizer.vocabulary}; correct the tokenizer"
            )
        counted = np.array(labels) != NOT_LEARNED
        counted[:1] = False  # the first is predicted from nothing
        if counted.any():
            documents.append((at, np.array(ids, np.uint32), counted))
    return documents, len(chunk[1])


@contextmanager
def _in_order(encode: Callable[[Any], Any], chunks: Iterator[Any], workers: int) -> Iterator[Iterator[Any]]:
    """encode(chunk) of each chunk, in order: here, or in so many processes, each with a thread that talks to it."""
    if not workers:
        yield map(encode, chunks)
        return
    started, free = [_start(encode) for _ in range(workers)], SimpleQueue[Any]()
    for _, pipe in started:
        free.put(pipe)

    def ask(chunk: Any) -> Any:
        pipe = free.get()
        try:
            pipe.send(chunk)
            return pipe.recv()
        except (EOFError, OSError) as error:
            raise Failure("a worker has died, perhaps for lack of memory; use fewer workers") from error
        finally:
            free.put(pipe)

    def answers(pool: ThreadPoolExecutor) -> Iterator[Any]:
        asked: deque[Any] = deque()
        for chunk in chunks:
            asked.append(pool.submit(ask, chunk))
            if len(asked) > 2 * workers:
                yield _unless_error(asked.popleft().result())
        while asked:
            yield _unless_error(asked.popleft().result())

    pool = ThreadPoolExecutor(workers)
    try:
        yield answers(pool)
    finally:
        for process, _ in started:
            process.kill()
            process.join()
        pool.shutdown(cancel_futures=True)


def _start(encode: Callable[[Any], Any]) -> tuple[Any, Any]:
    """(process, pipe to it) of a worker; a fork can be stuck before its first line, see runtime/loader.py."""
    fork = get_context("fork")
    for _ in range(START_ATTEMPTS):
        mine, theirs = fork.Pipe()
        process = fork.Process(target=_serve, args=(encode, theirs), daemon=True)
        process.start()
        theirs.close()  # or the next worker would keep it open if this one died
        if mine.poll(START_SECONDS):
            mine.recv()
            return process, mine
        process.kill()
    raise Failure("the workers that tokenize do not start; use none, or check the machine's load")


def _serve(encode: Callable[[Any], Any], pipe: Any) -> None:
    """A worker: a result, or the error in its place, for each chunk."""
    die_with_parent(signal.SIGKILL)
    ignore_stop_signals()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers fill the cores
    pipe.send("started")
    while True:
        chunk = pipe.recv()
        try:
            pipe.send(encode(chunk))
        except DataError as error:
            pipe.send(error)


def _unless_error(result: Any) -> Any:
    if isinstance(result, Exception):
        raise result
    return result


@contextmanager
def _progress(name: str, done: int, total: int, say: Say) -> Iterator[Callable[[int], None]]:
    """What to call with the number of rows that are done: a bar on a terminal, else a line now and then."""
    from datasets.utils import tqdm

    start, begun = time.monotonic(), done
    last = start
    with tqdm(desc=f"{name}: tokenizing", total=total, initial=done, unit=" rows") as bar:

        def advance(count: int) -> None:
            nonlocal done, last
            done += count
            bar.update(count)
            now = time.monotonic()
            if bar.disable and now - last >= SECONDS:
                rate, last = (done - begun) / (now - start), now
                left = tqdm.format_interval((total - done) / rate)
                say(f"data: {name}: tokenized {done:,} of {total:,} rows, {rate:,.0f} rows/s, {left} left")

        yield advance
