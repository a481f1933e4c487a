"""debug.profile: record a few steps on every rank with torch.profiler, into RUN/profile.

Each rank writes a trace for ui.perfetto.dev (step N is the range ProfilerStep#N), a table of
operations and, on GPUs, the allocator's history for pytorch.org/memory_viz.

Docs: docs/debugging.md
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, schedule

from dist_amp.errors import in_one_line
from dist_amp.run import Run
from dist_amp.telemetry.observer import Observer
from dist_amp.telemetry.step_report import StepReport
from dist_amp.world import World

# Steps that are not recorded: they compile, build DDP's buckets and fill caches. 10 is assumed.
FIRST_STEPS = 10
WARM_UP_STEPS = 2  # profiled and discarded, because starting the profiler slows the first of them
ROWS = 40  # of the table
MAX_ALLOCATIONS = 100_000  # in the history; several KB of host memory each (torch's documentation)


class Profile(Observer):
    """Records the steps `first` to `last` of a run, a few after its start."""

    def __init__(self, run: Run):
        self._run = run
        count: Any = run.config.debug.profile  # not "off"
        self.first, self.last = window(run.step, run.config.train.steps, count)
        warm_up = min(WARM_UP_STEPS, self.first - run.step - 1)
        length = max(1, self.last - self.first + 1)
        self._profiler: profile | None = profile(
            schedule=schedule(
                skip_first=self.first - warm_up, wait=0, warmup=warm_up, active=length, repeat=1
            ),
            on_trace_ready=self._write,
            acc_events=True,  # otherwise torch warns that a new cycle clears the recorded events
        )
        self._profiler.step_num = run.step + 1  # count steps as the run does
        self._profiler.start()

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def close(self, error: BaseException | None = None) -> None:
        """Stop, and write what was recorded if the run ended before the last recorded step."""
        run = self._run
        if self._profiler is None:
            return
        if error is not None:
            self._profiler.on_trace_ready = None
            # With several GPUs, stop() may hang, waiting for a collective with a dead rank.
            if run.world.world_size == 1 or run.world.device.type == "cpu":
                with suppress(Exception):
                    self._profiler.stop()
            return
        self._profiler.stop()
        if run.step < self.first:
            run.world.warn(
                f"debug.profile={run.config.debug.profile} recorded nothing: the run ended after "
                f"step {run.step}, and step {self.first} would have been the first; take more steps"
            )

    def _write(self, profiler: profile) -> None:
        """Write the trace and the table. The profiler calls it after the last recorded step."""
        run = self._run
        rank = run.world.rank
        on_gpu = run.world.device.type == "cuda"
        self._profiler = None
        folder = run.folder / "profile"
        path = folder / f"rank{rank:05d}_step_{self.first:08d}-{run.step:08d}"
        title = f"steps {self.first} to {run.step} of rank {rank} of {run.world.world_size}"
        with run.world.clock.hold("diagnostics"):
            try:
                folder.mkdir(exist_ok=True)
                profiler.export_chrome_trace(f"{path}.json.gz")
                table = profiler.key_averages().table(
                    sort_by="self_device_time_total" if on_gpu else "self_cpu_time_total",
                    row_limit=ROWS,
                    max_name_column_width=60,
                )
                Path(f"{path}_table.txt").write_text(f"{title}\n\n{table}")
                text = f"{path}.json.gz opens in ui.perfetto.dev; the table is next to it"
                run.world.say(f"profile  {title}\n         {text}")
                if on_gpu:
                    write_snapshot(run.folder, rank, f"step_{run.step:08d}_memory")
            except Exception as error:  # most likely a full disk, which must not end the run
                text = f"the profile could not be written: {in_one_line(error)}"
                print(f"warning: rank {rank}: {text}", file=sys.stderr, flush=True)
            run.world.wait_long()


def window(done: int, last_step: int, count: int) -> tuple[int, int]:
    """Returns (first, last) step to record, after step `done`; last < first if too few are left."""
    # At least one step after `done` comes first, for the profiler's warm-up.
    first = max(done + 2, min(done + FIRST_STEPS + WARM_UP_STEPS + 1, last_step - count + 1))
    return first, min(first + count - 1, last_step)


@contextmanager
def memory_history(folder: Path, world: World) -> Iterator[None]:
    """Record the GPU allocator's history in a with-block, and write it if memory runs out."""
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
    """Write this rank's GPU allocations and their history to RUN/profile."""
    path = folder / "profile" / f"rank{rank:05d}_{name}.pickle"
    path.parent.mkdir(exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))
    line = f"memory   snapshot of rank {rank}: {path}; open it at pytorch.org/memory_viz"
    print(line, flush=True)
