"""How a failure is shown: once for all ranks, as the last lines on the screen, and in torchrun's own summary."""

import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch.distributed as dist

from dist_amp.errors import Failure
from dist_amp.fast.process_group import shared_store
from dist_amp.runtime.process import attempt
from dist_amp.runtime.rendezvous import in_time
from dist_amp.world import World


def report_failure(error: BaseException, world: World | None) -> tuple[int, bool]:
    """Print the error, unless another rank has already printed its own.

    A `Failure` gets its one line, anything else its traceback. world: None before the process group exists. Returns
    this process's exit status, and whether it was the first rank to fail, which is the one that prints.
    """
    planned = isinstance(error, Failure)
    rank = world.rank if world is not None else int(os.environ.get("RANK", "0"))
    text = f"error: {error}" if planned else f"rank {rank}: " + "".join(traceback.format_exception(error)).rstrip()
    first = _first_to_report(world)
    torchrun_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if first:
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)
        if torchrun_file:
            extra = {"timestamp": str(int(time.time()))}
            Path(torchrun_file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
    elif torchrun_file:
        time.sleep(10)  # torchrun shows the first rank that exits, and ends the others once the reporting one has
    return error.exit_code if isinstance(error, Failure) else 1, first


def _first_to_report(world: World | None) -> bool:
    if world is None or not dist.is_initialized():
        # Before the ranks are connected: all of a machine make the same mistake, maybe not all machines.
        return os.environ.get("LOCAL_RANK", "0") == "0"
    store, key = shared_store(), f"dist_amp/failures/{attempt()}"
    try:
        return in_time(5.0, lambda: store.add(key, 1) == 1)
    except Exception:  # the store's host is dead or unreachable: two reports are better than none
        return True
