"""One model on many ranks: single, DDP, FSDP2 or HSDP; gradient reduction and the global norm.

The training loop is the same for all strategies: each of them averages gradients over the ranks,
so `train_step` always divides the loss by the mean weight per rank.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dist_amp.config.auto import batch_statistics, replicas_of
from dist_amp.distributed.process import random_state, set_random_state
from dist_amp.precision import DTYPES, Precision
from dist_amp.settings import ParallelConfig, Strategy
from dist_amp.world import World, as_scalar


class SumOverRanks:
    """A scalar summed over all ranks, asynchronously. total: the sum, after a call of `mean`."""

    def __init__(self, value: Tensor, world: World):
        """value: this rank's term, scalar float32 on the device; the sum overwrites it."""
        self.total = value
        self._mean = value
        self._world = world
        self._work: Any = None
        if world.world_size > 1:
            self._work = dist.all_reduce(value, async_op=True)

    def mean(self) -> Tensor:
        """The mean over ranks. The first call waits for the sum; on a GPU only the stream waits."""
        if self._work is not None:
            previous = self._world.clock.enter("communication")
            self._work.wait()
            self._work = None
            self._mean = self.total / self._world.world_size
            self._world.clock.enter(previous)
        return self._mean

    @cached_property
    def inverse_mean(self) -> Tensor:
        return self.mean().reciprocal()


@dataclass
class Parallel:
    """A model placed on the ranks: whole, replicated or sharded."""

    strategy: Strategy
    module: nn.Module  # without DDP's wrapper
    model: nn.Module  # what the loop calls
    world: World
    # Called with whether to reduce gradients; the context of a micro-batch's forward and backward.
    gradient_sync: Callable[[bool], AbstractContextManager[Any]]
    state_device: torch.device  # of parameters and optimizer state: the CPU with cpu_offload
    replicas: int = 1  # how many ranks hold each gradient once it is reduced
    # {FSDP2 unit, or the root: whether it is resharded after its forward}
    reshards: dict[Any, bool] = field(default_factory=dict)
    parameters: list[nn.Parameter] = field(init=False)  # the trained ones

    def __post_init__(self) -> None:
        # Listed once: walking the modules takes 160 us.
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    @property
    def sharded(self) -> bool:
        """Whether each rank holds only a shard of every parameter."""
        return self.strategy in ("fsdp", "hsdp")

    def sum_over_ranks(self, values: Sequence[float | Tensor]) -> SumOverRanks:
        """Start summing all ranks' values in float32. values: one per micro-batch of this rank."""
        # Numbers are added on the host, which saves an operation on the device per micro-batch.
        total = sum(v.detach().float() if isinstance(v, Tensor) else v for v in values)
        return SumOverRanks(as_scalar(total, self.world.device), self.world)

    def global_grad_norm(self) -> Tensor:
        """Global L2 norm of the gradients: scalar float32 on state_device, equal on all ranks.

        inf or nan if any gradient on any rank is not finite. One all-reduce if gradients are
        sharded; none under DDP, where all ranks hold equal gradients. Also sets missing gradients,
        such as an idle expert's, to zeros. Source: Pascanu et al. 2013, arXiv:1211.5063.
        """
        gradients: list[Any] = []
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        if not self.sharded:
            return torch.linalg.vector_norm(norms_of(gradients))
        with torch.no_grad():  # else autograd would record to_local
            norms = norms_of([gradient.to_local() for gradient in gradients])
        square = norms.dot(norms).to(self.world.device, non_blocking=True)
        shards = self.world.world_size / self.replicas  # mean * shards = sum over one replica
        norm = (SumOverRanks(square, self.world).mean() * shards).sqrt()
        return norm.to(self.state_device)  # under CPU offload the host waits for it

    def zero_grad(self) -> None:
        """Set the gradients to None, without the profiler range of optimizer.zero_grad (17 us)."""
        for parameter in self.parameters:
            parameter.grad = None

    def restore_point(self) -> Callable[[], None]:
        """Copy the random state and the model's buffers; returns a function that restores them."""
        random = random_state(self.world.device)
        buffers = [
            (module, name, buffer, buffer.clone())
            for module in self.module.modules()
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        ]

        @torch.no_grad()
        def restore() -> None:
            for module, name, buffer, value in buffers:
                setattr(module, name, buffer)  # a forward may have assigned another tensor
                # Only changed values: expanded buffers can't be written, sparse ones not compared.
                if buffer.layout == torch.strided and not torch.equal(buffer, value):
                    buffer.copy_(value)
            set_random_state(random, self.world.device)

        return restore

    @contextmanager
    def no_side_effects(self) -> Iterator[None]:
        """Context that at its end restores the random state and buffers, and clears gradients."""
        restore = self.restore_point()
        try:
            yield
        finally:
            self.zero_grad()
            restore()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients; batch-norm statistics are averaged over the ranks.

        Ends with model.train(), which a model may override to keep parts in evaluation mode.
        """
        if self.world.world_size > 1:
            set_statistics(self.module, averaged_statistics(self.module, self.world))
        self.model.eval()
        for unit in self.reshards:
            # No backward follows to reshard the unit. While it is gathered, a task that writes to a
            # parameter would change the gathered copy, and lose the change.
            unit.set_reshard_after_forward(True, recurse=False)
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train()
            for unit, reshard in self.reshards.items():
                # An error may leave the unit gathered, and a checkpoint would save full tensors.
                unit.reshard()
                unit.set_reshard_after_forward(reshard, recurse=False)


@torch.no_grad()
def averaged_statistics(module: nn.Module, world: World) -> dict[str, Tensor]:
    statistics = batch_statistics(module).items()
    return {name: world.sum(statistic) / world.world_size for name, statistic in statistics}


@torch.no_grad()
def set_statistics(module: nn.Module, statistics: Mapping[str, Tensor]) -> None:
    for name, statistic in batch_statistics(module).items():
        statistic.copy_(statistics[name])


def norms_of(gradients: list[Tensor]) -> Tensor:
    """Each gradient's L2 norm: [len(gradients)] float32.

    One _foreach_norm takes 0.64 of the time of 52 calls, for 64 x 64 gradients on one core.
    """
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))


def build_parallel(
    config: ParallelConfig,
    strategy: Strategy,
    module: nn.Module,
    units: Sequence[nn.Module],
    precision: Precision,
    world: World,
) -> Parallel:
    """Place the module on the ranks. units: modules that FSDP2 gathers one by one, in model order.

    Build the optimizer after this call, because sharding replaces the parameters.
    """
    if strategy in ("fsdp", "hsdp"):
        return _shard(config, strategy, module, units, precision, world)
    if any(p.is_meta for p in module.parameters()):
        from dist_amp.scaling.meta import materialise

        materialise(module, world.device)
    module.to(world.device)
    if strategy == "ddp":
        return _replicate(config, module, world)
    nothing = nullcontext()
    return Parallel(strategy, module, module, world, lambda sync: nothing, world.device)


def _replicate(config: ParallelConfig, module: nn.Module, world: World) -> Parallel:
    """DDP: a full copy on each rank; gradients are averaged in buckets while backward runs."""
    from dist_amp.scaling.reduction import ZerosForUnused, fix_buckets, time_reduction

    with warnings.catch_warnings():
        # torch 2.13 deprecates this argument for one that 2.11 does not have.
        warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
        model = DistributedDataParallel(
            module,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # batch-norm statistics are averaged in `evaluating`
        )
    if config.comm_dtype != "off":
        hook = getattr(default_hooks, f"{config.comm_dtype}_compress_hook")
        model.register_comm_hook(None, hook)
    if world.world_size > 2:  # equal bits after a resume; two ranks' sums are equal in any order
        fix_buckets(model)
    time_reduction(model, world.clock)
    zero_unused = ZerosForUnused(model)

    def gradient_sync(sync: bool) -> AbstractContextManager[None]:
        if sync:
            return zero_unused  # gives unused parameters zero gradients
        return model.no_sync()  # around the forward too: DDP reads its flag there

    for parameter in module.parameters():  # tells Muon that the ranks can share its work
        parameter.is_replicated = True  # type: ignore[attr-defined]
    return Parallel("ddp", module, model, world, gradient_sync, world.device, world.world_size)


def _shard(
    config: ParallelConfig,
    strategy: Strategy,
    module: nn.Module,
    units: Sequence[nn.Module],
    precision: Precision,
    world: World,
) -> Parallel:
    """FSDP2: gathers a unit for its forward and backward; the root has all other parameters."""
    replicas = 1
    mesh = world.mesh((world.world_size,), ("shard",))
    if strategy == "hsdp":
        replicas = replicas_of(config, world)
        mesh = world.mesh((replicas, world.world_size // replicas), ("replicate", "shard"))
    policy = MixedPrecisionPolicy()
    if precision.cast_by == "policy":
        policy = MixedPrecisionPolicy(
            param_dtype=precision.dtype, reduce_dtype=DTYPES[config.reduce_dtype]
        )
    options: dict[str, Any] = {"mesh": mesh}
    state_device = world.device
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
        state_device = torch.device("cpu")
    if config.param_dtype == "bf16":  # as stored; the policy's param_dtype is that of computing
        for parameter in module.parameters():
            parameter.data = parameter.data.bfloat16()

    from dist_amp.scaling.blocks import is_embedding
    from dist_amp.scaling.meta import placement, register_fused_updates

    register_fused_updates()  # saves memory in the first optimizer step
    place = placement(module, world)  # a function that allocates a unit just before it is sharded
    # Reshard units after their forward, but not the last unit: its backward follows at once.
    reshards: dict[Any, bool] = {unit: unit is not units[-1] for unit in units}
    for unit in units:
        place(unit)
        sharded_unit = fully_shard(
            unit, reshard_after_forward=reshards[unit], mp_policy=policy, **options
        )
        if is_embedding(unit):  # its backward does not read the weight
            sharded_unit.set_unshard_in_backward(False)
    place(module)
    # Cast the model's output to float32, in which the loss is summed.
    if not config.bit_exact:  # bit_exact must equal DDP, which does not cast the output
        policy = replace(policy, output_dtype=torch.float32)
    # The root stays gathered, because backward begins with its parameters, such as a tied head's.
    model = fully_shard(module, mp_policy=policy, reshard_after_forward=False, **options)
    if hasattr(model, "set_reduce_scatter_unused_params"):  # since torch 2.13
        model.set_reduce_scatter_unused_params(True)
    # Issue a unit's all-gather before the previous unit computes, so that a slow host can't delay
    # it. No more units are gathered at once than by default. Source: torch's FSDPModule.
    sharded: list[Any] = [model, *units]
    for unit, following in pairwise(sharded):
        unit.set_modules_to_forward_prefetch([following])

    reshards[model] = False
    nothing = nullcontext()

    def gradient_sync(sync: bool) -> AbstractContextManager[None]:
        model.set_is_last_backward(sync)
        if config.accumulate_reduce != "every":  # "last" micro-batch of a step
            model.set_requires_gradient_sync(sync)
        elif strategy == "hsdp":  # reduce-scatter in each micro-batch, all-reduce in the last
            model.set_requires_all_reduce(sync)
        return nothing

    return Parallel(
        strategy, module, module, world, gradient_sync, state_device, replicas, reshards
    )
