"""Files at an address: ranges of their bytes, repeated over faults that pass; causes in words."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from fsspec.spec import AbstractBufferedFile

from dist_amp.errors import DataError, first_line

log = logging.getLogger(__name__)
OUTAGE_SECONDS = 120.0  # that are waited for a store; below run.timeout_seconds
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 8.0
CHECK = "check the network and the address, then start again"
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
            lasts = is_local(fs) or isinstance(error, LASTING) or lacks_credentials(error)
            if lasts or left < pause:
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
    cause = access_problem(fs, error) or f"{type(error).__name__}: {first_line(error)}; {CHECK}"
    return DataError(f"{address_of(fs, path)} can't be read: {cause}")


def address_of(fs: Any, path: str) -> str:
    if is_local(fs):
        return path
    return str(fs.unstrip_protocol(path))


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def lacks_credentials(error: BaseException) -> bool:
    return any("Credential" in type(cause).__name__ for cause in causes_of(error))


def access_problem(fs: Any, error: BaseException) -> str:
    """Why a store did not give a file, and what to do; "" if that is not the error's cause."""
    if is_local(fs):
        return ""
    fix = "check the credentials, and what they may read"
    if "s3" in fs.protocol and "AWS_ACCESS_KEY_ID" not in os.environ:
        fix = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    for cause in causes_of(error):
        line = first_line(cause)
        kind = type(cause)
        if lacks_credentials(cause):
            return f"no credentials ({line}); {fix}"
        if "bucket does not exist" in line:
            return f"there is no such bucket ({line}); check its name in data.path"
        if isinstance(cause, PermissionError):
            return f"403 Forbidden ({line}); {fix}"
        if isinstance(cause, FileNotFoundError):
            return f"it does not exist ({line}); check data.path"
        is_of_network = kind.__module__.partition(".")[0] in ("aiohttp", "botocore")
        if is_of_network or isinstance(cause, (ConnectionError, TimeoutError)):
            return f"{kind.__name__}: {line}; {CHECK}"
    return ""


class RangeFile(AbstractBufferedFile):  # type: ignore[misc]
    """A file to read, of which exactly the ranges that are asked for are fetched."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return fetch(self.fs, self.path, start, min(end, self.size))
