"""The run's metrics: throughput and memory of every rank, global loss and loss scale, live in TensorBoard.

A step's results are only recorded. At a log step each rank starts one copy of its metrics to the host; one step later,
when the copy has long arrived, it sums them up there and gathers every rank's row. Nothing waits for the device.
"""

import math
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dist_amp.data import Batches
from dist_amp.optim import Schedule
from dist_amp.precision import Clip, Scaler
from dist_amp.runtime.clock import Lap
from dist_amp.runtime.files import write_durably
from dist_amp.settings import MetricsConfig
from dist_amp.telemetry.async_copy import Interval, StepReport
from dist_amp.telemetry.console import Console
from dist_amp.telemetry.goodput import KINDS, Goodput
from dist_amp.telemetry.log_row import MAX_RANK_FOLDERS, SUMMED, SUMMED_METRICS, LogRow
from dist_amp.telemetry.writers import JsonlWriter, TensorBoardWriter
from dist_amp.world import World


@dataclass(frozen=True)
class PendingMetrics:
    """A log step's metrics on their way to the host."""

    step: int
    interval: Interval
    lap: Lap
    on_host: tuple[float, ...]
    of_task: tuple[str, ...]  # the tags of the last values on the device


class Metrics:
    """Collects step reports; writes console lines, metrics.jsonl and TensorBoard at log steps.

    `begin` starts copying a log step's metrics and `read` reads them a step later; `log` does both at once. Nothing is
    written before `open`, so a notebook that steps a run leaves no files behind.
    """

    def __init__(self, config: MetricsConfig, world: World, clip: Clip):
        self.config = config
        self.world = world
        self.last: LogRow | None = None
        self.evaluation: dict[str, float] = {}  # the latest
        self.evaluated_step = 0
        self.best: dict[str, float] = {}  # the lowest validation loss, with its step
        self.sample = ""  # the latest, if it is a text
        self.item_seconds_at_peak = 0.0  # from mfu.py, constant over a run
        self.lr_scales: dict[str, float] = {}  # of the optimizer's groups by name, if they differ
        self.goodput = Goodput()
        self._max_norm = clip.limit if clip.by == "norm" else math.inf
        self._interval = Interval(max_norm=self._max_norm)
        self._tokens_seen = 0.0  # by this rank, over all attempts
        self.save: Future[None] | None = None  # a checkpoint's, while it is written in the background
        self._totals = np.zeros((world.world_size, len(SUMMED_METRICS)))  # per rank, since the start or resume
        self._hosts = world.gather_texts(platform.node())
        self._pending: PendingMetrics | None = None
        self._clock = world.clock
        self._own: dict[str, float] = {}  # see `add`
        self._own_step = 0
        self._console: Console | None = None
        self._jsonl: JsonlWriter | None = None
        self._tensorboard: TensorBoardWriter | None = None

    def open(self, folder: Path, first_step: int, config_text: str) -> None:
        """Start writing into the run's folder; steps that a resumed run takes again replace their earlier entries."""
        rank, warn = self.world.rank, self.world.warn
        if self.world.is_main:
            self._jsonl = JsonlWriter(folder / "metrics.jsonl", first_step, warn)
        if rank < (MAX_RANK_FOLDERS if self.world.world_size <= MAX_RANK_FOLDERS else 1):
            self._tensorboard = TensorBoardWriter(folder / "tensorboard" / f"rank{rank:05d}", first_step + 1, warn)
            if self.world.is_main:
                text = f"```toml\n{config_text}\n```"
                self.write_first(lambda writer: writer.add_text("config", text, first_step))
        if self._jsonl is not None:
            self.goodput.open(folder, self._jsonl.last.get("spent_seconds", {}))
        self._clock.restart()

    def unfinished(self, data: Batches) -> Tensor:
        """What a checkpoint saves of this rank: [7] float64 on the host. Waits for the device.

        loss, weight and min_weight of the unfinished log interval, the tokens seen since step 0, and how many of the
        interval's steps were applied, skipped and clipped. No times: the same steps make the same checkpoint.
        """
        self._interval.start_copy()
        self._interval.read()
        interval, tokens = self._interval, self._tokens_seen + data.tokens
        sums = (interval.loss, interval.weight, interval.min_weight)
        counts = (interval.applied, interval.skipped, interval.clipped)
        return torch.tensor([*sums, tokens, *counts], dtype=torch.float64)

    def _spent_since(self) -> np.ndarray:
        """Seconds by goodput's kinds since the last log step; of its steps, those that were read from the device."""
        steps = self._interval.applied + self._interval.skipped
        return Goodput.of_interval(self._clock.so_far(), steps, self._interval.applied)

    def goodput_summary(self, failed: bool) -> dict[str, float | dict[str, float]]:
        """See Goodput.summary. After a failure up to the last log step: the device may not answer any more."""
        return self.goodput.summary(np.zeros(len(KINDS)) if failed else self._spent_since())

    def resume_unfinished(self, saved: Tensor, same_world: bool) -> None:
        """Continue from what every saving rank's `unfinished` was: [ranks, 7] float64; 3 in older checkpoints."""
        own = saved[self.world.rank if same_world else 0]
        loss, weight, min_weight = own[:3].tolist()
        tokens = saved[:, 3] if saved.shape[1] > 3 else torch.full((len(saved),), math.nan)
        self._tokens_seen = tokens[self.world.rank if same_world else 0].item()
        if not same_world:  # what is summed over the ranks at a log step, rank 0 carries
            loss = saved[:, 0].sum().item() if self.world.is_main else 0.0
            self._tokens_seen = tokens.sum().item() if self.world.is_main else 0.0
        self._interval = Interval(loss, weight, min_weight, max_norm=self._max_norm)
        interval = self._interval
        interval.applied, interval.skipped, interval.clipped = map(int, own[4:].tolist() or (0, 0, 0))

    def record(self, report: StepReport) -> None:
        """Record one step's results without reading them."""
        self._interval.add(report)
        if self._console is not None:
            self._console.count_step()

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
        lap = self._clock.lap()  # first, so that its end has been reached once the copy below has arrived
        interval.start_copy(
            scaler.scale_tensor.reshape(1),
            schedule.counters.to(device),  # float32 is exact up to 2^24, which is more than train.steps may be
            schedule.last_lr.to(device).reshape(1),
            *(value.float().reshape(1) for value in of_task.values()),
        )
        self._tokens_seen += data.tokens
        seen = (self._tokens_seen, data.position, data.position / data.plan.length)
        on_host = (data.items, data.tokens, *seen, *memory_use(device), self.item_seconds_at_peak)
        self._pending = PendingMetrics(step, interval, lap, on_host, tuple(of_task))
        self._interval = Interval(max_norm=self._max_norm)
        data.items, data.tokens = 0, 0

    def read(self) -> LogRow | None:
        """The pending metrics of all ranks, or None if there are none; every rank calls it at the same step."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        interval = pending.interval
        of_device, phases = interval.read(), pending.lap.seconds()
        self.goodput.add(phases, interval.applied + interval.skipped, interval.applied)
        count = len(of_device) - len(pending.of_task)
        of_device, of_task = of_device[:count], dict(zip(pending.of_task, of_device[count:], strict=True))
        sums = (interval.weight, interval.min_weight, interval.norm)
        counts = (interval.steps, interval.applied, interval.skipped, interval.clipped)
        save_done = self.save is None or self.save.done()  # rides along: a log step is one collective
        of_step = (interval.loss, *of_device, *sums, *counts)
        row = torch.tensor([*of_step, *phases.values(), *pending.on_host, save_done], dtype=torch.float64)
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
        own, self._own = row.of_task | self._own, {}
        if not self.world.is_main:
            if self._tensorboard is not None:
                self._tensorboard.write_scalars(row.rank_tags(self.world.rank) | own, row.step)
            return
        with self._clock.phase("logging"):
            self._write_as_main(row, own, last_step)

    def add(self, step: int, tags: Mapping[str, float]) -> None:
        """This rank's tags, as of `step`: written with the next log step's, in one event, or at the end."""
        self._own = dict(tags)
        self._own_step = step

    def _write_as_main(self, row: LogRow, own: dict[str, float], last_step: int) -> None:
        global_tags = row.global_tags() | self._tags_of_main(row) | own
        ranks = row.tags_of_ranks(slice(MAX_RANK_FOLDERS))
        if self._console is None:  # in a script that opened none
            self._console = Console(0, last_step, row["loss_scale"], in_place=False)
        self._console.log(row)
        if self._jsonl is not None and self._tensorboard is not None:
            line = {"step": row.step, "unix_time": round(time.time(), 3), **global_tags}
            self._jsonl.append({**line, "spent_seconds": self.goodput.spent, "ranks": ranks})
            self._tensorboard.write_scalars(ranks[0] | global_tags, row.step)

    def _tags_of_main(self, row: LogRow) -> dict[str, float]:
        """What rank 0 knows besides the row: goodput, and the groups' learning rates where they differ."""
        rates = {f"train/lr_{name}": row["lr"] * scale for name, scale in self.lr_scales.items()}
        return rates | {"perf/goodput_pct": 100 * self.goodput.share}

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
            ranks = run.tags_of_ranks(slice(None))
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

    def host_of(self, rank: int) -> str:
        return self._hosts[rank]

    def write_pending(self, last_step: int) -> None:
        """After a failure, write metrics that were not read yet; one process only, since other ranks may have died."""
        if self.world.world_size == 1 and (row := self.read()) is not None:
            self.write(row, last_step)

    def open_console(self, first_step: int, last_step: int, loss_scale: float) -> None:
        """Show the progress of the run's steps on rank 0."""
        if self.world.is_main:
            self._console = Console(first_step, last_step, loss_scale)

    def close_console(self) -> None:
        """Before what must be the last thing on the screen."""
        if self._console is not None:
            self._console.close()

    def close(self) -> None:
        self.close_console()
        if self._own and self._tensorboard is not None:
            self._tensorboard.write_scalars(self._own, self._own_step)
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
