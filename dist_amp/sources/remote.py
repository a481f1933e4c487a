"""Files at an address: ranges of their bytes, fetched again after faults that pass."""

import logging
import time
from collections.abc import Callable
from typing import Any

from fsspec.spec import AbstractBufferedFile

from dist_amp.errors import DataError, first_line

log = logging.getLogger(__name__)
OUTAGE_SECONDS = 120.0  # that are waited for a store; below run.timeout_seconds
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 8.0
# Errors that another try does not change.
LASTING = (PermissionError, AttributeError, ImportError, LookupError, TypeError, ValueError)


def fetch(fs: Any, path: str, start: int, end: int) -> Any:
    """Bytes [start, end) of a file, all of them. Errors: as for `patiently`."""

    def once() -> bytes:
        # By name: a file system may have other arguments between, such as S3's version_id.
        content: bytes = fs.cat_file(path, start=start, end=end)
        if len(content) != end - start:
            raise OSError(f"{len(content)} bytes came in place of {end - start}")
        return content

    return patiently(fs, path, once)


def patiently(fs: Any, path: str, call: Callable[[], Any]) -> Any:
    """call(), repeated while its error may pass. Errors: DataError; FileNotFoundError as it is."""
    start = time.monotonic()
    pause = FIRST_PAUSE
    while True:
        try:
            return call()
        except FileNotFoundError:
            raise
        except Exception as error:  # each file system has errors of its own
            left = OUTAGE_SECONDS - (time.monotonic() - start)
            lasts = isinstance(error, LASTING) or "Credential" in type(error).__name__
            if lasts or is_local(fs) or left < pause:
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
    """A file to read, of which exactly the ranges that are asked for are fetched."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return fetch(self.fs, self.path, start, min(end, self.size))
