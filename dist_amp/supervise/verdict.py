"""Which rank is at fault when a collective fails: what every rank reports in the store.

Every rank asks the store a number of times that does not grow with the number of ranks: its key exists from the start,
so one request reads all keys, and only the first rank that wants a verdict reads them.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

from dist_amp.supervise.gathering import Report, ranks_behind, where_they_wait
from dist_amp.supervise.liveness import Process

SILENT = ""


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
    # By the frame it is in one can't say who hangs: under NCCL calls return at once, and the host may then wait in any
    # of them. A rank hangs if it waits in no collective, and others are in one that it has not entered. Where torch
    # records no collectives, it is the one whose own collective does not time out.
    running = {rank: report for rank, report in answered.items() if report.state == "runs" and report.waits_in is None}
    behind = ranks_behind(answered)
    hanging = [rank for rank, report in running.items() if rank in behind or not report.groups]
    return Verdict(silent, hanging if timed_out else [], where_they_wait(reports))


class ReportBoard:
    """The ranks' reports in the store, and the verdict of the first rank that asks for one."""

    def __init__(self, store: dist.Store, prefix: str, rank: int, size: int):  # type: ignore[name-defined]
        self._store, self._prefix, self._rank, self._size = store, prefix, rank, size
        # So that reading them never waits.
        self._store.set(self._report_key(rank), SILENT)
        self._store.set(self._answer_key(rank), SILENT)
        if rank == 0:
            self._store.set(self._event_key, "")
            self._store.set(self._round_key, "")

    def _report_key(self, rank: int) -> str:
        return f"{self._prefix}/report/{rank}"

    @property
    def _event_key(self) -> str:
        return f"{self._prefix}/event"

    def _answer_key(self, rank: int) -> str:
        return f"{self._prefix}/answer/{rank}"

    @property
    def _round_key(self) -> str:
        return f"{self._prefix}/round"

    def report(self, report: Report) -> None:
        self._store.set(self._report_key(self._rank), report.to_text())

    def has_answered(self, rank: int) -> bool:
        return self._store.get(self._report_key(rank)) != SILENT.encode()

    def announce(self, event: str) -> None:
        """Ask every rank to report; one of several events stays."""
        self._store.compare_set(self._event_key, "", event)

    def poll(self) -> tuple[str, str]:
        """What has happened on any rank, "" for nothing; and the current round of `Stalls`."""
        event, current = self._store.multi_get([self._event_key, self._round_key])
        return event.decode(), current.decode()

    def change_round(self, before: str, after: str) -> bool:
        """Replace the current round, unless another rank has done so already."""
        return self._store.compare_set(self._round_key, before, after) == after.encode()

    def answer(self, number: int, report: Report) -> None:
        """This rank's answer in a round."""
        self._store.set(self._answer_key(self._rank), f"{number} {report.to_text()}")

    def answers(self, number: int) -> dict[int, Report | None]:
        """Every rank's answer in a round; None for one that has not answered."""
        texts = self._store.multi_get([self._answer_key(rank) for rank in range(self._size)])
        split = [text.decode().partition(" ") for text in texts]
        return {
            rank: Report.from_text(report) if of == str(number) else None for rank, (of, _, report) in enumerate(split)
        }

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
