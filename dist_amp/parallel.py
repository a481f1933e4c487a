"""One model over many ranks: single, DDP, FSDP2 or HSDP; when gradients are synchronised, and their global norm.

The strategies differ only here. All average gradients over the ranks, so the mean weight of the ranks is what a loss is
divided by in every one of them, and the loop reads the same.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dist_amp.config.validate import check_shardable, replicas_of
from dist_amp.fast.communication_time import time_gathers, time_reduction
from dist_amp.fast.fused import local
from dist_amp.fast.kernels import norms_of
from dist_amp.fast.missing_gradients import KNOWS_UNREDUCED, FinishReduction, ReduceEveryBlock
from dist_amp.fast.process_group import all_reduce_sum, reduce_options
from dist_amp.optimizers.ema import Ema
from dist_amp.precision import DTYPES, Precision, Scaler
from dist_amp.runtime.batch_statistics import averaged_statistics, set_statistics
from dist_amp.runtime.block_calls import BlockCalls
from dist_amp.runtime.initial_weights import Placement
from dist_amp.runtime.meta import materialise
from dist_amp.settings import ParallelConfig, Strategy
from dist_amp.world import World

NOTHING = nullcontext()
CARRIER = "dist_amp_weight_carrier"


class LossNormalizer:
    """Divides a step's loss by what counts in it, over all ranks and micro-batches: its total weight.

    A mean of means is biased when masks or tails are uneven. The total is known only once the ranks have summed their
    weights, and the forward does not wait for that: losses are divided by the expected weight, the larger of the last
    two steps' totals, which keeps fp16 in its range; `correction`, what is left, joins the loss scale.

    own_weight, weight: this rank's and the total of the last step, scalar float32. correction: the factor by which the
    gradients are still too large, scalar float32; None for one process, which knows its weight at once.
    carrier: under DDP, a scalar parameter outside module, optimizer and checkpoint. Its gradient is this rank's weight,
    so the sum over ranks travels in DDP's own buckets and costs no collective.
    """

    def __init__(self, world: World, carrier: nn.Parameter | None = None):
        self.carrier = carrier
        self.weight = torch.zeros((), device=world.device)
        self.correction: Tensor | None = None
        self._world = world
        self._world_size = torch.full((), float(world.world_size), device=world.device)
        self._totals = (self.weight, self.weight)  # of the last two steps, the later one last
        self._primed = world.world_size == 1
        self.own_weight = self._expected = self.weight

    def begin(self, own_weight: Tensor) -> None:
        """Begin a step; own_weight: this rank's, scalar float32."""
        if not self._primed:  # the first step alone sums the weights ahead of the forward
            total = self._world.sum(own_weight)
            self._totals, self._primed = (total, total), True
        self.own_weight = own_weight
        # Gradients are averaged over ranks, so a rank's loss is divided by the mean over ranks.
        self._expected = own_weight if self._world.world_size == 1 else torch.fmax(*self._totals) / self._world_size

    def normalize(self, loss: Tensor, is_last: bool) -> Tensor:
        """A micro-batch's loss sum as its part of the step's mean loss, up to `correction`."""
        loss = loss / self._expected
        if is_last and self.carrier is not None:
            loss = torch.addcmul(loss, self.carrier, self.own_weight)  # the carrier is 0: the loss keeps its value
        return loss

    def finish(self, total: Tensor, mean: Tensor) -> None:
        """Take the step's total weight, and its mean over ranks."""
        self.weight = total
        self._totals = (self._totals[1], total)
        self.correction = None if self._world.world_size == 1 else mean / self._expected

    def finish_from_carrier(self, scaler: Scaler) -> None:
        """Take the weight that came with DDP's gradients; the loss scale multiplied it too."""
        assert self.carrier is not None
        assert self.carrier.grad is not None
        mean, self.carrier.grad = self.carrier.grad, None
        mean = mean / scaler.scale_tensor if scaler.scales else mean
        self.finish(mean * self._world_size, mean)

    def state_dict(self) -> dict[str, Tensor]:
        """The last two steps' total weights, [2] float32: what the next step's are expected to be."""
        return {"weights": torch.stack(self._totals)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from the totals of a run with any number of ranks; zeros are those of a run before its first step."""
        before, last = state["weights"].to(self.weight.device).unbind()
        if torch.fmax(before, last) > 0:
            self._totals, self._primed = (before, last), True


class Parallel:
    """A model laid out over the ranks.

    model: what the loop calls; module: the same without DDP's wrapper. gradient_sync(on): the context around a
    micro-batch's forward and backward. parameters: those that are trained. replicas: ranks that hold the same gradient.
    state_device: where parameters and moments are: the device, unless offloaded. gradient_sums: None, or one
    float32 per parameter, to which each step adds the norms of the local gradients.
    """

    def __init__(
        self,
        strategy: Strategy,
        module: nn.Module,
        model: nn.Module,
        world: World,
        replicas: int = 1,
        gradient_sync: Callable[[bool], AbstractContextManager[Any]] = lambda on: NOTHING,
        state_device: torch.device | None = None,
        carrier: nn.Parameter | None = None,
    ):
        self.strategy = strategy
        self.module = module
        self.model = model
        self.world = world
        self.replicas = replicas
        self.gradient_sync = gradient_sync
        self.state_device = state_device or world.device
        self.carrier = carrier
        self.ema: Ema | None = None  # a moving average of the parameters
        self.parameters = [p for p in model.parameters() if p.requires_grad]  # walking the modules costs 160 us
        self._reduce_options = reduce_options() if world.world_size > 1 else None
        self.gradient_sums: Tensor | None = None
        # On the device: a number from the host costs an operation more than what it computes.
        self._ranks = torch.tensor([replicas, world.world_size], dtype=torch.float32, device=world.device)

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of every parameter."""
        return self.strategy in ("fsdp", "hsdp")

    @torch.no_grad()
    def global_grad_norm(self, normalizer: LossNormalizer, scaler: Scaler) -> Tensor:
        """Global L2 norm of the gradients as they are, still scaled: scalar float32 on the device, equal on every rank.

        inf or nan if any gradient on any rank is not finite. Tells the normalizer the step's total weight. One
        all-reduce of two numbers where gradients are sharded; none under DDP, where all ranks hold the same gradients.
        A missing gradient counts as zero. Source: Pascanu et al. 2013, arXiv:1211.5063.
        """
        gradients: list[Any] = [p.grad for p in self.parameters]
        if any(gradient is None for gradient in gradients):  # as of idle experts
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients = [p.grad for p in self.parameters]
        norms = norms_of([local(gradient) for gradient in gradients] if self.sharded else gradients)
        if self.gradient_sums is not None:
            self.gradient_sums += norms
        if self.carrier is not None:
            normalizer.finish_from_carrier(scaler)
        elif self._reduce_options is None:
            normalizer.finish(normalizer.own_weight, normalizer.own_weight)
        else:
            norms = norms.to(self.world.device)  # from the host, under CPU offload
            sums = torch.stack((norms.dot(norms), normalizer.own_weight))
            with self.world.clock.phase("communication"):
                all_reduce_sum(sums, self._reduce_options)
            square, mean_weight = (sums / self._ranks).unbind()
            normalizer.finish(sums[1], mean_weight)
            return square.sqrt()
        return torch.linalg.vector_norm(norms)

    def average_batch_statistics(self) -> None:
        """Make batch norm's running statistics equal on all ranks."""
        if self.world.world_size > 1:
            set_statistics(self.module, averaged_statistics(self.module, self.world))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode, without gradients, with batch statistics averaged over the ranks, and the EMA's weights."""
        self.average_batch_statistics()
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad(), self.ema.as_parameters() if self.ema else NOTHING:
                yield
        finally:
            for module, mode in modes:
                module.training = mode
                if isinstance(module, FSDPModule):
                    module.reshard()  # those that wait for a backward: a checkpoint would take them for others


def build_parallel(
    config: ParallelConfig,
    strategy: Strategy,
    module: nn.Module,
    units: Sequence[nn.Module],
    precision: Precision,
    world: World,
) -> Parallel:
    """Lay `module` out over the ranks. Build the optimizer after this: sharding replaces the parameters."""
    if strategy in ("fsdp", "hsdp"):
        return _shard(config, strategy, module, units, precision, world)
    module = materialise(module, world.device).to(world.device)
    return Parallel(strategy, module, module, world) if strategy == "single" else _replicate(config, module, world)


def _replicate(config: ParallelConfig, module: nn.Module, world: World) -> Parallel:
    """DDP: a full copy on each rank, gradients averaged in buckets while backward runs."""
    carrier = None
    if config.comm_dtype == "off" and KNOWS_UNREDUCED:  # elsewhere the weight travels with the norm: compressed, it
        # would not be exact, and a search for unused parameters does not find it in the model
        carrier = nn.Parameter(torch.zeros((), device=world.device))
        module.register_parameter(CARRIER, carrier)  # while DDP makes its buckets, and no longer
    order = [p for p in module.parameters() if p.requires_grad]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)  # 2.13's new name is unknown to 2.11
        model = DistributedDataParallel(
            module,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=not KNOWS_UNREDUCED,
            broadcast_buffers=False,  # a collective per forward for batch statistics alone; see `evaluating`
        )
    if carrier is not None:
        delattr(module, CARRIER)
    if config.comm_dtype != "off":
        hook = default_hooks.bf16_compress_hook if config.comm_dtype == "bf16" else default_hooks.fp16_compress_hook
        model.register_comm_hook(None, hook)

    time_reduction(model, order[-1] if carrier is None else carrier, world.clock)
    finish = FinishReduction(model, order)

    def gradient_sync(on: bool) -> AbstractContextManager[Any]:
        return finish if on else finish.no_sync()  # around the forward too: DDP reads its flag there

    return Parallel("ddp", module, model, world, world.world_size, gradient_sync, carrier=carrier)


def _shard(
    config: ParallelConfig,
    strategy: Strategy,
    module: nn.Module,
    units: Sequence[nn.Module],
    precision: Precision,
    world: World,
) -> Parallel:
    """FSDP2: each unit, such as a block, is gathered for its forward and backward; what remains is the root's own."""
    check_shardable(strategy, module, precision.cast_by == "policy")
    replicas = replicas_of(config, world) if strategy == "hsdp" else 1
    shape = (replicas, world.world_size // replicas) if strategy == "hsdp" else (world.world_size,)
    names = ("replicate", "shard") if strategy == "hsdp" else ("shard",)
    options: dict[str, Any] = {"mesh": world.mesh(shape, names)}
    policy = MixedPrecisionPolicy()
    if precision.cast_by == "policy":
        policy = MixedPrecisionPolicy(param_dtype=precision.dtype, reduce_dtype=DTYPES[config.reduce_dtype])
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    if config.param_dtype == "bf16":
        for parameter in module.parameters():
            parameter.data = parameter.data.bfloat16()
    placed = Placement(module, world)
    for unit in units:
        # The last one's backward comes first: gathering it again at once would be a waste.
        fully_shard(placed(unit), reshard_after_forward=unit is not units[-1], mp_policy=policy, **options)
    # The model's output alone is float32 again: the loss is summed in it.
    policy = replace(policy, output_dtype=torch.float32)
    # The root's own parameters, such as a tied head's, are not resharded after forward: backward begins with them.
    model = fully_shard(placed(module), mp_policy=policy, reshard_after_forward=False, **options)
    ReduceEveryBlock(model)
    time_gathers(model, world.clock)
    BlockCalls(module, units, world.rank)
    # A unit's all-gather is issued before the unit ahead of it computes, so that a slow host does not delay it; no more
    # units are gathered at once than by default, and backward's default is the same. Source: torch's FSDPModule.
    sharded: list[Any] = [model, *units]
    for one, following in pairwise(sharded):
        one.set_modules_to_forward_prefetch([following])

    @contextmanager
    def gradient_sync(on: bool) -> Iterator[None]:
        model.set_is_last_backward(on)
        if config.accumulate_reduce == "last":
            model.set_requires_gradient_sync(on)
        elif strategy == "hsdp":  # reduced within the shards every time, between the replicas once
            model.set_requires_all_reduce(on)
        yield

    state_device = torch.device("cpu") if config.cpu_offload else world.device
    return Parallel(strategy, module, module, world, replicas, gradient_sync, state_device)
