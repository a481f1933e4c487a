"""What each rank reports of itself in the store, and by the reports: who waits for whom in what."""

import json
import math
import os
import platform
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch.distributed as dist

from dist_amp.distributed.flight_recorder import Entered, Progress

# alive: nothing has failed as far as this rank knows. In answer to a failure: its collective failed
# or timed out; it failed by itself; its training runs; it has left the run in order.
State = Literal["alive", "waited", "failed", "runs", "left"]

PLURAL = {"is": "are", "does": "do", "has": "have"}

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})


class Process(NamedTuple):
    """A rank's process; machine: its host and process table, which containers do not share."""

    host: str
    pid: int
    machine: str

    @classmethod
    def this(cls) -> "Process":
        table = ""
        with suppress(OSError):  # not Linux
            table = os.readlink("/proc/self/ns/pid")
        return cls(platform.node(), os.getpid(), f"{platform.node()} {table}")

    def fields(self) -> list[str]:
        """Its state, its parent and more, as /proc lists them after the command: proc(5)."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()

    def is_in_state(self, letters: str) -> bool:
        """Whether it is known to be: only of processes on this machine. X: dead, T: stopped."""
        if self.machine != Process.this().machine or not Path("/proc/self").exists():
            return False
        try:
            return self.fields()[0] in letters
        except OSError:
            return "X" in letters

    @property
    def is_dead(self) -> bool:
        return self.is_in_state("ZX")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Report:
    """What a rank says of itself; step: how many it has taken, -1 before the run.

    The rest is from the flight recorder's `Progress`. After a failure nothing is pending:
    `waits_in` is then the last collective.
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
        waits_in = progress.waits_in
        if waits_in is None and state == "waited":
            waits_in = progress.latest
        waited = progress.waited_seconds
        timeout = progress.timeout_seconds
        recent = dict(progress.recent)
        place = main_thread_is_in()
        return cls(state, step, progress.groups, waits_in, waited, timeout, recent, place)

    def entered(self, wait: Entered) -> int:
        """The number of this rank's last collective in the group of another one; 0 for none."""
        return self.groups[wait.group][2].number if wait.group in self.groups else 0

    @classmethod
    def from_text(cls, text: str) -> "Report":
        raw = json.loads(text)
        for name, (about, ranks, last) in raw["groups"].items():
            raw["groups"][name] = (about, ranks, Entered(*last))
        raw["waits_in"] = Entered(*raw["waits_in"]) if raw["waits_in"] else None
        return cls(**raw)

    def to_text(self) -> str:
        return json.dumps(asdict(self))


Reports = Mapping[int, Report | None]  # by rank; None for one that is silent


class Board:
    """The ranks' reports in the store, under keys that exist from the start: reading never waits.

    One request reads all. `event`: what has failed, "" for nothing; `stall`: see `Heartbeat`.
    """

    def __init__(self, store: dist.Store, rank: int, size: int):  # type: ignore[name-defined]
        self.store = store
        self._key = f"rank/{rank}"
        self._keys = [f"rank/{other}" for other in range(size)]
        self._number = 0  # of this rank's report: a rank that lives writes ever new ones
        self._has_answered = False
        self._lock = threading.Lock()
        store.set(self._key, "")
        if rank == 0:
            store.set("event", "")
            store.set("stall", "")

    def report(self, report: Report) -> None:
        """Replace this rank's report; an answer to a failure is kept."""
        with self._lock:  # the main thread and the watchdog's both report
            if report.state == "alive" and self._has_answered:
                return
            self._has_answered = report.state != "alive"
            self._number += 1
            self.store.set(self._key, f"{self._number} {report.to_text()}")

    def texts(self) -> list[str]:
        """Every rank's report as it stands in the store, numbered; "" before the first."""
        return [text.decode() for text in self.store.multi_get(self._keys)]

    def text_of(self, rank: int) -> str:
        return str(self.store.get(self._keys[rank]).decode())


def parsed(text: str) -> Report | None:
    """A report as it stands in the store; None before a rank's first."""
    return Report.from_text(text.partition(" ")[2]) if text else None


# --- who is at fault


@dataclass(frozen=True)
class Verdict:
    """silent: ranks that did not answer; hanging: those that live and keep the others waiting."""

    silent: list[int]
    hanging: list[int]
    where: str = ""  # they wait, in one line
    by_itself: bool = False  # a rank has failed by itself, and reports its own error

    @property
    def at_fault(self) -> list[int]:
        return [] if self.by_itself else sorted(self.silent + self.hanging)


def judge(reports: Reports, timed_out: bool) -> Verdict:
    """Who is at fault, by every rank's report."""
    answered = answers(reports)
    silent = [rank for rank in reports if rank not in answered]
    if any(report.state == "failed" for report in answered.values()):
        return Verdict(silent, [], by_itself=True)
    # A rank hangs if it waits in no collective, and others are in one that it has not entered; the
    # frame it is in says nothing, since under NCCL calls return at once. Where torch records no
    # collectives, it is the one whose own does not time out.
    behind = ranks_behind(answered)
    hanging = []
    for rank, report in answered.items():
        runs = report.state == "runs" and report.waits_in is None
        if timed_out and runs and (rank in behind or not report.groups):
            hanging.append(rank)
    return Verdict(silent, hanging, where_they_wait(reports))


def common_verdict(
    board: Board, timed_out: bool, processes: Sequence[Process], answer_seconds: float
) -> Verdict:
    """The verdict of the first rank that asks, which gives the others so long to answer."""
    store = board.store
    deadline = time.monotonic() + answer_seconds
    pause = 0.1
    if store.add("readers", 1) > 1:
        while not store.check(["verdict"]) and time.monotonic() < deadline + answer_seconds:
            time.sleep(pause)
            pause *= 2
        if store.check(["verdict"]):
            return Verdict(**json.loads(store.get("verdict")))
    while True:
        is_last = time.monotonic() >= deadline
        reports = {rank: parsed(text) for rank, text in enumerate(board.texts())}
        for rank, report in reports.items():
            if report is not None and report.state == "alive":
                reports[rank] = None
        if is_last or not _is_unclear(reports, timed_out, processes):
            break
        time.sleep(min(pause, max(deadline - time.monotonic(), 0.0)))
        pause *= 2
    verdict = judge(reports, timed_out)
    store.set("verdict", json.dumps(asdict(verdict)))
    return verdict


def _is_unclear(reports: Reports, timed_out: bool, processes: Sequence[Process]) -> bool:
    """Whether an answer that is still to come may change the verdict."""
    answered = answers(reports).values()
    if any(report.state == "failed" for report in answered):
        return False
    if timed_out and any(report.state == "runs" and not report.groups for report in answered):
        return True
    return any(report is None and not processes[rank].is_dead for rank, report in reports.items())


# --- who waits for whom


def answers(reports: Reports) -> dict[int, Report]:
    return {rank: report for rank, report in reports.items() if report is not None}


def ranks_behind(answered: Mapping[int, Report]) -> set[int]:
    """The ranks that have not entered a collective of a common group that another one has."""
    furthest: Counter[str] = Counter()
    for report in answered.values():
        for name, (_, _, last) in report.groups.items():
            furthest[name] = max(furthest[name], last.number)
    return {
        rank
        for rank, report in answered.items()
        if any(last.number < furthest[name] for name, (_, _, last) in report.groups.items())
    }


class Gathering(NamedTuple):
    """A collective in which ranks wait for those that are missing, or entered another instead."""

    wait: Entered
    group: str
    waiting: list[int]
    reports: list[Report]  # of those that wait
    in_another: dict[int, str]  # rank: the operation
    missing: list[int]


def gathering(reports: Reports) -> Gathering | None:
    """Where most ranks wait, preferably for one that waits nowhere; None if nobody waits."""
    answered = answers(reports)
    culprits = {rank for rank in reports if rank not in answered}
    culprits |= {rank for rank in ranks_behind(answered) if answered[rank].waits_in is None}
    waits = dict.fromkeys(report.waits_in for report in answered.values() if report.waits_in)
    gatherings = [_gathering(wait, reports, answered) for wait in waits if wait is not None]
    return max(
        gatherings,
        key=lambda each: (not culprits.isdisjoint(each.missing), len(each.waiting)),
        default=None,
    )


def _gathering(wait: Entered, reports: Reports, answered: Mapping[int, Report]) -> Gathering:
    entered = [rank for rank, report in answered.items() if report.entered(wait) >= wait.number]
    waiting: list[int] = []
    in_another: dict[int, str] = {}
    for rank in entered:
        report = answered[rank]
        operation = report.recent.get(wait.group, {}).get(str(wait.number), wait.operation)
        is_in_it = report.waits_in is not None and report.waits_in[:2] == wait[:2]
        if is_in_it and report.waits_in is not None:
            operation = report.waits_in.operation
        if operation != wait.operation:
            in_another[rank] = operation
        elif is_in_it:
            waiting.append(rank)
    about, members, _ = answered[waiting[0]].groups[wait.group]
    missing = [rank for rank in members or sorted(reports) if rank not in entered]
    group = group_text(wait.group, about)
    of_waiting = [answered[rank] for rank in waiting]
    return Gathering(wait, group, waiting, of_waiting, in_another, missing)


# --- in one line


def where_they_wait(reports: Reports, processes: Sequence[Process] = ()) -> str:
    """Who waits in which collective, who has not entered it, and what those do; "" if nobody waits.

    processes: of all ranks, to add those of the ranks that the others wait for.
    """
    gathered = gathering(reports)
    if gathered is None:
        return ""
    waited = max(report.waited_seconds for report in gathered.reports)
    verb, has = ("waits", "has") if len(gathered.waiting) == 1 else ("wait", "have")
    if waited:
        verb = f"{has} waited {waited:.0f} s"
    wait = gathered.wait
    who = f"{ranks_text(gathered.waiting)} of {len(reports)}"
    parts = [f"{who} {verb} in {wait.operation} {wait.number} of {gathered.group}"]
    states: dict[str, list[int]] = {}
    for rank in (*gathered.in_another, *gathered.missing):
        state = _state_of(rank, reports[rank], gathered, processes)
        states.setdefault(state, []).append(rank)
    described = list(states.items())
    for state, ranks in described[:4]:
        text = ranks_text(ranks)
        if processes:
            shown = [str(processes[rank]) for rank in ranks[:2]] + ["..."] * (len(ranks) > 2)
            text += f" ({', '.join(shown)})"
        if len(ranks) > 1:
            verb, _, rest = state.partition(" ")
            state = f"{PLURAL.get(verb, verb)} {rest}"
        parts.append(f"{text} {state}")
    if undescribed := sum(len(ranks) for _, ranks in described[4:]):
        parts.append(f"{undescribed} more are missing")
    return "; ".join(parts)


def _state_of(
    rank: int, report: Report | None, gathered: Gathering, processes: Sequence[Process]
) -> str:
    """What a rank does instead of entering the collective."""
    if report is None:
        is_stopped = bool(processes) and processes[rank].is_in_state("Tt")
        return "is stopped (SIGSTOP)" if is_stopped else "does not answer"
    place = f"step {report.step + 1}" if report.step >= 0 else "the start"
    if report.main_thread_is_in:
        place += f", in {report.main_thread_is_in}"
    wait = gathered.wait
    if rank in gathered.in_another:
        instead = gathered.in_another[rank]
        return f"entered {instead} as number {wait.number} instead, and is in {place}"
    if report.waits_in is not None:
        about = group_text(report.waits_in.group, report.groups[report.waits_in.group][0])
        return f"is in {report.waits_in.operation} {report.waits_in.number} of {about}, in {place}"
    return f"has not arrived (entered {report.entered(wait)} of them), in {place}"


def group_text(name: str, about: str) -> str:
    """about: torch's description of the group."""
    if about == "default_pg":
        return "the default group"
    return f"group {name if about in ('', 'undefined') else about}"


def ranks_text(ranks: Collection[int]) -> str:
    """`rank 7`, `ranks 0-6, 8`; at most eight ranges; of two in a row both are shown."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    texts = []
    for each in ranges[:8]:
        is_long = len(each) > 2
        texts.append(f"{each[0]}-{each[-1]}" if is_long else ", ".join(map(str, each)))
    if len(ranges) > 8:
        texts.append("...")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(texts)}"


# --- this rank's threads


def main_thread_is_in() -> str:
    """The main thread's innermost function outside libraries: `loss_sum (task.py, line 12)`."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    places = traceback.extract_stack(frame) if frame is not None else []
    for place in reversed(places):
        is_library = "-packages" in place.filename
        if not is_library and not place.filename.startswith((*_LIBRARIES, "<")):
            return f"{place.name} ({Path(place.filename).name}, line {place.lineno})"
    return ""
