"""Files: durable writes, hashes, locks, metrics.jsonl, network disks, shipped configs."""

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
ADDRESS = ".address"  # in the local folder of a run on object storage: the run's address


@cache
def present(feature: str) -> bool:
    """Whether this project has the file, or folder, of a feature, such as "optimizers.ema"."""
    path = Path(__file__).parent.joinpath(*feature.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def missing(feature: str) -> str:
    """The error text for a feature that is not in this project, and how to get it."""
    path = f"dist_amp/{feature.replace('.', '/')}"
    path += "/" if "." not in feature and feature != "bit_exact" else ".py"  # "storage" is a folder
    name = feature.rpartition(".")[2]
    return f"this project has no {path}; get it with `dist_amp adopt {name}`"


Row = dict[str, Any]  # a line of metrics.jsonl


class InUse(Exception):
    """Another process holds a lock; the message names it."""


def run_dir(folder: Path) -> str:
    """The run.dir that continues the run in this folder: its address if it is on object storage."""
    if os.path.exists(folder / ADDRESS):  # Path.exists raises if the folder may not be read
        return (folder / ADDRESS).read_text()
    return str(folder)


@contextmanager
def only_process(path: Path, seconds: float = 0.0) -> Iterator[None]:
    """Context that holds a lock file, with this process's name in it; a process's death unlocks it.

    Raises InUse if another process still holds the lock after `seconds`; OSError.
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
    """Replace a file's content: a power cut or an OSError leaves the old content or the new one."""
    temporary = path.with_name(f".{path.name}.writing")
    write_synced(temporary, content)
    temporary.replace(path)
    sync_folder(path.parent)


def write_synced(path: Path, content: str | bytes) -> None:
    """Write and flush a file in place, for a folder that is renamed once it is complete."""
    data = content.encode() if isinstance(content, str) else content
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that renames inside survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:  # file systems without fsync for folders don't need it
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def appears(folder: Path, seconds: float = 60.0) -> bool:
    """Wait until another rank's new folder is visible (network disks: up to a minute); or False."""
    deadline = time.monotonic() + seconds
    while not folder.is_dir():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
        with suppress(OSError):
            os.listdir(folder.parent)  # makes NFS refresh its cache
    return True


def entry_of(path: Path) -> dict[str, Any]:
    """A file's entry in a checkpoint's manifest: its size and its hash.

    128-bit xxh3 detects accidental damage, ten times faster than sha256, but not forgery.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)  # type: ignore[arg-type]
    return {"bytes": path.stat().st_size, "xxh3": digest.hexdigest()}


def read_rows(path: Path) -> tuple[list[Row], list[int]]:
    """Returns (rows of metrics.jsonl, numbers of its damaged lines), both empty without the file.

    An incomplete last line, as a kill leaves it, is in neither.
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
    """The row in a line of metrics.jsonl; None if the line is incomplete or damaged."""
    try:
        row = json.loads(line)
        return row if isinstance(row["step"], int) else None
    except (ValueError, LookupError, TypeError):
        return None


def plain_json(value: Any) -> Any:
    """The value with nan and inf as strings, because JSON has no such numbers."""
    if isinstance(value, dict):
        return {name: plain_json(part) for name, part in value.items()}
    if isinstance(value, list):
        return [plain_json(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def shipped_folder() -> Path:
    """The folder that contains configs/ and other data files: the clone, or what pip installed.

    Raises ConfigError if neither has them.
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
