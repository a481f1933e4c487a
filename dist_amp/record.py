"""Reads a run's folder for the commands: settings, metrics, environment, checkpoints.

The last line of metrics.jsonl may be incomplete after a kill, and is left out. Damaged lines
elsewhere are left out too, with one warning.
"""

import json
from collections import defaultdict
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from dist_amp.checkpoint.format import CONFIG, all_checkpoints, step_of
from dist_amp.config.text import leaves, read_flat
from dist_amp.distributed.process import warn
from dist_amp.errors import some_of
from dist_amp.files import InUse, Row, only_process, read_rows
from dist_amp.supervise.lifecycle import saved_summary


class Record:
    """A run's folder. Each part is read when it is first used."""

    def __init__(self, folder: Path):
        self.folder = folder

    @cached_property
    def settings(self) -> dict[str, Any]:
        """{dotted key: value} of the run's last start. Raises DataError if there is no run."""
        return read_flat(self.folder / CONFIG)

    @cached_property
    def _earlier(self) -> dict[int, dict[str, Any]]:
        """{last step: settings in force until then}, for each restart with other settings."""
        paths = sorted(self.folder.glob("config_until_step_*.toml"))
        return {step_of(path): read_flat(path) for path in paths}

    def settings_at(self, step: int) -> dict[str, Any]:
        """The settings with which the run took a step."""
        earlier = (settings for last, settings in self._earlier.items() if last >= step)
        return next(earlier, self.settings)

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of metrics.jsonl: log steps and evaluations."""
        rows, damaged = read_rows(self.folder / "metrics.jsonl")
        if damaged:
            lines = some_of([*map(str, damaged)], 4)
            warn(f"{self.folder}: damaged lines of metrics.jsonl are left out: {lines}")
        return rows

    @cached_property
    def steps(self) -> dict[int, Row]:
        """{step: its metrics and those of its evaluation}; a later row overrides an earlier one."""
        steps: dict[int, Row] = defaultdict(dict)
        for row in self.rows:
            steps[row["step"]] |= row
        return dict(steps)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json; empty before the run has ended for the first time."""
        return saved_summary(self.folder)

    @cached_property
    def environment(self) -> dict[str, Any]:
        try:
            table = json.loads((self.folder / "environment.json").read_bytes())
            table["hosts"] = {str(number): host for number, host in enumerate(table["hosts"])}
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return {}
        return dict(leaves(table))

    @cached_property
    def checkpoints(self) -> list[Path]:
        return all_checkpoints(self.folder)

    @property
    def is_running(self) -> bool:
        lock = self.folder / ".lock"
        if not lock.exists():
            return False
        try:
            with only_process(lock):
                return False
        except InUse:
            return True
        except OSError:  # a disk that can't be written to
            return False

    @property
    def started(self) -> str:
        """When the run first started, in this machine's time zone; "" if that is not known."""
        try:
            text = (self.folder / "started.txt").read_text().strip()
            return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        except (OSError, ValueError):
            return ""
