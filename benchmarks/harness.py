"""What the benchmarks share: launching, counting host reads, and timing loops in turns."""

import argparse
import gc
import itertools
import json
import logging
import os
import random
import shlex
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from benchmarks.loops import Loop
from benchmarks.report import about
from dist_amp.config.load import load_config
from dist_amp.distributed.machine import wait_for_device
from dist_amp.distributed.process import die_with_parent, environment_number
from dist_amp.errors import ConfigError, first_line
from dist_amp.run import Run, build_run
from dist_amp.settings import RunConfig
from dist_amp.step import train_step
from dist_amp.supervise.command_line import exit_status
from dist_amp.supervise.explain import is_out_of_memory
from dist_amp.world import World, start


def note_of(error: Exception) -> str:
    """Why a measurement failed, in one line."""
    if isinstance(error, ImportError):
        return "not installed: pip install -e '.[bench]' in the clone's folder"
    if is_out_of_memory(error):
        return "out of memory; use smaller micro-batches"
    return f"failed: {first_line(error).split('. ')[0][:160] or type(error).__name__}"


# --- commands


def command(run: Callable[[Sequence[str]], int | None]) -> Callable[..., int]:
    """Decorator that makes `run` a main(argv) which returns the exit status."""

    @wraps(run)
    def checked(words: Sequence[str]) -> int | None:
        try:
            return run(words)
        except ModuleNotFoundError as error:
            fix = "pip install -e '.[bench,hf]' in the clone's folder"
            raise ConfigError(f"{error.name} is missing; {fix}") from error

    def main(argv: Sequence[str] | None = None) -> int:
        return exit_status(checked, argv)

    return main


def on_a_run(bench: Callable[[Run], None]) -> Callable[..., int]:
    """A command that takes the main job's settings, builds a run, and calls bench(run)."""

    @command
    def main(words: Sequence[str]) -> None:
        if {"-h", "--help"} & set(words):
            print((sys.modules[bench.__module__].__doc__ or "").strip())
            print("\nIts arguments are those of dist_amp.train: python -m dist_amp.train --help")
            return
        off = ["--run.resume", "never", "--eval.every", "off", "--checkpoint.every", "off"]
        config = load_config([*off, *words])
        with start(config.run) as world:
            run = build_run(config, world)
            bench(run)
            run.data.close()

    return main


def single_process(name: str) -> None:
    """Raises ConfigError under torchrun."""
    if (ranks := environment_number("WORLD_SIZE", 1)) > 1:
        raise ConfigError(
            f"the {name} benchmark runs in one process, but {ranks} were launched; omit torchrun"
        )


def on_ranks(size: int, bench: Callable[..., Any], *args: Any) -> Any:
    """bench(world, *args) on `size` new single-threaded processes: rank 0's result, via JSON."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        args = (size, get_free_port(), result, bench, args)
        torch.multiprocessing.spawn(_rank, args, size)  # type: ignore[attr-defined]
        return json.loads(result.read_text())


def _rank(
    rank: int, size: int, port: int, result: Path, bench: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    die_with_parent(signal.SIGKILL)
    if size > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {name: str(value) for name, value in ranks.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)  # as in parallel.py
    with start(RunConfig(device="cpu")) as world:
        returned = bench(world, *args)
        if world.is_main:
            result.write_text(json.dumps(returned))


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: an integer that is `least` or more."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} must be at least {least}")
        return int(text)

    return number


def add_choices(parser: argparse.ArgumentParser, **choices: Sequence[str]) -> None:
    """Options that take one or more of the given names; default: all."""
    for name, names in choices.items():
        text = f"one or more of {', '.join(names)}; default: all"
        parser.add_argument(
            f"--{name}", nargs="+", choices=names, default=list(names), metavar="NAME", help=text
        )


def add_common(parser: argparse.ArgumentParser, out: str) -> None:
    add = parser.add_argument
    text = "small models on a CPU, to test all code paths; the times are meaningless"
    add("--smoke", "--reduced", action="store_true", help=text)
    add("--rounds", type=at_least(1), metavar="N", help="default: 10; with --smoke: 2")
    text = f"default: {out}; with --smoke: {out}_smoke"
    add("--out", type=Path, metavar="DIR", help=text)
    parser.set_defaults(default_out=out)


def with_defaults(options: argparse.Namespace, words: Sequence[str]) -> argparse.Namespace:
    """Fill in the defaults that depend on --smoke; `words` is the command line."""
    options.words = list(words)
    rounds, suffix = 10, ""
    if options.smoke:
        rounds, suffix = 2, "_smoke"
    options.rounds = options.rounds or rounds
    options.out = options.out or Path(f"{options.default_out}{suffix}")
    try:  # now rather than after hours of measuring
        options.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()
    except OSError as error:
        raise ConfigError(
            f"--out {options.out} can't be written: {error.strerror}; choose another folder"
        ) from None
    return options


def quiet_process(one_thread: bool) -> None:
    """Silence warnings and info logs, which would be repeated for each loop."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if one_thread:
        torch.set_num_threads(1)


class Bench:
    """An invocation of a benchmark: its device and its report.

    block_seconds: how long a loop runs between two clock readings; 0: one step.
    """

    def __init__(self, name: str, world: World, options: argparse.Namespace, block_seconds: float):
        self.world = world
        self.options = options
        self.block_seconds = 0.0 if options.smoke else block_seconds
        packages = ("accelerate", "lightning-fabric", "lightning", "triton")
        self.report: dict[str, Any] = {
            "command": f"python -m benchmarks {name} {shlex.join(options.words)}".rstrip(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            **about(world.device, *packages),
            "smoke": options.smoke,
            "rounds": options.rounds,
        }


# --- host reads


class HostReads(TorchDispatchMode):
    """Counts host-device synchronisations by item(), float(), bool() and tolist()."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches again on its local tensors
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))

    def __enter__(self) -> "HostReads":
        tolist = torch.Tensor.tolist

        def counted(tensor: torch.Tensor) -> Any:
            self.count += 1
            return tolist(tensor)

        self.patch = patch.object(torch.Tensor, "tolist", counted)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.patch.stop()
        super().__exit__(*error)


# --- timing


@contextmanager
def computes_in(dtype: torch.dtype, layer: nn.Module) -> Iterator[None]:
    """Raises RuntimeError if the layer's forwards in this context return another dtype."""
    dtypes: set[torch.dtype] = set()
    hook = layer.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    yield
    hook.remove()
    if wrong := dtypes - {dtype}:
        raise RuntimeError(f"trains in {str(wrong.pop()).removeprefix('torch.')}")


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def timed(world: World, call: Callable[[], object]) -> float:
    """Seconds that the call takes; the device is idle before and after."""
    wait_for_device(world.device)
    began = time.perf_counter()
    call()
    wait_for_device(world.device)
    return time.perf_counter() - began


def step_seconds(run: Run) -> float:
    return timed(run.world, lambda: train_step(run, next(run.data)))


def timed_block(world: World, loop: Loop, data: Sequence[Any], steps: int) -> float:
    """Seconds per step."""
    repeated = itertools.islice(itertools.cycle(data), steps)
    # Each step gets its own containers: a task may pop its labels from a batch.
    ready = [tree_map(lambda part: part, step) for step in repeated]
    loop.prepare()
    return timed(world, lambda: [loop.step(micro_batches) for micro_batches in ready]) / steps


def in_turns(
    names: Iterable[str], block: Callable[[str], Any], rounds: int
) -> dict[str, list[Any]]:
    """{name: block(name) of each round but the first}; in random order, the same on all ranks."""
    order = random.Random(0)
    values: dict[str, list[Any]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # so that the collection in each round skips what exists already
    gc.disable()
    try:
        for _ in range(rounds + 1):
            gc.collect()
            for name in order.sample(list(values), len(values)):
                values[name].append(block(name))
    finally:
        gc.enable()
        gc.unfreeze()
    return {name: results[1:] for name, results in values.items()}


Rows = dict[str, dict[str, Any]]
Enter = Callable[[str], tuple[Loop, dict[str, Any]]]


def compare(
    bench: Bench, base: str, names: Iterable[str], enter: Enter, data: Sequence[Any]
) -> dict[str, dict[str, Any]]:
    """Time each loop in turns with the base loop, while only these two are in memory.

    enter(name) builds a loop, takes its first steps, and returns it with its row of results.
    Returns {name: row}, to which this adds `seconds` per step and `speedup` over the base loop, one
    of each per round; or a `note` that says why the loop was not timed.
    """
    rows: Rows = {}
    base_loop = _try_to_enter(base, enter, rows)
    for name in names:
        if name == base:
            continue
        loop = _try_to_enter(name, enter, rows)
        if loop is not None and base_loop is not None:
            _time_pair(bench, {base: base_loop, name: loop}, data, rows)
        loop = None
        release(bench.world.device)
    if base_loop is not None and "seconds" not in rows[base]:
        _time_pair(bench, {base: base_loop}, data, rows)
    return rows


def _try_to_enter(name: str, enter: Enter, rows: Rows) -> Loop | None:
    try:
        loop, rows[name] = enter(name)
    except ConfigError:
        raise
    except Exception as error:  # only its text is kept: a traceback holds device memory
        rows[name] = {"note": note_of(error)}
        return None
    return loop


def _time_pair(bench: Bench, pair: Mapping[str, Loop], data: Sequence[Any], rows: Rows) -> None:
    base = next(iter(pair))
    name = list(pair)[-1]

    def block(name: str) -> float:
        return timed_block(bench.world, pair[name], data, steps)

    try:
        slowest = max(timed_block(bench.world, loop, data, 1) for loop in pair.values())
        steps = max(1, round(bench.block_seconds / slowest))
        seconds = in_turns(pair, block, bench.options.rounds)
    except Exception as error:
        rows[name]["note"] = note_of(error)
        return
    rows[base].setdefault("seconds", seconds[base])
    rows[base].setdefault("speedup", [1.0] * len(seconds[base]))
    if name != base:
        pairs = zip(seconds[base], seconds[name], strict=True)
        rows[name]["seconds"] = seconds[name]
        rows[name]["speedup"] = [before / after for before, after in pairs]
