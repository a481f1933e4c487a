"""What an error is about, in one line: a rank that is gone or hangs, a loader worker, an index, the disk.

torch tells of these by tracebacks on all ranks but the one that matters. To delete: this file and its line in train.py.
"""

import errno
import re
import traceback
from collections.abc import Sequence
from pathlib import Path

from dist_amp.data import Batches, samples_text
from dist_amp.errors import DataError, Failure, first_line


def explain_disk(error: BaseException, folder: Path) -> BaseException:
    """A full or read-only disk in one line; other errors as they are."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return error
    what = error.filename or folder
    return Failure(f"{what} can't be written ({error.strerror}); free some space, and go on with --run.dir {folder}")


# What torch says on the CPU of an index into an embedding, a class of a loss, and a class of one_hot.
_OUT_OF_RANGE = re.compile(r"index out of range in self|Target -?\d+ is out of bounds|Class values must be")

_WORKER_DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) ([^.]*)")


def explain_data(error: BaseException, rank: int, batches: Sequence[Batches] = ()) -> BaseException:
    """The DataError that names what an error of torch's is about: a loader worker that died, which may surface
    anywhere, or an index out of range in one of the `batches` at work; any other error as it is.
    """
    for told in (error.__context__, error):  # what came first knows the signal
        if died := _WORKER_DIED.match(str(told)):
            how = died[2].replace("is killed", "was killed").strip()
            return DataError(
                f"rank {rank}: loader worker (pid {died[1]}) {how}; it may have run out of memory: lower data.workers, "
                "or look for what ended it in the kernel's log"
            )
    if _OUT_OF_RANGE.match(str(error)) and (indices := _in_hand(error, batches)):
        return DataError(
            f"rank {rank}: a token id or label is out of range in {samples_text(indices)}: {first_line(error)}; mend "
            "the data, or give the model that many embeddings or classes"
        )
    if "device-side assert" in str(error):  # told of some kernels later
        return DataError(
            f"rank {rank}: the GPU stopped at a device-side assert, as it does at a token id or label out of range; "
            "the same run with --run.device cpu names the samples"
        )
    return error


def _in_hand(error: BaseException, batches: Sequence[Batches]) -> tuple[int, ...]:
    """The samples of the micro-batch that was worked on as the error arose: the one that a frame of it holds.

    So the loop need not note which one that is.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for held in frame.f_locals.values():
            for batch, indices in (pair for one in batches for pair in one.handed_out):
                if held is batch:
                    return indices
    return ()
