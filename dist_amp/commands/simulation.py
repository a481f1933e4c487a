"""Predicts memory, traffic and time of a config's step, for ranks and a device that do not exist.

The real `train_step` runs under torch's FakeTensorMode, which computes only shapes, in a process
group whose collectives return at once. `ImaginedDevice` (imagined.py) counts its operations. Not
included: compiled blocks, bit-exact reductions, diagnostics.
"""

import copy
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only

from dist_amp.commands.devices import Device
from dist_amp.commands.imagined import (
    FlatGradients,
    ImaginedDevice,
    ImaginedWorld,
    as_on_gpu,
    without_values,
)
from dist_amp.config.auto import accumulation_steps, pick_cast
from dist_amp.config.memory import tensor_bytes
from dist_amp.config.validate import check_parallel
from dist_amp.errors import DataError, Failure, in_one_line
from dist_amp.loading.loader import Fetch
from dist_amp.loading.plan import Shard
from dist_amp.precision import DTYPES
from dist_amp.run import assemble, lay_out
from dist_amp.scaling.meta import materialise, register_fused_updates
from dist_amp.settings import Config, Strategy
from dist_amp.step import Run, train_step
from dist_amp.task import Task, attributes_of
from dist_amp.world import World, local

PHASES = ("forward", "backward", "optimizer")
# cuBLAS has a workspace per thread: forward's and backward's. Source: CUDABlas.cpp, for Hopper.
WORKSPACES = 2 * 32 * 2**20
USABLE = 0.95  # the share of a device's memory to plan for; fragmentation takes the rest. Assumed.


@dataclass
class StrategyPlan:
    """What a step needs of each rank under one strategy."""

    name: str
    memory: dict[str, int]  # {what is kept, such as "gradients": bytes}
    peaks: dict[str, int]  # {phase: bytes on the device}
    on_device: int  # the highest peak
    fits: bool  # into USABLE of the device; True if its memory is not known
    sent_bytes: float
    seconds: dict[str, float]  # computing, sending and the whole step; {} for an unknown GPU


# ---- the step


@dataclass(frozen=True)
class Job:
    """A config under one strategy.

    module: never changed; it is copied first. memory: bytes of a rank's device; 0: not known.
    """

    config: Config
    strategy: Strategy
    world: World
    task: Task
    module: nn.Module
    dataset: Any
    gpu: Device | None
    memory: int

    @property
    def micro_batches(self) -> int:
        return accumulation_steps(self.config.train, self.world.world_size)

    def batch(self) -> Any:
        """A micro-batch of the first samples, repeated if there are too few. Raises DataError."""
        size = self.config.train.micro_batch_size
        indices = tuple(index % len(self.dataset) for index in range(size))
        shard = Shard(indices, seed=self.config.run.seed)
        batch = Fetch(self.dataset, self.task, "training")[shard]
        if isinstance(batch, DataError):
            raise batch
        return batch


def simulate(job: Job) -> StrategyPlan:
    """Plan rank 0's second step and later ones. Each micro-batch has the shapes of `job.batch()`.

    Raises what training raises for its settings; those of the task; DataError for an
    operation that depends on values, since these tensors have none.
    """
    register_fused_updates()
    batch = job.batch()
    on_gpu = job.world.device.type == "cuda"
    device = ImaginedDevice(job.gpu, allocated=WORKSPACES if on_gpu else 0)
    # The optimizer's state and all gradients exist from the second step on, so that is measured.
    # All micro-batches after the second cost the same: measure steps of two and of three.
    sizes = [2, 3] if job.micro_batches > 2 else [job.micro_batches]
    steps = []
    with ExitStack() as modes:
        modes.enter_context(warnings.catch_warnings(action="ignore"))  # training prints them
        module = copy.deepcopy(job.module)
        modes.enter_context(without_values(job.world.world_size))
        modes.enter_context(device)
        modes.enter_context(device.watched())
        # Modules stay on the CPU, the device of all fake tensors.
        modes.enter_context(patch.object(nn.Module, "to", lambda module, *_, **__: module))
        if on_gpu:
            modes.enter_context(as_on_gpu())
        try:
            # All parameters and buffers become fake ones; tied ones stay tied.
            materialise(module, torch.device("cpu"), only_meta=False)
            for part in module.modules():
                for name, buffer in list(part.named_buffers(recurse=False)):
                    part._buffers[name] = fake_like(buffer)
            # Parameters that the task itself keeps, such as a teacher's, take memory as well.
            kept = tree_iter(attributes_of(job.task, job.module))
            beside_model = [fake_like(leaf) for leaf in kept if isinstance(leaf, nn.Parameter)]
            batches = [tree_map_only(Tensor, fake_like, batch) for _ in range(sizes[-1])]
            run = imagined_run(job, module)
            train_step(run, batches[:1])
            for size in sizes:
                device.forget()
                train_step(run, batches[:size])
                steps.append(device.counts)
        except Failure:
            raise
        except Exception as error:
            raise DataError(
                "plan runs the step on tensors without values, which this step does not allow: "
                f"{in_one_line(error)}"
            ) from error
        memory = memory_of(run)
        del beside_model
    # Add the further micro-batches: each costs the difference of the two measured steps.
    more = job.micro_batches - sizes[-1]
    first, last = steps[0], steps[-1]
    counts = {key: last[key] + more * (last[key] - first[key]) for key in last}
    peaks = dict(device.peaks)
    if run.parallel.sharded and job.config.parallel.cpu_offload:  # the host keeps the state
        on_host = sum(memory.values()) - memory["gradients"]
        peaks = {phase: peaks[phase] - on_host for phase in ("forward", "backward")}
    on_device = max(peaks.values())
    fits = not job.memory or on_device <= USABLE * job.memory
    computing = counts.pop("computing", 0.0)
    sent_bytes = sum(times * each.sent for each, times in counts.items())
    seconds = {}
    if job.gpu is not None:
        sending = sum(times * each.seconds(job.gpu, job.world) for each, times in counts.items())
        step = max(computing, sending)  # they overlap
        seconds = {"computing": computing, "sending": sending, "step": step}
    name = f"hsdp of {run.parallel.replicas}" if job.strategy == "hsdp" else job.strategy
    return StrategyPlan(name, memory, peaks, on_device, fits, sent_bytes, seconds)


def fake_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu")


def imagined_run(job: Job, module: nn.Module) -> Run:
    """A run on the CPU whose parameters have the shapes of rank 0's shards."""
    config, is_ddp = job.config, job.strategy == "ddp"
    quiet = replace(job.world, rank=1)  # rank 1 prints nothing
    cast = pick_cast(config.precision, job.strategy, module, quiet)
    check_parallel(config.parallel, job.strategy, cast, module, quiet)
    strategy: Strategy = "single" if is_ddp else job.strategy
    config = replace(
        config,
        parallel=replace(config.parallel, strategy=strategy, cpu_offload=False),
        compile=replace(config.compile, blocks=False),
    )
    world = ImaginedWorld(0, 0, job.world.world_size, job.world.local_world_size)
    laid_out_on = ImaginedWorld() if is_ddp else world
    precision, parallel = lay_out(config, job.task, module, laid_out_on)
    if is_ddp:
        gradients = FlatGradients(parallel.parameters, DTYPES.get(config.parallel.comm_dtype))
        parallel = replace(
            parallel,
            strategy="ddp",
            world=world,
            gradient_sync=gradients.gradient_sync,
            replicas=world.world_size,
        )
    return assemble(config, world, job.task, Path(), (precision, parallel))


def memory_of(run: Run) -> dict[str, int]:
    """{kind: bytes that this rank keeps}; gradients as they are at the update."""

    def size(tree: Any) -> int:
        return tensor_bytes(local(leaf) for leaf in tree_iter(tree) if isinstance(leaf, Tensor))

    module = run.parallel.module
    return {
        "parameters, buffers": size([*module.parameters(), *module.buffers()]),
        "gradients": size(run.parallel.parameters),
        "optimizer state": size(list(run.optimizer.state.values())),
        "moving average": size([getattr(observer, "tensors", {}) for observer in run.observers]),
    }
