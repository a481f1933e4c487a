"""One log interval in numbers: a row of metrics per rank, and the TensorBoard tags that are made of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from dist_amp.runtime.clock import OWN_PHASES, PHASES, STEP_PHASES

# TensorBoard selects no run by default if there are hundreds; above this, only rank 0 writes, with its ranks/* tags.
# A line of metrics.jsonl lists no more ranks either: at 1,024 it would have 200 KB.
MAX_RANK_FOLDERS = 64

# Equal on all ranks, because each is computed from sums over all ranks.
GLOBAL_METRICS = (
    "loss_scale", "applied_steps", "skipped_steps", "skips_in_a_row", "lr", "weight_sum", "min_weight", "grad_norm",
    "steps", "applied_in_interval", "skipped_in_interval", "clipped_in_interval",
)  # fmt: skip
# What adds up over a run.
SUMMED_METRICS = (*PHASES, "items", "tokens")
# A rank's row of metrics, in this order: slices of a table cost less than chosen columns.
RANK_METRICS = (
    "loss_sum", *GLOBAL_METRICS, *SUMMED_METRICS, "tokens_seen", "samples_seen", "epoch", "peak_bytes",
    "allocated_bytes", "reserved_bytes", "allocator_retries", "item_seconds_at_peak", "save_done",
)  # fmt: skip

INDEX = {name: number for number, name in enumerate(RANK_METRICS)}
GLOBAL = slice(INDEX[GLOBAL_METRICS[0]], INDEX[GLOBAL_METRICS[-1]] + 1)
SUMMED = slice(INDEX[SUMMED_METRICS[0]], INDEX[SUMMED_METRICS[-1]] + 1)

# Seconds per step of what a rank does itself, of its waiting, and per interval of what interrupts the steps.
TIMES = {
    "data_wait": "data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "communication_wait": "communication",
}
INTERRUPTIONS = {"checkpoint_stall": "checkpoint", "evaluation": "evaluation", "diagnostics": "diagnostics"}


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

    @cached_property
    def seconds(self) -> np.ndarray:
        """Of the interval's steps, without what interrupted them, of every rank: [ranks]."""
        return self.columns(STEP_PHASES).sum(axis=1)

    @cached_property
    def local_seconds(self) -> np.ndarray:
        """The part of `seconds` in which a rank did not wait for others, nor write the logs: [ranks]."""
        return self.columns(OWN_PHASES).sum(axis=1)

    def per_step(self, values: np.ndarray) -> np.ndarray:
        """[ranks] -> [ranks]."""
        return values / np.maximum(self.column("steps"), 1)

    def per_second(self, name: str) -> np.ndarray:
        """Of every rank: [ranks]."""
        return self.column(name) / np.maximum(self.seconds, 1e-9)

    def mfu(self) -> np.ndarray:
        """Model FLOPs utilisation, 1 at the device's peak; 0 where it is not known: [ranks]. See mfu.py."""
        return self.per_second("items") * self.column("item_seconds_at_peak")

    @cached_property
    def _rank_tags(self) -> dict[str, np.ndarray]:
        """Every rank's tags: {tag: [ranks]}."""
        mfu, reserved = self.mfu(), self.column("reserved_bytes")

        def seconds(values: np.ndarray, per_step: bool = True) -> np.ndarray:
            """Rounded to 0.1 us, which halves what writing 64 ranks as JSON takes."""
            return np.round(self.per_step(values) if per_step else values, 7)

        tags = {
            "throughput/items_per_second": self.per_second("items"),
            "memory/peak_bytes": self.column("peak_bytes"),
            "memory/allocated_bytes": self.column("allocated_bytes"),
            "time/step_seconds": seconds(self.seconds),
            "time/local_seconds": seconds(self.local_seconds),
            **{f"time/{tag}_seconds": seconds(self.column(phase)) for tag, phase in TIMES.items()},
            "time/other_seconds": seconds(self.column("other") + self.column("logging")),
            **{f"time/{tag}_seconds": seconds(self.column(phase), False) for tag, phase in INTERRUPTIONS.items()},
        }
        if self.has_tokens:
            tags["throughput/tokens_per_second"] = self.per_second("tokens")
        if mfu.any():
            tags["throughput/mfu"] = mfu
        if reserved.any():
            tags |= {"memory/reserved_bytes": reserved, "memory/allocator_retries": self.column("allocator_retries")}
        return tags

    def rank_tags(self, rank: int) -> dict[str, float]:
        """The TensorBoard tags that a rank writes."""
        return self.tags_of_ranks(slice(rank, rank + 1))[0]

    def tags_of_ranks(self, ranks: slice) -> list[dict[str, float]]:
        """The TensorBoard tags that some ranks write; no MFU where it is not known."""
        names = list(self._rank_tags)
        rows = np.stack([values[ranks] for values in self._rank_tags.values()], axis=1).tolist()
        tags = [dict(zip(names, row, strict=True)) for row in rows]
        for own in tags if "throughput/mfu" in names else ():
            if not own["throughput/mfu"]:
                del own["throughput/mfu"]
        return tags

    def global_tags(self) -> dict[str, float]:
        """The TensorBoard tags that only rank 0 writes."""
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
        if self.has_tokens and not math.isnan(seen := self.total("tokens_seen")):  # since an older checkpoint
            tags["train/tokens_seen"] = seen
        return tags | self.spread_tags() if len(self.table) > 1 else tags

    def spread_tags(self) -> dict[str, float]:
        """How ranks differ: min, median and max; of more metrics where they are too many for folders of their own."""
        columns = {
            "items_per_second": self.per_second("items"),
            "peak_bytes": self.column("peak_bytes"),
            "data_wait_seconds": self.per_step(self.column("data")),
            "local_seconds": self.per_step(self.local_seconds),
        }
        many = len(self.table) > MAX_RANK_FOLDERS
        if many:
            columns |= {f"{tag}_seconds": self.per_step(self.column(phase)) for tag, phase in TIMES.items()}
            columns |= {f"{tag}_seconds": self.column(phase) for tag, phase in INTERRUPTIONS.items()}
        ordered = np.sort(np.stack(list(columns.values())), axis=1)
        count = ordered.shape[1]
        medians = (ordered[:, (count - 1) // 2] + ordered[:, count // 2]) / 2
        spreads = zip(columns, np.stack((ordered[:, 0], medians, ordered[:, -1]), axis=1).tolist(), strict=True)
        tags = {
            f"ranks/{name}_{which}": value
            for name, spread in spreads
            for which, value in zip(("min", "median", "max"), spread, strict=True)
        }
        return tags | ({"ranks/slowest_rank": int(self.local_seconds.argmax())} if many else {})
