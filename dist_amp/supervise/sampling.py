"""The samples of a run: what the task's sample(model) makes of the model, at every evaluation and at the end.

A sample costs what the task's sample(model) takes, on all ranks at once; throughput leaves it out. It changes nothing:
random numbers, buffers and modes are as before, so a run without sample() takes the same steps.
To delete: this file, its lines in callbacks.py and lifecycle.py.
"""

import inspect
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dist_amp.checkpoint.state import no_side_effects
from dist_amp.errors import DataError, in_one_line
from dist_amp.fast.compile import as_compiled_so_far
from dist_amp.fast.gathered import gathered
from dist_amp.run import Run
from dist_amp.runtime.random_state import seed_all
from dist_amp.task import Task


def write_sample(run: Run, said: str = "") -> str:
    """Write the task's sample, if it makes one; every rank calls it. What goes wrong is a warning, and the run goes on.

    All samples of a run are drawn from the same random numbers, on every rank: they show how the model changed.
    said: a warning that is not repeated. Returns the warning, or "".
    """
    if not hasattr(run.task, "sample"):
        return ""
    again = f"python -m dist_amp.sample {run.folder}"
    try:
        if not (problem := does_not_fit(run) if run.parallel.sharded else ""):
            began = time.perf_counter()
            sample = checked(take_sample(run))
            run.metrics.write_sample(run.step, sample, about_of(run.task))
            where = "text" if isinstance(sample, str) else "images"
            run.world.say(f"sample {run.step:>5}  {time.perf_counter() - began:.1f} s; see TensorBoard's {where}")
            return ""
        warning = f"no sample: {problem}; {again} makes one on one device"
    except Exception as error:
        warning = f"the task's sample(model) failed: {in_one_line(error)}; {again} tries again"
    if warning != said:
        run.world.warn(warning)
    return warning


def take_sample(run: Run) -> Any:
    """What the task's sample(model) returns, in evaluation mode; it leaves no trace in the run."""
    module = run.parallel.module
    with no_side_effects(run), run.parallel.evaluating(), gathered(module), as_compiled_so_far():
        seed_all(run.config.run.seed)
        with run.precision.autocast():
            return run.task.sample(module)  # type: ignore[attr-defined]


def show_sample(run: Run) -> None:
    """Print the last sample, if it is a text, on rank 0; write one first, if no evaluation did after the last step."""
    if run.metrics.evaluated_step < run.step:
        write_sample(run)
    if run.metrics.sample:
        run.world.say(f"\nsample:\n{run.metrics.sample}\n")


def checked(sample: Any) -> str | Tensor:
    """A sample as a text, or as an image [H, W, C] of bytes on the host. Errors: DataError for anything else."""
    if isinstance(sample, str):
        return sample
    if not isinstance(sample, Tensor) or sample.dim() != 3 or len(sample) not in (1, 3, 4):
        what = list(sample.shape) if isinstance(sample, Tensor) else type(sample).__name__
        raise DataError(f"the task's sample(model) returned {what}; return text, or an image [1, 3 or 4, H, W] in 0..1")
    return (sample.detach().float().nan_to_num().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu()


def about_of(task: Task) -> str:
    """What a sample shows: the first line of the method's docstring."""
    return (inspect.getdoc(task.sample) or "what the task's sample(model) returned").splitlines()[0]  # type: ignore[attr-defined]


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
