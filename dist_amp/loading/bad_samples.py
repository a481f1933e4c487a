"""data.on_bad_sample=skip: samples that can't be read, augmented or collated are left out.

A micro-batch then has the weight of its remaining samples; without any, it becomes padding. The
loader finds bad samples (SkippingFetch); the training process lists and counts them (BadSamples).

Docs: docs/data.md
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dist_amp.errors import DataError
from dist_amp.files import write_durably
from dist_amp.loading.loader import Fetch
from dist_amp.loading.plan import Shard
from dist_amp.loading.samples import spread
from dist_amp.world import World

FOLDER = "bad_samples"
WITNESSES = 8  # samples that are collated in pairs, to find a sound one


@dataclass(frozen=True)
class Remainder:
    """What is left of a micro-batch. shard: the samples in `batch`. errors: of the bad samples."""

    batch: Any
    shard: Shard
    errors: Mapping[int, str]


class SkippingFetch(Fetch):
    """Returns a `Remainder` for a micro-batch with bad samples; a DataError if no sample is good.

    A sample is bad if it can't be read, augmented and collated together with a sound one.
    """

    _sound: int | None = None  # index of a sound sample, found at the first bad micro-batch

    def __getitem__(self, shard: Shard) -> Any:
        batch = super().__getitem__(shard)
        if not isinstance(batch, DataError):
            return batch
        if self._sound is None:
            self._sound = self._sound_sample(shard)
        errors = {}
        for index in shard.indices:
            pair = self._batch_of(shard, self._sound, index)  # collated with the sound sample
            if isinstance(pair, DataError):
                errors[index] = str(pair)
        good = [index for index in shard.indices if index not in errors]
        counts = shard.counts and bool(good)
        if not counts:  # padding: this rank still runs the step
            good = [self._sound] * min(2, len(shard.indices))  # batch norm fails on one sample
        batch = self._batch_of(shard, *good)
        if isinstance(batch, DataError):
            return batch if counts else DataError(f"no sample can be used: {batch}")
        return Remainder(batch, replace(shard, indices=tuple(good), counts=counts), errors)

    def _batch_of(self, shard: Shard, *indices: int) -> Any:
        return super().__getitem__(replace(shard, indices=indices))

    def _sound_sample(self, shard: Shard) -> int:
        """Of WITNESSES samples from all over the dataset, the one that fits most of the others."""

        def matches(index: int) -> int:
            batches = [self._batch_of(shard, index, other) for other in witnesses]
            return sum(not isinstance(batch, DataError) for batch in batches)

        witnesses = spread(len(self.dataset), WITNESSES)
        return max(witnesses, key=matches)


class BadSamples:
    """Lists skipped samples in RUN/bad_samples/, a file per rank; too many of them end the run."""

    fetch = SkippingFetch
    training: Any  # the run's Batches, from `follow` on

    def __init__(self, world: World, folder: Path, most: float):
        """folder: the run's. most: the limit of bad samples per epoch; below 1, a share of all."""
        self.world = world
        self.folder = folder / FOLDER
        self.file = self.folder / f"rank{world.rank:05d}.jsonl"
        self.most = most
        self.seen: set[tuple[str, int, int]] = set()  # (split, epoch, sample) in this rank's list
        self._is_continued = False
        self._is_reported = False

    def follow(self, training: Any) -> None:
        """Set the run's training batches, from whose position the epoch follows."""
        self.training = training

    def leave_out(
        self, data: Any, batches: Sequence[Any], shards: Sequence[Shard], *, is_new: bool
    ) -> tuple[list[Any], list[Shard]]:
        """Unwrap each `Remainder`; list bad samples, if `is_new`. Raises DataError if too many."""
        if is_new and data is self.training and not self._is_continued:
            self._continue()
        good_batches = list(batches)
        good_shards = list(shards)
        for place, batch in enumerate(batches):
            if isinstance(batch, Remainder):
                # Padding repeats another rank's samples; no errors: a second read succeeded.
                if is_new and shards[place].counts and batch.errors:
                    self._list(data, batch.errors)
                good_batches[place] = batch.batch
                good_shards[place] = batch.shard
        return good_batches, good_shards

    def _list(self, data: Any, errors: Mapping[int, str]) -> None:
        epoch = 0  # each evaluation reads the same samples
        if data is self.training:
            epoch = (data.position - 1) // data.plan.length
        for index, error in errors.items():
            key = (data.split, epoch, index)
            if key in self.seen:
                continue
            self.seen.add(key)
            entry = {
                "split": data.split,
                "sample": index,
                "error": error,
                "epoch": epoch,
                "samples_seen": self.training.position,
                "rank": self.world.rank,
            }
            with suppress(OSError):  # a full disk does not end the run
                self.folder.mkdir(parents=True, exist_ok=True)
                with self.file.open("a") as file:
                    file.write(json.dumps(entry) + "\n")
        self._check(data, self._in_epoch(data.split, epoch), error)

    def _in_epoch(self, split: str, epoch: int) -> int:
        return sum(key[:2] == (split, epoch) for key in self.seen)

    def _check(self, data: Any, count: int, error: str) -> None:
        limit = self.most
        if limit < 1:
            limit *= data.plan.length
        if count > limit:
            raise DataError(
                f"{count:,} of the {data.plan.length:,} samples of the {data.split} split are bad "
                f"in one epoch, more than {self.most:g}; fix or remove them, or give "
                f"data.on_bad_sample a higher number: {error}"
            )

    def _continue(self) -> None:
        """Continue the lists in the folder, without entries of this step and later ones."""
        self._is_continued = True
        for path in sorted(self.folder.glob("rank*.jsonl")):
            # The lists of ranks that no longer exist are divided among the ranks.
            number = int(path.stem.removeprefix("rank"))
            if number % self.world.world_size != self.world.rank:
                continue
            kept = ""
            for line in path.read_text(errors="replace").splitlines():
                with suppress(ValueError, LookupError, TypeError):  # an incomplete line
                    entry = json.loads(line)
                    if entry["samples_seen"] < self.training.position:
                        key = (entry["split"], entry["epoch"], entry["sample"])
                        self.seen.add(key)
                        kept += f"{line}\n"
            write_durably(path, kept)

    def tags(self, row: Any) -> dict[str, int]:
        """Samples skipped on all ranks; every rank must call it. Raises DataError if too many."""
        data = self.training
        epoch = (data.position - 1) // data.plan.length
        total = sum(split == data.split for split, _, _ in self.seen)
        counts = torch.tensor([total, self._in_epoch(data.split, epoch)])
        total, in_epoch = self.world.stack(counts).sum(0).tolist()
        if total and not self._is_reported:
            self._is_reported = True
            self.world.warn(f"bad samples are skipped; {self.folder} lists them")
        self._check(data, in_epoch, f"{self.folder} lists them")
        if self.world.is_main:
            return {"train/skipped_samples": total}
        return {}
