"""torch's record of the collectives that this rank has entered; empty without its private names."""

import json
import os
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

DUMPS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}

# A backend's timeout names no rank, so the watchdog, which does, comes first. Assumed: 15 s.
MARGIN_SECONDS = 60.0

# torch's own default; 1 MB as JSON. Measured on one gloo rank: 4 to 5 us per collective.
RECORDED_COLLECTIVES = 2000

# torch ends a process whose NCCL threads give no sign for this long; its default in 2.11 to 2.13.
HEARTBEAT_SECONDS = 480


def watched_timeout(timeout_seconds: float) -> timedelta:
    """The process groups' timeout, after the watchdog's; sets torch's own supervision to match."""
    seconds = timeout_seconds + MARGIN_SECONDS
    # Variables that are set stay. What torch records of collectives is read by the watchdog, and
    # its check of NCCL's threads, which ends the process, has to come last.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED_COLLECTIVES))
    last = max(HEARTBEAT_SECONDS, int(seconds) + 60)
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(last))
    return timedelta(seconds=seconds)


def dump() -> dict[str, Any]:
    """{"nccl": ..., "gloo": ...}: all that is recorded, oldest first; 2,000 entries take 84 ms.

    Empty where this build of torch has no such recorder.
    """
    contents = {}
    for name, function in DUMPS.items():
        read = getattr(getattr(torch._C, "_distributed_c10d", None), function, None)
        with suppress(Exception):  # another signature or format
            if read is not None:
                contents[name] = json.loads(read(True, False))
    return contents
