"""What each rank reports of itself in the store, and by the reports: who waits for whom in what."""

import json
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

# alive: nothing has failed as far as this rank knows. In answer to a failure: its collective failed
# or timed out; it failed by itself; its training runs; it has left the run in order.
State = Literal["alive", "waited", "failed", "runs", "left"]

# Collectives per group that ranks tell each other. Assumed: a rank is no further ahead of one that
# waits for it.
RECENT = 8

POLLING = re.compile("pt_|gloo|NCCL|cuda")  # names of threads

WAITING_MODULES = {"bdb", "pydevd", "filelock"}  # the last for another process, however long

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})


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
    def state_and_parent(self) -> tuple[str, str]:
        """As proc(5) has them: T is stopped, Z and X are dead; ("", "") on another machine."""
        if self.machine != Process.this().machine:
            return "", ""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            return fields[0], fields[1]
        except OSError:
            return "X", ""

    @property
    def is_dead(self) -> bool:
        return self.state_and_parent[0] in ("Z", "X")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Entered(NamedTuple):
    """A collective: the number in its group, and what it is."""

    group: str
    number: int
    operation: str


class Group(NamedTuple):
    """A process group, by torch's description, and {number: operation} of its last collectives."""

    about: str
    recent: dict[str, str]

    @property
    def last(self) -> int:
        return int(next(reversed(self.recent)))


@dataclass(frozen=True)
class Report:
    """What a rank says of itself. waits_in: its first unfinished collective, or its last one."""

    state: State
    step: int = 0
    groups: dict[str, Group] = field(default_factory=dict)
    waits_in: Entered | None = None
    waited_seconds: float = 0.0
    timeout_seconds: float = math.inf  # how long that one may take
    main_thread_is_in: str = ""
    idle_seconds: float = 0.0  # for how long the process has done nothing

    @classmethod
    def read(cls, state: State, step: int, recorded: dict[str, Any], leave_out: str) -> "Report":
        """By a `flight_recorder.dump`. leave_out: the group of another thread, by name."""
        entries = [entry for recorder in recorded.values() for entry in recorder.get("entries", ())]
        entries = [e for e in entries if not e["is_p2p"] and e["process_group"][0] != leave_out]
        groups: dict[str, Group] = {}
        waits_in = latest = None
        waited_seconds = 0.0
        timeout_seconds = math.inf
        for entry in sorted(entries, key=lambda entry: entry["time_created_ns"]):
            name, about = entry["process_group"]
            latest = Entered(name, entry["collective_seq_id"], entry["profiling_name"])
            recent = groups.setdefault(name, Group(about, {})).recent
            recent[str(latest.number)] = latest.operation
            if len(recent) > RECENT:
                del recent[next(iter(recent))]
            if waits_in is None and not entry["retired"] and entry["state"] != "completed":
                waits_in = latest
                waited_seconds = (time.time_ns() - entry["time_created_ns"]) / 1e9
                timeout_seconds = entry.get("timeout_ms", math.inf) / 1e3
        if state == "waited":
            waits_in = waits_in or latest
        place = main_thread_is_in()
        return cls(state, step, groups, waits_in, waited_seconds, timeout_seconds, place)

    @classmethod
    def from_text(cls, text: str) -> "Report | None":
        """None for "", which stands for no report."""
        if not text:
            return None
        raw = json.loads(text)
        raw["groups"] = {name: Group(*group) for name, group in raw["groups"].items()}
        raw["waits_in"] = Entered(*raw["waits_in"]) if raw["waits_in"] else None
        return cls(**raw)

    def to_text(self) -> str:
        return json.dumps(asdict(self))


Reports = Mapping[int, Report | None]  # by rank; None for one that is silent


class Board:
    """The ranks' reports in the store, under keys that exist from the start: reading never waits.

    One request reads all. beat/RANK: while nothing has failed, "TIME REPORT"; answer/RANK: in
    answer to a failure; event: what has failed; stall: see `Heartbeat`. "" stands for nothing.
    """

    def __init__(self, store: dist.Store, rank: int, size: int):  # type: ignore[name-defined]
        self.store = store
        self._rank = rank
        self._size = size
        keys = [f"beat/{rank}", f"answer/{rank}"]
        if rank == 0:
            keys += ["event", "stall"]
        for key in keys:
            store.set(key, "")

    def announce(self, event: str) -> None:
        """Ask every rank to answer; the first of several events stays."""
        self.store.compare_set("event", "", event)

    def beat(self, report: Report, now: float) -> None:
        self.store.set(f"beat/{self._rank}", f"{now} {report.to_text()}")

    def beats(self, ranks: Sequence[int] = ()) -> list[str]:
        """Of these ranks, or of all."""
        keys = [f"beat/{rank}" for rank in ranks or range(self._size)]
        return [text.decode() for text in self.store.multi_get(keys)]

    def answer(self, report: Report) -> None:
        self.store.set(f"answer/{self._rank}", report.to_text())

    def answers(self) -> dict[int, Report | None]:
        texts = self.store.multi_get([f"answer/{rank}" for rank in range(self._size)])
        return {rank: Report.from_text(text.decode()) for rank, text in enumerate(texts)}


class Verdict(NamedTuple):
    """silent: ranks without an answer; hanging: that keep others waiting; [] if one failed."""

    silent: list[int] = []  # noqa: RUF012
    hanging: list[int] = []  # noqa: RUF012
    where: str = ""  # they wait, in one line

    @property
    def at_fault(self) -> list[int]:
        return sorted(self.silent + self.hanging)


def judge(reports: Reports, timed_out: bool) -> Verdict:
    """Who is at fault, by every rank's report.

    A rank hangs if it waits in no collective, and others are in one that it has not entered. Where
    torch records no collectives, or a rank is alone, it is the one whose own does not time out.
    """
    answered = {rank: report for rank, report in reports.items() if report is not None}
    if any(report.state == "failed" for report in answered.values()):
        return Verdict()
    hanging = []
    behind = ranks_behind(answered)
    for rank, report in answered.items():
        runs = report.state == "runs" and report.waits_in is None
        if timed_out and runs and (rank in behind or not report.groups):
            hanging.append(rank)
    silent = [rank for rank in reports if rank not in answered]
    places = where_they_wait(reports) or "; ".join(_place(answered[rank]) for rank in hanging)
    return Verdict(silent, hanging, places)


def common_verdict(
    board: Board, timed_out: bool, processes: Sequence[Process], answer_seconds: float
) -> Verdict:
    """The verdict of the first rank that asks, which gives the others `answer_seconds`."""
    store = board.store
    if store.add("readers", 1) > 1 and is_true_within(
        2 * answer_seconds, lambda: bool(store.check(["verdict"]))
    ):
        return Verdict(*json.loads(store.get("verdict")))

    def is_clear() -> bool:
        """Whether no answer that is still to come can change the verdict."""
        reports = board.answers()
        answered = [report for report in reports.values() if report is not None]
        if any(report.state == "failed" for report in answered):
            return True
        if timed_out and any(report.state == "runs" and not report.groups for report in answered):
            return False
        return all(report or processes[rank].is_dead for rank, report in reports.items())

    is_true_within(answer_seconds, is_clear)
    verdict = judge(board.answers(), timed_out)
    store.set("verdict", json.dumps(verdict))
    return verdict


def is_true_within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether it becomes true; asked ever less often, down to once a second."""
    deadline = time.monotonic() + seconds
    pause = 0.1
    while not condition():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, 1.0)
    return True


def ranks_behind(answered: Mapping[int, Report]) -> set[int]:
    """The ranks that have not entered a collective of a common group that another one has."""
    furthest: Counter[str] = Counter()
    of_all_ranks = set()
    for report in answered.values():
        for name, group in report.groups.items():
            furthest[name] = max(furthest[name], group.last)
            if group.about == "default_pg":
                of_all_ranks.add(name)
    behind = set()
    for rank, report in answered.items():
        for name, last in furthest.items():
            mine = report.groups.get(name)
            # Without a record it is no member, or has entered none.
            is_member = mine is not None or name in of_all_ranks
            if is_member and (mine.last if mine else 0) < last:
                behind.add(rank)
    return behind


def have_parted(reports: Reports) -> bool:
    """Whether two ranks have entered different collectives of one number, which never meet."""
    operations: dict[tuple[str, str], str] = {}
    for report in reports.values():
        for name, group in report.groups.items() if report is not None else ():
            for number, operation in group.recent.items():
                if operations.setdefault((name, number), operation) != operation:
                    return True
    return False


def where_they_wait(reports: Reports, processes: Sequence[Process] = ()) -> str:
    """In which collective most ranks wait, and what the others do; "" if nobody waits."""
    waits = [report.waits_in for report in reports.values() if report and report.waits_in]
    if not waits:
        return ""
    wait = Counter(waits).most_common(1)[0][0]
    states: dict[tuple[int, str], list[int]] = {}
    waited = 0.0
    for rank, report in reports.items():
        if report is not None and report.waits_in == wait:
            waited = max(waited, report.waited_seconds)
        state = _state_of(report, wait, processes and processes[rank])
        states.setdefault(state, []).append(rank)
    parts = []
    for (order, text), ranks in sorted(states.items()):
        line = f"{text}: {ranks_text(ranks)}"
        if order == WAITS:
            since = f"{waited:.0f} s " if waited else ""
            line = f"waiting {since}{line} of {len(reports)}"
        elif processes:
            shown = [str(processes[rank]) for rank in ranks[:2]] + ["..."] * (len(ranks) > 2)
            line += f" ({', '.join(shown)})"
        if order != ARRIVED:
            parts.append(line)
    return "; ".join(parts[:6])


# The order of the states: those that all wait for come before those that wait for them elsewhere.
WAITS, MISSING, ELSEWHERE, ARRIVED = range(4)


def _state_of(report: Report | None, wait: Entered, process: Any) -> tuple[int, str]:
    """What a rank does, where most are in `wait`."""
    if report is None:
        if process and process.state_and_parent[0] in ("T", "t"):
            return MISSING, "stopped (SIGSTOP)"
        return MISSING, "no answer"
    if report.waits_in == wait:
        return WAITS, f"in {_collective_text(wait, report)}"
    place = _place(report)
    group = report.groups.get(wait.group)
    operation = group.recent.get(str(wait.number)) if group else None
    if operation not in (None, wait.operation):
        return MISSING, f"entered {operation} as number {wait.number}, {place}"
    if report.waits_in is not None:
        return ELSEWHERE, f"in {_collective_text(report.waits_in, report)}, {place}"
    entered = group.last if group else 0
    order = ARRIVED if entered >= wait.number else MISSING
    return order, f"not arrived (entered {entered} of them), {place}"


def _place(report: Report) -> str:
    """`in step 5, in loss_sum (task.py, line 12)`."""
    place = f"in step {report.step + 1}" if report.step >= 0 else "at the start"
    return f"{place}, in {report.main_thread_is_in}".removesuffix(", in ")


def _collective_text(entered: Entered, report: Report) -> str:
    """`nccl:all_reduce 7 of group shards`; the report has the group."""
    about = report.groups[entered.group].about
    group = f"group {about}"
    if about == "default_pg":
        group = "the default group"
    elif about in ("", "undefined"):
        group = f"group {entered.group}"
    return f"{entered.operation} {entered.number} of {group}"


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 7`, `ranks 0-6, 8`."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(texts)}"


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
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = [each for each, _ in traceback.walk_stack(frame)]
    modules = {str(each.f_globals.get("__name__")).partition(".")[0] for each in frames}
    is_traced = any(each.f_trace is not None for each in frames)
    return hasattr(sys, "ps1") or is_traced or bool(modules & WAITING_MODULES)


def main_thread_is_in(name: str = "MainThread") -> str:
    """A thread's innermost function outside libraries: `loss_sum (task.py, line 12)`; or ""."""
    idents = [thread.ident for thread in threading.enumerate() if thread.name == name]
    frame = sys._current_frames().get(idents[0] or 0) if idents else None
    places = traceback.extract_stack(frame) if frame is not None else []
    for place in reversed(places):
        is_library = "-packages" in place.filename
        if not is_library and not place.filename.startswith((*_LIBRARIES, "<")):
            return f"{place.name} ({Path(place.filename).name}, line {place.lineno})"
    return ""
