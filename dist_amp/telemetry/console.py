"""Rank 0's console: a line per log step.

Docs: docs/metrics.md
"""

import math
import time

from tqdm import tqdm

from dist_amp.telemetry.metrics import Metrics
from dist_amp.telemetry.observer import Observer
from dist_amp.telemetry.step_report import LogRow

SECONDS = 30.0  # from one progress line of an evaluation to the next


class Console(Observer):
    """Prints a line per log step on rank 0. loss_scale: its value at the start of the fit."""

    def __init__(self, metrics: Metrics, first_step: int, last_step: int, loss_scale: float):
        self._world = metrics.world
        self._first_step = first_step
        self._last_step = last_step
        self._loss_scale = loss_scale
        self._started = time.monotonic()
        self._evaluation_began = self._last_line = 0.0

    def on_log(self, row: LogRow) -> None:
        progress = f"step {row.step:>6}/{self._last_step} {row.step / self._last_step:>4.0%}"
        elapsed = time.monotonic() - self._started
        times = duration(elapsed)
        if row.step > self._first_step:
            left = elapsed * (self._last_step - row.step) / (row.step - self._first_step)
            times += f" eta {duration(left)}"
        figures = "  ".join(columns(row, self._loss_scale))
        self._loss_scale = row["loss_scale"]
        self._world.say(f"{progress}  {times}  {figures}")

    def during_evaluation(self, done: int, steps: int) -> None:
        """Print the progress of an evaluation that takes more than SECONDS."""
        now = time.monotonic()
        if not done:
            self._evaluation_began = self._last_line = now
        if now - self._last_line >= SECONDS:
            self._last_line = now
            seconds = now - self._evaluation_began
            left = duration(seconds * (steps - done) / max(done, 1))
            self._world.say(f"evaluation: batch {done} of {steps}, {duration(seconds)} eta {left}")


def columns(row: LogRow, loss_scale_before: float) -> list[str]:
    parts = []
    if row["applied_in_interval"]:
        parts.append(f"loss {row.loss:.4f}")
    if skipped := int(row["skipped_in_interval"]):
        parts.append(f"skipped {skipped} (gradients not finite)")
    unit = "tokens" if row.has_tokens else "items"
    parts.append(f"{unit}/s {row.per_second(unit).sum():,.0f}")
    parts.append(f"peak {row.column('peak_bytes').max() / 2**20:,.0f} MiB")
    if "throughput/mfu" in row.rank_columns:
        parts.append(f"mfu {100 * row.rank_columns['throughput/mfu'].mean():.3g} %")
    scales = dict.fromkeys((loss_scale_before, row["loss_scale"]))  # one entry if they are equal
    if list(scales) != [1.0]:  # 1: the run does not scale its loss
        parts.append(f"scale {' -> '.join(f'{scale:g}' for scale in scales)}")
    if math.isfinite(row["grad_norm"]):
        parts.append(f"grad_norm {row['grad_norm']:.3g}")
    parts.append(f"lr {row['lr']:.2e}")
    if row.has_tokens:
        parts.append(f"items/s {row.per_second('items').sum():,.0f}")
    return parts


def duration(seconds: float) -> str:
    return str(tqdm.format_interval(seconds)).removeprefix("0")
