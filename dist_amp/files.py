"""Durable file writes, locks, JSON without nan, folders on network disks, the shipped files."""

import errno
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

from dist_amp.errors import ConfigError, DataError

SHIPPED = "configs/debug.toml"  # marks the folder of the shipped files
ADDRESS = ".address"  # in a local folder that stands for one on object storage


@cache
def present(feature: str) -> bool:
    """Whether this project has the file, or folder, of a feature, such as "optimizers.ema"."""
    path = Path(__file__).parent.joinpath(*feature.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def missing(feature: str) -> str:
    """That a feature is not in this project, and how to get it."""
    path = f"dist_amp/{feature.replace('.', '/')}"
    path += "/" if "." not in feature and feature != "bit_exact" else ".py"
    name = feature.rpartition(".")[2]
    return f"this project has no {path}; get it with `dist_amp adopt {name}`"


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


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSON file with a step each, but not a last one that a kill has torn; none
    without the file.

    Errors: DataError for another line that is not one; OSError.
    """
    rows = []
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    for number, line in enumerate(lines, 1):
        row: Any = None
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            check_numbers(row, f"{path}, line {number}")
            rows.append(row)
        elif number < len(lines) or line.endswith(b"\n"):
            raise DataError(f"{path}, line {number}: not a JSON object with a step; remove it")
    return rows


def check_numbers(row: dict[str, Any], where: str) -> None:
    """Errors: DataError if a metric is no number, which nan and inf are as text. Metrics have a
    slash in their name.
    """
    ranks = row.get("ranks", [])
    if not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks):
        raise DataError(f"{where}: ranks is no list of objects; remove the line")
    for name, value in [pair for part in (row, *ranks) for pair in part.items()]:
        is_number = isinstance(value, int | float) or value in ("nan", "inf", "-inf")
        if "/" in name and not is_number:
            raise DataError(f"{where}: {name}={value!r:.60} is no number; remove the line")


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
    """What has configs/ and the other files that are no code: the clone, or what pip installed.

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
