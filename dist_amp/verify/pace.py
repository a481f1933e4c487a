"""How long a verification takes: an estimate before its first row, and what is left after each."""

import time
from collections.abc import Sequence

from dist_amp.verify.ranks import Row

# Seconds of a row for each second of its bound, which takes the whole batch's gradients three times. Assumed from the
# count: a row takes them some 12 times, six steps with each optimizer; the first rows correct it.
ROW_FOR_BOUND = 4.0
START_SECONDS = 8.0  # of the processes for a number of ranks; assumed: importing torch takes 2 to 10 s


class Pace:
    """bound_seconds: {precision: seconds its bound took, on this machine and task}."""

    def __init__(self, rows: Sequence[Row], bound_seconds: dict[str, float]):
        self._left, self._estimates = list(rows), bound_seconds
        self._measured: dict[str, list[float]] = {}
        self._began = time.perf_counter()

    def took(self, row: Row) -> float:
        """Seconds since the last row; they are this row's."""
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        self._left.remove(row)
        self._measured.setdefault(row[2], []).append(seconds)
        return seconds

    @property
    def seconds_left(self) -> float:
        """By the rows of the same precision so far, else by its bound."""
        starts = 0.0 if self._measured else START_SECONDS * len({ranks for ranks, _, _ in self._left})
        return starts + sum(map(self._expected, self._left))

    def _expected(self, row: Row) -> float:
        if measured := self._measured.get(row[2]):
            return sum(measured) / len(measured)
        return ROW_FOR_BOUND * self._estimates.get(row[2], 0.0)


def in_words(seconds: float) -> str:
    """A duration that is an estimate: 40 s, 12 min, 1.5 h."""
    if seconds < 100:
        return f"{max(10, round(seconds, -1)):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def plan(rows: Sequence[Row]) -> list[str]:
    """A line per number of ranks: which combinations are compared on it."""
    lines = []
    for size in dict.fromkeys(size for size, _, _ in rows):
        strategies = dict.fromkeys(strategy for ranks, strategy, _ in rows if ranks == size)
        precisions = dict.fromkeys(precision for ranks, _, precision in rows if ranks == size)
        many = "ranks" if size > 1 else "rank "
        lines.append(f"{size:>5} {many}  {', '.join(strategies)} in {', '.join(precisions)}")
    return lines
