"""Durable file writes, and folders on network disks."""

import errno
import os
import time
from contextlib import suppress
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Replace a file's content atomically: after a crash or power cut it holds the old text or the new, never a part.

    Errors: OSError, with the old file in place.
    """
    temporary = path.with_name(f".{path.name}.writing")
    write_synced(temporary, text)
    temporary.replace(path)
    sync_folder(path.parent)


def write_synced(path: Path, text: str) -> None:
    """Write a file and flush it to disk, in place: for files in a folder that is renamed when it is complete."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of names to disk, so that a rename in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that do not support it need none
            raise
    finally:
        os.close(handle)


def appears(folder: Path, seconds: float = 60.0) -> bool:
    """Wait for a folder that another rank has made; False if it is still missing after so many seconds.

    A network disk may take up to a minute to show it.
    """
    deadline = time.monotonic() + seconds
    while not folder.is_dir():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
        with suppress(OSError):
            os.listdir(folder.parent)  # makes NFS refresh its cache
    return True
