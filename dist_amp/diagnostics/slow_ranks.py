"""Warns of a rank that is slower than the others, and of steps that wait for data.

A rank's own time excludes its waits for other ranks, so only the slow one stands out.
Docs: docs/metrics.md
"""

from collections import deque

import numpy as np

from dist_amp.clock import OWN_PHASES
from dist_amp.run import Run
from dist_amp.telemetry.observer import Observer
from dist_amp.telemetry.step_report import LogRow

FACTOR = 1.2  # a rank is slow above this multiple of the ranks' median
DATA_SHARE = 0.5  # of the step time: data is the bottleneck if every rank waits longer for it
MIN_EXCESS = 0.05  # of the step time: a rank with a smaller excess over FACTOR is not reported
WINDOW = 6  # log intervals in a row, in each of which a rank must be slow
REPEAT_AFTER = 10  # log steps that a rank must not be slow before its warning is repeated
NAMES = {"data": "data wait", "other": "callbacks and checks"}  # other phases keep their names


class SlowRanks(Observer):
    """Rank 0 warns of a rank whose own time is long in each of the last WINDOW log intervals."""

    def __init__(self, run: Run):
        self._run = run
        self._phases: deque[np.ndarray] = deque(maxlen=WINDOW)  # [ranks, phases] seconds per step
        self._step_seconds: deque[float] = deque(maxlen=WINDOW)
        self._quiet: dict[int, int] = {}  # {rank: log steps for which its warning is not repeated}
        self._is_first = True
        self._has_warned_of_data = False

    def on_log(self, row: LogRow) -> None:
        run = self._run
        if not run.world.is_main:
            return
        if self._is_first:  # skipped: the ranks' times differ while they compile and connect
            self._is_first = False
            return
        self._phases.append(row.columns(OWN_PHASES) / np.maximum(row.column("steps"), 1)[:, None])
        self._step_seconds.append(float(np.median(row.per_step(row.seconds))))
        self._quiet = {rank: left - 1 for rank, left in self._quiet.items() if left > 1}
        if len(self._phases) < WINDOW:
            return
        phases = np.stack(self._phases)
        step_seconds = np.array(self._step_seconds)
        shares = phases[:, :, OWN_PHASES.index("data")].min(axis=1) / step_seconds
        if shares.min() > DATA_SHARE and not self._has_warned_of_data:
            self._has_warned_of_data = True
            run.world.warn(
                f"steps wait for data in {shares.mean():.0%} of their time (up to step "
                f"{row.step}): raise data.workers={run.config.data.workers}, or make samples "
                "cheaper to read"
            )
        slow = find_slow_ranks(phases, step_seconds) if len(row.table) > 1 else []
        for rank in slow:
            if rank not in self._quiet:
                text = describe(rank, phases, run.metrics.hosts[rank], row.step)
                run.world.warn(text)
                run.metrics.write_text("slow_ranks", text, row.step)
            self._quiet[rank] = REPEAT_AFTER


def median_of(seconds: np.ndarray) -> np.ndarray:
    """The lower median over the ranks: [intervals, ranks, ...] -> [intervals, ...]."""
    return np.sort(seconds, axis=1)[:, (seconds.shape[1] - 1) // 2]


def find_slow_ranks(phases: np.ndarray, step_seconds: np.ndarray) -> list[int]:
    """The ranks whose own time exceeds FACTOR times the ranks' median in every interval.

    phases: [WINDOW, ranks, phases] seconds per step; step_seconds: [WINDOW], with all waits.
    """
    seconds = phases.sum(axis=2)
    excess = seconds - FACTOR * median_of(seconds)[:, None]
    is_slow = (excess > MIN_EXCESS * step_seconds[:, None]).all(axis=0)
    return [int(rank) for rank in np.flatnonzero(is_slow)]


def describe(rank: int, phases: np.ndarray, host: str, step: int) -> str:
    """The warning about a slow rank, with the phase in which it loses the most time."""
    seconds = phases.sum(axis=2)
    factor = seconds[:, rank].mean() / max(median_of(seconds).mean(), 1e-9)
    more = (phases[:, rank] - median_of(phases)).mean(axis=0)
    phase = OWN_PHASES[more.argmax()]
    compared = "the median rank" if phases.shape[1] > 2 else "the other rank"
    return (
        f"rank {rank} on {host} takes {factor:.1f} times as long as {compared}, not counting waits "
        f"for other ranks: {1000 * more.max():.3g} ms more per step in {NAMES.get(phase, phase)} "
        f"(up to step {step})"
    )
