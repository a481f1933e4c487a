"""Errors of torch, the loader, the memory and the disk as one line with the cause and the fix.

torch reports these by tracebacks, often on every rank but the one with the cause.
"""

import errno
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dist_amp.config.memory import (
    UNITS,
    USABLE,
    capacity_of,
    moments_per_parameter,
    size_text,
    tensor_bytes,
)
from dist_amp.data import Batches
from dist_amp.errors import DataError, Failure, context_of, first_line, in_one_line
from dist_amp.loading.loader import samples_text
from dist_amp.run import Run
from dist_amp.settings import Config
from dist_amp.supervise.lifecycle import Job
from dist_amp.telemetry.metrics import memory_use
from dist_amp.world import World, local

# The CPU's messages for an index beyond an embedding, a class beyond a loss or beyond one_hot.
_OUT_OF_RANGE = re.compile(
    r"index out of range in self|Target -?\d+ is out of bounds|Class values must be"
)

_WORKER_DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) ([^.]*)")

# The messages besides torch.OutOfMemoryError's: the CPU's, and those of libraries on a GPU.
_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)

_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)")

NEGLIGIBLE = 0.05  # of a device: smaller amounts are not mentioned


def explain_error(error: BaseException, job: Job) -> BaseException:
    """A Failure for an error whose cause is known; any other unchanged, as in all of these."""
    splits = (job.run.data, job.run.validation) if job.run is not None else ()
    error = explain_data(error, job.world.rank, [split for split in splits if split is not None])
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


def explain_data(error: BaseException, rank: int, splits: Sequence[Batches] = ()) -> BaseException:
    """A DataError for a dead loader worker, an index out of range or a missing column.

    splits: training and validation, to name the samples of the micro-batch that failed: the one
    that `error_context(batch=...)` attached to the error.
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
    is_key = isinstance(error, KeyError) and error.args
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


def _samples_of(batch: object, splits: Sequence[Batches]) -> str:
    """Which samples a micro-batch has, and of which split; "" if of none."""
    for split in splits:
        for other, indices in split.last_step:
            if other is batch:
                return f"{samples_text(indices)} of the {split.split} split"
    return ""


# --- out of memory


@dataclass(frozen=True)
class Shortage:
    """One rank when its memory ran out. Sizes are this rank's, in bytes; measured unless noted."""

    world: World
    when: str
    capacity: int  # what this process may use
    peak: int  # the most that it has used
    requested: int  # in addition; 0 if not known
    parameters: int = 0  # with buffers; before the first step, as they will be
    gradients: int = 0  # as they will be
    optimizer_state: int = 0
    gradients_allocated: int = 0  # at that moment: in a first forward there may be none
    strategy: str = "single"  # as resolved
    micro_batch_size: int = 0  # 0: before the first step
    micro_batches: int = 1  # of a rank in a step
    global_batch_size: int = 0  # 0: accumulation_steps is set instead
    checkpointing: str = "none"  # parallel.activation_checkpointing
    offloaded: bool = False
    unused: int = 0  # reserved by the allocator in fragments
    outside_torch: int = 0  # of the device: other processes, NCCL

    @property
    def on_gpu(self) -> bool:
        return self.world.device.type == "cuda"

    @property
    def state(self) -> int:
        """What the model and its training take between steps."""
        return self.parameters + self.gradients + self.optimizer_state

    @property
    def activations(self) -> int:
        """What a micro-batch takes at least: all the rest of the peak, and what was requested."""
        allocated = self.parameters + self.optimizer_state + self.gradients_allocated
        return max(self.peak - allocated, 0) + self.requested if self.micro_batch_size else 0

    @property
    def sample(self) -> float:
        return self.activations / max(self.micro_batch_size, 1)

    @property
    def fitting_micro_batch(self) -> int:
        """The largest that fits beside the state and divides a rank's samples of a step, or 0.

        At most half of the present one, because only a part of that was measured.
        """
        room = max(USABLE * self.capacity - self.state, 0)
        fits = min(self.micro_batch_size // 2, int(room / max(self.sample, 1)))
        samples = self.micro_batch_size * self.micro_batches
        return max((count for count in range(1, fits + 1) if samples % count == 0), default=0)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error or a cause is a lack of memory: compilers wrap the errors that they get."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or _OUT_OF_MEMORY.search(str(error)):
            return True
        error = error.__cause__
    return False


def explain_memory(
    error: BaseException, config: Config, world: World, run: Run | None
) -> BaseException:
    """A Failure that says which settings would fit, if memory ran out on this rank."""
    if not is_out_of_memory(error):
        return error
    try:
        return Failure(message(shortage(error, config, world, run)))
    except RuntimeError:  # the device does not answer any more
        return error


def message(short: Shortage) -> str:
    """All of it in one line."""
    kind = "GPU memory" if short.on_gpu else "memory"
    peak = size_text(short.peak)
    used = f"used {peak}"
    if short.requested:
        used = f"asked for {size_text(short.requested)} more than the {peak} in use"
    takes = "there was no model yet"
    if short.parameters:
        takes = (
            f"parameters take {size_text(short.parameters)}, gradients "
            f"{size_text(short.gradients)}, optimizer state {size_text(short.optimizer_state)}"
        )
    if short.micro_batch_size:
        process = "" if short.on_gpu else " and the process itself"
        takes += f", a micro-batch of {short.micro_batch_size}{process} at least "
        takes += size_text(short.activations)
        if not short.fitting_micro_batch and short.micro_batch_size > 1:
            takes += ", so that not even half of it fits"
    if short.outside_torch > NEGLIGIBLE * short.capacity:
        outside = size_text(short.outside_torch)
        takes += f", and memory outside torch (other processes, NCCL) {outside}"
    return (
        f"rank {short.world.rank} ran out of {kind} {short.when}: {used}, of "
        f"{size_text(short.capacity)} available; {takes}; use {', or '.join(suggestions(short))}"
    )


def suggestions(short: Shortage) -> list[str]:
    """The settings that take less memory, with their numbers, the least costly first."""
    settings = []
    if short.unused > short.requested > 0:
        settings.append(
            "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment "
            f"({size_text(short.unused)} are reserved but fragmented)"
        )
    if count := short.fitting_micro_batch:
        same = f"train.accumulation_steps={short.micro_batch_size * short.micro_batches // count}"
        if short.global_batch_size:
            same = f"train.global_batch_size={short.global_batch_size}"
        settings.append(
            f"train.micro_batch_size={count} instead of {short.micro_batch_size} (with {same} a "
            "step stays the same)"
        )
    if short.micro_batch_size and short.checkpointing != "full":
        less = "selective or full" if short.checkpointing == "none" else "full"
        settings.append(f"parallel.activation_checkpointing={less}")
    is_sharded = short.strategy in ("fsdp", "hsdp")
    can_offload = is_sharded and short.on_gpu and not short.offloaded
    if can_offload and short.state > NEGLIGIBLE * short.capacity:
        moved = size_text(short.state)
        settings.append(f"parallel.cpu_offload=true (which moves {moved} of each rank to the host)")
    if not is_sharded and (ranks := ranks_needed(short)):
        over = f" over {ranks} ranks" if ranks > short.world.world_size else ""
        share = size_text(short.state / ranks)
        settings.append(f"parallel.strategy=fsdp{over} ({share} of the model on each)")
    if short.micro_batch_size < 2 or not settings:
        more_ranks = ", or more ranks" if is_sharded else ""
        settings.append(f"a smaller model{more_ranks}")
    return settings


def ranks_needed(short: Shortage) -> int:
    """How many ranks FSDP needs, at least the present number; 0 if it does not help, or hardly."""
    room = USABLE * short.capacity - short.sample
    if room <= 0 or (not short.on_gpu and short.world.world_size == 1):
        return 0
    ranks = max(short.world.world_size, 2, math.ceil(short.state / room))
    return ranks if short.state * (1 - 1 / ranks) > NEGLIGIBLE * short.capacity else 0


def shortage(error: BaseException, config: Config, world: World, run: Run | None) -> Shortage:
    """What this rank, its device and the error report."""
    requested = 0
    if match := _REQUESTED.search(str(error)):
        requested = int(float(match[1]) * UNITS[match[2]])
    capacity, unused, outside_torch = capacity_of(world)
    short = Shortage(
        world,
        when="before the first step",
        capacity=capacity,
        peak=memory_use(world.device)[0],
        requested=requested,
        checkpointing=str(config.parallel.activation_checkpointing),
        offloaded=config.parallel.cpu_offload,
        unused=unused,
        outside_torch=outside_torch,
    )
    context = context_of(error)
    if run is not None:
        return _in_a_run(short, config, run, "evaluation" in context)
    if "parameters" not in context:
        return short
    # What a model of so many parameters will take, in float32; frozen ones have no gradients.
    strategy = context["strategy"]
    share = world.world_size if strategy in ("fsdp", "hsdp") else 1
    gradients = 4 * context["trained"] // share
    return replace(
        short,
        when=f"{short.when}, with a model of {context['parameters']:,} parameters",
        parameters=4 * context["parameters"] // share,
        gradients=gradients,
        optimizer_state=moments_per_parameter(config.optim) * gradients,
        strategy=strategy,
    )


def _in_a_run(short: Shortage, config: Config, run: Run, evaluating: bool) -> Shortage:
    """The same with what the run takes on this rank's device.

    Of sharded tensors this rank's shards, which the optimizer holds even while a block is gathered.
    """

    def on_device(tensors: Iterable[Any]) -> int:
        shards = [local(tensor) for tensor in tensors if isinstance(tensor, Tensor)]
        return tensor_bytes(shard for shard in shards if shard.device == run.world.device)

    plan = run.data.plan
    module = run.parallel.module
    trained = run.parallel.parameters
    states = [value for state in run.optimizer.state.values() for value in state.values()]
    gradients = on_device(trained)
    # DDP allocates its buckets at the start, and gradients are views of them.
    allocated = gradients
    if run.parallel.strategy != "ddp":
        allocated = on_device(p.grad for p in trained)
    global_batch_size = 0
    if config.train.global_batch_size != "auto" and config.train.accumulation_steps == "auto":
        global_batch_size = plan.global_batch_size
    when = f"in the evaluation after step {run.step}" if evaluating else f"in step {run.step + 1}"
    frozen = (p for p in module.parameters() if not p.requires_grad)
    return replace(
        short,
        when=when,
        parameters=on_device([*trained, *frozen, *module.buffers()]),
        gradients=gradients,
        optimizer_state=on_device(states),
        gradients_allocated=allocated,
        strategy=run.parallel.strategy,
        micro_batch_size=plan.micro_batch_size,
        micro_batches=plan.global_batch_size // (plan.micro_batch_size * plan.world_size),
        global_batch_size=global_batch_size,
    )
