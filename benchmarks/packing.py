"""How full rows of packed documents are, and how long planning them takes.

python -m benchmarks packing [--documents 1000000]
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from benchmarks.harness import at_least, command
from dist_amp.sources.packing import PackedRows, Packing
from dist_amp.supervise.command_line import Parser

LENGTHS = (512, 2048, 8192)


class Lengths:
    """Documents with log-normal lengths, like web pages: median 400 tokens, mean about 830."""

    def __init__(self, documents: int):
        drawn = numpy.random.default_rng(0).normal(6, 1.2, documents)
        self.lengths = numpy.exp(drawn).astype(numpy.int64) + 2

    def __len__(self) -> int:
        return len(self.lengths)


@command
def main(words: Sequence[str]) -> None:
    parser = Parser("python -m benchmarks packing", __doc__)
    parser.add_argument("--documents", type=at_least(1), default=1_000_000)
    documents: Any = Lengths(parser.parse_args(words).documents)
    count = len(documents.lengths)
    torch.set_num_threads(1)
    print(f"{count:,} documents, {documents.lengths.sum():,} tokens")
    print("tokens per row       rows    padding   a document per row   documents/s of CPU time")
    for length in LENGTHS:
        started = time.thread_time()
        rows = PackedRows(documents, Packing(length, "best_fit", "split"))
        rate = count / (time.thread_time() - started)
        single = PackedRows(documents, Packing(length, "off", "split"))
        padding, single_padding = (
            1 - each.lengths.sum() / (len(each) * length) for each in (rows, single)
        )
        line = f"{length:>14,} {len(rows):>10,} {padding:>10.3%} {single_padding:>20.1%}"
        print(f"{line}{rate:>14,.0f}")


if __name__ == "__main__":
    sys.exit(main())
