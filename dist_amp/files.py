"""Durable file writes, hashes, locks, JSON without nan, network disks, the shipped files."""

import errno
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from dist_amp.errors import ConfigError

SHIPPED = "configs/debug.toml"  # marks the folder of the shipped files
ADDRESS = ".address"  # in a local folder that stands for one on object storage


@cache
def present(feature: str) -> bool:
    """Whether this project has the file, or folder, of a feature, such as "optimizers.ema"."""
    path = Path(__file__).parent.joinpath(*feature.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def missing(feature: str) -> str:
    """The error text for a feature that is not in this project, and how to get it."""
    path = f"dist_amp/{feature.replace('.', '/')}"
    path += "/" if "." not in feature and feature != "bit_exact" else ".py"
    name = feature.rpartition(".")[2]
    return f"this project has no {path}; get it with `dist_amp adopt {name}`"


Row = dict[str, Any]  # a line of metrics.jsonl


class InUse(Exception):
    """Another process holds a lock; the message names it."""


def run_dir(folder: Path) -> str:
    """The setting that continues the run of this folder: its address, if it stands for one."""
    if os.path.exists(folder / ADDRESS):  # Path.exists raises if the folder may not be read
        return (folder / ADDRESS).read_text()
    return str(folder)


@contextmanager
def only_process(path: Path, seconds: float = 0.0) -> Iterator[None]:
    """Hold a lock file, with this process's name in it; the kernel releases a dead process's.

    Errors: InUse if another process holds it for all these seconds; OSError.
    """
    from filelock import FileLock, Timeout

    with path.open("a+") as file:
        file.seek(0)
        holder = file.read().strip()
    lock = FileLock(path)
    try:
        lock.acquire(timeout=seconds, poll_interval=0.2)
    except Timeout:
        raise InUse(holder or "another process") from None
    try:
        path.write_text(f"process {os.getpid()} on {platform.node()}")
        yield
    finally:
        lock.release()


def write_durably(path: Path, content: str | bytes) -> None:
    """Replace a file's content: after a power cut or an OSError it is the old one or the new."""
    temporary = path.with_name(f".{path.name}.writing")
    write_synced(temporary, content)
    temporary.replace(path)
    sync_folder(path.parent)


def write_synced(path: Path, content: str | bytes) -> None:
    """Write a file and flush it, in place: for a folder that is renamed when it is complete."""
    data = content.encode() if isinstance(content, str) else content
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of names to disk, so that a rename in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:  # file systems that do not support it need none
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def appears(folder: Path, seconds: float = 60.0) -> bool:
    """Whether a folder that another rank has made can be seen: a network disk may take a minute."""
    deadline = time.monotonic() + seconds
    while not folder.is_dir():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
        with suppress(OSError):
            os.listdir(folder.parent)  # makes NFS refresh its cache
    return True


def entry_of(path: Path) -> dict[str, Any]:
    """A checkpoint's manifest describes a file by this: its size, and its hash.

    128-bit xxh3: finds accidental damage ten times faster than sha256, but no forgery.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)  # type: ignore[arg-type]
    return {"bytes": path.stat().st_size, "xxh3": digest.hexdigest()}


def read_rows(path: Path) -> tuple[list[Row], list[int]]:
    """The rows of a file with a step in each line, and the numbers of the lines that are none.

    A last line that a kill has torn is neither; without the file there are none.
    """
    rows = []
    damaged = []
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        if (row := parse_row(line)) is not None:
            rows.append(row)
        elif line.endswith(b"\n"):
            damaged.append(number)
    return rows, damaged


def parse_row(line: bytes) -> Row | None:
    """A line of metrics.jsonl; None for what is not one."""
    try:
        row = json.loads(line)
        return row if isinstance(row["step"], int) else None
    except (ValueError, LookupError, TypeError):
        return None


def plain_json(value: Any) -> Any:
    """The same with nan and inf as text, since JSON has no numbers for them."""
    if isinstance(value, dict):
        return {name: plain_json(part) for name, part in value.items()}
    if isinstance(value, list):
        return [plain_json(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def shipped_folder() -> Path:
    """The folder that contains configs/ and other data files: the clone, or what pip installed.

    Errors: ConfigError if there is neither.
    """
    from importlib.metadata import PackageNotFoundError, files

    clone = Path(__file__).parent.parent
    if (clone / SHIPPED).is_file():
        return clone
    with suppress(PackageNotFoundError):
        for file in files("dist_amp") or ():
            path = Path(file.locate())
            if path.match(f"share/dist_amp/{SHIPPED}") and path.is_file():
                return path.resolve().parent.parent
    raise ConfigError(
        f"dist_amp is installed without {SHIPPED} and its other files; install its wheel again, "
        "or use a clone"
    )
