"""The rows that the `[data]` section names, from the hub or from files, through the `datasets` library."""

import logging
import math
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from dist_amp.errors import ConfigError, DataError
from dist_amp.runtime.rendezvous import in_time
from dist_amp.settings import DataConfig, SourceConfig
from dist_amp.sources.converted import from_files, not_loaded, without_its_errors
from dist_amp.sources.files import Files, find_files
from dist_amp.sources.mixture import tables_of
from dist_amp.sources.parquet import ParquetView, open_parquet

log = logging.getLogger(__name__)
TOKEN_SETTINGS = ("tokenizer", "pack", "long_documents")


def load_split(config: DataConfig, split: str, *other_columns: str) -> Any:
    """`load_rows` for a task that reads rows of one source.

    Errors: as there; ConfigError for settings of tokens and mixtures, which would have no effect.
    """
    for name in TOKEN_SETTINGS:
        if (value := getattr(config, name)) != "auto":
            raise ConfigError(f"data.{name}={value} is for tasks that read tokens, and this one reads rows; remove it")
    if tables := tables_of(config):
        raise ConfigError(f"data.sources.{next(iter(tables))}: this task reads one source; use data.path or data.name")
    return load_rows(config, split, *other_columns)


def load_rows(config: DataConfig, split: str, *other_columns: str) -> Any:
    """The training or validation part of the rows that `data.name` or `data.path` names.

    A `datasets.Dataset`; with data.view=parquet, or for large Parquet files, a `ParquetView`. It has the column
    `data.text_column`, or one of the others; None for the validation part of a single row.
    Errors: DataError for files, names, splits and columns that do not exist, or can't be read; ConfigError for an
    address or a format that does not fit.
    """
    if config.path != "off" and config.name != "auto":
        raise ConfigError(f"data.name={config.name} and data.path={config.path} are two sources; remove one of them")
    if config.path == "off":
        if config.view == "parquet":
            raise ConfigError(
                f"data.view=parquet reads files, and data.name={config.name} is converted as a whole; name its files "
                f"in place of it: data.path=hf://datasets/{config.name.partition(':')[0]}/**/*.parquet"
            )
        everything = _from_hub(config)
    else:
        if config.path.startswith("hf://"):
            stay_local_without_network()
        files = find_files(config)
        if files.format == "tokens":
            raise DataError(
                f"data.path={config.path} holds tokens, and the task reads {' or '.join(('text', *other_columns))}; "
                "use a task that takes tokens, with the folder on this machine, or set data.path to the files of rows"
            )
        everything = _by_row_group(config, files) or from_files(config, files)
    return pick_split(everything, config, split, *other_columns)


def _by_row_group(config: DataConfig, files: Files) -> dict[str, Callable[[], ParquetView]]:
    """What opens each split as a view of its Parquet files; empty if the files are to be converted."""
    if config.view == "parquet" and files.format != "parquet":
        raise ConfigError(
            f"data.view=parquet, and data.path={config.path} has the format {files.format}; write Parquet files, or "
            "use data.view=map"
        )
    large = config.view == "auto" and files.bytes > config.map_up_to_gib * 2**30
    if files.format != "parquet" or not (large or config.view == "parquet"):
        return {}
    return {split: partial(open_parquet, files.fs, paths, config) for split, paths in files.splits.items()}


def hide_progress_bars() -> None:
    """No bars of the `datasets` library in this process, unless the user has set its environment variable."""
    if os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1") == "1" and "datasets" in sys.modules:
        sys.modules["datasets"].disable_progress_bars()


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


def _from_hub(config: SourceConfig) -> Any:
    """All splits of a dataset on the hub, or in the cache of the `datasets` library; or of a folder in its layout."""
    import datasets

    is_local = Path(config.name.partition(":")[0]).exists()
    if not is_local:
        stay_local_without_network()
    name, _, configuration = config.name.partition(":")
    revision = {} if is_local else {"revision": config.revision}
    try:
        with without_its_errors():
            builder = datasets.load_dataset_builder(name, configuration or None, **revision)
            builder.download_and_prepare()
            everything = builder.as_dataset()
    except Exception as error:  # the library raises many types; each message names what it could not read
        fix = "check the name, data.revision and the network, or set data.path to local files"
        if datasets.config.HF_HUB_OFFLINE:
            fix = (
                "it is not in the cache of this machine, and the hub is not reached or HF_HUB_OFFLINE is set: load it "
                "once with a network, set HF_HOME to a cache that has it, or set data.path to local files"
            )
        raise not_loaded(f"data.name={config.name}", error, fix) from error
    if type(builder).__module__.endswith(".cache"):  # also after any error of the hub, whatever revision it has
        log.info("data: %s comes from the cache, commit %s", name, builder.hash)
        if config.revision != "main" and builder.hash not in (config.revision, _cached_commit(name, config.revision)):
            raise DataError(
                f"data.revision={config.revision} could not be loaded, and the newest in the cache is commit "
                f"{builder.hash}; check the revision and the network, or set data.revision={builder.hash}"
            )
    return everything


def _cached_commit(name: str, revision: str) -> str:
    """The commit that the hub's cache has for a branch or tag; "" for none."""
    from huggingface_hub import constants

    ref = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}" / "refs" / revision
    return ref.read_text().strip() if ref.is_file() else ""


def pick_split(everything: Any, config: SourceConfig, split: str, *other_columns: str) -> Any:
    """The training or validation part of a `datasets.DatasetDict`; a fixed part is held out if there is no such split.

    None for the validation part of a single document.
    """
    name, held_out = split_names(list(everything), config)
    rows = everything[held_out if held_out and split == "validation" else name]
    rows = rows() if callable(rows) else rows  # what opens it: the other split's files are left alone
    if held_out:
        chosen = rows
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
    if chosen is not None:
        check_columns(chosen.column_names, config, *other_columns)
    return chosen


def split_names(names: list[str], config: SourceConfig) -> tuple[str, str]:
    """(the split to train on, the one to evaluate on, or "": a part of the first); errors for those not in `names`."""
    for key, name in (("split", config.split), ("validation_split", config.validation_split)):
        if name not in names and (key, name) != ("validation_split", "auto"):
            raise DataError(f"data.{key}={name} does not exist; the dataset has {', '.join(names)}")
    if config.validation_split != "auto":
        return config.split, config.validation_split
    return config.split, next((name for name in ("validation", "test") if name in names and name != config.split), "")


def check_columns(columns: list[str], config: SourceConfig, *other_columns: str) -> None:
    """Errors: DataError if neither data.text_column nor one of the others is there."""
    if not {config.text_column, *other_columns} & set(columns):
        others = f", nor {' or '.join(other_columns)}" if other_columns else ""
        raise DataError(
            f"data.text_column={config.text_column} does not exist{others}; the columns are {', '.join(columns)}"
        )
