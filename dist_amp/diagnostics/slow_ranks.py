"""Names a rank that is slower than the others, and a slowdown of all: phase, factor and host.

Ranks wait for each other in every step, so all of them show the same throughput. What differs is
their local time: what each spends without waiting (clock.py).
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from dist_amp.clock import OWN_PHASES
from dist_amp.run import Run
from dist_amp.telemetry.step_report import LogRow, Observer

FACTOR = 1.2  # of the ranks' median, or of the past
SHARE = 0.05  # of the step: a smaller excess holds nobody up
# How many times its standard error a rank's excess must be, by the number of log intervals:
# quantiles of Student's t for 1 false alarm in 1,000, if intervals vary independently. A rank that
# is much slower is found after 3 intervals, one that is 1.3 times slower later.
CERTAIN = {3: 22.3, 4: 10.2, 5: 7.17, 6: 5.89, 7: 5.21, 8: 4.79, 9: 4.50, 10: 4.30}
WINDOW = 5  # log intervals that must all be slower than
PAST = 10  # those before them
NAMES = {"data": "data wait", "other": "callbacks and checks"}  # for the rest the phase's own name


@dataclass(frozen=True)
class Slowdown:
    """Of a rank, or of all if it is None."""

    rank: int | None
    factor: float  # of the ranks' median, or of the past
    phase: str  # in which most is lost
    extra_seconds: float  # per step, in this phase
    intervals: int  # log intervals that show it


def find_slow_ranks(phases: np.ndarray, step_seconds: np.ndarray) -> list[Slowdown]:
    """The ranks whose local time exceeds FACTOR times the ranks' median, beyond chance.

    phases: [intervals, ranks, phases] seconds per step; step_seconds: [intervals], with all waits.
    Of an even number of ranks the lower median: of two, the faster one.
    """
    middle = (phases.shape[1] - 1) // 2
    typical_phases = np.sort(phases, axis=1)[:, middle]
    seconds = phases.sum(axis=2)
    typical = np.sort(seconds, axis=1)[:, middle]
    excess = seconds - FACTOR * typical[:, None]
    slow: dict[int, Slowdown] = {}
    for count, certain in CERTAIN.items():
        if count > len(seconds):
            break
        last = excess[-count:]
        error = last.std(axis=0, ddof=1) / count**0.5
        matters = last.mean(axis=0) > SHARE * step_seconds[-count:].mean()
        is_slow = matters & (last.mean(axis=0) > certain * error)
        for rank in np.flatnonzero(is_slow).tolist():
            extra = (phases[-count:, rank] - typical_phases[-count:]).mean(axis=0)
            factor = seconds[-count:, rank].mean() / max(typical[-count:].mean(), 1e-9)
            slow.setdefault(rank, slowdown(rank, float(factor), extra, count))
    return list(slow.values())


def find_slowdown(medians: np.ndarray) -> Slowdown | None:
    """A slowdown of all ranks: every interval of the window is slower than FACTOR times the past's
    median, and than any in the past.

    medians: [PAST + WINDOW, phases] seconds per step, the median of the ranks.
    """
    before = medians[:PAST].sum(axis=1)
    now = medians[PAST:].sum(axis=1)
    if now.min() <= max(FACTOR * float(np.median(before)), float(before.max())):
        return None
    extra = medians[PAST:].mean(axis=0) - np.median(medians[:PAST], axis=0)
    return slowdown(None, float(now.mean() / np.median(before)), extra, WINDOW)


def slowdown(rank: int | None, factor: float, extra: np.ndarray, intervals: int) -> Slowdown:
    """extra: [phases] seconds per step."""
    phase = int(extra.argmax())
    return Slowdown(rank, factor, OWN_PHASES[phase], float(extra[phase]), intervals)


class SlowRanks(Observer):
    """Rank 0 compares the ranks' local time, and warns of one slow at two log steps in a row.

    It warns again only after as many log steps without a finding as the longest window has.
    """

    def __init__(self, run: Run):
        self._run = run
        self._phases: deque[np.ndarray] = deque(maxlen=max(CERTAIN))  # each [ranks, phases]
        self._step_seconds: deque[float] = deque(maxlen=max(CERTAIN))
        self._medians: deque[np.ndarray] = deque(maxlen=PAST + WINDOW)  # each [phases]
        self._slow_before: set[int | None] = set()  # at the last log step
        self._quiet: dict[int | None, int] = {}  # for how many more log steps
        self._is_first = True

    def on_log(self, row: LogRow) -> None:
        if not self._run.world.is_main:
            return
        if self._is_first:  # compiling, filling caches, first collectives: ranks differ for once
            self._is_first = False
            return
        phases = row.columns(OWN_PHASES) / np.maximum(row.column("steps"), 1)[:, None]
        self._phases.append(phases)
        self._step_seconds.append(float(np.median(row.per_step(row.seconds))))
        self._medians.append(np.median(phases, axis=0))
        self._quiet = {rank: left - 1 for rank, left in self._quiet.items() if left > 1}
        slow: list[Slowdown] = []
        if len(phases) > 1:
            slow = find_slow_ranks(np.stack(self._phases), np.array(self._step_seconds))
        for one in slow:
            if one.rank in self._slow_before:
                self._warn_of(one, row)
        self._slow_before = {one.rank for one in slow}
        if not slow and len(self._medians) == PAST + WINDOW:
            of_all = find_slowdown(np.stack(self._medians))
            if of_all is not None:
                self._warn_of(of_all, row)

    def _warn_of(self, slow: Slowdown, row: LogRow) -> None:
        if slow.rank not in self._quiet:
            text = self._text(slow, row)
            self._run.world.warn(text)
            self._run.metrics.write_text("slow_ranks", text, row.step)
        self._quiet[slow.rank] = max(CERTAIN)

    def _text(self, slow: Slowdown, row: LogRow) -> str:
        ranks = len(row.table)
        if slow.rank is None:
            who = "all ranks spend" if ranks > 1 else "a step takes"
            compared = "as long as before"
        else:
            who = f"rank {slow.rank} on {self._run.metrics.hosts[slow.rank]} spends"
            compared = "as long as the median rank"
            if ranks == 2:
                compared = "as long as the other rank"
        milliseconds = f"{1000 * slow.extra_seconds:.3g} ms per step more"
        return (
            f"{who} {slow.factor:.1f} times {compared}, without waiting for other ranks: "
            f"{milliseconds} in {NAMES.get(slow.phase, slow.phase)} (up to step {row.step}, in "
            f"{slow.intervals} log intervals)"
        )
