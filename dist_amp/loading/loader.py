"""Fetch micro-batches from a dataset, in this process or in loader workers (workers.py)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate, get_worker_info

from dist_amp.distributed.process import seed_host
from dist_amp.errors import DataError, in_one_line, some_of
from dist_amp.loading.plan import Shard


class Fetch:
    """Map-style dataset: Shard -> batch, so that loader workers also augment and collate.

    A DataError is returned, and raised by the rank: raised in a worker, it would arrive as text.
    """

    def __init__(self, dataset: Any, task: Any, split: str, seeds: bool = False):
        self.dataset = dataset
        self.collate = getattr(task, "collate", default_collate)
        self.split = split
        self.augment: Any = getattr(task, "augment", None) if split == "training" else None
        self._seeds = seeds  # whether to seed random numbers outside of loader workers, too

    def __getitem__(self, shard: Shard) -> Any:
        if self._seeds or get_worker_info() is not None:
            # Else random numbers would depend on how many workers there are.
            seed_host(shard.seed)
        indices = shard.indices
        try:
            samples = list(read(self.dataset, indices))
        except Exception as error:
            return self._unreadable(indices, error)
        if self.augment is not None:
            rng = torch.Generator()
            for place, index in enumerate(indices):
                rng.manual_seed(hash((shard.augmentation, index)))
                try:
                    samples[place] = self.augment(samples[place], rng)
                except Exception as error:
                    return DataError(
                        f"the task's augment(sample, rng) failed on sample {index}: "
                        f"{in_one_line(error)}; fix it"
                    )
        try:
            return self.collate(samples)
        except Exception as error:
            return DataError(
                f"{samples_text(indices)} of the {self.split} split do not make one batch: "
                f"{self._odd_column(samples, indices)}{in_one_line(error)}; give all samples the "
                "same keys, shapes and types, or the task a collate(samples)"
            )

    def _odd_column(self, samples: Sequence[Any], indices: Sequence[int]) -> str:
        """Text on the first column whose type or shape differs from the first sample's; or "".

        torch's own error would name neither the column nor the sample.
        """
        if not all(isinstance(sample, Mapping) for sample in samples):
            return ""
        kinds = [
            {
                key: f"{type(x).__name__} {list(getattr(x, 'shape', ()))}"
                for key, x in sample.items()
            }
            for sample in samples
        ]
        for index, here in zip(indices, kinds, strict=True):
            for key in {**kinds[0], **here}:
                kind, first = here.get(key, "missing"), kinds[0].get(key, "missing")
                if kind != first:
                    return f"{key} is {kind} in sample {index}, {first} in the first: "
        return ""

    def _unreadable(self, indices: tuple[int, ...], error: Exception) -> DataError:
        """The error for samples that can't be read; names the one that causes it, if one does."""
        for index in indices:
            try:
                read(self.dataset, (index,))
            except Exception as error_of_one:
                indices = (index,)
                error = error_of_one
                break
        reason = f"{in_one_line(error)}; fix or remove it"
        if isinstance(error, DataError):
            reason = str(error)
        unread = f"{samples_text(indices)} of the {self.split} split could not be read"
        return DataError(f"{unread}: {reason}")


def read(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """Read samples of a map-style dataset, all at once if it has `__getitems__`."""
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(list(indices))
    return [dataset[index] for index in indices]


def samples_text(indices: Sequence[int]) -> str:
    """A text such as "sample 3" or "samples 3, 7", with at most 64 numbers."""
    if len(indices) == 1:
        return f"sample {indices[0]}"
    return f"samples {some_of([*map(str, indices)], 64)}"


def load(
    fetch: Any,
    requests: Callable[[], Iterable[Any]],
    *,
    workers: int,
    pin_memory: bool = False,
    rank: int,
) -> tuple[Iterator[Any], Callable[[], None]]:
    """Returns (an iterator of fetch[request], in order; a function that ends the workers)."""
    if not workers:
        return map(fetch.__getitem__, requests()), lambda: None
    from dist_amp.loading.workers import start

    return start(fetch, requests, workers, pin_memory, rank)
