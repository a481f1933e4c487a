"""Rank 0's console: a line per log step; on a terminal a progress bar below what is printed."""

import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from typing import Any, Self

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from dist_amp.telemetry.metrics import Metrics
from dist_amp.telemetry.step_report import LogRow, Observer, StepReport

BAR = "step {n_fmt:>6}/{total_fmt} {percentage:3.0f}% |{bar:10}| {elapsed} eta {remaining}{postfix}"


class Console(Observer):
    """Prints the log steps from first_step to last_step, on rank 0. loss_scale: at the start.

    On a terminal, what is printed in a with-block goes through tqdm, so the bar stays below it.
    """

    def __init__(self, metrics: Metrics, first_step: int, last_step: int, loss_scale: float):
        self._world = metrics.world
        self._last_step = last_step
        self._loss_scale = loss_scale
        self._first_step = first_step
        self._opened = time.monotonic()
        self._bar: Any = None
        self._restore = ExitStack()
        if self._world.is_main and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            self._bar = tqdm(
                total=last_step,
                initial=first_step,
                bar_format=BAR,
                file=sys.stdout,
                dynamic_ncols=True,
                disable=False,  # whatever TQDM_DISABLE says
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._restore.callback(self._bar.close)
            self._restore.enter_context(redirect_stdout(DummyTqdmFile(sys.stdout)))
            self._restore.enter_context(redirect_stderr(DummyTqdmFile(sys.stderr)))
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the bar as it is; what is printed from now on goes to the terminal itself."""
        self._restore.close()

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        if self._bar is not None:
            self._bar.update()

    def on_log(self, row: LogRow) -> None:
        text = "  ".join(columns(row, self._loss_scale))
        self._loss_scale = row["loss_scale"]
        if self._bar is not None:
            self._bar.set_postfix_str(text)
            return
        progress = f"step {row.step:>6}/{self._last_step} {row.step / self._last_step:>4.0%}"
        elapsed = time.monotonic() - self._opened
        times = duration(elapsed)
        if row.step > self._first_step:
            left = elapsed * (self._last_step - row.step) / (row.step - self._first_step)
            times += f" eta {duration(left)}"
        self._world.say(f"{progress}  {times}  {text}")


def columns(row: LogRow, loss_scale_before: float) -> list[str]:
    """One log interval, the most important first."""
    parts = []
    if row["applied_in_interval"]:
        parts.append(f"loss {row.loss:.4f}")
    if skipped := int(row["skipped_in_interval"]):
        parts.append(f"skipped {skipped} (gradients not finite)")
    scales = dict.fromkeys((loss_scale_before, row["loss_scale"]))
    if list(scales) != [1.0]:
        parts.append(f"scale {' -> '.join(map(power_of_two, scales))}")
    if math.isfinite(row["grad_norm"]):
        parts.append(f"grad_norm {row['grad_norm']:.3g}")
    parts.append(f"lr {row['lr']:.2e}")
    parts.append(f"items/s {row.per_second('items').sum():,.0f}")
    if row.has_tokens:
        parts.append(f"tokens/s {row.per_second('tokens').sum():,.0f}")
    if "throughput/mfu" in row.rank_columns:
        parts.append(f"mfu {100 * row.rank_columns['throughput/mfu'].mean():.3g} %")
    parts.append(f"peak {row.column('peak_bytes').max() / 2**20:,.0f} MiB")
    return parts


def duration(seconds: float) -> str:
    """Such as 1:05 or 2:30:00."""
    return str(tqdm.format_interval(seconds)).removeprefix("0")


def power_of_two(scale: float) -> str:
    """Such as 2^16; the number itself if it is none."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"
