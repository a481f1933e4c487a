"""What the benches share: a run of the command line, ranks of their own, a count of host reads, an interval."""

import json
import math
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dist_amp.commands.command_line import exit_status
from dist_amp.config.load import load_config
from dist_amp.run import Run, build_run
from dist_amp.runtime.process import die_with_parent
from dist_amp.settings import RunConfig
from dist_amp.world import start


def on_a_run(bench: Callable[[Run], None], argv: Sequence[str] | None) -> int:
    """Build the run of a command line, afresh and without evaluations, for `bench`; return the exit status."""

    def on_words(words: Sequence[str]) -> None:
        config = load_config(["--run.resume", "never", "--eval.every", "off", *words])
        with start(config.run) as world:
            run = build_run(config, world)
            bench(run)
            run.data.close()

    return exit_status(on_words, argv)


def on_ranks(size: int, bench: Callable[..., Any], *args: Any) -> Any:
    """What bench(world, *args) returns on rank 0 of `size` new processes of one CPU thread each; it goes by JSON."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        torch.multiprocessing.spawn(_rank, (size, port, str(result), bench, args), nprocs=size)  # type: ignore[attr-defined]
        return json.loads(result.read_text())


def _rank(rank: int, size: int, port: int, result: str, bench: Callable[..., Any], args: tuple[Any, ...]) -> None:
    die_with_parent(signal.SIGKILL)
    if size > 1:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in places.items()}}
    torch.set_num_threads(1)
    with start(RunConfig(device="cpu")) as world:
        told = bench(world, *args)
        if world.is_main:
            Path(result).write_text(json.dumps(told))


class HostReads(TorchDispatchMode):
    """Counts what would make the host wait for a device: item(), float(), bool(); and tolist(), by replacing it.

    torch's own looks at step counts, which stay on the host, are counted too; fused optimizers have none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):  # first into its parts, which then come by here
            return NotImplemented
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))

    def __enter__(self) -> "HostReads":
        self.tolist = torch.Tensor.tolist

        def counted(tensor: torch.Tensor) -> Any:
            self.count += 1
            return self.tolist(tensor)

        torch.Tensor.tolist = counted  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.Tensor.tolist = self.tolist  # type: ignore[method-assign]
        super().__exit__(*error)


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high): the median of a sample, and an interval that holds its population's in 95 % or more.

    Between two order statistics, which no distribution needs to be assumed for: the population's median lies below the
    k-th smallest of n values with the probability of fewer than k heads in n tosses. Below 6 values it is the sample's
    whole range, which holds less. Source: David & Nagaraja 2003, "Order Statistics", 3rd edition, section 7.1.
    """
    ordered, n = sorted(values), len(values)
    tail, k = 0.5**n, 0  # tail: the probability of k heads or fewer
    while tail + math.comb(n, k + 1) * 0.5**n <= 0.025:
        k += 1
        tail += math.comb(n, k) * 0.5**n
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return middle, ordered[k], ordered[n - 1 - k]
