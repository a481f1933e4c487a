"""Run a function on N real ranks: processes that share a gloo process group, kept for the whole
test session.

    results = on_ranks(2, my_function, argument)   # my_function(world, argument) on each rank -> [result, result]

Starting a rank costs seconds and a call to one that runs costs nothing, so the matrix of cells
stays affordable.
"""

import atexit
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forked import context

_pools: dict[int, "Ranks"] = {}


class RankFailed(AssertionError):
    """A rank raised; the text holds its number and its traceback."""


class Ranks:
    def __init__(self, size: int):
        store = Path(tempfile.mkdtemp(prefix="ranks")) / "store"
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, str(store), theirs))
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], timeout_seconds: float
    ) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function, args))
        results = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(timeout_seconds):
                raise RankFailed(
                    f"rank {rank} gave no answer to {function.__name__} within {timeout_seconds} s"
                )
            results.append(pipe.recv())
        failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(results) if not ok]
        if failed:
            raise RankFailed("\n".join(failed))
        return [value for _, value in results]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def on_ranks(
    size: int, function: Callable[..., Any], *args: Any, timeout_seconds: float = 300
) -> list[Any]:
    """What function(world, *args) returns on each of `size` ranks, in their order."""
    if size not in _pools:
        _pools[size] = Ranks(size)
        atexit.register(_pools[size].stop)
    try:
        return _pools[size].run(function, args, timeout_seconds)
    except (RankFailed, EOFError, BrokenPipeError):
        _pools.pop(size).stop()  # the others may be stuck in a collective
        raise


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from dist_amp.settings import RunConfig
    from dist_amp.world import locate

    # Loader workers end when their parent does, and a forkserver's children have the server for a
    # parent.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=30),
        )
    world = locate(RunConfig())
    while True:
        function, args = pipe.recv()
        torch.set_num_threads(
            1
        )  # the call before may have left another number, with which sums round differently
        try:
            pipe.send((True, function(world, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
