"""The process and its world: ranks, device, seed, exit statuses, and the stop that all ranks agree on.

Words as torchrun defines them: rank, local_rank, world_size. Nothing here knows about models or data.
"""

import ctypes
import gc
import hashlib
import json
import logging
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dist_amp.config import ConfigError, Failure, Range
from dist_amp.rendezvous import environment_number, in_time, joined, meet

SAVED_AND_STOPPED = 75  # exit status: stopped by a signal, saved, may be started again (EX_TEMPFAIL)


class DataError(Failure):
    """The data, the task's use of them, or a checkpoint is not what it must be."""

    exit_code = 65


class NumericsError(Failure):
    """Training can't go on: its numbers are not finite, or not the same on all ranks."""

    exit_code = 70


@dataclass(frozen=True)
class RunConfig:
    dir: str = "auto"
    """The run's folder; auto: runs/<UTC time>-<id>, the same on all ranks and in all restarts by one torchrun. Name it
    yourself to go on later, or where machines may be replaced."""
    seed: Annotated[int, Range(low=0, high=2**63 - 1)] = 0
    """Seeds initialisation, data order and dropout; each rank's dropout differs."""
    deterministic: bool = False
    """Only deterministic kernels; slower, and bit-identical from run to run."""
    resume: str = "auto"
    """auto: from the newest whole checkpoint in run.dir, if there is one; never; or the path of a checkpoint."""
    allow_config_change: bool = False
    """Resume although settings that change the mathematics, or the data, are not the checkpoint's."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA (or ROCm) where there is a GPU, else the CPU."""
    timeout_seconds: Annotated[float, Range(above=0)] = 300.0
    """How long a collective may wait for the other ranks before the job ends with an error."""


@dataclass(frozen=True)
class World:
    """This process's place among all: fixed for its life."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    device: torch.device = torch.device("cpu")
    # A gloo group for what the hosts agree on (stop, paths): it never waits for the device.
    control: dist.ProcessGroup | None = field(default=None, compare=False)
    # A gloo group for what is saved while training goes on: on a shared one the two would wait for each other.
    background: dist.ProcessGroup | None = field(default=None, compare=False)
    _meshes: dict[Any, DeviceMesh] = field(default_factory=dict, compare=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def wait_for_device(self) -> None:
        """Let all that was queued on the device finish: for reading clocks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def say(self, text: str) -> None:
        """Print on rank 0 only."""
        if self.is_main:
            print(text, flush=True)

    def warn(self, text: str) -> None:
        """Print a warning on rank 0 only, on standard error."""
        if self.is_main:
            print(f"warning: {text}", file=sys.stderr, flush=True)

    def barrier(self) -> None:
        if self.control is not None:
            dist.barrier(group=self.control)

    def from_main(self, value: str) -> str:
        """Rank 0's value, on every rank."""
        if self.control is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, on every rank, in the order of the ranks."""
        texts = [text] * self.world_size
        if self.control is not None:
            dist.all_gather_object(texts, text, group=self.control)
        return texts

    def gather_numbers(self, row: list[float]) -> list[list[float]]:
        """Equally many numbers of each rank's host -> every rank's, on every rank, in the order of the ranks."""
        if self.control is None:
            return [row]
        rows = torch.empty(self.world_size, len(row), dtype=torch.float64)
        dist.all_gather(list(rows.unbind()), torch.tensor(row, dtype=torch.float64), group=self.control)
        return rows.numpy().tolist()

    def gather(self, row: Tensor) -> Tensor:
        """[...] on each rank -> [world_size, ...] on every rank, on the device or the host as the row is."""
        rows = row.new_empty(self.world_size, *row.shape)
        if self.control is None:
            return rows.copy_(row)
        dist.all_gather(list(rows.unbind()), row, group=None if row.is_cuda else self.control)
        return rows

    @contextmanager
    def one_per_node_first(self) -> Iterator[None]:
        """Let each node's first rank through before its others: it fills the caches that they then read."""
        if self.local_rank != 0:
            self.wait_long()
        yield
        if self.local_rank == 0:
            self.wait_long()

    def mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        """All ranks in a grid; made once, since its groups cost threads and sockets, for all runs in this world."""
        if (shape, names) not in self._meshes:
            self._meshes[shape, names] = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        return self._meshes[shape, names]

    def wait_long(self) -> None:
        """A barrier without the timeout of a collective: making a cache may take hours."""
        if self.background is not None:
            dist.barrier(group=self.background)


def _place(config: RunConfig) -> World:
    """This process's ranks and device, as torchrun or an existing process group has them; no group is made."""
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    else:
        missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
        if len(missing) == 1:
            raise ConfigError(f"{missing[0]} is not set although its partner is; start with torchrun, or unset both")
        rank, world_size = environment_number("RANK", 0), environment_number("WORLD_SIZE", 1)
    if rank >= world_size:
        raise ConfigError(f"RANK={rank} must be below WORLD_SIZE={world_size}; start with torchrun")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device=cuda, but torch finds no GPU; use run.device=cpu")
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    gpus = torch.cuda.device_count() if on_gpu else 0
    # Launchers other than torchrun may not say how the ranks fall on machines: then one rank per GPU.
    local_world_size = environment_number("LOCAL_WORLD_SIZE", min(world_size, gpus or world_size))
    local_rank = environment_number("LOCAL_RANK", rank % local_world_size)
    # Some show each process one GPU, its own; torchrun shows all of them to all.
    if on_gpu and local_world_size > gpus and (gpus > 1 or "TORCHELASTIC_RUN_ID" in os.environ):
        raise ConfigError(
            f"{local_world_size} processes on this machine (nproc_per_node) are more than its {gpus} GPUs; "
            f"use --nproc_per_node={gpus}, or --run.device cpu"
        )
    device = torch.device("cuda", local_rank % gpus) if on_gpu else torch.device("cpu")
    return World(rank, local_rank, world_size, local_world_size, device)


def locate(config: RunConfig) -> World:
    """This process's World: alone, or in the process group that is already there; every rank calls it."""
    world = _place(config)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if not dist.is_initialized() or world.world_size == 1:
        return world
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.timeout_seconds))
    # Without a timeout: a large checkpoint takes the slowest rank as long as it takes.
    return replace(world, control=control, background=dist.new_group(backend="gloo", timeout=timedelta(days=1)))


@contextmanager
def start(config: RunConfig) -> Iterator[World]:
    """Join the world for the length of a with-block; whatever happens in it, leave nothing running.

    One process needs no process group and gets none; one that is there already is used and left as it was.
    """
    place = _place(config)
    _quiet_all_but_rank_0(place.rank)
    ours = not dist.is_initialized() and place.world_size > 1
    if ours:
        on_gpu = place.device.type == "cuda"
        store = meet(place.rank, place.world_size, config.timeout_seconds)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            timeout=timedelta(seconds=config.timeout_seconds),
            device_id=place.device if on_gpu else None,
            store=store,
            rank=place.rank,
            world_size=place.world_size,
        )
        store.delete_key(joined(place.rank))  # all are here; torchrun may keep the store for its next attempt
    try:
        world = locate(config)
        yield world
        # FSDP2 over gloo aborts at exit if a rank tears down while another is still in a collective.
        # Measured without the barrier: 8 of 24 two-rank runs; with it: none.
        world.barrier()
    except BaseException:
        if ours and place.device.type == "cuda":
            dist.distributed_c10d._abort_process_group()  # destroying would wait for collectives that never end
            ours = False
        raise
    finally:
        if ours:
            dist.destroy_process_group()


def _quiet_all_but_rank_0(rank: int) -> None:
    """Tasks log to "dist_amp..."; rank 0 shows it. The datasets library's bars are for one rank on a terminal."""
    if rank != 0 or not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    logger = logging.getLogger("dist_amp")
    logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)


def set_determinism(on: bool) -> None:
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(on)


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, the device's too."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def scheduled_garbage(every: int | Literal["off"]) -> Iterator[Callable[[int], None]]:
    """What collects garbage at every so many steps, and keeps Python from doing so in between.

    Python's own collections come at other times on each rank, and the others wait for it. What is there at the start,
    modules above all, is not looked at again: with it, a full collection took 127 ms.
    """
    if every == "off" or not gc.isenabled():
        yield lambda step: None
        return

    def collect(step: int) -> None:
        if step % every == 0:
            gc.collect()

    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield collect
    finally:
        gc.enable()
        gc.unfreeze()


class AgreedStop:
    """A signal to any rank stops all ranks at one and the same step.

    The handler only sets a flag. `poll`, called by every rank once a step, starts the exchange of the flags on the
    host and returns what the previous exchange agreed: it overlaps the step, so a stop comes one step late.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

    def __init__(self, world: World):
        self.requested_by = ""  # the first signal's name
        self.agreed = False  # what the last poll returned
        self._requested_at = 0.0
        self._world = world
        self._flag = torch.zeros(1)
        self._flag_on_host = self._flag.numpy()
        self._exchange: dist.Work | None = None
        self._previous_handlers: dict[int, object] = {}

    def __enter__(self) -> "AgreedStop":
        if threading.current_thread() is threading.main_thread():  # Python allows handlers there only
            for number in self.SIGNALS:
                self._previous_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        if self._exchange is not None and error[0] is None:
            self._exchange.wait()
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again = time.monotonic() - self._requested_at > 2  # torchrun passes on a Ctrl-C that the rank had already
        if number == signal.SIGINT and self.requested_by == "SIGINT" and again:
            raise KeyboardInterrupt  # the second Ctrl-C means now
        if not self.requested_by:
            self.requested_by, self._requested_at = signal.Signals(number).name, time.monotonic()

    def poll(self) -> bool:
        """True on every rank, at the same step, once any rank was asked to stop."""
        if self._world.control is None:
            self.agreed = bool(self.requested_by)
            return self.agreed
        if self._exchange is not None:
            self._exchange.wait()
            self.agreed = bool(self._flag_on_host[0])
        self._flag_on_host[0] = bool(self.requested_by)
        self._exchange = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._world.control, async_op=True)
        return self.agreed

    def poll_now(self) -> bool:
        """The same without the delay of a step: for where the ranks wait for each other anyway."""
        self.poll()
        return self.poll()


def ignore_stop_signals() -> None:
    """For loader workers: the signal is for the rank, which still needs them until its checkpoint is written."""
    for number in AgreedStop.SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def die_with_parent(number: signal.Signals) -> None:
    """Get this signal when the parent process ends, however it does; Linux alone can. Source: prctl(2)."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def attempt() -> int:
    """How often torchrun has started these processes again."""
    return environment_number("TORCHELASTIC_RESTART_COUNT", 0)


def run_folder(config: RunConfig, world: World) -> Path:
    """The run's folder, the same on every rank; a torchrun restart finds the folder of its first attempt."""
    if not config.dir:
        raise ConfigError("run.dir is empty; give a folder's path, or auto")
    if config.dir != "auto":
        return Path(config.dir)
    name = hashlib.sha256(_launch().encode()).hexdigest()[:6]
    earlier = sorted(Path("runs").glob(f"*-{name}"))
    fresh = Path("runs") / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{name}"
    return Path(world.from_main(str(earlier[-1] if earlier else fresh)))


def _launch() -> str:
    """What is the same in all attempts of one launch, and in no other: torchrun's agent, which outlives its workers."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return f"{socket.gethostname()} {os.getpid()} {time.time_ns()}"
    agent = os.getppid()
    try:
        started = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:  # no /proc outside Linux
        started = ""
    return f"{os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {agent} {started}"


def report_failure(error: BaseException, world: World | None) -> tuple[int, bool]:
    """Say what went wrong, once for all ranks and last on the screen.

    Returns this process's exit status, and whether it was the first to fail, hence the one that spoke.

    A `Failure` is the user's to mend and gets its one line; anything else gets its traceback.
    """
    planned = isinstance(error, Failure)
    rank = world.rank if world is not None else int(os.environ.get("RANK", "0"))
    text = f"error: {error}" if planned else f"rank {rank}: " + "".join(traceback.format_exception(error)).rstrip()
    first = _first_to_report(world)
    if first:
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)
        _tell_torchrun(text)
    elif "TORCHELASTIC_ERROR_FILE" in os.environ:
        time.sleep(10)  # torchrun shows the first to exit, and ends us once the rank that reports has
    return error.exit_code if isinstance(error, Failure) else 1, first


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def in_one_line(error: BaseException) -> str:
    """The error's type, its first line, and where it was raised."""
    places = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(places[-1].filename).name}, line {places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {first_line(error)}{where}"


def _first_to_report(world: World | None) -> bool:
    if world is None or not dist.is_initialized():
        # Found before the ranks met: the same mistake on all of a machine, perhaps not on all machines.
        return os.environ.get("LOCAL_RANK", "0") == "0"
    store, key = dist.distributed_c10d._get_default_store(), f"dist_amp/failures/{attempt()}"
    try:
        return in_time(5.0, lambda: store.add(key, 1) == 1)
    except Exception:  # the store is gone with its host, or cut off: better said twice than not at all
        return True


def _tell_torchrun(text: str) -> None:
    """Hand torchrun the message for its own last lines."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
