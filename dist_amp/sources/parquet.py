"""Parquet files as a map-style dataset that is neither converted nor held in memory: rows are read by row group.

What is kept of the files is three numbers per row group. `shuffled` gives the order in which this is fast, see
streams.py: in it, each row group is read once per epoch.
"""

import copy
import hashlib
import logging
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dist_amp.errors import ConfigError, DataError, first_line
from dist_amp.settings import DataConfig
from dist_amp.sources.streams import shuffled

log = logging.getLogger(__name__)
OPEN_FILES = 32  # per process
FOOTERS_AT_ONCE = 16  # threads: an object store takes some 50 ms per request (assumed)


def open_parquet(fs: Any, files: Sequence[str], data: DataConfig) -> "ParquetView":
    """The rows of these files of an fsspec file system; their footers are read here, and nothing else.

    Errors: DataError for a file that is no Parquet, columns that are not the first file's, and if there are no rows.
    """
    with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
        footers = list(pool.map(partial(read_footer, fs), files))
    for file, (_, schema, _) in zip(files, footers, strict=True):
        check_same_columns(files[0], footers[0][1], file, schema)
    groups = np.concatenate([own for own, _, _ in footers])
    groups[:, 0] = np.repeat(np.arange(len(files)), [len(own) for own, _, _ in footers])
    groups = groups[groups[:, 2] > 0]
    if not len(groups):
        raise DataError(f"{files[0]}{' and the other files' * (len(files) > 1)} have no rows; give files with data")
    digest = hashlib.sha256(repr([types(footers[0][1]), *(own for _, _, own in footers)]).encode())
    view = ParquetView(
        fs, tuple(files), footers[0][1], groups, digest.hexdigest()[:16], data.streams, data.shuffle_groups
    )
    log.info("data: %s rows in %s row groups of %s Parquet files", f"{len(view):,}", f"{len(groups):,}", len(files))
    return view


def read_footer(fs: Any, file: str) -> tuple[NDArray[np.int64], Any, tuple[Any, ...]]:
    """([groups, 3]: 0, number, rows; Arrow schema; what identifies the file, wherever it lies) of one file."""
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file, filesystem=fs) as opened:
            schema, metadata = opened.schema_arrow, opened.metadata
            rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        groups = np.array([(0, number, count) for number, count in enumerate(rows)], np.int64).reshape(-1, 3)
        size = fs.size(file)
        footer = fs.cat_file(file, size - metadata.serialized_size - 8, size)  # it has each column's sizes and limits
        return groups, schema, (os.path.basename(file), size, hashlib.sha256(footer).hexdigest())
    except Exception as error:  # file systems raise what they like
        text = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(f"{file} can't be read as Parquet: {text}; download or write it again") from error


def types(schema: Any) -> dict[str, str]:
    """{column: its type} of an Arrow schema."""
    return {column.name: str(column.type) for column in schema}


def check_same_columns(first: str, expected: Any, file: str, schema: Any) -> None:
    """Errors: DataError for the first column that is not in both files, or of another type."""
    theirs, ours = types(expected), types(schema)
    for name in theirs | ours:
        if theirs.get(name) != ours.get(name):
            raise DataError(
                f"column {name} is {ours.get(name, 'missing')} in {file} and {theirs.get(name, 'missing')} in {first}; "
                "write the files with the same columns, or name those that have them in data.path"
            )


class ParquetView:
    """The rows of some row groups, by number: view[i] is a dict of Python objects; pictures are decoded.

    groups: int64 [R, 3], file, number within it, and rows of each group. It may be pickled, and used after a fork.
    """

    def __init__(
        self, fs: Any, files: tuple[str, ...], schema: Any, groups: NDArray[np.int64], fingerprint: str,
        streams: int, shuffle_groups: int,
    ):  # fmt: skip
        self.column_names: list[str] = schema.names
        self.features: Any = features_of(schema)
        self.fingerprint = fingerprint
        self._files = OpenFiles(fs, files)
        self._groups = groups
        self._ends = groups[:, 2].cumsum()
        self._streams, self._shuffle_groups = streams, shuffle_groups
        self._kept_groups = 2
        self._reader: Reader | None = None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of these numbers; each row group that they lie in is decoded once."""
        wanted = np.asarray(indices, np.int64)
        if ((wanted < 0) | (wanted >= len(self))).any():
            raise IndexError(f"row {wanted[(wanted < 0) | (wanted >= len(self))][0]} of {len(self)}")
        if self._reader is None or self._reader.pid != os.getpid():  # a fork shares no open files with its parent
            self._reader = Reader(self._files, self.column_names, self._kept_groups)
        groups = np.searchsorted(self._ends, wanted, side="right")
        file, number, count = self._groups[groups].T
        inside = wanted - (self._ends[groups] - count)
        rows: list[Any] = [None] * len(wanted)
        for place in np.argsort(groups, kind="stable"):
            row = self._reader.row(int(file[place]), int(number[place]), int(inside[place]))
            rows[place] = self.features.decode_example(row) if self.features else row
        return rows

    def select_columns(self, names: str | Sequence[str]) -> "ParquetView":
        """The same rows with these columns alone; the others are not read."""
        names = [names] if isinstance(names, str) else list(names)
        if missing := [name for name in names if name not in self.column_names]:
            raise DataError(f"column {missing[0]} does not exist; the columns are {', '.join(self.column_names)}")
        view = copy.copy(self)
        view.column_names, view._reader = names, None
        return view

    def train_test_split(self, test_size: float, seed: int = 0) -> dict[str, "ParquetView"]:
        """{"train": ..., "test": ...}: a part of the row groups, chosen at random, is held out, at least one.

        Errors: DataError if none is left to train on.
        """
        groups = len(self._groups)
        held_out = math.ceil(groups * test_size)
        if held_out >= groups:
            raise DataError(
                f"data.validation_fraction={test_size} of {groups} row group{'s' * (groups > 1)} leaves none to train "
                "on; set data.validation_split, write the files with smaller row groups, or use data.view=map"
            )
        order = torch.randperm(groups, generator=torch.Generator().manual_seed(seed)).numpy()
        return {"train": self._part(np.sort(order[held_out:])), "test": self._part(order[:held_out])}

    def _part(self, chosen: NDArray[np.int64]) -> "ParquetView":
        view = copy.copy(self)
        view._groups, view._reader = self._groups[chosen], None
        view._ends = view._groups[:, 2].cumsum()
        digest = hashlib.sha256(self.fingerprint.encode() + view._groups.tobytes())
        view.fingerprint = digest.hexdigest()[:16]
        return view

    def shuffled(
        self, global_batch_size: int, world_size: int
    ) -> tuple[str, Callable[[int, int], Callable[[torch.Tensor], torch.Tensor]]]:
        """The order's name, and its function of seed and epoch; the same at every world size.

        Errors: ConfigError for data.streams that the ranks can't share evenly, or that are more than the row groups.
        """
        groups, streams = len(self._groups), self._streams
        if world_size > groups or streams > groups:
            ranks = f"{world_size} rank{'s' * (world_size > 1)}"
            fix = f"data.streams={fitting_streams(groups, world_size)}, " if world_size <= groups else ""
            raise ConfigError(
                f"data.streams={streams} on {ranks} needs as many row groups, and there are {groups}; use "
                f"{fix}data.view=map, or files with smaller row groups"
            )
        if streams % world_size:
            fix = f"data.streams={fitting_streams(min(groups, max(streams, world_size)), world_size)}"
            raise ConfigError(f"data.streams={streams} is not a multiple of the world size {world_size}; use {fix}")
        # Twice what is open at a time: where workers share a stream, none knows when a window has ended.
        self._kept_groups = 2 * streams // world_size * self._shuffle_groups
        self._reader = None
        return shuffled(torch.from_numpy(self._groups[:, 2].copy()), streams, self._shuffle_groups)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}


def fitting_streams(most: int, world_size: int) -> int:
    """The world size times a power of two: a number of streams that leaves other world sizes open."""
    return world_size * 2 ** int(math.log2(most // world_size))


def features_of(schema: Any) -> Any:
    """The `datasets.Features` that the library wrote into the file, such as which columns are pictures; else None."""
    if b"huggingface" not in (schema.metadata or {}):
        return None
    import datasets

    return datasets.Features.from_arrow_schema(schema)


@dataclass(frozen=True)
class OpenFiles:
    """Files of an fsspec file system."""

    fs: Any
    names: tuple[str, ...]

    def open(self, number: int) -> Any:
        import pyarrow.parquet as pq

        # Of its own for this process: those of object stores do not survive a fork.
        fs = type(self.fs)(*self.fs.storage_args, **self.fs.storage_options)
        remote = type(self.fs).__name__ != "LocalFileSystem"
        return pq.ParquetFile(self.names[number], filesystem=fs, pre_buffer=remote, page_checksum_verification=True)


@dataclass
class Reader:
    """Reads rows in one process; keeps the row groups that were used last, as Arrow arrays, and open files."""

    files: OpenFiles
    columns: list[str]
    most_groups: int
    pid: int = field(default_factory=os.getpid)
    _groups: OrderedDict[tuple[int, int], tuple[dict[str, Any], int]] = field(default_factory=OrderedDict)
    _open: OrderedDict[int, Any] = field(default_factory=OrderedDict)

    def row(self, file: int, group: int, number: int) -> dict[str, Any]:
        """The row of this number within the group."""
        key = (file, group)
        table, left = self._groups.pop(key) if key in self._groups else self._read(file, group)
        if left > 1:  # after its last row a group is not needed again in this epoch
            self._groups[key] = table, left - 1
            if len(self._groups) > self.most_groups:
                self._groups.popitem(last=False)
        # Each value on its own: `take`, in a batch of rows from as many groups, is three times slower (measured).
        return {name: column[number].as_py() for name, column in table.items()}

    def _read(self, file: int, group: int) -> tuple[dict[str, Any], int]:
        """({column: Arrow array}, its rows) of a row group. Errors: DataError for one that is damaged."""
        try:
            opened = self._open[file] = self._open.pop(file, None) or self.files.open(file)
            if len(self._open) > OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            # Single-threaded: there is a process per GPU, or per loader worker, already.
            table = opened.read_row_group(group, columns=self.columns, use_threads=False)
            columns = {name: table[name] for name in self.columns}
            # One chunk is the rule; there are several where a column of strings exceeds 2 GiB.
            return {n: c.chunk(0) if c.num_chunks == 1 else c for n, c in columns.items()}, table.num_rows
        except Exception as error:  # file systems raise what they like
            text = f"{type(error).__name__}: {first_line(error)}"
            name = self.files.names[file]
            raise DataError(f"row group {group} of {name} can't be read: {text}; download or write it again") from error
