"""What every rank reports of itself in the shared store: that it lives, how far it is, and in which
collective it waits.

Each rank has one key, which exists from the start, so that reading it never waits and one request
reads all of them: no rank asks the store more often in a larger world.
"""

import faulthandler
import json
import math
import os
import platform
import sys
import sysconfig
import threading
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import torch.distributed as dist

from dist_amp.distributed.flight_recorder import Entered, Progress

# alive: nothing has failed as far as this rank knows. In answer to a failure: its collective failed
# or timed out; it failed by itself; its training runs; it has left the run in order.
State = Literal["alive", "waited", "failed", "runs", "left"]

EVENT = "event"
STALL = "stall"
VERDICT = "verdict"

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})


class Process(NamedTuple):
    """A rank's process; machine: its host and its process table, which containers on one host do
    not share.
    """

    host: str
    pid: int
    machine: str

    @property
    def is_dead(self) -> bool:
        """Whether it is known to be: only of processes on this machine."""
        return self._state() in ("", "Z", "X")

    @property
    def is_stopped(self) -> bool:
        """Whether it is known to be stopped, by SIGSTOP or a debugger."""
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
    """The process's state, its parent and more, as /proc lists them after the command (proc(5))."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


@dataclass(frozen=True)
class Report:
    """What a rank says of itself, with the fields of `Progress`; step: how many it has taken, -1
    before the run.
    """

    state: State
    step: int = 0
    groups: dict[str, tuple[str, list[int], Entered]] = field(default_factory=dict)
    waits_in: Entered | None = None
    waited_seconds: float = 0.0
    timeout_seconds: float = math.inf
    recent: dict[str, dict[str, str]] = field(default_factory=dict)
    main_thread_is_in: str = ""

    @classmethod
    def of(cls, state: State, step: int, progress: Progress) -> "Report":
        # After a failure nothing is pending: the collective that failed is the last one.
        waits_in = progress.waits_in
        if waits_in is None and state == "waited":
            waits_in = progress.latest
        return cls(
            state,
            step,
            progress.groups,
            waits_in,
            waited_seconds=progress.waited_seconds,
            timeout_seconds=progress.timeout_seconds,
            recent=dict(progress.recent),
            main_thread_is_in=main_thread_is_in(),
        )

    @classmethod
    def from_text(cls, text: str) -> "Report":
        raw = json.loads(text)
        for name, (about, ranks, last) in raw["groups"].items():
            raw["groups"][name] = (about, ranks, Entered(*last))
        raw["waits_in"] = Entered(*raw["waits_in"]) if raw["waits_in"] else None
        return cls(**raw)

    def to_text(self) -> str:
        return json.dumps(asdict(self))


class Board:
    """The ranks' reports in the store, and what the ranks tell each other of them."""

    def __init__(self, store: dist.Store, prefix: str, rank: int, size: int):  # type: ignore[name-defined]
        self._store = store
        self._prefix = prefix
        self._key = f"{prefix}/rank/{rank}"
        self._keys = [f"{prefix}/rank/{other}" for other in range(size)]
        self._number = 0  # of this rank's report: a rank that lives writes ever new ones
        self._has_answered = False
        self._lock = threading.Lock()
        self._store.set(self._key, "")
        if rank == 0:
            self._store.set(f"{prefix}/{EVENT}", "")
            self._store.set(f"{prefix}/{STALL}", "")

    def report(self, report: Report) -> None:
        """Replace this rank's report; an answer to a failure is kept."""
        with self._lock:  # the main thread and the watchdog's both report
            if report.state == "alive" and self._has_answered:
                return
            self._has_answered = report.state != "alive"
            self._number += 1
            self._store.set(self._key, f"{self._number} {report.to_text()}")

    def text_of(self, rank: int) -> str:
        """A rank's report as it stands in the store, numbered; "" before its first."""
        return str(self._store.get(self._keys[rank]).decode())

    def texts(self) -> list[str]:
        return [text.decode() for text in self._store.multi_get(self._keys)]

    def poll(self) -> tuple[str, str]:
        """What has failed on any rank, "" for nothing; and what `Heartbeat` says of a stall."""
        event, stall = self._store.multi_get([f"{self._prefix}/{name}" for name in (EVENT, STALL)])
        return event.decode(), stall.decode()

    def announce(self, event: str) -> None:
        """Ask every rank to answer; the first of several events stays."""
        self._store.compare_set(f"{self._prefix}/{EVENT}", "", event)

    def change_stall(self, before: str, after: str) -> bool:
        """Replace what is said of a stall, unless another rank has done so already."""
        return self._store.compare_set(f"{self._prefix}/{STALL}", before, after) == after.encode()

    def is_first_reader(self) -> bool:
        """Whether no rank has asked this before: that one decides on the verdict."""
        return self._store.add(f"{self._prefix}/readers", 1) == 1

    def verdict_text(self) -> str:
        """The verdict of the first reader; "" while there is none."""
        key = f"{self._prefix}/{VERDICT}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def set_verdict(self, text: str) -> None:
        self._store.set(f"{self._prefix}/{VERDICT}", text)


def parsed(text: str) -> Report | None:
    """A report as it stands in the store; None before a rank's first."""
    return Report.from_text(text.partition(" ")[2]) if text else None


# --- this rank's threads


def main_thread_is_in() -> str:
    """The main thread's innermost function that is not a library's, as `loss_sum (task.py, line
    12)`; "" for none.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    places = traceback.extract_stack(frame) if frame is not None else []
    for place in reversed(places):
        is_library = "-packages" in place.filename
        if not is_library and not place.filename.startswith((*_LIBRARIES, "<")):
            return f"{place.name} ({Path(place.filename).name}, line {place.lineno})"
    return ""


def stacks_of_all_threads() -> str:
    """The stacks as faulthandler prints them, innermost function first, and the threads' names."""
    # In memory: a full disk is no reason to have none.
    with os.fdopen(os.memfd_create("stacks"), "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read().decode(errors="replace")
    names = "".join(
        f"{thread.ident or 0:#018x} {thread.name}\n" for thread in threading.enumerate()
    )
    when = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"process {os.getpid()}, {when}, threads:\n{names}\n{stacks}"
