"""The run's metrics: loss, loss scale, and the throughput and memory of every rank.

At a log step `begin` starts one copy of the interval's scalars to the host. One step later, while
the device computes, `read` sums them and gathers every rank's row, and `write` writes the rows.
"""

import math
import platform
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dist_amp.data import Batches
from dist_amp.optim import Schedule
from dist_amp.precision import Clip, Scaler
from dist_amp.telemetry.observer import Observers
from dist_amp.telemetry.step_report import (
    MAX_RANK_FOLDERS,
    MEMORY,
    RANK_METRICS,
    SUMMED,
    SUMMED_METRICS,
    LogRow,
    StepReport,
    Tags,
)
from dist_amp.telemetry.sums import SAVED, Interval
from dist_amp.world import World

if TYPE_CHECKING:  # `open` imports them: TensorBoard takes half a second, and not all runs log
    from dist_amp.telemetry.writers import JsonlWriter, TensorBoardWriter


class Metrics:
    """Observes each step; once open, writes its metrics and all observers' tags at log steps."""

    def __init__(self, world: World, clip: Clip, observers: Observers | None = None):
        self.world = world
        self.last: LogRow | None = None
        self.evaluation: Tags = {}  # the values of the latest evaluation
        self.evaluated_step = 0
        self.best: Tags = {}  # the lowest validation loss, with its step
        self.sample = ""  # the latest text that the model generated
        self.hosts = world.gather(platform.node())
        self._max_norm = clip.limit if clip.by == "norm" else math.inf  # to count clipped steps
        self.interval = Interval(self._max_norm)
        # SUMMED_METRICS of each rank since the start or resume.
        self._totals = np.zeros((world.world_size, len(SUMMED_METRICS)))
        self._pending: tuple[Any, ...] | None = None  # a log step's metrics, being copied
        self._jsonl: JsonlWriter | None = None
        self._tensorboard: TensorBoardWriter | None = None
        self._observers = observers or Observers()

    def open(self, folder: Path, first_step: int, config_text: str) -> None:
        """Start writing to the run's folder; entries of steps after first_step are dropped."""
        from dist_amp.telemetry.writers import JsonlWriter, TensorBoardWriter

        world = self.world
        if world.is_main:
            is_evaluated = self.evaluated_step == first_step
            path = folder / "metrics.jsonl"
            self._jsonl = JsonlWriter(path, first_step, world.warn, is_evaluated)
        if world.is_main or world.world_size <= MAX_RANK_FOLDERS:
            path = folder / "tensorboard" / f"rank{world.rank:05d}"
            self._tensorboard = TensorBoardWriter(path, first_step + 1, world.warn)
        if world.is_main:
            self.write_text("start/config", config_text, first_step)
        self.world.clock.restart()

    def unfinished(self, data: Batches) -> Tensor:
        """The unfinished interval's sums, as a checkpoint saves them: [len(SAVED)] float64 on the
        host; no times, so that the same steps make the same checkpoint. Waits for the device.
        """
        self.interval.start_copy({})
        self.interval.read()
        sums = self.interval.sums | {"tokens_seen": self.interval.sums["tokens_seen"] + data.tokens}
        return torch.tensor([sums[name] for name in SAVED], dtype=torch.float64)

    def resume_unfinished(self, saved: Tensor, same_world: bool) -> None:
        """Continue from the `unfinished` of every rank that saved: [ranks, len(SAVED)] float64."""
        later = [math.nan, 0.0, 0.0, 0.0]  # what older checkpoints, with three columns, lack
        rows = [[*row, *later][: len(SAVED)] for row in saved.tolist()]
        mine = rows[self.world.rank if same_world else 0]
        if not same_world:  # rank 0 gets what log steps sum over ranks; the rest is equal on all
            for column in (0, 3):  # loss_sum and tokens_seen
                mine[column] = sum(row[column] for row in rows) * self.world.is_main
        self.interval = Interval(self._max_norm, mine)

    def after_step(self, report: StepReport, micro_batches: Any = None) -> None:
        self.interval.reports.append(report)

    def begin(
        self,
        step: int,
        schedule: Schedule,
        scaler: Scaler,
        data: Batches,
        task_tags: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Start copying the interval's metrics; every rank calls it. task_tags: {tag: scalar}."""
        device = self.world.device
        interval = self.interval
        # End the lap before the copy begins: once the copy has arrived, the lap's events are done.
        lap = self.world.clock.lap()
        # The copy is in float32, which is exact up to 2^24, more than train.steps can be.
        applied, skipped, in_a_row = schedule.counters.to(device).unbind()
        on_device = {
            "loss_scale": scaler.scale_tensor.to(device),
            "applied_steps": applied,
            "skipped_steps": skipped,
            "skips_in_a_row": in_a_row,
            "lr": schedule.last_lr.to(device),
        }
        interval.start_copy({**on_device, **task_tags})
        interval.sums["tokens_seen"] += data.tokens
        on_host = {
            "items": data.items,
            "tokens": data.tokens,
            "samples_seen": data.position,
            "epoch": data.position / data.plan.length,
            **dict(zip(MEMORY, memory_use(device), strict=True)),
        }
        self._pending = (step, interval, lap, on_host, tuple(task_tags))
        self.interval = Interval(self._max_norm)
        self.interval.sums["tokens_seen"] = interval.sums["tokens_seen"]
        data.items = 0
        data.tokens = 0

    def read(self, save_done: bool = True) -> LogRow | None:
        """The pending metrics of all ranks, or None. Every rank calls it, with its save_done."""
        pending = self._pending
        self._pending = None
        if pending is None:
            return None
        step, interval, lap, on_host, task_tags = pending
        values = interval.read() | interval.sums | lap.seconds() | on_host
        values["save_done"] = save_done
        numbers = torch.tensor([values[name] for name in RANK_METRICS], dtype=torch.float64)
        table = self.world.stack(numbers).numpy()
        tags = {tag: values[tag] for tag in task_tags}
        row = LogRow(step, table, tags)
        self.last = replace(row, observed=self._observers.tell("rank_tags", row))
        self._totals += table[:, SUMMED]
        return self.last

    def write(self, row: LogRow) -> None:
        extra = {**row.task_tags, **self._observers.tell("tags", row)}
        if not self.world.is_main:
            self.write_rank_scalars(row.step, row.rank_tags(self.world.rank) | extra)
        elif self._jsonl is not None:
            with self.world.clock.phase("logging"):
                ranks = row.tags_of_ranks(MAX_RANK_FOLDERS)
                tags = row.global_tags() | extra
                now = round(time.time(), 3)
                self._jsonl.append({"step": row.step, "unix_time": now, **tags, "ranks": ranks})
                self.write_rank_scalars(row.step, ranks[0] | tags)

    def write_scalars(self, step: int, tags: Tags) -> None:
        if self._jsonl is not None:
            self._jsonl.append({"step": step, **tags})
            self.write_rank_scalars(step, tags)

    def write_rank_scalars(self, step: int, tags: Tags) -> None:
        """This rank's metrics that are numbers, to TensorBoard only."""
        scalars = {tag: value for tag, value in tags.items() if isinstance(value, Real)}
        if self._tensorboard is not None and scalars:
            self._tensorboard.write_scalars(scalars, step)

    def write_evaluation(self, step: int, values: Tags, extend: Any = lambda values: "") -> Any:
        """Write an evaluation's metrics, equal on all ranks, on rank 0.

        `extend` is called first and may add to `values`; returns what it returns.
        """
        if not values:
            return ""
        self.evaluation = values
        self.evaluated_step = step
        if values["loss"] < self.best.get("loss", math.inf):
            self.best = {"step": step, "loss": values["loss"]}
        try:
            return extend(values)
        finally:  # an error in `extend` must not lose what was measured
            self.write_scalars(step, {f"eval/{name}": value for name, value in values.items()})
            text = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
            self.world.say(f"eval  {step:>6}  {text}")

    def write_to_tensorboard(self, add: Callable[[Any], object]) -> None:
        """Call `add` with torch's SummaryWriter of this rank."""
        if self._tensorboard is not None:
            self._tensorboard.write(add)

    def write_text(self, tag: str, text: str, step: int) -> None:
        self.write_to_tensorboard(lambda writer: writer.add_text(tag, f"```\n{text}\n```", step))

    @property
    def last_logged(self) -> dict[str, Any]:
        """The latest global tags, with "step"; after a resume, rank 0's last metrics.jsonl line."""
        if self.last is not None:
            return {"step": self.last.step, **self.last.global_tags()}
        return self._jsonl.last if self._jsonl is not None else {}

    def rank_table(self) -> list[Tags]:
        """Each rank's tags, averaged since the start; right after a resume, the last line's."""
        if self.last is None:
            return self.last_logged.get("ranks", [])  # type: ignore[no-any-return]
        table = self.last.table.copy()
        table[:, SUMMED] = self._totals
        row = LogRow(self.last.step, table)
        return replace(row, observed=self._observers.tell("rank_tags", row)).tags_of_ranks()

    def close_files(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()


def memory_use(device: torch.device) -> tuple[int, ...]:
    """Returns (peak, current, reserved) bytes and the number of allocation retries.

    On a GPU, of torch's allocator; on a CPU, of the resident set, with 0 for the last two.
    """
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        names = ["allocated_bytes.all.peak", "allocated_bytes.all.current"]
        names += ["reserved_bytes.all.current", "num_alloc_retries"]
        return tuple(int(stats.get(name, 0)) for name in names)
    peak, now = resident_bytes()
    return peak, now, 0, 0


def resident_bytes() -> tuple[int, int]:
    """Returns (peak, current) bytes of this process. getrusage's peak includes the parent's."""
    text = Path("/proc/self/status").read_text()
    sizes = {name: 1024 * int(kib) for name, kib in re.findall(r"(VmHWM|VmRSS):\s*(\d+) kB", text)}
    return sizes.get("VmHWM", sizes["VmRSS"]), sizes["VmRSS"]
