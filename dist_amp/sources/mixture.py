"""Mix several sources into one dataset: each has its share of an epoch, spread evenly over it.

An epoch consists of equal blocks, in each of which source k occurs counts[k] times. The order of
sources in a short block is a table; in a longer one it is computed (`locate_in_block`).
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
from dist_amp.sources.token_shards import Array, short_hash

log = logging.getLogger(__name__)

LONGEST_BLOCK = 10_000  # samples of a block with a table, which takes 160 KB
CLOSE_ENOUGH = 1e-3  # relative error of the shares at which the search for a short block ends
# Repeats per epoch without a warning: after 16, they add next to nothing (arXiv:2305.16264).
MOST_REPEATS = 20
SOURCE_KEYS = [item.name for item in fields(SourceConfig)]


class Mixture:
    """Map-style dataset of blocks, in each of which source k occurs counts[k] times, evenly spread.

    There are as many blocks as it takes to draw every sample; other sources repeat. A sample with
    "input_ids" also gets "source_ids", int64 of that shape: the source's index in data.sources.
    """

    fingerprint: str  # missing, as `lengths`, if a source has none

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
                    f"data.sources.{name} is read by row group, but a mixture reads in any order; "
                    "set its path to tokens of python -m dist_amp.tokenize, or use data.view=map"
                )
            self.sizes[index] = len(self.sources[index] or ())
            if not self.sizes[index]:
                raise DataError(
                    f"data.sources.{name} has no samples; check its path, split and columns"
                )
        self.blocks = int(max(-(-self.sizes[drawn] // self.counts[drawn])))
        if self.block <= LONGEST_BLOCK:
            # For each place in a block: its source, and how often that source comes before it.
            source = numpy.repeat(numpy.arange(len(counts)), self.counts)
            draw = numpy.concatenate([numpy.arange(count) for count in counts])
            order = numpy.argsort((draw + 0.5) / self.counts[source], kind="stable")
            self._source = source[order]
            self._draw = draw[order]
        fingerprints = [getattr(self.sources[index], "fingerprint", None) for index in drawn]
        if all(isinstance(each, str) for each in fingerprints):
            shares = zip(self.names, self.sizes.tolist(), self.counts.tolist(), strict=True)
            self.fingerprint = short_hash(json.dumps([[*shares], fingerprints]))[:16]

    def __len__(self) -> int:
        return self.blocks * self.block

    def locate(self, positions: Any) -> tuple[Array, Array]:
        """Positions, int64 [n] -> (each one's source, and the sample's index in it), [n] each."""
        positions = numpy.atleast_1d(numpy.asarray(positions, numpy.int64))
        block, within = numpy.divmod(positions, self.block)
        if self.block <= LONGEST_BLOCK:
            source = self._source[within]
            draw = self._draw[within]
        else:
            source, draw = locate_in_block(within, self.counts.tolist())
        draw += block * self.counts[source]
        return source, draw % self.sizes[source]

    @property
    def lengths(self) -> Array:
        """The length of each sample, int64 [len]; AttributeError if a source has no lengths."""
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


def locate_in_block(places: Array, counts: Sequence[int]) -> tuple[Array, Array]:
    """Places in a block, int64 -> (each one's source, how often that source comes before it).
    Each source in turn takes `count` of the places that are still open, evenly spaced.
    """
    source = numpy.zeros_like(places)
    draw = numpy.zeros_like(places)
    is_open = numpy.ones(places.shape, bool)
    left = sum(counts)
    rest = places  # each place's number among the `left` open ones
    for index, count in enumerate(counts):
        if not count:
            continue
        # In Python's integers, which do not overflow.
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
    """The count of each source in a block, so that its share of an epoch is exact to one sample.

    Blocks are short if shares are exact then; otherwise the epoch is a single block, divided by
    largest remainders. Fractions make a weight such as 0.1 exact, and so the epoch's length.
    """
    exact = [Fraction(str(weight)) for weight in weights.values()]
    shares = [weight / sum(exact) for weight in exact]
    length = max(math.ceil(size / share) for size, share in zip(sizes, shares, strict=True))
    if length > 2**52:  # more than `permute` can shuffle
        least = min(weights.values())
        raise ConfigError(
            f"weight={least:g} in data.sources makes epochs above 2^52 rows; raise it"
        )
    counts = counts_in_block(weights)
    if all(counts):
        blocks = max(-(-size // count) for size, count in zip(sizes, counts, strict=True))
        block = sum(counts)
        errors = [count - block * share for count, share in zip(counts, shares, strict=True)]
        if max(map(abs, errors)) * blocks < 1:
            return counts
    counts = [math.floor(length * share) for share in shares]
    remainders = [length * share - count for share, count in zip(shares, counts, strict=True)]
    largest_first = sorted(range(len(counts)), key=remainders.__getitem__, reverse=True)
    for index in largest_first[: length - sum(counts)]:
        counts[index] += 1
    return counts


def counts_in_block(weights: Mapping[str, float]) -> list[int]:
    """The counts in the shortest block whose shares are CLOSE_ENOUGH, or in the closest block."""
    shares = numpy.array(list(weights.values())) / sum(weights.values())
    best = math.inf
    for size in range(len(shares), LONGEST_BLOCK + 1):
        exact = size * shares
        counts = numpy.floor(exact).astype(numpy.int64)
        # Rounded, because noise in the last bit would decide between equal remainders.
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

    build: the section of one source -> its rows, or None. Validation rows are mixed unweighted.
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
            log.info(f"data: nothing is held out of {missing}, so evaluation has no loss for it")
        if not any(sizes.values()):
            return None
        return Mixture(sources, list(sizes.values()))
    weights = {name: table.weight for name, table in tables.items()}
    # An empty source counts as one sample here, so that Mixture draws from it, and so rejects it.
    mixture = Mixture(sources, counts_of(weights, [max(1, size) for size in sizes.values()]))
    times = mixture.blocks * mixture.counts / mixture.sizes
    longest = mixture.names[times.argmin()]
    for (name, size), count, often in zip(sizes.items(), mixture.counts, times, strict=True):
        share = f"{100 * count / mixture.block:.4g}% of rows"
        log.info(f"data: {name}: {size:,} rows, {share}, {often:.2f} times each")
        if often > MOST_REPEATS:
            warn(
                f"data.sources.{name}: an epoch, which reads {longest} once, repeats each of its "
                f"{size:,} rows {often:,.0f} times, more than {MOST_REPEATS}; lower its weight, "
                f"or raise {longest}'s"
            )
    log.info(f"data: an epoch has {len(mixture):,} rows")
    return mixture


def tables_of(data: DataConfig) -> dict[str, MixedSourceConfig]:
    """The tables of data.sources. Raises ConfigError if a single source is set, too."""
    tables = data.sources
    for key in SOURCE_KEYS:
        value = getattr(data, key)
        if tables and value != getattr(SourceConfig, key):
            raise ConfigError(
                f"data.{key}={value} is for a single source, but data.sources is a mixture of "
                f"{', '.join(tables)}; set data.sources.{next(iter(tables))}.{key}, or remove "
                "data.sources"
            )
    return dict(tables)


def losses_by_source(
    losses: Tensor, labels: Tensor, source_ids: Tensor, names: Sequence[str]
) -> dict[str, tuple[Tensor, Tensor]]:
    """For a task's metrics(): {"loss_NAME": (sum of losses, tokens that count)} for every source.

    losses: of each token, float32; labels: below 0 where a token does not count; source_ids: the
    source's index in `names`; all of one shape, shifted alike. No host-device synchronisation.
    """
    metrics = {}
    for number, name in enumerate(names):
        counts = (labels >= 0) & (source_ids == number)
        metrics[f"loss_{name}"] = (torch.where(counts, losses, 0.0).sum(), counts.sum())
    return metrics
