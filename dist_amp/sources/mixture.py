"""Several sources as one dataset: an index map in which each source has its share of every block of positions."""

import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, make_dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor

from dist_amp.errors import ConfigError, DataError, Failure, in_one_line
from dist_amp.runtime.loader import read
from dist_amp.settings import DataConfig, MixedSourceConfig, SourceConfig

log = logging.getLogger(__name__)
Array = numpy.ndarray[Any, Any]

LONGEST_BLOCK = 10_000  # samples: a table of 160 KB; a source below about 1 in 20,000 does not occur
CLOSE_ENOUGH = 1e-3  # of a source's share: far below what a weight is known to be good for


class Mixture:
    """Map-style dataset of blocks of samples, in each of which source k occurs counts[k] times, spread evenly.

    The n-th draw from a source is its sample n modulo its length. There are as many blocks as it takes to draw every
    sample of every source, so the samples of one source occur equally often, or differ by one.
    A sample with "input_ids" also has "source_ids", int64 of the same shape: its source's index in `sources`.
    sources: map-style datasets by name, where None takes a count of 0. It has `fingerprint`, `lengths` and `pieces`
    if all sources have them. Errors: ConfigError for a source with an order of its own; DataError for an empty one.
    """

    fingerprint: str
    lengths: "Lengths"

    def __init__(self, sources: Mapping[str, Any], counts: Sequence[int]):
        self.names, self.sources = list(sources), list(sources.values())
        self.counts = numpy.array(counts, numpy.int64)
        drawn = {name: one for (name, one), count in zip(sources.items(), counts, strict=True) if count}
        for name, source in drawn.items():
            _check_source(name, source)
        self.sizes = numpy.array([len(one) if name in drawn else 0 for name, one in sources.items()], numpy.int64)
        self.block = int(self.counts.sum())
        self.blocks = max(-(-size // count) for _, size, count in self._sizes_and_counts() if count)
        self._source, self._number = evenly_spread(self.counts)
        prints = [getattr(one, "fingerprint", None) for one in drawn.values()]
        if all(isinstance(one, str) for one in prints):
            identity = json.dumps([self._sizes_and_counts(), prints])
            self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
        if all(hasattr(one, "lengths") for one in drawn.values()):
            self.lengths = Lengths(self)
        if all(hasattr(one, "pieces") for one in drawn.values()):
            self.pieces = self._pieces

    def _sizes_and_counts(self) -> list[tuple[str, int, int]]:
        return list(zip(self.names, self.sizes.tolist(), self.counts.tolist(), strict=True))

    def __len__(self) -> int:
        return self.blocks * self.block

    def locate(self, positions: Any) -> tuple[Array, Array]:
        """Positions, int64 of any shape -> (each one's source, its sample there), of the same shape."""
        block, within = numpy.divmod(numpy.asarray(positions, numpy.int64), self.block)
        source = self._source[within]
        return source, (block * self.counts[source] + self._number[within]) % self.sizes[source]

    def __getitem__(self, position: int) -> Any:
        if not 0 <= position < len(self):
            raise IndexError(f"{position} is not below {len(self)}")
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        sources, indices = self.locate(positions)
        samples: list[Any] = [None] * len(positions)
        for number in numpy.unique(sources).tolist():
            places = numpy.flatnonzero(sources == number)
            for place, sample in zip(places, self._read(number, indices[places].tolist()), strict=True):
                samples[place] = sample
        return samples

    def _pieces(self, pieces: Sequence[tuple[int, int, int]]) -> list[Any]:
        """Parts of documents: (position, first token, one past its last) each."""
        sources, indices = self.locate([position for position, _, _ in pieces])
        samples: list[Any] = [None] * len(pieces)
        for number in numpy.unique(sources).tolist():
            places = numpy.flatnonzero(sources == number).tolist()
            own = [(int(indices[place]), *pieces[place][1:]) for place in places]
            for place, sample in zip(places, self.sources[number].pieces(own), strict=True):
                samples[place] = with_source(sample, number)
        return samples

    def _read(self, number: int, indices: list[int]) -> list[Any]:
        try:
            return [with_source(sample, number) for sample in read(self.sources[number], indices)]
        except Exception as error:
            what = str(error) if isinstance(error, DataError) else in_one_line(error)
            shown = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
            raise DataError(f"data.sources.{self.names[number]}, sample {shown}: {what}") from error

    def describe(self, unit: str) -> list[str]:
        """A line per source: its size, its share of the mixture, and how often an epoch takes each of its samples."""
        return [
            f"{name}: {size:,} {unit}, {count / self.block:.2%} of {unit}, {self.blocks * count / size:.2f} times each"
            for name, size, count in self._sizes_and_counts()
            if count
        ]


def _check_source(name: str, source: Any) -> None:
    if hasattr(source, "shuffled"):
        raise ConfigError(
            f"data.sources.{name} is read by row group, and a mixture reads in any order; write its tokens with "
            "python -m dist_amp.tokenize and name them in its place, or use data.view=map"
        )
    if source is None or len(source) == 0:
        raise DataError(f"data.sources.{name} has no samples; check its path, split and columns")


class Lengths:
    """The lengths of a mixture's samples, int64 [len(mixture)], looked up when indexed; numpy makes an array of it."""

    dtype = numpy.dtype(numpy.int64)

    def __init__(self, mixture: Mixture):
        self._mixture = mixture

    def __len__(self) -> int:
        return len(self._mixture)

    def __getitem__(self, positions: Any) -> Any:
        """positions: an index, a slice, or an array of indices."""
        if isinstance(positions, slice):
            positions = numpy.arange(*positions.indices(len(self)))
        sources, indices = self._mixture.locate(positions)
        found = numpy.empty(sources.shape, numpy.int64)
        for number in numpy.unique(sources).tolist():
            here = sources == number
            found[here] = numpy.asarray(self._mixture.sources[number].lengths[indices[here]])
        return found[()]  # of shape []: a number

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return numpy.asarray(self[:], dtype)


def evenly_spread(counts: Array) -> tuple[Array, Array]:
    """A block in which source k occurs counts[k] times at equal distances: (source, how often it came before), [B]."""
    source = numpy.repeat(numpy.arange(len(counts)), counts)
    number = numpy.concatenate([numpy.arange(count) for count in counts])
    order = numpy.argsort((number + 0.5) / counts[source], kind="stable")
    return source[order], number[order]


def counts_in_block(weights: Mapping[str, float]) -> list[int]:
    """How often each source occurs in a block: the shortest that meets every share within CLOSE_ENOUGH of itself.

    If none up to LONGEST_BLOCK does, the one that comes closest. A block's samples are divided by largest remainder.
    Errors: ConfigError for a weight that is not positive, or too small to occur at all.
    """
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(f"data.sources.{name}.weight={weight} must be finite and above 0; or remove the source")
    shares = numpy.array(list(weights.values())) / sum(weights.values())
    sizes = numpy.arange(len(shares), LONGEST_BLOCK + 1)
    exact = sizes[:, None] * shares
    whole = numpy.floor(exact).astype(numpy.int64)
    # Rounded, or noise in the last bit would decide between equal remainders.
    largest_first = numpy.argsort(numpy.round(whole - exact, 9), axis=1, kind="stable")
    missing = (sizes - whole.sum(1))[:, None] > numpy.arange(len(shares))
    numpy.put_along_axis(whole, largest_first, numpy.take_along_axis(whole, largest_first, 1) + missing, axis=1)
    errors = numpy.abs(whole / exact - 1).max(1)
    close = numpy.flatnonzero(errors <= CLOSE_ENOUGH)
    counts = whole[close[0] if len(close) else errors.argmin()].tolist()
    for name, count, share in zip(weights, counts, shares, strict=True):
        if count == 0:
            raise ConfigError(
                f"data.sources.{name}.weight={weights[name]:g} is {share:.2g} of the mixture, which is less than once "
                f"in {LONGEST_BLOCK:,} samples; raise it, or remove the source"
            )
    return counts


def mixed(
    data: DataConfig,
    split: str,
    build: Callable[[DataConfig], Any],
    pack: Callable[[Any], Any] = lambda documents: documents,
) -> Any:
    """The dataset that `data` names: build(data), packed; or the mixture of data.sources, each built with its own keys.

    build: the section of one source -> its documents, None if it holds none out. pack: documents -> rows; with
    data.mix_by=rows that of each source, with documents that of the mixture. For validation the sources' held-out
    parts are joined, without weights, and interleaved, so that eval.batches takes its share of each; None if there are
    none. Errors: ConfigError for settings that do not go together; what a source raises names the source.
    """
    tables = tables_of(data)
    if not tables:
        if data.mix_by != "rows":
            raise ConfigError(f"data.mix_by={data.mix_by} is for a mixture, and there is no data.sources; remove it")
        documents = build(data)
        return None if documents is None else pack(documents)
    join = data.mix_by == "documents"

    def rows_of(source: DataConfig) -> Any:
        documents = build(source)
        return documents if join or documents is None else pack(documents)

    sources = {}
    for name, table in tables.items():
        log.info("data: source %s, %s", name, split)
        sources[name] = _built(name, source_config(data, name, table), rows_of)
    if split == "train":
        mixture = Mixture(sources, counts_in_block({name: table.weight for name, table in tables.items()}))
        unit = "documents" if join else "rows"
        for line in [*mixture.describe(unit), f"an epoch has {len(mixture):,} {unit}"]:
            log.info("data: %s", line)
    else:
        sizes = {name: 0 if one is None else len(one) for name, one in sources.items()}
        if missing := [name for name, size in sizes.items() if size == 0]:
            log.info("data: nothing is held out of %s, so no evaluation has a loss of it", ", ".join(missing))
        if not any(sizes.values()):
            return None
        mixture = Mixture(sources, list(sizes.values()))
    return pack(mixture) if join else mixture


def _built(name: str, config: DataConfig, build: Callable[[DataConfig], Any]) -> Any:
    """build(config), whose errors name the table or its keys: data.sources.wiki.path in place of data.path."""
    keys = "|".join(item.name for item in fields(SourceConfig))
    try:
        return build(config)
    except Failure as error:
        text = re.sub(rf"\bdata\.({keys})\b", rf"data.sources.{name}.\1", str(error))
        raise type(error)(text if text != str(error) else f"data.sources.{name}: {error}") from error


def tables_of(data: DataConfig) -> dict[str, MixedSourceConfig]:
    """The tables in data.sources by name. Errors: ConfigError for keys of a single source beside them."""
    tables = data.sources
    if is_dataclass(tables):
        tables = {item.name: getattr(tables, item.name) for item in fields(tables)}
    for item in fields(SourceConfig):
        if tables and (value := getattr(data, item.name)) != item.default:
            raise ConfigError(
                f"data.{item.name}={value} is for a single source, and there is a mixture of {', '.join(tables)}; set "
                f"data.sources.{next(iter(tables))}.{item.name}, or remove data.sources"
            )
    return dict(tables)


def source_config(data: DataConfig, name: str, table: MixedSourceConfig) -> DataConfig:
    """The data section of one source. Errors: ConfigError for a table that names no data."""
    if table.name == "auto" and table.path == "off":
        raise ConfigError(
            f"data.sources.{name} names no data; set data.sources.{name}.path or data.sources.{name}.name"
        )
    keys = {item.name: getattr(table, item.name) for item in fields(SourceConfig)}
    return replace(data, **keys, sources=make_dataclass("Sources", [], frozen=True)())


def losses_by_source(
    losses: Tensor, labels: Tensor, source_ids: Tensor, names: Sequence[str]
) -> dict[str, tuple[Tensor, Tensor]]:
    """{"loss_NAME": (sum of its losses, how many count)} for a task's metrics(), with every name in every batch.

    losses: of each token, float32; labels: below 0 where a token does not count; source_ids: its source's index in
    `names`; all of one shape, shifted alike. Nothing is read from the device.
    """
    found = {}
    for number, name in enumerate(names):
        counts = (labels >= 0) & (source_ids == number)
        found[f"loss_{name}"] = (torch.where(counts, losses, 0.0).sum(), counts.sum())
    return found


def with_source(sample: Any, number: int) -> Any:
    """The sample of tokens with its source beside each token; other samples as they are."""
    if not isinstance(sample, dict) or "input_ids" not in sample:
        return sample
    return {**sample, "source_ids": torch.full_like(sample["input_ids"], number)}
