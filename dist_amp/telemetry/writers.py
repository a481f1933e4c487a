"""Writers of metrics.jsonl and TensorBoard, robust to kills, resumes and a disk that is full for a while."""

import errno
import json
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dist_amp.runtime.files import write_durably
from dist_amp.telemetry.tags import in_readable_units
from dist_amp.telemetry.tensorboard_view import described

Warn = Callable[[str], object]

FLUSH_SECONDS = 10  # TensorBoard looks every 5 s; torch's default of 120 would leave the charts of a new run empty


class JsonlWriter:
    """metrics.jsonl: one line per logged step; lines that can't be written are kept in memory and written later."""

    def __init__(self, path: Path, step: int, warn: Warn = warnings.warn):
        """Drop the lines of steps after `step`, which are taken again, and an incomplete last line.

        At step 0 all existing lines are moved to metrics_before.jsonl: their run has lost its checkpoints.
        """
        self.path = path
        self.last: dict[str, Any] = {}  # the latest line of a log step
        self._warn = warn
        self._unwritten = ""
        if not path.exists():
            return
        if step == 0 and path.stat().st_size:
            before = path.replace(path.with_name("metrics_before.jsonl"))
            warn(f"{path.parent} had metrics but no checkpoint: they are kept in {before}")
            return
        kept = ""
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if row["step"] <= step:
                kept += f"{line}\n"
                self.last = row if "train/loss" in row else self.last
        write_durably(path, kept)  # a kill in between must not lose the log

    def append(self, row: dict[str, Any]) -> None:
        """Add a line, after those that could not be written before; warns at the first failure."""
        first_failure = not self._unwritten
        try:
            self._unwritten += json.dumps(row, allow_nan=False) + "\n"
        except ValueError:
            self._unwritten += json.dumps(plain_json(row)) + "\n"
        data, size = self._unwritten.encode(), None
        try:
            with open(self.path, "ab", buffering=0) as file:
                size = file.tell()
                if file.write(data) < len(data):  # a nearly full disk takes only the beginning
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._unwritten = ""
        except OSError as error:
            if size is not None:
                with suppress(OSError):
                    os.truncate(self.path, size)
            if first_failure:
                self._warn(
                    f"{self.path} can't be written ({error.strerror}); its lines are kept in memory and written later"
                )


class TensorBoardWriter:
    """One rank's TensorBoard folder. If it is full, removed or read-only, the run goes on and writing is retried."""

    RETRY_SECONDS = 10.0

    def __init__(self, path: Path, first_step: int, warn: Warn = warnings.warn):
        self._path = path
        self._purge_step: int | None = first_step  # events from this step on are hidden: their steps are taken again
        self._warn: Warn | None = warn
        self._writer: Any = None
        self._retry_at = 0.0
        self._summary: Any = None  # of the last scalars, reused while their tags stay the same
        self._tags: list[str] = []
        self._first: list[Callable[[Any], object]] = []  # what each file begins with
        self._described: set[str] = set()  # tags whose unit and meaning the file has

    def write(self, add: Callable[[Any], object]) -> None:
        """Call `add` with torch's SummaryWriter; warns at the first failure."""
        if time.monotonic() < self._retry_at:
            return
        try:
            if self._writer is not None and not os.listdir(self._path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            add(self._open())
        except OSError as error:  # also one of the writer's thread, which the next write raises
            self._writer = None
            if not isinstance(error, FileNotFoundError):
                self._retry_at = time.monotonic() + self.RETRY_SECONDS
            if self._warn is not None:
                self._warn(f"{self._path} can't be written ({error.strerror}); metrics.jsonl will have all the metrics")
                self._warn = None

    def write_first(self, add: Callable[[Any], object]) -> None:
        """`write`, now and again at the beginning of a file that replaces a lost one."""
        self.write(add)
        self._first.append(add)

    def write_scalars(self, values: Mapping[str, float], step: int) -> None:
        """All values in one event, whose message is reused: twelve values cost 13 us, twelve add_scalar calls 60."""
        values = dict(values) | in_readable_units(values)
        self.write(lambda writer: self._add_scalars(writer.file_writer, values, step))

    def write_image(self, tag: str, image: Any, about: str, step: int) -> None:
        """An image [H, W, C] of bytes. about: what it shows."""
        from torch.utils.tensorboard import summary

        self.write(
            lambda writer: self._add(
                writer.file_writer, summary.image(tag, image.numpy(), dataformats="HWC"), step, [tag], about
            )
        )

    def _add_scalars(self, file: Any, values: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._tags != (tags := list(values)):
            self._summary, self._tags = Summary(value=[Summary.Value(tag=tag) for tag in tags]), tags
        for entry, value in zip(self._summary.value, values.values(), strict=True):
            entry.simple_value = value
        self._add(file, self._summary, step, tags)

    def _add(self, file: Any, summary: Any, step: int, tags: Iterable[str], about: str = "") -> None:
        """Add values to a file; before each tag's first, the same with a description."""
        if not self._described.issuperset(tags):
            new = described([value for value in summary.value if value.tag not in self._described], about)
            if new.value:
                file.add_summary(new, step)
            self._described.update(tags)
        file.add_summary(summary, step)

    def _open(self) -> Any:
        from torch.utils.tensorboard.writer import SummaryWriter  # half a second, and not needed in a notebook

        if self._writer is None:
            _hide_writer_threads_errors()
            self._writer = SummaryWriter(str(self._path), purge_step=self._purge_step, flush_secs=FLUSH_SECONDS)
            self._purge_step = None
            self._described.clear()
            for add in self._first:
                add(self._writer)
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()


def _hide_writer_threads_errors() -> None:
    """TensorBoard's thread passes its OSError on to the next write, so Python need not print a traceback as well."""
    original = threading.excepthook

    def show(args: Any) -> None:
        if not (isinstance(args.exc_value, OSError) and "tensorboard" in type(args.thread).__module__):
            original(args)

    if getattr(original, "__name__", "") != show.__name__:
        threading.excepthook = show


def plain_json(value: Any) -> Any:
    """The same with nan and inf as text, since JSON has no numbers for them."""
    if isinstance(value, dict):
        return {name: plain_json(part) for name, part in value.items()}
    if isinstance(value, list):
        return [plain_json(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
