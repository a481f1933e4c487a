"""Names a rank that is slower than the others, and a slowdown of all: the phase, the factor and the host.

Ranks wait for each other in every step, so all of them show the same throughput. What differs is the time that each
spends by itself, without its waits (runtime/clock.py). To delete: this file and its entry in train.py.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from dist_amp.run import Run
from dist_amp.runtime.clock import OWN_PHASES
from dist_amp.telemetry.log_row import LogRow
from dist_amp.telemetry.observer import Observer

FACTOR = 1.2  # of the ranks' median, or of the past
SHARE = 0.05  # of the step: a smaller excess holds nobody up
# How many times its standard error a rank's excess must be, by the number of log intervals: quantiles of Student's t
# for 1 false alarm in 1,000, if intervals vary independently. A rank that is much slower is found after 3 intervals,
# one that is 1.3 times slower later.
CERTAIN = {3: 22.3, 4: 10.2, 5: 7.17, 6: 5.89, 7: 5.21, 8: 4.79, 9: 4.50, 10: 4.30}
WINDOW, PAST = 5, 10  # log intervals that must all be slower than those before them
NAMES = {"data": "data wait", "other": "callbacks and checks"}  # for the rest the phase's own name


@dataclass(frozen=True)
class Slow:
    """A rank, or all if it is None. factor: of the ranks' median, or of the past.

    extra: seconds per step of `phase`, the one in which most is lost. intervals: log intervals that show it.
    """

    rank: int | None
    factor: float
    phase: str
    extra: float
    intervals: int


def find_slow_ranks(phases: np.ndarray, steps: np.ndarray) -> list[Slow]:
    """The ranks whose own time exceeds FACTOR times the ranks' median, beyond chance.

    phases: [intervals, ranks, phases] seconds per step; steps: [intervals] seconds per step with all waits. Of an even
    number of ranks the lower median: of two, the faster one.
    """
    ranks = phases.shape[1]
    middle = (ranks - 1) // 2
    own = phases.sum(axis=2)
    median = np.sort(own, axis=1)[:, middle]
    excess = own - FACTOR * median[:, None]
    found: dict[int, Slow] = {}
    for count, certain in CERTAIN.items():
        if count > len(own):
            break
        mean, deviation = excess[-count:].mean(axis=0), excess[-count:].std(axis=0, ddof=1)
        slow = (mean > certain * deviation / count**0.5) & (mean > SHARE * steps[-count:].mean())
        for rank in np.flatnonzero(slow).tolist():
            extra = (phases[-count:, rank] - np.sort(phases[-count:], axis=1)[:, middle]).mean(axis=0)
            phase = int(extra.argmax())
            factor = own[-count:, rank].mean() / max(median[-count:].mean(), 1e-9)
            found.setdefault(rank, Slow(rank, float(factor), OWN_PHASES[phase], float(extra[phase]), count))
    return list(found.values())


def find_slowdown(medians: np.ndarray) -> Slow | None:
    """A slowdown of all ranks. medians: [PAST + WINDOW, phases] seconds per step, the median of the ranks.

    Every interval of the window is slower than FACTOR times the past's median, and than any in the past.
    """
    past, window = medians[:PAST], medians[PAST:]
    before, now = past.sum(axis=1), window.sum(axis=1)
    if now.min() <= max(FACTOR * float(np.median(before)), float(before.max())):
        return None
    extra = window.mean(axis=0) - np.median(past, axis=0)
    phase = int(extra.argmax())
    return Slow(None, float(now.mean() / np.median(before)), OWN_PHASES[phase], float(extra[phase]), WINDOW)


class SlowRanks(Observer):
    """Compares the ranks' own time at each log step; rank 0 warns of a rank that it found at two in a row.

    It warns again only after as many log steps without a finding as the longest window has.
    """

    def __init__(self, run: Run):
        self._run = run
        self._phases: deque[np.ndarray] = deque(maxlen=max(CERTAIN))  # each [ranks, phases]
        self._steps: deque[float] = deque(maxlen=max(CERTAIN))
        self._medians: deque[np.ndarray] = deque(maxlen=PAST + WINDOW)  # each [phases]
        self._found: set[int] = set()  # at the last log step
        self._quiet: dict[int | None, int] = {}  # for so many more log steps
        self._first = True

    def on_log(self, row: LogRow) -> None:
        if not self._run.world.is_main:
            return
        if self._first:  # compiling, filling caches, first collectives: ranks differ for once
            self._first = False
            return
        phases = row.columns(OWN_PHASES) / np.maximum(row.column("steps"), 1)[:, None]
        self._phases.append(phases)
        self._steps.append(float(np.median(row.per_step(row.seconds))))
        self._medians.append(np.median(phases, axis=0))
        found = find_slow_ranks(np.stack(self._phases), np.array(self._steps)) if len(phases) > 1 else []
        self._quiet = {rank: left - 1 for rank, left in self._quiet.items() if left > 1}
        self._warn_of([slow for slow in found if slow.rank in self._found], row)
        self._found = {slow.rank for slow in found if slow.rank is not None}
        if not found and len(self._medians) == PAST + WINDOW:
            slowdown = find_slowdown(np.stack(self._medians))
            self._warn_of([slowdown] if slowdown is not None else [], row)

    def _warn_of(self, found: list[Slow], row: LogRow) -> None:
        for slow in found:
            if slow.rank not in self._quiet:
                text = self._text(slow, row)
                self._run.world.warn(text)
                self._run.metrics.write_text("slow_ranks", text, row.step)
            self._quiet[slow.rank] = max(CERTAIN)

    def _text(self, slow: Slow, row: LogRow) -> str:
        if slow.rank is None:
            who = "all ranks spend" if len(row.table) > 1 else "a step takes"
            compared = "as long as before"
        else:
            who = f"rank {slow.rank} on {self._run.metrics.host_of(slow.rank)} spends"
            compared = f"as long as {'the median rank' if len(row.table) > 2 else 'the other rank'}"
        return (
            f"{who} {slow.factor:.1f} times {compared}, without waiting for other ranks: {1000 * slow.extra:.3g} ms "
            f"per step more in {NAMES.get(slow.phase, slow.phase)} (up to step {row.step}, in {slow.intervals} log "
            "intervals)"
        )
