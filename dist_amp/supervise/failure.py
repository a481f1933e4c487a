"""What is said when a run fails: once for all ranks, last on the screen, and by torchrun too."""

import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch.distributed as dist

from dist_amp.errors import Failure
from dist_amp.runtime.process import attempt
from dist_amp.runtime.rendezvous import in_time
from dist_amp.world import World


def report_failure(error: BaseException, world: World | None) -> tuple[int, bool]:
    """Say what went wrong, once for all ranks and last on the screen.

    Returns this process's exit status, and whether it was the first to fail, hence the one that spoke.

    A `Failure` is the user's to mend and gets its one line; anything else gets its traceback.
    """
    planned = isinstance(error, Failure)
    rank = world.rank if world is not None else int(os.environ.get("RANK", "0"))
    text = f"error: {error}" if planned else f"rank {rank}: " + "".join(traceback.format_exception(error)).rstrip()
    first = _first_to_report(world)
    if first:
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)
        _tell_torchrun(text)
    elif "TORCHELASTIC_ERROR_FILE" in os.environ:
        time.sleep(10)  # torchrun shows the first to exit, and ends us once the rank that reports has
    return error.exit_code if isinstance(error, Failure) else 1, first


def _first_to_report(world: World | None) -> bool:
    if world is None or not dist.is_initialized():
        # Found before the ranks met: the same mistake on all of a machine, perhaps not on all machines.
        return os.environ.get("LOCAL_RANK", "0") == "0"
    store, key = dist.distributed_c10d._get_default_store(), f"dist_amp/failures/{attempt()}"
    try:
        return in_time(5.0, lambda: store.add(key, 1) == 1)
    except Exception:  # the store is gone with its host, or cut off: better said twice than not at all
        return True


def _tell_torchrun(text: str) -> None:
    """Hand torchrun the message for its own last lines."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
