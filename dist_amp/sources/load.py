"""The text that the `[data]` section names, from the hub or local files, through the `datasets` library."""

import glob
import logging
import math
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from dist_amp.errors import ConfigError, DataError
from dist_amp.runtime.rendezvous import in_time
from dist_amp.settings import DataConfig
from dist_amp.sources.parquet import open_parquet

log = logging.getLogger(__name__)
SPLITS = ("train", "validation", "test")
# Suffix of local files -> the loader of the `datasets` library that reads them.
FORMATS = {
    ".txt": "text",
    ".md": "text",
    ".py": "text",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".csv": "csv",
}


def load_split(config: DataConfig, split: str, *other_columns: str) -> Any:
    """The training or validation part of the `datasets.Dataset` that `data.name` or `data.path` names.

    It has the column `data.text_column`, or one of the others.
    Errors: DataError for files, names, splits and columns that do not exist.
    """
    import datasets
    import fsspec

    local = config.path != "off"
    files = _local_files(config.path) if local else []
    kind = FORMATS[Path(files[0]).suffix] if local else ""
    if local and by_row_group(config, kind, files):
        splits = _by_split(files)
        splits = splits if isinstance(splits, dict) else {"train": splits}
        local_files = fsspec.filesystem("file")
        views = {name: open_parquet(local_files, inside, config) for name, inside in splits.items()}
        return pick_split(views, config, split, *other_columns)
    if not local and not Path(config.name.partition(":")[0]).exists():
        stay_local_without_network()
    try:
        with _without_its_errors():
            if local:
                by_document = {"sample_by": "document"} if kind == "text" else {}
                everything = datasets.load_dataset(kind, data_files=_by_split(files), **by_document)
            else:
                name, _, configuration = config.name.partition(":")
                everything = datasets.load_dataset(name, configuration or None)
    except Exception as error:  # the library raises many types; each message names what it could not read
        cause = error.__cause__ or error  # the library wraps the error in a general one
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        source, fix = f"data.name={config.name}", "check the name and the network, or set data.path to local files"
        if local:
            broken = _first_broken(kind, files)
            source, fix = f"data.path={config.path}{': ' * bool(broken)}{broken}", "check the files"
        if "scripts are no longer supported" in lines[0]:  # nor by us: they would run a stranger's code
            fix = "convert it to Parquet elsewhere, with a release of datasets below 4, and set data.path to the files"
        raise DataError(f"{source} could not be loaded: {lines[0]}; {fix}") from error
    return pick_split(everything, config, split, *other_columns)


def by_row_group(config: DataConfig, kind: str, files: list[str]) -> bool:
    """Whether `data.view` asks for a `ParquetView`. Errors: ConfigError if it does, for files of another format."""
    if config.view == "parquet" and kind != "parquet":
        raise ConfigError(
            f"data.view=parquet reads Parquet files, and {files[0]} is of format {kind}; use data.view=auto, or "
            "convert the files to Parquet"
        )
    large = kind == "parquet" and sum(Path(file).stat().st_size for file in files) > config.map_up_to_gib * 2**30
    return config.view == "parquet" or (config.view == "auto" and large)


def warn(text: str) -> None:
    """Print a warning on rank 0: the other ranks' log shows errors alone."""
    if log.isEnabledFor(logging.WARNING):
        print(f"warning: {text}", file=sys.stderr, flush=True)


def stay_local_without_network() -> None:
    """Use only the cache if the hub does not answer within 5 s: its library would retry for half a minute."""
    import datasets
    from huggingface_hub import constants

    hub = urlsplit(constants.ENDPOINT)
    if datasets.config.HF_HUB_OFFLINE or "HF_HUB_OFFLINE" in os.environ or {"all", hub.scheme} & set(getproxies()):
        return
    address = (hub.hostname, hub.port or {"http": 80}.get(hub.scheme, 443))
    try:
        in_time(5, partial(socket.create_connection, address, 5)).close()
    except OSError:
        log.info("data: no network (%s does not answer), so only cached data is used: HF_HUB_OFFLINE=1", hub.hostname)
        os.environ["HF_HUB_OFFLINE"] = "1"  # for later imports and loader workers
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def _by_split(files: list[str]) -> dict[str, list[str]] | list[str]:
    """{split: files} if every file name begins with its split, as train.parquet does; else the files."""
    named = {split: [file for file in files if Path(file).stem.startswith(split)] for split in SPLITS}
    found = {split: inside for split, inside in named.items() if inside}
    return found if "train" in found and sum(map(len, found.values())) == len(files) else files


def _first_broken(kind: str, files: list[str]) -> str:
    """The first file that can't be read on its own; "" if there is none."""
    import datasets

    for file in files:
        try:
            with _without_its_errors():
                datasets.load_dataset(kind, data_files=[file])
        except Exception:
            return file
    return ""


@contextmanager
def _without_its_errors() -> Iterator[None]:
    """The `datasets` library logs what it raises as well; inside, it only raises."""
    logger = logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _local_files(path: str) -> list[str]:
    """The readable files that a file, folder or glob names, all of one format."""
    if Path(path).is_dir():
        found = sorted(str(file) for file in Path(path).rglob("*") if file.suffix in FORMATS)
    else:
        found = sorted(glob.glob(path, recursive=True))
    if not found:
        raise DataError(f"data.path={path} names no file; give a file, a folder or a glob")
    if not any(Path(file).stat().st_size for file in found):
        raise DataError(
            f"data.path={path} could not be loaded: its files, such as {found[0]}, are empty; give files with data"
        )
    kinds = {FORMATS.get(Path(file).suffix) for file in found}
    if None in kinds or len(kinds) > 1:
        raise DataError(f"data.path={path} must name files of one format; known endings are {' '.join(FORMATS)}")
    return found


def pick_split(everything: Any, config: DataConfig, split: str, *other_columns: str) -> Any:
    """The training or validation part of a `datasets.DatasetDict`; a fixed part is held out if there is no such split.

    None for the validation part of a single document.
    """
    for key, name in (("split", config.split), ("validation_split", config.validation_split)):
        if name not in everything and (key, name) != ("validation_split", "auto"):
            raise DataError(f"data.{key}={name} does not exist; the dataset has {', '.join(everything)}")
    rows = everything[config.split]
    held_out = config.validation_split
    if held_out == "auto":
        held_out = next((name for name in ("validation", "test") if name in everything and name != config.split), "")
    if held_out:
        chosen = rows if split == "train" else everything[held_out]
    elif len(rows) < 2:
        if split == "validation":
            log.info("data: a single document, so none is held out and there is no evaluation")
        chosen = rows if split == "train" else None
    else:
        if math.ceil(len(rows) * config.validation_fraction) >= len(rows):
            raise DataError(
                f"data.validation_fraction={config.validation_fraction} leaves none of {len(rows)} rows to train on; "
                "use a smaller one"
            )
        parts = rows.train_test_split(test_size=config.validation_fraction, seed=0)
        chosen = parts["train" if split == "train" else "test"]
    if chosen is not None and not {config.text_column, *other_columns} & set(chosen.column_names):
        columns = ", ".join(chosen.column_names)
        others = f", nor {' or '.join(other_columns)}" if other_columns else ""
        raise DataError(f"data.text_column={config.text_column} does not exist{others}; the columns are {columns}")
    return chosen
