"""The run's metrics: throughput and memory of every rank, global loss and loss scale, live in TensorBoard.

A step's results are only recorded. At a log step each rank starts one copy of its metrics to the host; one step later,
when the copy has long arrived, it sums them up there and gathers every rank's row. Nothing waits for the device.
"""

import math
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dist_amp.data import Batches
from dist_amp.optim import Schedule
from dist_amp.precision import Scaler
from dist_amp.runtime.files import write_durably
from dist_amp.settings import MetricsConfig
from dist_amp.telemetry.async_copy import Clock, Interval, StepReport
from dist_amp.telemetry.writers import JsonlWriter, TensorBoardWriter
from dist_amp.world import World

# TensorBoard selects no run by default if there are hundreds; above this, only rank 0 writes, with its ranks/* tags.
# A line of metrics.jsonl lists no more ranks either: at 1,024 it would have 200 KB.
MAX_RANK_FOLDERS = 64

# A rank's row of metrics, in this order: first those from the device, then the host's.
RANK_METRICS = (
    "loss_sum", "weight_sum", "min_weight", "grad_norm", "lr", "loss_scale", "applied_steps", "skipped_steps",
    "skips_in_a_row", "seconds", "steps", "items", "tokens", "data_wait_seconds", "peak_bytes", "allocated_bytes",
    "reserved_bytes", "allocator_retries", "item_seconds_at_peak", "save_done",
)  # fmt: skip


INDEX = {name: number for number, name in enumerate(RANK_METRICS)}

SUMMED = [INDEX[name] for name in ("items", "tokens", "seconds")]  # over the run, for its summary


@dataclass(frozen=True, eq=False)
class LogRow:
    """The metrics of one log interval, the same on every rank.

    table: [ranks, len(RANK_METRICS)] float64 on the host; every rank has it, so nothing here walks over all ranks but
    array operations. of_task: this rank's own, from the task's train_metrics, by their tags.
    """

    step: int
    table: np.ndarray
    of_task: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Weighted mean over the interval's steps, all micro-batches and all ranks."""
        weight = self["weight_sum"]
        return self.total("loss_sum") / weight if weight else math.nan

    def __getitem__(self, name: str) -> float:
        """A metric that is the same on all ranks."""
        return float(self.table[0, INDEX[name]])

    def column(self, name: str) -> np.ndarray:
        """A metric of every rank: [ranks]."""
        return self.table[:, INDEX[name]]

    def columns(self, names: Sequence[str]) -> np.ndarray:
        """Some metrics of every rank: [ranks, len(names)]."""
        return self.table[:, [INDEX[name] for name in names]]

    def total(self, name: str) -> float:
        return float(self.column(name).sum())

    @cached_property
    def has_tokens(self) -> bool:
        """Whether the task counts tokens; cached because rank 0 asks for every rank."""
        return self.total("tokens") > 0

    def per_second(self, name: str) -> np.ndarray:
        """Of every rank: [ranks]."""
        return self.column(name) / np.maximum(self.column("seconds"), 1e-9)

    def mfu(self) -> np.ndarray:
        """Model FLOPs utilisation, 1 at the device's peak; 0 where it is not known: [ranks]. See mfu.py."""
        return self.per_second("items") * self.column("item_seconds_at_peak")

    def rank_tags(self, rank: int) -> dict[str, float]:
        """The TensorBoard tags that every rank writes."""
        row = dict(zip(RANK_METRICS, self.table[rank].tolist(), strict=True))
        steps, seconds = max(row["steps"], 1), max(row["seconds"], 1e-9)
        tags = {
            "throughput/items_per_second": row["items"] / seconds,
            "memory/peak_bytes": row["peak_bytes"],
            "memory/allocated_bytes": row["allocated_bytes"],
            "time/step_seconds": row["seconds"] / steps,
            "time/data_wait_seconds": row["data_wait_seconds"] / steps,
        }
        if self.has_tokens:
            tags["throughput/tokens_per_second"] = row["tokens"] / seconds
        if row["item_seconds_at_peak"]:
            tags["throughput/mfu"] = row["items"] / seconds * row["item_seconds_at_peak"]
        if row["reserved_bytes"]:
            tags["memory/reserved_bytes"] = row["reserved_bytes"]
            tags["memory/allocator_retries"] = row["allocator_retries"]
        return tags

    def global_tags(self) -> dict[str, float]:
        """The TensorBoard tags that only rank 0 writes."""
        tags = {
            "train/loss": self.loss,
            "train/grad_norm": self["grad_norm"],
            "train/lr": self["lr"],
            "amp/loss_scale": self["loss_scale"],
            "amp/skipped_steps": self["skipped_steps"],
        }
        if len(self.table) == 1:
            return tags
        for name, values in {
            "items_per_second": self.per_second("items"),
            "peak_bytes": self.column("peak_bytes"),
            "data_wait_seconds": self.column("data_wait_seconds") / np.maximum(self.column("steps"), 1),
        }.items():
            ordered = np.sort(values)
            worst = values.argmin() if name == "items_per_second" else values.argmax()
            tags |= {
                f"ranks/{name}_min": float(ordered[0]),
                f"ranks/{name}_median": float(ordered[len(ordered) // 2]),
                f"ranks/{name}_max": float(ordered[-1]),
                f"ranks/{name}_worst_rank": int(worst),
            }
        return tags


@dataclass(frozen=True)
class PendingMetrics:
    """A log step's metrics on their way to the host."""

    step: int
    interval: Interval
    spans: list[tuple[Any, Any]]  # of the clock
    on_host: tuple[float, ...]
    of_task: tuple[str, ...]  # the tags of the last values on the device


class Metrics:
    """Collects step reports; writes console lines, metrics.jsonl and TensorBoard at log steps.

    `begin` starts copying a log step's metrics and `read` reads them a step later; `log` does both at once. Nothing is
    written before `open`, so a notebook that steps a run leaves no files behind.
    """

    def __init__(self, config: MetricsConfig, world: World):
        self.config = config
        self.world = world
        self.last: LogRow | None = None
        self.evaluation: dict[str, float] = {}  # the latest
        self.evaluated_step = 0
        self.best: dict[str, float] = {}  # the lowest validation loss, with its step
        self.sample = ""  # the latest, if it is a text
        self.item_seconds_at_peak = 0.0  # from mfu.py, constant over a run
        self._interval = Interval()
        self.save: Future[None] | None = None  # a checkpoint's, while it is written in the background
        self._totals = np.zeros((world.world_size, len(SUMMED)))  # per rank, over the run
        self._hosts = world.gather_texts(platform.node())
        self._pending: PendingMetrics | None = None
        self._clock = Clock(world.device)
        self._jsonl: JsonlWriter | None = None
        self._tensorboard: TensorBoardWriter | None = None

    def open(self, folder: Path, first_step: int, config_text: str) -> None:
        """Start writing into the run's folder; steps that a resumed run takes again replace their earlier entries."""
        rank, warn = self.world.rank, self.world.warn
        if self.world.is_main:
            self._jsonl = JsonlWriter(folder / "metrics.jsonl", first_step, warn)
        if rank < (MAX_RANK_FOLDERS if self.world.world_size <= MAX_RANK_FOLDERS else 1):
            self._tensorboard = TensorBoardWriter(folder / "tensorboard" / f"rank{rank:05d}", first_step + 1, warn)
            if self._jsonl is not None:
                self._tensorboard.skipped_steps = self._jsonl.last.get("amp/skipped_steps", 0.0)
                text = f"```toml\n{config_text}\n```"
                self.write_first(lambda writer: writer.add_text("config", text, first_step))
        self._clock = Clock(self.world.device)

    @property
    def interval(self) -> Tensor:
        """What a checkpoint saves of an unfinished log interval: loss, weight, min_weight, [3] float64 on the host.

        Waits for the device.
        """
        self._interval.start_copy()
        self._interval.read()
        interval = self._interval
        return torch.tensor([interval.loss, interval.weight, interval.min_weight], dtype=torch.float64)

    def resume_interval(self, intervals: Tensor, same_world: bool) -> None:
        """Continue an unfinished log interval. intervals: every saving rank's `interval`, [ranks, 3] float64."""
        loss, weight, min_weight = intervals[self.world.rank if same_world else 0].tolist()
        if not same_world:  # losses are summed over ranks at the log step, so rank 0 carries all of them
            loss = intervals[:, 0].sum().item() if self.world.is_main else 0.0
        self._interval = Interval(loss, weight, min_weight)

    def record(self, report: StepReport) -> None:
        """Record one step's results without reading them."""
        self._interval.add(report)

    @contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """Exclude what happens inside (evaluation, saving) from the throughput."""
        self._clock.pause()
        yield
        self._clock.resume()

    def begin(
        self,
        step: int,
        schedule: Schedule,
        scaler: Scaler,
        data: Batches,
        of_task: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Start copying the interval's metrics to the host, without waiting; every rank calls it at the same step.

        of_task: {tag: scalar on the device}, for this rank.
        """
        device, interval = self.world.device, self._interval
        spans = self._clock.lap()  # first, so that its end has been reached once the copy below has arrived
        interval.start_copy(
            torch.stack((schedule.last_lr.to(device), scaler.scale_tensor)),
            schedule.counters.to(device),  # float32 is exact up to 2^24, which is more than train.steps may be
            *(value.float().reshape(1) for value in of_task.values()),
        )
        counts = (interval.steps, data.items, data.tokens, data.wait_seconds)
        on_host = (*counts, *memory_use(device), self.item_seconds_at_peak)
        self._pending = PendingMetrics(step, interval, spans, on_host, tuple(of_task))
        self._interval = Interval()
        data.items, data.tokens, data.wait_seconds = 0, 0, 0.0

    def read(self) -> LogRow | None:
        """The pending metrics of all ranks, or None if there are none; every rank calls it at the same step."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        interval = pending.interval
        of_device, seconds = interval.read(), self._clock.seconds(pending.spans)
        count = len(of_device) - len(pending.of_task)
        of_device, of_task = of_device[:count], dict(zip(pending.of_task, of_device[count:], strict=True))
        sums = (interval.loss, interval.weight, interval.min_weight, interval.norm)
        save_done = self.save is None or self.save.done()  # rides along: a log step is one collective
        row = torch.tensor([*sums, *of_device, seconds, *pending.on_host, save_done], dtype=torch.float64)
        self.last = LogRow(pending.step, self.world.gather(row).numpy(), of_task)
        self._totals += self.last.table[:, SUMMED]
        return self.last

    def log(self, step: int, schedule: Schedule, scaler: Scaler, data: Batches) -> LogRow:
        """The metrics of the interval up to now, of all ranks, read at once."""
        self.begin(step, schedule, scaler, data)
        row = self.read()
        assert row is not None
        return row

    def write(self, row: LogRow, last_step: int) -> None:
        """Write a row to TensorBoard, metrics.jsonl and the console."""
        if not self.world.is_main:
            if self._tensorboard is not None:
                self._tensorboard.write_scalars(row.rank_tags(self.world.rank) | row.of_task, row.step)
            return
        global_tags = row.global_tags() | row.of_task
        ranks = [row.rank_tags(rank) for rank in range(min(len(row.table), MAX_RANK_FOLDERS))]
        print(console_line(row, last_step), flush=True)
        if self._jsonl is not None and self._tensorboard is not None:
            self._jsonl.append({"step": row.step, **global_tags, "ranks": ranks})
            self._tensorboard.write_scalars(ranks[0] | global_tags, row.step)

    def write_scalars(self, step: int, tags: Mapping[str, float]) -> None:
        """Global metrics, written by rank 0 to metrics.jsonl and TensorBoard."""
        if self._jsonl is not None and self._tensorboard is not None:
            self._jsonl.append({"step": step, **tags})
            self._tensorboard.write_scalars(tags, step)

    def write_evaluation(self, step: int, values: dict[str, float]) -> None:
        """The metrics of an evaluation, equal on all ranks, written by rank 0."""
        if not values:
            return
        self.evaluation, self.evaluated_step = values, step
        if values["loss"] < self.best.get("loss", math.inf):
            self.best = {"step": step, "loss": values["loss"]}
        self.write_scalars(step, {f"eval/{name}": value for name, value in values.items()})
        text = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        self.world.say(f"eval  {step:>6}  {text}")

    def write_sample(self, step: int, sample: str | Tensor, about: str) -> None:
        """What the model generated, written by rank 0: a text, or an image [H, W, C] of bytes. about: what it shows."""
        if self._jsonl is None or self._tensorboard is None:
            return
        if isinstance(sample, Tensor):
            self._tensorboard.write_image("sample", sample, about, step)
            return
        self.sample = printable(sample)
        path = self._jsonl.path.with_name("sample.txt")
        try:
            write_durably(path, self.sample)
        except OSError as error:
            self.world.warn(f"{path} can't be written ({error.strerror}); the sample is in TensorBoard")
        evaluated = self.evaluation.items() if self.evaluated_step == step else ()
        label = ", ".join([f"step {step}", *(f"held-out {name} {value:.4f}" for name, value in evaluated)])
        text = f"**{label}**: {about}\n```\n{self.sample}\n```"
        self._tensorboard.write(lambda writer: writer.add_text("sample", text, step))

    def write_first(self, add: Callable[[Any], object]) -> None:
        """What rank 0's TensorBoard files begin with: `add` is called with torch's SummaryWriter."""
        if self.world.is_main and self._tensorboard is not None:
            self._tensorboard.write_first(add)

    def write_text(self, tag: str, text: str, step: int) -> None:
        """This rank's preformatted text, to TensorBoard."""
        if self._tensorboard is not None:
            self._tensorboard.write(lambda writer: writer.add_text(tag, f"```\n{text}\n```", step))

    @property
    def last_logged(self) -> dict[str, Any]:
        """The latest global metrics by their tags; right after a resume, the last line of metrics.jsonl; may be empty.

        With "step", and in the latter case with "ranks".
        """
        if self.last is not None:
            return {"step": self.last.step, **self.last.global_tags()}
        return self._jsonl.last if self._jsonl is not None else {}

    def rank_table(self) -> list[dict[str, Any]]:
        """Per rank: host, peak memory, and throughput since the start or resume without evaluation and saving.

        With `mfu` if it is known.
        """
        if self.last is None:  # nothing was logged since the resume
            ranks = self.last_logged.get("ranks", [])
        else:
            run = LogRow(self.last.step, self.last.table.copy())
            run.table[:, SUMMED] = self._totals
            ranks = [run.rank_tags(rank) for rank in range(len(run.table))]
        return [
            {
                "rank": rank,
                "host": self._hosts[rank] if rank < len(self._hosts) else "",  # the world may have been larger
                "peak_memory_bytes": int(tags["memory/peak_bytes"]),
                "items_per_second": tags["throughput/items_per_second"],
                "tokens_per_second": tags.get("throughput/tokens_per_second", 0.0),
            }
            | ({"mfu": tags["throughput/mfu"]} if tags.get("throughput/mfu") else {})
            for rank, tags in enumerate(ranks)
        ]

    def write_pending(self, last_step: int) -> None:
        """After a failure, write metrics that were not read yet; one process only, since other ranks may have died."""
        if self.world.world_size == 1 and (row := self.read()) is not None:
            self.write(row, last_step)

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()


def printable(text: str) -> str:
    """The text without control characters, which an untrained model may generate and a terminal would execute."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def memory_use(device: torch.device) -> tuple[int, int, int, int]:
    """(peak, current) bytes: of torch's allocator on a GPU, of the process's resident set on a CPU.

    Then (reserved bytes, allocator retries), 0 on a CPU: what the allocator holds of the GPU, in use or not, and how
    often it had to give memory back and ask again, each time waiting for the device.
    """
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        names = ("allocated_bytes.all.peak", "allocated_bytes.all.current", "reserved_bytes.all.current")
        peak, now, reserved, retries = (int(stats.get(name, 0)) for name in (*names, "num_alloc_retries"))
        return peak, now, reserved, retries
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)  # a tenth of the cost of opening it as text
    except OSError:  # no /proc outside Linux
        return peak, peak, 0, 0
    pages = int(os.read(file, 64).split()[1])
    os.close(file)
    now = pages * resource.getpagesize()
    return max(peak, now), now, 0, 0


def console_line(row: LogRow, last_step: int) -> str:
    """One log interval in one line."""
    parts = [
        f"step {row.step:>6}/{last_step}",
        f"loss {row.loss:.4f}",
        f"grad_norm {row['grad_norm']:.3g}",
        f"lr {row['lr']:.2e}",
        f"items/s {row.per_second('items').sum():,.0f}",
    ]
    if row.has_tokens:
        parts.append(f"tokens/s {row.per_second('tokens').sum():,.0f}")
    if row.column("item_seconds_at_peak").all():
        parts.append(f"mfu {100 * row.mfu().mean():.3g} %")
    parts.append(f"peak {row.column('peak_bytes').max() / 2**20:,.0f} MiB")
    if row["loss_scale"] != 1:
        parts.append(f"scale {row['loss_scale']:g}")
    if row["skipped_steps"]:
        parts.append(f"skipped {row['skipped_steps']:.0f}")
    return "  ".join(parts)
