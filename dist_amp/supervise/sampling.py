"""The sample of a finished run: what the task's sample(model) makes of the trained model."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule

from dist_amp.errors import in_one_line
from dist_amp.fast.compile import as_compiled_so_far
from dist_amp.run import Run


def write_sample(run: Run) -> None:
    """Write the task's sample, if it makes one; every rank calls it. What goes wrong is a warning: training is done."""
    if not hasattr(run.task, "sample"):
        return
    again = f"python -m dist_amp.sample {run.folder}"
    try:
        if run.parallel.sharded and (problem := does_not_fit(run)):
            run.world.say(f"no sample: {problem}; {again} makes one on one device")
            return
        with gathered(run), run.parallel.evaluating(), run.precision.autocast(), as_compiled_so_far():
            run.metrics.write_sample(run.step, run.task.sample(run.parallel.module))
    except Exception as error:
        run.world.warn(f"the task's sample(model) failed: {in_one_line(error)}; {again} tries again")


@contextmanager
def gathered(run: Run) -> Iterator[None]:
    """Keep a sharded model whole from its next forward on: a sample calls it once per token, and each would gather it.

    For the end of a run: afterwards every unit stays gathered between its forward and its backward.
    """
    units = [part for part in run.parallel.module.modules() if isinstance(part, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
    yield


def does_not_fit(run: Run) -> str:
    """Why the whole model can't be held beside the shards on some rank's device; "" if it can."""
    itemsize = run.precision.dtype.itemsize if run.precision.cast_by == "policy" else 4  # as it is gathered
    need = sum(p.numel() for p in run.parallel.module.parameters()) * itemsize
    free = min(row[0] for row in run.world.gather_numbers([free_bytes(run.world.device, run.world.local_world_size)]))
    if need <= free / 2:
        return ""
    return f"the whole model takes {need / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free beside its shards"


def free_bytes(device: torch.device, ranks: int) -> float:
    """Free memory of the device; of a host, this rank's share of what is free for all its ranks."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    with suppress(OSError, StopIteration):  # Linux's, with what the file cache would give back
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024 / ranks
    return math.inf
