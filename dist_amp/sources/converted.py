"""Rows through the `datasets` library: memory-mapped in its cache, or images where they are.

The library converts files once, in one process per machine. Two things are done here in its place:
the rows of tables, and the labels of images.
"""

import csv
import glob
import io
import json
import logging
import posixpath
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
from huggingface_hub import constants

from dist_amp.errors import DataError, first_line, some_of
from dist_amp.settings import DataConfig, SourceConfig
from dist_amp.sources.files import Files, stay_local_without_network
from dist_amp.sources.footers import read_source
from dist_amp.sources.remote import is_local

log = logging.getLogger(__name__)
# Format -> (the loader of the library, its options).
LOADERS: dict[str, tuple[str, dict[str, str]]] = {
    "text": ("text", {"sample_by": "document"}),
    "json": ("json", {}),
    "csv": ("csv", {}),
    "tsv": ("csv", {"sep": "\t"}),
    "parquet": ("parquet", {}),
}
# Values in a column of a table. A number with leading zeros is a name, such as a postcode.
INTEGER = re.compile(r"\s*[+-]?(0|[1-9]\d*)\s*", re.ASCII)
DECIMAL = re.compile(
    r"\s*[+-]?(((0|[1-9]\d*)(\.\d*)?|\.\d+)(e[+-]?\d+)?|inf(inity)?)\s*", re.ASCII | re.IGNORECASE
)
# Marks of a missing number, as pandas reads them.
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
        with quiet_library():
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
    # After any error of the hub, the library takes the newest commit in its cache.
    if type(builder).__module__.endswith(".cache"):
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
    source = f"data.path={config.path}"
    fix = "check the files"
    try:
        with quiet_library(files):
            if files.format == "images":
                return image_rows(files)
            if files.format == "saved":
                fix = "write the folder again with save_to_disk, of a Dataset or DatasetDict"
                saved = datasets.load_from_disk(files.address(files.root))
                return saved if isinstance(saved, dict) else datasets.DatasetDict(train=saved)
            return convert(config, files)
    except DataError as error:
        raise DataError(f"{source}: {error}") from error
    except Exception as error:
        if files.format in ("text", "json", "csv", "tsv"):
            fix = broken_line(files) + fix
        raise not_loaded(source, error, fix) from error


def convert(config: DataConfig, files: Files) -> Any:
    """A `datasets.DatasetDict` of files that the library converts, once."""
    loader, options = LOADERS[files.format]
    if loader == "csv":
        # Each value of these settings has its own conversion in the cache.
        options = {**options, "na_values": config.text_column}
        if config.most_bad_samples:
            options["on_bad_lines"] = "skip"
    # The library takes names as patterns.
    escape = glob.escape if is_local(files.fs) else files.address
    data_files = {split: [escape(path) for path in paths] for split, paths in files.splits.items()}
    builder = datasets.load_dataset_builder(loader, data_files=data_files, **options)
    tables = Tables(config, options.get("sep", ","))
    if not Path(builder.cache_dir, "dataset_info.json").exists():
        if loader == "parquet":
            read_source(files.fs, files.paths)  # names a damaged one
        if loader == "csv":
            tables.read_types(files)
            builder.info.description = "\n".join(tables.left_out)
    if loader == "csv":
        builder._generate_tables = tables.of_files
    # By its ETag, a file that has changed in its store is fetched again.
    cache = str(Path(datasets.config.HF_DATASETS_CACHE) / "downloads")
    download = datasets.DownloadConfig(cache_dir=cache, use_etag=True)
    # Also of converted files: the builder may have looked before another process wrote them.
    builder.download_and_prepare(download_config=download)
    rows = builder.as_dataset()
    if loader == "csv" and builder.info.description:
        left_out = builder.info.description.splitlines()
        limit = config.most_bad_samples
        if limit < 1:
            limit *= sum(rows.num_rows.values()) + len(left_out)
        text = f"rows left out for their number of fields: {len(left_out):,}, {some_of(left_out)}"
        if len(left_out) > limit:
            raise DataError(f"{text}; fix them, or raise data.on_bad_sample={config.on_bad_sample}")
        log.warning("warning: %s", text)
    return rows


class Tables:
    """CSV files as Arrow tables. A column has the name in the header, and a type that fits all rows
    of all files: whole numbers, numbers, truth values, or the texts that stand there.

    This takes two readings, for the types and for the rows. pandas, with which the library reads
    tables, takes a first column without a name as an index, None as missing, and 00042 as 42.
    """

    def __init__(self, config: DataConfig, delimiter: str):
        self.text_column = config.text_column
        self.skips = config.most_bad_samples > 0
        self.delimiter = delimiter
        self.kinds: dict[str, set[str]] = defaultdict(set)  # of the values of a column
        self.left_out: list[str] = []  # rows with more or fewer fields than the header

    def read_types(self, files: Files) -> None:
        """Errors: DataError with the line of a row that does not fit."""
        for path in files.paths:
            address = files.address(path)
            with files.fs.open(path, "rb", compression="infer") as content:
                for batch in self._batches(content, address):
                    if self.kinds and self.kinds.keys() != batch.keys():
                        raise DataError(
                            f"{address} has the columns {', '.join(batch)}, and a file before it "
                            f"{', '.join(self.kinds)}; give all files the same ones"
                        )
                    for name, texts in batch.items():
                        self.kinds[name].update(map(kind_of, texts))

    def of_files(self, files_iterables: Any, **_: Any) -> Iterator[tuple[int, pa.Table]]:
        """Replaces the library's generator of pairs, whose first parts it does not use."""
        for path in (path for paths in files_iterables for path in paths):
            with fsspec.open(path, "rb") as content:
                for batch in islice(self._batches(content, ""), 1, None):
                    columns = {}
                    for name, kinds in self.kinds.items():
                        if name == self.text_column:
                            kinds = {"text"}
                        columns[name] = typed(batch[name], kinds)
                    yield 0, pa.table(columns)

    def _batches(self, content: Any, address: str) -> Iterator[dict[str, tuple[str, ...]]]:
        """{column: texts}, first of no row. address: "" if rows left out have been noted before."""
        names, rows = read_csv(content, address, self.delimiter)
        yield dict.fromkeys(names, ())
        batch = []
        for line, row in rows:
            if len(row) == len(names):
                batch.append(row)
            elif not self.skips:
                raise DataError(
                    f"{address}, line {line} has another number of fields ({len(row)}) than the "
                    f"header ({len(names)}), which is {self.delimiter.join(names):.80}; quote "
                    "fields that hold the separator; data.on_bad_sample=skip leaves such rows out"
                )
            elif address:
                self.left_out.append(f"{address}, line {line} (fields: {len(row)})")
            if len(batch) == ROWS_AT_ONCE:
                yield dict(zip(names, zip(*batch, strict=True), strict=True))
                batch = []
        if batch:
            yield dict(zip(names, zip(*batch, strict=True), strict=True))


def read_csv(
    content: Any, address: str, delimiter: str
) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Returns (the header's names, (line, fields) of each row). Errors: DataError."""
    csv.field_size_limit(sys.maxsize)
    lines = io.TextIOWrapper(content, encoding="utf-8-sig", newline="")
    reader = csv.reader(lines, delimiter=delimiter, strict=True)

    def filled() -> Iterator[tuple[int, list[str]]]:
        line = 1
        try:
            for row in reader:
                if row and not (len(row) == 1 and row[0].isspace()):
                    yield line, row
                line = reader.line_num + 1
        except csv.Error as error:
            raise DataError(f"{address}, line {line} can't be read as CSV: {error}") from None

    rows = filled()
    if (header := next(rows, None)) is None:
        raise DataError(f"{address} is empty; its first line must name the columns")
    names = [name or f"Unnamed: {number}" for number, name in enumerate(header[1])]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{address}, line {header[0]} names column {repeated[0]} twice; rename one")
    return names, rows


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


def typed(texts: tuple[str, ...], kinds: set[str]) -> pa.Array:
    """Values of the type that fits all kinds in their column."""
    known = kinds - {"", "missing"}
    if known == {"truth"}:
        truths = [None if text in MISSING else text.lower() == "true" for text in texts]
        return pa.array(truths, pa.bool_())
    if kinds == {"integer"}:
        return pa.array(map(int, texts), pa.int64())
    # An integer above 64 bits alone is a name, among numbers a number.
    if known == {"integer"} or ("number" in known and not known & {"text", "truth"}):
        numbers = [None if text in MISSING else float(text) for text in texts]
        return pa.array(numbers, pa.float64())
    return pa.array([text or None for text in texts], pa.large_string())


def broken_line(files: Files) -> str:
    """The first file with a line that is no UTF-8, or no JSON, in words; "" if there is none."""
    for path in files.paths:
        where = files.address(path)
        try:
            with files.fs.open(path, "rb", compression="infer") as lines:
                for number, line in enumerate(lines, 1):
                    where = f"line {number} of {files.address(path)}"
                    if line.decode().strip() and ".jsonl" in path:
                        json.loads(line)
        except UnicodeDecodeError:
            return f"{where} is not UTF-8; "
        except Exception as error:  # no JSON, or compressed and damaged, or gone
            return f"{where} is not what it should be ({first_line(error)}); "
    return ""


def image_rows(files: Files) -> Any:
    """A row per image, in the order of their names: image and, by folders of classes or a table,
    label. Texts in the only column, or label, are classes. Nothing is copied, nor read before it
    is needed.
    """
    images = [files.address(path) for path in files.paths]
    columns = columns_of_tables(files) if files.tables else folders_of(files)
    rows = datasets.Dataset.from_dict({"image": images, **columns})
    rows = rows.cast_column("image", datasets.Image())
    for name, values in columns.items():
        if (name == "label" or len(columns) == 1) and isinstance(values[0], str):
            rows = rows.cast_column(name, datasets.ClassLabel(names=sorted(set(values))))
    splits = datasets.DatasetDict()
    first = 0
    for split, inside in files.splits.items():
        splits[split] = rows.select(range(first, first + len(inside)))
        first += len(inside)
    return splits


def folders_of(files: Files) -> dict[str, list[Any]]:
    """{"label": the folder of each image}; nothing if they lie in one."""
    top = posixpath.commonpath([posixpath.dirname(path) for path in files.paths])
    below = int(len(files.splits) > 1)  # the folders train, test ... are no classes
    folders = [posixpath.relpath(path, top or ".").split("/")[below:-1] for path in files.paths]
    if not any(folders):
        return {}
    if [] in folders:
        stray = files.address(files.paths[folders.index([])])
        raise DataError(
            f"the image {stray} lies in no class's folder, as others do; move or remove it"
        )
    return {"label": ["/".join(folder) for folder in folders]}


def columns_of_tables(files: Files) -> dict[str, list[Any]]:
    """{column: its value for each image}, of the CSV tables beside images."""
    found: dict[str, dict[str, str]] = {}
    images = set(files.paths)
    for table in files.tables:
        address = files.address(table)
        log.info("data: labels are those of %s", address)
        with files.fs.open(table, "rb") as content:
            names, lines = read_csv(content, address, ",")
            names = [name.strip() for name in names]
            key = next((name for name in ("file_name", "file") if name in names), "")
            if not key or len(names) < 2 or "image" in names:
                raise DataError(
                    f"{address} has the columns {', '.join(names)}; it needs file or file_name, "
                    "then label, separated by commas, and none named image"
                )
            for line, texts in lines:
                row = dict(zip(names, map(str.strip, texts), strict=False))
                path = posixpath.normpath(posixpath.join(posixpath.dirname(table), row.pop(key)))
                problem = ""
                if len(texts) != len(names):
                    problem = f"has not the {len(names)} fields of the header"
                elif path not in images or path in found:
                    problem = f"names {path}, which is no image that is there, or has a row already"
                elif not row.get("label" if "label" in row else min(row)):
                    problem = f"has no label for {path}"
                if problem:
                    raise DataError(f"{address}, line {line} {problem}; correct or remove it")
                found[path] = row
    columns = [name for name in names if name != key]
    for path in files.paths:
        if {*found.get(path, ())} != {*columns}:
            raise DataError(
                f"the image {files.address(path)} has no row in {', '.join(files.tables)}, or a "
                "row of other columns; add one, or remove the image"
            )
    values = {}
    for name in columns:
        column = tuple(found[path][name] for path in files.paths)
        values[name] = typed(column, {*map(kind_of, column)}).to_pylist()
    return values


def not_loaded(source: str, error: Exception, fix: str) -> DataError:
    cause = error.__cause__ or error  # the library wraps the error in a general one
    text = " ".join(str(cause).split()) or type(cause).__name__
    if text == "StopIteration" or re.search("to no data|at least one example", text):
        text = "it has no rows"
    return DataError(f"{source} could not be loaded: {text:.400}; {fix}")


@contextmanager
def quiet_library(files: Files | None = None) -> Iterator[None]:
    """Inside, the library logs nothing; HF_HUB_OFFLINE concerns files on the hub alone."""
    logger = logging.getLogger("datasets")
    level = logger.level
    offline = datasets.config.HF_HUB_OFFLINE
    logger.setLevel(logging.CRITICAL)
    if files is not None and "hf" not in files.fs.protocol:
        datasets.config.HF_HUB_OFFLINE = False
    try:
        yield
    finally:
        logger.setLevel(level)
        datasets.config.HF_HUB_OFFLINE = offline
