"""Out of memory, in one line: what was asked for, what the model and a micro-batch took, and what to lower to what.

To delete: this file and its line in train.py.
"""

import math
import os
import re
import resource
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dist_amp.errors import Failure
from dist_amp.fast.fused import local
from dist_amp.run import Run
from dist_amp.settings import Config
from dist_amp.telemetry.metrics import memory_bytes
from dist_amp.world import World

# What torch says besides torch.OutOfMemoryError: on the CPU, and where a library on a GPU allocates by itself.
_OUT_OF_MEMORY = re.compile(r"can't allocate memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED")

_ASKED_FOR = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)")

_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}

USABLE = 0.95  # the share of a device that a plan may fill; the rest is lost between blocks. Assumed.

MUCH = 0.05  # of a device: less is not worth a word


@dataclass(frozen=True)
class Shortage:
    """A rank as its memory ran out. Sizes are in bytes, of this rank, and measured, but for what is said of them."""

    world: World
    when: str
    capacity: int  # what this process may have
    peak: int  # the most that it has had
    asked_for: int  # on top of it; 0 where it is not known
    parameters: int  # with buffers; before the first step, as they will be
    gradients: int  # as they will be
    moments: int
    gradients_there: int  # as it ran out: in a first forward there may be none
    strategy: str  # as resolved
    micro_batch_size: int = 0  # 0: before the first step
    micro_batches: int = 1  # of a rank in a step
    global_batch_size: int = 0  # 0: not set, and accumulation_steps is what is
    checkpointed: bool = False  # the activations of all blocks
    offloaded: bool = False
    unused: int = 0  # what the allocator holds in pieces
    others: int = 0  # of the device, but not torch's: other processes, NCCL

    @property
    def on_gpu(self) -> bool:
        return self.world.device.type == "cuda"

    @property
    def state(self) -> int:
        """What the model takes while nothing is computed."""
        return self.parameters + self.gradients + self.moments

    @property
    def activations(self) -> int:
        """What a micro-batch took at least: the rest of what there was, and what it lacked."""
        there = self.parameters + self.moments + self.gradients_there
        return max(self.peak - there, 0) + self.asked_for if self.micro_batch_size else 0

    @property
    def sample(self) -> float:
        return self.activations / max(self.micro_batch_size, 1)

    @property
    def usable(self) -> float:
        return USABLE * self.capacity

    @property
    def fitting_micro_batch(self) -> int:
        """The largest micro-batch that fits beside the state, and divides a rank's samples of a step; 0 if none does.

        At most half of the present one, since the one that failed was not seen whole.
        """
        fits = min(self.micro_batch_size // 2, int(max(self.usable - self.state, 0) / max(self.sample, 1)))
        samples = self.micro_batch_size * self.micro_batches
        return max((count for count in range(1, fits + 1) if samples % count == 0), default=0)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether it says so, or came of one that does: compilers wrap what they meet."""
    if error is None:
        return False
    said = isinstance(error, torch.OutOfMemoryError) or _OUT_OF_MEMORY.search(str(error)) is not None
    return said or is_out_of_memory(error.__cause__)


def explain_memory(error: BaseException, config: Config, world: World, run: Run | None) -> BaseException:
    """The Failure that says how to make it fit, where memory ran out on this rank; any other error as it is."""
    if not is_out_of_memory(error):
        return error
    try:
        return Failure(message(shortage(error, config, world, run)))
    except RuntimeError:  # the device does not even answer
        return error


def message(short: Shortage) -> str:
    kind = "GPU memory" if short.on_gpu else "memory"
    asked = f"asked for {size(short.asked_for)} more than the {size(short.peak)} it took" if short.asked_for else ""
    took = f"parameters take {size(short.parameters)}, gradients {size(short.gradients)}, moments {size(short.moments)}"
    took = took if short.parameters else "there was no model yet"
    if short.micro_batch_size:
        process = "" if short.on_gpu else " and the process itself"
        took += f", a micro-batch of {short.micro_batch_size}{process} at least {size(short.activations)}"
        if not short.fitting_micro_batch:
            took += ", so that not even half of it fits" if short.micro_batch_size > 1 else ""
    if short.others > MUCH * short.capacity:
        took += f", and what is not torch's (other processes, NCCL) {size(short.others)}"
    return (
        f"rank {short.world.rank} ran out of {kind} {short.when}: {asked or 'it took ' + size(short.peak)}, of "
        f"{size(short.capacity)} there; {took}; use {', or '.join(ways_out(short))}"
    )


def ways_out(short: Shortage) -> list[str]:
    """What to set so that it takes less, with the numbers; the least costly first."""
    ways = []
    if short.unused > short.asked_for > 0:
        ways.append(
            f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment ({size(short.unused)} are unused, "
            "but in pieces)"
        )
    if count := short.fitting_micro_batch:
        same = f"train.accumulation_steps={short.micro_batch_size * short.micro_batches // count}"
        if short.global_batch_size:
            same = f"train.global_batch_size={short.global_batch_size}"
        was = short.micro_batch_size
        ways.append(f"train.micro_batch_size={count} in place of {was} (with {same} a step stays the same)")
    if short.micro_batch_size and not short.checkpointed:
        ways.append("parallel.activation_checkpointing=full")
    sharded = short.strategy in ("fsdp", "hsdp")
    if sharded and short.on_gpu and not short.offloaded and short.state > MUCH * short.capacity:
        ways.append(f"parallel.cpu_offload=true (the host holds {size(short.state)} of each rank then)")
    if not sharded and (ranks := ranks_to_hold(short)):
        over = f" over {ranks} ranks" if ranks > short.world.world_size else ""
        ways.append(f"parallel.strategy=fsdp{over} ({size(short.state / ranks)} of the model on each)")
    if short.micro_batch_size < 2:
        ways.append("a smaller model" + ", or more ranks" * sharded)
    return ways or ["a smaller model"]


def ranks_to_hold(short: Shortage) -> int:
    """How many ranks FSDP would take, at least those there are; 0 where it does not help, or helps by little."""
    room = short.usable - short.sample
    if room <= 0 or (not short.on_gpu and short.world.world_size == 1):
        return 0
    ranks = max(short.world.world_size, 2, math.ceil(short.state / room))
    return ranks if short.state * (1 - 1 / ranks) > MUCH * short.capacity else 0


def size(count: float) -> str:
    unit = next((name for name, bytes_in_it in _UNITS.items() if count >= bytes_in_it), "bytes")
    return f"{count / _UNITS[unit]:,.{0 if unit == 'bytes' else 2}f} {unit}"


def shortage(error: BaseException, config: Config, world: World, run: Run | None) -> Shortage:
    """What this rank, its device and the error say."""
    found = _ASKED_FOR.search(str(error))
    capacity, unused, others = capacity_of(world)
    facts: dict[str, Any] = {
        "world": world,
        "capacity": capacity,
        "peak": memory_bytes(world.device)[0],
        "asked_for": int(float(found[1]) * _UNITS[found[2]]) if found else 0,
        "checkpointed": config.parallel.activation_checkpointing == "full",
        "offloaded": config.parallel.cpu_offload,
        "unused": unused,
        "others": others,
    }
    if run is None:
        return Shortage(**facts, **model_in(error, config, world))
    plan, by_global = run.data.plan, config.train.accumulation_steps == "auto"
    evaluating = any(frame.f_code.co_name == "evaluate" for frame, _ in traceback.walk_tb(error.__traceback__))
    return Shortage(
        **facts,
        when=f"in the evaluation after step {run.step}" if evaluating else f"in step {run.step + 1}",
        **state_of(run),
        strategy=run.parallel.strategy,
        micro_batch_size=plan.micro_batch_size,
        micro_batches=plan.global_batch_size // (plan.micro_batch_size * plan.world_size),
        global_batch_size=0 if config.train.global_batch_size == "auto" or not by_global else plan.global_batch_size,
    )


def capacity_of(world: World) -> tuple[int, int, int]:
    """(what this process may have, what its allocator holds unused, what is not torch's), in bytes."""
    if world.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(world.device)
        reserved, allocated = torch.cuda.memory_reserved(world.device), torch.cuda.memory_allocated(world.device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(world.device))
        return min(allowed, free + reserved), reserved - allocated, total - free - reserved
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError, ValueError):  # no container's limit, or "max"
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    own = resource.getrlimit(resource.RLIMIT_AS)[0]
    shared = min(limits) // world.local_world_size
    return shared if own == resource.RLIM_INFINITY else min(shared, own), 0, 0


def state_of(run: Run) -> dict[str, Any]:
    """The bytes of the model and its training on this rank's device, by the names that Shortage has for them.

    Sharded ones by this rank's shards, which the optimizer holds even while a block's are gathered.
    """

    def on_device(tensors: Iterable[Any]) -> int:
        own = [local(tensor) for tensor in tensors if isinstance(tensor, Tensor)]
        return sum(t.numel() * t.element_size() for t in own if t.device == run.world.device)

    trained, module = run.parallel.parameters, run.parallel.module
    frozen = [p for p in module.parameters() if not p.requires_grad]
    gradients = on_device(trained)
    # DDP's buckets are there from the start, and gradients are views of them.
    there = gradients if run.parallel.strategy == "ddp" else on_device(p.grad for p in trained)
    return {
        "parameters": on_device([*trained, *frozen, *module.buffers()]),
        "gradients": gradients,
        "moments": on_device(tree_leaves(dict(run.optimizer.state))),
        "gradients_there": there,
    }


def model_in(error: BaseException, config: Config, world: World) -> dict[str, Any]:
    """What a model will take that was being built: the largest that the frames of the error hold, in float32."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    models = [held for frame in frames for held in frame.f_locals.values() if isinstance(held, nn.Module)]
    count = max((sum(p.numel() for p in model.parameters()) for model in models), default=0)
    # As build_run has resolved it, if it came so far.
    resolved = [frame.f_locals["strategy"] for frame in frames if "strategy" in frame.f_locals]
    strategy = resolved[0] if resolved else "single" if world.world_size == 1 else config.parallel.strategy
    each = 4 * count // (world.world_size if strategy in ("fsdp", "hsdp") else 1)
    moments = {"adamw": 2, "sgd": 1 if config.optim.momentum else 0}[config.optim.name]
    when = "before the first step" + (f", with a model of {count:,} parameters" if count else "")
    state = {"parameters": each, "gradients": each, "moments": moments * each, "gradients_there": 0}
    return {"when": when, "strategy": strategy, **state}
