"""How full rows of packed documents are, and how long the plan of them takes: best fit, and one document per row.

python -m dist_amp.bench packing [--documents 1000000]
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from dist_amp.commands.command_line import Parser, exit_status
from dist_amp.sources.packing import PackedRows, Packing

LENGTHS = (512, 2048, 8192)


class Lengths:
    """Documents of log-normal lengths with a median of 400 tokens and a mean of about 830, as web pages have."""

    def __init__(self, documents: int):
        drawn = numpy.random.default_rng(0).normal(6, 1.2, documents)
        self.lengths = numpy.exp(drawn).astype(numpy.int64) + 2


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return exit_status(measure_all, argv)


def measure_all(words: Sequence[str]) -> None:
    """Print a line per row length."""
    parser = Parser("python -m dist_amp.bench packing", __doc__)
    parser.add_argument("--documents", type=int, default=1_000_000)
    documents = Lengths(parser.parse_args(words).documents)
    torch.set_num_threads(1)
    print(f"{len(documents.lengths):,} documents, {documents.lengths.sum():,} tokens; times are CPU time of one thread")
    print("tokens per row       rows   padding   a document per row   documents/s   bytes per document")
    for length in LENGTHS:
        print("{:>14,} {:>10,} {:>8.3f} % {:>18.1f} % {:>13,.0f} {:>20.1f}".format(length, *measure(documents, length)))


def measure(documents: Any, length: int) -> tuple[int, float, float, float, float]:
    """(rows, % of padding, the same of a document per row, documents planned per second, bytes kept per document)."""
    started = time.thread_time()
    rows = PackedRows(documents, Packing(length, "best_fit", "split"))
    seconds = time.thread_time() - started
    single = PackedRows(documents, Packing(length, "off", "split"))
    count = len(documents.lengths)
    return len(rows), 100 * rows.padding_share, 100 * single.padding_share, count / seconds, rows.plan_bytes / count


if __name__ == "__main__":
    sys.exit(main())
