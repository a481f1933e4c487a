"""Names a rank whose time without waiting is longer than the others', a slowdown of all, and
steps that wait for data.

Docs: docs/metrics.md
"""

from collections import deque
from typing import NamedTuple

import numpy as np

from dist_amp.clock import OWN_PHASES
from dist_amp.run import Run
from dist_amp.telemetry.observer import Observer
from dist_amp.telemetry.step_report import LogRow

FACTOR = 1.2  # of the ranks' median, or of the past
DATA_SHARE = 0.5  # of the step, on every rank: above it, data are the bottleneck
SHARE = 0.05  # of the step: a smaller excess holds nobody up
WINDOW = 5  # log intervals that are judged together
PAST = 10  # those before them
# How many times its standard error a rank's mean excess must be: the quantile of Student's t for 1
# false alarm in 1,000 with WINDOW intervals, if they vary independently.
CERTAIN = 7.17
QUIET = 10  # log steps without a finding before the same warning is repeated
NAMES = {"data": "data wait", "other": "callbacks and checks"}  # for the rest the phase's own name


class Slowdown(NamedTuple):
    """Of a rank, or of all if it is None."""

    rank: int | None
    factor: float  # of the ranks' median, or of the past
    extra: np.ndarray  # [phases] seconds per step


def find_slow_ranks(phases: np.ndarray, step_seconds: np.ndarray) -> list[Slowdown]:
    """The ranks whose local time exceeds FACTOR times the ranks' (lower) median, beyond chance.

    phases: [WINDOW, ranks, phases] seconds per step; step_seconds: [WINDOW], with all waits.
    """
    middle = (phases.shape[1] - 1) // 2
    seconds = phases.sum(axis=2)
    typical = np.sort(seconds, axis=1)[:, middle]
    excess = seconds - FACTOR * typical[:, None]
    mean = excess.mean(axis=0)
    error = excess.std(axis=0, ddof=1) / WINDOW**0.5
    is_slow = (mean > CERTAIN * error) & (mean > SHARE * step_seconds.mean())
    extra = (phases - np.sort(phases, axis=1)[:, [middle]]).mean(axis=0)  # [ranks, phases]
    factors = seconds.mean(axis=0) / max(typical.mean(), 1e-9)
    return [Slowdown(rank, factors[rank], extra[rank]) for rank in np.flatnonzero(is_slow).tolist()]


def find_slowdown(phases: np.ndarray) -> list[Slowdown]:
    """A slowdown of all ranks: each interval of the window is slower than FACTOR times the past's
    median, and than any in the past. phases: [PAST + WINDOW, ranks, phases] seconds per step.
    """
    medians = np.median(phases, axis=1)
    before = medians[:PAST].sum(axis=1)
    now = medians[PAST:].sum(axis=1)
    typical = np.median(before)
    if now.min() <= max(FACTOR * typical, before.max()):
        return []
    extra = medians[PAST:].mean(axis=0) - np.median(medians[:PAST], axis=0)
    return [Slowdown(None, now.mean() / typical, extra)]


class SlowRanks(Observer):
    """Rank 0 compares the ranks' local time, and warns of one slow at two log steps in a row."""

    def __init__(self, run: Run):
        self._run = run
        self._phases: deque[np.ndarray] = deque(maxlen=PAST + WINDOW)  # each [ranks, phases]
        self._step_seconds: deque[float] = deque(maxlen=WINDOW)
        self._slow_before: set[int | None] = set()  # at the last log step
        self._quiet: dict[int | None, int] = {}  # for how many more log steps
        self._is_first = True
        self._has_warned_of_data = False

    def on_log(self, row: LogRow) -> None:
        if not self._run.world.is_main:
            return
        if self._is_first:  # compiling, filling caches, first collectives: ranks differ for once
            self._is_first = False
            return
        self._phases.append(row.columns(OWN_PHASES) / np.maximum(row.column("steps"), 1)[:, None])
        self._step_seconds.append(float(np.median(row.per_step(row.seconds))))
        self._quiet = {rank: left - 1 for rank, left in self._quiet.items() if left > 1}
        slow: list[Slowdown] = []
        phases = np.stack(self._phases)
        if len(row.table) > 1 and len(phases) >= WINDOW:
            slow = find_slow_ranks(phases[-WINDOW:], np.array(self._step_seconds))
        for one in slow:
            if one.rank in self._slow_before:
                self._warn_of(one, row)
        self._slow_before = {one.rank for one in slow}
        if not slow and len(phases) == PAST + WINDOW:
            for one in find_slowdown(phases):
                self._warn_of(one, row)
        if len(phases) >= WINDOW and not self._has_warned_of_data:
            self._warn_of_data(phases[-WINDOW:, :, OWN_PHASES.index("data")], row)

    def _warn_of_data(self, seconds: np.ndarray, row: LogRow) -> None:
        """Warn once of steps that wait for data most of the time. seconds: [WINDOW, ranks]."""
        shares = seconds.min(axis=1) / np.array(self._step_seconds)
        if shares.min() > DATA_SHARE:
            self._has_warned_of_data = True
            workers = self._run.config.data.workers
            self._run.world.warn(
                f"steps wait for data in {shares.mean():.0%} of their time (up to step "
                f"{row.step}): raise data.workers={workers}, or make samples cheaper to read"
            )

    def _warn_of(self, slow: Slowdown, row: LogRow) -> None:
        if slow.rank not in self._quiet:
            text = self._text(slow, row)
            self._run.world.warn(text)
            self._run.metrics.write_text("slow_ranks", text, row.step)
        self._quiet[slow.rank] = QUIET

    def _text(self, slow: Slowdown, row: LogRow) -> str:
        ranks = len(row.table)
        if slow.rank is None:
            who = "all ranks spend" if ranks > 1 else "a step takes"
            compared = "before"
        else:
            who = f"rank {slow.rank} on {self._run.metrics.hosts[slow.rank]} spends"
            compared = "the median rank" if ranks > 2 else "the other rank"
        phase = OWN_PHASES[slow.extra.argmax()]
        return (
            f"{who} {slow.factor:.1f} times as long as {compared}, without waiting for other "
            f"ranks: {1000 * slow.extra.max():.3g} ms per step more in "
            f"{NAMES.get(phase, phase)} (up to step {row.step})"
        )
