"""What happened: throughput and memory of every rank, loss and scale of the world, live in TensorBoard.

A step is only noted. At a log step each rank sends its figures off to the host in one copy, and a step later, when they
have long arrived, adds them up there; one gather among the hosts shows every rank's row to all. Nothing waits.
"""

import math
import os
import platform
import resource
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dist_amp.data import Batches
from dist_amp.optim import Schedule
from dist_amp.precision import Scaler
from dist_amp.settings import MetricsConfig
from dist_amp.telemetry.async_copy import Clock, Interval, StepReport, Sums
from dist_amp.telemetry.writers import JsonlWriter, TensorBoardWriter
from dist_amp.world import World

# TensorBoard ticks no run at all once there are hundreds; above this, rank 0's ranks/* tags tell of all.
MAX_RANK_FOLDERS = 64

# A rank's row of figures, in this order: those that the device keeps, then the host's.
RANK_FIGURES = (
    "loss_sum", "weight_sum", "least_weight", "grad_norm", "lr", "loss_scale", "applied_steps", "skipped_steps",
    "skips_in_a_row", "seconds", "steps", "items", "tokens", "data_wait_seconds", "peak_bytes", "allocated_bytes",
    "item_seconds_at_peak",
)  # fmt: skip


@dataclass(frozen=True)
class LogRow:
    """The figures of one log interval, the same on every rank: `ranks[r][name]` for each of RANK_FIGURES."""

    step: int
    ranks: list[dict[str, float]]

    @property
    def loss(self) -> float:
        """Weighted mean over the interval's steps, all micro-batches and all ranks."""
        weight = self["weight_sum"]
        return sum(rank["loss_sum"] for rank in self.ranks) / weight if weight else math.nan

    def __getitem__(self, name: str) -> float:
        """A figure that is the world's: equal on all ranks."""
        return self.ranks[0][name]

    def total(self, name: str) -> float:
        return sum(rank[name] for rank in self.ranks)

    @cached_property
    def counts_tokens(self) -> bool:
        """Whether the task counts tokens; found once, since rank 0 writes the tags of every rank."""
        return self.total("tokens") > 0

    def per_second(self, name: str, rank: int) -> float:
        return self.ranks[rank][name] / max(self.ranks[rank]["seconds"], 1e-9)

    def mfu(self, rank: int) -> float:
        """Model FLOPs utilisation, 1 at the device's peak; 0 where it is not known. See peaks.py."""
        return self.per_second("items", rank) * self.ranks[rank]["item_seconds_at_peak"]

    def of_rank(self, rank: int) -> dict[str, float]:
        """The tags that every rank writes."""
        row = self.ranks[rank]
        steps = max(row["steps"], 1)
        tags = {
            "throughput/items_per_second": self.per_second("items", rank),
            "memory/peak_bytes": row["peak_bytes"],
            "memory/allocated_bytes": row["allocated_bytes"],
            "time/step_seconds": row["seconds"] / steps,
            "time/data_wait_seconds": row["data_wait_seconds"] / steps,
        }
        if self.counts_tokens:
            tags["throughput/tokens_per_second"] = self.per_second("tokens", rank)
        if row["item_seconds_at_peak"]:
            tags["throughput/mfu"] = self.mfu(rank)
        return tags

    def of_world(self) -> dict[str, float]:
        """The tags that rank 0 writes besides."""
        tags = {
            "train/loss": self.loss,
            "train/grad_norm": self["grad_norm"],
            "train/lr": self["lr"],
            "amp/loss_scale": self["loss_scale"],
            "amp/skipped_steps": self["skipped_steps"],
        }
        if len(self.ranks) == 1:
            return tags
        for name, values in {
            "items_per_second": [self.per_second("items", rank) for rank in range(len(self.ranks))],
            "peak_bytes": [rank["peak_bytes"] for rank in self.ranks],
            "data_wait_seconds": [rank["data_wait_seconds"] / max(rank["steps"], 1) for rank in self.ranks],
        }.items():
            ordered = sorted(values)
            worst = ordered[0] if name == "items_per_second" else ordered[-1]
            tags |= {
                f"ranks/{name}_min": ordered[0],
                f"ranks/{name}_median": ordered[len(ordered) // 2],
                f"ranks/{name}_max": ordered[-1],
                f"ranks/{name}_worst_rank": values.index(worst),
            }
        return tags


@dataclass(frozen=True)
class PendingMetrics:
    """A log step's figures on their way to the host."""

    step: int
    interval: Interval
    spans: list[tuple[Any, Any]]  # of the clock
    on_host: tuple[float, ...]


class Metrics:
    """Collects step reports; writes console lines, metrics.jsonl and TensorBoard at log steps.

    A log step's figures are begun (`begin`) and read a step later (`read`), or at once (`log`). Nothing is written
    before `open`: a notebook that steps a run by hand leaves no files behind.
    """

    def __init__(self, config: MetricsConfig, world: World):
        self.config = config
        self.world = world
        self.last: LogRow | None = None
        self.evaluation: dict[str, float] = {}  # the newest
        self.evaluated_step = 0
        self.item_seconds_at_peak = 0.0  # peaks.py knows; constant over a run
        self.best: dict[str, float] = {}  # the lowest held-out loss, with its step
        self._interval = Interval()
        self._totals: list[Counter[str]] = [Counter() for _ in range(world.world_size)]  # per rank, over the run
        self._hosts = world.gather_texts(platform.node())
        self._begun: PendingMetrics | None = None
        self._clock = Clock(world.device)
        self._lines: JsonlWriter | None = None
        self._board: TensorBoardWriter | None = None

    def open(self, folder: Path, first_step: int, config_text: str) -> None:
        """Start writing into the run's folder; what a resumed run does again replaces what stands there."""
        if self.world.is_main:
            self._lines = JsonlWriter(folder / "metrics.jsonl", first_step)
            if self._lines.before is not None:
                self.world.warn(f"{folder} had figures but no checkpoint: they are kept in {self._lines.before}")
        if self.world.rank < (MAX_RANK_FOLDERS if self.world.world_size <= MAX_RANK_FOLDERS else 1):
            self._board = TensorBoardWriter(folder / "tensorboard" / f"rank{self.world.rank:05d}", first_step + 1)
            if self.world.is_main:
                self._board.write(lambda writer: writer.add_text("config", f"```toml\n{config_text}\n```"))
        self._clock = Clock(self.world.device)

    @property
    def interval(self) -> Tensor:
        """What a resumed run needs of a log interval that a checkpoint cuts: [3] float64 on the host. Waits."""
        self._interval.send()
        self._interval.read()
        sums = self._interval.sums
        return torch.tensor([sums.loss, sums.weight, sums.least_weight], dtype=torch.float64)

    def resume(
        self,
        evaluation: dict[str, float],
        evaluated_step: int,
        best: dict[str, float],
        intervals: Tensor,
        same_world: bool,
    ) -> None:
        """Go on from a checkpoint's figures. intervals: every rank's `interval` then, [ranks then, 3] float64."""
        self.evaluation, self.evaluated_step, self.best = evaluation, evaluated_step, best
        loss, weight, least_weight = intervals[self.world.rank if same_world else 0].tolist()
        if not same_world:  # a rank's loss is summed over ranks later, so one of them carries all
            loss = intervals[:, 0].sum().item() if self.world.is_main else 0.0
        self._interval.sums = Sums(loss, weight, least_weight)

    def record(self, report: StepReport) -> None:
        """Note one step's outcome; reads nothing."""
        self._interval.add(report)

    @contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """Leave what happens inside (evaluation, saving) out of the throughput."""
        self._clock.pause()
        yield
        self._clock.go_on()

    def begin(self, step: int, schedule: Schedule, scaler: Scaler, data: Batches) -> None:
        """Begin to copy the interval's figures to the host; waits for nothing. Every rank calls it at the same step."""
        device, interval = self.world.device, self._interval
        spans = self._clock.lap()  # first: what has arrived below is later than its end
        interval.send(
            torch.stack((schedule.last_lr.to(device), scaler.scale_tensor)),
            schedule.counters.to(device),  # float32 holds them exactly up to 2^24, of which train.steps is short
        )
        memory = memory_bytes(device)
        on_host = (interval.steps, data.items, data.tokens, data.wait_seconds, *memory, self.item_seconds_at_peak)
        self._begun = PendingMetrics(step, interval, spans, on_host)
        self._interval = Interval()
        data.items, data.tokens, data.wait_seconds = 0, 0, 0.0

    def read(self) -> LogRow | None:
        """The figures that were begun, of all ranks; None if there are none. Every rank calls it at the same step."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        of_device, sums = begun.interval.read(), begun.interval.sums
        row = [sums.loss, sums.weight, sums.least_weight, sums.norm, *of_device]
        figures = self.world.gather_numbers([*row, self._clock.seconds(begun.spans), *begun.on_host])
        self.last = LogRow(begun.step, [dict(zip(RANK_FIGURES, values, strict=True)) for values in figures])
        for total, rank in zip(self._totals, self.last.ranks, strict=True):
            total.update({name: rank[name] for name in ("items", "tokens", "seconds")})
        return self.last

    def log(self, step: int, schedule: Schedule, scaler: Scaler, data: Batches) -> LogRow:
        """The figures of the interval up to now, of all ranks, read at once."""
        self.begin(step, schedule, scaler, data)
        row = self.read()
        assert row is not None
        return row

    def write(self, row: LogRow, last_step: int) -> None:
        """The row to TensorBoard, metrics.jsonl and the console."""
        if not self.world.is_main:
            self._scalars(row.of_rank(self.world.rank), row.step)
            return
        world, ranks = row.of_world(), [row.of_rank(rank) for rank in range(len(row.ranks))]
        self._append({"step": row.step, **world, "ranks": ranks})
        print(console_line(row, last_step), flush=True)
        self._scalars(ranks[self.world.rank] | world, row.step)

    def write_scalars(self, step: int, tags: Mapping[str, float]) -> None:
        """Figures of the world, written by rank 0 to metrics.jsonl and TensorBoard."""
        if self.world.is_main:
            self._append({"step": step, **tags})
            self._scalars(tags, step)

    def write_evaluation(self, step: int, values: dict[str, float]) -> None:
        """Evaluation figures, equal on all ranks, written by rank 0."""
        if not values:
            return
        self.evaluation, self.evaluated_step = values, step
        if values["loss"] < self.best.get("loss", math.inf):
            self.best = {"step": step, "loss": values["loss"]}
        self.write_scalars(step, {f"eval/{name}": value for name, value in values.items()})
        if self.world.is_main:
            text = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
            print(f"eval  {step:>6}  {text}", flush=True)

    def write_sample(self, step: int, sample: str | Tensor) -> None:
        """What the model made: text is printed and kept, an image [C, H, W] is kept."""
        if self._lines is None or self._board is None:
            return
        if isinstance(sample, str):
            sample = printable(sample)
            print(f"\nsample:\n{sample}\n", flush=True)
            self._lines.path.with_name("sample.txt").write_text(sample, encoding="utf-8")
            self.write_text("sample", sample, step)
        else:
            self._board.write(lambda writer: writer.add_image("sample", sample, step))

    def write_text(self, tag: str, text: str, step: int) -> None:
        """A text of this rank's, set as it stands, to TensorBoard."""
        block = f"```\n{text}\n```"
        if self._board is not None and (trouble := self._board.write(lambda to: to.add_text(tag, block, step))):
            self.world.warn(trouble)

    @property
    def logged(self) -> dict[str, Any]:
        """The newest figures of the world, by their tags; a resumed run has those of before. Empty without any."""
        if self.last is not None:
            return {"step": self.last.step, **self.last.of_world()}
        return self._lines.last if self._lines is not None else {}

    def rank_table(self) -> list[dict[str, Any]]:
        """Per rank: host, peak memory, and throughput since the start or resume, evaluation and saving left out.

        With `mfu` where it is known.
        """
        if self.last is None:
            logged = self.logged.get("ranks", [])
            table = [
                {
                    "rank": rank,
                    "host": self._hosts[rank] if rank < len(self._hosts) else "",
                    "peak_memory_bytes": int(tags["memory/peak_bytes"]),
                    "items_per_second": tags["throughput/items_per_second"],
                    "tokens_per_second": tags.get("throughput/tokens_per_second", 0.0),
                }
                for rank, tags in enumerate(logged)
            ]
            mfu = [tags.get("throughput/mfu", 0.0) for tags in logged]
        else:
            table = [
                {
                    "rank": rank,
                    "host": self._hosts[rank],
                    "peak_memory_bytes": int(self.last.ranks[rank]["peak_bytes"]),
                    "items_per_second": total["items"] / max(total["seconds"], 1e-9),
                    "tokens_per_second": total["tokens"] / max(total["seconds"], 1e-9),
                }
                for rank, total in enumerate(self._totals)
            ]
            mfu = [row["items_per_second"] * self.last.ranks[row["rank"]]["item_seconds_at_peak"] for row in table]
        return [row | ({"mfu": share} if share else {}) for row, share in zip(table, mfu, strict=True)]

    def rescue(self, last_step: int) -> None:
        """Write what was begun before a failure. Not of several ranks: others may be gone, and can't be asked."""
        if self.world.world_size == 1 and self._begun is not None:
            row = self.read()
            assert row is not None
            self.write(row, last_step)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()

    def _append(self, line: dict[str, Any]) -> None:
        if self._lines is not None and (trouble := self._lines.append(line)):
            self.world.warn(trouble)

    def _scalars(self, values: Mapping[str, float], step: int) -> None:
        if self._board is not None and (trouble := self._board.write_scalars(values, step)):
            self.world.warn(trouble)


def printable(text: str) -> str:
    """The text without control characters: an untrained model's would be the terminal's commands."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """(peak, current) bytes: of torch's allocator on a GPU, of the process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)  # by os: a tenth of what opening it as text costs
    except OSError:  # no /proc outside Linux
        return peak, peak
    pages = int(os.read(file, 64).split()[1])
    os.close(file)
    return max(peak, pages * resource.getpagesize()), pages * resource.getpagesize()


def console_line(row: LogRow, last_step: int) -> str:
    """One interval in one line."""
    ranks = range(len(row.ranks))
    parts = [
        f"step {row.step:>6}/{last_step}",
        f"loss {row.loss:.4f}",
        f"grad_norm {row['grad_norm']:.3g}",
        f"lr {row['lr']:.2e}",
        f"items/s {sum(row.per_second('items', rank) for rank in ranks):,.0f}",
    ]
    if row.counts_tokens:
        parts.append(f"tokens/s {sum(row.per_second('tokens', rank) for rank in ranks):,.0f}")
    if all(rank["item_seconds_at_peak"] for rank in row.ranks):
        parts.append(f"mfu {100 * sum(map(row.mfu, ranks)) / len(ranks):.3g} %")
    parts.append(f"peak {max(rank['peak_bytes'] for rank in row.ranks) / 2**20:,.0f} MiB")
    if row["loss_scale"] != 1:
        parts.append(f"scale {row['loss_scale']:g}")
    if row["skipped_steps"]:
        parts.append(f"skipped {row['skipped_steps']:.0f}")
    return "  ".join(parts)
