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
WINDOW = 3  # log intervals in a row, since one may have met a page fault or a neighbour on the machine
PAST = 10  # log intervals before the window, to compare it with
NAMES = {"data": "data wait", "other": "callbacks and checks"}  # for the rest the phase's own name


@dataclass(frozen=True)
class Slow:
    """rank: None for all of them; factor: of their median, or of the past; extra: seconds per step, most of them in
    `phase`."""

    rank: int | None
    factor: float
    phase: str
    extra: float


def find_slow_ranks(window: np.ndarray) -> list[Slow]:
    """The ranks that were slower in every interval of the window. window: [intervals, ranks, phases] seconds per step.

    A rank's own seconds are compared with the median of all; with two ranks, with the faster one's. What it takes
    longer must also be more than the ranks' usual differences, or a step of microseconds would name ranks by chance.
    """
    own = window.sum(axis=2)
    ranks = own.shape[1]
    usual = np.sort(own, axis=1)[:, (ranks - 1) // 2]
    spread = np.abs(own - usual[:, None])
    found = []
    for rank in np.flatnonzero((own > FACTOR * usual[:, None]).all(axis=0)).tolist():
        others = np.delete(spread, rank, axis=1)
        if ranks > 2 and not (spread[:, rank] > 3 * np.median(others, axis=1)).all():
            continue
        extra = (window[:, rank] - np.sort(window, axis=1)[:, (ranks - 1) // 2]).mean(axis=0)
        phase = int(extra.argmax())
        found.append(Slow(rank, float((own[:, rank] / usual).mean()), OWN_PHASES[phase], float(extra[phase])))
    return found


def find_slowdown(past: np.ndarray, window: np.ndarray) -> Slow | None:
    """A slowdown of all ranks. past, window: [intervals, phases] seconds per step, the ranks' median.

    Every interval of the window is slower than FACTOR times the past's median, and than anything in the past.
    """
    before, now = past.sum(axis=1), window.sum(axis=1)
    if not (now > FACTOR * np.median(before)).all() or not now.min() > before.max():
        return None
    extra = window.mean(axis=0) - np.median(past, axis=0)
    phase = int(extra.argmax())
    return Slow(None, float(now.mean() / np.median(before)), OWN_PHASES[phase], float(extra[phase]))


class SlowRanks(Observer):
    """Compares the ranks' own seconds at each log step, and says what it found on rank 0, once until it is over."""

    def __init__(self, run: Run):
        self._run = run
        self._intervals: deque[np.ndarray] = deque(maxlen=WINDOW)  # each [ranks, phases]
        self._medians: deque[np.ndarray] = deque(maxlen=PAST + WINDOW)  # each [phases]
        self._named: set[tuple[int | None, str]] = set()
        self._first = True

    def on_log(self, row: LogRow) -> None:
        if not self._run.world.is_main:
            return
        if self._first:  # compiling, filling caches, first collectives: ranks differ for once
            self._first = False
            return
        phases = row.columns(OWN_PHASES) / np.maximum(row.column("steps"), 1)[:, None]
        self._intervals.append(phases)
        self._medians.append(np.median(phases, axis=0))
        found: list[Slow] = []
        if len(phases) > 1 and len(self._intervals) == WINDOW:
            found = find_slow_ranks(np.stack(self._intervals))
        if not found and len(self._medians) == PAST + WINDOW:
            medians = np.stack(self._medians)
            slowdown = find_slowdown(medians[:PAST], medians[PAST:])
            found = [slowdown] if slowdown is not None else []
        for slow in found:
            if (slow.rank, slow.phase) not in self._named:
                self._say(slow, row)
        self._named = {(slow.rank, slow.phase) for slow in found}

    def _say(self, slow: Slow, row: LogRow) -> None:
        phase = NAMES.get(slow.phase, slow.phase)
        since = f"up to step {row.step}, over {WINDOW} log intervals"
        if slow.rank is None:
            who = "all ranks take" if len(row.table) > 1 else "a step takes"
            compared = "as long as before"
        else:
            who = f"rank {slow.rank} on {self._run.metrics.host_of(slow.rank)} takes"
            compared = "as long as the ranks' median" if len(row.table) > 2 else "as long as the other rank"
        self._run.world.warn(
            f"{who} {slow.factor:.1f} times {compared} for its own part of a step, most of it in {phase}: "
            f"{1000 * slow.extra:.3g} ms more ({since})"
        )
