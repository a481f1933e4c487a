"""Which process may write at a run's address: the one that holds the highest-numbered lease.

A lease is a file that its holder rewrites every few seconds. Another process that sees it change
keeps away; if it does not change for a while, by the watcher's clock alone, its holder is dead.
The next lease is created under the next number, which the store allows only one process to do.
"""

import json
import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from dist_amp.errors import Failure
from dist_amp.storage.store import HOLDER, Store

RENEW_SECONDS = 10.0
DEAD_SECONDS = 45.0  # without a change; a few renewals may be lost on the way
FOLDER = "leases"


class Lost(Exception):
    """Another process has taken over."""


class Lease:
    """A lease that this process holds. name: of its file. before: the content of the one before."""

    def __init__(self, store: Store, name: str, record: dict[str, Any], before: dict[str, Any]):
        self.store = store
        self.name = name
        self.record = record
        self.before = before

    def renew(self) -> None:
        """Show that this process lives. Errors: Lost."""
        self.check()
        self.record["renewals"] += 1
        self.store.write(self.name, as_bytes(self.record))

    def check(self) -> None:
        """Errors: Lost."""
        newest = max(self.store.sizes(FOLDER), default=self.name)
        if newest > self.name:
            holder = json.loads(self.store.read(newest))
            raise Lost(f"{holder['process']} on {holder['host']} has taken over")

    def release(self) -> None:
        """So that nobody has to wait for its end; if the store is away, they have to."""
        with suppress(Exception):
            self.store.write(self.name, as_bytes({**self.record, "released": True}))


def take(store: Store, folder: Path, say: Any) -> Lease:
    """Become the writer at an address. folder: the local one, whose lock this process holds.

    Errors: Failure if a live process holds the lease.
    """
    names = sorted(store.sizes(FOLDER))
    before: dict[str, Any] = {}
    if names:
        before = json.loads(store.read(names[-1]))
        wait_for_end(store, names[-1], before, folder, say)
    number = int(names[-1].rpartition("/")[2]) + 1 if names else 1
    record = {
        "process": f"process {os.getpid()}",
        "host": platform.node(),
        "id": uuid4().hex,
        "renewals": 0,
    }
    lease = Lease(store, f"{FOLDER}/{number:08d}", record, before)
    if not store.create(lease.name, as_bytes(record)):
        raise in_use(store, json.loads(store.read(lease.name)))
    if store.create(lease.name, as_bytes({**record, "released": True})):
        raise Failure(
            f"run.dir={store.address}: this store lets two writers create one file (it ignores "
            "If-None-Match, or the like); update it and its fsspec package, or choose another"
        )
    with suppress(Exception):  # old leases do no harm, and some stores forbid removals
        for name in names[:-1]:
            store.remove(name)
    return lease


def wait_for_end(store: Store, name: str, record: dict[str, Any], folder: Path, say: Any) -> None:
    """Return when the lease's holder is known to be dead. Errors: Failure if it lives."""
    if record.get("released"):
        return
    if record["id"] == last_lease(folder, of_main=True):
        return  # its process had the lock of this folder, which this process has
    say(
        f"{store.address} was last written by {record['process']} on {record['host']}, which did "
        f"not say that it ended; waiting up to {DEAD_SECONDS:.0f} s for a sign of life"
    )
    deadline = time.monotonic() + DEAD_SECONDS
    while time.monotonic() < deadline:
        time.sleep(1.0)
        now = json.loads(store.read(name))
        if now.get("released"):
            return
        if now != record:
            raise in_use(store, now)


def in_use(store: Store, record: dict[str, Any]) -> Failure:
    return Failure(
        f"run.dir={store.address} is in use by a live run ({record['process']} on "
        f"{record['host']}); stop that one, or choose another"
    )


def last_lease(folder: Path, of_main: bool = False) -> str:
    """The id of the lease under which the local folder was written last; "" for a new folder.

    of_main: only by the run's main node, whose process holds the lease.
    """
    holder = folder / HOLDER
    record = json.loads(holder.read_text()) if holder.exists() else {}
    if of_main and not record.get("is_main"):
        return ""
    return str(record.get("id", ""))


def as_bytes(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode()
