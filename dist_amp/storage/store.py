"""Files at an address (s3, gs, az, file by fsspec), and which process may write there.

The writer holds the claim with the highest number: a small file that it rewrites every few seconds.
A start creates the next number, which the store lets one process do. Before that, it waits until
the holder has released its claim, or has not rewritten it for a while: no clocks are compared. A
holder that finds the next number writes nothing more.
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

CLAIMS = "leases"
RENEW_SECONDS = 10.0
DEAD_SECONDS = 45.0  # without a renewal: a few may be lost on the way

Record = dict[str, Any]


class Store:
    """The files below an address. Names are relative to it. Errors: those of its file system."""

    def __init__(self, address: str):
        from fsspec.core import url_to_fs

        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # logs a trace of what it raises
        self.address = address.rstrip("/")
        # Object stores have no folders; on a disk they are made.
        options = {"auto_mkdir": True} if address.startswith("file:") else {}
        try:
            # Cached listings would show what was there before.
            self.fs, self.root = url_to_fs(self.address, use_listings_cache=False, **options)
        except ImportError as error:  # its message names the package to install
            raise ConfigError(f"run.dir={address}: {first_line(error)} (pip install)") from error

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
        if "file" in self.fs.protocol:
            os.replace(self._written_beside(name, content), self.path(name))
        else:
            self.fs.pipe_file(self.path(name), content)

    def _written_beside(self, name: str, content: bytes) -> str:
        """A new local file to be renamed to `name`: its readers find all of the content."""
        self.fs.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        temporary = self.path(f".{uuid4().hex}")
        Path(temporary).write_bytes(content)
        return temporary

    def create(self, name: str, content: bytes) -> bool:
        """Write a file unless it exists, which the store decides: of two writers one succeeds.

        True as well if the file has this content: an answer may be lost on its way.
        """
        try:
            if "file" in self.fs.protocol:  # where fsspec looks first and writes then
                temporary = self._written_beside(name, content)
                try:
                    os.link(temporary, self.path(name))
                finally:
                    os.remove(temporary)
            else:
                self.fs.pipe_file(self.path(name), content, mode="create")
        except FileExistsError:
            return self.read(name) == content
        return True

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.fs.rm_file(self.path(name))

    def upload(self, local: Path, name: str, entry: dict[str, Any]) -> None:
        """Put a file that its manifest describes by `entry`. Errors: OSError if it is damaged."""
        if entry_of(local) != entry:
            raise OSError(f"{local} is not what its manifest says")
        self.fs.put_file(str(local), self.path(name))

    def download(self, name: str, local: Path, entry: dict[str, Any]) -> None:
        """Fetch a file; it appears when it is whole. Errors: OSError if it is damaged."""
        temporary = local.with_name(f".{local.name}.fetching")
        self.fs.get_file(self.path(name), str(temporary))
        if entry_of(temporary) != entry:
            raise OSError(f"{self.address}/{name} is damaged")
        temporary.replace(local)


@dataclass
class Claim:
    """The right of this process to write at an address, until another has the next number.

    record: what its file says. written_by in it is the id of the claim under which the files at the
    address were written: an earlier one's, until the process of this claim has put something.
    """

    store: Store
    number: int
    record: Record

    def renew(self) -> None:
        """Show that this process lives. Errors: OSError if another has the next claim."""
        if record := read_claim(self.store, self.number + 1):
            raise OSError(f"{record['process']} on {record['host']} has taken over")
        self.record["renewals"] += 1
        self.store.write(claim_name(self.number), json.dumps(self.record).encode())

    def release(self) -> None:
        """Let another process start at once. If the store is away, it has to wait."""
        self.record["released"] = True
        with suppress(Exception):
            self.store.write(claim_name(self.number), json.dumps(self.record).encode())


def take_claim(store: Store, ended: str, say: Callable[[str], None]) -> Claim:
    """Become the writer at an address. ended: the id of a claim whose process is known to be dead.

    Errors: Failure if a live run holds it.
    """
    record: Record = {"process": f"process {os.getpid()}", "host": platform.node()}
    record |= {"id": uuid4().hex, "renewals": 0}
    number = max((int(name.rpartition("/")[2]) for name in store.sizes(CLAIMS)), default=0)
    while True:
        before = read_claim(store, number)
        if before and before["id"] != ended and not before.get("released"):
            wait_for_end(store, number, before, say)
        record["written_by"] = before.get("written_by", before.get("id", ""))
        number += 1
        if store.create(claim_name(number), json.dumps(record).encode()):
            break  # else another run was quicker, or the store lists late
    if store.create(claim_name(number), json.dumps({**record, "released": True}).encode()):
        raise Failure(
            f"run.dir={store.address}: this store lets two writers create one file (it ignores "
            "If-None-Match, or the like); update it and its fsspec package, or choose another"
        )
    return Claim(store, number, record)


def wait_for_end(store: Store, number: int, record: Record, say: Callable[[str], None]) -> None:
    """Return when the holder of a claim has ended. Errors: Failure if it lives."""
    holder = f"{record['process']} on {record['host']}"
    say(
        f"{store.address} was last written by {holder}, which did not say that it ended; "
        f"waiting up to {DEAD_SECONDS:.0f} s for a sign of life"
    )
    deadline = time.monotonic() + DEAD_SECONDS
    while time.monotonic() < deadline:
        time.sleep(2.0)  # Google's takes a write per second to one file
        now = read_claim(store, number)
        if now.get("released"):
            return
        if now != record:
            raise Failure(
                f"run.dir={store.address} is in use by a live run ({holder}); stop that one, or "
                "choose another"
            )


def read_claim(store: Store, number: int) -> Record:
    """The content of a claim; empty if there is none."""
    record: Record = json.loads(store.read(claim_name(number)) or b"{}")
    return record


def claim_name(number: int) -> str:
    return f"{CLAIMS}/{number:08d}"
