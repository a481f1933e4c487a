"""Rank 0's console: one line per log step in a file or a pipe; on a terminal one line that is updated in place."""

import math
import os
import sys
import time
from typing import Any

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from dist_amp.telemetry.log_row import LogRow

REDRAW_SECONDS = 0.5  # on a terminal, between log steps


class Console:
    """Prints the log steps of a run from first_step to last_step.

    loss_scale: the one that it begins with. in_place: update one line where standard output is a terminal; until
    `close`, standard output and error then go through tqdm, which keeps the line below what is printed.
    """

    def __init__(self, first_step: int, last_step: int, loss_scale: float, in_place: bool = True):
        self._first, self._last = first_step, last_step
        self._step = first_step
        self._loss_scale = loss_scale
        self._opened = time.monotonic()
        self._timed_from: tuple[int, float] | None = None  # a step, and when it ended: the first is slower than others
        self._columns: list[str] = []
        self._bar: Any = None
        self._streams = sys.stdout, sys.stderr
        if in_place and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            self._bar = tqdm(bar_format="{desc}", file=sys.stdout, dynamic_ncols=True, leave=True, disable=False)
            self._drawn = 0.0
            # What anyone prints comes above the line.
            sys.stdout, sys.stderr = DummyTqdmFile(sys.stdout), DummyTqdmFile(sys.stderr)

    def count_step(self) -> None:
        """A step was taken, as far as the host knows."""
        self._step += 1
        now = time.monotonic()
        if self._timed_from is None:
            self._timed_from = self._step, now
        if self._bar is not None and now - self._drawn > REDRAW_SECONDS:
            self._draw(now)

    def log(self, row: LogRow) -> None:
        """Print a log interval."""
        self._columns = columns(row, self._loss_scale)
        self._loss_scale = row["loss_scale"]
        now = time.monotonic()
        if self._bar is None:
            print("  ".join([*self._progress(row.step, now), *self._columns]), flush=True)
        else:
            self._draw(now)

    def _draw(self, now: float) -> None:
        self._drawn = now
        width = (self._bar.ncols or 80) - 1
        self._bar.set_description_str(fitted([*self._progress(self._step, now), *self._columns], width))
        self._streams[0].write("\r")  # what other processes print covers the line, rather than continues it
        self._streams[0].flush()

    def _progress(self, step: int, now: float) -> list[str]:
        """The step, its share of all, the time of this process, and what is left of it."""
        times = duration(now - self._opened)
        if self._timed_from is not None and self._step > self._timed_from[0]:
            counted, since = self._timed_from
            left = (self._last - step) * (now - since) / (self._step - counted)
            times += f" eta {duration(left)}"
        return [f"step {step:>6}/{self._last} {step / self._last:>4.0%}", times]

    def close(self) -> None:
        """Leave the last line as it is; from here on, what is printed goes to the terminal itself."""
        if self._bar is not None:
            sys.stdout, sys.stderr = self._streams
            self._bar.close()
            self._bar = None


def columns(row: LogRow, loss_scale_before: float) -> list[str]:
    """One log interval, the most important first."""
    parts = []
    skipped, scale = int(row["skipped_in_interval"]), row["loss_scale"]
    if row["applied_in_interval"]:
        parts.append(f"loss {row.loss:.4f}")
    if skipped:
        why = "fp16 overflow" if scale != 1 or loss_scale_before != 1 else "gradients not finite"
        parts.append(f"skipped {skipped} ({why})")
    if scale != loss_scale_before:
        moved = f"scale {power_of_two(loss_scale_before)} -> {power_of_two(scale)}"
        parts = [*parts[:-1], f"{parts[-1]}, {moved}"] if skipped else [*parts, moved]
    elif scale != 1:
        parts.append(f"scale {power_of_two(scale)}")
    if math.isfinite(row["grad_norm"]):
        parts.append(f"grad_norm {row['grad_norm']:.3g}")
    parts += [f"lr {row['lr']:.2e}", f"items/s {row.per_second('items').sum():,.0f}"]
    if row.has_tokens:
        parts.append(f"tokens/s {row.per_second('tokens').sum():,.0f}")
    if row.column("item_seconds_at_peak").all():
        parts.append(f"mfu {100 * row.mfu().mean():.3g} %")
    return [*parts, f"peak {row.column('peak_bytes').max() / 2**20:,.0f} MiB"]


def duration(seconds: float) -> str:
    """Such as 1:05 or 2:30:00."""
    text: str = tqdm.format_interval(seconds)
    return text.removeprefix("0")


def power_of_two(scale: float) -> str:
    """Such as 2^16; the number itself if it is none."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


def fitted(parts: list[str], width: int) -> str:
    """As many of the first parts as fit into the width, with two spaces between them."""
    while len(parts) > 1 and len("  ".join(parts)) > width:
        parts = parts[:-1]
    return "  ".join(parts)[:width]
