"""`StepReport`, the result of one step, and `LogRow`, the metrics of one log interval."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from dist_amp.clock import OWN_PHASES, PHASES, STEP_PHASES

# With hundreds of folders TensorBoard shows none by default. Above this many ranks, only rank 0
# writes to TensorBoard, and metrics.jsonl lists only this many ranks.
MAX_RANK_FOLDERS = 64

# Equal on all ranks, because they are computed from sums over all ranks.
GLOBAL_METRICS = (
    *("loss_scale", "applied_steps", "skipped_steps", "skips_in_a_row", "lr"),
    *("weight_sum", "min_weight", "grad_norm"),
    *("applied_in_interval", "skipped_in_interval", "clipped_in_interval"),
)
SUMMED_METRICS = (*PHASES, "steps", "items", "tokens")
MEMORY = ("peak_bytes", "allocated_bytes", "reserved_bytes", "allocator_retries")
# The columns of `LogRow.table`, ordered so that GLOBAL and SUMMED are slices: these copy nothing.
RANK_METRICS = (
    *("loss_sum", *GLOBAL_METRICS, *SUMMED_METRICS, "tokens_seen", "samples_seen", "epoch"),
    *MEMORY,
    "save_done",
)

INDEX = {name: number for number, name in enumerate(RANK_METRICS)}
GLOBAL = slice(INDEX[GLOBAL_METRICS[0]], INDEX[GLOBAL_METRICS[-1]] + 1)
SUMMED = slice(INDEX[SUMMED_METRICS[0]], INDEX[SUMMED_METRICS[-1]] + 1)

# TIMES: {tag: its phases}, in seconds per step. INTERRUPTIONS: {tag: its phase}, per interval.
TIMES = {
    "step_seconds": STEP_PHASES,
    "local_seconds": OWN_PHASES,
    "data_wait_seconds": ("data",),
    "forward_seconds": ("forward",),
    "backward_seconds": ("backward",),
    "optimizer_seconds": ("optimizer",),
    "communication_wait_seconds": ("communication",),
    "other_seconds": ("other", "logging"),
}
INTERRUPTIONS = {
    "checkpoint_stall_seconds": "checkpoint",
    "evaluation_seconds": "evaluation",
    "diagnostics_seconds": "diagnostics",
}

Tags = dict[str, float]  # {name in TensorBoard and metrics.jsonl: value}


@dataclass(frozen=True)
class StepReport:
    """One step's results: scalar tensors on the device, not read before the next log step."""

    losses: list[Tensor]  # this rank's loss sums, one per micro-batch
    weight: Tensor  # total weight of all ranks; the loss is the loss sum of all ranks / weight
    norm: Tensor  # global, of unscaled gradients, before clipping; on the host with cpu_offload
    applied: Tensor  # bool, on norm's device; False: skipped, because norm was inf or nan

    @property
    def loss_sum(self) -> Tensor:
        return torch.stack(self.losses).sum()


@dataclass(frozen=True, eq=False)
class LogRow:
    """The metrics of one log interval, the same on every rank but for task_tags.

    table: [ranks, len(RANK_METRICS)] float64 on the host. There may be many ranks: don't loop.
    task_tags: this rank's values from the task's train_metrics.
    observed: {tag: [ranks]} from the observers' rank_tags.
    """

    step: int
    table: np.ndarray
    task_tags: Tags = field(default_factory=dict)
    observed: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Weighted mean over the interval's steps, all micro-batches and all ranks."""
        weight = self["weight_sum"]
        return self.total("loss_sum") / weight if weight else math.nan

    def __getitem__(self, name: str) -> float:
        """A metric that is the same on all ranks."""
        return float(self.table[0, INDEX[name]])

    def column(self, name: str) -> np.ndarray:
        return self.table[:, INDEX[name]]

    def columns(self, names: Sequence[str]) -> np.ndarray:
        return self.table[:, [INDEX[name] for name in names]]

    def total(self, name: str) -> float:
        return float(self.column(name).sum())

    @cached_property
    def has_tokens(self) -> bool:
        return self.total("tokens") > 0

    @cached_property
    def seconds(self) -> np.ndarray:
        """Time of the interval's steps on each rank, without evaluations and saves: [ranks]."""
        return self.columns(STEP_PHASES).sum(axis=1)

    def per_step(self, values: np.ndarray) -> np.ndarray:
        """Mean per step of the interval on each rank: [ranks] -> [ranks]."""
        return values / np.maximum(self.column("steps"), 1)

    def per_second(self, name: str) -> np.ndarray:
        """A counter ("items" or "tokens") per second of steps, on each rank: [ranks]."""
        return self.column(name) / np.maximum(self.seconds, 1e-9)

    @cached_property
    def rank_columns(self) -> dict[str, np.ndarray]:
        """The tags that every rank has: {tag: [ranks]}."""
        seconds = {
            tag: self.per_step(self.columns(phases).sum(axis=1)) for tag, phases in TIMES.items()
        }
        seconds |= {tag: self.column(phase) for tag, phase in INTERRUPTIONS.items()}
        tags = {
            "train/loss_sum": self.column("loss_sum"),
            "throughput/items_per_second": self.per_second("items"),
            "memory/peak_bytes": self.column("peak_bytes"),
            "memory/allocated_bytes": self.column("allocated_bytes"),
            # Rounded to 0.1 us, which halves the time to write 64 ranks as JSON.
            **{f"time/{tag}": np.round(values, 7) for tag, values in seconds.items()},
        }
        if self.has_tokens:
            tags["throughput/tokens_per_second"] = self.per_second("tokens")
        if self.column("reserved_bytes").any():
            tags["memory/reserved_bytes"] = self.column("reserved_bytes")
            tags["memory/allocator_retries"] = self.column("allocator_retries")
        return {**tags, **self.observed}

    def rank_tags(self, rank: int) -> Tags:
        return {tag: float(values[rank]) for tag, values in self.rank_columns.items()}

    def tags_of_ranks(self, max_ranks: int | None = None) -> list[Tags]:
        """The tags of each rank, or of the first `max_ranks`."""
        columns = [values[:max_ranks] for values in self.rank_columns.values()]
        rows = np.stack(columns, axis=1).tolist()
        return [dict(zip(self.rank_columns, row, strict=True)) for row in rows]

    def global_tags(self) -> Tags:
        """The tags that only rank 0 writes."""
        steps = max(self["applied_in_interval"] + self["skipped_in_interval"], 1)
        tags = {
            "train/loss": self.loss,
            "train/grad_norm": self["grad_norm"],
            "train/clipped_share": self["clipped_in_interval"] / steps,
            "train/lr": self["lr"],
            "train/epoch": self["epoch"],
            "train/samples_seen": self["samples_seen"],
            "amp/loss_scale": self["loss_scale"],
            "amp/skipped_steps": self["skipped_steps"],
            "amp/skipped_in_interval": self["skipped_in_interval"],
        }
        tokens_seen = self.total("tokens_seen")
        if self.has_tokens and not math.isnan(tokens_seen):  # nan: an old checkpoint lacks it
            tags["train/tokens_seen"] = tokens_seen
        if len(self.table) > 1:
            tags |= self._spread_tags()
        return tags

    def _spread_tags(self) -> Tags:
        """Minimum, median and maximum over ranks; of all times if ranks have no own folders."""
        sources = ["throughput/items_per_second", "memory/peak_bytes"]
        sources += ["time/data_wait_seconds", "time/local_seconds"]
        tags: Tags = {}
        if len(self.table) > MAX_RANK_FOLDERS:
            sources = [*sources[:2], *(f"time/{tag}" for tag in (*TIMES, *INTERRUPTIONS))]
            tags["ranks/slowest_rank"] = int(self.rank_columns["time/local_seconds"].argmax())
        for source in sources:
            name = source.partition("/")[2]
            values = self.rank_columns[source]
            tags[f"ranks/{name}_min"] = float(values.min())
            tags[f"ranks/{name}_median"] = float(np.median(values))
            tags[f"ranks/{name}_max"] = float(values.max())
        return tags
