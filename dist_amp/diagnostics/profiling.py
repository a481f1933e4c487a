"""debug.profile: record some steps on all ranks, into RUN/profile.

A trace for ui.perfetto.dev, in which a step is the range ProfilerStep#N and the clock's phases are
ranges within it; a table; on GPUs the allocator's history, for pytorch.org/memory_viz.

Docs: docs/debugging.md
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType  # has no public name; diagnostics only
from torch.profiler import ProfilerAction, profile, record_function

from dist_amp.clock import STEP_PHASES
from dist_amp.errors import in_one_line
from dist_amp.run import Run
from dist_amp.telemetry.observer import Observer
from dist_amp.telemetry.step_report import StepReport
from dist_amp.world import World

# Not recorded: they compile, size DDP's buckets and fill caches. Assumed to be enough.
FIRST_STEPS = 10
WARM_UP_STEPS = 2  # recorded by the profiler and discarded, because starting it slows the first
ROWS = 40  # of the table in the file
MAX_ALLOCATIONS = 100_000  # kept; several KB of host memory each, by torch's documentation


class Profile(Observer):
    """Records the steps `first` to `last` of a run, a few after its start."""

    def __init__(self, run: Run):
        self._run = run
        assert run.config.debug.profile != "off"
        self._count = run.config.debug.profile
        self.first, self.last = window(run.step, run.config.train.steps, self._count)
        self._is_written = False
        self._ranges = ExitStack()  # while the clock is watched
        self._range = ExitStack()  # of the clock's present phase
        self._profiler: profile | None = None
        if self.first <= self.last:
            # Without acc_events it warns that it will clear them.
            self._profiler = profile(schedule=self._action, acc_events=True)
            self._profiler.step_num = run.step + 1  # its step numbers are the run's
            self._profiler.start()

    def _action(self, step: int) -> ProfilerAction:
        step = max(step, self._run.step + 1)  # the profiler asks for step 0 when it is made
        if step >= self.first:
            return ProfilerAction.RECORD
        if step >= self.first - WARM_UP_STEPS:
            return ProfilerAction.WARMUP
        return ProfilerAction.NONE

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        run = self._run
        if self._is_written:
            return
        if run.step >= self.last:
            self._write()
        elif self._profiler is not None:
            self._range.close()
            self._profiler.step()
            if run.step == self.first - 1:
                self._ranges.enter_context(run.world.clock.watched(self._enter))
            if run.step >= self.first - 1:
                self._range.enter_context(record_function("other"))

    def _enter(self, phase: str) -> None:
        self._range.close()
        self._range.enter_context(record_function(phase))

    def close(self, error: BaseException | None = None) -> None:
        if not self._is_written and error is None:  # the run ended before the last recorded step
            self._write()
        self._stop_ranges()
        world = self._run.world
        # After a failure. With several GPUs, stopping may wait for one that waits for a dead rank.
        if self._profiler is not None and (world.world_size == 1 or world.device.type == "cpu"):
            with suppress(Exception):
                self._profiler.stop()

    def _stop_ranges(self) -> None:
        self._ranges.close()
        self._range.close()

    def _write(self) -> None:
        """Write what was recorded, while the other ranks wait."""
        self._is_written = True
        self._stop_ranges()
        run = self._run
        profiler, self._profiler = self._profiler, None
        with run.world.clock.hold("diagnostics"):
            if run.step < self.first:
                run.world.warn(
                    f"debug.profile={self._count} recorded nothing: the run ended after step "
                    f"{run.step}, and step {self.first} would have been the first; take more steps"
                )
            try:
                if profiler is not None:
                    profiler.stop()
                    if run.step >= self.first:
                        self._write_trace(profiler)
                if run.world.device.type == "cuda":
                    write_snapshot(run.folder, run.world.rank, f"step_{run.step:08d}_memory")
            except Exception as error:  # most likely a full disk, which must not end the run
                text = f"the profile could not be written: {in_one_line(error)}"
                print(f"warning: rank {run.world.rank}: {text}", file=sys.stderr, flush=True)
            run.world.wait_long()

    def _write_trace(self, profiler: profile) -> None:
        """Write trace and table, the table to TensorBoard too; rank 0 prints a summary."""
        run = self._run
        rank = run.world.rank
        folder = run.folder / "profile"
        folder.mkdir(exist_ok=True)
        path = folder / f"rank{rank:05d}_step_{self.first:08d}-{run.step:08d}"
        profiler.export_chrome_trace(f"{path}.json.gz")
        title = f"steps {self.first} to {run.step} of rank {rank} of {run.world.world_size}"
        on_gpu = run.world.device.type == "cuda"
        summary = time_per_step(profiler, run.step - self.first + 1, on_gpu)
        table = profiler.key_averages().table(
            sort_by="self_device_time_total" if on_gpu else "self_cpu_time_total",
            row_limit=ROWS,
            max_name_column_width=60,
        )
        text = f"{title}\n{summary}\n\n{table}"
        Path(f"{path}_table.txt").write_text(text)
        run.metrics.write_text("profile", text, run.step)
        lines = [f"profile  {title}", *summary.splitlines()]
        lines.append(f"{path}.json.gz opens in ui.perfetto.dev; the table is next to it")
        run.world.say("\n         ".join(lines))


def window(done: int, last_step: int, count: int) -> tuple[int, int]:
    """The first and the last step to record, of those after `done`; last < first if too few."""
    # At least one step before them, for the profiler's warm-up.
    first = max(done + 2, min(done + FIRST_STEPS + WARM_UP_STEPS + 1, last_step - count + 1))
    return first, min(first + count - 1, last_step)


def time_per_step(profiler: profile, steps: int, on_gpu: bool) -> str:
    """Time per step on the host, and its phases' shares; on a GPU also its idle share."""
    events = profiler.key_averages()
    on_host = {e.key: e.cpu_time_total for e in events if e.device_type == DeviceType.CPU}
    total = on_host["ProfilerStep*"]
    shares = {phase: on_host[phase] / total for phase in STEP_PHASES if phase in on_host}
    texts = [f"{phase} {100 * share:.1f} %" for phase, share in shares.items()]
    text = f"{total / steps / 1000:.2f} ms per step on the host: {', '.join(texts)}"
    if not on_gpu:
        return text
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )
    if not spans:
        return f"{text}\nno times of the device: CUPTI is missing or not permitted"
    start = until = spans[0][0]
    busy = 0.0  # kernels of several streams overlap
    for begin, end in spans:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    per_step = f"{(until - start) / steps / 1000:.2f} ms per step on the device"
    return (
        f"{text}\n{per_step}, which was idle for {100 * (1 - busy / (until - start)):.1f} % of it"
    )


@contextmanager
def memory_history(folder: Path, world: World) -> Iterator[None]:
    """Keep a GPU allocator's history from here on, and write it if memory runs out."""
    if world.device.type != "cuda":  # torch keeps no history of CPU memory
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
    line = f"memory   snapshot of rank {rank}: {path}; open it at pytorch.org/memory_viz"
    print(line, flush=True)
