"""Files at an address (s3, gs, az, ... by fsspec), and which process may write there.

The writer at an address holds its claim of the highest number: a file that it rewrites every few
seconds. The store lets one process create the next number. It does so once the holder has released
its claim or, by the store's clock, has not rewritten it for a while; a holder that finds the next
number puts nothing more.
"""

import json
import logging
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from dist_amp.errors import ConfigError, Failure, first_line
from dist_amp.files import entry_of

CLOCK = ".clock"  # is written to learn the store's time
CLAIMS = "leases"
RENEW_SECONDS = 10.0
DEAD_SECONDS = 45.0  # since a claim was written: a few renewals may be lost on the way

Record = dict[str, Any]


class Store:
    """The files below an address. Names are relative to it. Errors: those of its file system."""

    def __init__(self, address: str):
        from fsspec.core import url_to_fs

        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # logs a trace of what it raises
        self.address = address.rstrip("/")
        try:
            # Cached listings would show what was there before.
            self.fs, self.root = url_to_fs(self.address, use_listings_cache=False)
        except ImportError as error:  # its message names the package to install
            raise ConfigError(f"run.dir={address}: {first_line(error)} (pip install)") from error
        self.is_disk = "file" in self.fs.protocol

    def path(self, name: str) -> str:
        return f"{self.root}/{name}".rstrip("/")

    def sizes(self, folder: str) -> dict[str, int]:
        """{name: bytes} of all files in a folder; empty without it."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.find(self.path(folder), detail=True)
        except FileNotFoundError:
            return {}
        return {path.removeprefix(f"{self.root}/"): info["size"] for path, info in found.items()}

    def read(self, name: str) -> bytes:
        """The content of a file; empty if there is none."""
        try:
            content: bytes = self.fs.cat_file(self.path(name))
        except FileNotFoundError:
            return b""
        return content

    def write(self, name: str, content: bytes) -> None:
        if self.is_disk:
            self._place(name, content, os.replace)
        else:
            self.fs.pipe_file(self.path(name), content)

    def create(self, name: str, content: bytes) -> bool:
        """Write a file unless it exists, which the store decides: of two writers one succeeds.

        True as well if the file has this content: an answer may be lost on its way.
        """
        try:
            if self.is_disk:  # fsspec looks first and writes then
                self._place(name, content, os.link)
            else:
                self.fs.pipe_file(self.path(name), content, mode="create")
        except FileExistsError:
            return self.read(name) == content
        return True

    def _place(self, name: str, content: bytes, place: Callable[[Path, str], object]) -> None:
        """On a disk: the file appears with its whole content."""
        path = Path(self.path(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(self.root, f".{uuid4().hex}")
        try:
            temporary.write_bytes(content)
            place(temporary, str(path))
        finally:
            temporary.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.fs.rm_file(self.path(name))

    def age(self, name: str) -> float:
        """Seconds since a file was written, by the store's clock alone."""
        self.write(CLOCK, b"now")
        self.fs.invalidate_cache()
        now, written = (self.fs.modified(self.path(file)) for file in (CLOCK, name))
        seconds: float = (now - written).total_seconds()
        return seconds

    def upload(self, local: Path, name: str, entry: dict[str, Any]) -> None:
        """Put a file that its manifest describes by `entry`. Errors: OSError if it is damaged."""
        if entry_of(local) != entry:
            raise OSError(f"{local} is not what its manifest says")
        if self.is_disk:  # object stores have no folders
            Path(self.path(name)).parent.mkdir(parents=True, exist_ok=True)
        self.fs.put_file(str(local), self.path(name))

    def download(self, name: str, local: Path, entry: dict[str, Any]) -> None:
        """Fetch a file; it appears when it is whole. Errors: OSError if it is damaged."""
        temporary = local.with_name(f".{local.name}.{uuid4().hex[:8]}.fetching")
        try:
            self.fs.get_file(self.path(name), str(temporary))
            if entry_of(temporary) != entry:
                raise OSError(f"{self.address}/{name} is damaged")
            os.replace(temporary, local)
        finally:
            temporary.unlink(missing_ok=True)


@dataclass
class Claim:
    """A claim of this process. record: what it says. before: what the one before it says."""

    store: Store
    number: int
    record: Record
    before: Record

    def renew(self) -> None:
        """Show that this process lives. Errors: OSError if another has the next claim."""
        if record := read_claim(self.store, self.number + 1):
            raise OSError(f"{record['process']} on {record['host']} has taken over")
        self.record["renewals"] += 1
        self.store.write(claim_name(self.number), as_bytes(self.record))

    def release(self) -> None:
        """Let another process start at once; if the store is away, it has to wait."""
        released = {**self.record, "released": True}
        with suppress(Exception):
            self.store.write(claim_name(self.number), as_bytes(released))


def take_claim(store: Store, ended: str, say: Callable[[str], None]) -> Claim:
    """Become the writer at an address. ended: the id of a claim whose process is known to be dead.

    Errors: Failure if a live run holds it.
    """
    record: Record = {"process": f"process {os.getpid()}", "host": platform.node()}
    record |= {"id": uuid4().hex, "renewals": 0}
    number = newest_claim(store)
    while True:
        before = read_claim(store, number)
        if before and before["id"] != ended:
            wait_for_end(store, number, before, say)
        # Until this process has put something, what is there was written under an earlier claim.
        record["written_by"] = before.get("written_by", before.get("id", record["id"]))
        number += 1
        if store.create(claim_name(number), as_bytes(record)):
            break  # else another run was quicker, or the store lists late
    if store.create(claim_name(number), as_bytes({**record, "released": True})):
        raise Failure(
            f"run.dir={store.address}: this store lets two writers create one file (it ignores "
            "If-None-Match, or the like); update it and its fsspec package, or choose another"
        )
    return Claim(store, number, record, before)


def wait_for_end(store: Store, number: int, record: Record, say: Callable[[str], None]) -> None:
    """Return when the holder of a claim has ended. Errors: Failure if it lives."""
    renewals = record["renewals"]
    holder = f"{record['process']} on {record['host']}"
    told = False
    while not record.get("released") and store.age(claim_name(number)) < DEAD_SECONDS:
        if record["renewals"] != renewals:
            raise Failure(
                f"run.dir={store.address} is in use by a live run ({holder}); stop that one, or "
                "choose another"
            )
        if not told:
            say(
                f"{store.address} was last written by {holder}, which did not say that it ended; "
                f"waiting up to {DEAD_SECONDS:.0f} s for a sign of life"
            )
        told = True
        time.sleep(2.0)  # Google's takes a write per second to one file
        record = read_claim(store, number)


def newest_claim(store: Store) -> int:
    """Its number; 0 if there is none."""
    return max((int(name.rpartition("/")[2]) for name in store.sizes(CLAIMS)), default=0)


def read_claim(store: Store, number: int) -> Record:
    """What a claim says; empty if there is none."""
    record: Record = json.loads(store.read(claim_name(number)) or b"{}")
    return record


def claim_name(number: int) -> str:
    return f"{CLAIMS}/{number:08d}"


def as_bytes(record: Record) -> bytes:
    return json.dumps(record).encode()
