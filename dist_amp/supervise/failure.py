"""The start and end of a training process. If many ranks fail, one of them reports the failure.

`supervise` is the outermost function of the process, and reads from top to bottom:
1. It joins the process groups and starts the watchdog's thread (watchdog.py).
2. It calls `work`: run_job (lifecycle.py) locks the folder, handles signals (stop.py), builds or
   resumes the run, calls the training loop (train.py) and writes RUN/summary.json.
3. After an error, it looks for the cause: a known error of a library (explain.py), or a rank that
   is dead or hangs (watchdog.py). The first rank to fail, by a counter in torch's store, prints the
   error and writes it to RUN/summary.json. The type of the error determines the exit status.
4. In any case it closes workers and files, leaves the process groups, then awaits the last uploads.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch.distributed as dist

from dist_amp.distributed.process import attempt, in_time, tell_launcher
from dist_amp.errors import ConfigError, Failure, Transient, in_one_line, masked
from dist_amp.files import missing, present
from dist_amp.settings import Config
from dist_amp.supervise.lifecycle import Job, write_summary
from dist_amp.telemetry.startup import Startup
from dist_amp.world import World

FAILURES = "dist_amp/failures"  # in torch's store: how many ranks have failed
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True" if torchrun serves the store, not rank 0
WAIT_SECONDS = 3.0  # for ranks that fail at the same time; the others fail when rank 0 exits

Ranks = AbstractContextManager[World]  # joins the ranks, such as `world.start`
Work = Callable[[Job], int]


def supervise(config: Config, ranks: Ranks, work: Work, raises: bool = False) -> int:
    """Join the ranks and call work(job); returns its exit status. Reports an error once.

    Raises SystemExit with the error's exit status; if `raises`, the error itself, not printed.
    """
    job: Job | None = None
    watchdog: Any = None
    startup = Startup()
    try:
        with ranks as world:
            startup.lap("rendezvous")
            job = Job(config, world, startup)
            try:
                if present("supervise.watchdog"):
                    from dist_amp.supervise.watchdog import Watchdog

                    watchdog = Watchdog(job, end=partial(close_failed, job=job)).start()
                status = work(job)
                job.close()
                world.barrier()  # while the watchdog can still report a rank that does not arrive
                return status
            except BaseException as error:
                failure = explained(error, job, watchdog)
                job.status = close_failed(failure, job, is_raised=raises)
                if raises:
                    raise failure  # noqa: B904 (often `error` itself: no cause to chain)
                raise SystemExit(job.status) from error
            finally:
                if watchdog is not None:
                    watchdog.leave()
                job.close()
    finally:  # this process has left its process groups
        if watchdog is not None:
            watchdog.close()
        if job is not None:
            job.at_end()


def explained(error: BaseException, job: Job, watchdog: Any) -> BaseException:
    """A Failure with the cause of the error, if the cause is known; else the error."""
    error = as_failure(error)
    if present("supervise.explain"):
        from dist_amp.supervise.explain import explain_error

        error = explain_error(error, job)
    return error if watchdog is None else watchdog.explain(error)  # type: ignore[no-any-return]


def close_failed(error: BaseException, job: Job, is_raised: bool = False) -> int:
    """Print the error, unless it `is_raised`, and write the summary; returns the exit status."""
    run, folder = job.run, job.folder
    status = getattr(error, "exit_code", 1)
    is_first = True
    if not is_raised:
        at_start = run is None or job.steps_taken == (run.resumed_from_step or 0)
        status, is_first = report_failure(error, job.world, at_start)
    if not is_first or folder is None:
        return status
    with suppress(OSError):  # the folder is unreadable, or its disk hangs (TimeoutError)
        # Before the run is built, a failure does not replace the summary of an earlier start.
        if folder.is_dir() and (run is not None or not (folder / "summary.json").exists()):
            cause = f"rank {job.world.rank}: {in_one_line(error)}"
            if isinstance(error, Failure):
                cause = str(error)
            in_time(10.0, lambda: write_summary(folder, run, "failed", status, cause))
    return status


def as_failure(error: BaseException) -> BaseException:
    """A ConfigError for an import of a feature that this project lacks; other errors unchanged."""
    if isinstance(error, ModuleNotFoundError) and str(error.name).startswith("dist_amp."):
        return ConfigError(missing(str(error.name).removeprefix("dist_amp.")))
    return error


def report_failure(
    error: BaseException, world: World | None, at_start: bool = True
) -> tuple[int, bool]:
    """Print the error if this rank is the first to fail. Returns (exit status, whether it was).

    world: None before the ranks are connected. at_start: whether this process took no step; a first
    restart by `dist_amp launch` then needs a Transient error.
    """
    rank = world.rank if world is not None else int(os.environ.get("RANK", "0"))
    if isinstance(error, Failure):
        status = error.exit_code
        text = f"error: {error}"
    else:
        status = 1
        text = masked(f"rank {rank}: " + "".join(traceback.format_exception(error)).rstrip())
    # A rank that timed out while connecting always reports: the ranks that it waited for may not.
    timed_out = world is None and isinstance(error, Transient)
    is_first = timed_out or _is_first_to_report(world)
    if is_first:
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)
        is_transient = isinstance(error, Transient)
        tell_launcher(status, text, at_start=at_start, transient=is_transient)
    elif "TORCHELASTIC_ERROR_FILE" in os.environ:
        # torchrun shows the error of the rank that exits first, which must be the one that printed.
        time.sleep(10)
    if rank == 0 and world is not None:
        _wait_for_reports(world.world_size)
    return status, is_first


def _is_first_to_report(world: World | None) -> bool:
    group: Any = dist.group.WORLD
    if world is None or group is None:
        # Without a store, one rank per machine reports: before they connect, all fail alike.
        return os.environ.get("LOCAL_RANK", "0") == "0"
    key = FAILURES
    if os.environ.get(AGENT_STORE) == "True":  # torchrun's store outlives a restart of the ranks
        key += f"/{attempt()}"
    try:
        # The store answers even if collectives hang or fail.
        return in_time(5.0, lambda: bool(group.get_group_store().add(key, 1) == 1))
    except Exception:  # the store is dead or unreachable: two reports are better than none
        return True


def _wait_for_reports(world_size: int) -> None:
    """Keep rank 0, which serves the store, alive until all ranks that fail now have counted."""
    group: Any = dist.group.WORLD
    if group is None or world_size == 1 or os.environ.get(AGENT_STORE) == "True":
        return
    deadline = time.monotonic() + WAIT_SECONDS
    with suppress(Exception):
        store = group.get_group_store()
        while store.add(FAILURES, 0) < world_size and time.monotonic() < deadline:
            time.sleep(0.05)
