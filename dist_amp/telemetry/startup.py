"""Startup time by phase, up to the first step; a restart counts from the failure that caused it."""

import os
import time
from pathlib import Path
from typing import Any

from dist_amp.telemetry.observer import Observer
from dist_amp.telemetry.step_report import LogRow, Tags

FAILED_AT = "DIST_AMP_FAILED_AT"  # Unix time at which `dist_amp launch` saw the failure

PHASES = ("processes", "imports", "rendezvous", "checks", "model", "restore", "data", "first_step")


class Startup(Observer):
    """seconds: {phase: seconds} on this rank. The GPU may still compute when first_step ends."""

    def __init__(self) -> None:
        now = time.time()
        started = process_start_time()
        failed = float(os.environ.get(FAILED_AT, started))
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.seconds["processes"] = max(started - failed, 0.0)
        self.seconds["imports"] = max(now - started, 0.0)
        self._since = now
        self._is_logged = False

    def lap(self, phase: str) -> None:
        """End a phase: add the time since the last lap to it."""
        now = time.time()
        self.seconds[phase] += now - self._since
        self._since = now

    def watch(self, run: Any) -> None:
        """Time the run's first step, and log the startup times with its metrics."""
        in_data = run.world.clock.so_far()["data"]  # of the model phase: building the datasets
        self.seconds["model"] -= in_data
        self.seconds["data"] += in_data
        self._observers = run.observers
        self._observers.add(self)

    def before_step(self, micro_batches: Any) -> None:
        self.lap("data")

    def after_step(self, report: Any, micro_batches: Any) -> None:
        self.lap("first_step")
        self._observers.rest(self)

    def tags(self, row: LogRow) -> Tags:
        if self._is_logged:
            return {}
        self._is_logged = True
        return {f"start/{phase}_seconds": seconds for phase, seconds in self.seconds.items()}

    def summary(self, failed: bool) -> dict[str, Any]:
        return {"start_seconds": {phase: round(self.seconds[phase], 3) for phase in PHASES}}


def process_start_time() -> float:
    # Field 22, starttime, in clock ticks since boot. Source: proc(5).
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - max(age, 0.0)
