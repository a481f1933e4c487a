"""What the benches share: launching, counting host reads, and timing loops that take turns on one device."""

import argparse
import gc
import itertools
import json
import logging
import math
import os
import random
import shlex
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from dist_amp.bench.loops import Loop
from dist_amp.bench.machine import about
from dist_amp.commands.command_line import exit_status
from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError, first_line
from dist_amp.run import Run, build_run
from dist_amp.runtime.clock import PhaseClock, wait_for_device
from dist_amp.runtime.process import die_with_parent
from dist_amp.settings import RunConfig
from dist_amp.supervise.out_of_memory import is_out_of_memory
from dist_amp.world import World, start

SPARE_SECONDS = 20  # of --minutes, for the pictures
OUT_OF_MEMORY = "out of memory; use smaller micro-batches"
NO_TIME = "left out: no time"


class NoTime(Exception):
    """The bench has used up its --minutes."""


def note_of(error: Exception) -> str:
    """Why something was not measured, in one line."""
    if isinstance(error, NoTime):
        return NO_TIME
    if isinstance(error, ImportError):
        return "not installed: pip install -e '.[bench]' in the clone's folder"
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    return f"failed: {first_line(error).split('. ')[0][:160] or type(error).__name__}"


# --- commands


def on_a_run(bench: Callable[[Run], None], argv: Sequence[str] | None) -> int:
    """Build a fresh run from a command line, without evaluations, and pass it to `bench`; returns the exit status.

    --help prints the docstring of the bench's module.
    """

    def command(words: Sequence[str]) -> None:
        if {"-h", "--help"} & set(words):
            print((sys.modules[bench.__module__].__doc__ or "").strip())
            print("\nIts arguments are the settings of dist_amp.train: python -m dist_amp.train --help")
            return
        config = load_config(["--run.resume", "never", "--eval.every", "off", *words])
        with start(config.run) as world:
            run = build_run(config, world)
            bench(run)
            run.data.close()

    return exit_status(command, argv)


def on_ranks(size: int, bench: Callable[..., Any], *args: Any) -> Any:
    """Run bench(world, *args) on `size` new processes with one CPU thread each; returns rank 0's result, via JSON."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        torch.multiprocessing.spawn(_rank, (size, get_free_port(), result, bench, args), size)  # type: ignore[attr-defined]
        return json.loads(result.read_text())


def _rank(rank: int, size: int, port: int, result: Path, bench: Callable[..., Any], args: tuple[Any, ...]) -> None:
    die_with_parent(signal.SIGKILL)
    if size > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {name: str(value) for name, value in ranks.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with start(RunConfig(device="cpu")) as world:
        returned = bench(world, *args)
        if world.is_main:
            result.write_text(json.dumps(returned))


def at_least(least: float, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """An argparse type: a number that is `least` or more."""

    def number(text: str) -> float:
        if kind(text) >= least:  # false for nan
            return kind(text)
        raise argparse.ArgumentTypeError(f"{text} must be at least {least:g}")

    return number


def add_choices(parser: argparse.ArgumentParser, **choices: Sequence[str]) -> None:
    """Options that take one or more of some names; all by default."""
    for name, names in choices.items():
        text = f"of {', '.join(names)}; default: all"
        parser.add_argument(f"--{name}", nargs="+", choices=names, default=list(names), metavar="NAME", help=text)


def add_common(parser: argparse.ArgumentParser, minutes: float, out: str, small: str, small_out: str) -> None:
    """--rounds, --minutes, --backend, --out, and the flag for small models on a CPU with its own defaults."""
    add = parser.add_argument
    add(f"--{small}", action="store_true", help="small models on a CPU: tests all code paths; its times mean nothing")
    add("--rounds", type=at_least(1), metavar="N", help=f"default: 10, with --{small} 2")
    add("--minutes", type=at_least(0, float), default=minutes, metavar="N", help=f"default: {minutes:g}")
    add("--backend", help=f"of torch.compile; default: inductor, with --{small} aot_eager")
    add("--out", type=Path, metavar="DIR", help=f"default: {out}, with --{small} {small_out}")
    parser.set_defaults(small=small, outs=(out, small_out))


def with_defaults(options: argparse.Namespace, words: Sequence[str]) -> argparse.Namespace:
    """Fill in what depends on whether the models are small; `words` is the command line."""
    small = getattr(options, options.small)
    options.words, options.rounds = list(words), options.rounds or (2 if small else 10)
    options.backend = options.backend or ("aot_eager" if small else "inductor")
    options.out = options.out or Path(options.outs[small])
    return options


def single_process(name: str, ranks: int) -> None:
    """Errors: ConfigError for more than one process."""
    if ranks > 1:
        raise ConfigError(f"bench {name} runs in one process, but {ranks} were launched; run it without torchrun")


@contextmanager
def quiet_process(one_thread: bool) -> Iterator[None]:
    """Without warnings, info logs and garbage collections of loaded modules. one_thread: for models that are small."""
    threads, log = torch.get_num_threads(), logging.getLogger("dist_amp")
    level = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # compilers, schedulers and half precision repeat theirs for each loop
        log.setLevel(logging.ERROR)
        torch.set_num_threads(1 if one_thread else threads)
        gc.freeze()
        try:
            yield
        finally:
            gc.unfreeze()
            torch.set_num_threads(threads)
            log.setLevel(level)


class Bench:
    """One run of a bench command. block_seconds: how long a loop is timed between two clock readings; 0: one step."""

    def __init__(self, name: str, world: World, options: argparse.Namespace, block_seconds: float, *packages: str):
        self.world, self.options, self.block_seconds = world, options, block_seconds
        self.started = time.monotonic()
        self.ends = self.started + options.minutes * 60 - SPARE_SECONDS
        self.report: dict[str, Any] = {
            "command": f"python -m dist_amp.bench {name} {shlex.join(options.words)}".rstrip(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            **about(world.device, *packages),
            **{name: getattr(options, name) for name in ("rounds", "minutes", "backend")},
            "seconds": 0.0,
            "left_out": [],
        }

    @property
    def seconds_left(self) -> float:
        return self.ends - time.monotonic()


# --- host reads


class HostReads(TorchDispatchMode):
    """Counts calls that make the host wait for the device: item(), float(), bool(), and tolist()."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):  # DTensor dispatches again on its local tensors
            return NotImplemented
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
    """Errors: RuntimeError if the layer's forwards in here give another dtype."""
    dtypes: set[torch.dtype] = set()
    hook = layer.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    yield
    hook.remove()
    if wrong := dtypes - {dtype}:
        raise RuntimeError(f"trains in {str(wrong.pop()).removeprefix('torch.')}")


def warm_up_libraries(device: torch.device) -> None:
    """Let the libraries allocate their workspaces before anyone's memory is measured."""
    layer = nn.Linear(64, 64, device=device)
    with torch.autocast(device.type, dtype=torch.float16):  # the half precision that every GPU supports
        layer(torch.ones(64, 64, device=device)).float().sum().backward()


def release(device: torch.device) -> None:
    """Free memory that nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def timed(world: World, call: Callable[[], object]) -> float:
    """Seconds, measured from an idle device to an idle device."""
    wait_for_device(world.device)
    clock = PhaseClock(world.device)
    call()
    lap = clock.lap()
    wait_for_device(world.device)
    return sum(lap.seconds().values())


def timed_block(world: World, loop: Loop, data: Sequence[Any], steps: int) -> float:
    """Seconds per step."""
    # Each step gets its own containers: a task may pop its labels from a batch.
    ready = [tree_map(lambda part: part, step) for step in itertools.islice(itertools.cycle(data), steps)]
    loop.prepare()
    return timed(world, lambda: [loop.step(micro_batches) for micro_batches in ready]) / steps


def in_turns(
    names: Iterable[str], block: Callable[[str, bool], Any], rounds: int, in_time: Callable[[], bool] = lambda: True
) -> dict[str, list[Any]]:
    """{name: block(name, is_warm_up) of each round but the warm-up}, in a new random order, the same on all ranks.

    It stops after a round once `in_time()` is false, with one round at least.
    """
    order = random.Random(0)
    values: dict[str, list[Any]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds + 1):
            if number > 1 and not in_time():
                break
            gc.collect()
            for name in order.sample(list(values), len(values)):
                values[name].append(block(name, number == 0))
    finally:
        gc.enable()
    return {name: own[1:] for name, own in values.items()}


class Arena:
    """Loops that are in memory together and take turns on one device.

    rows: {mode: {loop: row}}; a row has `step_seconds` (an estimate), `peak_bytes`, and for each round `seconds` per
    step and `speedup` over the base loop; or a `note` with the reason why not.
    """

    def __init__(self, bench: Bench, base: str, modes: Iterable[str], base_may_leave: bool):
        self.bench, self.world, self.device = bench, bench.world, bench.world.device
        self.base, self.base_may_leave = base, base_may_leave
        self.data: list[Any] = []
        self.rows: dict[str, dict[str, dict[str, Any]]] = {mode: {} for mode in modes}
        self.loops: dict[str, dict[str, Loop]] = {}  # in memory, by mode

    def enter(self, name: str) -> dict[str, Loop]:
        """Build a loop, take its first steps and add its rows; returns it for each mode."""
        raise NotImplementedError

    def is_fatal(self, name: str, error: Exception) -> bool:
        """Whether no other loop can work either."""
        return False

    def measure(self, names: Iterable[str]) -> None:
        """Measure all loops; where memory runs out, those that are in it are timed first and make room."""
        for name in names:
            note = self._try_to_enter(name)
            for kept in (self.base, "") if self.base_may_leave else (self.base,):
                if note == OUT_OF_MEMORY and self.loops.keys() - {kept}:
                    self._time_loops(keep=kept)
                    note = self._try_to_enter(name)
            if note:
                next(iter(self.rows.values()))[name] = {"note": note}
        self._time_loops()
        self.data = []
        release(self.device)

    def _try_to_enter(self, name: str) -> str:
        release(self.device)
        try:
            if self.bench.seconds_left < 0:
                raise NoTime
            self.loops[name] = self.enter(name)
        except Exception as error:  # not kept: its traceback would hold device memory
            if self.is_fatal(name, error):
                raise
            return note_of(error)
        return ""

    def _time_loops(self, keep: str = "") -> None:
        """Time the loops that are in memory, then drop all but `keep`."""
        for mode, rows in self.rows.items():
            loops = {name: modes[mode] for name, modes in self.loops.items() if mode in modes}
            if loops.keys() - {self.base} or not rows.get(self.base, {}).get("seconds"):
                self._time_together(loops, rows)
        self.loops = {name: modes for name, modes in self.loops.items() if name == keep}
        release(self.device)

    def _time_together(self, loops: dict[str, Loop], rows: dict[str, dict[str, Any]]) -> None:
        slowest = max((rows[name]["step_seconds"] for name in loops), default=1.0)
        steps = max(1, round(self.bench.block_seconds / slowest))

        def block(name: str, is_warm_up: bool) -> float:
            if "note" not in rows[name]:
                try:
                    return timed_block(self.world, loops[name], self.data, len(self.data) if is_warm_up else steps)
                except Exception as error:
                    rows[name]["note"] = note_of(error)
            return math.nan

        seconds = in_turns(loops, block, self.bench.options.rounds, lambda: self.bench.seconds_left > 0)
        seconds = {name: own for name, own in seconds.items() if "note" not in rows[name]}
        earlier = rows.get(self.base, {}).get("seconds", [])[:]  # of the base loop, if it had to leave
        for name, own in seconds.items():
            base = seconds.get(self.base, [])
            if earlier and not base:
                base = [median(earlier)] * len(own)
                rows[name]["note"] = f"timed apart from {self.base}: there is no room for both"
            rows[name].setdefault("seconds", []).extend(own)
            ratios = [theirs / mine for theirs, mine in zip(base, own, strict=False)]
            rows[name].setdefault("speedup", []).extend(ratios)
