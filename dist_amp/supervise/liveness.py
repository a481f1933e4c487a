"""Which ranks are alive: each watches two others, whatever the number of ranks.

Its neighbour on the same machine by the process table, where a death shows at once; and its neighbour among all ranks
by a counter that every rank's watchdog moves in the store, which also shows a stopped rank and a machine that is gone.
"""

import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist


class Process(NamedTuple):
    """A rank's process; machine: its host and its process table, which containers on one host do not share."""

    host: str
    pid: int
    machine: str

    @property
    def is_dead(self) -> bool:
        """Whether it is known to be: only of processes on this machine."""
        return self._state() in ("", "Z", "X")

    @property
    def is_stopped(self) -> bool:
        """Whether it is known to be stopped, by SIGSTOP or a debugger: only of processes on this machine."""
        return self._state() in ("T", "t")

    def _state(self) -> str | None:
        """The letter in the process table, "" if it is not there; None if it can't be looked up."""
        if self.machine != this_process().machine or not Path("/proc/self").exists():
            return None
        try:
            return process_fields(self.pid)[0]
        except OSError:
            return ""


def this_process() -> Process:
    table = ""
    with suppress(OSError):  # not Linux
        table = os.readlink("/proc/self/ns/pid")
    return Process(platform.node(), os.getpid(), f"{platform.node()} {table}")


def process_fields(pid: int) -> list[str]:
    """The process's state, its parent and more, as /proc lists them after the command. Source: proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


class Liveness:
    """Moves this rank's counter, and reads its neighbour's: two requests to the store every `period` seconds."""

    def __init__(self, store: dist.Store, prefix: str, rank: int, limit_seconds: float):  # type: ignore[name-defined]
        self._store, self._prefix, self._rank = store, prefix, rank
        self.limit_seconds = limit_seconds
        self._period = min(5.0, limit_seconds / 8)
        self._beats, self._last_beat = 0, 0.0
        self._seen, self._seen_at = "", time.monotonic()
        self._processes: list[Process] = []
        self._store.set(self._key(rank), "0")  # so that reading it never waits

    def watch(self, processes: list[Process]) -> None:
        """Start, once every rank has made its own: the processes of all ranks."""
        self._processes, self._seen_at = processes, time.monotonic()

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/alive/{rank}"

    def lost(self) -> int | None:
        """A rank that has died, or has moved its counter for `limit_seconds` no more; None while there is none."""
        size, machine = len(self._processes), self._processes[self._rank].machine
        others = [(self._rank + distance) % size for distance in range(1, size)]
        here = next((rank for rank in others if self._processes[rank].machine == machine), None)
        if here is not None and self._processes[here].is_dead:
            return here
        now = time.monotonic()
        if now - self._last_beat < self._period:
            return None
        if now - self._last_beat > 3 * self._period:  # this process was stopped, and its neighbour may have been too
            self._seen_at = now
        self._last_beat, self._beats = now, self._beats + 1
        self._store.set(self._key(self._rank), str(self._beats))
        if (seen := self._store.get(self._key(others[0])).decode()) != self._seen:
            self._seen, self._seen_at = seen, now
        return others[0] if now - self._seen_at > self.limit_seconds else None
