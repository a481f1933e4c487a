"""The files that `data.path` names, on this machine or at an address that fsspec can open.

Reads at an address are retried after errors that may be temporary.
"""

import glob
import logging
import os
import posixpath
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from fsspec.spec import AbstractBufferedFile

from dist_amp.errors import MASK, ConfigError, DataError, first_line, some_of
from dist_amp.settings import SourceConfig

log = logging.getLogger(__name__)

# A file's ending -> its format.
FORMATS = {
    **dict.fromkeys((".txt", ".md", ".rst", ".tex", ".html"), "text"),
    **dict.fromkeys(
        (".py", ".c", ".h", ".cpp", ".cu", ".java", ".js", ".ts", ".go", ".rs"), "text"
    ),
    **dict.fromkeys((".json", ".jsonl"), "json"),
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    **dict.fromkeys((".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp"), "images"),
}
COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
# A file that identifies a folder written by save_to_disk or dist_amp.tokenize -> the format.
MARKS = {
    **dict.fromkeys(("dataset_dict.json", "dataset_info.json", "state.json"), "saved"),
    "tokens.json": "tokens",
}
# A split's name as a whole word of a file's name, as in wiki.train.txt or en_test-00.jsonl.
SPLIT_NAME = re.compile(r"(?:^|(?<=[._-]))(train|test|valid|val|dev)(?:ing|ation)?(?=[._\-\d]|$)")
LABEL_TABLES = {"labels.csv", "metadata.csv"}  # with the labels of images next to them
# Files that come with a dataset but are not data; used only if there are no other files.
COMPANION = re.compile(
    r"(licen[cs]e|readme|notice|copying|citation|changelog|requirements|vocab|merges|config|"
    r"tokenizer|tokenizer_config|special_tokens_map|dataset_infos|metadata)\."
)
HIDDEN = re.compile(r"(^|/)\.[^/]")
OUTAGE_SECONDS = 120.0  # time for retries; less than the default run.timeout_seconds
FIRST_PAUSE = 0.5  # seconds between retries, doubled after each
LONGEST_PAUSE = 8.0
# Errors that a retry does not change.
PERMANENT = (PermissionError, AttributeError, ImportError, LookupError, TypeError, ValueError)
Sizes = dict[str, int | None]  # {path: bytes}; None if a server does not report it


@dataclass(frozen=True)
class Files:
    fs: Any  # an fsspec file system
    root: str  # the path in `fs` that `data.path` names
    format: str
    splits: dict[str, list[str]]  # sorted paths; empty for the formats saved and tokens
    bytes: int  # in total, without files of unknown size
    rest: str = ""  # of a chained address: ::s3://b/all.zip in zip://*.csv::s3://b/all.zip
    tables: tuple[str, ...] = ()  # CSV files with labels, beside images

    @property
    def paths(self) -> list[str]:
        return [path for inside in self.splits.values() for path in inside]

    def address(self, path: str) -> str:
        return address_of(self.fs, path) + self.rest


def find_files(config: SourceConfig) -> Files:
    fs, root = file_system(config.path)
    rest = "".join(config.path.partition("::")[1:])
    try:
        is_folder, sizes = with_retries(fs, root, partial(list_files, fs, root))
    except FileNotFoundError as error:
        raise unreachable(fs, root, error) from error
    if not sizes:
        raise DataError(
            f"data.path={config.path} names no file that may be read; give a file, a folder or a "
            "glob, or check the bucket's name"
        )
    found_marks = [mark for name, mark in MARKS.items() if posixpath.join(root, name) in sizes]
    if is_folder and found_marks:
        return Files(fs, root, found_marks[0], {}, 0, rest)
    names = {path: posixpath.basename(path).lower() for path in sizes}
    tables = []
    if any(format_of(path) == "images" for path in sizes):
        tables = sorted(path for path in sizes if names[path] in LABEL_TABLES)
    paths = sorted(sizes.keys() - {*tables})
    if data := [path for path in paths if not COMPANION.match(names[path])]:
        if left_out := sorted({*paths} - {*data}):
            log.info("data: ignored files that accompany the data: %s", some_of(left_out))
        paths = data
    if is_folder:
        paths = [path for path in paths if format_of(path)]
    formats = {format_of(path) for path in paths}
    if len(formats) != 1 or "" in formats:
        raise DataError(
            f"data.path={config.path} must name files of one format; known endings are "
            f"{' '.join(FORMATS)}, also followed by {' '.join(sorted(COMPRESSED))}: give a glob "
            "such as *.jsonl, or rename the files, or make links to them with such an ending"
        )
    format_ = formats.pop()
    if is_local(fs) and format_ != "images":  # a folder that a link leads to as well is read once
        parts = {path: posixpath.split(path) for path in paths[::-1]}
        real = {folder: os.path.realpath(folder) for folder in {f for f, _ in parts.values()}}
        paths = sorted({(real[f], name): path for path, (f, name) in parts.items()}.values())
    size = sum(sizes[path] or 0 for path in paths)
    return Files(fs, root, format_, split_by_name(paths, format_), size, rest, tuple(tables))


def file_system(path: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    if f"//{MASK}@" in path or f"={MASK}" in path:
        raise ConfigError(
            f"data.path={path} is masked, because a run never writes passwords; give it on the "
            "command line, or as DIST_AMP_DATA__PATH"
        )
    try:
        return url_to_fs(path)
    except Exception as error:  # an unknown protocol, or one whose package is missing
        raise ConfigError(
            f"data.path={path} is not an address that can be opened: {first_line(error)}; use a "
            "local path, or install the package of an fsspec protocol, such as s3:// or hf://"
        ) from error


def list_files(fs: Any, root: str) -> tuple[bool, Sizes]:
    """Returns (whether `root` is a folder, the sizes of its files, without hidden ones)."""
    info = {}  # stays empty for a glob; a file's name may contain [ or *, too
    with suppress(FileNotFoundError):
        info = fs.info(root)  # unlike isfile, it does not hide errors
    if info.get("type") == "file":
        return False, {root: info.get("size")}
    is_folder = info.get("type") == "directory"
    sizes: Sizes = {}
    if is_folder and is_local(fs):  # glob follows links to folders, which fsspec leaves out
        for path in glob.iglob(glob.escape(root) + "/**", recursive=True):
            if os.path.isfile(path) or not os.path.exists(path):  # no pipe: reading it would block
                sizes[path] = os.path.getsize(path)  # an error for a link to nothing
    else:
        search = fs.find if is_folder else fs.glob
        for path, entry in search(root, detail=True).items():
            if entry["type"] == "file" or (entry.get("islink") and fs.isfile(path)):
                sizes[path] = entry.get("size")
    visible = {}
    for path, size in sizes.items():
        name = path[len(root) :] if is_folder else posixpath.basename(path)
        if not HIDDEN.search(name):
            visible[path] = size
    return is_folder, visible


def format_of(path: str) -> str:
    name = PurePosixPath(path)
    if name.suffix.lower() in COMPRESSED:
        name = name.with_suffix("")
    return FORMATS.get(name.suffix.lower(), "")


def split_by_name(paths: list[str], format_: str) -> dict[str, list[str]]:
    """{split: paths} if paths name splits (train/0.csv, en_train.csv); else {"train": paths}."""
    top = posixpath.commonpath([posixpath.dirname(path) for path in paths])
    splits: dict[str, list[str]] = {}
    for path in paths:
        splits.setdefault(split_of(posixpath.relpath(path, top or "."), format_), []).append(path)
    if len(splits) == 1 or {*splits} == {"train", ""}:
        return {"train": paths}
    if "" in splits or "train" not in splits:
        files = ", ".join(min(inside) for inside in splits.values())
        raise DataError(
            f"{files}: if some file names contain a split, all must, one of them train, so that "
            "no held-out file is trained on; rename the files, or select them in data.path"
        )
    return splits


def split_of(path: str, format_: str) -> str:
    """The split that a relative path names by its first folder or its file name; or ""."""
    folder, slash, _ = path.lower().partition("/")
    match = SPLIT_NAME.fullmatch(folder) if slash else None
    # The names of images and of source files, such as test_io.py, do not name a split.
    if format_ != "images" and not path.endswith((".py", ".md")):
        match = match or SPLIT_NAME.search(posixpath.basename(path).lower())
    if match is None:
        return ""
    return "validation" if match[1] in ("valid", "val", "dev") else match[1]


def stay_local_without_network() -> None:
    """Use only cached data if the hub does not answer in 5 s: its library would retry for 30 s."""
    import datasets
    from huggingface_hub import constants

    hub = urlsplit(constants.ENDPOINT)
    is_configured = "HF_HUB_OFFLINE" in os.environ or {"all", hub.scheme} & set(getproxies())
    if datasets.config.HF_HUB_OFFLINE or is_configured:
        return  # the environment says whether the hub is used, or through which proxy
    address = (hub.hostname or "", hub.port or {"http": 80}.get(hub.scheme, 443))
    with suppress(OSError), socket.create_connection(address, timeout=5):
        return
    log.info(
        "data: no network (%s does not answer), so only cached data is used: HF_HUB_OFFLINE=1",
        hub.hostname,
    )
    os.environ["HF_HUB_OFFLINE"] = "1"  # for later imports and loader workers
    constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = True


def fetch(fs: Any, path: str, start: int, end: int) -> Any:
    """Bytes [start, end) of a file; retried if fewer arrive. Raises as `with_retries`."""

    def read_range() -> bytes:
        # By keyword: a file system may have parameters before these, such as S3's version_id.
        content: bytes = fs.cat_file(path, start=start, end=end)
        if len(content) != end - start:
            raise OSError(f"received {len(content)} bytes instead of {end - start}")
        return content

    return with_retries(fs, path, read_range)


def with_retries(fs: Any, path: str, call: Callable[[], Any]) -> Any:
    """Call it, again while its error may be temporary. Raises DataError, FileNotFoundError."""
    start = time.monotonic()
    pause = FIRST_PAUSE
    while True:
        try:
            return call()
        except FileNotFoundError:
            raise
        except Exception as error:  # each file system has errors of its own
            left = OUTAGE_SECONDS - (time.monotonic() - start)
            is_permanent = isinstance(error, PERMANENT) or "Credential" in type(error).__name__
            if is_permanent or is_local(fs) or left < pause:
                raise unreachable(fs, path, error) from error
            log.warning(
                "warning: %s can't be reached: %s; trying again for %.0f s",
                address_of(fs, path),
                first_line(error) or type(error).__name__,
                left,
            )
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def is_local(fs: Any) -> bool:
    return "file" in fs.protocol


def unreachable(fs: Any, path: str, error: BaseException) -> DataError:
    fix = "check data.path"
    if not is_local(fs):
        fix += ", the network, and the credentials in the environment (docs/data.md)"
    cause = f"{type(error).__name__}: {first_line(error)}"
    return DataError(f"{address_of(fs, path)} can't be read: {cause}; {fix}")


def address_of(fs: Any, path: str) -> str:
    if is_local(fs):
        return path
    return str(fs.unstrip_protocol(path))


class RangeFile(AbstractBufferedFile):  # type: ignore[misc]
    """A readable file that fetches exactly the ranges that are asked for, with retries."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return fetch(self.fs, self.path, start, min(end, self.size))
