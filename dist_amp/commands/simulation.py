"""Steps of a config on imagined ranks, with tensors that have no memory: bytes, and seconds.

The project's own step runs under torch's FakeTensorMode, which computes shapes alone. Allocations
are counted as a GPU's allocator does, and each operation takes the larger of its arithmetic and its
memory traffic. Not seen: what a kernel allocates within itself, compiled blocks, diagnostics.
"""

import copy
import logging
import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import flop_registry

from dist_amp.clock import PhaseClock
from dist_amp.commands.devices import Device
from dist_amp.commands.estimates import Setup
from dist_amp.config.memory import USABLE
from dist_amp.run import assemble, lay_out
from dist_amp.scaling.meta import like
from dist_amp.step import Run, train_step
from dist_amp.task import kept_by
from dist_amp.world import World

aten = torch.ops.aten

ROUNDING = 512  # an allocation is a multiple of it. Source: torch's CUDACachingAllocator.cpp
# The forward's and the backward's thread each have one. Source: torch's CUDABlas.cpp, for Hopper.
WORKSPACES = 2 * 32 * 2**20
STEPS = 2  # the optimizer's state and all gradients exist from the second on
MICRO_BATCHES = 2  # of many, the second takes as much memory as any other

# What the host reads from the device is 1 or true here: checks pass, and divisions work.
READS = (aten._local_scalar_dense, aten.allclose, aten.equal)

# In place, without a rule for shapes: FakeTensorMode would run them on zeros.
FUSED = (aten._fused_adamw_, aten._fused_adam_, aten._fused_sgd_)

# What CUDA's autocast computes in float32, and a CPU's does not. Source: torch's autocast_mode.h.
NAMES = "cumsum exp log log_softmax pow prod rsqrt softmax sum"
IN_FLOAT32: dict[Any, str] = {
    torch: NAMES,
    Tensor: NAMES,
    F: "cross_entropy group_norm kl_div l1_loss layer_norm log_softmax nll_loss softmax",
}

# A CPU's attention, which torch's table lacks, takes the arguments of a GPU's.
FORWARD = aten._scaled_dot_product_flash_attention
BACKWARD = aten._scaled_dot_product_flash_attention_backward
FLOPS = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[FORWARD],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[BACKWARD],
}


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Inside, operations are as CUDA has them: autocast's list, and kernels that a CPU lacks."""

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if training and 0 < p < 1:
            return torch.native_dropout(input, p, True)[0]
        return input

    attention = F.scaled_dot_product_attention

    def without_dropout(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Tensor:
        if isinstance(mask := kwargs.get("attn_mask"), Tensor):
            kwargs["attn_mask"] = mask.detach()  # a CPU's kernel gives it no gradient
        return attention(*args, **kwargs)

    with ExitStack() as patches:
        for owner, names in IN_FLOAT32.items():
            for name in names.split():
                patches.enter_context(patch.object(owner, name, in_float32(getattr(owner, name))))
        patches.enter_context(patch.object(F, "dropout", dropout))
        patches.enter_context(patch.object(F, "scaled_dot_product_attention", without_dropout))
        yield


def in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with its arguments in float32 under autocast."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, in_full, (args, kwargs))
        return function(*args, **kwargs)

    return called


def in_full(tensor: Tensor) -> Tensor:
    """A half-precision tensor as float32."""
    if tensor.dtype in (torch.bfloat16, torch.float16):
        return tensor.float()
    return tensor


class ImaginedDevice(TorchDispatchMode):
    """The device of rank 0: what is allocated on it, and how long it computes.

    taken: bytes that are allocated from the start to the end.
    """

    def __init__(self, device: Device | None, taken: int = 0) -> None:
        super().__init__()
        self.phase = "other"
        self.peaks: Counter[str] = Counter()  # bytes, by the phase of a step
        self.seconds: Any = Counter()  # by a step's phase, and limit: compute, memory
        self._device = device
        self._bytes = taken
        self._sizes: dict[int, int] = {}  # of the storages alive, by their address

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if DTensor in types:
            return NotImplemented  # what it calls with its local tensors comes here again
        kwargs = kwargs or {}
        is_fake = any(issubclass(kind, FakeTensor) for kind in types)
        if is_fake and function.overloadpacket in READS:
            return True
        result = None
        if not (is_fake and function.overloadpacket in FUSED):
            result = function(*args, **kwargs)
        results = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        for tensor in results:
            self.count(tensor.untyped_storage())
        peak = self._bytes + within_kernel(function, args)
        self.peaks[self.phase] = max(self.peaks[self.phase], peak)
        if self._device is not None and not function.is_view:
            given = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
            memory = sum(leaf.nbytes for leaf in (*given, *results)) / self._device.bytes_per_second
            compute = 0.0
            if formula := FLOPS.get(function.overloadpacket):
                flops = formula(*args, **kwargs, out_val=result)
                compute = flops / self._device.flop_per_second(given[0].dtype)
            self._add_time(memory, compute)
        return result

    def _add_time(self, memory: float, compute: float) -> None:
        """Of an operation: its memory traffic or its arithmetic, whichever takes more seconds."""
        limit = "memory"
        if compute > memory:
            limit = "compute"
        self.seconds[self.phase, limit] += max(compute, memory)

    def count(self, storage: Any) -> None:
        """Count a storage until it is freed, or its new size."""
        key = storage._cdata
        if key not in self._sizes:
            weakref.finalize(storage, self._free, key)
        size = math.ceil(storage.nbytes() / ROUNDING) * ROUNDING
        before = self._sizes.get(key, 0)
        self._bytes += size - before
        self._sizes[key] = size
        self.peaks[self.phase] = max(self.peaks[self.phase], self._bytes)

    def _free(self, key: int) -> None:
        self._bytes -= self._sizes.pop(key)

    def forget(self) -> None:
        """Begin again to measure; what is allocated remains."""
        self.peaks.clear()
        self.seconds.clear()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, it knows a step's phases and FSDP2's resizing; modules stay where they are."""
        resize = torch.UntypedStorage.resize_
        enter = PhaseClock.enter

        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            self.count(storage)
            return result

        def entered(clock: PhaseClock, phase: str) -> str:
            if phase != "communication":
                self.phase = phase
            return enter(clock, phase)

        with (
            patch.object(PhaseClock, "enter", entered),
            patch.object(torch.UntypedStorage, "resize_", resized),
            patch.object(nn.Module, "to", lambda module, *_, **__: module),
        ):
            yield


def within_kernel(function: Any, args: Any) -> int:
    """Bytes that the kernels with the largest buffers allocate while they run.

    Sums over rows, as of a bias's gradient: partial sums of 128 threads each, of as many blocks as
    fill a GPU of 132 x 16. Source: torch's Reduce.cuh. Attention's backward: the queries' gradient
    in float32. Source: torch's flash_api.cpp.
    """
    if function is aten.sum.dim_IntList and args[0].ndim == 2 and list(args[1]) == [0]:
        rows, columns = args[0].shape
        to_fill = math.ceil(132 * 16 / math.ceil(columns / 128))
        blocks = max(min(to_fill, math.ceil(rows / 64)), math.ceil(rows / 1024))
        return 4 * columns * blocks * 128
    if function.overloadpacket is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return 4 * args[1].numel()
    return 0


@dataclass(frozen=True)
class ImaginedWorld(World):
    """Rank 0 of ranks that do not exist. notes: what a training would print at its start."""

    notes: list[str] = field(default_factory=list, compare=False)

    def say(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}")

    def mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        with _disable_current_modes():  # a mesh needs values
            return super().mesh(shape, names)


@dataclass(frozen=True)
class Job(Setup):
    """What a plan is made for; its module is on the meta device."""

    world: ImaginedWorld
    device_memory: int = 0  # bytes; 0: not known
    gpu: Device | None = None
    dataset: Any = None
    batch: Any = None  # a micro-batch

    @property
    def room(self) -> float:
        """Bytes to plan for; inf if the device is not known."""
        return USABLE * self.device_memory or math.inf


@contextmanager
def imagined_ranks(world_size: int) -> Iterator[None]:
    """A process group of so many ranks in this process, whose collectives return at once."""
    if world_size == 1:
        yield
        return
    # Private, and the only group without sockets.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def without_memory(module: nn.Module, fake: FakeTensorMode, device: ImaginedDevice) -> nn.Module:
    """A copy with parameters on the meta device, tied ones tied, and buffers that are counted."""
    module = copy.deepcopy(module)
    on_meta: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in on_meta:
                on_meta[parameter] = like(parameter, parameter.detach().to("meta"))
            setattr(part, name, on_meta[parameter])
        for name, buffer in list(part.named_buffers(recurse=False)):
            part._buffers[name] = on_device(buffer, fake, device)
    return module


def on_device(tensor: Tensor, fake: FakeTensorMode, device: ImaginedDevice) -> Tensor:
    """A tensor of the shape that is counted."""
    made = fake.from_tensor(tensor)
    device.count(made.untyped_storage())
    return made


def hold_buckets(run: Run) -> None:
    """Keep gradients as DDP does: they exist from the start, and a backward's are copied there."""
    parallel = run.parallel
    buckets = {p: torch.empty_like(p) for p in parallel.parameters}
    no_sync = parallel.gradient_sync(False)
    is_last = True

    def gradient_sync(on: bool) -> Any:
        nonlocal is_last
        is_last = on
        return no_sync

    def copy_to_bucket(parameter: Tensor) -> None:
        if is_last:
            parameter.grad = buckets[parameter]  # type: ignore[index]

    parallel.gradient_sync = gradient_sync
    for parameter in parallel.parameters:
        parameter.is_replicated = True  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(copy_to_bucket)


def simulate(job: Job) -> ImaginedDevice:
    """The device of rank 0 after a step of a job that has a batch.

    Errors: what the task raises; torch's for an operation that depends on values, since there are
    none.
    """
    config, world, task = job.config, job.world, job.task
    size = world.world_size
    # It prints a traceback before it raises.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    simulated = min(MICRO_BATCHES, job.micro_batches)
    on_gpu = world.device.type == "cuda"
    strategy = job.strategy
    if strategy == "ddp":  # torch's needs values; its memory is that of one rank and its buckets
        size = 1
        strategy = "single"
    parallel = replace(config.parallel, strategy=strategy, cpu_offload=False, bit_exact=False)
    config = replace(config, parallel=parallel, compile=replace(config.compile, blocks=False))
    config = replace(config, precision=replace(config.precision, matmul="auto"))
    # Not as the first, which would measure what this CPU computes in half precision.
    ranks = ImaginedWorld(
        rank=1, world_size=size, local_world_size=min(size, world.local_world_size)
    )
    fake = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
    rank0 = ImaginedDevice(job.gpu, taken=WORKSPACES if on_gpu else 0)
    with imagined_ranks(world.world_size), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those that training prints
        beside_model = [
            on_device(leaf.detach(), fake, rank0)
            for leaf in tree_iter(kept_by(task, job.module))
            if isinstance(leaf, nn.Parameter)  # a teacher's
        ]
        module = without_memory(job.module, fake, rank0)
        batches = [
            tree_map_only(Tensor, lambda t: on_device(t, fake, rank0), job.batch)
            for _ in range(simulated)
        ]
        with ExitStack() as modes:
            modes.enter_context(fake)
            modes.enter_context(rank0)
            modes.enter_context(rank0.watched())
            if on_gpu:
                modes.enter_context(as_on_gpu())
            run = assemble(config, ranks, task, Path(), lay_out(config, task, module, ranks))
            if job.strategy == "ddp":
                hold_buckets(run)
            for _ in range(STEPS):
                rank0.forget()
                train_step(run, batches)
            del beside_model
    for phase, limit in rank0.seconds:
        if phase in ("forward", "backward"):
            rank0.seconds[phase, limit] *= job.micro_batches / simulated
    return rank0
