"""The ranks of a comparison: new processes on this machine, which compare row after row.

Not in __main__.py, whose functions a process that multiprocessing spawns can't import.
"""

import logging
import multiprocessing
import os
import socket
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
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
    """Compare the rows on `size` new processes; yields each row when it is done."""
    if not rows:
        return
    spawn = multiprocessing.get_context("spawn")
    results: Queue[list[Verdict] | str] = spawn.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    measured = reference.measured({precision for _, _, precision in rows})
    shared = (list(argv), rows, reference.task.eval_modules, measured, results)
    ranks = []
    for rank in range(size):
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(spawn.Process(target=compare_as_rank, args=(dict(environment), *shared)))
    for process in ranks:
        process.start()
    try:
        for number, row in enumerate(rows):
            result = next_result(results, ranks)
            if isinstance(result, str):
                yield row, [Verdict(cause=result)]
                for left in rows[number + 1 :]:
                    yield left, [Verdict(cause="not run: a rank failed before")]
                return
            yield row, result
        for process in ranks:
            process.join()
    finally:
        for process in ranks:
            process.kill()


def next_result(
    results: "Queue[list[Verdict] | str]", ranks: Sequence[BaseProcess]
) -> list[Verdict] | str:
    """The next verdicts, or the error of the first rank that fails."""
    while True:
        with suppress(Empty):
            return results.get(timeout=0.5)
        for rank, process in enumerate(ranks):
            if process.exitcode:
                return f"rank {rank} ended with exit status {process.exitcode} and no error message"


def compare_as_rank(
    environment: dict[str, str],
    argv: list[str],
    rows: list[Row],
    eval_modules: frozenset[str],
    measured: dict[str, Any],
    results: "Queue[list[Verdict] | str]",
) -> None:
    """One rank's process: compare the rows together with the others; rank 0 sends the verdicts."""
    os.environ |= environment
    rank = environment["RANK"]
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(environment["WORLD_SIZE"])))
    try:
        config = load_config(argv)
        with start(config.run) as world, warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="torch")  # only the numbers decide
            # The first process has logged the data already.
            logging.getLogger("dist_amp").setLevel(logging.ERROR)
            world = QuietWorld(**vars(world))
            reference = Reference(
                config, world.device, eval_modules=eval_modules, measured=measured
            )
            for _, strategy, precision in rows:
                verdicts = []
                for optimizer in ("sgd", "adamw"):
                    verdicts.append(verdict_of(world, reference, strategy, precision, optimizer))
                if world.is_main:
                    results.put(verdicts)
    except Exception as error:
        results.put(f"rank {rank}: {type(error).__name__}: {error}")
        raise


def verdict_of(
    world: World, reference: Reference, strategy: Any, precision: Any, optimizer: Any
) -> Verdict:
    """Check one cell, with clipping, optimizer path and reduction of the user's config."""
    config = reference.config
    cell = Cell(
        strategy,
        precision,
        optimizer,
        clip_by=config.train.clip_by,
        fused=config.optim.fused,
        accumulate_reduce=config.parallel.accumulate_reduce,
    )
    try:
        return check_cell(world, reference, cell)
    except Failure as error:  # raised on every rank
        return Verdict(cause=str(error))
