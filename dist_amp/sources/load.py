"""The rows that the `[data]` section names, from the hub or from files."""

import logging
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from dist_amp.config.values import as_typed
from dist_amp.errors import ConfigError, DataError, in_one_line
from dist_amp.loading.loader import read
from dist_amp.settings import DataConfig, SourceConfig
from dist_amp.sources.files import find_files, stay_local_without_network
from dist_amp.sources.mixture import tables_of

log = logging.getLogger(__name__)
MAP_UP_TO_BYTES = 4 * 2**30  # with view=auto, larger Parquet data is not converted: disk space
HELD_OUT = 0.05  # share of the rows, with data.validation_split=auto, last or shuffled
HOLD_OUT = re.compile(r"(auto|last|shuffled)(?::(0?\.\d*[1-9]\d*))?")  # method[:share]


class Converted:
    """A map-style dataset of rows, each of which is passed to `convert` when it is read."""

    def __init__(self, rows: Any, convert: Callable[[dict[str, Any]], Any]):
        self.rows = rows
        self.convert = convert
        for name in ("shuffled", "fingerprint"):  # which a Parquet view has
            if hasattr(rows, name):
                setattr(self, name, getattr(rows, name))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        try:
            rows = read(self.rows, indices)
        except OSError as error:
            if len(indices) == 1 and (file := image_file(self.rows, indices[0])):
                raise DataError(f"{file}: {in_one_line(error)}; fix or remove it") from error
            raise
        return [self.convert(row) for row in rows]


def image_file(rows: Any, index: int) -> str:
    """The path of a row's image, for an error message; "" if it has none."""
    for name, feature in (getattr(rows, "features", None) or {}).items():
        if type(feature).__name__ == "Image":
            return rows.cast_column(name, type(feature)(decode=False))[index][name]["path"] or ""
    return ""


def load_split(config: DataConfig, split: str, *other_columns: str) -> Any:
    """`load_rows`, for a task that can't read mixtures: ConfigError if data.sources is set."""
    if tables := tables_of(config):
        raise ConfigError(
            f"data.sources.{next(iter(tables))}: this task reads one source; use data.path or "
            "data.name"
        )
    return load_rows(config, split, *other_columns)


def load_rows(config: DataConfig, split: str, *other_columns: str) -> Any:
    """The rows of data.name or data.path for `split`, "train" or "validation". They must have the
    column data.text_column or one of the others. None for validation if nothing can be held out.
    """
    if config.path != "off" and config.name != "auto":
        raise ConfigError(
            f"data.name={config.name} and data.path={config.path} are two sources; remove one of "
            "them"
        )
    if config.path.startswith("hf://"):
        stay_local_without_network()
    files = None if config.path == "off" else find_files(config)
    if config.view == "parquet" and (files is None or files.format != "parquet"):
        raise ConfigError(
            "data.view=parquet needs Parquet files, and data.path names none; set it, for example "
            "to hf://datasets/user/name/**/*.parquet, or use data.view=map"
        )
    if files is None:
        from dist_amp.sources.converted import from_hub

        return pick_split(from_hub(config), config, split, *other_columns)
    if files.format == "tokens":
        raise DataError(
            f"data.path={config.path} holds tokens, which only a task that trains on tokens reads, "
            "from a local folder; set data.path to files with rows"
        )
    is_large = config.view == "auto" and files.bytes > MAP_UP_TO_BYTES
    if files.format == "parquet" and (is_large or config.view == "parquet"):
        from dist_amp.sources.parquet import open_parquet

        views = {
            name: partial(open_parquet, files.fs, paths, config)
            for name, paths in files.splits.items()
        }
        return pick_split(views, config, split, *other_columns)
    from dist_amp.sources.converted import from_files

    return pick_split(from_files(config, files), config, split, *other_columns)


def pick_split(splits: Any, config: SourceConfig, split: str, *other_columns: str) -> Any:
    """The rows of `split`, see `load_rows`. splits: {name: rows, or a function that opens them}."""
    name = config.split
    held_out = config.validation_split  # a share, a split's name, or a method: HOLD_OUT
    method = ""
    if held_out not in splits and (match := HOLD_OUT.fullmatch(str(held_out))):
        method, share = match.groups()
        held_out = float(share or HELD_OUT)
        existing = [other for other in ("validation", "test") if other in splits and other != name]
        if existing and method != "last" and not share:  # prefer the dataset's own split
            held_out = existing[0]
    for key, value in (("split", name), ("validation_split", held_out)):
        if isinstance(value, str) and value not in splits:
            kind = DataError if isinstance(as_typed(value), str) else ConfigError
            raise kind(
                f"data.{key}={value} does not exist; the dataset has {', '.join(splits)}; "
                "validation_split may also be a share above 0 and below 1, such as 0.1 or last:0.1"
            )
    if split == "validation" and isinstance(held_out, str):
        name = held_out
    rows = splits[name]
    if callable(rows):
        rows = rows()
    if isinstance(held_out, float):
        rows = held_out_part(rows, split, held_out, method)
    if rows is None:
        return None
    if not {config.text_column, *other_columns} & set(rows.column_names):
        columns = " or ".join((f"data.text_column={config.text_column}", *other_columns))
        raise DataError(f"{columns} does not exist; the columns are {', '.join(rows.column_names)}")
    return rows


def held_out_part(rows: Any, split: str, share: float, method: str = "") -> Any:
    """The rows for `split`, after a share of them is held out for validation.
    method: "last" holds out the last rows; "auto" or "" random ones; "shuffled" too, but puts the
    training rows in random order, as earlier versions did. None for validation if there is a single
    row, or with auto a single row group. Raises DataError if no row is left to train on.
    """
    in_groups = hasattr(rows, "row_groups")  # a Parquet view holds out whole row groups
    parts = rows.row_groups if in_groups else len(rows)
    if len(rows) < 2 or (parts < 2 and method == "auto"):
        if split == "train":
            return rows
        log.info("data: a single row or row group: nothing is held out, so there is no evaluation")
        return None
    count = math.ceil(parts * share)
    if count >= parts:
        raise DataError(
            f"data.validation_split={share} leaves none of {parts} "
            f"{'row groups' if in_groups else 'rows'} to train on; use a smaller share, smaller "
            "row groups, or data.view=map"
        )
    if method == "last":
        order = np.roll(np.arange(parts), count)
    elif in_groups:
        order = torch.randperm(parts, generator=torch.Generator().manual_seed(0)).numpy()
    else:
        order = np.random.default_rng(0).permutation(parts)  # as train_test_split(seed=0) draws
    # Held-out rows stay in random order: a short evaluation then covers all parts of the file.
    chosen = order[:count]
    if split == "train":
        chosen = order[count:]
        if in_groups or method != "shuffled":
            chosen.sort()
    return rows.select_groups(chosen) if in_groups else rows.select(chosen)


def class_names(rows: Any, label_column: str) -> Sequence[str]:
    """Names of the classes 0, 1, ...: a ClassLabel's, or the column's texts, sorted; else ()."""
    if isinstance(rows, list):
        return "0123456789"
    feature = (rows.features or {}).get(label_column)  # a Parquet view may have no features
    kind = getattr(feature, "dtype", "")
    if kind in ("string", "large_string"):
        if not hasattr(rows, "unique"):
            raise DataError(
                f"the column {label_column} holds texts, which data.view=parquet does not number; "
                "use data.view=map, or store whole numbers and set task.args.classes"
            )
        return sorted(set(rows.unique(label_column)) - {None})
    if kind == "bool":
        return ("false", "true")
    return getattr(feature, "names", ())
