"""debug.profile and debug.memory_snapshot: record some steps, on all ranks or on debug.ranks, into RUN/profile.

torch.profiler writes a trace, for ui.perfetto.dev, and a table of where the time went, which is in TensorBoard too. In
the trace a step is the range ProfilerStep#N, and its parts are ranges within it: see `labelled`. torch's allocator
writes its history, for pytorch.org/memory_viz, after the recorded steps and when a GPU runs out of memory.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch._C._autograd import DeviceType  # has no public name; diagnostics only
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from dist_amp.errors import ConfigError, in_one_line
from dist_amp.fast.fused import FusedAdamW, FusedSGD
from dist_amp.run import Run
from dist_amp.settings import DebugConfig
from dist_amp.telemetry.async_copy import StepReport
from dist_amp.telemetry.observer import Observer
from dist_amp.world import World

# Steps of this process that are not recorded: they compile, size DDP's buckets and fill caches. Assumed to be enough.
FIRST_STEPS = 10

WARM_UP_STEPS = 2  # recorded by the profiler and discarded, because starting it slows the first

ROWS, TOP_ROWS = 40, 5  # of the table: in the file, on the console

PARTS = ("data wait", "forward", "backward", "gradient norm", "update")  # of a step, in this order, without overlap

# Allocations kept, the newest ones; several KB of host memory each, by torch's documentation.
MAX_ALLOCATIONS = 100_000


def check_debug(config: DebugConfig, world: World) -> None:
    """Errors: ConfigError for ranks that don't exist, and for a memory snapshot on a CPU."""
    existing = f"0 to {world.world_size - 1}" if world.world_size > 1 else "only 0"
    missing = [rank for rank in config.ranks if rank not in range(world.world_size)] if config.ranks != "all" else []
    if missing or not config.ranks:
        given = " ".join(map(str, config.ranks)) or "(nothing)"
        raise ConfigError(f"debug.ranks={given} must be existing ranks ({existing}); use some of them, or all")
    if config.memory_snapshot and world.device.type != "cuda":
        raise ConfigError(
            "debug.memory_snapshot=true needs a GPU: torch keeps no history of CPU memory; use false, or "
            "run.device=cuda"
        )


def is_chosen(config: DebugConfig, rank: int) -> bool:
    """Whether this is one of debug.ranks."""
    return config.ranks == "all" or rank in config.ranks


class Profile(Observer):
    """Records `first` to `last`, the steps of `window`; evaluations and checkpoints are never inside them."""

    def __init__(self, run: Run):
        debug = run.config.debug
        self.run = run
        self.on = debug.profile != "off" or debug.memory_snapshot
        self._asked = 1 if debug.profile == "off" else debug.profile
        every = [run.config.eval.every if run.validation is not None else "off", run.config.checkpoint.every]
        pauses = [steps for steps in every if steps != "off"]
        self.first, self.last = window(run.step, run.config.train.steps, self._asked, pauses)
        self._labels = ExitStack()
        self._profiler: profile | None = None
        if debug.profile != "off" and is_chosen(debug, run.world.rank) and self.first <= self.last:
            self._profiler = self._build_profiler()

    def _build_profiler(self) -> profile:
        """torch's profiler; its step numbers are the run's."""
        next_step = self.run.step + 1

        def action(step: int) -> ProfilerAction:
            step = max(step, next_step)  # the profiler asks for step 0 when it is made
            if step >= self.first:
                return ProfilerAction.RECORD
            return ProfilerAction.WARMUP if step >= self.first - WARM_UP_STEPS else ProfilerAction.NONE

        profiler = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.run.world.device.type == "cuda"),
            schedule=action,
            acc_events=True,  # or it warns that it will clear them
        )
        profiler.step_num = next_step
        return profiler

    def __enter__(self) -> Self:
        if self._profiler is not None:
            self._profiler.start()
        return self

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        if not self.on:
            return
        if self.run.step >= self.last:
            self._finish()
        elif self._profiler is not None:
            self._profiler.step()
            if self.run.step == self.first - 1:
                self._labels.enter_context(labelled(self.run))

    def __exit__(self, *error: object) -> None:
        if self.on and error[0] is None:  # the run has ended before the last step to be recorded
            self._finish()
        self._labels.close()
        world = self.run.world
        # After a failure. With several GPUs, stopping would wait for one that may itself wait for a dead rank.
        if self._profiler is not None and (world.world_size == 1 or world.device.type == "cpu"):
            with suppress(Exception):
                self._profiler.stop()

    def _finish(self) -> None:
        """Write what was recorded, on the chosen ranks, while the others wait."""
        self.on = False
        run, debug = self.run, self.run.config.debug
        self._labels.close()
        profiler, self._profiler = self._profiler, None
        with run.world.clock.hold("diagnostics"):
            if run.step < self.first and debug.profile != "off":
                run.world.warn(
                    f"debug.profile={debug.profile} recorded nothing: the run ended after step {run.step}, and step "
                    f"{self.first} would have been the first; take more steps"
                )
            try:
                if profiler is not None:
                    profiler.stop()
                    if run.step >= self.first:
                        self._write(profiler)
                if debug.memory_snapshot and is_chosen(debug, run.world.rank):
                    write_snapshot(run.folder, run.world.rank, f"step_{run.step:08d}_memory")
            except Exception as error:  # most likely a full disk, which must not end the run
                text = f"warning: rank {run.world.rank}: the profile could not be written: {in_one_line(error)}"
                print(text, file=sys.stderr, flush=True)
            run.world.wait_long()

    def _write(self, profiler: profile) -> None:
        """Write trace and table, the table to TensorBoard too; the lowest chosen rank prints a summary."""
        run, debug, steps = self.run, self.run.config.debug, self.run.step - self.first + 1
        folder = run.folder / "profile"
        folder.mkdir(exist_ok=True)
        name = f"rank{run.world.rank:05d}_step_{self.first:08d}-{run.step:08d}"
        profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))
        device = DeviceType.CUDA if run.world.device.type == "cuda" else DeviceType.CPU
        summary = time_per_step(profiler, steps, device)
        title = f"steps {self.first} to {run.step} of rank {run.world.rank} of {run.world.world_size}"
        if steps < self._asked:
            title += f", {steps} of debug.profile={self._asked}: then came an evaluation, a checkpoint or the end"
        by = "self_cpu_time_total" if device == DeviceType.CPU else "self_device_time_total"
        table = profiler.key_averages().table(sort_by=by, row_limit=ROWS, max_name_column_width=60)
        text = f"{title}\n{summary}\n\n{table}"
        (folder / f"{name}_table.txt").write_text(text)
        run.metrics.write_text("profile", text, run.step)
        if run.world.rank == (0 if debug.ranks == "all" else min(debug.ranks)):
            lines = [*summary.splitlines(), *top(profiler, steps, device)]
            lines.append(f"{folder / name}.json.gz opens in ui.perfetto.dev; the table is next to it")
            print("\n         ".join([f"profile  {title}", *lines]), flush=True)


def window(done: int, last_step: int, count: int, pauses: Sequence[int]) -> tuple[int, int]:
    """The first and the last step to record, of those after `done`; the last is below the first if there are too few.

    pauses: the run evaluates or saves at the multiples of these, and recording ends at the first of them. It starts
    after that one if more steps can be recorded there, and before the process has warmed up if the run is short.
    """

    def end(first: int) -> int:
        return min([first + count - 1, last_step, *(math.ceil(first / every) * every for every in pauses)])

    # At least one step before them, for the profiler's warm-up.
    first = max(done + 2, min(done + FIRST_STEPS + WARM_UP_STEPS + 1, last_step - count + 1))
    last = end(first)
    return (last + 1, end(last + 1)) if end(last + 1) - last > last - first + 1 else (first, last)


@contextmanager
def labelled(run: Run) -> Iterator[None]:
    """Inside, the parts of a step are ranges of the profiler: PARTS, each micro-batch, and the optimizer's step.

    Methods are wrapped meanwhile, so that train_step has no line for it and pays nothing otherwise.
    """
    optimizer = run.optimizer
    methods: list[tuple[Any, str, str]] = [
        (run.data, "receive", "data wait"),
        (Tensor, "backward", "backward"),
        (run.parallel, "global_grad_norm", "gradient norm"),
        (run.scaler, "step", "update"),
    ]
    if isinstance(optimizer, FusedAdamW | FusedSGD):  # torch's own optimizers have this range already
        methods.append((optimizer, "step", f"Optimizer.step#{type(optimizer).__name__}.step"))
    context_managers: list[tuple[Any, str, str]] = [
        (run.parallel, "gradient_sync", "micro-batch"),
        (run.precision, "autocast", "forward"),
    ]
    with ExitStack() as undo:
        for owner, name, label in methods:
            replace_method(undo, owner, name, in_range(label, getattr(owner, name)))
        for owner, name, label in context_managers:
            replace_method(undo, owner, name, range_around(label, getattr(owner, name)))
        yield


def in_range(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(label):
            return function(*args, **kwargs)

    return call


def range_around(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """For a function that returns a context manager."""

    @contextmanager
    def manager(*args: Any, **kwargs: Any) -> Iterator[None]:
        with record_function(label), function(*args, **kwargs):
            yield

    return manager


def replace_method(undo: ExitStack, owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Set an object's attribute until `undo` is closed."""
    if name in vars(owner):
        undo.callback(setattr, owner, name, getattr(owner, name))
    else:  # it is the class's, and visible again once deleted
        undo.callback(delattr, owner, name)
    setattr(owner, name, function)


def time_per_step(profiler: profile, steps: int, device: DeviceType) -> str:
    """Time per step on the host, and the shares of its parts; on a GPU also its time per step and idle share."""
    host = {event.key: event for event in profiler.key_averages() if event.device_type == DeviceType.CPU}
    total = host["ProfilerStep*"].cpu_time_total
    parts = [(name, host[name].cpu_time_total / total) for name in PARTS if name in host]
    parts.append(("the rest", 1 - sum(share for _, share in parts)))
    shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in parts)
    text = f"{total / steps / 1000:.2f} ms per step on the host: {shares}"
    if device == DeviceType.CPU:
        return text
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == device and not event.is_user_annotation
    ]
    if not spans:
        return f"{text}\nno times of the device: CUPTI, which records them, is missing or not permitted"
    span = max(end for _, end in spans) - min(start for start, _ in spans)
    idle = 1 - covered(spans) / span
    return f"{text}\n{span / steps / 1000:.2f} ms per step on the device, which was idle for {100 * idle:.1f} % of it"


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of these (start, end): kernels of several streams overlap."""
    total, until = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def top(profiler: profile, steps: int, device: DeviceType) -> list[str]:
    """The operations (on a GPU the kernels) that took most of the time, without what they call; a line each."""

    def spent(event: Any) -> float:
        return event.self_cpu_time_total if device == DeviceType.CPU else event.self_device_time_total

    events = [event for event in profiler.key_averages() if event.device_type == device]
    on_host = device == DeviceType.CPU
    # Leave out this file's ranges; on a GPU all ranges, whose times are those of their kernels.
    ours = (*PARTS, "micro-batch", "ProfilerStep", "Optimizer.step")
    operations = [e for e in events if not (e.key.startswith(ours) if on_host else e.is_user_annotation)]
    # As in the table: on the host a range has time of its own, Python's.
    total = sum(map(spent, events if on_host else operations)) or 1.0
    return [
        f"{100 * spent(event) / total:5.1f} % {spent(event) / steps / 1000:9.2f} ms  {event.key[:70]} "
        f"({event.count / steps:g} times)"
        for event in sorted(operations, key=spent, reverse=True)[:TOP_ROWS]
    ]


@contextmanager
def memory_history(config: DebugConfig, folder: Path, world: World) -> Iterator[None]:
    """With debug.memory_snapshot, on the chosen ranks: keep the allocator's history, and write it if memory runs out.

    Enter it before the model is built: earlier allocations have no history.
    """
    if not config.memory_snapshot or not is_chosen(config, world.rank):
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS, stacks="python")
    try:
        yield
    except torch.OutOfMemoryError:
        with suppress(OSError):
            write_snapshot(folder, world.rank, "out_of_memory")
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def write_snapshot(folder: Path, rank: int, name: str) -> None:
    """Write this rank's allocations, and their history, to RUN/profile."""
    path = folder / "profile" / f"rank{rank:05d}_{name}.pickle"
    path.parent.mkdir(exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))
    print(f"memory   snapshot of rank {rank}: {path}; open it at pytorch.org/memory_viz", flush=True)
