"""Several sources as one dataset, each with its share of an epoch, evenly spread.

An epoch consists of equal blocks, in each of which source k occurs counts[k] times. The order in a
block comes from a table if the block is short, else it is computed.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import numpy
import torch
from torch import Tensor

from dist_amp.distributed.process import warn
from dist_amp.errors import ConfigError, DataError, Failure, in_one_line
from dist_amp.loading.loader import read, samples_text
from dist_amp.settings import DataConfig, MixedSourceConfig, SourceConfig
from dist_amp.sources.token_shards import short_hash

log = logging.getLogger(__name__)
Array = numpy.ndarray[Any, Any]

LONGEST_BLOCK = 10_000  # samples: a table of 160 KB; for a longer block places are computed
CLOSE_ENOUGH = 1e-3  # of a source's share, by which short blocks are tried
# In an epoch, before a warning: rows add next to nothing after 16 times (arXiv:2305.16264).
MOST_REPEATS = 20
SOURCE_KEYS = [item.name for item in fields(SourceConfig)]


class Mixture:
    """Map-style dataset of blocks, in each of which source k occurs counts[k] times, evenly spread.

    As many blocks as it takes to draw every sample. One with "input_ids" also has "source_ids",
    int64 of the same shape. It has `fingerprint` and `lengths` if all sources have them.
    """

    fingerprint: str

    def __init__(self, sources: Mapping[str, Any], counts: Sequence[int]):
        self.names = list(sources)
        self.sources = list(sources.values())
        self.counts = numpy.array(counts, numpy.int64)
        self.sizes = numpy.zeros(len(counts), numpy.int64)
        self.block = int(self.counts.sum())
        drawn = numpy.flatnonzero(self.counts).tolist()
        for index in drawn:
            name = self.names[index]
            if hasattr(self.sources[index], "shuffled"):
                raise ConfigError(
                    f"data.sources.{name} is read by row group, and a mixture reads in any order; "
                    "name its tokens, made by python -m dist_amp.tokenize, or use data.view=map"
                )
            self.sizes[index] = len(self.sources[index] or ())
            if not self.sizes[index]:
                raise DataError(
                    f"data.sources.{name} has no samples; check its path, split and columns"
                )
        self.blocks = int(max(-(-self.sizes[drawn] // self.counts[drawn])))
        if self.block <= LONGEST_BLOCK:
            # Of each place in a block, its source and how often that came before.
            source = numpy.repeat(numpy.arange(len(counts)), self.counts)
            draw = numpy.concatenate([numpy.arange(count) for count in counts])
            order = numpy.argsort((draw + 0.5) / self.counts[source], kind="stable")
            self._source = source[order]
            self._draw = draw[order]
        prints = [getattr(self.sources[index], "fingerprint", None) for index in drawn]
        if all(isinstance(each, str) for each in prints):
            facts = zip(self.names, self.sizes.tolist(), self.counts.tolist(), strict=True)
            self.fingerprint = short_hash(json.dumps([[*facts], prints]))[:16]

    def __len__(self) -> int:
        return self.blocks * self.block

    def locate(self, positions: Any) -> tuple[Array, Array]:
        """Positions, int64 [n] -> (each one's source, its sample there), [n] each."""
        positions = numpy.atleast_1d(numpy.asarray(positions, numpy.int64))
        block, within = numpy.divmod(positions, self.block)
        if self.block <= LONGEST_BLOCK:
            source = self._source[within]
            draw = self._draw[within]
        else:
            source, draw = spread(within, self.counts.tolist())
        draw += block * self.counts[source]
        return source, draw % self.sizes[source]

    @property
    def lengths(self) -> Array:
        """The length of each sample, int64 [len]; AttributeError if a source has none."""
        source, number = self.locate(numpy.arange(len(self)))
        lengths = numpy.empty(len(self), numpy.int64)
        for index in numpy.flatnonzero(self.counts).tolist():
            drawn = source == index
            lengths[drawn] = numpy.asarray(self.sources[index].lengths)[number[drawn]]
        return lengths

    def __getitem__(self, position: int) -> Any:
        if not 0 <= position < len(self):
            raise IndexError(f"{position} is not below {len(self)}")
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        source, number = self.locate(positions)
        samples: list[Any] = [None] * len(positions)
        for index in numpy.unique(source).tolist():
            places = numpy.flatnonzero(source == index).tolist()
            numbers = number[places].tolist()
            try:
                drawn = read(self.sources[index], numbers)
            except Exception as error:
                where = f"data.sources.{self.names[index]}, {samples_text(numbers)}"
                reason = str(error) if isinstance(error, DataError) else in_one_line(error)
                raise DataError(f"{where}: {reason}") from error
            for place, sample in zip(places, drawn, strict=True):
                if isinstance(sample, dict) and "input_ids" in sample:
                    source_ids = torch.full_like(sample["input_ids"], index)
                    sample = {**sample, "source_ids": source_ids}
                samples[place] = sample
        return samples


def spread(places: Array, counts: Sequence[int]) -> tuple[Array, Array]:
    """Places below sum(counts), int64 -> (each one's source, how often that came before), even."""
    source = numpy.zeros_like(places)
    draw = numpy.zeros_like(places)
    is_open = numpy.ones(places.shape, bool)
    left = sum(counts)
    rest = places  # the places' numbers among the `left` that are open
    for index, count in enumerate(counts):
        if not count:
            continue
        # As Python's integers, which do not wrap around.
        before, after = (
            (numbers.astype(object) * count // left).astype(numpy.int64)
            for numbers in (rest, rest + 1)
        )
        chosen = is_open & (after > before)
        source[chosen] = index
        draw[chosen] = before[chosen]
        is_open &= ~chosen
        rest = rest - before
        left -= count
    return source, draw


def counts_of(weights: Mapping[str, float], sizes: Sequence[int]) -> list[int]:
    """The count of each source in a block, for shares within one sample in an epoch.

    A short block if its shares are that close, else the epoch is a single block, whose places are
    shared out by the largest remainder. Exact fractions, so that the length does not depend on how
    a weight such as 0.1 is rounded.
    """
    exact = [Fraction(str(weight)) for weight in weights.values()]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    counts = counts_in_block(weights)
    if all(counts):
        blocks = max(-(-size // count) for size, count in zip(sizes, counts, strict=True))
        block = sum(counts)
        errors = [count - block * share for count, share in zip(counts, shares, strict=True)]
        if max(map(abs, errors)) * blocks < 1:
            return counts
    length = max(math.ceil(size / share) for size, share in zip(sizes, shares, strict=True))
    counts = [math.floor(length * share) for share in shares]
    remainders = [length * share - count for share, count in zip(shares, counts, strict=True)]
    largest_first = sorted(range(len(counts)), key=remainders.__getitem__, reverse=True)
    for index in largest_first[: length - sum(counts)]:
        counts[index] += 1
    return counts


def counts_in_block(weights: Mapping[str, float]) -> list[int]:
    """The count of each source in the shortest block within CLOSE_ENOUGH, or in the closest one."""
    shares = numpy.array(list(weights.values())) / sum(weights.values())
    best = math.inf
    for size in range(len(shares), LONGEST_BLOCK + 1):
        exact = size * shares
        counts = numpy.floor(exact).astype(numpy.int64)
        # Rounded, or noise in the last bit would decide between equal remainders.
        largest_first = numpy.argsort(numpy.round(counts - exact, 9), kind="stable")
        counts[largest_first[: size - counts.sum()]] += 1
        error = abs(counts / exact - 1).max()
        if error < best:
            best = error
            chosen = counts.tolist()
        if error <= CLOSE_ENOUGH:
            break
    return chosen  # type: ignore[no-any-return]


def mixed(data: DataConfig, split: str, build: Callable[[DataConfig], Any]) -> Any:
    """The rows that `data` names: build(data), or the mixture of data.sources.

    build: the section of one source -> its rows or None. Held-out parts are interleaved unweighted.
    """
    tables = tables_of(data)
    if not tables:
        return build(data)
    sources = {}
    for name, table in tables.items():
        if table.name == "auto" and table.path == "off":
            raise ConfigError(
                f"data.sources.{name} names no data; set data.sources.{name}.path or "
                f"data.sources.{name}.name"
            )
        log.info("data: source %s, %s", name, split)
        keys = {key: getattr(table, key) for key in SOURCE_KEYS}
        try:
            sources[name] = build(replace(data, **keys, sources={}))
        except Failure as error:
            raise type(error)(f"data.sources.{name}: {error}") from error
    sizes = {name: len(rows or ()) for name, rows in sources.items()}
    if split != "train":
        if missing := ", ".join(name for name, size in sizes.items() if size == 0):
            log.info(f"data: nothing is held out of {missing}, so no evaluation has a loss of it")
        if not any(sizes.values()):
            return None
        return Mixture(sources, list(sizes.values()))
    weights = {name: table.weight for name, table in tables.items()}
    # An empty source is refused by its name, as one that is drawn.
    mixture = Mixture(sources, counts_of(weights, [max(1, size) for size in sizes.values()]))
    times = mixture.blocks * mixture.counts / mixture.sizes
    longest = mixture.names[times.argmin()]
    for (name, size), count, often in zip(sizes.items(), mixture.counts, times, strict=True):
        share = f"{100 * count / mixture.block:.4g}% of rows"
        log.info(f"data: {name}: {size:,} rows, {share}, {often:.2f} times each")
        if often > MOST_REPEATS:
            warn(
                f"data.sources.{name}: an epoch, in which {longest} is read once, takes each of "
                f"its {size:,} rows {often:,.0f} times, more than {MOST_REPEATS}; lower its "
                f"weight, or raise {longest}'s"
            )
    log.info(f"data: an epoch has {len(mixture):,} rows")
    return mixture


def tables_of(data: DataConfig) -> dict[str, MixedSourceConfig]:
    """The tables in data.sources by name. Errors: ConfigError for keys of a single source too."""
    tables = data.sources
    for key in SOURCE_KEYS:
        value = getattr(data, key)
        if tables and value != getattr(SourceConfig, key):
            raise ConfigError(
                f"data.{key}={value} is for a single source, and there is a mixture of "
                f"{', '.join(tables)}; set data.sources.{next(iter(tables))}.{key}, or remove "
                "data.sources"
            )
    return dict(tables)


def losses_by_source(
    losses: Tensor, labels: Tensor, source_ids: Tensor, names: Sequence[str]
) -> dict[str, tuple[Tensor, Tensor]]:
    """{"loss_NAME": (sum of its losses, how many count)} for a task's metrics(), of every source.

    losses: of each token, float32; labels: below 0 where a token does not count; source_ids: its
    source's index in `names`; all of one shape, shifted alike. Nothing is read from the device.
    """
    metrics = {}
    for number, name in enumerate(names):
        counts = (labels >= 0) & (source_ids == number)
        metrics[f"loss_{name}"] = (torch.where(counts, losses, 0.0).sum(), counts.sum())
    return metrics
