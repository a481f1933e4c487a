"""Files at an address (s3, gs, az or file, by fsspec), and which process may write there.

The writer holds the claim, a small file at the address that it rewrites every few seconds. A new
run takes the claim if the holder has released it, or does not rewrite it while the run watches (so
no clocks are compared); else the run fails. A holder that finds another's claim writes no more.
"""

import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from dist_amp.errors import ConfigError, Failure, first_line
from dist_amp.files import entry_of

CLAIMS = "leases"
CLAIM = f"{CLAIMS}/claim.json"
RENEW_SECONDS = 10.0
DEAD_SECONDS = 45.0  # without a renewal, a holder is dead; a live one may miss a few renewals
LOOK_SECONDS = 2.0  # between looks at the claim; Google Cloud Storage allows a write per second


class Store:
    """The files below an address; names are relative to it. Raises the file system's errors."""

    def __init__(self, address: str):
        from fsspec.core import url_to_fs

        self.address = address.rstrip("/")
        # Object stores have no folders; on a disk, writes must create them.
        options = {"auto_mkdir": True} if address.startswith("file:") else {}
        try:
            # fsspec's cached listings would hide what other processes write.
            self.fs, self.root = url_to_fs(self.address, use_listings_cache=False, **options)
        except ImportError as error:  # its message names the package to install
            raise ConfigError(f"run.dir={address}: {first_line(error)} (pip install)") from error

    def path(self, name: str) -> str:
        return f"{self.root}/{name}".rstrip("/")

    def sizes(self, folder: str) -> dict[str, int]:
        """{name: bytes} of all files in a folder and below; empty if there is no such folder."""
        try:
            entries = self.fs.find(self.path(folder), detail=True)
        except FileNotFoundError:
            return {}
        return {path.removeprefix(f"{self.root}/"): info["size"] for path, info in entries.items()}

    def read(self, name: str) -> bytes:
        """The content of a file; empty if there is no such file."""
        try:
            content: bytes = self.fs.cat_file(self.path(name))
        except FileNotFoundError:
            return b""
        return content

    def write(self, name: str, content: bytes) -> None:
        self.fs.pipe_file(self.path(name), content)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.fs.rm_file(self.path(name))

    def upload(self, local: Path, name: str, entry: dict[str, Any]) -> None:
        """Upload a file. entry: its size and hash. Raises OSError if it does not match them."""
        if entry_of(local) != entry:
            raise OSError(f"{local} is not what its manifest says")
        self.fs.put_file(str(local), self.path(name))

    def download(self, name: str, local: Path, entry: dict[str, Any]) -> None:
        """Download a file, which appears when it is complete. Raises OSError if it is damaged."""
        temporary = local.with_name(f".{local.name}.fetching")
        self.fs.get_file(self.path(name), str(temporary))
        if entry_of(temporary) != entry:
            raise OSError(f"{self.address}/{name} is damaged")
        temporary.replace(local)


class Claim:
    """The right of this process to write at an address, until another process takes it.

    ended: the id of a claim known to be a dead process's. Raises Failure if a live run holds it.
    """

    def __init__(self, store: Store, ended: str, say: Callable[[str], None]):
        self.store = store
        name = f"process {os.getpid()} on {platform.node()}"
        self.record: dict[str, Any] = {"id": uuid4().hex, "holder": name, "renewals": 0}
        before = self.read()
        if before and before["id"] != ended and not before.get("released"):
            self._wait_for_end(before, say)
        self._write()
        time.sleep(LOOK_SECONDS)  # if two start at once, the last to write keeps the claim
        current = self.read()
        if current and current["id"] != self.record["id"]:
            raise self._in_use(current)

    def read(self) -> dict[str, Any]:
        """The claim at the address, this process's or another's; empty if there is none."""
        record: dict[str, Any] = json.loads(self.store.read(CLAIM) or b"{}")
        return record

    def renew(self) -> None:
        """Show that this process is alive. Raises OSError if another process has the claim."""
        current = self.read()
        if current and current["id"] != self.record["id"]:
            raise OSError(f"{current['holder']} has taken over")
        self.record["renewals"] += 1
        self._write()

    def release(self) -> None:
        """Let the next process start at once; it has to wait if the store can't be reached now."""
        self.record["released"] = True
        with suppress(Exception):
            self.renew()

    def _write(self) -> None:
        self.store.write(CLAIM, json.dumps(self.record).encode())

    def _wait_for_end(self, record: dict[str, Any], say: Callable[[str], None]) -> None:
        """Return when the holder has released the claim, or died. Raises Failure if it lives."""
        say(
            f"{self.store.address} was last written by {record['holder']}, which did not say that "
            f"it ended; waiting up to {DEAD_SECONDS:.0f} s for a sign of life"
        )
        deadline = time.monotonic() + DEAD_SECONDS
        while time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            now = self.read()
            if now.get("released"):
                return
            if now != record:
                raise self._in_use(record)

    def _in_use(self, record: dict[str, Any]) -> Failure:
        return Failure(
            f"run.dir={self.store.address} is in use by a live run ({record['holder']}); stop that "
            "one, or choose another"
        )
