"""Who waits in which collective, and for whom; which ranks are at fault when a collective fails."""

import json
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from dist_amp.distributed.flight_recorder import Entered
from dist_amp.supervise.rank_reports import Board, Process, Report, parsed

Reports = Mapping[int, Report | None]  # by rank; None for one that is silent


@dataclass(frozen=True)
class Verdict:
    """silent: ranks that did not answer; hanging: those that live and keep the others waiting;
    where: in one line.
    """

    silent: list[int]
    hanging: list[int]
    where: str = ""
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
    # By the frame it is in one can't say who hangs: under NCCL calls return at once, and the host
    # may then wait in any of them. A rank hangs if it waits in no collective, and others are in one
    # that it has not entered. Where torch records no collectives, it is the one whose own
    # collective does not time out.
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
    """The verdict of the first rank that asks. answer_seconds: how long the ranks may take to
    answer.
    """
    if not board.is_first_reader():
        for pause in _pauses(2 * answer_seconds):
            if text := board.verdict_text():
                return Verdict(**json.loads(text))
            time.sleep(pause)
    reports: dict[int, Report | None] = {}
    for pause in _pauses(answer_seconds):
        for rank, text in enumerate(board.texts()):
            report = parsed(text)
            has_answered = report is not None and report.state != "alive"
            reports[rank] = report if has_answered else None
        if not _is_unclear(reports, timed_out, processes):
            break
        time.sleep(pause)
    verdict = judge(reports, timed_out)
    board.set_verdict(json.dumps(asdict(verdict)))
    return verdict


def _is_unclear(reports: Reports, timed_out: bool, processes: Sequence[Process]) -> bool:
    """Whether an answer that is still to come may change the verdict."""
    answered = answers(reports).values()
    if any(report.state == "failed" for report in answered):
        return False
    if timed_out and any(report.state == "runs" and not report.groups for report in answered):
        return True
    silent = (rank for rank, report in reports.items() if report is None)
    return any(not processes[rank].is_dead for rank in silent)


def _pauses(seconds: float) -> list[float]:
    """Growing pauses of so many seconds together, with a last try after them: 7 tries in five
    seconds.
    """
    pauses = [0.1]
    while sum(pauses) < seconds:
        pauses.append(min(2 * pauses[-1], max(seconds - sum(pauses), 0.1)))
    return [*pauses, 0.0]


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
    """The collective in which ranks wait: for those that are missing, or have entered another one
    in its place.
    """

    wait: Entered
    group: str
    waiting: set[int]
    in_another: dict[int, str]  # rank: the operation
    missing: list[int]


def gathering(reports: Reports) -> Gathering | None:
    """Where most ranks wait for one that waits nowhere itself, if there is such a one; None if
    nobody waits.
    """
    answered = answers(reports)
    behind = ranks_behind(answered)
    culprits = {rank for rank in reports if rank not in answered}
    culprits |= {rank for rank in behind if answered[rank].waits_in is None}
    waits = Counter(report.waits_in for report in answered.values() if report.waits_in is not None)
    gatherings = [_gathering(wait, reports) for wait, _ in waits.most_common()]
    return max(
        gatherings,
        key=lambda each: (not culprits.isdisjoint(each.missing), len(each.waiting)),
        default=None,
    )


def _gathering(wait: Entered, reports: Reports) -> Gathering:
    entered: set[int] = set()
    waiting: set[int] = set()
    in_another: dict[int, str] = {}
    answered = answers(reports)
    for rank, report in answered.items():
        if wait.group not in report.groups or report.groups[wait.group][2].number < wait.number:
            continue
        entered.add(rank)
        operation = report.recent.get(wait.group, {}).get(str(wait.number))
        is_in_it = report.waits_in is not None and report.waits_in[:2] == wait[:2]
        if is_in_it and report.waits_in is not None:
            operation = report.waits_in.operation
        if operation not in (None, wait.operation):
            in_another[rank] = str(operation)
        elif is_in_it:
            waiting.add(rank)
    about, members, _ = answered[min(waiting)].groups[wait.group]
    missing = [rank for rank in members or sorted(reports) if rank not in entered]
    return Gathering(wait, group_text(wait.group, about), waiting, in_another, missing)


# --- in one line


def where_they_wait(reports: Reports, processes: Sequence[Process] = ()) -> str:
    """Who waits in which collective, who has not entered it, and what those are in; "" if nobody
    waits.

    processes: of all ranks, to add those of the ranks that the others wait for.
    """
    gathered = gathering(reports)
    if gathered is None:
        return ""
    answered = answers(reports)
    waited = max(answered[rank].waited_seconds for rank in gathered.waiting)
    verb = "waits" if len(gathered.waiting) == 1 else "wait"
    if waited:
        have = "has" if len(gathered.waiting) == 1 else "have"
        verb = f"{have} waited {waited:.0f} s"
    wait = gathered.wait
    who = f"{ranks_text(gathered.waiting)} of {len(reports)}"
    parts = [f"{who} {verb} in {wait.operation} {wait.number} of {gathered.group}"]
    states: dict[str, list[int]] = {}
    for rank in (*gathered.in_another, *gathered.missing):
        state = _state_of(rank, reports[rank], gathered, processes)
        states.setdefault(state, []).append(rank)
    described = list(states.items())
    for state, ranks in described[:4]:
        parts.append(_ranks_in(ranks, state, processes))
    if undescribed := sum(len(ranks) for _, ranks in described[4:]):
        parts.append(f"{undescribed} more are missing")
    return "; ".join(parts)


def _ranks_in(ranks: list[int], state: str, processes: Sequence[Process]) -> str:
    """Ranks with their processes, and the state that they share."""
    text = ranks_text(ranks)
    if processes:
        shown = [f"process {processes[rank].pid} on {processes[rank].host}" for rank in ranks[:2]]
        if len(ranks) > 2:
            shown.append("...")
        text += f" ({', '.join(shown)})"
    if len(ranks) > 1:
        verb, _, rest = state.partition(" ")
        state = f"{PLURAL.get(verb, verb)} {rest}"
    return f"{text} {state}"


PLURAL = {"is": "are", "does": "do", "has": "have"}


def _state_of(
    rank: int, report: Report | None, gathered: Gathering, processes: Sequence[Process]
) -> str:
    """What a rank does in place of entering the collective."""
    if report is None:
        if processes and processes[rank].is_stopped:
            return "is stopped (SIGSTOP)"
        return "does not answer"
    place = f"step {report.step + 1}" if report.step >= 0 else "the start"
    if report.main_thread_is_in:
        place += f", in {report.main_thread_is_in}"
    number = gathered.wait.number
    if rank in gathered.in_another:
        return f"entered {gathered.in_another[rank]} as number {number} instead, and is in {place}"
    if report.waits_in is not None:
        about = group_text(report.waits_in.group, report.groups[report.waits_in.group][0])
        return f"is in {report.waits_in.operation} {report.waits_in.number} of {about}, in {place}"
    last = 0
    if gathered.wait.group in report.groups:
        last = report.groups[gathered.wait.group][2].number
    return f"has not arrived (entered {last} of them), in {place}"


def group_text(name: str, about: str) -> str:
    """about: torch's description of the group."""
    if about == "default_pg":
        return "the default group"
    if about in ("", "undefined"):
        return f"group {name}"
    return f"group {about}"


def in_ranges(ranks: Collection[int]) -> list[str]:
    """[0, 1, 2, 5] as ["0-2", "5"]; of two in a row both are shown."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    texts = []
    for each in ranges:
        text = ", ".join(map(str, each))
        if len(each) > 2:
            text = f"{each[0]}-{each[-1]}"
        texts.append(text)
    return texts


def ranks_text(ranks: Collection[int]) -> str:
    """`rank 7`, `ranks 0-6, 8`; at most eight ranges."""
    shown = in_ranges(ranks)
    if len(shown) > 8:
        shown = [*shown[:8], "..."]
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(shown)}"
