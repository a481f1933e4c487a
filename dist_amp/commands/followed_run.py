"""Reads the folder of a run that another process writes: its metrics as they come, and whether it
has ended.
"""

import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from dist_amp.errors import DataError
from dist_amp.telemetry.step_report import MAX_RANK_FOLDERS

# How much longer a run that failed or was preempted is followed: it may be restarted in place.
RESTART_SECONDS = 30.0

CONFIG = "config.toml"
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
EARLIER = "metrics_before.jsonl"


class MetricsFile:
    """The complete lines of metrics.jsonl as they come; all of them again after the run has
    replaced the file.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file: BinaryIO | None = None

    def read(self) -> list[dict[str, Any]]:
        """The lines since the last call."""
        try:
            if self._file is not None and self._is_replaced(self._file):
                self.rewind()
            if self._file is None:
                self._file = self.path.open("rb")
            at = self._file.tell()
            text = self._file.read()
        except OSError:  # not there yet, or replaced on a network disk
            self.rewind()
            return []
        length = text.rfind(b"\n") + 1  # a line may be half written
        self._file.seek(at + length)
        return list(parsed(text[:length].splitlines()))

    def _is_replaced(self, file: BinaryIO) -> bool:
        """By inode: that of a file that is held open is not used for another."""
        now = self.path.stat()
        return not os.path.samestat(now, os.fstat(file.fileno())) or now.st_size < file.tell()

    def rewind(self) -> None:
        """Start at the beginning."""
        if self._file is not None:
            self._file.close()
        self._file = None


def wait_for_run(folder: Path, seconds: float, stop: threading.Event) -> None:
    """Wait until a run has begun in the folder. Errors: DataError if it does not, or the folder is
    something else.
    """
    deadline = time.monotonic() + seconds
    said = False
    while not (folder / CONFIG).exists() and not stop.is_set():
        is_used = folder.is_file() or (folder.is_dir() and any(folder.iterdir()))
        if is_used and not (folder / ".lock").exists():
            raise DataError(
                f"{folder} is not a run's folder: it has no {CONFIG}; give the folder that run.dir "
                "names"
            )
        if time.monotonic() >= deadline:
            what = "has no run yet" if folder.is_dir() else "does not exist"
            raise DataError(f"{folder} {what}; start the run, or check the path")
        if not said:
            print(f"waiting up to {seconds:.0f} s for a run in {folder}", flush=True)
            said = True
        stop.wait(1.0)


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The run's summary; None before its end, also after a restart."""
    try:
        started = (folder / CONFIG).stat().st_mtime_ns  # written at each start
        if (folder / SUMMARY).stat().st_mtime_ns < started:
            return None
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) and "stopped_by" in summary else None


def has_ended(folder: Path, summary: Mapping[str, Any]) -> bool:
    """Whether no restart is to be expected."""
    age = time.time() - (folder / SUMMARY).stat().st_mtime
    return summary["stopped_by"] == "completed" or age >= RESTART_SECONDS


def hash_of(summary: Mapping[str, Any] | None) -> str:
    return sha256(json.dumps(summary).encode()).hexdigest()[:16] if summary else ""


def earlier_attempt(folder: Path) -> str:
    """A hash that changes when a run starts again from step 0, which moves its metrics to
    metrics_before.jsonl.
    """
    try:
        with (folder / EARLIER).open("rb") as file:
            return sha256(file.readline()).hexdigest()[:16]
    except OSError:
        return ""


def shows_ranks(folder: Path, line: Mapping[str, Any]) -> bool:
    """Whether the line lists all ranks: in larger worlds it lists the first 64, which no folder of
    rank 63 tells.
    """
    last = folder / "tensorboard" / f"rank{MAX_RANK_FOLDERS - 1:05d}"
    return len(line.get("ranks", ())) < MAX_RANK_FOLDERS or last.exists()


def parsed(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """The lines that are a step's metrics; a damaged one is left out, as by the run itself when it
    resumes.
    """
    for line in lines:
        try:
            row = json.loads(line)
            row["step"] = int(row["step"])
        except (ValueError, LookupError, TypeError):
            continue
        yield row


def clean(tag: str) -> str:
    """The tag with "_" for the characters that some tracker refuses."""
    return re.sub(r"[^\w./ -]", "_", tag, flags=re.ASCII)


def flat(values: Mapping[str, Any], ranks: bool, prefix: str = "") -> dict[str, float]:
    """{"ranks": [{"a": 1}, ...], "b": "nan"} as {"rank00000/a": 1.0, ..., "b": nan}; what is no
    number is left out.
    """
    found: dict[str, float] = {}
    for name, value in values.items():
        tag = prefix + clean(name)
        if name == "ranks" and isinstance(value, list):
            for rank, tags in enumerate(value):
                if ranks:
                    found |= flat(tags, False, f"{prefix}rank{rank:05d}/")
        elif isinstance(value, dict):
            found |= flat(value, False, f"{tag}/")
        elif isinstance(value, (int, float)) or value in ("nan", "inf", "-inf"):
            found[tag] = float(value)
    return found
