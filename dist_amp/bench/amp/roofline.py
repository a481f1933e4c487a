"""What a step asks of a device, counted, and what the device can do, measured; from both, what holds it up.

    products   floating-point operations / the rate of a large matrix product in their dtype
    traffic    bytes that operations read and write / the rate at which a large tensor is copied
    launches   operations / the rate of operations on one number

The largest of these three times is what a step is bound by. They are estimates: traffic that stays in a cache is
faster, attention counts whole where half of it is masked, and an operation that torch has no formula for counts none.
Source: Williams et al. 2009, "Roofline", doi:10.1145/1498765.1498785.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dist_amp.bench.timing import release
from dist_amp.precision import DTYPES
from dist_amp.runtime.process import set_tf32
from dist_amp.telemetry.async_copy import Clock
from dist_amp.verify.dtypes import FORMULAS, SHORT, tensors_in
from dist_amp.world import World

BOUNDS = {"products": "matrix-bound", "traffic": "bandwidth-bound", "launches": "launch-bound"}
REPEATS = 5  # the fastest counts
COPIES, LAUNCHES = 10, 500  # between two clocks
# Edge of the square matrices, and bytes of the tensor: large enough to fill the device, and quickly done.
SIZES = {"cuda": (8192, 2**28), "cpu": (512, 2**26)}


@dataclass
class Work:
    """Of one step or forward. flops: by the dtype of the operands, "tf32" where float32 is rounded to it."""

    flops: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    operations: int = 0


@dataclass(frozen=True)
class Ceilings:
    """What a device reaches: FLOP/s by dtype, bytes/s, and the seconds that one more operation takes."""

    flops: Mapping[str, float]
    bytes_per_second: float
    launch_seconds: float

    def seconds(self, work: Mapping[str, Any]) -> dict[str, float]:
        """The least time for `asdict(Work)`, by what it goes into."""
        return {
            "products": sum(flops / self.flops[dtype] for dtype, flops in work["flops"].items() if dtype in self.flops),
            "traffic": work["bytes"] / self.bytes_per_second,
            "launches": work["operations"] * self.launch_seconds,
        }

    def bound(self, work: Mapping[str, Any]) -> str:
        """Which of `BOUNDS` takes longest."""
        seconds = self.seconds(work)
        return max(seconds, key=seconds.__getitem__)


class Count(TorchDispatchMode):
    """Adds up the work of what runs inside, on one device, forward and backward; below autocast, after its casts.

    Each operation reads its operands once and writes its results once. What only looks at memory in another way is no
    operation; nor is what runs inside a compiled block, which never comes by here.
    """

    def __init__(self, device: torch.device, tf32: bool):
        super().__init__()
        self.device, self.tf32 = device, tf32
        self.work = Work()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        given = [tensor for tensor in tensors_in((args, kwargs)) if tensor.device == self.device]
        made = [tensor for tensor in tensors_in(out) if tensor.device == self.device]
        memory = {tensor.data_ptr() for tensor in given}
        fresh = [tensor for tensor in made if tensor.data_ptr() not in memory]
        written = [tensor for tensor in written_by(function, args, kwargs) if tensor.device == self.device]
        if not (fresh or written) or function.is_view or "empty" in function.overloadpacket.__name__:
            return out
        self.work.operations += 1
        self.work.bytes += sum(map(extent, [*given, *fresh, *written]))
        if formula := FORMULAS.get(function.overloadpacket):
            dtype = self._dtype(given)
            self.work.flops[dtype] = self.work.flops.get(dtype, 0) + formula(*args, **kwargs, out_val=out)
        return out

    def _dtype(self, operands: list[Tensor]) -> str:
        name = next((SHORT[tensor.dtype] for tensor in operands if tensor.dtype in SHORT and tensor.ndim > 1), "fp32")
        return "tf32" if name == "fp32" and self.tf32 else name


def written_by(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among its operands that an operation changes."""
    changed = []
    for number, parameter in enumerate(function._schema.arguments):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            changed.append(args[number] if number < len(args) else kwargs.get(parameter.name))
    return list(tensors_in(changed))


def extent(tensor: Tensor) -> int:
    """Bytes that reading all of it moves: an expanded tensor is smaller than it looks."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def count(call: Callable[[], object], device: torch.device, tf32: bool) -> dict[str, Any]:
    """`asdict(Work)` of a call."""
    with Count(device, tf32) as counted:
        call()
    return asdict(counted.work)


def measure_ceilings(world: World) -> Ceilings:
    """What this device reaches, in seconds; leaves tf32 off."""
    device = world.device
    edge, size = SIZES[device.type]

    def fastest(call: Callable[[], object], times: int = 1) -> float:
        seconds = []
        for _ in range(REPEATS):
            world.wait_for_device()
            clock = Clock(device)
            for _ in range(times):
                call()
            spans = clock.lap()
            world.wait_for_device()
            seconds.append(clock.seconds(spans) / times)
        return min(seconds[1:])

    rates = {}
    for name, dtype in (DTYPES | ({"tf32": torch.float32} if device.type == "cuda" else {})).items():
        set_tf32(name == "tf32")
        square = torch.randn(edge, edge, device=device).to(dtype)
        rates[name] = 2 * edge**3 / fastest(partial(torch.mm, square, square))
    set_tf32(False)
    whole = torch.zeros(size // 4, device=device)
    copying = fastest(partial(torch.empty_like(whole).copy_, whole), COPIES)
    launching = fastest(partial(torch.zeros((), device=device).add_, 1), LAUNCHES)
    del square, whole
    release(device)
    return Ceilings(rates, 2 * size / copying, launching)
