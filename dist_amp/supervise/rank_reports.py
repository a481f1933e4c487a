"""The heartbeats of ranks, and what they show together: which rank is missing, and where it is.

On each rank, torch's flight recorder numbers the collectives of each process group. If ranks wait
in number 14 of a group, a rank that has only entered its number 13 is behind.
"""

import json
import math
import os
import platform
import re
import sys
import sysconfig
import threading
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from dist_amp.distributed.process_group import A_DAY
from dist_amp.errors import some_of

# WAITED: its collective failed, or it has the verdict. FAILED: by its own error. LEFT: finished.
RUNS, WAITED, FAILED, LEFT = "runs", "waited", "failed", "left"

RECENT = 8  # collectives per group in a heartbeat. Assumed: no rank is further ahead of another.

POLLING = re.compile("pt_|gloo|NCCL|cuda")  # names of threads that use CPU time but only poll
WAITING_MODULES = {"bdb", "pydevd", "filelock"}  # debuggers; waiting for another process's lock
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})


@cache
def this_machine() -> str:
    """Host and pid namespace, since containers on one host do not see each other's processes."""
    path = "/proc/self/ns/pid"
    return f"{platform.node()} {os.readlink(path) if os.path.lexists(path) else ''}"


class Process(NamedTuple):
    """A rank's process. machine: its `this_machine`."""

    host: str
    pid: int
    machine: str

    @classmethod
    def this(cls) -> "Process":
        return cls(platform.node(), os.getpid(), this_machine())

    @property
    def state(self) -> str:
        """The state as in proc(5): T is stopped, Z and X are dead; "" for another machine's."""
        if self.machine != this_machine():
            return ""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "X"

    @property
    def is_dead(self) -> bool:
        return self.state in ("Z", "X")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Entered(NamedTuple):
    """A collective that a rank has entered."""

    group: str  # name of the process group
    description: str  # group_desc of the process group
    number: int  # counts the group's collectives, from 1
    operation: str

    def __str__(self) -> str:
        """A text such as `nccl:all_reduce 7 of group shards`."""
        if self.description == "default_pg":
            return f"{self.operation} {self.number} of the default group"
        name = self.group if self.description in ("", "undefined") else self.description
        return f"{self.operation} {self.number} of group {name}"


@dataclass
class Heartbeat:
    """What a rank writes to the store about itself."""

    at: float  # when it was written: seconds since all ranks began to watch
    step: int = -1  # steps taken; -1 before there is a run
    state: str = RUNS
    entered: dict[str, dict[int, str]] = field(default_factory=dict)  # {group: {number: operation}}
    waits_in: Entered | None = None  # its first unfinished collective; else, if WAITED, its last
    waited_seconds: float = 0.0  # in waits_in
    may_wait_long: bool = True  # waits_in has in effect no timeout, or torch does not tell it
    place: str = ""  # the main thread's innermost function outside libraries

    def read(self, leave_out: str) -> None:
        """Fill in the place and the collectives. leave_out: name of a group that is not watched."""
        self.place = main_thread_place()
        entries = [e for e in recorded_collectives() if not e["is_p2p"]]
        entries = [e for e in entries if e["process_group"][0] != leave_out]
        for entry in sorted(entries, key=lambda entry: entry["time_created_ns"]):
            group, description = entry["process_group"]
            last = Entered(group, description, entry["collective_seq_id"], entry["profiling_name"])
            recent = self.entered.setdefault(group, {})
            recent[last.number] = last.operation
            if len(recent) > RECENT:
                del recent[next(iter(recent))]
            is_finished = entry["retired"] or entry["state"] == "completed"
            if self.waits_in is None and not is_finished:
                self.waits_in = last
                seconds = entry.get("timeout_ms", math.inf) / 1e3
                self.may_wait_long = seconds >= A_DAY.total_seconds()
        if self.state == WAITED and self.waits_in is None and entries:
            self.waits_in = last

    def last_entered(self, group: str) -> int:
        """The number of the rank's last collective in this group; 0 before the first one."""
        return next(reversed(self.entered.get(group, {0: ""})))

    def is_behind(self, waits: Iterable[Entered]) -> bool:
        """Whether other ranks wait in one of these collectives, which this rank has yet to enter.

        A rank that has entered nothing in a group, other than the default group, may be no member.
        """
        return any(
            wait.number > self.last_entered(wait.group)
            for wait in waits
            if wait.group in self.entered or wait.description == "default_pg"
        )

    def location(self) -> str:
        """A text such as `in step 5, in loss_sum (task.py, line 12)`."""
        place = f"in step {self.step + 1}" if self.step >= 0 else "at the start"
        return f"{place}, in {self.place}".removesuffix(", in ")


Heartbeats = Mapping[int, Heartbeat | None]  # by rank; None: the rank is silent or dead


def awaited_collectives(beats: Heartbeats) -> list[Entered]:
    """The collectives that ranks wait in, that of the most ranks first."""
    waits = Counter(beat.waits_in for beat in beats.values() if beat and beat.waits_in)
    return [wait for wait, _ in waits.most_common()]


def is_rank_missing(beats: Heartbeats) -> bool:
    """Whether a rank is silent or behind, or ranks wait in different collectives as number N."""
    waits = awaited_collectives(beats)
    have_diverged = len({(wait.group, wait.number) for wait in waits}) < len(waits)
    return have_diverged or any(beat is None or beat.is_behind(waits) for beat in beats.values())


def ranks_that_hang(beats: Heartbeats) -> list[int]:
    """The ranks that run and are behind, but wait in no collective themselves.

    A single rank can't be behind: it hangs if it runs and waits in no collective.
    """
    waits = awaited_collectives(beats)
    hanging = []
    for rank, beat in beats.items():
        if beat is None or beat.state != RUNS or beat.waits_in is not None:
            continue
        if len(beats) == 1 or beat.is_behind(waits):
            hanging.append(rank)
    return hanging


def summary_of_waits(beats: Heartbeats, processes: Sequence[Process]) -> str:
    """Text: the collective that most ranks wait in, and what other ranks do; "" if none waits."""
    waits = awaited_collectives(beats)
    if not waits:
        return ""
    waiting = {rank: beat for rank, beat in beats.items() if beat and beat.waits_in == waits[0]}
    seconds = max(beat.waited_seconds for beat in waiting.values())
    ranks_by_text: dict[str, list[str]] = {}
    # First the ranks that wait in no collective, since the others wait for them.
    for rank, beat in sorted(beats.items(), key=lambda item: bool(item[1] and item[1].waits_in)):
        if rank not in waiting and (text := activity(beat, waits[0], processes[rank])):
            ranks_by_text.setdefault(text, []).append(f"{rank} ({processes[rank]})")
    shown = some_of([str(rank) for rank in waiting])
    waited = f"waiting {seconds:.0f} s" if seconds else "waiting"
    parts = [f"{waited} in {waits[0]}: rank {shown} of {len(beats)}"]
    parts += [f"{text}: rank {some_of(ranks)}" for text, ranks in ranks_by_text.items()]
    return "; ".join(parts[:6])


def activity(beat: Heartbeat | None, wait: Entered, process: Process) -> str:
    """What a rank does while most ranks wait in `wait`; "" if it has entered `wait` too."""
    if (beat is None or beat.state == RUNS) and process.state in ("T", "t"):
        return "stopped (SIGSTOP)"
    if beat is None:
        return "no answer"
    operation = beat.entered.get(wait.group, {}).get(wait.number, wait.operation)
    if operation != wait.operation:
        return f"entered {operation} as number {wait.number}, {beat.location()}"
    if beat.waits_in is not None:
        return f"in {beat.waits_in}, {beat.location()}"
    last = beat.last_entered(wait.group)
    return f"not arrived (entered {last} of them), {beat.location()}" if last < wait.number else ""


# --- what this process does


def recorded_collectives() -> list[dict[str, Any]]:
    """torch's record of the collectives that this rank has entered; reading 2,000 takes 84 ms."""
    entries = []
    for function in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # NCCL's and gloo's
        with suppress(Exception):  # this torch has no such function, or another format
            read = getattr(torch._C._distributed_c10d, function)  # type: ignore[attr-defined]
            entries += json.loads(read(True, False)).get("entries", [])
    return entries


def busy_seconds() -> float:
    """CPU seconds of this process and its descendants, without this process's polling threads."""
    seconds = 0.0
    processes = ["self"]
    for process in processes:  # the loop appends the children that it finds
        with suppress(OSError):  # it has ended
            for thread in Path("/proc", process, "task").iterdir():
                with suppress(OSError, ValueError):
                    is_own = int(thread.name) == threading.get_native_id()  # the watchdog's
                    polls = is_own or POLLING.match((thread / "comm").read_text())
                    if process != "self" or not polls:
                        seconds += int((thread / "schedstat").read_text().split()[0]) / 1e9
                        processes += (thread / "children").read_text().split()
    return seconds


def is_kept_waiting() -> bool:
    """Whether the main thread may wait for a person (prompt, debugger) or for a file lock."""
    for frame, _ in main_thread_stack():
        module = str(frame.f_globals.get("__name__")).partition(".")[0]
        if frame.f_trace is not None or module in WAITING_MODULES:
            return True
    return hasattr(sys, "ps1")


def main_thread_place() -> str:
    """The main thread's innermost function outside libraries: `loss_sum (task.py, line 12)`."""
    for frame, line in main_thread_stack():
        path = frame.f_code.co_filename
        if "-packages" not in path and not path.startswith((*LIBRARIES, "<")):
            return f"{frame.f_code.co_name} ({Path(path).name}, line {line})"
    return ""


def main_thread_stack() -> Iterator[tuple[FrameType, int]]:
    """Yields (frame, line), the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return traceback.walk_stack(frame) if frame is not None else iter(())
