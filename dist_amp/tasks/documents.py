"""Text through the `datasets` library, as the `[data]` section names it: from the hub, or from local files."""

import glob
import logging
import math
import os
import socket
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from dist_amp.errors import DataError
from dist_amp.runtime.rendezvous import in_time
from dist_amp.settings import DataConfig

log = logging.getLogger(__name__)
SPLITS = ("train", "validation", "test")
# Local files by their ending -> the loader of the `datasets` library that reads them.
FORMATS = {
    ".txt": "text",
    ".md": "text",
    ".py": "text",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".csv": "csv",
}


def load_split(config: DataConfig, split: str) -> Any:
    """The `datasets.Dataset` that `data.name` or `data.path` names, its training or validation part.

    Errors: DataError for files, names, splits and columns that are not there.
    """
    import datasets

    if config.path == "off" and not Path(config.name.partition(":")[0]).exists():
        stay_local_without_network()
    try:
        if config.path != "off":
            files = _local_files(config.path)
            kind = FORMATS[Path(files[0]).suffix]
            by_document = {"sample_by": "document"} if kind == "text" else {}
            everything = datasets.load_dataset(kind, data_files=_by_split(files), **by_document)
        else:
            name, _, configuration = config.name.partition(":")
            everything = datasets.load_dataset(name, configuration or None)
    except DataError:
        raise
    except Exception as error:  # the library's errors are many; each names what it could not read
        source = f"data.path={config.path}" if config.path != "off" else f"data.name={config.name}"
        cause = error.__cause__ or error  # the library wraps what went wrong in a general error
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        if config.path != "off" and (broken := _first_broken(kind, files)):
            source += f": {broken}"
        mend = (
            "check the files"
            if config.path != "off"
            else "check the name and the network, or set data.path to local files"
        )
        if "scripts are no longer supported" in lines[0]:  # here neither: it would be a stranger's code
            mend = "convert it to Parquet elsewhere, with a release of datasets below 4, and set data.path to the files"
        raise DataError(f"{source} could not be loaded: {lines[0]}; {mend}") from error
    return pick_split(everything, config, split)


def stay_local_without_network() -> None:
    """Where the hub does not answer within 5 s, look in the cache alone: its library would retry for half a minute."""
    import datasets
    from huggingface_hub import constants

    hub = urlsplit(constants.ENDPOINT)
    if datasets.config.HF_HUB_OFFLINE or "HF_HUB_OFFLINE" in os.environ or {"all", hub.scheme} & set(getproxies()):
        return
    address = (hub.hostname, hub.port or {"http": 80}.get(hub.scheme, 443))
    try:
        in_time(5, partial(socket.create_connection, address, 5)).close()
    except OSError:
        log.info("data: no network (%s does not answer), so only what is cached: HF_HUB_OFFLINE=1", hub.hostname)
        os.environ["HF_HUB_OFFLINE"] = "1"  # for what is imported later, and for loader workers
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def _by_split(files: list[str]) -> dict[str, list[str]] | list[str]:
    """{split: files} where every file's name begins with its split's, as in train.parquet and validation.parquet."""
    named = {split: [file for file in files if Path(file).stem.startswith(split)] for split in SPLITS}
    found = {split: inside for split, inside in named.items() if inside}
    return found if "train" in found and sum(map(len, found.values())) == len(files) else files


def _first_broken(kind: str, files: list[str]) -> str:
    """The first file that can't be read by itself."""
    import datasets

    for file in files:
        try:
            datasets.load_dataset(kind, data_files=[file])
        except Exception:
            return file
    return ""


def _local_files(path: str) -> list[str]:
    """The readable files that a file, folder or glob names; all of one format."""
    if Path(path).is_dir():
        found = sorted(str(file) for file in Path(path).rglob("*") if file.suffix in FORMATS)
    else:
        found = sorted(glob.glob(path, recursive=True))
    if not found:
        raise DataError(f"data.path={path} names no file; give a file, a folder or a glob")
    if not any(Path(file).stat().st_size for file in found):
        raise DataError(
            f"data.path={path} could not be loaded: {found[0]} is empty, as all of it; give files with data"
        )
    kinds = {FORMATS.get(Path(file).suffix) for file in found}
    if None in kinds or len(kinds) > 1:
        raise DataError(f"data.path={path} must name files of one format; known endings are {' '.join(FORMATS)}")
    return found


def pick_split(everything: Any, config: DataConfig, split: str) -> Any:
    """The training or validation part of a `datasets.DatasetDict`; held out by a fixed seed where none is given."""
    if config.split not in everything:
        raise DataError(f"data.split={config.split} is not there; the dataset has {', '.join(everything)}")
    if config.validation_split not in ("auto", *everything):
        raise DataError(
            f"data.validation_split={config.validation_split} is not there; the dataset has {', '.join(everything)}"
        )
    held_out = config.validation_split
    if held_out == "auto":
        held_out = next((name for name in ("validation", "test") if name in everything and name != config.split), "")
    if held_out:
        chosen = everything[config.split if split == "train" else held_out]
    elif len(everything[config.split]) < 2:
        if split == "validation":
            log.info("data: a single document, so that none is held out: there is no evaluation")
        chosen = everything[config.split] if split == "train" else None
    else:
        length = len(everything[config.split])
        if math.ceil(length * config.validation_fraction) >= length:
            raise DataError(
                f"data.validation_fraction={config.validation_fraction} leaves none of {length} rows to train on; "
                "use a smaller one"
            )
        parts = everything[config.split].train_test_split(test_size=config.validation_fraction, seed=0)
        chosen = parts["train" if split == "train" else "test"]
    if chosen is not None and config.text_column not in chosen.column_names:
        raise DataError(
            f"data.text_column={config.text_column} is not there; the columns are {', '.join(chosen.column_names)}"
        )
    return chosen
