"""Rows through the `datasets` library: memory-mapped in its cache, or images where they are."""

import csv
import errno
import glob
import io
import json
import logging
import posixpath
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import datasets
import fsspec
import pyarrow as pa
import pyarrow.json
from datasets.packaged_modules.json import json as json_loader
from fsspec.utils import infer_compression
from huggingface_hub import constants

from dist_amp.errors import DataError, Failure, first_line, in_one_line, some_of
from dist_amp.settings import DataConfig, SourceConfig
from dist_amp.sources.files import Files, stay_local_without_network
from dist_amp.sources.footers import read_source
from dist_amp.sources.remote import access_problem, causes_of, is_local

log = logging.getLogger(__name__)
# Format -> (the loader of the library, its options).
LOADERS: dict[str, tuple[str, dict[str, str]]] = {
    "text": ("text", {"sample_by": "document"}),
    "json": ("json", {}),
    "csv": ("csv", {}),
    "tsv": ("csv", {"sep": "\t"}),
    "parquet": ("parquet", {}),
}
# In a column of a table. Leading zeros are those of a name, such as a postcode.
INTEGER = re.compile(r"\s*[+-]?(0|[1-9]\d*)\s*", re.ASCII)
DECIMAL = re.compile(
    r"\s*[+-]?(((0|[1-9]\d*)(\.\d*)?|\.\d+)(e[+-]?\d+)?|inf(inity)?)\s*", re.ASCII | re.IGNORECASE
)
# What stands for a missing number, as pandas reads it.
MISSING = frozenset(
    "|NA|N/A|n/a|#NA|#N/A|#N/A N/A|<NA>|None|NULL|null|NaN|nan|-NaN|-nan"
    "|1.#IND|-1.#IND|1.#QNAN|-1.#QNAN".split("|")
)
TRUTHS = frozenset("True TRUE true False FALSE false".split())
ROWS_AT_ONCE = 10_000


def from_hub(config: SourceConfig) -> Any:
    """All splits of data.name, NAME[:CONFIGURATION][@REVISION]: on the hub, cached, or a folder."""
    source, _, revision = config.name.partition("@")
    if Path(config.name.partition(":")[0]).exists():
        source = config.name
        revision = ""
    else:
        stay_local_without_network()
    name, _, configuration = source.partition(":")
    try:
        with library():
            builder = datasets.load_dataset_builder(
                name, configuration or None, revision=revision or None
            )
            builder.download_and_prepare()
            splits = builder.as_dataset()
    except Exception as error:  # of many types; each message names what it could not read
        fix = "check the name, its revision and the network, or set data.path to local files"
        if datasets.config.HF_HUB_OFFLINE:
            fix = (
                "it is not cached, and the hub is not reached or HF_HUB_OFFLINE is set: load it "
                "once with a network, or set data.path to local files"
            )
        raise not_loaded(f"data.name={config.name}", error, fix) from error
    if type(builder).__module__.endswith(".cache"):  # after any error of the hub
        log.info("data: %s comes from the cache, commit %s", name, builder.hash)
        refs = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}" / "refs"
        is_cached = (refs / revision).is_file() and (refs / revision).read_text() == builder.hash
        if revision not in ("", "main", builder.hash) and not is_cached:
            raise DataError(
                f"data.name={config.name}: revision {revision} could not be loaded, and the newest "
                f"in the cache is commit {builder.hash}; check the revision and the network, or "
                f"use @{builder.hash}"
            )
    return splits


def from_files(config: DataConfig, files: Files) -> Any:
    """All splits of the files. Errors: DataError that names the file and, if known, the line."""
    fix = "check the files"
    try:
        with library(files):
            if files.format == "images":
                return image_rows(files)
            if files.format == "saved":
                fix = "write the folder again with save_to_disk, of a Dataset or DatasetDict"
                saved = datasets.load_from_disk(files.address(files.root))
                return saved if isinstance(saved, dict) else datasets.DatasetDict(train=saved)
            return convert(config, files)
    except DataError as error:
        raise DataError(f"data.path={config.path}: {error}") from error
    except Exception as error:
        if "ompression type zstd not supported" in str(error):
            fix = "install it with `pip install zstandard`"
        source = f"data.path={config.path}"
        if problem := access_problem(files.fs, error):
            raise DataError(f"{source} could not be loaded: {problem}") from error
        if files.format in ("text", "json", "csv", "tsv") and not is_full(error):
            fix = broken_line(files) + fix
        raise not_loaded(source, error, fix) from error


def convert(config: DataConfig, files: Files) -> Any:
    """A `datasets.DatasetDict` of files that the library converts, once."""
    loader, options = LOADERS[files.format]
    tables = None
    if loader == "csv":
        tables = Tables(config, options.get("sep", ","))
        # Each value of these settings has its own conversion in the cache.
        options = {**options, "na_values": config.text_column}
        if config.most_bad_samples:
            options["on_bad_lines"] = "skip"
    # The library takes names as patterns.
    escape = glob.escape if is_local(files.fs) else files.address
    data_files = {split: [escape(path) for path in paths] for split, paths in files.splits.items()}
    builder = datasets.load_dataset_builder(loader, data_files=data_files, **options)
    is_converted = Path(builder.cache_dir, "dataset_info.json").exists()
    manager = None  # the library's, which knows addresses within others
    if not is_converted and not files.rest:
        # By its ETag, a file that has changed in its store is fetched again.
        cache = str(Path(datasets.config.HF_DATASETS_CACHE) / "downloads")
        download = datasets.DownloadConfig(cache_dir=cache, use_etag=True)
        manager = datasets.DownloadManager(builder.dataset_name, download_config=download)
    if files.format == "parquet" and not is_converted:
        read_source(files.fs, files.paths)  # names a damaged one
    if tables is not None:
        for path in files.paths if not is_converted else ():
            place, fs = path, files.fs
            if not is_local(fs) and manager is not None:
                place, fs = manager.download(files.address(path)), fsspec.filesystem("file")
            with fs.open(place, "rb", compression=infer_compression(path)) as content:
                tables.read_types(content, files.address(path))
        builder._generate_tables = tables.of_files
        builder.info.description = builder.info.description or "\n".join(tables.left_out)
    if files.format == "json":
        builder._cast_table = partial(cast_json, builder, builder._cast_table)
    # Also of converted files: the builder may have looked before another process wrote them.
    builder.download_and_prepare(dl_manager=manager)
    converted = builder.as_dataset()
    if tables is not None and builder.info.description:
        left_out = builder.info.description.splitlines()
        limit = config.most_bad_samples
        if limit < 1:
            rows = sum(converted.num_rows.values())
            limit *= rows + len(left_out)
        text = f"rows left out for their number of fields: {len(left_out):,}, {some_of(left_out)}"
        if len(left_out) > limit:
            raise DataError(
                f"{text}; more than {config.most_bad_samples:g}; raise "
                f"data.on_bad_sample={config.on_bad_sample}"
            )
        log.warning("warning: %s", text)
    return converted


class Tables:
    """CSV files as Arrow tables. A column has the name in the header, and a type that fits all rows
    of all files: whole numbers, numbers, truth values, or the texts that stand there.

    pandas takes a first column without a name as an index, and words such as None as missing.
    """

    def __init__(self, config: DataConfig, delimiter: str):
        self.text_column = config.text_column
        self.skips = config.most_bad_samples > 0
        self.delimiter = delimiter
        self.kinds: dict[str, set[str]] = defaultdict(set)  # of the values of a column
        self.left_out: list[str] = []  # where rows have more or fewer fields than the header

    def read_types(self, content: Any, address: str) -> None:
        """Errors: DataError with the line of a row that does not fit."""
        batches = self._batches(content, address)
        if (header := next(batches, None)) is None:
            raise DataError(f"{address} is empty; its first line must name the columns")
        if self.kinds and self.kinds.keys() != header.keys():
            raise DataError(
                f"{address} has the columns {', '.join(header)}, and a file before it "
                f"{', '.join(self.kinds)}; give all files the same ones"
            )
        for batch in chain((header,), batches):
            for name, texts in batch.items():
                kinds = self.kinds[name]
                for text in texts:
                    if "text" in kinds:
                        break
                    kinds.add(kind_of(text))

    def of_files(
        self, files: Any = (), files_iterables: Any = (), **_: Any
    ) -> Iterator[tuple[int, pa.Table]]:
        """In place of the library's generator; `files` is the argument of its version 4."""
        paths = [path for inside in files_iterables or files for path in inside]
        number = 0
        for path in paths:
            with fsspec.open(path, "rb") as content:
                for batch in islice(self._batches(content, ""), 1, None):
                    columns = {name: self._column(name, batch[name]) for name in self.kinds}
                    yield number, pa.table(columns)
                    number += 1

    def _batches(self, content: Any, address: str) -> Iterator[dict[str, tuple[str, ...]]]:
        """{column: texts}, first of no row. address: of a file whose other rows are not known."""
        rows = csv_rows(content, address, self.delimiter, self._leave_out if address else None)
        names = [name for _, header in islice(rows, 1) for name in header]
        if names:
            yield dict.fromkeys(names, ())
        while batch := [row for _, row in islice(rows, ROWS_AT_ONCE)]:
            columns = zip(*batch, strict=True)
            yield dict(zip(names, columns, strict=True))

    def _leave_out(self, where: str, fields: int, names: list[str]) -> None:
        if self.skips:
            self.left_out.append(f"{where} (fields: {fields})")
            return
        separators = {",": "commas", "\t": "tabs"}[self.delimiter]
        raise DataError(
            f"{where} has another number of fields ({fields}) than the header ({len(names)}), "
            f"which is {self.delimiter.join(names):.80}; separate fields by {separators}, or quote "
            f"those that hold {separators}"
            "; data.on_bad_sample=skip leaves such rows out"
        )

    def _column(self, name: str, texts: tuple[str, ...]) -> pa.Array:
        known = self.kinds[name] - {"", "missing"}
        has_missing = known != self.kinds[name]
        if name == self.text_column:
            known = {"text"}
        if known == {"truth"}:
            truths = [None if text in MISSING else text.lower() == "true" for text in texts]
            return pa.array(truths, pa.bool_())
        if known == {"integer"} and not has_missing:
            return pa.array(map(int, texts), pa.int64())
        # An integer above 64 bits alone is a name, among numbers a number.
        if known == {"integer"} or ("number" in known and not known & {"text", "truth"}):
            numbers = [None if text in MISSING else float(text) for text in texts]
            return pa.array(numbers, pa.float64())
        return pa.array([text or None for text in texts], pa.large_string())


def csv_rows(
    content: Any,
    address: str,
    delimiter: str = ",",
    on_misfit: Callable[[str, int, list[str]], None] | None = None,
) -> Iterator[tuple[str, list[str]]]:
    """(file and line, texts) of the header of a CSV file, then of its rows. Errors: DataError.

    on_misfit(line, number of its fields, names): for rows that have more or fewer, which are left
    out.
    """
    csv.field_size_limit(sys.maxsize)
    lines = io.TextIOWrapper(content, encoding="utf-8-sig", newline="")
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    names: list[str] = []
    line = 1
    try:
        for row in reader:
            where = f"{address}, line {line}"
            line = reader.line_num + 1
            if not row or (len(row) == 1 and row[0].isspace()):
                continue
            if not names:
                names = [name or f"Unnamed: {number}" for number, name in enumerate(row)]
                if repeated := [name for name in names if names.count(name) > 1]:
                    raise DataError(f"{where} names column {repeated[0]} twice; rename one")
                yield where, names
            elif len(row) == len(names):
                yield where, row
            elif on_misfit:
                on_misfit(where, len(row), names)
    except csv.Error as error:
        raise DataError(f"{address}, line {line} can't be read as CSV: {error}") from None


def kind_of(text: str) -> str:
    """ "": empty, missing, truth, integer, large: an integer above 64 bits, number, text."""
    if text in MISSING:
        return text and "missing"
    if INTEGER.fullmatch(text):
        if len(text) < 40 and -(2**63) <= int(text) < 2**63:
            return "integer"
        return "large"
    if DECIMAL.fullmatch(text):
        return "number"
    if text in TRUTHS:
        return "truth"
    return "text"


def read_json(content: Any, **options: Any) -> pa.Table:
    """Arrow's reader, except that texts that look like dates are what stands there."""
    table = pyarrow.json.read_json(content, **options)
    schema = pa.schema([field.with_type(without_dates(field.type)) for field in table.schema])
    if schema == table.schema:
        return table
    content.seek(0)
    texts = pyarrow.json.ParseOptions(explicit_schema=schema)
    return pyarrow.json.read_json(content, parse_options=texts, **options)


def without_dates(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(without_dates(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(without_dates(kind.value_type))
    return pa.string() if pa.types.is_timestamp(kind) else kind


def cast_json(builder: Any, cast: Any, table: pa.Table, *args: Any, **options: Any) -> pa.Table:
    """The library's cast to the types of the first rows; a text does not become a number."""
    known = builder.info.features.arrow_schema if builder.info.features else table.schema
    for name in set(known.names) & set(table.column_names):
        first = known.field(name).type
        kind = table.schema.field(name).type
        for is_such in (pa.types.is_boolean, is_number):
            if pa.types.is_null(kind):
                continue
            if is_such(first) and not is_such(kind):
                raise DataError(f"column {name} is {first} in its first rows, and {kind} later")
    return cast(table, *args, **options)


def is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def broken_line(files: Files) -> str:
    """The first file with a line that is no UTF-8, or no JSON, in words; "" if there is none."""
    for path in files.paths:
        where = f"{files.address(path)} "
        try:
            with files.fs.open(path, "rb", compression="infer") as lines:
                for number, line in enumerate(lines, 1):
                    where = f"line {number} of {files.address(path)} "
                    if line.decode().strip() and ".jsonl" in path:
                        json.loads(line)
        except UnicodeDecodeError:
            return f"{where}is not UTF-8; "
        except ValueError as error:
            return f"{where}is not JSON ({first_line(error)}); "
        except Exception as error:  # it is compressed and damaged, or gone
            return f"{where}can't be read ({first_line(error)}); "
    return ""


class NamedImage(datasets.Image):
    """An image column whose errors, of PIL or the file system, are a DataError with its file."""

    def decode_example(self, value: Any, token_per_repo_id: Any = None) -> Any:
        try:
            return super().decode_example(value, token_per_repo_id)
        except Exception as error:
            what = in_one_line(error)
            raise DataError(f"the image {value['path']} can't be decoded: {what}") from error


def image_rows(files: Files) -> Any:
    """A row per image, in the order of their names: image and, by folders of classes or a table,
    label. Texts in the only column, or label, are classes. Nothing is copied, nor read before it
    is needed.
    """
    paths = files.paths
    try:
        columns = columns_of_tables(files) if files.tables else folders_of(files, paths)
    except UnicodeDecodeError as error:
        raise DataError(f"a table of labels can't be read as CSV: {error}; write UTF-8") from None
    images = [files.address(path) for path in paths]
    everything = datasets.Dataset.from_dict({"image": images, **columns})
    everything = everything.cast_column("image", NamedImage())
    for name, values in columns.items():
        label = name == "label" or len(columns) == 1
        if label and isinstance(values[0], str):
            classes = datasets.ClassLabel(names=sorted(set(values)))
            everything = everything.cast_column(name, classes)
    splits = datasets.DatasetDict()
    first = 0
    for split, inside in files.splits.items():
        splits[split] = everything.select(range(first, first + len(inside)))
        first += len(inside)
    return splits


def folders_of(files: Files, paths: list[str]) -> dict[str, list[Any]]:
    """{"label": the folder of each image}; nothing if they lie in one."""
    top = posixpath.commonpath([posixpath.dirname(path) for path in paths])
    below = int(len(files.splits) > 1)  # the folders train, test ... are no classes
    folders = [posixpath.relpath(path, top or ".").split("/")[below:-1] for path in paths]
    if not any(folders):
        return {}
    if [] in folders:
        stray = files.address(paths[folders.index([])])
        raise DataError(
            f"the image {stray} lies in no class's folder, as others do; move or remove it"
        )
    return {"label": ["/".join(folder) for folder in folders]}


def columns_of_tables(files: Files) -> dict[str, list[Any]]:
    """{column: its value for each image}, of the CSV tables beside images."""
    rows: dict[str, dict[str, str]] = {path: {} for path in files.paths}
    columns: list[str] = []

    def refuse(where: str, fields: int, names: list[str]) -> None:
        raise DataError(f"{where} has more or fewer values than the {len(names)} columns")

    for table in files.tables:
        address = files.address(table)
        log.info("data: labels are those of %s", address)
        with files.fs.open(table, "rb") as content:
            lines = csv_rows(content, address, ",", refuse)
            names = [name.strip() for _, header in islice(lines, 1) for name in header]
            key, label = columns_of_table(address, names)
            here = [name for name in names if name != key]
            columns = columns or here
            if {*here} != {*columns}:
                raise DataError(
                    f"{address} has the columns {', '.join(here)}, and another table beside "
                    f"images {', '.join(columns)}; write the same ones"
                )
            for where, texts in lines:
                values = dict(zip(names, (text.strip() for text in texts), strict=True))
                name = values.pop(key)
                path = posixpath.normpath(posixpath.join(posixpath.dirname(table), name))
                if path not in rows:
                    raise DataError(f"{where} names {name!r}, which is no image that is there")
                if rows[path]:
                    raise DataError(f"{where} names {name}, which has a row already; remove one")
                if not values.get(label, "unknown"):
                    raise DataError(f"{where} has no {label} for {name}; write one, or remove both")
                rows[path] = values
    without = [path for path in files.paths if not rows[path]]
    if without:
        raise DataError(
            f"the image {files.address(without[0])} has no row in {files.address(files.tables[0])} "
            f"({len(without):,} have none); add one, or remove the image"
        )
    return {name: typed([rows[path][name] for path in files.paths]) for name in columns}


def columns_of_table(address: str, names: list[str]) -> tuple[str, str]:
    key = next((name for name in ("file_name", "file") if name in names), "")
    others = set(names) - {key}
    if not key or not others or "image" in others or len(others) + 1 < len(names):
        raise DataError(
            f"{address} has the columns {', '.join(names) or 'none'}; it needs file or "
            "file_name, then label, separated by commas, each once, and none named image"
        )
    if len(others) == 1:
        return key, others.pop()
    return key, "label" if "label" in others else ""


def typed(texts: list[str]) -> list[Any]:
    """Texts as whole numbers, or numbers, if all are; an empty one as None."""
    kinds = {kind_of(text) for text in texts if text}
    kind: Any = str
    if kinds == {"integer"}:
        kind = int
    elif kinds <= {"integer", "number"}:
        kind = float
    return [kind(text) if text else None for text in texts]


def not_loaded(source: str, error: Exception, fix: str) -> Failure:
    if is_full(error):
        cache = datasets.config.HF_DATASETS_CACHE
        return Failure(
            f"{source}: the disk of the cache {cache} is full; make room, or set HF_DATASETS_CACHE"
        )
    cause = error.__cause__ or error  # the library wraps the error in a general one
    text = " ".join(str(cause).split()) or type(cause).__name__
    if text == "StopIteration" or re.search("to no data|at least one example", text):
        text = "it has no rows"
    if "scripts are no longer supported" in text:
        fix = "convert it to Parquet with datasets below 4, and set data.path to the files"
    return DataError(f"{source} could not be loaded: {text:.400}; {fix}")


def is_full(error: BaseException) -> bool:
    return any(
        getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        or "Not enough disk space" in str(cause)
        for cause in causes_of(error)
    )


@contextmanager
def library(files: Files | None = None) -> Iterator[None]:
    """Inside, the library is silent, and reads files outside the hub whatever HF_HUB_OFFLINE is."""
    logger = logging.getLogger("datasets")
    level = logger.level
    offline = datasets.config.HF_HUB_OFFLINE
    logger.setLevel(logging.CRITICAL)
    reader = SimpleNamespace(ReadOptions=pyarrow.json.ReadOptions, read_json=read_json)
    if files is not None and "hf" not in files.fs.protocol:
        datasets.config.HF_HUB_OFFLINE = False
    try:
        with patch.object(json_loader, "paj", reader):
            yield
    finally:
        logger.setLevel(level)
        datasets.config.HF_HUB_OFFLINE = offline
