"""Row groups and column types, from the footers of Parquet files."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dist_amp.errors import DataError, first_line
from dist_amp.sources.remote import address_of, fetch, patiently

AT_ONCE = 16  # threads: an object store takes some 50 ms per request (assumed)
LIKELY_BYTES = 2**16  # of a footer: what is fetched first
MAGIC = b"PAR1"
Version = tuple[int, str]  # a file's size and, if its store has one, the mark of its content
Types = dict[str, Any]  # Arrow's, by the columns' names


def short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


@dataclass
class Source:
    """Parquet files of one file system, and what a view of their rows needs to know."""

    fs: Any
    files: Sequence[str]
    schema: Any  # the first file's, Arrow
    groups: NDArray[np.int64]  # [R, 3]: file, number in it, rows
    types: Types  # of each column that all files have
    refused: dict[str, str]  # the other columns, and why
    versions: list[Version]
    fingerprint: str


def read_source(fs: Any, files: Sequence[str]) -> Source:
    """Read all footers. Errors: DataError for the first file that has none."""
    groups = []
    schemas = []
    identities: list[Any] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        versions = list(pool.map(partial(version_of, fs), files))
        tails = pool.map(partial(read_tail, fs), files, versions)
        for number, tail in enumerate(tails):
            try:
                metadata = pq.read_metadata(pa.BufferReader(MAGIC + tail))
            except Exception as error:  # of many types
                raise DataError(
                    f"{address_of(fs, files[number])} can't be read as Parquet: "
                    f"{first_line(error)}; download or write it again"
                ) from error
            schemas.append(metadata.schema.to_arrow_schema())
            for group in range(metadata.num_row_groups):
                if rows := metadata.row_group(group).num_rows:
                    groups.append((number, group, rows))
            name = os.path.basename(files[number])
            identities.append((name, versions[number][0], hashlib.sha256(tail).hexdigest()))
    first = {column.name: str(column.type) for column in schemas[0]}
    types, refused = common_types(files, schemas)
    return Source(
        fs,
        files,
        schemas[0],
        np.array(groups, np.int64).reshape(-1, 3),
        types,
        refused,
        versions,
        short_hash(repr([first, *identities]).encode()),  # checkpoints hold it
    )


def version_of(fs: Any, file: str, refresh: bool = False) -> Version:
    if refresh:
        fs.invalidate_cache(file)
    try:
        about = patiently(fs, file, partial(fs.info, file))
    except FileNotFoundError as error:
        raise DataError(f"{address_of(fs, file)} does not exist any more; put it back") from error
    return about["size"], str(about.get("ETag") or about.get("etag") or "")


def read_tail(fs: Any, file: str, version: Version) -> bytes:
    """The file's footer and its last 8 bytes; anything else of a file that is no Parquet."""
    size = version[0]
    tail = fetch(fs, file, max(0, size - LIKELY_BYTES), size)
    length = min(size, int.from_bytes(tail[-8:-4], "little") + 8)
    if length > len(tail) and tail[-4:] == MAGIC:
        tail = fetch(fs, file, size - length, size - len(tail)) + tail
    return tail[-length:]  # type: ignore[no-any-return]


def common_types(files: Sequence[str], schemas: Sequence[Any]) -> tuple[Types, dict[str, str]]:
    """Returns ({column: the type of its values}, {column without a common type: why})."""
    types: Types = {column.name: column.type for column in schemas[0]}
    refused: dict[str, str] = {}
    for file, schema in zip(files, schemas, strict=True):
        kinds = {column.name: column.type for column in schema}
        for name in (types | kinds).keys() - refused.keys():
            if types.get(name) == kinds.get(name):
                continue
            try:
                pair = [pa.schema({name: columns[name]}) for columns in (types, kinds)]
                types[name] = pa.unify_schemas(pair, promote_options="permissive").field(0).type
            except (KeyError, pa.ArrowException):
                refused[name] = (
                    f"column {name} is {kinds.get(name, 'missing')} in {file} and "
                    f"{types.pop(name, 'missing')} in {files[0]}; write the files with the same "
                    "columns, or name those that have them in data.path"
                )
    return types, refused
