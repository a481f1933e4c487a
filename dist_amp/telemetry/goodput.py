"""Goodput: the share of a run folder's whole life in which steps were applied.

A folder's life begins with its first process. It includes starting, evaluations, checkpoints, skipped steps, steps that
a restart takes again, and the time between two attempts. What was spent is in the lines of metrics.jsonl, of which a
resume drops those whose steps are taken again, so it is that of the steps which count.
"""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from dist_amp.runtime.clock import STEP_PHASES

KINDS = ("applied_steps", "skipped_steps", "evaluation", "checkpoint", "diagnostics")


class Goodput:
    """seconds: what this rank has spent by KINDS, over all attempts; [len(KINDS)] float64."""

    def __init__(self) -> None:
        self.seconds = np.zeros(len(KINDS))
        self._started = time.time()  # of the folder's life, Unix time

    def open(self, folder: Path, spent: Mapping[str, float]) -> None:
        """Go on with a folder's account, or note that its life begins with this process.

        spent: `spent` at the last log step of those that are kept.
        """
        with suppress(TypeError, ValueError, AttributeError):  # a line that was edited
            self.seconds = np.array([float(spent.get(kind, 0.0)) for kind in KINDS])
        path = folder / "started.txt"
        self._started = process_started()
        with suppress(OSError, ValueError):
            if path.exists():
                self._started = datetime.fromisoformat(path.read_text().strip()).timestamp()
            else:
                path.write_text(datetime.fromtimestamp(self._started, UTC).isoformat() + "\n")

    def add(self, phases: Mapping[str, float], steps: int, applied: float) -> None:
        """Count an interval. phases: its seconds; applied: how many of its steps were."""
        self.seconds += self.of_interval(phases, steps, applied)

    @staticmethod
    def of_interval(phases: Mapping[str, float], steps: int, applied: float) -> np.ndarray:
        """[len(KINDS)] float64."""
        per_step = sum(phases[name] for name in STEP_PHASES) / steps if steps else 0.0
        between = [phases[name] for name in ("evaluation", "checkpoint", "diagnostics")]
        return np.array([per_step * applied, per_step * (steps - applied), *between])

    @property
    def spent(self) -> dict[str, float]:
        """What metrics.jsonl says: `seconds` by kind."""
        return {kind: round(seconds, 6) for kind, seconds in zip(KINDS, self.seconds.tolist(), strict=True)}

    @property
    def wall_seconds(self) -> float:
        """Since the folder's life began."""
        return max(time.time() - self._started, 1e-9)

    @property
    def share(self) -> float:
        """Of the wall time, in applied steps: 0 to 1."""
        return min(float(self.seconds[0]) / self.wall_seconds, 1.0)

    def summary(self, since: np.ndarray) -> dict[str, float | dict[str, float]]:
        """What summary.json says. since: seconds by KINDS since the last log step.

        "elsewhere" is starting, what lies between attempts, and steps that were taken again.
        """
        seconds, wall = self.seconds + since, self.wall_seconds
        spent = dict(zip(KINDS, seconds.tolist(), strict=True))
        spent["elsewhere"] = max(wall - float(seconds.sum()), 0.0)
        return {
            "goodput": round(min(float(seconds[0]) / wall, 1.0), 6),
            "wall_seconds": round(wall, 6),
            "spent_seconds": {name: round(value, 6) for name, value in spent.items()},
        }


def process_started() -> float:
    """When this process was started, in Unix time; now, where /proc does not say. Source: proc(5), field 22."""
    with suppress(OSError, ValueError, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - max(age, 0.0)
    return time.time()
