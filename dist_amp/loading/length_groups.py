"""Length bucketing: each step takes samples of similar length, for less padding.

Docs: docs/packing.md
"""

from functools import lru_cache
from typing import Any

import numpy
import torch
from torch import Tensor

from dist_amp.errors import ConfigError, DataError
from dist_amp.loading.loader import read
from dist_amp.loading.plan import LOOKED_UP, EpochOrder, OrderOf, epoch_order, shuffled_order
from dist_amp.settings import DataConfig


def grouped(data: DataConfig, dataset: Any, lengths: Any = None) -> Any:
    """The training dataset with the order that data.group_by_length asks for: see LengthGroups."""
    steps = data.group_by_length
    if steps == "off" or isinstance(dataset, LengthGroups):
        return dataset
    if not data.shuffle:
        raise ConfigError(
            f"data.group_by_length={steps} changes the order that data.shuffle=false keeps; use off"
        )
    return LengthGroups(dataset, steps, lengths)


class LengthGroups:
    """A map-style dataset whose shuffle gives the samples of a step similar lengths.

    steps: how many are sorted together; more pad less and shuffle less. lengths: array or callable.
    """

    def __init__(self, dataset: Any, steps: int, lengths: Any = None):
        key = f"data.group_by_length={steps}"
        if hasattr(dataset, "shuffled"):
            raise ConfigError(
                f"{key}: the data is read by row group, in an order of its own; use data.view=map, "
                "or write its tokens with python -m dist_amp.tokenize"
            )
        if lengths is None:
            lengths = getattr(dataset, "lengths", None)
        if callable(lengths):
            lengths = lengths()
        if lengths is None:
            raise ConfigError(
                f"{key} needs each sample's length, and a {type(dataset).__name__} has no "
                "`lengths`; write its tokens with python -m dist_amp.tokenize, or build "
                "LengthGroups(dataset, steps, lengths)"
            )
        if len(lengths) != len(dataset):
            raise DataError(
                f"{key}: there are {len(lengths)} lengths for {len(dataset)} samples; give one each"
            )
        lengths = numpy.asarray(lengths)
        self.dataset = dataset
        self.steps = steps
        self.lengths = lengths
        self.fingerprint = getattr(dataset, "fingerprint", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return read(self.dataset, indices)

    def shuffled(self, global_batch_size: int, world_size: int) -> tuple[str, OrderOf]:
        """Returns (the order's name, (seed, epoch) -> the order), the same at every world size."""
        base = shuffled_order(len(self))

        def order(seed: int, epoch: int) -> EpochOrder:
            shuffle = epoch_order(base, len(self), seed, epoch)
            return bucketed(shuffle, self.lengths, global_batch_size, self.steps, (seed, epoch))

        # The name is stored in checkpoints.
        return f"{base}, sorted by length over {self.steps} steps of {global_batch_size}", order


def bucketed(
    shuffle: EpochOrder, lengths: Any, global_batch_size: int, steps: int, key: tuple[int, int]
) -> EpochOrder:
    """The function from positions, int64, to samples: a bijection if `shuffle` is one.

    The samples of each window of `steps` steps are sorted by length and cut into steps again, whose
    order is shuffled. An incomplete step at the end of the epoch keeps its samples.
    """
    window = global_batch_size * steps
    size = window * max(1, LOOKED_UP // window)  # positions per table: whole windows

    @lru_cache(maxsize=2)  # suffices, because positions are looked up in order
    def table(number: int) -> Tensor:
        start = number * size
        samples = shuffle(torch.arange(start, min(start + size, len(lengths)))).numpy()
        full = len(samples) // global_batch_size
        window_of_step = numpy.arange(full) // steps
        inside, last = numpy.split(samples, [full * global_batch_size])
        window_of_sample = window_of_step.repeat(global_batch_size)
        inside = inside[numpy.lexsort((lengths[inside], window_of_sample))]
        rng = torch.Generator().manual_seed(hash((*key, number)) % 2**63)
        order_of_steps = numpy.lexsort((torch.rand(full, generator=rng).numpy(), window_of_step))
        inside = inside.reshape(full, global_batch_size)[order_of_steps]
        last = last[numpy.argsort(lengths[last], kind="stable")]
        return torch.from_numpy(numpy.append(inside, last))

    def order(positions: Tensor) -> Tensor:
        samples = torch.empty_like(positions)
        numbers = positions // size
        for number in numbers.unique().tolist():
            here = numbers == number
            samples[here] = table(number)[positions[here] - number * size]
        return samples

    return order
