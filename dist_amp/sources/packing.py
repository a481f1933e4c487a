"""Token documents as rows of at most one length: packed by best fit, joined and cut, or one document per row.

The plan of rows is made from the documents' lengths alone, the same at every start and in every epoch: the rows are the
samples, which the run shuffles as any others.
"""

import hashlib
import logging
from dataclasses import dataclass
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from dist_amp.errors import ConfigError, DataError
from dist_amp.runtime.loader import read
from dist_amp.runtime.permutation import epoch_order, shuffled_order
from dist_amp.settings import DataConfig
from dist_amp.sources.load import warn
from dist_amp.sources.token_shards import NOT_LEARNED

log = logging.getLogger(__name__)
# Pieces that are fitted at a time, taken in random order: a row's documents are no neighbours in the source. More leave
# hardly less padding: docs/data.md.
WINDOW = 2**16
SEED = 0  # of that order; not run.seed, with which a resumed run's rows could change
LOOKED_AT = 64  # rows whose counted tokens are reported at the start
Ints = numpy.ndarray[Any, numpy.dtype[numpy.int64]]
Piece = tuple[int, int, int]  # document, first token, one past its last


@dataclass(frozen=True)
class Packing:
    """How documents become rows of at most `length` tokens."""

    length: int
    pack: Literal["off", "cut", "best_fit"]
    long_documents: Literal["split", "truncate", "refuse"]

    @classmethod
    def of(cls, data: DataConfig, length: int, auto: Literal["off", "cut", "best_fit"]) -> "Packing":
        """As `[data]` says; `auto` is the task's default."""
        pack = auto if data.pack == "auto" else data.pack
        usual: Literal["split", "truncate"] = "truncate" if pack == "off" else "split"
        return cls(length, pack, usual if data.long_documents == "auto" else data.long_documents)

    def rows(self, documents: Any, split: str) -> Any:
        """A token dataset's rows as samples for `collate`; None without documents.

        Errors: ConfigError for a setting that needs documents with `lengths`; DataError for a document that is too
        long where none may be, and if no token counts.
        """
        if documents is None:
            return None
        if hasattr(documents, "lengths"):
            rows = PackedRows(documents, self)
            if not len(rows) and split == "validation":
                log.info("data: the held-out documents do not fill one row, so there is no evaluation")
                return None
            rows.describe(split)
            return rows
        if self.pack == "off" and self.long_documents == "truncate":
            return documents  # collate truncates what was read, and what has nothing to learn stays in
        setting, fix = f"data.long_documents={self.long_documents}", "data.long_documents=truncate"
        if self.pack != "off":
            setting, fix = f"data.pack={self.pack}", "data.pack=off, a document per row"
        raise ConfigError(
            f"{setting} needs the documents' lengths, which are not known where they are tokenized as they are read "
            f"(data.view=parquet); use {fix}, or tokenize them first by python -m dist_amp.tokenize, and set data.path "
            "to its folder"
        )

    def collate(
        self, samples: list[dict[str, Tensor]], pad_id: int = 0, attention_mask: bool = False
    ) -> dict[str, Any]:
        """A batch of rows, padded on the right: to `length` if packed, else to the longest.

        input_ids, labels [B, T] int64, and with best_fit position_ids, which begin at 0 in each document and in the
        padding; source_ids of a mixture; tokens: how many there are without padding; counted: how many are learned.
        attention_mask: whether there is one too, 0 at padding.
        """
        lengths = [min(len(sample["input_ids"]), self.length) for sample in samples]
        width = max(lengths) if self.pack == "off" else self.length
        batch: dict[str, Any] = {}
        for name in samples[0]:
            fill = {"input_ids": pad_id, "labels": NOT_LEARNED}.get(name, 0)
            columns = [padded(sample[name], width, None if name == "position_ids" else fill) for sample in samples]
            batch[name] = torch.stack(columns)
        if attention_mask:
            batch["attention_mask"] = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
        counted = int((batch["labels"][:, 1:] != NOT_LEARNED).sum())
        return {**batch, "tokens": sum(lengths), "counted": counted}


class PackedRows:
    """Map-style dataset of packed rows: {"input_ids", "labels"}, with best_fit "position_ids" too, each [n] int64.

    documents: a token dataset with `lengths`. Of a split document every piece but the first begins with the token
    before it, which is context: its label is -100, and each token is learned once. Pieces of one token are left out
    where a row holds whole pieces, since there is nothing to predict. Memory: 24 bytes per piece and 16 per row.

    lengths: [len] int64, each row's tokens without padding. padding_share: of a row of `length` tokens, on average.
    left_out: how many documents have nothing to learn within a row's length, if longer ones are truncated.
    Errors: as `Packing.rows`.
    """

    def __init__(self, documents: Any, packing: Packing):
        self.documents = documents
        self.packing = packing
        lengths = numpy.asarray(documents.lengths, dtype=numpy.int64)
        too_much = (lengths - packing.length).clip(min=0).sum() if packing.long_documents == "truncate" else 0
        self.cut_off = float(too_much) / max(1, int(lengths.sum()))  # the share of tokens
        if packing.long_documents == "refuse" and (too_long := numpy.flatnonzero(lengths > packing.length)).size:
            raise DataError(
                f"document {too_long[0]} has {lengths[too_long[0]]:,} tokens, and a row {packing.length:,} "
                f"({too_long.size:,} documents are too long); use longer rows, or data.long_documents=split or truncate"
            )
        if packing.pack == "cut":
            kept = lengths if packing.long_documents == "split" else lengths.clip(max=packing.length)
            self._ends = kept.cumsum()  # of each document, in the joined stream
            self.left_out = 0
            self.lengths = numpy.full(int(kept.sum()) // packing.length, packing.length)
        else:
            self._pieces = pieces_of(lengths, packing.length, split=packing.long_documents == "split")
            if packing.long_documents != "split" and hasattr(documents, "firsts"):
                learned = numpy.asarray(documents.firsts)[self._pieces[0]] < packing.length
                self._pieces = self._pieces[:, learned]
            self.left_out = len(documents) - self._pieces.shape[1]
            if packing.pack == "best_fit":
                self._pieces, self._offsets = fitted(self._pieces, packing.length)
            else:
                self._offsets = numpy.arange(self._pieces.shape[1] + 1)
            sums = numpy.concatenate(([0], (self._pieces[2] - self._pieces[1]).cumsum()))[self._offsets]
            self.lengths = numpy.diff(sums)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.documents.fingerprint} {self.packing} 1".encode()).hexdigest()[:16]

    @property
    def padding_share(self) -> float:
        return 1 - float(self.lengths.sum()) / max(1, len(self) * self.packing.length)

    @property
    def plan_bytes(self) -> int:
        arrays = [self._ends] if self.packing.pack == "cut" else [self._pieces, self._offsets]
        return sum(array.nbytes for array in [*arrays, self.lengths])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        plans = [self.pieces(index) for index in indices]
        parts = iter(read_pieces(self.documents, [piece for plan in plans for piece in plan]))
        return [self._row([next(parts) for _ in plan]) for plan in plans]

    def pieces(self, index: int) -> list[Piece]:
        """The pieces of a row, in order."""
        if self.packing.pack != "cut":
            first, last = self._offsets[index], self._offsets[index + 1]
            return list(zip(*self._pieces[:, first:last].tolist(), strict=True))
        start, pieces = index * self.packing.length, []
        end, document = start + self.packing.length, int(numpy.searchsorted(self._ends, start, side="right"))
        while start < end:
            begin = int(self._ends[document - 1]) if document else 0
            stop = min(end, int(self._ends[document]))
            if stop > start:  # the document is not empty
                pieces.append((document, start - begin, stop - begin))
            start, document = stop, document + 1
        return pieces

    def _row(self, pieces: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        if self.packing.pack != "cut":
            for piece in pieces:  # a copy, since a document in memory is its dataset's
                piece["labels"] = torch.cat((torch.tensor([NOT_LEARNED]), piece["labels"][1:]))
        row = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        if self.packing.pack == "best_fit":
            row["position_ids"] = torch.cat([torch.arange(len(piece["input_ids"])) for piece in pieces])
        return row

    def describe(self, split: str) -> None:
        """Log rows, tokens and padding. Errors: DataError if there is no row, or no token counts in any."""
        if not len(self) and self.packing.pack == "cut":
            tokens = int(self._ends[-1]) if len(self._ends) else 0
            raise DataError(
                f"the {split} documents have {tokens:,} tokens in all, fewer than one row of {self.packing.length:,}; "
                "use shorter rows, more data, or data.pack=best_fit"
            )
        some = range(0, len(self), max(1, len(self) // LOOKED_AT))
        counted, length = [self._counted(index) for index in some], f"{self.packing.length:,}"
        if not any(counted) and not any(map(self._counted, range(len(self)))):
            raise DataError(
                f"none of the {len(self.documents):,} {split} documents has anything to learn within {length} tokens; "
                "use longer rows, and check that documents, completions and assistant's turns are not empty"
            )
        if self.packing.long_documents != "split" and self.left_out > 0:
            warn(
                f"{self.left_out:,} of {len(self.documents):,} {split} documents are left out: within {length} tokens "
                "they have no answer to learn, because it comes later"
            )
        log.info(
            "data: %s: %s rows of at most %s tokens (data.pack=%s), %s tokens; %.2f %% of the places are padding, "
            "about %.1f %% of the tokens count",
            split, f"{len(self):,}", length, self.packing.pack, f"{int(self.lengths.sum()):,}",
            100 * self.padding_share, 100 * sum(counted) / int(self.lengths[some].sum()),
        )  # fmt: skip
        if self.cut_off:
            log.info(
                "data: %s: %.1f %% of the tokens are cut off, since documents are longer than a row (%s tokens); use "
                "longer rows, or data.long_documents=split", split, 100 * self.cut_off, length,
            )  # fmt: skip

    def _counted(self, index: int) -> int:
        return int((self[index]["labels"][1:] != NOT_LEARNED).sum())


def read_pieces(documents: Any, pieces: list[Piece]) -> list[dict[str, Tensor]]:
    """Parts of documents, as samples; a dataset that can read parts has a method `pieces` for it."""
    if hasattr(documents, "pieces"):
        return documents.pieces(pieces)  # type: ignore[no-any-return]
    whole = read(documents, [document for document, _, _ in pieces])
    return [
        {name: column[start:stop] for name, column in sample.items()}
        for sample, (_, start, stop) in zip(whole, pieces, strict=True)
    ]


def padded(column: Tensor, width: int, fill: int | None) -> Tensor:
    """The column [n], cut or filled on the right to [width]; None: with 0, 1, 2 ..., the positions of the padding."""
    missing = width - len(column)
    if missing <= 0:
        return column[:width]
    return torch.cat((column, torch.arange(missing) if fill is None else column.new_full((missing,), fill)))


def pieces_of(lengths: Ints, length: int, split: bool) -> Ints:
    """Documents in pieces of at most `length` tokens and at least two: [3, pieces], as `Piece`."""
    # A further piece begins with the token before it, so that it adds length - 1.
    counts = (lengths - 1).clip(min=0) if split else (lengths > 1).astype(numpy.int64) * (length - 1)
    counts = -(-counts // (length - 1))
    document = numpy.repeat(numpy.arange(len(lengths)), counts)
    number = numpy.arange(len(document)) - numpy.repeat(counts.cumsum() - counts, counts)
    start = number * (length - 1)
    return numpy.stack((document, start, numpy.minimum(start + length, lengths[document])))


def fitted(pieces: Ints, length: int) -> tuple[Ints, Ints]:
    """Pieces in rows: (pieces row by row [3, pieces], each row's first piece [rows + 1])."""
    count = pieces.shape[1]
    order = epoch_order(shuffled_order(count), count, SEED, 0)
    chosen = numpy.empty_like(pieces)
    counts = []
    for first in range(0, count, WINDOW):
        window = pieces[:, order(torch.arange(first, min(first + WINDOW, count))).numpy()]
        rows = best_fit(window[2] - window[1], length)
        number = torch.arange(int(rows.max()) + 1)  # in random order: the first rows have the longest documents
        rows = epoch_order("randperm", len(number), SEED, 1 + first)(number).numpy()[rows]
        chosen[:, first : first + WINDOW] = window[:, rows.argsort(kind="stable")]
        counts.append(numpy.bincount(rows))
    return chosen, numpy.concatenate(([0], *counts)).cumsum()


def best_fit(sizes: Ints, length: int) -> Ints:
    """The row of each piece: the longest piece first, each into the fullest row that has room.

    Pieces of one size are placed together: a row that takes one is the fullest for the next, so it takes as many as it
    has room for. Source of packing by best fit: Ding et al. 2024, arXiv:2404.10830.
    """
    order = numpy.argsort(-sizes, kind="stable")
    values, firsts, counts = numpy.unique(-sizes[order], return_index=True, return_counts=True)
    placed = numpy.empty_like(sizes)
    free: list[list[int]] = [[] for _ in range(length + 1)]  # rows by the tokens that they have room for
    room = rows = 0  # bit n of room: free[n] has rows
    for size, first, count in zip((-values).tolist(), firsts.tolist(), counts.tolist(), strict=True):
        last = first + count
        while first < last:
            fitting = room >> size
            left = size + (fitting & -fitting).bit_length() - 1 if fitting else length  # its lowest bit: fullest rows
            each = left // size
            wanted = -(-(last - first) // each)
            if fitting:
                taken = free[left][-wanted:]
                del free[left][-wanted:]
                room ^= (not free[left]) << left
            else:
                taken, rows = list(range(rows, rows + wanted)), rows + wanted
            end = min(last, first + each * len(taken))
            placed[first:end] = numpy.repeat(taken, each)[: end - first]
            if fewer := (end - first) % each:  # the last row takes what is left
                rest = left - fewer * size
                free[rest].append(taken.pop())
                room |= 1 << rest
            if taken:
                rest = left - each * size
                free[rest] += taken
                room |= 1 << rest
            first = end
    result = numpy.empty_like(sizes)
    result[order] = placed
    return result
