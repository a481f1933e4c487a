"""Errors of torch, the loader and the disk as one line that names the cause and the fix.

torch reports these by tracebacks, often on every rank but the one with the cause. To delete: this file, and its lines
in failure.py.
"""

import errno
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from dist_amp.data import Batches
from dist_amp.errors import DataError, Failure, context_of, first_line, in_one_line
from dist_amp.runtime.loader import samples_text

# The CPU's messages for an index beyond an embedding, a class beyond a loss, and a class beyond one_hot.
_OUT_OF_RANGE = re.compile(r"index out of range in self|Target -?\d+ is out of bounds|Class values must be")

_WORKER_DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) ([^.]*)")


def explain_disk(error: BaseException, folder: Path) -> BaseException:
    """A Failure for a full or read-only disk; any other error unchanged."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return error
    path = error.filename or folder
    return Failure(f"{path} can't be written ({error.strerror}); free some space, and resume with --run.dir {folder}")


def explain_data(error: BaseException, rank: int, splits: Sequence[Batches | None] = ()) -> BaseException:
    """A DataError for a dead loader worker or an index out of range; any other error unchanged.

    splits: the batches of the training and the validation split, to name the samples of the micro-batch that failed:
    the one that `error_context(batch=...)` attached to the error.
    """
    for reported in (error.__context__, error):  # the first of two has the signal
        if died := _WORKER_DIED.match(str(reported)):
            how = died[2].replace("is killed", "was killed").strip()
            return DataError(
                f"rank {rank}: loader worker (pid {died[1]}) {how}; it may have run out of memory: lower data.workers, "
                "or check the kernel's log for what ended it"
            )
    if _OUT_OF_RANGE.match(str(error)):
        failed = context_of(error).get("batch")
        for split in filter(None, splits):
            for batch, indices in split.handed_out:
                if batch is failed:
                    return DataError(
                        f"rank {rank}: a token id or label is out of range in {samples_text(indices)} of the "
                        f"{split.split} split: {first_line(error)}; fix the data, or give the model that many "
                        "embeddings or classes"
                    )
    batch = context_of(error).get("batch")
    if isinstance(error, KeyError) and error.args and isinstance(batch, Mapping) and error.args[0] not in batch:
        return DataError(
            f"rank {rank}: the task looks for {error.args[0]!r} in a batch that has {', '.join(map(str, batch))} "
            f"({in_one_line(error)}); rename it there or in the dataset, or make such a batch in collate(samples)"
        )
    if "device-side assert" in str(error):  # raised some kernels later, so the micro-batch is not known
        return DataError(
            f"rank {rank}: the GPU stopped at a device-side assert, typically a token id or label out of range; "
            "the same run with --run.device cpu names the samples"
        )
    return error
