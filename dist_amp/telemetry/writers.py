"""The files that figures go to: whole and once each, over kills, resumes, and a disk that is full for a while."""

import errno
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dist_amp.runtime.files import write_synced


class JsonlWriter:
    """metrics.jsonl: each line is there once and whole, over kills, resumes and a disk that is full for a while."""

    def __init__(self, path: Path, step: int):
        """Drop what stands there of steps after `step`, which are taken again, and half a line that a kill left."""
        self.path = path
        self.last: dict[str, Any] = {}  # the newest line of a log step
        self._unwritten = ""
        self.before: Path | None = None  # where the figures of a run are kept whose checkpoints are gone
        if not path.exists():
            return
        if step == 0 and path.stat().st_size:
            self.before = path.with_name("metrics_before.jsonl")
            path.replace(self.before)
            return
        kept = ""
        for line in path.read_text().splitlines():
            try:
                figures = json.loads(line)
            except ValueError:
                continue
            if figures["step"] <= step:
                kept += f"{line}\n"
                self.last = figures if "train/loss" in figures else self.last
        fresh = path.with_name(".metrics.jsonl.writing")
        write_synced(fresh, kept)
        fresh.replace(path)  # at once: a kill in between must not take the log along

    def append(self, figures: dict[str, Any]) -> str:
        """Add a line, after those that could not be written before; return what to warn of, once."""
        first = not self._unwritten
        try:
            self._unwritten += json.dumps(figures, allow_nan=False) + "\n"
        except ValueError:
            self._unwritten += json.dumps(plain_json(figures)) + "\n"
        size = None
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                size = os.fstat(file).st_size
                data = self._unwritten.encode()
                if os.write(file, data) < len(data):  # what fits, where a disk is nearly full
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(file)
        except OSError as error:
            if size is not None:
                with suppress(OSError):
                    os.truncate(self.path, size)
            text = f"{self.path} can't be written ({error.strerror}); its lines are kept in memory and written later"
            return text if first else ""
        self._unwritten = ""
        return ""


class TensorBoardWriter:
    """One rank's TensorBoard folder; that it is full, removed or read-only ends no run, and it is opened again."""

    RETRY_SECONDS = 10.0

    def __init__(self, path: Path, first_step: int):
        self._path = path
        self._first_step: int | None = first_step  # what stands there from this step on is taken again
        self._writer: Any = None
        self._retry_at = 0.0
        self._warned = False
        self._summary: Any = None  # of the scalars that were written last

    def write(self, add: Callable[[Any], object]) -> str:
        """Call `add` with the writer; return what to warn of, once."""
        if time.monotonic() < self._retry_at:
            return ""
        try:
            if self._writer is not None and not os.listdir(self._path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            add(self._open())
            return ""
        except OSError as error:  # its thread's as well, which the next write raises
            self._writer = None
            if not isinstance(error, FileNotFoundError):
                self._retry_at = time.monotonic() + self.RETRY_SECONDS
            first, self._warned = not self._warned, True
            text = f"{self._path} can't be written ({error.strerror}); metrics.jsonl will have all the figures"
            return text if first else ""

    def write_scalars(self, values: Mapping[str, float], step: int) -> str:
        """All values in one event, in one event's message for all steps; return what to warn of, once.

        Twelve values in one event cost 13 us, twelve add_scalar calls 60.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._summary is None or [value.tag for value in self._summary.value] != list(values):
            self._summary = Summary(value=[Summary.Value(tag=tag) for tag in values])
        for entry, value in zip(self._summary.value, values.values(), strict=True):
            entry.simple_value = value
        return self.write(lambda writer: writer._get_file_writer().add_summary(self._summary, step))

    def _open(self) -> Any:
        from torch.utils.tensorboard.writer import SummaryWriter  # half a second, and needless in a notebook

        if self._writer is None:
            _quiet_writer_threads()
            self._writer = SummaryWriter(str(self._path), purge_step=self._first_step)
            self._first_step = None
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()


def _quiet_writer_threads() -> None:
    """TensorBoard's thread hands its OSError on, and Python would print a traceback of it besides."""
    shown = threading.excepthook

    def show(args: Any) -> None:
        if not (isinstance(args.exc_value, OSError) and "tensorboard" in type(args.thread).__module__):
            shown(args)

    if getattr(shown, "__name__", "") != show.__name__:
        threading.excepthook = show


def plain_json(value: Any) -> Any:
    """The same without nan and inf, which JSON lacks: as text."""
    if isinstance(value, dict):
        return {name: plain_json(part) for name, part in value.items()}
    if isinstance(value, list):
        return [plain_json(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
