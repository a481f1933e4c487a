"""How much of what is read counts: the shares of padding and of counted tokens between two log steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

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

    def read(self, world: Any) -> dict[str, Tensor]:
        """padding_pct: of the places in rows; counted_pct: of the tokens; counted_pct_NAME: of the counted tokens.

        Since the last call, over all ranks of the `World`; scalars on its device, and every rank calls it.
        """
        total = self._total
        own, self._read = torch.from_numpy(total - self._read), total
        places, tokens, counted, *by_source = world.sum(own.to(world.device, torch.float64)).unbind()
        shares = {"padding_pct": 100 * (1 - tokens / places), "counted_pct": 100 * counted / tokens}
        pairs = zip(self._names, by_source, strict=True)
        return shares | {f"counted_pct_{name}": 100 * part / counted.clamp(min=1) for name, part in pairs}
