"""How a run fails: the cause is printed once for all ranks, last, and left in summary.json."""

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

import torch.distributed as dist

from dist_amp.distributed.process import attempt, in_time, tell_launcher
from dist_amp.errors import ConfigError, Failure, Transient, in_one_line, masked
from dist_amp.files import missing, present
from dist_amp.settings import Config
from dist_amp.supervise.lifecycle import Job, write_summary
from dist_amp.telemetry.startup import Startup
from dist_amp.world import World

Ranks = AbstractContextManager[World]  # such as `world.start`


@contextmanager
def supervised(config: Config, ranks: Ranks, raises: bool = False) -> Iterator[Job]:
    """Report what ends the block, close the run. Errors: SystemExit, or it if `raises`."""
    startup = Startup()
    with ExitStack() as ended, ExitStack() as last, ranks as world, ExitStack() as contexts:
        job = Job(config, world, raises=raises)
        startup.lap("rendezvous")
        job.startup = startup
        ended.callback(lambda: job.at_end())
        job.store = dist.HashStore()  # type: ignore[attr-defined]
        if dist.group.WORLD is not None:
            job.store = dist.group.WORLD.get_group_store()  # works where collectives do not
        contexts.callback(job.close)
        watchdog = None
        if present("supervise.watchdog"):
            from dist_amp.supervise.watchdog import Watchdog

            watchdog = Watchdog(job, end=lambda error: _end_failed(error, job))
            last.callback(watchdog.close)
            contexts.enter_context(watchdog)
        try:
            yield job
            job.close()
            world.barrier()  # while a rank that does not arrive can be named
        except BaseException as error:
            explained = as_failure(error)
            if present("supervise.explain"):
                from dist_amp.supervise.explain import explain_error

                explained = explain_error(explained, job)
            if watchdog is not None:
                explained = watchdog.explain(explained)
            job.status = _end_failed(explained, job)
            if raises:
                raise explained  # noqa: B904 (often the error itself, which is no cause of itself)
            raise SystemExit(job.status) from error


def _end_failed(error: BaseException, job: Job) -> int:
    """Print the error and write the summary, if it is the first rank's; return the exit status."""
    run = job.run
    folder = job.folder
    step = max(job.steps_taken, 0)
    at_start = run is None or step == (run.resumed_from_step or 0)
    if job.raises:
        status = getattr(error, "exit_code", 1)
        is_first = True
    else:
        status, is_first = report_failure(error, job.world, job.store, step, at_start)
    with suppress(OSError):  # the folder may not even be readable, or its disk hangs
        # A run that failed before it was built leaves the summary of an earlier one in place.
        keeps = run is None and folder is not None and (folder / "summary.json").exists()
        if is_first and folder is not None and folder.is_dir() and not keeps:
            cause = cause_of(error, job.world.rank)
            in_time(10.0, lambda: write_summary(folder, run, "failed", status, cause))
    return status


def as_failure(error: BaseException) -> BaseException:
    """A ConfigError in place of an import of a feature that the project does not have."""
    if isinstance(error, ModuleNotFoundError) and str(error.name).startswith("dist_amp."):
        return ConfigError(missing(str(error.name).removeprefix("dist_amp.")))
    return error


def cause_of(error: BaseException, rank: int) -> str:
    """The error in one line, with rank and place unless it says itself what to do."""
    return str(error) if isinstance(error, Failure) else f"rank {rank}: {in_one_line(error)}"


def report_failure(
    error: BaseException,
    world: World | None,
    store: dist.Store | None = None,  # type: ignore[name-defined]
    step: int = 0,
    at_start: bool = True,
) -> tuple[int, bool]:
    """Print the error, unless another rank has printed its own: (exit status, was it the first).

    world, store: None before the ranks are connected. step: how many were taken; at_start: none of
    them by this process. By these the launcher decides on a restart.
    """
    rank = world.rank if world is not None else int(os.environ.get("RANK", "0"))
    if isinstance(error, Failure):
        status = error.exit_code
        text = f"error: {error}"
    else:
        status = 1
        text = masked(f"rank {rank}: " + "".join(traceback.format_exception(error)).rstrip())
    # A rank that waited in vain says so itself: others may be what it waited for.
    waited = world is None and isinstance(error, Transient)
    is_first = waited or _is_first_to_report(world, store)
    if is_first:
        sys.stdout.flush()
        start = ""
        if sys.stderr.isatty():
            start = "\r\033[K"  # over rank 0's progress line
        print(start + text, file=sys.stderr, flush=True)
        facts = {"step": step, "at_start": at_start, "transient": isinstance(error, Transient)}
        tell_launcher(status, text, line=cause_of(error, rank), **facts)
    elif "TORCHELASTIC_ERROR_FILE" in os.environ:
        # torchrun shows the first rank that exits, and ends the others once that one has.
        time.sleep(10)
    return status, is_first


def _is_first_to_report(world: World | None, store: dist.Store | None) -> bool:  # type: ignore[name-defined]
    if world is None or store is None:
        # Before the ranks are connected, all of a machine make the same mistake, maybe not all
        # machines.
        return os.environ.get("LOCAL_RANK", "0") == "0"
    key = "dist_amp/failures"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # it outlives this attempt
        key += f"/{attempt()}"
    try:
        return in_time(5.0, lambda: store.add(key, 1) == 1)
    except Exception:  # the store's host is dead or unreachable: two reports are better than none
        return True
