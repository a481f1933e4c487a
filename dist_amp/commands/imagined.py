"""Ranks and a device that do not exist: what a step allocates, computes and sends there.

The step runs on fake tensors, which have shapes but no memory, on one rank of a process group whose
collectives return at once. `ImaginedDevice` is a dispatch mode that sees every operation and counts
what it allocates, as a GPU's allocator would; what it sends; and its time, the longer of its
arithmetic and its memory traffic. DDP's C++ code reads values, so `FlatGradients` imitates it. What
most kernels allocate while they run is not counted.
"""

import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import flop_registry

from dist_amp.clock import PhaseClock
from dist_amp.commands.devices import LINK_SHARE, MEMORY_SHARE, Device
from dist_amp.config.memory import tensor_bytes
from dist_amp.world import World

aten = torch.ops.aten

ROUNDING = 512  # allocations are multiples of it. Source: torch's CUDACachingAllocator.cpp

# Elements in one of DDP's buckets. Source: DistributedDataParallel's bucket_cap_mb.
BUCKET = 25 * 2**20 // 4

# These read a value to the host. On fake tensors they give True (1): checks and divisions work.
READ_BACK = (aten._local_scalar_dense, aten.allclose, aten.equal)

# Operations in float32 under autocast on CUDA, but not on a CPU. Source: torch's autocast_mode.h.
OPERATIONS = ("cumsum", "exp", "log", "log_softmax", "pow", "prod", "rsqrt", "softmax", "sum")
LAYERS = ("cross_entropy", "group_norm", "kl_div", "l1_loss", "layer_norm", "log_softmax")
IN_FLOAT32: dict[Any, tuple[str, ...]] = {
    torch: OPERATIONS,
    Tensor: OPERATIONS,
    F: (*LAYERS, "nll_loss", "softmax"),
}

# torch's table lacks the CPU's attention, whose arguments are those of the GPU's.
ATTENTION = aten._scaled_dot_product_flash_attention
ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_backward
FLOPS = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[ATTENTION],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[ATTENTION_BACKWARD],
}


# ---- what a step sends


class Collective(NamedTuple):
    """A collective. ranks: the size of its group. nbytes: the larger of its input and output."""

    kind: str
    ranks: int
    nbytes: int

    @property
    def sent(self) -> float:
        """Bytes that each rank sends in a ring. Source: doi:10.1016/j.jpdc.2008.09.002."""
        rounds = 2 if self.kind == "allreduce" else 1  # reduce-scatter, then all-gather
        return rounds * (self.ranks - 1) / self.ranks * self.nbytes

    def seconds(self, gpu: Device, world: World) -> float:
        """Duration at the bandwidth of the machine's links, or of its network cards."""
        rate = gpu.machine_bandwidth
        has_one_machine = world.world_size == world.local_world_size
        if self.ranks == world.world_size and not has_one_machine:
            # A ring over several machines enters and leaves each through all its network cards.
            rate = min(gpu.machine_bandwidth, world.local_world_size * gpu.network_bandwidth)
        elif self.kind == "allreduce" and not has_one_machine:
            rate = gpu.network_bandwidth  # hsdp's all-reduce, between machines
        return self.sent / (LINK_SHARE * rate * 1e9)


def collective_of(function: Any, args: Sequence[Any]) -> Collective | None:
    """The collective that an operation starts; None if it is none, or its group has one rank."""
    if function.namespace == "_c10d_functional" and function._opname == "all_gather_into_tensor":
        kind, ranks = "allgather", args[1]  # DTensor's
        nbytes = ranks * args[0].nbytes
    elif function.namespace == "c10d":
        kind = function._opname.strip("_").removesuffix("_base")
        group = next(value for value in args if isinstance(value, torch.ScriptObject))
        ranks = dist.ProcessGroup.unbox(group).size()
        tensors = [[t for t in tree_iter(value) if isinstance(t, Tensor)] for value in args]
        nbytes = max(map(tensor_bytes, tensors))
    else:
        return None
    return Collective(kind, ranks, nbytes) if ranks > 1 else None


@dataclass(frozen=True)
class ImaginedWorld(World):
    """A rank whose other ranks do not exist; it prints nothing."""

    is_main = False

    def mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        with _disable_current_modes():  # making a mesh reads the values of tensors
            return super().mesh(shape, names)


@contextmanager
def without_values(ranks: int) -> Iterator[None]:
    """Context: tensors have only shapes, and collectives of `ranks` ranks return at once."""
    # FakeTensorMode logs a traceback before it raises.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    if ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True):
            yield
    finally:
        if ranks > 1:
            dist.destroy_process_group()


class FlatGradients:
    """Gradients as DDP keeps and sends them: in buckets, allocated at the start, to which the last
    micro-batch's backward copies each gradient. comm_dtype: None for the parameters' dtype.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], comm_dtype: torch.dtype | None) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        flat = parameters[0].new_empty(sum(sizes))
        self._buckets = flat.split(BUCKET)
        self._gradients: dict[Tensor, Tensor] = {}
        self._comm_dtype = comm_dtype or flat.dtype
        self._synchronises = True
        for parameter, part in zip(parameters, flat.split(sizes), strict=True):
            parameter.is_replicated = True  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(self._copy)
            self._gradients[parameter] = part.view_as(parameter)

    def _copy(self, parameter: Tensor) -> None:
        if self._synchronises:
            parameter.grad = self._gradients[parameter].copy_(parameter.grad)  # type: ignore[arg-type]

    @contextmanager
    def gradient_sync(self, on: bool) -> Iterator[None]:
        self._synchronises = on
        yield
        if on:
            for bucket in self._buckets:
                dist.all_reduce(bucket.to(self._comm_dtype))


# ---- what a step allocates, and how long it computes


class ImaginedDevice(TorchDispatchMode):
    """The device of one rank: what is allocated on it, how long it computes, what it sends.

    device: None: times are not computed. allocated: bytes in use from the start to the end.
    """

    def __init__(self, device: Device | None, allocated: int = 0) -> None:
        super().__init__()
        self.phase = "other"
        self.forget()
        self._device = device
        self._bytes = allocated
        self._sizes: dict[int, int] = {}  # bytes of each storage that is alive, by its address

    def forget(self) -> None:
        """Restart the measurement; what is allocated stays counted."""
        self.peaks: Counter[str] = Counter()  # {phase of a step: bytes}
        self.counts: Any = Counter()  # {"computing": seconds, Collective: how often}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if DTensor in types:
            return NotImplemented  # DTensor then calls the operation on local tensors
        kwargs = kwargs or {}
        is_fake = any(issubclass(kind, FakeTensor) for kind in types)
        if is_fake and function.overloadpacket in READ_BACK:
            return True
        if collective := collective_of(function, args):
            self.counts[collective] += 1
        result = function(*args, **kwargs)
        results = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        for tensor in results:
            self.count(tensor.untyped_storage())
        peak = self._bytes + kernel_buffer_bytes(function, args)
        self.peaks[self.phase] = max(self.peaks[self.phase], peak)
        if self._device is not None and not function.is_view:
            inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
            traffic = sum(leaf.nbytes for leaf in (*inputs, *results))
            seconds = traffic / (MEMORY_SHARE * self._device.memory_bandwidth * 1e9)
            if formula := FLOPS.get(function.overloadpacket):
                flops = formula(*args, **kwargs, out_val=result)
                seconds = max(seconds, flops / self._device.flop_per_second(inputs[0].dtype))
            self.counts["computing"] += seconds
        return result

    def count(self, storage: Any) -> None:
        """Count a storage until it is freed; if it is counted already, update its size."""
        key = storage._cdata
        if key not in self._sizes:
            weakref.finalize(storage, self._free, key)
        size = math.ceil(storage.nbytes() / ROUNDING) * ROUNDING
        self._bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peaks[self.phase] = max(self.peaks[self.phase], self._bytes)

    def _free(self, key: int) -> None:
        self._bytes -= self._sizes.pop(key)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context: the device sees a step's phases, and FSDP2's resizing of storages."""
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
        ):
            yield


def kernel_buffer_bytes(function: Any, args: Any) -> int:
    """Bytes that a kernel allocates while it runs, for the kernels with the largest buffers.

    A sum over rows, as for a bias's gradient, needs partial sums of blocks of 128 threads; as many
    blocks as fill an H100, 132 multiprocessors x 16. Source: torch's Reduce.cuh. The backward of
    attention needs the queries' gradient in float32. Source: torch's flash_api.cpp.
    """
    if function is aten.sum.dim_IntList and args[0].ndim == 2 and list(args[1]) == [0]:
        rows, columns = args[0].shape
        to_fill = math.ceil(132 * 16 / math.ceil(columns / 128))
        blocks = max(min(to_fill, math.ceil(rows / 64)), math.ceil(rows / 1024))
        return 4 * columns * blocks * 128
    if function.overloadpacket is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return 4 * args[1].numel()
    return 0


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Context: a CPU runs the operations of CUDA: autocast's list, dropout, attention.

    Patched, since a TorchFunctionMode is off in backward, where checkpointing reruns blocks.
    """
    attention = F.scaled_dot_product_attention

    def upcast(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor

    def in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.is_autocast_enabled("cpu"):
                args, kwargs = tree_map_only(Tensor, upcast, (args, kwargs))
            return function(*args, **kwargs)

        return call

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return torch.native_dropout(input, p, True)[0] if training and 0 < p < 1 else input

    def without_dropout(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Tensor:
        if isinstance(mask := kwargs.get("attn_mask"), Tensor):
            kwargs["attn_mask"] = mask.detach()  # the CPU's kernel computes no gradient of a mask
        return attention(*args, **kwargs)

    with ExitStack() as patches:
        for owner, names in IN_FLOAT32.items():
            for name in names:
                patches.enter_context(patch.object(owner, name, in_float32(getattr(owner, name))))
        patches.enter_context(patch.object(F, "dropout", dropout))
        patches.enter_context(patch.object(F, "scaled_dot_product_attention", without_dropout))
        yield
