"""One model over many ranks: single, DDP, FSDP2 or HSDP; when gradients travel, their norm, and sums over ranks.

The strategies differ only here. All divide the summed gradients by the number of ranks, so that the mean weight of the
ranks is what a loss is divided by in every one of them, and the loop reads the same.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from dist_amp.config.validate import replicas_of
from dist_amp.errors import ConfigError, DataError
from dist_amp.fast.fused import local
from dist_amp.fast.process_group import all_reduce_sum, reduce_options
from dist_amp.precision import DTYPES, Precision
from dist_amp.settings import ParallelConfig, Strategy
from dist_amp.world import World

# float32 parameter, gradient and AdamW's two moments.
BYTES_PER_PARAMETER = 16

NOTHING = nullcontext()


@dataclass(frozen=True)
class Totals:
    """What a step comes to over all ranks: scalars float32 on the device, the same on every rank."""

    norm: Tensor
    """Global L2 norm of the unscaled gradients. inf or nan if any gradient on any rank is not finite."""
    weight: Tensor
    """What the loss sum of all ranks is divided by."""
    divisor: Tensor
    """What the gradients, as they are, are divided by to be unscaled."""


class Parallel:
    """A model laid out over the world.

    `model` is what the loop calls; `module` is the same without a wrapper around it.
    """

    def __init__(
        self,
        strategy: Strategy,
        module: nn.Module,
        model: nn.Module,
        world: World,
        replicas: int,
        sync: Callable[[bool], AbstractContextManager[Any]],
        state_device: torch.device,
    ):
        self.strategy = strategy
        self.module = module
        self.model = model
        self.world = world
        self.world_size = world.world_size
        self.device = world.device
        self.replicas = replicas  # ranks that hold the same gradient
        self.state_device = state_device  # where parameters and moments live: the device, unless offloaded
        self.gradient_sync = sync  # gradient_sync(on): the context around a micro-batch's forward and backward
        self._unchecked = True
        # The total weights of the step before the last one, and of the last; 0 before the first.
        self._last_weights = (torch.zeros((), device=world.device),) * 2
        self._expects = False
        self._world = torch.full((), float(world.world_size), device=world.device)
        self._reduce_options = reduce_options()
        # On the device: a number from the host costs an operation more than what it computes.
        self._ranks = torch.tensor([replicas, world.world_size], dtype=torch.float32, device=world.device)
        self._parameters = [p for p in model.parameters() if p.requires_grad]  # walking the modules costs 160 us

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, on every rank; the tensor itself is left as it is."""
        if self.world_size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def zero(self) -> Tensor:
        return torch.zeros((), device=self.device)

    def expected_weight(self, own: Tensor) -> Tensor:
        """The mean over ranks of the step's weight, as far as it is known before `totals`; equal on every rank.

        The larger of the last two steps' totals: after an epoch's short end, or a step that counted for nothing, comes
        a whole one. So a step begins without waiting for the other ranks; and losses are divided by about what they are
        to be divided by, which keeps fp16 in its range. own: this rank's, which is the mean of one process.
        """
        if self.world_size == 1:
            return own
        if not self._expects:
            total = self.sum(own)
            self.expect(torch.stack((total, total)))
        return torch.fmax(*self._last_weights) / self._world

    @property
    def weights(self) -> Tensor:
        """What `expect` takes, to go on from here: [2] float32, the last two steps' totals, the later one last.

        Checkpoints have had the larger of the two in the first place, which comes to the same: the larger of the pair
        is what the next step is expected to have, and the last step's alone counts for the one after that.
        """
        return torch.stack(self._last_weights)

    def expect(self, weights: Tensor) -> None:
        """Go on from the total weights of before, whatever number of ranks had them."""
        before, last = weights.to(self.device).unbind()
        self._last_weights = (before, last)
        self._expects = True

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of every parameter."""
        return self.strategy in ("fsdp", "hsdp")

    @torch.no_grad()
    def totals(self, own_weight: Tensor, expected: Tensor, precision: Precision) -> Totals:
        """What the step comes to, by one sum over the world of two numbers: the squared norm and the weight.

        The sum carries the verdict on inf and nan too, in DDP as well, where one that arises on one rank after the
        reduction would otherwise be known there alone. expected: the weight that the losses were divided by.
        """
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        # DDP sends nothing on while a gradient is missing, in later steps too: each rank would apply its own.
        if self._unchecked or (self.strategy == "ddp" and len(gradients) < len(self._parameters)):
            self._unchecked = False
            self._check_all_have_gradients()
        if self.sharded:
            gradients = [local(gradient) for gradient in gradients]
        norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).to(self.device)
        if self.world_size == 1:
            self._last_weights = (self._last_weights[1], own_weight)
            norm = torch.linalg.vector_norm(norms)
            return Totals(norm / precision.scale if precision.scales else norm, own_weight, precision.scale)
        sums = torch.stack((norms.dot(norms), own_weight))
        all_reduce_sum(sums, self._reduce_options)
        _, weight = sums.unbind()
        square, mean_weight = (sums / self._ranks).unbind()
        divisor = mean_weight / expected
        if precision.scales:
            divisor *= precision.scale
        self._last_weights = (self._last_weights[1], weight)
        return Totals(square.sqrt() / divisor, weight, divisor)

    def _check_all_have_gradients(self) -> None:
        """Errors: DataError for a parameter that the loss does not depend on."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                raise DataError(
                    f"rank {self.world.rank}: the parameter {name} gets no gradient from the task's loss; use it in "
                    "every step, or set requires_grad=False"
                )

    def batch_statistics(self) -> dict[str, Tensor]:
        """The running means and variances that each rank gathers from its own batches, by their names in the state."""
        return {
            f"{path}.{name}".lstrip("."): statistic
            for path, module in self.module.named_modules()
            if isinstance(module, _NormBase)
            for name in ("running_mean", "running_var")
            if (statistic := getattr(module, name)) is not None
        }

    @torch.no_grad()
    def averaged_statistics(self) -> dict[str, Tensor]:
        """The same, averaged over all ranks; the module's own stay as they are."""
        return {name: self.sum(own) / self.world_size for name, own in self.batch_statistics().items()}

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Make batch statistics equal on all ranks, for evaluation."""
        averages = self.averaged_statistics() if self.world_size > 1 else {}
        for name, own in self.batch_statistics().items() if averages else ():
            own.copy_(averages[name])

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode, without gradients."""
        self.average_buffers()
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, mode in modes:
                module.training = mode


def pick_strategy(config: ParallelConfig, module: nn.Module, world: World) -> Strategy:
    """The strategy for this model in this world; says what "auto" picked, and why."""
    if world.world_size == 1:
        if config.strategy not in ("auto", "single"):
            world.warn(f"parallel.strategy={config.strategy} needs more than one process; running as single")
        return "single"
    if config.strategy == "single":
        raise ConfigError(
            f"parallel.strategy=single is for one process, but there are {world.world_size}; "
            "use auto, ddp, fsdp or hsdp"
        )
    if config.strategy != "auto":
        return config.strategy
    need = BYTES_PER_PARAMETER * sum(p.numel() for p in module.parameters())
    have = torch.cuda.get_device_properties(world.device).total_memory if world.device.type == "cuda" else 0
    strategy: Strategy = "fsdp" if have and need > have / 2 else "ddp"
    room = f"half of the device's {have / 2**30:.1f} GiB" if have else "the host's memory"
    verb = "do not fit in" if strategy == "fsdp" else "fit in"
    state = f"weights, gradients and moments ({need / 2**30:.2f} GiB)"
    world.say(f"parallel.strategy=auto: {strategy}, because {state} {verb} {room}")
    return strategy


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The units to shard when the task names none: the members of the longest list of layers in the model."""
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    longest = max(lists, key=len, default=None)
    return [child for child in longest if any(True for _ in child.parameters())] if longest is not None else []


def build_parallel(
    config: ParallelConfig,
    strategy: Strategy,
    module: nn.Module,
    blocks: Iterable[nn.Module],
    precision: Precision,
    world: World,
) -> Parallel:
    """Lay `module` out over the world. Build the optimizer after this: sharding replaces the parameters."""
    if strategy in ("fsdp", "hsdp"):
        return _shard(config, strategy, module, list(blocks), precision, world)
    module = module.to(world.device)
    if strategy == "single":
        return Parallel(strategy, module, module, world, 1, lambda on: NOTHING, world.device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)  # 2.13's new name is unknown to 2.11
        model = DistributedDataParallel(
            module,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # a collective per forward for batch statistics alone: see average_buffers
        )
    if config.comm_dtype != "off":
        hook = default_hooks.bf16_compress_hook if config.comm_dtype == "bf16" else default_hooks.fp16_compress_hook
        model.register_comm_hook(None, hook)
    # no_sync must surround the forward too: DDP reads its flag there.
    return Parallel(
        strategy,
        module,
        model,
        world,
        world.world_size,
        lambda on: NOTHING if on else model.no_sync(),
        world.device,
    )


def _shard(
    config: ParallelConfig,
    strategy: Strategy,
    module: nn.Module,
    blocks: list[nn.Module],
    precision: Precision,
    world: World,
) -> Parallel:
    """FSDP2: each block is one unit, gathered for its forward and backward; what remains is the root's own unit."""
    normed = [name for name, part in module.named_modules() if isinstance(part, _NormBase)]
    if normed and precision.cast_by == "policy":
        raise ConfigError(
            f"precision.cast_by=policy would cast {normed[0]}'s weights but not its batch statistics; "
            "use precision.cast_by=autocast"
        )
    replicas = replicas_of(config, world) if strategy == "hsdp" else 1
    shape = (replicas, world.world_size // replicas) if strategy == "hsdp" else (world.world_size,)
    names = ("replicate", "shard") if strategy == "hsdp" else ("shard",)
    options: dict[str, Any] = {"mesh": world.mesh(shape, names)}
    policy = MixedPrecisionPolicy()
    if precision.cast_by == "policy":
        policy = MixedPrecisionPolicy(param_dtype=precision.dtype, reduce_dtype=DTYPES[config.reduce_dtype])
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    for parameter in module.parameters() if config.param_dtype == "bf16" else ():
        parameter.data = parameter.data.bfloat16()
    for number, block in enumerate(blocks):
        # The last block's backward comes first: gathering it again at once would be for nothing.
        fully_shard(block, reshard_after_forward=number < len(blocks) - 1, mp_policy=policy, **options)
    # What leaves the model, and it alone, is float32 again: the loss is summed in it.
    policy = replace(policy, output_dtype=torch.float32)
    # The root's own parameters, as a head's, are not resharded after forward: backward begins with them.
    model = fully_shard(module, mp_policy=policy, reshard_after_forward=False, **options)
    # A unit's gathering is issued before the unit ahead of it computes, so that a slow host does not delay it; no more
    # of them are whole at once than by default. Backward's default is the same already. Source: torch's FSDPModule.
    units: list[Any] = [model, *blocks]
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])

    @contextmanager
    def sync(on: bool) -> Iterator[None]:
        model.set_is_last_backward(on)
        if config.accumulate_reduce == "last":
            model.set_requires_gradient_sync(on)
        elif strategy == "hsdp":  # reduced within the shards every time, between the replicas once
            model.set_requires_all_reduce(on)
        yield

    offloaded = torch.device("cpu") if config.cpu_offload else world.device
    return Parallel(strategy, module, module, world, replicas, sync, offloaded)
