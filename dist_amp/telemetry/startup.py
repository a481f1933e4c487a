"""The time of a start by phase, from the failure that caused it to the end of the first step."""

import os
import time
from pathlib import Path
from typing import Any

from dist_amp.telemetry.observer import Observer
from dist_amp.telemetry.step_report import LogRow, Tags

FAILED_AT = "DIST_AMP_FAILED_AT"  # Unix time at which `dist_amp launch` saw the failure

PHASES = ("processes", "imports", "rendezvous", "checks", "model", "restore", "data", "first_step")


class Startup(Observer):
    """seconds: of this rank, by PHASES. A GPU may still compute the first step when it ends."""

    def __init__(self) -> None:
        now = time.time()
        started = process_started()
        failed = float(os.environ.get(FAILED_AT, started))
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.seconds["processes"] = max(started - failed, 0.0)
        self.seconds["imports"] = max(now - started, 0.0)
        self._since = now
        self._is_logged = False

    def lap(self, phase: str) -> None:
        """The time since the last lap was spent in this phase."""
        now = time.time()
        self.seconds[phase] += now - self._since
        self._since = now

    def watch(self, run: Any) -> None:
        """See the run's first step, and report with its metrics."""
        in_data = run.world.clock.so_far()["data"]  # while the run was built
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


def process_started() -> float:
    """The start of this process, in Unix time."""
    # Its 22nd field, in clock ticks since the boot. Source: proc(5).
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - max(age, 0.0)
