"""What a rank's heartbeat says of it; and by all heartbeats: who is behind, and at which line."""

import math
import os
import platform
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from dist_amp.distributed.process_group import A_DAY
from dist_amp.errors import some_of

RECENT = 8  # collectives per group in a heartbeat. Assumed: no rank is further ahead of another.

POLLING = re.compile("pt_|gloo|NCCL|cuda")  # names of threads
WAITING_MODULES = {"bdb", "pydevd", "filelock"}  # the last for another process, however long
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})


class Process(NamedTuple):
    """A rank's process; machine: its host and process table, which containers do not share."""

    host: str
    pid: int
    machine: str

    @classmethod
    def this(cls) -> "Process":
        path = "/proc/self/ns/pid"
        table = os.readlink(path) if os.path.lexists(path) else ""
        return cls(platform.node(), os.getpid(), f"{platform.node()} {table}")

    @property
    def state(self) -> str:
        """As in proc(5): T is stopped, Z and X are dead; "" on another machine."""
        if self.machine != Process.this().machine:
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
    """A collective: its group by name and by torch's description, and its number in the group."""

    group: str
    about: str
    number: int
    operation: str

    def __str__(self) -> str:
        """`nccl:all_reduce 7 of group shards`."""
        group = f"group {self.about}"
        if self.about == "default_pg":
            group = "the default group"
        elif self.about in ("", "undefined"):
            group = f"group {self.group}"
        return f"{self.operation} {self.number} of {group}"


@dataclass
class Heartbeat:
    """What a rank does.

    state: in answer to a failure, "runs", "waited" if its collective failed, "failed" by an error
    of its own, or "left" in order.
    """

    at: float  # seconds since all ranks began to watch
    step: int = -1  # steps taken; -1 before there is a run
    state: str = ""
    entered: dict[str, dict[int, str]] = field(default_factory=dict)  # {group: {number: operation}}
    waits_in: Entered | None = None  # its first unfinished collective; if it "waited", its last one
    waited_seconds: float = 0.0
    may_wait_long: bool = True  # in that one: its group has no timeout, or torch does not say
    place: str = ""  # the main thread's innermost function outside libraries
    idle_seconds: float = 0.0  # for how long the process has done nothing

    def read(self, recorded: Mapping[str, Any], leave_out: str) -> None:
        """Add the place, and the recorded collectives but for the group of another thread."""
        self.place = main_thread_place()
        entries = [entry for recorder in recorded.values() for entry in recorder.get("entries", ())]
        entries = [e for e in entries if not e["is_p2p"] and e["process_group"][0] != leave_out]
        for entry in sorted(entries, key=lambda entry: entry["time_created_ns"]):
            is_finished = entry["retired"] or entry["state"] == "completed"
            group, about = entry["process_group"]
            last = Entered(group, about, entry["collective_seq_id"], entry["profiling_name"])
            recent = self.entered.setdefault(group, {})
            recent[last.number] = last.operation
            if len(recent) > RECENT:
                del recent[next(iter(recent))]
            if self.waits_in is None and not is_finished:
                self.waits_in = last
                self.waited_seconds = (time.time_ns() - entry["time_created_ns"]) / 1e9
                seconds = entry.get("timeout_ms", math.inf) / 1e3
                self.may_wait_long = seconds >= A_DAY.total_seconds()
        if self.state == "waited" and self.waits_in is None and entries:
            self.waits_in = last

    def last_entered(self, group: str) -> int:
        """The number of its last collective in this group; 0 before the first one."""
        return next(reversed(self.entered.get(group, {0: ""})))

    def is_behind(self, waits: Iterable[Entered]) -> bool:
        """Whether another rank waits in a collective of one of its groups that it has not entered.

        Without a record of a group this rank is no member of it, or has entered none.
        """
        return any(
            wait.number > self.last_entered(wait.group)
            for wait in waits
            if wait.group in self.entered or wait.about == "default_pg"
        )


Heartbeats = Mapping[int, Heartbeat | None]  # by rank; None for one that gives no sign of life


def collectives_in_wait(beats: Heartbeats) -> list[Entered]:
    """Where ranks wait, most of them first."""
    waits = Counter(beat.waits_in for beat in beats.values() if beat and beat.waits_in)
    return [wait for wait, _ in waits.most_common()]


def is_one_missing(beats: Heartbeats) -> bool:
    """Whether ranks wait for one that is silent, behind, or in another collective of one number."""
    waits = collectives_in_wait(beats)
    have_parted = len({(wait.group, wait.number) for wait in waits}) < len(waits)
    return have_parted or any(beat is None or beat.is_behind(waits) for beat in beats.values())


def ranks_at_fault(beats: Heartbeats, is_late: bool) -> tuple[list[int], list[int]]:
    """The ranks that are silent, and those that hang; none if one has failed by itself.

    is_late: a collective took too long. Then a rank hangs that still runs, waits in no collective
    and is behind; where torch records none, or it is alone, it is the one that still runs.
    """
    answered = {rank: beat for rank, beat in beats.items() if beat is not None}
    if any(beat.state == "failed" for beat in answered.values()):
        return [], []
    waits = collectives_in_wait(beats)
    hanging = [
        rank
        for rank, beat in answered.items()
        if is_late and beat.state == "runs" and beat.waits_in is None
        if beat.is_behind(waits) or not beat.entered
    ]
    return sorted(beats.keys() - answered.keys()), hanging


def where_they_wait(beats: Heartbeats, processes: Sequence[Process]) -> str:
    """In which collective most ranks wait, and what the others do; "" if nobody waits."""
    waits = collectives_in_wait(beats)
    if not waits:
        return ""
    ranks_by_activity: dict[tuple[int, str], list[int]] = {}
    for rank, beat in beats.items():
        activity = _activity(beat, waits[0], processes[rank])
        ranks_by_activity.setdefault(activity, []).append(rank)
    parts = []
    for (order, text), ranks in sorted(ranks_by_activity.items()):
        if order == WAITS:
            waited = max(beat.waited_seconds for rank in ranks if (beat := beats[rank]))
            shown = some_of([str(rank) for rank in ranks])
            parts.append(f"waiting {waited:.0f} s in {text}: rank {shown} of {len(beats)}")
        elif order != ARRIVED:
            shown = some_of([f"{rank} ({processes[rank]})" for rank in ranks])
            parts.append(f"{text}: rank {shown}")
    return "; ".join(parts[:6])


# Those that all wait for come before those that wait for them elsewhere.
WAITS, MISSING, ELSEWHERE, ARRIVED = range(4)


def _activity(beat: Heartbeat | None, wait: Entered, process: Process) -> tuple[int, str]:
    """What a rank does while most wait in `wait`."""
    if not (beat and beat.state) and process.state in ("T", "t"):
        return MISSING, "stopped (SIGSTOP)"
    if beat is None:
        return MISSING, "no answer"
    if beat.waits_in == wait:
        return WAITS, str(wait)
    place = where_it_stands(beat)
    operation = beat.entered.get(wait.group, {}).get(wait.number, wait.operation)
    if operation != wait.operation:
        return MISSING, f"entered {operation} as number {wait.number}, {place}"
    if beat.waits_in is not None:
        return ELSEWHERE, f"in {beat.waits_in}, {place}"
    last = beat.last_entered(wait.group)
    order = ARRIVED if last >= wait.number else MISSING
    return order, f"not arrived (entered {last} of them), {place}"


def where_it_stands(beat: Heartbeat) -> str:
    """`in step 5, in loss_sum (task.py, line 12)`."""
    place = f"in step {beat.step + 1}" if beat.step >= 0 else "at the start"
    return f"{place}, in {beat.place}".removesuffix(", in ")


def busy_seconds(process: str = "self") -> float:
    """Processor seconds of this process and all that it started, but of threads that only poll."""
    seconds = 0.0
    try:
        for thread in Path("/proc", process, "task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                name = (thread / "comm").read_text()
                is_own = int(thread.name) == threading.get_native_id() or POLLING.match(name)
                if process != "self" or not is_own:
                    seconds += int((thread / "schedstat").read_text().split()[0]) / 1e9
                    seconds += sum(map(busy_seconds, (thread / "children").read_text().split()))
    except (OSError, ValueError):
        seconds = 0.0
    return seconds or time.process_time() * (process == "self")  # without these files: its own


def is_kept_waiting() -> bool:
    """Whether a person keeps the main thread, at a prompt or in a debugger, or a file's lock."""
    frames = [frame for frame, _ in _main_thread_stack()]
    modules = {str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames}
    is_traced = any(frame.f_trace is not None for frame in frames)
    return hasattr(sys, "ps1") or is_traced or bool(modules & WAITING_MODULES)


def main_thread_place() -> str:
    """The main thread's innermost function outside libraries: `loss_sum (task.py, line 12)`."""
    for frame, line in _main_thread_stack():
        path = frame.f_code.co_filename
        if "-packages" not in path and not path.startswith((*LIBRARIES, "<")):
            return f"{frame.f_code.co_name} ({Path(path).name}, line {line})"
    return ""


def _main_thread_stack() -> list[tuple[FrameType, int]]:
    """(frame, line), the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return list(traceback.walk_stack(frame)) if frame is not None else []
