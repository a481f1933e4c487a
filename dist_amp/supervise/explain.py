"""Errors of torch, the loader and the disk as one line that names the cause and the fix: torch
reports these by tracebacks, often on every rank but the one with the cause.
"""

import errno
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from dist_amp.data import Batches
from dist_amp.errors import DataError, Failure, context_of, first_line, in_one_line
from dist_amp.loading.loader import samples_text
from dist_amp.supervise.lifecycle import Job
from dist_amp.supervise.out_of_memory import explain_memory

# The CPU's messages for an index beyond an embedding, a class beyond a loss, and a class beyond
# one_hot.
_OUT_OF_RANGE = re.compile(
    r"index out of range in self|Target -?\d+ is out of bounds|Class values must be"
)

_WORKER_DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) ([^.]*)")


def explain_error(error: BaseException, job: Job) -> BaseException:
    """A Failure for an error whose cause is known; any other unchanged."""
    splits: list[Batches | None] = []
    if job.run is not None:
        splits = [job.run.data, job.run.validation]
    error = explain_data(error, job.world.rank, splits)
    error = explain_memory(error, job.config, job.world, job.run)
    if job.folder is not None:
        error = explain_disk(error, job.folder)
    return error


def explain_disk(error: BaseException, folder: Path) -> BaseException:
    """A Failure for a full or read-only disk."""
    if not isinstance(error, OSError):
        return error
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return error
    path = error.filename or folder
    return Failure(
        f"{path} can't be written ({error.strerror}); free some space, and resume with --run.dir "
        f"{folder}"
    )


def explain_data(
    error: BaseException, rank: int, splits: Sequence[Batches | None] = ()
) -> BaseException:
    """A DataError for a dead loader worker, an index out of range or a missing column.

    splits: the batches of the training and the validation split, to name the samples of the
    micro-batch that failed: the one that `error_context(batch=...)` attached to the error.
    """
    for reported in (error.__context__, error):  # the first of two has the signal
        if died := _WORKER_DIED.match(str(reported)):
            how = died[2].replace("is killed", "was killed").strip()
            return DataError(
                f"rank {rank}: loader worker (pid {died[1]}) {how}; it may have run out of memory: "
                "lower data.workers, or check the kernel's log for what ended it"
            )
    batch = context_of(error).get("batch")
    if _OUT_OF_RANGE.match(str(error)) and (samples := _samples_of(batch, splits)):
        return DataError(
            f"rank {rank}: a token id or label is out of range in {samples}: {first_line(error)}; "
            "fix the data, or give the model that many embeddings or classes"
        )
    is_key = isinstance(error, KeyError) and error.args and isinstance(batch, Mapping)
    if is_key and isinstance(batch, Mapping) and error.args[0] not in batch:
        return DataError(
            f"rank {rank}: the task looks for {error.args[0]!r} in a batch that has "
            f"{', '.join(map(str, batch))} ({in_one_line(error)}); rename it there or in the "
            "dataset, or make such a batch in collate(samples)"
        )
    # Raised some kernels later, so the micro-batch is not known.
    if "device-side assert" in str(error):
        return DataError(
            f"rank {rank}: the GPU stopped at a device-side assert, typically a token id or label "
            "out of range; the same run with --run.device cpu names the samples"
        )
    return error


def _samples_of(batch: object, splits: Sequence[Batches | None]) -> str:
    """Which samples a micro-batch has, and of which split; "" if it is none of theirs."""
    for split in splits:
        if split is None:
            continue
        for other, indices in split.last_step:
            if other is batch:
                return f"{samples_text(indices)} of the {split.split} split"
    return ""
