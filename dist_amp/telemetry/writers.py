"""Writers of metrics.jsonl and TensorBoard, which survive kills, resumes and a full disk."""

import errno
import json
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard.writer import SummaryWriter

from dist_amp.files import plain_json, read_rows, write_durably
from dist_amp.telemetry.step_report import Tags

Warn = Callable[[str], object]

# TensorBoard reloads every 5 s; torch's default of 120 would leave the charts of a new run empty.
FLUSH_SECONDS = 10
LOG_STEP_KEYS = {"train/loss", "amp/skipped_steps", "ranks"}  # only log steps' lines have all three
RETRY_SECONDS = 10.0  # between attempts, since each creates a file and a thread


class JsonlWriter:
    """metrics.jsonl: a line per logged step; lines that can't be written are retried later."""

    def __init__(self, path: Path, step: int, warn: Warn, is_evaluated: bool = True):
        """step: the last one before this start; is_evaluated: whether its evaluation is done."""
        self.path = path
        self.last: dict[str, Any] = {}  # the last line of a log step that was in the file
        self._warn = warn
        self._unwritten = b""
        if path.exists():
            self._continue(step, is_evaluated)

    def _continue(self, step: int, is_evaluated: bool) -> None:
        """Drop unreadable lines, and lines of steps that this start repeats. At step 0, rename the
        whole file to metrics_before.jsonl instead.
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
                if row.keys() >= LOG_STEP_KEYS:
                    self.last = row
        write_durably(path, kept)  # a kill meanwhile must not lose the log

    def append(self, row: dict[str, Any]) -> None:
        """Write the lines that failed before, then this one; warns at the first failure."""
        is_first_failure = not self._unwritten
        self._unwritten += f"{json.dumps(plain_json(row))}\n".encode()
        problem = os.strerror(errno.ENOSPC)  # then write() writes a part, without an error
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
    """One rank's TensorBoard folder. If it is full, removed or read-only, later writes retry."""

    def __init__(self, path: Path, first_step: int, warn: Warn):
        self._path = path
        # TensorBoard hides events of an earlier start from this step on: these steps are repeated.
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
        except OSError as error:  # in this write, or in the writer's thread since the last one
            self._writer = None
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._warn(
                f"{self._path} can't be written ({error.strerror}); metrics.jsonl will have all "
                "the metrics"
            )
            self._warn = lambda text: None  # warn only once

    def write_scalars(self, values: Tags, step: int) -> None:
        """Write all values as one event: 12 values take 13 us, 12 calls of add_scalar 60 us."""
        values = {**values, **in_readable_units(values)}
        entries = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.write(lambda writer: writer.file_writer.add_summary(Summary(value=entries), step))

    def close(self) -> None:
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()
            self._writer = None


def in_readable_units(values: Tags) -> Tags:
    """More tags, for TensorBoard only: some of the values in percent, in GiB or as log2."""
    tags = {}
    if "throughput/mfu" in values:
        tags["perf/mfu_pct"] = 100 * values["throughput/mfu"]
    if "memory/peak_bytes" in values:
        tags["memory/peak_GiB"] = values["memory/peak_bytes"] / 2**30
    if values.get("amp/loss_scale", 0.0) > 0:
        tags["amp/loss_scale_log2"] = math.log2(values["amp/loss_scale"])
    return tags
