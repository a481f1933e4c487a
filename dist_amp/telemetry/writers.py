"""Writers of metrics.jsonl and TensorBoard, robust to kills, resumes and a full disk."""

import errno
import json
import math
import os
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard.writer import SummaryWriter

from dist_amp.files import plain_json, read_rows, write_durably
from dist_amp.telemetry.step_report import Tags

Warn = Callable[[str], object]

# TensorBoard looks every 5 s; torch's default of 120 would leave the charts of a new run empty.
FLUSH_SECONDS = 10
OF_LOG_STEP = {"train/loss", "amp/skipped_steps", "ranks"}
RETRY_SECONDS = 10.0  # each try makes a file and a thread


class JsonlWriter:
    """metrics.jsonl: a line per logged step; what can't be written is kept and written later."""

    def __init__(
        self, path: Path, step: int, warn: Warn = warnings.warn, is_evaluated: bool = True
    ):
        """step: to continue after; is_evaluated: whether the evaluation of that step is not due."""
        self.path = path
        self.last: dict[str, Any] = {}  # the latest line of a log step
        self._warn = warn
        self._unwritten = b""
        if path.exists():
            self._continue(step, is_evaluated)

    def _continue(self, step: int, is_evaluated: bool) -> None:
        """Drop the lines of what comes after `step`, and unreadable ones; at step 0 keep all of
        them in metrics_before.jsonl.
        """
        path = self.path
        if step == 0 and path.stat().st_size:
            before = path.replace(path.with_name("metrics_before.jsonl"))
            self._warn(f"{path.parent} had metrics but no checkpoint: they are kept in {before}")
            return
        rows, damaged = read_rows(path)
        if damaged:
            self._warn(f"{path} had unreadable lines, which are removed: {len(damaged)}")
        kept = ""
        for row in rows:
            is_repeated = row["step"] == step and "eval/loss" in row and not is_evaluated
            if row["step"] <= step and not is_repeated:
                kept += json.dumps(row) + "\n"
                if row.keys() >= OF_LOG_STEP:
                    self.last = row
        write_durably(path, kept)  # a kill in between must not lose the log

    def append(self, row: dict[str, Any]) -> None:
        """Add a line, after what could not be written before; warns at the first failure."""
        is_first_failure = not self._unwritten
        self._unwritten += f"{json.dumps(plain_json(row))}\n".encode()
        problem = os.strerror(errno.ENOSPC)  # a nearly full disk takes only the beginning
        try:
            with open(self.path, "ab", buffering=0) as file:
                self._unwritten = self._unwritten[file.write(self._unwritten) :]
        except OSError as error:
            problem = str(error.strerror)
        if self._unwritten and is_first_failure:
            self._warn(
                f"{self.path} can't be written ({problem}); its lines are kept in memory and "
                "written later"
            )


class TensorBoardWriter:
    """One rank's TensorBoard folder; if it is full, removed or read-only, a later write retries."""

    def __init__(self, path: Path, first_step: int, warn: Warn = warnings.warn):
        self._path = path
        # Events from this step on are hidden: their steps are taken again.
        self._purge_step: int | None = first_step
        self._warn = warn
        self._writer: Any = None
        self._retry_at = 0.0

    def write(self, add: Callable[[Any], object]) -> None:
        """Call `add` with torch's SummaryWriter; warns at the first failure."""
        if time.monotonic() < self._retry_at:
            return
        try:
            if self._writer is None or not os.listdir(self._path):
                self._writer = SummaryWriter(
                    str(self._path), purge_step=self._purge_step, flush_secs=FLUSH_SECONDS
                )
                self._purge_step = None
            add(self._writer)
        except OSError as error:  # also one of the writer's thread, which the next write raises
            self._writer = None
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._warn(
                f"{self._path} can't be written ({error.strerror}); metrics.jsonl will have all "
                "the metrics"
            )
            self._warn = lambda text: None  # once

    def write_scalars(self, values: Tags, step: int) -> None:
        """All values in one event: twelve values cost 13 us, twelve add_scalar calls 60."""
        values = {**values, **in_readable_units(values)}
        entries = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.write(lambda writer: writer.file_writer.add_summary(Summary(value=entries), step))

    def close(self) -> None:
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()
            self._writer = None


def in_readable_units(values: Tags) -> Tags:
    """Tags that TensorBoard gets besides `values`, and metrics.jsonl not: percent, GiB, 2^n."""
    tags = {}
    if "throughput/mfu" in values:
        tags["perf/mfu_pct"] = 100 * values["throughput/mfu"]
    if "memory/peak_bytes" in values:
        tags["memory/peak_GiB"] = values["memory/peak_bytes"] / 2**30
    if values.get("amp/loss_scale", 0.0) > 0:
        tags["amp/loss_scale_log2"] = math.log2(values["amp/loss_scale"])
    return tags
