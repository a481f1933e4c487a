"""The ranks of a comparison: new processes on this machine, which compare row after row.

Not in __main__.py: processes that multiprocessing spawns can't import the functions of a package's __main__.
"""

import logging
import multiprocessing
import os
import socket
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from queue import Empty
from typing import Any

import torch

from dist_amp.config.load import load_config
from dist_amp.errors import Failure
from dist_amp.verify.cells import check_cell
from dist_amp.verify.compare import Cell, Verdict
from dist_amp.verify.reference import Reference
from dist_amp.world import World, start

Row = tuple[int, str, str]  # (ranks, strategy, precision)


class QuietWorld(World):
    """Says nothing: the command has said it before the table, once for all rows."""

    def say(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        pass


def compare_on_ranks(
    size: int, argv: Sequence[str], rows: list[Row], reference: Reference
) -> Iterator[tuple[Row, list[Verdict]]]:
    """Compare the rows on `size` new processes, yielding each row when it is done; after a crash, its cause."""
    spawn = multiprocessing.get_context("spawn")
    results: Queue[list[Verdict] | str] = spawn.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    measured = reference.measured({precision for _, _, precision in rows})
    shared = (list(argv), rows, reference.task.eval_modules, measured, results)
    ranks = [spawn.Process(target=_rank, args=(rank, size, port, *shared)) for rank in range(size if rows else 0)]
    for process in ranks:
        process.start()
    try:
        for number, row in enumerate(rows):
            result = _next_result(results, ranks)
            if isinstance(result, str):
                yield row, [Verdict(cause=result)]
                yield from ((row, [Verdict(cause="not run: a rank failed before")]) for row in rows[number + 1 :])
                return
            yield row, result
        for process in ranks:
            process.join()
    finally:
        for process in ranks:
            process.kill()


def _next_result(results: "Queue[list[Verdict] | str]", ranks: Sequence[BaseProcess]) -> list[Verdict] | str:
    """The next verdicts, or the error of the first rank that fails."""
    while True:
        try:
            return results.get(timeout=0.5)
        except Empty:
            for rank, process in enumerate(ranks):
                if process.exitcode not in (None, 0):
                    return f"rank {rank} ended with exit status {process.exitcode} and no error message"


def _rank(rank: int, size: int, port: int, argv: list[str], rows: list[Row], eval_modules: frozenset[str],
          measured: dict[str, Any], results: "Queue[list[Verdict] | str]") -> None:  # fmt: skip
    """One rank's process: compare the rows together with the others; rank 0 sends the verdicts."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in variables.items()}}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    try:
        config = load_config(argv)
        with start(config.run) as world, warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="torch")  # only the numbers decide
            logging.getLogger("dist_amp").setLevel(logging.ERROR)  # the first process has logged the data already
            world = QuietWorld(**vars(world))
            reference = Reference(config, world.device, eval_modules=eval_modules, measured=measured)
            for _, strategy, precision in rows:
                verdicts = [verdict_of(world, reference, strategy, precision, name) for name in ("sgd", "adamw")]
                if world.is_main:
                    results.put(verdicts)
    except Exception as error:
        results.put(f"rank {rank}: {type(error).__name__}: {error}")
        raise


def verdict_of(world: World, reference: Reference, strategy: Any, precision: Any, optimizer: Any) -> Verdict:
    """Check one cell, with clipping, optimizer path and reduction of the user's config."""
    config = reference.config
    reduce = config.parallel.accumulate_reduce
    cell = Cell(strategy, precision, optimizer, config.train.clip_by, config.optim.fused, accumulate_reduce=reduce)
    try:
        return check_cell(world, reference, cell)
    except Failure as error:  # raised on every rank
        return Verdict(cause=str(error))
