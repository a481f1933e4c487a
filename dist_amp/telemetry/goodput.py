"""Goodput: the share of wall time spent on applied steps, since the run folder's first process.

The rest goes to startup, evaluations, checkpoints, skipped steps, steps repeated after a restart,
and time between restarts. Totals are kept in metrics.jsonl, where a resume drops repeated steps.

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
from dist_amp.telemetry.startup import process_start_time
from dist_amp.telemetry.step_report import LogRow

KINDS = ("applied_steps", "skipped_steps", "evaluation", "checkpoint", "diagnostics")


class Goodput(Observer):
    """seconds: time spent on each of KINDS, [len(KINDS)] float64; on rank 0 over all restarts."""

    def __init__(self, metrics: Metrics, folder: Path):
        """Continue the folder's totals, or record this process's start as that of the run."""
        self._metrics = metrics
        saved = metrics.last_logged.get("spent_seconds", {})
        self.seconds = np.array([float(saved.get(kind, 0.0)) for kind in KINDS])
        self._started = process_start_time()  # of the folder's first process, Unix time
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
        """Add an interval to the totals; only rank 0 returns tags."""
        rank = self._metrics.world.rank
        seconds = {phase: float(row.column(phase)[rank]) for phase in PHASES}
        self.seconds += spent(seconds, row["applied_in_interval"], row["skipped_in_interval"])
        if rank:
            return {}
        share = min(float(self.seconds[0]) / self.wall_seconds, 1.0)
        return {"perf/goodput_pct": 100 * share, "spent_seconds": by_kind(self.seconds)}

    def summary(self, failed: bool) -> dict[str, Any]:
        """Entries of summary.json. failed: count only up to the last log step."""
        seconds = self.seconds
        wall = self.wall_seconds
        if not failed:
            sums = self._metrics.interval.sums
            unlogged = self._metrics.world.clock.so_far()
            applied, skipped = sums["applied_in_interval"], sums["skipped_in_interval"]
            seconds = seconds + spent(unlogged, applied, skipped)
        # Startup, time between restarts, and steps that were repeated.
        elsewhere = max(wall - float(seconds.sum()), 0.0)
        return {
            "goodput": round(min(float(seconds[0]) / wall, 1.0), 6),
            "wall_seconds": round(wall, 6),
            "spent_seconds": by_kind(seconds) | {"elsewhere": round(elsewhere, 6)},
        }


def spent(phases: Mapping[str, float], applied: float, skipped: float) -> np.ndarray:
    """Seconds per phase of the clock -> seconds per kind: [len(KINDS)] float64, as in KINDS."""
    per_step = sum(phases[name] for name in STEP_PHASES) / max(applied + skipped, 1)
    between = [phases[name] for name in ("evaluation", "checkpoint", "diagnostics")]
    return np.array([per_step * applied, per_step * skipped, *between])


def by_kind(seconds: np.ndarray) -> dict[str, float]:
    return dict(zip(KINDS, seconds.round(6).tolist(), strict=True))
