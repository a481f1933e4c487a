"""Writes the output of the task's sample(model), after every evaluation and at the end of the run.

Docs: docs/recipes.md
"""

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from dist_amp.config.memory import capacity_of, size_text
from dist_amp.distributed.process import seed_all
from dist_amp.errors import DataError, in_one_line
from dist_amp.files import write_durably
from dist_amp.parallel import Parallel
from dist_amp.run import Run
from dist_amp.scaling.compile import stance
from dist_amp.telemetry.metrics import memory_use
from dist_amp.telemetry.observer import Observer


class Sampling(Observer):
    """Writes a sample after each evaluation, each time with the same random seed."""

    def __init__(self, run: Run):
        self._run = run

    def after_evaluation(self) -> None:
        write_sample(self._run)


def show_sample(run: Run) -> None:
    if run.metrics.evaluated_step < run.step:
        write_sample(run)
    if run.metrics.sample:
        run.world.say(f"\nsample:\n{run.metrics.sample}\n")


def write_sample(run: Run) -> None:
    """Write the task's sample, or warn that it failed; every rank calls it."""
    command = f"python -m dist_amp.sample {run.folder}"
    task: Any = run.task
    parallel = run.parallel
    try:
        if parallel.sharded:
            check_memory(run)
        began = time.perf_counter()
        compiled = stance("eager_on_recompile")
        # Sampling must not change the run: random states, buffers and training mode are restored.
        with parallel.no_side_effects(), run.evaluating(), gathered(parallel), compiled:
            seed_all(run.config.run.seed)
            with run.precision.autocast():
                sample = as_text_or_image(task.sample(parallel.module))
        if run.world.is_main:
            keep_sample(run, sample)
    except Exception as error:
        problem = in_one_line(error)
        run.world.warn(f"the task's sample(model) failed: {problem}; {command} tries again")
        return
    seconds = time.perf_counter() - began
    where = "text" if isinstance(sample, str) else "images"
    run.world.say(f"sample {run.step:>5}  {seconds:.1f} s; see TensorBoard's {where}")


def keep_sample(run: Run, sample: str | Tensor) -> None:
    metrics = run.metrics
    if isinstance(sample, Tensor):
        image = sample.numpy()
        metrics.write_to_tensorboard(
            lambda writer: writer.add_image("sample", image, run.step, dataformats="HWC")
        )
        return
    metrics.sample = printable(sample)
    write_durably(run.folder / "sample.txt", metrics.sample)
    about = inspect.getdoc(run.task.sample) or "what the task's sample(model) returned"  # type: ignore[attr-defined]
    text = f"**step {run.step}**: {about.splitlines()[0]}\n```\n{metrics.sample}\n```"
    metrics.write_to_tensorboard(lambda writer: writer.add_text("sample", text, run.step))


def printable(text: str) -> str:
    """The text with control characters replaced, which a terminal would execute."""
    shown = (c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return "".join(shown)


def as_text_or_image(sample: Any) -> str | Tensor:
    """A sample as text, or as an image: uint8 [H, W, C] on the host. Raises DataError."""
    if isinstance(sample, str):
        return sample
    if not isinstance(sample, Tensor) or sample.dim() != 3 or len(sample) not in (1, 3, 4):
        what = list(sample.shape) if isinstance(sample, Tensor) else type(sample).__name__
        raise DataError(
            f"the task's sample(model) returned {what}; return text, or an image [1, 3 or 4, H, W] "
            "in 0..1"
        )
    values = sample.detach().float().nan_to_num().clamp(0, 1) * 255
    return values.round().byte().permute(1, 2, 0).cpu()


def check_memory(run: Run) -> None:
    """Raises DataError if a rank lacks memory for the whole model, besides its shards."""
    itemsize = run.precision.dtype.itemsize if run.precision.cast_by == "policy" else 4
    needed = sum(p.numel() for p in run.parallel.module.parameters()) * itemsize
    free_here = capacity_of(run.world)[0] - memory_use(run.world.device)[1]
    free = min(run.world.gather(free_here))
    if needed > free / 2:
        raise DataError(
            f"the whole model takes {size_text(needed)} besides its shards, and only "
            f"{size_text(free)} are free"
        )


@contextmanager
def gathered(parallel: Parallel) -> Iterator[None]:
    """All-gather FSDP2's parameters once for a with-block: sampling calls the model per token."""
    try:
        for unit in parallel.reshards:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield
    finally:
        for unit, reshards in parallel.reshards.items():
            unit.set_reshard_after_forward(reshards, recurse=False)
