"""The files that `data.path` names, on this machine or at an address that fsspec knows, and how they are read."""

import os
import posixpath
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from dist_amp.errors import ConfigError, DataError, first_line
from dist_amp.settings import SourceConfig

# A file's ending -> its format.
FORMATS = {
    **dict.fromkeys((".txt", ".md", ".py"), "text"),
    **dict.fromkeys((".json", ".jsonl"), "json"),
    ".csv": "csv",
    ".tsv": "tsv",  # data.format=csv
    ".parquet": "parquet",
    **dict.fromkeys((".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp"), "images"),
}
COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
# Files by which the folders that save_to_disk and dist_amp.tokenize write are recognised.
MARKS = {
    "dataset_dict.json": "saved",
    "dataset_info.json": "saved",
    "state.json": "saved",
    "tokens.json": "tokens",
}
TOKENS_INDEX = "documents.bin"
SPLIT_NAME = re.compile(r"(train|test|valid|val|dev)(?:ing|ation)?(?![a-z])")
SPLITS = {"train": "train", "test": "test", "valid": "validation", "val": "validation", "dev": "validation"}


@dataclass(frozen=True)
class Files:
    """Files of one format, as paths of a file system."""

    fs: Any
    root: str
    """What `data.path` names there."""
    format: str
    splits: dict[str, list[str]]
    """Of each split, in order of their names; the format saved or tokens has none."""
    bytes: int
    rest: str = ""
    """What follows :: in an address within another, as zip://*.csv::s3://bucket/all.zip."""

    @property
    def is_local(self) -> bool:
        return "file" in self.fs.protocol

    def address(self, path: str) -> str:
        """The path with its protocol, unless it is local."""
        return path if self.is_local else self.fs.unstrip_protocol(path) + self.rest


def find_files(config: SourceConfig) -> Files:
    """The files that `data.path` names.

    Errors: ConfigError for a protocol without its package; DataError where there is nothing, or no one format.
    """
    fs, root = _file_system(config.path)
    try:
        is_folder = not fs.isfile(root) and fs.isdir(root)
        found = _listed(fs, root, is_folder)
    except Exception as error:  # each file system has errors of its own
        raise DataError(
            f"data.path={config.path} could not be listed: {first_line(error) or type(error).__name__}; check the "
            "address, the network and the credentials"
        ) from error
    if not found:
        raise DataError(f"data.path={config.path} names no file; give a file, a folder or a glob")
    rest = "".join(config.path.partition("::")[1:])
    folder_format = next((MARKS[name] for name in MARKS if is_folder and posixpath.join(root, name) in found), "")
    if folder_format:
        if config.format not in ("auto", folder_format):
            raise _contradicts(config, f"a folder of the format {folder_format}")
        return Files(fs, root, folder_format, {}, 0, rest)
    if part := next((path for path in found if posixpath.basename(path) == TOKENS_INDEX), ""):
        raise DataError(
            f"data.path={config.path} holds tokens without their tokens.json, such as {part}; give the folder that has "
            "this file, or copy it too"
        )
    format_, paths = _of_one_format(config, sorted(found), is_folder)
    sizes = [found[path].get("size") for path in paths]  # None where a server does not tell
    if not any(size != 0 for size in sizes):
        raise DataError(
            f"data.path={config.path} could not be loaded: its files, such as {paths[0]}, are empty; give files with "
            "data"
        )
    return Files(fs, root, format_, _by_split(paths, format_), sum(size or 0 for size in sizes), rest)


def _file_system(path: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(path)
    except ImportError as error:
        raise ConfigError(
            f"data.path={path} needs a package that is not installed ({first_line(error)}); install it with pip, or "
            "copy the files to a local folder"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"data.path={path} is no address that can be opened: {first_line(error)}; use a local path, or one of "
            "fsspec's protocols, such as s3://, gs://, hf:// or https://"
        ) from error


def _listed(fs: Any, root: str, is_folder: bool) -> dict[str, dict[str, Any]]:
    """{path: what the file system says of it}, without hidden files."""
    if is_folder:
        found = _below(root) if "file" in fs.protocol else fs.find(root, detail=True)
    else:
        found = fs.glob(root, detail=True)
    if not is_folder and not found and fs.isfile(root):  # a name with [ or *
        return {root: fs.info(root)}
    hidden = re.compile(r"(^|/)\.[^/]")
    return {
        path: info
        for path, info in found.items()
        if info["type"] == "file" and not hidden.search(path[len(root) :] if is_folder else posixpath.basename(path))
    }


def _below(root: str) -> dict[str, dict[str, Any]]:
    """The files below a local folder, those behind symbolic links too, which fsspec leaves out.

    Errors: OSError for a link with a known ending that leads nowhere.
    """
    found, seen = {}, set()
    for folder, folders, files in os.walk(root, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()  # a link to a folder above
            continue
        seen.add(real)
        for path in (os.path.join(folder, name) for name in files):
            if _format_of(path) or os.path.exists(path):
                found[path] = {"type": "file", "size": os.path.getsize(path)}
    return found


def _of_one_format(config: SourceConfig, paths: list[str], is_folder: bool) -> tuple[str, list[str]]:
    """(the format, the files of that format); in a folder, files with unknown endings are left out."""
    formats = {path: _format_of(path) for path in paths}
    if config.format != "auto":
        wanted = {"csv", "tsv"} if config.format == "csv" else {config.format}
        chosen = [path for path in paths if formats[path] in wanted] or [path for path in paths if not formats[path]]
        if not chosen or config.format in MARKS.values():
            raise _contradicts(config, f"files such as {paths[0]}")
    else:
        chosen = [path for path in paths if formats[path] or not is_folder]
        if len({formats[path] for path in chosen}) > 1:  # what comes with a data set
            chosen = [path for path in chosen if posixpath.basename(path) != "README.md"]
    found = {formats[path] or config.format for path in chosen}
    if len(found) == 1 and found != {"auto"}:
        return found.pop(), chosen
    raise DataError(
        f"data.path={config.path} must name files of one format; known endings are {' '.join(FORMATS)}, also followed "
        f"by {' '.join(sorted(COMPRESSED))}: give a glob such as *.jsonl, or set data.format"
    )


def _contradicts(config: SourceConfig, found: str) -> ConfigError:
    return ConfigError(
        f"data.format={config.format} contradicts data.path={config.path}, which is {found}; leave it out"
    )


def _format_of(path: str) -> str:
    """The format by the file's ending; "" if it is unknown."""
    endings = PurePosixPath(path).suffixes
    if endings and endings[-1].lower() in COMPRESSED:
        endings.pop()
    return FORMATS.get(endings[-1].lower(), "") if endings else ""


def _by_split(paths: list[str], format_: str) -> dict[str, list[str]]:
    """{split: paths} if each path names its split, as train/0.csv or train-0.csv do; else {"train": paths}."""
    top = posixpath.commonpath([posixpath.dirname(path) for path in paths])
    splits: dict[str, list[str]] = {}
    for path in paths:
        folder, slash, _ = posixpath.relpath(path, top or ".").partition("/")
        named = SPLIT_NAME.fullmatch(folder) if slash else None
        if format_ != "images":  # a picture's own name says nothing of its split
            named = named or SPLIT_NAME.match(posixpath.basename(path))
        splits.setdefault(SPLITS[named[1]] if named else "", []).append(path)
    if "" in splits and splits.keys() > {"", "train"} and format_ not in ("text", "images"):  # those go by anything
        other = next(path for name, inside in splits.items() if name not in ("", "train") for path in inside)
        raise DataError(
            f"{splits[''][0]} names no split, though {other} does, which would be trained on; rename it, or name the "
            "files in data.path"
        )
    return splits if "train" in splits and "" not in splits else {"train": paths}
