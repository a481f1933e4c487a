"""Which rank is at fault when a collective fails: what every rank reports in the store.

Every rank asks the store a number of times that does not grow with the number of ranks: its key exists from the start,
so one request reads all keys, and only the first rank that wants a verdict reads them.
"""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch.distributed as dist

from dist_amp.fast.flight_recorder import Entered, Progress
from dist_amp.supervise.liveness import Process

# What a rank reports: its collective failed or timed out; it failed by itself; its training goes on, as far as its
# watchdog knows; it has left the run in order.
State = Literal["waited", "failed", "runs", "left"]
SILENT = ""


@dataclass(frozen=True)
class Report:
    """What a rank says of itself: its step is the number of steps it has taken."""

    state: State
    step: int = 0
    groups: dict[str, tuple[str, list[int], Entered]] = field(default_factory=dict)
    waits_in: Entered | None = None

    @classmethod
    def of(cls, state: State, step: int, progress: Progress) -> "Report":
        # After a failure nothing is pending: the collective that failed is the last one.
        waits_in = progress.waits_in or (progress.latest if state == "waited" else None)
        return cls(state, step, progress.groups, waits_in)

    @classmethod
    def from_text(cls, text: str) -> "Report":
        raw = json.loads(text)
        raw["groups"] = {name: (about, ranks, Entered(*last)) for name, (about, ranks, last) in raw["groups"].items()}
        raw["waits_in"] = Entered(*raw["waits_in"]) if raw["waits_in"] else None
        return cls(**raw)

    def to_text(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Verdict:
    """silent: ranks that did not answer; hanging: those that live and keep the others waiting; where: in one line."""

    silent: list[int]
    hanging: list[int]
    where: str = ""
    by_itself: bool = False  # a rank has failed by itself, and reports its own error

    @property
    def at_fault(self) -> list[int]:
        return [] if self.by_itself else sorted(self.silent + self.hanging)


def judge(reports: Mapping[int, Report | None], timed_out: bool) -> Verdict:
    """Who is at fault, by every rank's report; None for a rank that is silent."""
    answered = {rank: report for rank, report in reports.items() if report is not None}
    silent = [rank for rank, report in reports.items() if report is None]
    if any(report.state == "failed" for report in answered.values()):
        return Verdict(silent, [], by_itself=True)
    furthest: Counter[str] = Counter()
    for report in answered.values():
        for name, (_, _, last) in report.groups.items():
            furthest[name] = max(furthest[name], last.number)
    # By the frame it is in one can't say who hangs: under NCCL calls return at once, and the host may then wait in any
    # of them. A rank hangs if it waits in no collective, and others are in one that it has not entered. Where torch
    # records no collectives, it is the one whose own collective does not time out.
    running = {rank: report for rank, report in answered.items() if report.state == "runs" and report.waits_in is None}
    hanging = [rank for rank, report in running.items() if is_behind(report, furthest) or not report.groups]
    return Verdict(silent, hanging if timed_out else [], where_they_wait(answered, silent, furthest))


def is_behind(report: Report, furthest: Mapping[str, int]) -> bool:
    """Whether another rank has entered a collective of a common group that this one has not."""
    return any(last.number < furthest[name] for name, (_, _, last) in report.groups.items())


def where_they_wait(answered: Mapping[int, Report], silent: Sequence[int], furthest: Mapping[str, int]) -> str:
    """One line: the collective in which most ranks wait, who has not entered it, and what those are in; "" for none."""
    waits = Counter(report.waits_in for report in answered.values() if report.waits_in is not None)
    if not waits:
        return ""
    (group, number, operation), _ = waits.most_common(1)[0]
    waiting = {rank for rank, r in answered.items() if r.waits_in and r.waits_in[:2] == (group, number)}
    others_in_it = {
        rank: r.waits_in for rank in waiting if (r := answered[rank]).waits_in and r.waits_in[2] != operation
    }
    about, members, _ = answered[min(waiting)].groups[group]
    entered = {rank for rank, r in answered.items() if group in r.groups and r.groups[group][2].number >= number}
    missing = [rank for rank in members or [*answered, *silent] if rank not in entered]
    text = f"{_ranks(waiting - others_in_it.keys())} in {operation} {number} of group {about or group}"
    parts = [f"rank {rank} in {wait[2]} there" for rank, wait in others_in_it.items() if wait]
    for rank in sorted(missing)[:4]:
        report = answered.get(rank)
        if report is None:
            parts.append(f"rank {rank} does not answer")
        elif report.waits_in is not None:
            parts.append(f"rank {rank} is in {report.waits_in.operation} {report.waits_in.number} of another group")
        else:
            last = report.groups[group][2].number if group in report.groups else 0
            parts.append(f"rank {rank} has entered {last} of them, in step {report.step + 1}")
    if len(missing) > 4:
        parts.append(f"{len(missing) - 4} more are missing")
    return "; ".join([text, *parts])


def _ranks(ranks: set[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8])) + ", ..." * (len(ranks) > 8)
    return f"rank {shown} waits" if len(ranks) == 1 else f"ranks {shown} wait"


class ReportBoard:
    """The ranks' reports in the store, and the verdict of the first rank that asks for one."""

    def __init__(self, store: dist.Store, prefix: str, rank: int, size: int):  # type: ignore[name-defined]
        self._store, self._prefix, self._rank, self._size = store, prefix, rank, size
        self._store.set(self._report_key(rank), SILENT)  # so that reading it never waits

    def _report_key(self, rank: int) -> str:
        return f"{self._prefix}/report/{rank}"

    @property
    def _event_key(self) -> str:
        return f"{self._prefix}/event"

    def report(self, report: Report) -> None:
        self._store.set(self._report_key(self._rank), report.to_text())

    def has_answered(self, rank: int) -> bool:
        return self._store.get(self._report_key(rank)) != SILENT.encode()

    def announce(self, event: str) -> None:
        """Ask every rank to report; one of several events stays."""
        self._store.compare_set(self._event_key, "", event)

    def event(self) -> str:
        """What has happened on any rank; "" for nothing."""
        return self._store.get(self._event_key).decode() if self._store.check([self._event_key]) else ""

    def verdict(self, timed_out: bool, processes: Sequence[Process], answer_seconds: float) -> Verdict:
        """The ranks' common verdict. answer_seconds: how long the ranks may take to report."""
        key = f"{self._prefix}/verdict"
        if self._store.add(f"{self._prefix}/readers", 1) > 1:
            for pause in _pauses(2 * answer_seconds):
                if self._store.check([key]):
                    return Verdict(**json.loads(self._store.get(key)))
                time.sleep(pause)
        reports: dict[int, Report | None] = {}
        for pause in _pauses(answer_seconds):
            reports = self._reports()
            silent = [rank for rank, report in reports.items() if report is None and not processes[rank].is_dead]
            answered = [report for report in reports.values() if report is not None]
            unclear = timed_out and any(report.state == "runs" and not report.groups for report in answered)
            if any(report.state == "failed" for report in answered) or not (silent or unclear):
                break
            time.sleep(pause)
        verdict = judge(reports, timed_out)
        self._store.set(key, json.dumps(asdict(verdict)))
        return verdict

    def _reports(self) -> dict[int, Report | None]:
        texts = self._store.multi_get([self._report_key(rank) for rank in range(self._size)])
        return {rank: Report.from_text(text.decode()) if text else None for rank, text in enumerate(texts)}


def _pauses(seconds: float) -> list[float]:
    """Growing pauses of so many seconds together, with a last try after them: 7 tries in five seconds."""
    pauses = [0.1]
    while sum(pauses) < seconds:
        pauses.append(min(2 * pauses[-1], max(seconds - sum(pauses), 0.1)))
    return [*pauses, 0.0]
