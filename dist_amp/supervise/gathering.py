"""What the ranks report of themselves, and what follows: who waits in which collective, and for whom."""

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, NamedTuple

from dist_amp.fast.flight_recorder import Entered, Progress
from dist_amp.supervise.liveness import Process

# What a rank reports: its collective failed or timed out; it failed by itself; its training goes on, as far as its
# watchdog knows; it has left the run in order.
State = Literal["waited", "failed", "runs", "left"]


@dataclass(frozen=True)
class Report:
    """What a rank says of itself, with the fields of `Progress`; step: how many it has taken, -1 before the run."""

    state: State
    step: int = 0
    groups: dict[str, tuple[str, list[int], Entered]] = field(default_factory=dict)
    waits_in: Entered | None = None
    waited_seconds: float = 0.0
    timeout_seconds: float = math.inf
    recent: dict[str, dict[str, str]] = field(default_factory=dict)
    main_thread_is_in: str = ""

    @classmethod
    def of(cls, state: State, step: int, progress: Progress, main_thread_is_in: str = "") -> "Report":
        # After a failure nothing is pending: the collective that failed is the last one.
        waits_in = progress.waits_in or (progress.latest if state == "waited" else None)
        waited = (progress.waited_seconds, progress.timeout_seconds)
        return cls(state, step, progress.groups, waits_in, *waited, dict(progress.recent), main_thread_is_in)

    @classmethod
    def from_text(cls, text: str) -> "Report":
        raw = json.loads(text)
        raw["groups"] = {name: (about, ranks, Entered(*last)) for name, (about, ranks, last) in raw["groups"].items()}
        raw["waits_in"] = Entered(*raw["waits_in"]) if raw["waits_in"] else None
        return cls(**raw)

    def to_text(self) -> str:
        return json.dumps(asdict(self))


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
    """The collective in which ranks wait: for those that are missing, or have entered another one in its place."""

    wait: Entered
    group: str
    waiting: set[int]
    in_another: dict[int, str]  # rank: the operation
    missing: list[int]


def gathering(reports: Mapping[int, Report | None]) -> Gathering | None:
    """Where most ranks wait for one that waits nowhere itself, if there is such a one; None if nobody waits."""
    answered = {rank: report for rank, report in reports.items() if report is not None}
    waits = Counter(report.waits_in for report in answered.values() if report.waits_in is not None)
    found = [_gathering(wait, reports, answered) for wait, _ in waits.most_common()]
    behind = ranks_behind(answered)
    culprits = {r for r in reports if r not in answered or (r in behind and answered[r].waits_in is None)}
    return max(found, key=lambda each: (not culprits.isdisjoint(each.missing), len(each.waiting)), default=None)


def _gathering(wait: Entered, reports: Mapping[int, Report | None], answered: Mapping[int, Report]) -> Gathering:
    entered, in_another, waiting = set(), {}, set()
    for rank, report in answered.items():
        if wait.group not in report.groups or report.groups[wait.group][2].number < wait.number:
            continue
        entered.add(rank)
        here = report.waits_in if report.waits_in is not None and report.waits_in[:2] == wait[:2] else None
        operation = here.operation if here else report.recent.get(wait.group, {}).get(str(wait.number))
        if operation not in (None, wait.operation):
            in_another[rank] = operation
        elif here:
            waiting.add(rank)
    about, members, _ = answered[min(waiting)].groups[wait.group]
    missing = [rank for rank in members or sorted(reports) if rank not in entered]
    return Gathering(wait, group_text(wait.group, about), waiting, in_another, missing)


def where_they_wait(reports: Mapping[int, Report | None], processes: Sequence[Process] = ()) -> str:
    """One line: who waits in which collective, who has not entered it, and what those are in; "" if nobody waits.

    processes: of all ranks, to add those of the ranks that the others wait for.
    """
    found = gathering(reports)
    if found is None:
        return ""
    answered = {rank: report for rank, report in reports.items() if report is not None}
    waited = max(answered[rank].waited_seconds for rank in found.waiting)
    verb = "has waited" if len(found.waiting) == 1 else "have waited"
    verb = f"{verb} {waited:.0f} s" if waited else "waits" if len(found.waiting) == 1 else "wait"
    text = f"{ranks_text(found.waiting)} of {len(reports)} {verb} in {found.wait.operation} {found.wait.number} of "
    parts = [f"{text}{found.group}"]
    ranks_that: dict[str, list[int]] = {}
    for rank in (*found.in_another, *found.missing):
        ranks_that.setdefault(_state_of(rank, reports[rank], found, processes), []).append(rank)
    for state, ranks in [*ranks_that.items()][:4]:
        who = ", ".join(f"process {processes[rank].pid} on {processes[rank].host}" for rank in ranks[:2] if processes)
        more = ", ..." * (len(ranks) > 2)
        if len(ranks) > 1:
            verb, _, rest = state.partition(" ")
            state = f"{PLURAL.get(verb, verb)} {rest}"
        parts.append(f"{ranks_text(ranks)}{f' ({who}{more})' if who else ''} {state}")
    more_ranks = sum(map(len, [*ranks_that.values()][4:]))
    return "; ".join([*parts, *([f"{more_ranks} more are missing"] if more_ranks else [])])


PLURAL = {"is": "are", "does": "do", "has": "have"}


def _state_of(rank: int, report: Report | None, found: Gathering, processes: Sequence[Process]) -> str:
    """What a rank does in place of entering the collective."""
    if report is None:
        return "is stopped (SIGSTOP)" if processes and processes[rank].is_stopped else "does not answer"
    step = f"step {report.step + 1}" if report.step >= 0 else "the start"
    place = f"{step}, in {report.main_thread_is_in}" if report.main_thread_is_in else step
    if rank in found.in_another:
        return f"entered {found.in_another[rank]} as number {found.wait.number} instead, and is in {place}"
    if report.waits_in is not None:
        about = group_text(report.waits_in.group, report.groups[report.waits_in.group][0])
        return f"is in {report.waits_in.operation} {report.waits_in.number} of {about}, in {place}"
    last = report.groups[found.wait.group][2].number if found.wait.group in report.groups else 0
    return f"has not arrived (entered {last} of them), in {place}"


def group_text(name: str, about: str) -> str:
    """about: torch's description of the group."""
    if about == "default_pg":
        return "the default group"
    return f"group {name if about in ('', 'undefined') else about}"


def ranks_text(ranks: Collection[int]) -> str:
    """`rank 7`, `ranks 0-6, 8`; at most eight ranges."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    shown = [
        str(low) if low == high else f"{low}, {high}" if high == low + 1 else f"{low}-{high}" for low, high in ranges
    ]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(shown[:8])}{', ...' * (len(shown) > 8)}"
