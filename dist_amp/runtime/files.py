"""Files that survive a power cut, and folders on network disks."""

import errno
import os
import time
from contextlib import suppress
from pathlib import Path


def write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some disks can't, and do it by themselves
            raise
    finally:
        os.close(handle)


def appears(folder: Path, seconds: float = 60.0) -> bool:
    """Whether a folder that another rank has made is there; a network disk may show it up to a minute later."""
    deadline = time.monotonic() + seconds
    while not folder.is_dir():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
        with suppress(OSError):
            os.listdir(folder.parent)  # makes such a disk look again
    return True
