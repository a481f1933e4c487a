"""The process around a run: how it starts and ends, and how a failure is reported once.

`supervise` reads from top to bottom. It joins the ranks, has the watchdog watch them, and does the
work: lifecycle.py locks the folder, handles signals (stop.py), builds or resumes the run, adds its
observers and writes the summary; train.py has the loop. An error is explained (explain.py, from the
run's `current_batch` and the error; watchdog.py, from what the ranks say of each other), printed by
the first rank that has one, left in RUN/summary.json, and turned into the exit status. Whatever
happens, workers and files are closed and the process groups left, before the last uploads.
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
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # set where torchrun keeps the store
WAIT_SECONDS = 3.0  # for ranks that fail at the same time; the rest fail once this one is gone

Ranks = AbstractContextManager[World]  # such as `world.start`
Work = Callable[[Job], int]


def supervise(config: Config, ranks: Ranks, work: Work, raises: bool = False) -> int:
    """Do the work of a job among the ranks; report what ends it; return the exit status.

    Errors: the error itself if `raises`, for its caller to show; else SystemExit.
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

                    watchdog = Watchdog(job, end=partial(end_failed, job=job)).start()
                status = work(job)
                job.close()
                world.barrier()  # while a rank that does not arrive can be named
                return status
            except BaseException as error:
                failure = explained(error, job, watchdog)
                job.status = end_failed(failure, job, is_shown=raises)
                if raises:
                    raise failure  # noqa: B904 (often the error itself, which is no cause of itself)
                raise SystemExit(job.status) from error
            finally:
                if watchdog is not None:
                    watchdog.leave()
                job.close()
    finally:  # this process has left its groups
        if watchdog is not None:
            watchdog.close()
        if job is not None:
            job.at_end()


def explained(error: BaseException, job: Job, watchdog: Any) -> BaseException:
    """A Failure that names the cause, where it is known."""
    error = as_failure(error)
    if present("supervise.explain"):
        from dist_amp.supervise.explain import explain_error

        error = explain_error(error, job)
    return error if watchdog is None else watchdog.explain(error)  # type: ignore[no-any-return]


def end_failed(error: BaseException, job: Job, is_shown: bool = False) -> int:
    """Print the error, unless it is shown elsewhere, and write the summary; the exit status."""
    run, folder = job.run, job.folder
    step = max(job.steps_taken, 0)
    status = getattr(error, "exit_code", 1)
    is_first = True
    if not is_shown:
        at_start = run is None or step == (run.resumed_from_step or 0)
        status, is_first = report_failure(error, job.world, step, at_start)
    if not is_first or folder is None:
        return status
    with suppress(OSError):  # the folder may not even be readable, or its disk hangs
        # A run that failed before it was built leaves the summary of an earlier one in place.
        if folder.is_dir() and (run is not None or not (folder / "summary.json").exists()):
            cause = cause_of(error, job.world.rank)
            in_time(10.0, lambda: write_summary(folder, run, "failed", status, cause))
    return status


def as_failure(error: BaseException) -> BaseException:
    """A ConfigError for a feature's file that the project does not have; any other unchanged."""
    if isinstance(error, ModuleNotFoundError) and str(error.name).startswith("dist_amp."):
        return ConfigError(missing(str(error.name).removeprefix("dist_amp.")))
    return error


def cause_of(error: BaseException, rank: int) -> str:
    """The error in one line, with rank and place unless it says itself what to do."""
    return str(error) if isinstance(error, Failure) else f"rank {rank}: {in_one_line(error)}"


def report_failure(
    error: BaseException, world: World | None, step: int = 0, at_start: bool = True
) -> tuple[int, bool]:
    """Print the error, unless another rank has printed its own: (exit status, was it the first).

    world: None before the ranks are connected. step: steps taken so far; at_start: none of them by
    this process. The launcher's restart depends on both.
    """
    rank = world.rank if world is not None else int(os.environ.get("RANK", "0"))
    if isinstance(error, Failure):
        status = error.exit_code
        text = f"error: {error}"
    else:
        status = 1
        text = masked(f"rank {rank}: " + "".join(traceback.format_exception(error)).rstrip())
    # A rank that timed out always reports: those that it waited for may not.
    waited = world is None and isinstance(error, Transient)
    is_first = waited or _is_first_to_report(world)
    if is_first:
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)
        facts = {"step": step, "at_start": at_start, "transient": isinstance(error, Transient)}
        tell_launcher(status, text, line=cause_of(error, rank), **facts)
    elif "TORCHELASTIC_ERROR_FILE" in os.environ:
        # torchrun shows only the first rank to exit, and then ends the rest.
        time.sleep(10)
    if rank == 0 and world is not None:
        _wait_for_reports(world.world_size)
    return status, is_first


def _is_first_to_report(world: World | None) -> bool:
    group: Any = dist.group.WORLD
    if world is None or group is None:
        # Before they connect, all ranks of a machine fail alike; other machines may not.
        return os.environ.get("LOCAL_RANK", "0") == "0"
    key = FAILURES
    if os.environ.get(AGENT_STORE) == "True":  # it outlives this attempt
        key += f"/{attempt()}"
    try:
        # Torch's store works where collectives do not.
        return in_time(5.0, lambda: bool(group.get_group_store().add(key, 1) == 1))
    except Exception:  # the store's host is dead or unreachable: two reports are better than none
        return True


def _wait_for_reports(ranks: int) -> None:
    """Keep rank 0's store alive, so that ranks that fail at the same time print one report."""
    group: Any = dist.group.WORLD
    if group is None or ranks == 1 or os.environ.get(AGENT_STORE) == "True":
        return
    deadline = time.monotonic() + WAIT_SECONDS
    with suppress(Exception):
        store = group.get_group_store()
        while store.add(FAILURES, 0) < ranks and time.monotonic() < deadline:
            time.sleep(0.05)
