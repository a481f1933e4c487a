"""The run's metrics: loss, loss scale, and the throughput and memory of every rank.

An interval is the steps since the last log step; their StepReports stay on the device.
At a log step, `begin` starts one copy of the reports' scalars to the host. One step later, while
the device computes, `read` sums each rank's scalars into one row and all-gathers the rows into a
table [ranks, len(RANK_METRICS)]. `write` writes it to metrics.jsonl and TensorBoard.
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

if TYPE_CHECKING:  # imported in `open`: TensorBoard takes half a second, and not all runs log
    from dist_amp.telemetry.writers import JsonlWriter, TensorBoardWriter


class Metrics:
    """Collects each step's report; at log steps writes the metrics and all observers' tags."""

    def __init__(self, world: World, clip: Clip, observers: Observers | None = None):
        self.world = world
        self.last: LogRow | None = None
        self.evaluation: Tags = {}  # the values of the latest evaluation
        self.evaluated_step = 0
        self.best: Tags = {}  # {"step", "loss"} of the lowest validation loss
        self.sample = ""  # the latest text that the model generated
        self.hosts = world.gather(platform.node())
        self._max_norm = clip.limit if clip.by == "norm" else math.inf  # a larger norm is clipped
        self.interval = Interval(self._max_norm)
        # Each rank's SUMMED_METRICS over this process's log steps: [ranks, len(SUMMED_METRICS)].
        self._totals = np.zeros((world.world_size, len(SUMMED_METRICS)))
        self._pending: tuple[Any, ...] | None = None  # from `begin` to `read`: a log step's metrics
        self._jsonl: JsonlWriter | None = None
        self._tensorboard: TensorBoardWriter | None = None
        self._observers = observers or Observers()

    def open(self, folder: Path, first_step: int, config_text: str) -> None:
        """Start writing to the folder. Drops entries after first_step: their steps are repeated."""
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

    def unfinished_sums(self, data: Batches) -> Tensor:
        """The interval's sums, for a checkpoint: [len(SAVED)] float64. Waits for the device."""
        self.interval.start_copy({})
        self.interval.read()  # adds the steps to `sums`
        sums = self.interval.sums | {"tokens_seen": self.interval.sums["tokens_seen"] + data.tokens}
        return torch.tensor([sums[name] for name in SAVED], dtype=torch.float64)

    def resume_unfinished(self, saved: Tensor, same_world: bool) -> None:
        """Continue an interval from every rank's `unfinished_sums`: [ranks, len(SAVED)] float64."""
        defaults = [math.nan, 0.0, 0.0, 0.0]  # of tokens_seen and on, which older checkpoints lack
        rows = [[*row, *defaults][: len(SAVED)] for row in saved.tolist()]
        own_sums = rows[self.world.rank if same_world else 0]
        if not same_world:  # rank 0 takes the sums that differ by rank; other ranks start from 0
            for column in (0, 3):  # loss_sum and tokens_seen
                own_sums[column] = sum(row[column] for row in rows) * self.world.is_main
        self.interval = Interval(self._max_norm, own_sums)

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
        """Start copying the interval's metrics to the host; every rank calls it at a log step."""
        device = self.world.device
        interval = self.interval
        # End the lap before the copy starts: once the copy has arrived, the lap's events are done.
        lap = self.world.clock.lap()
        # The copy is in float32, which is exact up to 2^24; train.steps is at most 10 million.
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
            "items": data.items,  # samples
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
        """All-gather the pending metrics, or None. save_done: this rank has no save in progress."""
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
        """Write the tags that are numbers to this rank's TensorBoard folder only."""
        scalars = {tag: value for tag, value in tags.items() if isinstance(value, Real)}
        if self._tensorboard is not None and scalars:
            self._tensorboard.write_scalars(scalars, step)

    def write_evaluation(self, step: int, values: Tags, extend: Any = lambda values: "") -> Any:
        """Write an evaluation's metrics, which are equal on all ranks; only rank 0 writes. First
        calls extend(values), the task's callback: it may add values; returns what it returns.
        """
        if not values:
            return ""
        self.evaluation = values
        self.evaluated_step = step
        if values["loss"] < self.best.get("loss", math.inf):
            self.best = {"step": step, "loss": values["loss"]}
        try:
            return extend(values)
        finally:  # an error in `extend` must not lose the evaluation
            self.write_scalars(step, {f"eval/{name}": value for name, value in values.items()})
            text = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
            self.world.say(f"eval  {step:>6}  {text}")

    def write_to_tensorboard(self, add: Callable[[Any], object]) -> None:
        """Call add(writer) with this rank's SummaryWriter; does nothing if the rank has none."""
        if self._tensorboard is not None:
            self._tensorboard.write(add)

    def write_text(self, tag: str, text: str, step: int) -> None:
        self.write_to_tensorboard(lambda writer: writer.add_text(tag, f"```\n{text}\n```", step))

    @property
    def last_logged(self) -> dict[str, Any]:
        """The latest log step's "step" and global tags. Before this process's first log step: on
        rank 0 the last log step's line that a resume has kept in metrics.jsonl, else {}.
        """
        if self.last is not None:
            return {"step": self.last.step, **self.last.global_tags()}
        return self._jsonl.last if self._jsonl is not None else {}

    def rank_table(self) -> list[Tags]:
        """Each rank's tags, by its sums over this process's steps; without any, as last logged."""
        if self.last is None:
            return self.last_logged.get("ranks", [])  # type: ignore[no-any-return]
        table = self.last.table.copy()
        table[:, SUMMED] = self._totals
        row = LogRow(self.last.step, table)
        return replace(row, observed=self._observers.tell("rank_tags", row)).tags_of_ranks()

    def close_files(self) -> None:  # metrics.jsonl is closed after each line
        if self._tensorboard is not None:
            self._tensorboard.close()


def memory_use(device: torch.device) -> tuple[int, ...]:
    """(Peak, current, reserved) bytes and the number of allocation retries, by torch's allocator;
    on a CPU, the process's resident set, with 0 for the last two.
    """
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        names = ["allocated_bytes.all.peak", "allocated_bytes.all.current"]
        names += ["reserved_bytes.all.current", "num_alloc_retries"]
        return tuple(int(stats.get(name, 0)) for name in names)
    peak, now = resident_bytes()
    return peak, now, 0, 0


def resident_bytes() -> tuple[int, int]:
    """(Peak, current) resident set in bytes. Not by getrusage: its peak includes the parent's."""
    text = Path("/proc/self/status").read_text()
    sizes = {name: 1024 * int(kib) for name, kib in re.findall(r"(VmHWM|VmRSS):\s*(\d+) kB", text)}
    return sizes.get("VmHWM", sizes["VmRSS"]), sizes["VmRSS"]
