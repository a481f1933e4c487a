"""Out of memory, as one line: what was requested, what the model and a micro-batch take, and which
settings would fit.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
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
from dist_amp.errors import Failure, context_of
from dist_amp.run import Run
from dist_amp.settings import Config
from dist_amp.telemetry.metrics import memory_use
from dist_amp.world import World, local

# The messages besides torch.OutOfMemoryError's: the CPU's, and those of libraries that allocate on
# a GPU themselves.
_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)

_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)")

NEGLIGIBLE = 0.05  # of a device: smaller amounts are not mentioned


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
        """The largest micro-batch that fits in addition to the state and divides a rank's samples
        of a step, or 0.

        At most half of the present one, because only a part of that was measured.
        """
        fits = min(
            self.micro_batch_size // 2,
            int(max(USABLE * self.capacity - self.state, 0) / max(self.sample, 1)),
        )
        samples = self.micro_batch_size * self.micro_batches
        return max((count for count in range(1, fits + 1) if samples % count == 0), default=0)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error or one of its causes is a lack of memory: compilers wrap the errors that
    they get.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or _OUT_OF_MEMORY.search(str(error)):
            return True
        error = error.__cause__
    return False


def explain_memory(
    error: BaseException, config: Config, world: World, run: Run | None
) -> BaseException:
    """A Failure that says which settings would fit, if memory ran out on this rank; any other error
    unchanged.
    """
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
        settings.append(
            f"parallel.cpu_offload=true (which moves {size_text(short.state)} of each rank to the "
            "host)"
        )
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
    if "parameters" in context:
        return _in_build_run(
            short, config, context["parameters"], context["trained"], context["strategy"]
        )
    return short


def _in_a_run(short: Shortage, config: Config, run: Run, evaluating: bool) -> Shortage:
    """The same with what the run takes on this rank's device.

    Of sharded tensors this rank's shards, which the optimizer holds even while a block is gathered.
    """

    def on_device(tensors: Iterable[Any]) -> int:
        shards = [local(tensor) for tensor in tensors if isinstance(tensor, Tensor)]
        return tensor_bytes(shard for shard in shards if shard.device == run.world.device)

    plan = run.data.plan
    trained = run.parallel.parameters
    frozen = [p for p in run.parallel.module.parameters() if not p.requires_grad]
    buffers = run.parallel.module.buffers()
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
    return replace(
        short,
        when=when,
        parameters=on_device([*trained, *frozen, *buffers]),
        gradients=gradients,
        optimizer_state=on_device(states),
        gradients_allocated=allocated,
        strategy=run.parallel.strategy,
        micro_batch_size=plan.micro_batch_size,
        micro_batches=plan.global_batch_size // (plan.micro_batch_size * plan.world_size),
        global_batch_size=global_batch_size,
    )


def _in_build_run(
    short: Shortage, config: Config, parameters: int, trained: int, strategy: str
) -> Shortage:
    """The same with what a model of so many parameters will take, in float32; frozen ones have no
    gradients.
    """
    share = short.world.world_size if strategy in ("fsdp", "hsdp") else 1
    each = 4 * trained // share
    return replace(
        short,
        when=f"before the first step, with a model of {parameters:,} parameters",
        parameters=4 * parameters // share,
        gradients=each,
        optimizer_state=moments_per_parameter(config.optim) * each,
        strategy=strategy,
    )
