"""Readers of a run's folder: settings, metrics, environment, checkpoints.

Commands that look at a run read it here. A kill tears the last line of metrics.jsonl, a disk or an
editor may damage another: such a line is left out, and one warning counts them.
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
    """The folder of a run, read as far as it is asked for; nothing in it is changed."""

    def __init__(self, folder: Path):
        self.folder = folder

    @cached_property
    def settings(self) -> dict[str, Any]:
        """{dotted key: value} of the run's last start. Errors: DataError if it is no run."""
        return read_flat(self.folder / CONFIG)

    @cached_property
    def _earlier(self) -> dict[int, dict[str, Any]]:
        """{last step: settings} of earlier starts that had other settings."""
        paths = sorted(self.folder.glob("config_until_step_*.toml"))
        return {step_of(path): read_flat(path) for path in paths}

    def settings_at(self, step: int) -> dict[str, Any]:
        """The settings with which the run took a step."""
        earlier = (settings for last, settings in self._earlier.items() if last >= step)
        return next(earlier, self.settings)

    @cached_property
    def rows(self) -> list[Row]:
        """The lines of metrics.jsonl: of log steps and of evaluations."""
        rows, damaged = read_rows(self.folder / "metrics.jsonl")
        if damaged:
            lines = some_of([*map(str, damaged)], 4)
            warn(f"{self.folder}: damaged lines of metrics.jsonl are left out: {lines}")
        return rows

    @cached_property
    def steps(self) -> dict[int, Row]:
        """The metrics of each step and its evaluation; of two lines, the later one counts."""
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
        """{dotted key: value} of environment.json; empty without one."""
        try:
            table = json.loads((self.folder / "environment.json").read_bytes())
            table["hosts"] = {str(number): host for number, host in enumerate(table["hosts"])}
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return {}
        return dict(leaves(table))

    @cached_property
    def checkpoints(self) -> list[Path]:
        """Oldest first, valid or not."""
        return all_checkpoints(self.folder)

    @property
    def is_running(self) -> bool:
        """Whether a process of this machine trains in the folder."""
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
        """The start of the first process, in this machine's time zone; "" if it is not known."""
        try:
            text = (self.folder / "started.txt").read_text().strip()
            return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        except (OSError, ValueError):
            return ""
