"""What the footers of Parquet files say together."""

import hashlib
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dist_amp.errors import DataError, first_line
from dist_amp.sources.remote import address_of, fetch, patiently

AT_ONCE = 16  # threads: an object store takes some 50 ms per request (assumed)
LIKELY_BYTES = 2**16  # of a footer: what is fetched first
MAGIC = b"PAR1"
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
Version = tuple[int, str]  # a file's size and, if its store has one, the mark of its content
Columns = dict[str, Any]  # by their names: types, values or Arrow arrays


def short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


@dataclass
class Source:
    """Parquet files of one file system, and what a view of their rows needs to know."""

    fs: Any
    files: Sequence[str]
    schema: Any  # the first file's, Arrow
    groups: NDArray[np.int64]  # [R, 3]: file, number in it, rows
    types: Columns  # of each column that all files have
    refused: dict[str, str]  # the other columns, and why
    partitions: list[Columns]  # {key: value} of each file
    versions: list[Version]
    fingerprint: str


def read_source(fs: Any, files: Sequence[str]) -> Source:
    partitions = partitions_of(files)
    groups = []
    schemas = []
    identities: list[Any] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        versions = list(pool.map(partial(version_of, fs), files))
        tails = pool.map(partial(read_tail, fs), files, versions)
        for number, tail in enumerate(tails):
            schema, content = content_of(fs, files[number], tail)
            groups += [(number, group, rows) for group, rows in enumerate(content) if rows]
            schemas.append(schema)
            name = os.path.basename(files[number])
            identity = (name, versions[number][0], hashlib.sha256(tail).hexdigest())
            # Without partitions as before there were any, for the checkpoints of that time.
            identities.append(identity + tuple(partitions[number].items()))
    schema = schemas[0]
    first = {column.name: str(column.type) for column in schema}
    fingerprint = short_hash(repr([first, *identities]).encode())
    types, refused = common_types(files, schemas, partitions)
    return Source(
        fs,
        files,
        schema,
        np.array(groups, np.int64).reshape(-1, 3),
        types,
        refused,
        partitions,
        versions,
        fingerprint,
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
    """The footer as it is, with the file's last 8 bytes. Errors: DataError if there is none."""
    size = version[0]
    tail = fetch(fs, file, max(0, size - LIKELY_BYTES), size)
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if tail[-4:] != MAGIC or length > size:
        raise no_parquet(fs, file, "its end is not a footer's")
    if length > len(tail):
        tail = fetch(fs, file, size - length, size - len(tail)) + tail
    return tail[-length:]


def content_of(fs: Any, file: str, tail: bytes) -> tuple[Any, list[int]]:
    """(Arrow schema, the rows of each row group), as a footer says."""
    try:
        metadata = pq.read_metadata(pa.BufferReader(MAGIC + tail))
        groups = map(metadata.row_group, range(metadata.num_row_groups))
        return metadata.schema.to_arrow_schema(), [group.num_rows for group in groups]
    except Exception as error:  # of many types
        raise no_parquet(fs, file, f"{type(error).__name__}: {first_line(error)}") from error


def no_parquet(fs: Any, file: str, why: str) -> DataError:
    where = address_of(fs, file)
    return DataError(f"{where} can't be read as Parquet: {why}; download or write it again")


def partitions_of(files: Sequence[str]) -> list[Columns]:
    """{key: value} of each file's folders key=value, as Hive writes them: integers or texts."""
    partitions: list[Columns] = []
    for file in files:
        pairs = [folder.partition("=") for folder in file.split("/")[:-1] if "=" in folder]
        partitions.append({unquote(key): unquote(value) for key, _, value in pairs})
    for key in {key for partition in partitions for key in partition}:
        inside = [partition for partition in partitions if key in partition]
        values = {partition[key] for partition in inside} - {NO_VALUE}
        is_number = all(re.fullmatch(r"-?(0|[1-9]\d{0,17})", value) for value in values)
        for partition in inside:
            if partition[key] == NO_VALUE:
                partition[key] = None
            elif is_number:
                partition[key] = int(partition[key])
    return partitions


def common_types(
    files: Sequence[str], schemas: Sequence[Any], partitions: Sequence[Columns]
) -> tuple[Columns, dict[str, str]]:
    """({column: its type in all files, the widest that loses nothing}, {other column: why})."""
    types: Columns = {}
    refused: dict[str, str] = {}
    for file, schema, partition in zip(files, schemas, partitions, strict=True):
        kinds = {key: pa.scalar(value).type for key, value in partition.items()}
        kinds |= {column.name: column.type for column in schema}
        types = types or dict(kinds)
        for name in (types | kinds).keys() - refused.keys():
            here = kinds.get(name)
            before = types.get(name)
            types[name] = widest(before, here)
            if types[name] is None:
                refused[name] = (
                    f"column {name} is {here or 'missing'} in {file} and {before or 'missing'} in "
                    f"{files[0]}; write the files with the same columns, or name those that have "
                    "them in data.path"
                )
    return {name: kind for name, kind in types.items() if name not in refused}, refused


def widest(one: Any, other: Any) -> Any:
    """The Arrow type of the values of both; None if there is none, as of a missing column."""
    if one is None or other is None or one == other:
        return one if one == other else None
    kinds = [kind.value_type if pa.types.is_dictionary(kind) else kind for kind in (one, other)]
    texts = [kind for kind in kinds if kind in (pa.string(), pa.large_string())]
    if len(texts) == 1 and pa.null() not in kinds:
        return None  # Arrow would make bytes of a text
    schemas = [pa.schema({"column": kind}) for kind in kinds]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None
