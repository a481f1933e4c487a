"""How much of what is read counts: the shares of padding and of counted tokens between two log steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from dist_amp.sources.token_shards import NOT_LEARNED


class TokenShares:
    """Adds up this rank's micro-batches on the host, as they are read; `read` gives the shares since the last one.

    A task calls `count` in its tokens(batch) and returns `read()` from its train_metrics. source_names: of a mixture.
    """

    def __init__(self, source_names: Sequence[str] = ()):
        self._names = source_names
        # [places in rows, tokens, counted tokens, counted tokens of each source]: replaced, never changed, so that
        # batches that are read ahead in another thread need no lock.
        self._total = self._read = numpy.zeros(3 + len(source_names), numpy.int64)

    def count(self, batch: Mapping[str, Any]) -> int:
        """Add a batch of `Packing.collate`, on the host; returns its tokens without padding."""
        labels, by_source = batch["labels"], []
        if self._names:
            sources = batch["source_ids"][:, 1:][labels[:, 1:] != NOT_LEARNED]
            by_source = sources.bincount(minlength=len(self._names)).tolist()
        self._total = self._total + numpy.array([labels.numel(), batch["tokens"], batch["counted"], *by_source])
        return int(batch["tokens"])

    def read(self) -> dict[str, float]:
        """padding_pct: of the places in rows; counted_pct: of the tokens; counted_pct_NAME: of the counted tokens."""
        total = self._total
        places, tokens, counted, *by_source = (total - self._read).tolist()
        self._read = total
        if not tokens:
            return {}
        shares = {"padding_pct": 100 * (1 - tokens / places), "counted_pct": 100 * counted / tokens}
        pairs = zip(self._names, by_source, strict=True)
        return shares | {f"counted_pct_{name}": 100 * part / max(1, counted) for name, part in pairs}
