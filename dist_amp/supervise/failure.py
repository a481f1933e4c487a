"""How a run fails: the cause is named, printed once for all ranks, last on the screen, and left in summary.json."""

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist

from dist_amp.errors import Failure, in_one_line
from dist_amp.runtime.process import attempt
from dist_amp.runtime.rendezvous import in_time
from dist_amp.runtime.terminal import in_colour
from dist_amp.settings import Config
from dist_amp.supervise.explain import explain_data, explain_disk
from dist_amp.supervise.job import Supervised
from dist_amp.supervise.out_of_memory import explain_memory
from dist_amp.supervise.watchdog import RankWatchdog
from dist_amp.telemetry.summary import write_summary
from dist_amp.world import World


@contextmanager
def supervised(config: Config, world: World) -> Iterator[Supervised]:
    """Report whatever ends the block, and close the run.

    Errors: SystemExit with the exit status, so that `world.start` around it does not wait for the other ranks. The
    failure is reported here because this needs the store that `world.start` closes.
    """
    job = Supervised(config, world)
    watchdog = RankWatchdog(job, end=partial(_print_and_write, job=job))
    try:
        yield job
    except BaseException as error:
        raise SystemExit(_report(error, job, watchdog)) from error
    finally:
        watchdog.close()
        if job.run is not None:
            job.run.data.close()
            job.run.metrics.close()


def _report(error: BaseException, job: Supervised, watchdog: RankWatchdog) -> int:
    """Name the cause, print it and write the summary; return the exit status."""
    world, run, folder = job.world, job.run, job.folder
    splits = (run.data, run.validation) if run is not None else ()
    if run is not None:
        with suppress(Exception):
            run.metrics.write_pending(run.config.train.steps)
    error = explain_data(error, world.rank, splits)
    error = explain_memory(error, job.config, world, run)
    if folder is not None:
        error = explain_disk(error, folder)
    return _print_and_write(watchdog.explain(error), job)


def _print_and_write(error: BaseException, job: Supervised) -> int:
    """Print the error and write the summary, if this is the first rank to fail; return the exit status."""
    world, run, folder = job.world, job.run, job.folder
    if run is not None:
        run.metrics.close_console()
    status, first = report_failure(error, world, job.store, run.step if run is not None else 0)
    with suppress(OSError):  # the folder may not even be readable
        # A run that failed before it was built leaves the summary of an earlier one in place.
        keeps = run is None and folder is not None and (folder / "summary.json").exists()
        if first and folder is not None and folder.is_dir() and not keeps:
            write_summary(folder, run, "failed", status, cause_of(error, world.rank))
    return status


def cause_of(error: BaseException, rank: int) -> str:
    """The error in one line, with the rank and the place unless it says itself what to do."""
    return str(error) if isinstance(error, Failure) else f"rank {rank}: {in_one_line(error)}"


def report_failure(
    error: BaseException,
    world: World | None,
    store: dist.Store | None = None,  # type: ignore[name-defined]
    step: int = 0,
) -> tuple[int, bool]:
    """Print the error, unless another rank has already printed its own.

    A `Failure` gets its one line, anything else its traceback. world, store: None before the ranks are connected. step:
    how many steps were taken, for the launcher, which restarts nothing that fails again with no step between.
    Returns this process's exit status, and whether it was the first rank to fail, which is the one that prints.
    """
    planned = isinstance(error, Failure)
    rank = world.rank if world is not None else int(os.environ.get("RANK", "0"))
    text = f"error: {error}" if planned else f"rank {rank}: " + "".join(traceback.format_exception(error)).rstrip()
    first = _first_to_report(world, store)
    torchrun_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if first:
        sys.stdout.flush()
        shown = f"{in_colour('error:', 'red', sys.stderr)} {error}" if planned else text
        over = "\r\033[K" if sys.stderr.isatty() else ""  # rank 0's progress line may be there
        print(f"{over}{shown}", file=sys.stderr, flush=True)
        if torchrun_file:
            extra = {"timestamp": str(int(time.time())), "step": step, "line": cause_of(error, rank)}
            unfinished = Path(f"{torchrun_file}.tmp")  # torchrun fails on a file that a killed rank left half written
            unfinished.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
            unfinished.replace(torchrun_file)
    elif torchrun_file:
        time.sleep(10)  # torchrun shows the first rank that exits, and ends the others once the reporting one has
    return error.exit_code if isinstance(error, Failure) else 1, first


def _first_to_report(world: World | None, store: dist.Store | None) -> bool:  # type: ignore[name-defined]
    if world is None or store is None:
        # Before the ranks are connected: all of a machine make the same mistake, maybe not all machines.
        return os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        return in_time(5.0, lambda: store.add(f"dist_amp/failures/{attempt()}", 1) == 1)
    except Exception:  # the store's host is dead or unreachable: two reports are better than none
        return True
