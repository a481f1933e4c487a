"""debug.profile and debug.memory_snapshot: some steps recorded on all ranks, or on debug.ranks, into RUN/profile.

torch.profiler leaves a trace, for ui.perfetto.dev, and a table of where the time went, which TensorBoard has too. In
the trace a step is the range ProfilerStep#N, and its parts are ranges within it: see `labelled`. torch's allocator
leaves its history, for pytorch.org/memory_viz, as the recorded steps end and when a GPU's memory runs out.

A run that records nothing is not touched. To delete: this file, three fields of debug and its lines in train.py.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile, schedule

from dist_amp.errors import ConfigError, in_one_line
from dist_amp.fast.fused import FusedAdamW, FusedSGD
from dist_amp.run import Run
from dist_amp.settings import DebugConfig
from dist_amp.world import World

# Steps of this process that are not recorded: they compile, size DDP's buckets and fill caches. Assumed to be enough.
FIRST_STEPS = 10

WARM_UP_STEPS = 2  # that the profiler records and drops, since its own beginning slows the first

ROWS, TOP_ROWS = 40, 5  # of the table: in the file, on the console

PARTS = ("data wait", "forward", "backward", "gradient norm", "update")  # of a step, one after the other

# Of the allocator, the newest are kept; at several KB of host memory each, by torch's documentation.
MAX_ALLOCATIONS = 100_000


def check_debug(config: DebugConfig, world: World) -> None:
    """Errors: ConfigError for ranks that there are not, and for a snapshot of memory that torch keeps no history of."""
    there = f"0 to {world.world_size - 1}" if world.world_size > 1 else "0 alone"
    absent = [rank for rank in config.ranks if rank not in range(world.world_size)] if config.ranks != "all" else []
    if absent or not config.ranks:
        given = " ".join(map(str, config.ranks)) or "(nothing)"
        raise ConfigError(f"debug.ranks={given} must be ranks that there are, {there}; use some of them, or all")
    if config.memory_snapshot and world.device.type != "cuda":
        raise ConfigError(
            "debug.memory_snapshot=true needs a GPU: torch keeps no history of the CPU's memory; use false, or "
            "run.device=cuda"
        )


class Profile:
    """A context around the loop; `after_step` is called by every rank after each step, before it evaluates or saves.

    Evaluations and checkpoints are no part of a step: the recorded steps end where one comes.
    """

    def __init__(self, run: Run):
        debug = run.config.debug
        self.run = run
        self.on = debug.profile != "off" or debug.memory_snapshot
        every = [run.config.eval.every if run.validation is not None else "off", run.config.checkpoint.every]
        count = 1 if debug.profile == "off" else debug.profile
        self._begun_at, self._asked = run.step, count
        self.first, self.last = window(
            run.step, run.config.train.steps, count, [steps for steps in every if steps != "off"]
        )
        self._labels = ExitStack()
        self._profiler: profile | None = None
        if debug.profile != "off" and debug.chosen(run.world.rank) and self.first <= self.last:
            self._profiler = self._scheduled()

    def _scheduled(self) -> profile:
        """torch's profiler, whose steps are numbered as the run's."""
        ahead, count = self.first - 1 - self._begun_at, self.last - self.first + 1
        warm_up = min(ahead, WARM_UP_STEPS)
        actions = schedule(wait=ahead - warm_up, warmup=warm_up, active=count, repeat=1)
        begin = self._begun_at + 1
        profiler = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.run.world.device.type == "cuda"),
            schedule=lambda step: actions(max(step - begin, 0)),
            acc_events=True,  # or it warns that it will clear them
        )
        profiler.step_num = begin
        return profiler

    def __enter__(self) -> "Profile":
        if self._profiler is not None:
            self._profiler.start()
        return self

    def after_step(self) -> None:
        if not self.on:
            return
        step = self.run.step
        if step >= self.last:
            self._finish()
            return
        if self._profiler is not None:
            self._profiler.step()
            if step == self.first - 1:
                self._labels.enter_context(labelled(self.run))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self.on:  # the run has ended before the last step that was to be recorded
            self._finish()
        self._labels.close()
        world = self.run.world
        # Among several GPUs it would wait for one that may wait for a rank which is gone.
        if self._profiler is not None and (world.world_size == 1 or world.device.type == "cpu"):
            with suppress(Exception):
                self._profiler.stop()

    def _finish(self) -> None:
        """Write what was recorded, on the chosen ranks, while the others wait."""
        self.on = False
        run, debug = self.run, self.run.config.debug
        self._labels.close()
        profiler, self._profiler = self._profiler, None
        with run.metrics.off_the_clock():
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
                if debug.memory_snapshot and debug.chosen(run.world.rank):
                    write_snapshot(run.folder, run.world.rank, f"step_{run.step:08d}_memory")
            except Exception as error:  # a full disk, above all, is no reason to end the run
                told = f"warning: rank {run.world.rank}: what was recorded could not be kept: {in_one_line(error)}"
                print(told, file=sys.stderr, flush=True)
            run.world.wait_long()

    def _write(self, profiler: profile) -> None:
        """The trace, the table, and the table to TensorBoard; the lowest of the ranks says so."""
        run, debug, steps = self.run, self.run.config.debug, self.run.step - self.first + 1
        folder = run.folder / "profile"
        folder.mkdir(exist_ok=True)
        name = f"rank{run.world.rank:05d}_step_{self.first:08d}-{run.step:08d}"
        profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))
        device = DeviceType.CUDA if run.world.device.type == "cuda" else DeviceType.CPU
        summary = time_per_step(profiler, steps, device)
        whose = f"steps {self.first} to {run.step} of rank {run.world.rank} of {run.world.world_size}"
        if steps < self._asked:
            whose += f", {steps} of debug.profile={self._asked}: then came an evaluation, a checkpoint or the end"
        by = "self_cpu_time_total" if device == DeviceType.CPU else "self_device_time_total"
        table = profiler.key_averages().table(sort_by=by, row_limit=ROWS, max_name_column_width=60)
        text = f"{whose}\n{summary}\n\n{table}"
        (folder / f"{name}_table.txt").write_text(text)
        run.metrics.write_text("profile", text, run.step)
        if run.world.rank == (0 if debug.ranks == "all" else min(debug.ranks)):
            lines = "\n".join(f"         {line}" for line in [*summary.splitlines(), *top(profiler, steps, device)])
            opens = f"{folder / name}.json.gz opens in ui.perfetto.dev; the table is beside it"
            print(f"profile  {whose}\n{lines}\n         {opens}", flush=True)


def window(done: int, last_step: int, count: int, pauses: Sequence[int]) -> tuple[int, int]:
    """The first and the last step to record, of those after `done`; the last is below the first if there are too few.

    pauses: the run evaluates or saves at the multiples of these, and the steps end at the first of them. They begin
    after it if there are more to be had there; and earlier than they should where the run is short.
    """

    def end(first: int) -> int:
        return min([first + count - 1, last_step, *(math.ceil(first / every) * every for every in pauses)])

    # At least one step ahead of them, for the profiler's warm-up.
    first = max(done + 2, min(done + FIRST_STEPS + WARM_UP_STEPS + 1, last_step - count + 1))
    last = end(first)
    return (last + 1, end(last + 1)) if end(last + 1) - last > last - first + 1 else (first, last)


@contextmanager
def labelled(run: Run) -> Iterator[None]:
    """Inside, the parts of a step are ranges of the profiler: PARTS, each micro-batch, and the optimizer's step.

    Methods of this run's objects are wrapped meanwhile, so that the step has no line for it and otherwise pays nothing.
    """
    gradient_sync, autocast = run.parallel.gradient_sync, run.precision.autocast
    after_forward: list[ExitStack] = []  # of the micro-batch at work

    @contextmanager
    def micro_batch(on: bool) -> Iterator[None]:
        with record_function("micro-batch"), gradient_sync(on), ExitStack() as ranges:
            after_forward.append(ranges)
            yield
            after_forward.pop()

    @contextmanager
    def forward() -> Iterator[None]:
        with record_function("forward"), autocast():
            yield
        for ranges in after_forward[-1:]:  # none where it is no step
            ranges.enter_context(record_function("backward"))  # to the micro-batch's end

    optimizer = run.optimizer
    with ExitStack() as undo:
        swap(undo, run.parallel, "gradient_sync", micro_batch)
        swap(undo, run.precision, "autocast", forward)
        swap(undo, run.data, "receive", ranged("data wait", run.data.receive))
        swap(undo, run.parallel, "global_grad_norm", ranged("gradient norm", run.parallel.global_grad_norm))
        swap(undo, run.scaler, "step", ranged("update", run.scaler.step))
        if isinstance(optimizer, FusedAdamW | FusedSGD):  # torch's own have this range already
            label = f"Optimizer.step#{type(optimizer).__name__}.step"
            swap(undo, optimizer, "step", ranged(label, optimizer.step))
        yield


def ranged(label: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def within(*args: Any, **options: Any) -> Any:
        with record_function(label):
            return call(*args, **options)

    return within


def swap(undo: ExitStack, owner: object, name: str, value: object) -> None:
    """Set an object's attribute until `undo` is closed; what its class has shows again then."""
    own = vars(owner)
    undo.callback(setattr, owner, name, own[name]) if name in own else undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def time_per_step(profiler: profile, steps: int, device: DeviceType) -> str:
    """Time per step, and the shares of its parts as the host went through them; on a GPU, how long it was idle."""
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
        return f"{text}\nnothing of the device: CUPTI, which records it, is not there or not allowed to"
    span = max(end for _, end in spans) - min(start for start, _ in spans)
    idle = 1 - covered(spans) / span
    return f"{text}\n{span / steps / 1000:.2f} ms per step on the device, which was idle for {100 * idle:.1f} % of it"


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of these (start, end) lasted: kernels of several streams overlap."""
    total, until = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def top(profiler: profile, steps: int, device: DeviceType) -> list[str]:
    """What took most of the time, a line each: operations without what they call, on a GPU its kernels."""

    def spent(event: Any) -> float:
        return event.self_cpu_time_total if device == DeviceType.CPU else event.self_device_time_total

    events = [event for event in profiler.key_averages() if event.device_type == device]
    on_host = device == DeviceType.CPU
    # Of the ranges, those of others stay, as a loader's; on a GPU they would be their kernels a second time.
    ours = (*PARTS, "micro-batch", "ProfilerStep", "Optimizer.step")
    operations = [e for e in events if not (e.key.startswith(ours) if on_host else e.is_user_annotation)]
    # As in the table: on the host a range has time of its own, of Python's, on a GPU it has its kernels' again.
    total = sum(map(spent, events if on_host else operations)) or 1.0
    return [
        f"{100 * spent(event) / total:5.1f} % {spent(event) / steps / 1000:9.2f} ms  {event.key[:70]} "
        f"({event.count / steps:g} times)"
        for event in sorted(operations, key=spent, reverse=True)[:TOP_ROWS]
    ]


@contextmanager
def memory_history(config: DebugConfig, folder: Path, world: World) -> Iterator[None]:
    """With debug.memory_snapshot, on the chosen ranks, keep the allocator's history, and write it if memory runs out.

    PendingMetrics before the model is built: what was there before has no history.
    """
    if not config.memory_snapshot or not config.chosen(world.rank):
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
    """The history of this rank's GPU memory, and what is in it, to RUN/profile."""
    path = folder / "profile" / f"rank{rank:05d}_{name}.pickle"
    path.parent.mkdir(exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))
    print(f"memory   of rank {rank} is in {path}; open it at pytorch.org/memory_viz", flush=True)
