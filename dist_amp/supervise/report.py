"""The `with` block around a run: whatever ends it, the cause is named, printed once, and left in summary.json."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dist_amp.errors import Failure, in_one_line
from dist_amp.run import Run
from dist_amp.settings import Config
from dist_amp.supervise.explain import explain_data, explain_disk
from dist_amp.supervise.failure import report_failure
from dist_amp.supervise.out_of_memory import explain_memory
from dist_amp.supervise.watchdog import RankWatchdog
from dist_amp.telemetry.summary import write_summary
from dist_amp.world import World


@dataclass
class Supervised:
    """What is known of the run so far; the block sets each field as soon as it has it."""

    config: Config
    world: World
    folder: Path | None = None
    run: Run | None = None


@contextmanager
def supervised(config: Config, world: World) -> Iterator[Supervised]:
    """Report whatever ends the block, and close the run.

    Errors: SystemExit with the exit status, so that `world.start` around it does not wait for the other ranks. The
    failure is reported here because this needs the store that `world.start` closes.
    """
    job, watchdog = Supervised(config, world), RankWatchdog(world)
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
    splits = [run.data, run.validation] if run is not None else []
    if run is not None:
        with suppress(Exception):
            run.metrics.write_pending(run.config.train.steps)
    error = explain_data(error, world.rank, [split for split in splits if split is not None])
    error = explain_memory(error, job.config, world, run)
    if folder is not None:
        error = explain_disk(error, folder)
    error = watchdog.explain(error)
    status, first = report_failure(error, world)
    with suppress(OSError):  # the folder may not even be readable
        # A run that failed before it was built leaves the summary of an earlier one in place.
        keeps = run is None and folder is not None and (folder / "summary.json").exists()
        if first and folder is not None and folder.is_dir() and not keeps:
            cause = str(error) if isinstance(error, Failure) else f"rank {world.rank}: {in_one_line(error)}"
            write_summary(folder, run, "failed", status, cause)
    return status
