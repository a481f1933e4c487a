"""Turn token documents into rows: packed (best_fit), concatenated and cut (cut), one each (off).

Rows are planned from the documents' lengths alone, so they are the same at every start and in every
epoch; they are the samples that the run shuffles. A row consists of pieces: parts of documents.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from dist_amp.distributed.process import warn
from dist_amp.errors import ConfigError, DataError
from dist_amp.loading.plan import epoch_order, shuffled_order
from dist_amp.settings import DataConfig
from dist_amp.sources.token_shards import IGNORE_INDEX, Sample, short_hash

log = logging.getLogger(__name__)
# Pieces that best_fit packs at a time, drawn in random order, so that neighbours in the source do
# not share a row, and with a fixed seed, so that a resumed run finds the same rows.
WINDOW = 2**16
SEED = 0
Ints = numpy.ndarray[Any, numpy.dtype[numpy.int64]]


@dataclass(frozen=True)
class Packing:
    """How documents become rows of at most `length` tokens."""

    length: int
    pack: Literal["off", "cut", "best_fit"]
    long_documents: Literal["split", "truncate"]
    # With off, batches have widths divisible by it: new shapes cost buffers. Not in fingerprints.
    multiple: int = field(default=1, repr=False)

    @classmethod
    def of(
        cls,
        data: DataConfig,
        length: int,
        auto: Literal["off", "cut", "best_fit"],
        multiple: int = 1,
    ) -> "Packing":
        """The packing that `[data]` asks for; `auto` is the task's default."""
        pack = auto if data.pack == "auto" else data.pack
        truncates = pack == "off" or data.view == "parquet"
        return cls(length, pack, "truncate" if truncates else "split", multiple)

    def rows(self, documents: Any, split: str) -> Any:
        """The samples for `collate`, which also truncates them; None if there are none."""
        if documents is None:
            return None
        if not hasattr(documents, "lengths"):
            if self.pack == "cut" or self.long_documents != "truncate":
                raise ConfigError(
                    f"data.pack={self.pack} needs the documents' lengths, which are unknown if "
                    "Parquet is read by row group; set data.view=parquet with data.pack=best_fit "
                    "or off, or data.path to tokens that python -m dist_amp.tokenize has made"
                )
            if self.pack == "best_fit":
                log.info("data: only the first %d tokens of a document are read", self.length)
            return documents
        rows = PackedRows(documents, self)
        if not len(rows) and split == "validation":
            log.info("data: the held-out documents do not fill one row, so there is no evaluation")
            return None
        rows.describe(split)
        return rows

    def collate(
        self, samples: list[Sample], pad_id: int = 0, attention_mask: bool = False
    ) -> dict[str, Any]:
        """A batch of rows, padded on the right: to `length` if packed, else to a multiple.

        input_ids, labels [B, T] int64; with best_fit position_ids, which begin at 0 in each piece
        and in the padding; source_ids of a mixture; if asked for, attention_mask, 0 at padding;
        tokens: the number without padding; counted: how many tokens count in the loss.
        """
        if self.pack == "best_fit" and "position_ids" not in samples[0]:
            samples = self.packed(samples)
        lengths = [min(len(sample["input_ids"]), self.length) for sample in samples]
        width = self.length
        if self.pack == "off":
            width = min(width, -(-max(lengths) // self.multiple) * self.multiple)
        fills = {"input_ids": pad_id, "labels": IGNORE_INDEX}
        batch = {}
        for name in samples[0]:
            padding = torch.full((width,), fills.get(name, 0))
            if name == "position_ids":
                padding = torch.arange(width)
            rows = [
                torch.cat((sample[name][:length], padding[: width - length]))
                for sample, length in zip(samples, lengths, strict=True)
            ]
            batch[name] = torch.stack(rows)
        if attention_mask:
            filled = torch.arange(width) < torch.tensor(lengths)[:, None]
            batch["attention_mask"] = filled.long()
        counted = int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
        return {**batch, "tokens": sum(lengths), "counted": counted}

    def packed(self, documents: list[Sample]) -> list[Sample]:
        """Pack the first `length` tokens of each document into rows, in any order."""
        pieces = [
            {name: values[: self.length] for name, values in document.items()}
            for document in documents
        ]
        row_of = best_fit(numpy.array([len(piece["input_ids"]) for piece in pieces]), self.length)
        rows: list[list[Sample]] = [[] for _ in range(max(row_of) + 1)]
        for row, piece in zip(row_of, pieces, strict=True):
            rows[row].append(piece)
        return [joined(row) for row in rows]


class PackedRows:
    """Map-style dataset of rows; documents: such as `TokenShards`. lengths: [len] int64, of rows.

    A row is {"input_ids", "labels"}, with best_fit "position_ids" too, each [n] int64. In a split
    document, each piece but the first begins with the last token of the piece before, as context;
    its label there is -100, so each token counts once. Memory: 24 bytes per piece, 16 per row.
    """

    def __init__(self, documents: Any, packing: Packing):
        self.documents = documents
        self.packing = packing
        lengths = numpy.asarray(documents.lengths, dtype=numpy.int64)
        length = packing.length
        split = packing.long_documents == "split"
        if packing.pack == "cut":
            if not split:
                lengths = lengths.clip(max=length)
            self._ends = lengths.cumsum()  # of each document, in their concatenation
            self.lengths = numpy.full(lengths.sum() // length, length)
            return
        self._pieces = pieces_of(lengths, length, split)
        if not split:  # leave out documents of which no token that counts is left
            self._pieces = self._pieces[:, documents.firsts[self._pieces[0]] < length]
        self._offsets = numpy.arange(self._pieces.shape[1] + 1)  # each row's first piece
        if packing.pack == "best_fit":
            self._pieces, self._offsets = pack_pieces(self._pieces, length)
        tokens = self._pieces[2] - self._pieces[1]
        ends = numpy.concatenate(([0], tokens.cumsum()))
        self.lengths = numpy.diff(ends[self._offsets])

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def fingerprint(self) -> str:
        return short_hash(f"{self.documents.fingerprint} {self.packing} 1")[:16]

    def __getitem__(self, index: int) -> Sample:
        pieces = self.documents.pieces(self.pieces(index))
        if self.packing.pack == "cut":
            return concatenated(pieces)
        row = joined(pieces)
        if self.packing.pack == "off":
            del row["position_ids"]
        return row

    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        """The pieces of a row, in order: (document, first token, one past its last)."""
        if self.packing.pack != "cut":
            first = self._offsets[index]
            last = self._offsets[index + 1]
            return list(zip(*self._pieces[:, first:last].tolist(), strict=True))
        start = index * self.packing.length
        end = start + self.packing.length
        document = int(numpy.searchsorted(self._ends, start, side="right"))
        pieces = []
        while start < end:
            begin = int(self._ends[document - 1]) if document else 0
            stop = min(end, int(self._ends[document]))
            if stop > start:  # the document is not empty
                pieces.append((document, start - begin, stop - begin))
            start = stop
            document += 1
        return pieces

    def describe(self, split: str) -> None:
        """Log how documents became rows. Raises DataError if they do not fill a row."""
        pack = self.packing.pack
        length = self.packing.length
        lengths = numpy.asarray(self.documents.lengths)
        documents = f"{len(self.documents):,} {split} documents"
        if not len(self):
            rows = "longer" if (lengths > length).any() else "shorter"
            raise DataError(
                f"the {documents} have {lengths.sum():,} tokens in all, and do not fill one row of "
                f"{length:,} with tokens to train on; use {rows} rows, more data, or best_fit"
            )
        log.info(
            f"data: {documents}, {lengths.sum():,} tokens: {len(self):,} rows of at most "
            f"{length:,} (data.pack={pack})"
        )
        if self.packing.long_documents == "split":
            return
        if pack != "cut" and (left_out := len(self.documents) - self._pieces.shape[1]):
            warn(
                f"{left_out:,} of {documents} are left out, because none of their first "
                f"{length:,} tokens counts in the loss"
            )
        if cut_off := (lengths - length).clip(min=0).sum() / lengths.sum():
            log.info(
                f"data: {split}: {cut_off:.1%} of the tokens are cut off, in documents longer than "
                f"{length:,} tokens; use longer rows, or data.pack=best_fit"
            )


def concatenated(pieces: Sequence[Mapping[str, Tensor]]) -> Sample:
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def joined(pieces: Sequence[Sample]) -> Sample:
    """Concatenate pieces into a row with position_ids; mask the label of each one's first token."""
    for piece in pieces:
        piece["labels"][0] = IGNORE_INDEX
    positions = [torch.arange(len(piece["input_ids"])) for piece in pieces]
    return {**concatenated(pieces), "position_ids": torch.cat(positions)}


def pieces_of(lengths: Ints, length: int, split: bool) -> Ints:
    """Documents as pieces of 2 to `length` tokens, [3, pieces]: columns as `PackedRows.pieces`."""
    counts = (lengths > 1).astype(numpy.int64)  # in a single token there is nothing to predict
    if split:  # a later piece begins with the token before it, so it adds length - 1 tokens
        counts = -(-(lengths - 1).clip(min=0) // (length - 1))
    document = numpy.repeat(numpy.arange(len(lengths)), counts)
    first = counts.cumsum() - counts
    number = numpy.arange(len(document)) - numpy.repeat(first, counts)
    start = number * (length - 1)
    stop = numpy.minimum(start + length, lengths[document])
    return numpy.stack((document, start, stop))


def pack_pieces(pieces: Ints, length: int) -> tuple[Ints, Ints]:
    """Pack by best fit: (pieces in the order of rows [3, pieces]; each row's first [rows + 1])."""
    count = pieces.shape[1]
    order = epoch_order(shuffled_order(count), count, SEED, 0)
    chosen = numpy.empty_like(pieces)
    counts = []
    for first in range(0, count, WINDOW):
        positions = torch.arange(first, min(first + WINDOW, count))
        window = pieces[:, order(positions).numpy()]
        rows = best_fit(window[2] - window[1], length)
        # Shuffle the rows, because best_fit begins with the longest documents.
        number = torch.arange(int(rows.max()) + 1)
        shuffled = epoch_order("randperm", len(number), SEED, 1 + first)
        rows = shuffled(number).numpy()[rows]
        chosen[:, first : first + WINDOW] = window[:, rows.argsort(kind="stable")]
        counts.append(numpy.bincount(rows))
    return chosen, numpy.concatenate(([0], *counts)).cumsum()


def best_fit(sizes: Ints, length: int) -> Ints:
    """The row of each piece: the longest piece first, each into the fullest row that has room.

    Pieces of one size are placed together: a row that takes one is the fullest for the next, so it
    takes as many as it has room for. Source: Ding et al. 2024, arXiv:2404.10830.
    """
    order = numpy.argsort(-sizes, kind="stable")
    row_of = []  # the row of each piece, in this order
    free: list[list[int]] = [[] for _ in range(length + 1)]  # rows by their room in tokens
    room = 0  # bit n is set if free[n] has rows
    rows = 0
    values, counts = numpy.unique(sizes, return_counts=True)
    for size, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            left = length
            fitting = room >> size
            if fitting:  # the lowest set bit stands for the fullest rows with room
                left = size + (fitting & -fitting).bit_length() - 1
            per_row = left // size
            needed = -(-count // per_row)
            if fitting:
                chosen = free[left][-needed:]
                del free[left][-needed:]
                if not free[left]:
                    room ^= 1 << left
            else:
                chosen = list(range(rows, rows + needed))
                rows += needed
            for row in chosen:
                placed = min(per_row, count)
                count -= placed
                row_of += [row] * placed
                free[left - placed * size].append(row)
                room |= 1 << (left - placed * size)
    result = numpy.empty_like(sizes)
    result[order] = row_of
    return result


class TokenShares:
    """Metrics of batches: the shares of padding, of tokens that count, and of sources among these.

    A task calls `count` in its tokens(batch) and returns `read()` from its train_metrics.
    """

    def __init__(self, source_names: Sequence[str] = ()):
        self._names = source_names
        # [places in rows, tokens, counted tokens, counted tokens of each source]: replaced, never
        # changed in place, so that `read` needs no lock while another thread counts.
        self._total = numpy.zeros(3 + len(source_names), numpy.int64)
        self._read = self._total

    def count(self, batch: Mapping[str, Any]) -> int:
        """Add a batch of `Packing.collate`, on the host; returns its tokens without padding."""
        labels = batch["labels"]
        counts = [labels.numel(), batch["tokens"], batch["counted"]]
        if self._names:
            sources = batch["source_ids"][:, 1:][labels[:, 1:] != IGNORE_INDEX]
            counts += sources.bincount(minlength=len(self._names)).tolist()
        self._total = self._total + numpy.array(counts)
        return int(batch["tokens"])

    def read(self, world: Any) -> Sample:
        """The shares since the last call, in percent, over all ranks; every rank must call it."""
        total = self._total
        since = torch.tensor((total - self._read).tolist(), pin_memory=world.device.type == "cuda")
        self._read = total
        summed = world.sum(since.to(world.device, non_blocking=True).double())
        places, tokens, counted, *by_source = summed.unbind()
        shares = {"padding_pct": 100 * (1 - tokens / places), "counted_pct": 100 * counted / tokens}
        for name, part in zip(self._names, by_source, strict=True):
            shares[f"counted_pct_{name}"] = 100 * part / counted.clamp(min=1)
        return shares
