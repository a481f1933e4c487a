"""Parquet files as a map-style dataset that is neither converted nor held in memory.

Footers are read at the start; three numbers per row group stay in memory. A run's order of samples
is `stream_order`, in which each rank reads from few row groups at a time. Over all ranks, each row
group is read once per epoch, but for a few that `stream_order` names.
"""

import copy
import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from dist_amp.errors import ConfigError, DataError, first_line
from dist_amp.loading.plan import EpochOrder, OrderOf, epoch_keys, epoch_order, permute
from dist_amp.settings import DataConfig
from dist_amp.sources.files import RangeFile, address_of, fetch, is_local, with_retries

log = logging.getLogger(__name__)
OPEN_FILES = 32  # per process
# Row groups of a stream whose rows are shuffled together: a window. Larger windows are slightly
# closer to a full shuffle (python -m benchmarks.shuffle), but take proportionally more memory.
SHUFFLE_GROUPS = 2
MOST_STREAMS = 64  # with data.streams=auto; each stream keeps row groups in memory
# 2^64 / the golden ratio: its multiples lie far apart, so windows get very different keys.
GOLDEN = -0x61C8864680B583EB
THREADS = 16  # that read footers: an object store takes some 50 ms per request (assumed)
FOOTER_BYTES = 2**16  # first fetched from a file's end; most footers are smaller
MAGIC = b"PAR1"
Version = tuple[int, str]  # a file's size and, if its store has one, its ETag
Types = dict[str, Any]  # {column: Arrow type}
Row = dict[str, Any]  # {column: value}; for a whole row group {column: Arrow array}


@dataclass
class Source:
    """Parquet files of one file system, and what a view of their rows needs to know."""

    fs: Any
    files: Sequence[str]
    schema: Any  # the first file's, Arrow
    groups: NDArray[np.int64]  # [R, 3]: the file's index, the row group's index in it, its rows
    types: Types  # of each column that all files have
    versions: list[Version]
    fingerprint: str


def open_parquet(fs: Any, files: Sequence[str], data: DataConfig) -> "ParquetView":
    """The rows of these files of an fsspec file system; only their footers are read here."""
    source = read_source(fs, files)
    if not len(source.groups):
        raise DataError(f"{files[0]} has no rows, nor has any other file; give files with data")
    view = ParquetView(source, data.streams)
    log.info(f"data: {len(view):,} rows in {view.row_groups:,} row groups of {len(files)} files")
    return view


class ParquetView:
    """The rows of a source, or of some of its row groups. Can be pickled and forked."""

    def __init__(self, source: Source, streams: int | Literal["auto"]):
        self.column_names: list[str] = list(source.types)
        self.features: Any = None  # the file's `datasets.Features`, which decode images
        if b"huggingface" in (source.schema.metadata or {}):
            import datasets

            self.features = datasets.Features.from_arrow_schema(source.schema)
        self.fingerprint = source.fingerprint
        self._source = source
        self._groups = source.groups
        self._ends = self._groups[:, 2].cumsum()
        self._streams = streams
        self._cached_groups = 2
        self._reader: Reader | None = None

    @property
    def row_groups(self) -> int:
        return len(self._groups)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Row:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """The rows at these indices; each row group that they lie in is decoded once."""
        numbers = np.asarray(indices, np.int64)
        outside = numbers[(numbers < 0) | (numbers >= len(self))]
        if len(outside):
            raise IndexError(f"row {outside[0]} of {len(self)}")
        if self._reader is None or self._reader.pid != os.getpid():  # a fork opens its own files
            self._reader = Reader(self._source, self.column_names, self._cached_groups)
        groups = np.searchsorted(self._ends, numbers, side="right")
        file, group, count = self._groups[groups].T
        # (file, row group in it, row in that): the arguments of Reader.row.
        keys = np.stack((file, group, numbers - self._ends[groups] + count), axis=1).tolist()
        rows: list[Any] = [None] * len(numbers)
        for place in np.argsort(groups, kind="stable"):
            row = self._reader.row(*keys[place])
            if self.features:
                stored = {name: row[name] for name in row if name in self.features}
                row |= self.features.decode_example(stored)
            rows[place] = row
        return rows

    def select_columns(self, names: str | Sequence[str]) -> "ParquetView":
        names = [names] if isinstance(names, str) else list(names)
        for name in names:
            if name not in self.column_names:
                columns = ", ".join(self.column_names)
                raise DataError(f"column {name} does not exist; the columns are {columns}")
        view = copy.copy(self)
        view.column_names = names
        view._reader = None
        return view

    def select_groups(self, chosen: NDArray[np.int64]) -> "ParquetView":
        view = copy.copy(self)
        view._groups = self._groups[chosen]
        view._ends = view._groups[:, 2].cumsum()
        view.fingerprint = short_hash(self.fingerprint.encode() + view._groups.tobytes())
        return view

    def shuffled(self, global_batch_size: int, world_size: int) -> tuple[str, OrderOf]:
        """Returns (the order's name, (seed, epoch) -> the order). world_size matters with auto."""
        groups = self.row_groups
        if self._streams == "auto":
            streams = auto_streams(groups, world_size)
        else:
            streams = self._streams
            if streams % world_size or streams > groups:
                raise ConfigError(
                    f"data.streams={streams} must be a multiple of the world size {world_size}, "
                    f"and at most the number of row groups, {groups}; choose such a number, or auto"
                )
        # Two windows per stream, since workers that share a stream can't tell when one has ended.
        self._cached_groups = 2 * streams // world_size * SHUFFLE_GROUPS
        self._reader = None
        rows = torch.from_numpy(self._groups[:, 2].copy())
        name = f"parquet streams={streams} shuffle_groups={SHUFFLE_GROUPS}"  # in checkpoints
        return name, partial(stream_order, rows, streams, SHUFFLE_GROUPS)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}


class Reader:
    """Reads rows in one process; caches the row groups and open files that were used last."""

    def __init__(self, source: Source, columns: list[str], cached_groups: int):
        self.pid = os.getpid()
        self.source = source
        # A new file system object: those of object stores do not work after a fork.
        self.fs = type(source.fs)(*source.fs.storage_args, **source.fs.storage_options)
        self.open = lru_cache(OPEN_FILES)(self._open)
        self.columns = columns
        self.cached_groups = cached_groups
        # (file, row group) -> (its Arrow columns, how many of its rows are still to be read)
        self.groups: OrderedDict[tuple[int, int], tuple[Row, int]] = OrderedDict()

    def _open(self, number: int) -> Any:
        """The `pyarrow.parquet.ParquetFile`. Raises DataError if the file has changed."""
        file = self.source.files[number]
        if version_of(self.fs, file, refresh=True) != self.source.versions[number]:
            raise DataError(
                f"{address_of(self.fs, file)} has changed since the run started; put the old file "
                "back, or start a new run"
            )
        if is_local(self.fs):
            return pq.ParquetFile(file, filesystem=self.fs, page_checksum_verification=True)
        return pq.ParquetFile(
            # fsspec's own files read ahead, by far more than a column.
            RangeFile(self.fs, file, size=self.source.versions[number][0], cache_type="none"),
            pre_buffer=True,
            page_checksum_verification=True,
        )

    def row(self, file: int, group: int, number: int) -> Row:
        key = (file, group)
        if key not in self.groups:
            self.groups[key] = self._read(file, group)
        columns, left = self.groups.pop(key)
        if left > 1:  # after its last row a group is not needed again in this epoch
            self.groups[key] = columns, left - 1
            if len(self.groups) > self.cached_groups:
                self.groups.popitem(last=False)
        # One value at a time: `take` is three times slower for rows of many groups (measured).
        return {name: column[number].as_py() for name, column in columns.items()}

    def _read(self, number: int, group: int) -> tuple[Row, int]:
        """Returns (Arrow columns, rows) of a row group. Raises DataError if it is damaged."""
        source = self.source
        try:
            opened = self.open(number)
            # Single-threaded: there is a process per GPU, or per loader worker, already.
            table = opened.read_row_group(group, columns=self.columns, use_threads=False)
            columns = {name: table[name].cast(source.types[name]) for name in self.columns}
        except DataError:
            raise
        except Exception as error:  # file systems raise errors of any type
            raise DataError(
                f"row group {group} of {address_of(self.fs, source.files[number])} can't be read: "
                f"{type(error).__name__}: {first_line(error)}; download or write it again"
            ) from error
        return columns, table.num_rows


def auto_streams(groups: int, world_size: int) -> int:
    """The largest power of two up to MOST_STREAMS and the number of row groups, if the world size
    divides it; otherwise the world size times a power of two.
    """
    most = min(MOST_STREAMS, groups)
    power = 2 ** (most.bit_length() - 1)
    if power % world_size == 0:
        return power
    return world_size * 2 ** max(0, (most // world_size).bit_length() - 1)


def stream_order(
    rows: Tensor, streams: int, shuffle_groups: int, seed: int, epoch: int
) -> EpochOrder:
    """The function from positions, int64 in [0, sum(rows)), to indices of rows: a bijection.

    rows: int64 [R], the number of rows of each row group, none 0. The row groups are put in random
    order, and this sequence of rows is cut into `streams` of equal length, to a row. Position p
    takes the next row of the stream in slot p mod `streams`. Within a stream, each window of
    `shuffle_groups` row groups is shuffled by row.
    A row group that is cut belongs to two neighbouring streams. A rank's streams are neighbours,
    and every second one runs backwards: both reach the cut group at the same time, so it is read
    once. All ranks make groups + ranks - 1 reads at most, if the world size is a product of the
    first prime factors of `streams`; otherwise groups + streams - 1. The partial last step of an
    epoch is divided over all ranks anew, which may add a read per rank and group in it.
    """
    total = int(rows.sum())
    groups = epoch_order("randperm", len(rows), seed, epoch)(torch.arange(len(rows)))
    sizes = rows[groups]
    ends = sizes.cumsum(0)  # of each group in the epoch's sequence of rows; [R], as the next two
    starts = ends - sizes
    shift = (rows.cumsum(0) - rows)[groups] - starts  # from a place in the sequence to an index
    stream_of_slot = digits_reversed(streams)
    lengths = torch.empty(streams, dtype=torch.int64)
    lengths[stream_of_slot] = (total - torch.arange(streams) + streams - 1) // streams
    stream_ends = lengths.cumsum(0)
    stream_starts = stream_ends - lengths
    first_groups = torch.searchsorted(ends, stream_starts, right=True)
    keys = epoch_keys(seed, epoch)

    def rows_at(positions: Tensor) -> Tensor:
        stream = stream_of_slot[positions % streams]
        offset = positions // streams
        start = stream_starts[stream]
        end = stream_ends[stream]
        place = torch.where(stream % 2 == 0, start + offset, end - 1 - offset)  # odd: backwards
        behind = torch.searchsorted(ends, place, right=True) - first_groups[stream]  # in groups
        first = first_groups[stream] + behind // shuffle_groups * shuffle_groups
        last = (first + shuffle_groups - 1).clamp_(max=len(ends) - 1)
        low = torch.maximum(starts[first], start)  # the window, as far as it is in the stream
        high = torch.minimum(ends[last], end)
        window_keys = [low * GOLDEN + key for key in keys]
        place = low + permute(place - low, high - low, window_keys)
        return place + shift[torch.searchsorted(ends, place, right=True)]

    return rows_at


def digits_reversed(count: int) -> Tensor:
    """A permutation of [0, count), int64: reverses the digits of each number, written in a mixed
    radix of the prime factors of `count`. Numbers with the same remainder modulo a product of the
    smallest factors become neighbours, and such are the streams of a rank.
    """
    factors = []
    rest = count
    for factor in range(2, count + 1):
        while rest % factor == 0:
            factors.append(factor)
            rest //= factor
    # An array with a dimension per digit; transposed, the digits are read from the other end.
    numbers = torch.arange(count).reshape(factors[::-1] or [1])
    return numbers.permute(*range(numbers.dim())[::-1]).flatten().argsort()


def read_source(fs: Any, files: Sequence[str]) -> Source:
    """Read all footers. Raises DataError for the first file whose footer can't be read."""
    groups = []
    schemas = []
    identities: list[Any] = []
    with ThreadPoolExecutor(THREADS) as pool:
        versions = list(pool.map(partial(version_of, fs), files))
        tails = pool.map(partial(read_tail, fs), files, versions)
        for number, tail in enumerate(tails):
            try:
                metadata = pq.read_metadata(pa.BufferReader(MAGIC + tail))
            except Exception as error:  # pyarrow raises many types
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
    return Source(
        fs,
        files,
        schemas[0],
        np.array(groups, np.int64).reshape(-1, 3),
        common_types(files, schemas),
        versions,
        short_hash(repr([first, *identities]).encode()),  # saved in checkpoints
    )


def version_of(fs: Any, file: str, refresh: bool = False) -> Version:
    if refresh:
        fs.invalidate_cache(file)
    info = with_retries(fs, file, partial(fs.info, file))
    return info["size"], str(info.get("ETag") or info.get("etag") or "")


def read_tail(fs: Any, file: str, version: Version) -> bytes:
    """A Parquet file's footer, with the 8 bytes after it; arbitrary bytes of any other file."""
    size = version[0]
    tail = fetch(fs, file, max(0, size - FOOTER_BYTES), size)
    length = min(size, int.from_bytes(tail[-8:-4], "little") + 8)
    if length > len(tail) and tail[-4:] == MAGIC:
        tail = fetch(fs, file, size - length, size - len(tail)) + tail
    return tail[-length:]  # type: ignore[no-any-return]


def common_types(files: Sequence[str], schemas: Sequence[Any]) -> Types:
    """{column: a type that fits all files}; columns without such a type are left out."""
    types: Types = {column.name: column.type for column in schemas[0]}
    left_out: set[str] = set()
    for file, schema in zip(files, schemas, strict=True):
        kinds = {column.name: column.type for column in schema}
        for name in (types | kinds).keys() - left_out:
            if types.get(name) == kinds.get(name):
                continue
            try:
                pair = [pa.schema({name: columns[name]}) for columns in (types, kinds)]
                types[name] = pa.unify_schemas(pair, promote_options="permissive").field(0).type
            except (KeyError, pa.ArrowException):
                left_out.add(name)
                log.warning(
                    f"warning: column {name} is left out: it is {kinds.get(name, 'missing')} in "
                    f"{file} and {types.pop(name, 'missing')} in {files[0]}; write the files with "
                    "the same columns, or select files that have them in data.path"
                )
    return types


def short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
