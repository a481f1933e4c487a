"""Rows by the `datasets` library: memory-mapped in its cache, or images read where they are.

The library converts files once, in one process per machine. Two things are done here instead: CSV
tables are read by pyarrow, because pandas would read a text such as None as a missing value; and
images get their labels, from class folders or from a CSV table.
"""

import glob
import json
import logging
import posixpath
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.csv

from dist_amp.errors import DataError, first_line, some_of
from dist_amp.settings import DataConfig, SourceConfig
from dist_amp.sources.files import Files, is_local, stay_local_without_network
from dist_amp.sources.parquet import read_source

log = logging.getLogger(__name__)
# Format -> (the library's loader, its options).
LOADERS: dict[str, tuple[str, dict[str, str]]] = {
    "text": ("text", {"sample_by": "document"}),
    "json": ("json", {}),
    "csv": ("csv", {}),
    "tsv": ("csv", {"sep": "\t"}),
    "parquet": ("parquet", {}),
}
BLOCK_BYTES = 2**26  # parsed at a time of a CSV file; no row may be larger


def from_hub(config: SourceConfig) -> Any:
    """All splits of data.name, NAME[:CONFIGURATION][@REVISION], on the hub or cached."""
    source, _, revision = config.name.partition("@")
    stay_local_without_network()
    name, _, configuration = source.partition(":")
    try:
        with quiet_library():
            builder = datasets.load_dataset_builder(
                name, configuration or None, revision=revision or None
            )
            builder.download_and_prepare()
            splits = builder.as_dataset()
    except Exception as error:  # of many types; each message says what could not be read
        fix = "check the name, its revision and the network, or set data.path to local files"
        if datasets.config.HF_HUB_OFFLINE:
            fix = f"it is not cached, and the hub is unreachable or HF_HUB_OFFLINE is set: {fix}"
        raise not_loaded(f"data.name={config.name}", error, fix) from error
    # After any error of the hub, the library falls back to the newest commit in its cache.
    if type(builder).__module__.endswith(".cache"):
        log.info("data: %s comes from the cache, commit %s", name, builder.hash)
        if revision not in ("", "main", builder.hash):
            raise DataError(
                f"data.name={config.name}: revision {revision} could not be loaded, and the newest "
                f"in the cache is commit {builder.hash}; check the revision and the network, or "
                f"use @{builder.hash}"
            )
    return splits


def from_files(config: DataConfig, files: Files) -> Any:
    """All splits of the files. Raises DataError that names the file and, if known, the line."""
    fix = "check the files"
    try:
        with quiet_library(files):
            if files.format == "images":
                return image_rows(files)
            if files.format == "saved":
                saved = datasets.load_from_disk(files.address(files.root))
                return saved if isinstance(saved, dict) else datasets.DatasetDict(train=saved)
            return convert(config, files)
    except Exception as error:
        if files.format in ("text", "json"):
            fix = broken_line(files) + fix
        raise not_loaded(f"data.path={config.path}", error, fix) from error


def convert(config: DataConfig, files: Files) -> Any:
    loader, options = LOADERS[files.format]
    if loader == "csv":
        # `read_tables` ignores these options: they give each setting its own entry in the cache.
        options = {**options, "na_values": config.text_column}
        if config.most_bad_samples:
            options["on_bad_lines"] = "skip"
    # The library takes paths for glob patterns.
    escape = glob.escape if is_local(files.fs) else files.address
    data_files = {split: [escape(path) for path in paths] for split, paths in files.splits.items()}
    builder = datasets.load_dataset_builder(loader, data_files=data_files, **options)
    if loader == "csv":
        builder._generate_tables = partial(read_tables, config, options.get("sep", ","))
    elif loader == "parquet" and not Path(builder.cache_dir, "dataset_info.json").exists():
        read_source(files.fs, files.paths)  # for its error, which names a damaged file
    # use_etag: a remote file is downloaded again if its ETag has changed.
    cache = str(Path(datasets.config.HF_DATASETS_CACHE) / "downloads")
    download = datasets.DownloadConfig(cache_dir=cache, use_etag=True)
    # Even if the cache has the rows by now: the builder may have looked before they were written.
    builder.download_and_prepare(download_config=download)
    return builder.as_dataset()


def read_tables(
    config: DataConfig, delimiter: str, files_iterables: Any, **_: Any
) -> Iterator[tuple[int, pa.Table]]:
    """Replaces the library's generator: reads each CSV file by pyarrow, as one Arrow table.

    Rows with more or fewer fields than the header are an error, or skipped with a warning.
    """
    left_out: list[str] = []
    types: Any = {config.text_column: pa.large_string()}

    def on_invalid_row(row: Any) -> str:
        left_out.append(f"row {row.number} of {path} (fields: {row.actual_columns})")
        return "skip" if config.most_bad_samples else "error"

    for path in (path for paths in files_iterables for path in paths):
        try:
            with fsspec.open(path, "rb") as content:
                table = pa.csv.read_csv(
                    content,
                    # With several threads, invalid rows have no numbers.
                    pa.csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
                    pa.csv.ParseOptions(
                        delimiter=delimiter,
                        newlines_in_values=True,
                        invalid_row_handler=on_invalid_row,
                    ),
                    pa.csv.ConvertOptions(column_types=types),
                )
        except pa.ArrowException as error:
            raise DataError(
                f"{path} can't be read as a table: {first_line(error)}; correct it "
                "(data.on_bad_sample=skip skips rows with another number of fields)"
            ) from error
        types = table.schema  # the following files get the first one's types
        yield 0, table
    if left_out:
        log.warning(
            f"warning: rows skipped because of their number of fields: {len(left_out):,}, "
            f"{some_of(left_out)}"
        )


def broken_line(files: Files) -> str:
    """Error text on the first line that is not UTF-8, or in JSONL not JSON; "" if there is none."""
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
        except Exception as error:  # not JSON, damaged compression, or a missing file
            return f"{where} can't be read ({first_line(error)}); "
    return ""


def image_rows(files: Files) -> Any:
    """A row per image, sorted by path, with the columns image and, if class folders or a CSV table
    give it, label. Images are not copied, and are read only when they are needed.
    """
    columns = {"image": [files.address(path) for path in files.paths]}
    labels = labels_of_tables(files) if files.tables else labels_of_folders(files)
    if labels:
        columns["label"] = labels
    rows = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    if labels and isinstance(labels[0], str):
        rows = rows.cast_column("label", datasets.ClassLabel(names=sorted(set(labels))))
    splits = datasets.DatasetDict()
    first = 0
    for split, inside in files.splits.items():
        splits[split] = rows.select(range(first, first + len(inside)))
        first += len(inside)
    return splits


def labels_of_folders(files: Files) -> list[Any]:
    """The class folder of each image; an empty list if no image has one."""
    top = posixpath.commonpath([posixpath.dirname(path) for path in files.paths])
    skipped = int(len(files.splits) > 1)  # folders such as train and test are not classes
    folders = [posixpath.relpath(path, top or ".").split("/")[skipped:-1] for path in files.paths]
    if not any(folders):
        return []
    if [] in folders:
        stray = files.address(files.paths[folders.index([])])
        raise DataError(
            f"the image {stray} is not in a class folder, but others are; move or remove it"
        )
    return ["/".join(folder) for folder in folders]


def labels_of_tables(files: Files) -> list[Any]:
    labels: dict[str, Any] = {}
    images = set(files.paths)
    for table in files.tables:
        address = files.address(table)
        log.info("data: labels are read from %s", address)
        with files.fs.open(table, "rb") as content:
            rows = pa.csv.read_csv(content)
        names = rows.column_names
        key = "file" if "file" in names else "file_name"
        if not {key, "label"} <= {*names}:
            raise DataError(
                f"{address} has the columns {', '.join(names)}; it needs file or file_name, and "
                "label, separated by commas"
            )
        for row in rows.to_pylist():
            path = posixpath.normpath(posixpath.join(posixpath.dirname(table), row[key]))
            if path not in images or path in labels or row["label"] in ("", None):
                raise DataError(
                    f"{address}: {row[key]} must be an existing image, in one row, with a label; "
                    "correct it"
                )
            labels[path] = row["label"]
    if missing := sorted(images - labels.keys()):
        raise DataError(
            f"the image {files.address(missing[0])} has no row in {', '.join(files.tables)}; add "
            "one, or remove the image"
        )
    return [labels[path] for path in files.paths]


def not_loaded(source: str, error: Exception, fix: str) -> DataError:
    cause = error.__cause__ or error  # the library wraps errors in a general one
    text = " ".join(str(cause).split()) or type(cause).__name__
    if text == "StopIteration" or re.search("to no data|at least one example|BatchSize", text):
        text = "it has no rows"
    return DataError(f"{source} could not be loaded: {text:.400}; {fix}")


@contextmanager
def quiet_library(files: Files | None = None) -> Iterator[None]:
    """Silence the library's log, and apply HF_HUB_OFFLINE only to files on the hub."""
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
