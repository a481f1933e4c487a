"""Goodput: the share of a run folder's whole life in which steps were applied.

The rest: starting, evaluations, checkpoints, skipped steps, steps that a restart takes again, and
the time between attempts. It is kept in metrics.jsonl, from which a resume drops such steps.

Docs: docs/metrics.md
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from dist_amp.clock import PHASES, STEP_PHASES
from dist_amp.telemetry.metrics import Metrics
from dist_amp.telemetry.observer import Observer
from dist_amp.telemetry.startup import process_started
from dist_amp.telemetry.step_report import LogRow

KINDS = ("applied_steps", "skipped_steps", "evaluation", "checkpoint", "diagnostics")


class Goodput(Observer):
    """seconds: what this rank has spent by KINDS, over all attempts; [len(KINDS)] float64."""

    def __init__(self, metrics: Metrics, folder: Path):
        """Continue a folder's account, or note that its life begins with this process."""
        self._metrics = metrics
        spent = metrics.last_logged.get("spent_seconds", {})
        self.seconds = np.array([float(spent.get(kind, 0.0)) for kind in KINDS])
        self._started = process_started()  # of the folder's life, Unix time
        path = folder / "started.txt"
        with suppress(OSError, ValueError):
            if path.exists():
                self._started = datetime.fromisoformat(path.read_text().strip()).timestamp()
            elif metrics.world.is_main:
                path.write_text(datetime.fromtimestamp(self._started, UTC).isoformat() + "\n")

    @property
    def wall_seconds(self) -> float:
        return max(time.time() - self._started, 1e-9)

    def tags(self, row: LogRow) -> dict[str, Any]:
        """Count an interval; on rank 0, what metrics.jsonl says of it."""
        rank = self._metrics.world.rank
        seconds = {phase: float(row.column(phase)[rank]) for phase in PHASES}
        self.seconds += spent(seconds, row["applied_in_interval"], row["skipped_in_interval"])
        if rank:
            return {}
        share = min(float(self.seconds[0]) / self.wall_seconds, 1.0)
        return {"perf/goodput_pct": 100 * share, "spent_seconds": by_kind(self.seconds)}

    def summary(self, failed: bool) -> dict[str, Any]:
        """The figures for summary.json; after a failure, of the time up to the last log step."""
        seconds = self.seconds
        wall = self.wall_seconds
        if not failed:
            sums = self._metrics.interval.sums
            since = self._metrics.world.clock.so_far()
            applied, skipped = sums["applied_in_interval"], sums["skipped_in_interval"]
            seconds = seconds + spent(since, applied, skipped)
        # Starting, what lies between attempts, and steps that were taken again.
        elsewhere = max(wall - float(seconds.sum()), 0.0)
        return {
            "goodput": round(min(float(seconds[0]) / wall, 1.0), 6),
            "wall_seconds": round(wall, 6),
            "spent_seconds": by_kind(seconds) | {"elsewhere": round(elsewhere, 6)},
        }


def spent(phases: Mapping[str, float], applied: float, skipped: float) -> np.ndarray:
    """Seconds by KINDS, [len(KINDS)] float64, of an interval's seconds by phase and its steps."""
    per_step = sum(phases[name] for name in STEP_PHASES) / max(applied + skipped, 1)
    between = [phases[name] for name in ("evaluation", "checkpoint", "diagnostics")]
    return np.array([per_step * applied, per_step * skipped, *between])


def by_kind(seconds: np.ndarray) -> dict[str, float]:
    return dict(zip(KINDS, seconds.round(6).tolist(), strict=True))
