"""What a step asks of a device, counted, and what the device reaches, measured: together they say what limits the step.

    products   floating-point operations / the rate of a large matrix product in their dtype
    traffic    bytes that operations read and write / the rate at which a large tensor is copied
    launches   operations / the rate of operations on one number

The longest of these times is the step's limit. These are estimates: traffic that stays in a cache is faster, attention
counts in full where half of it is masked. Source: Williams et al. 2009, "Roofline", doi:10.1145/1498765.1498785.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dist_amp.bench.harness import release, timed
from dist_amp.precision import DTYPES
from dist_amp.runtime.process import set_tf32
from dist_amp.verify.dtypes import FORMULAS, SHORT, tensors_in
from dist_amp.world import World

BOUNDS = {"products": "matrix-bound", "traffic": "bandwidth-bound", "launches": "launch-bound"}
REPEATS = 5  # the fastest counts
COPIES, LAUNCHES = 10, 500  # between two clock readings
# Edge of the square matrices, and bytes of the tensor: large enough to keep the device busy, yet quick.
SIZES = {"cuda": (8192, 2**28), "cpu": (512, 2**26)}


class Ceilings(NamedTuple):
    """What a device reaches: FLOP/s by dtype, bytes/s, and the seconds that one more operation takes."""

    flops: Mapping[str, float]
    bytes_per_second: float
    launch_seconds: float

    def seconds(self, work: Mapping[str, Any]) -> dict[str, float]:
        """The least time that counted work takes, by limit."""
        return {
            "products": sum(flops / self.flops[dtype] for dtype, flops in work["flops"].items() if dtype in self.flops),
            "traffic": work["bytes"] / self.bytes_per_second,
            "launches": work["operations"] * self.launch_seconds,
        }


class Count(TorchDispatchMode):
    """Counts the work on one device, forward and backward; it runs below autocast, after the casts.

    Each operation reads its operands once and writes its results once. Views are none, nor is a compiled block's work.
    """

    def __init__(self, device: torch.device, tf32: bool):
        super().__init__()
        self.device, self.tf32 = device, tf32
        self.flops: Counter[str] = Counter()  # by the operands' dtype; "tf32" where float32 is rounded to it
        self.bytes = self.operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        arguments = function._schema.arguments
        values = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
        changed = [values.get(one.name) for one in arguments if one.alias_info is not None and one.alias_info.is_write]
        given, made, written = (
            [tensor for tensor in tensors_in(tensors) if tensor.device == self.device]
            for tensors in ((args, kwargs), out, changed)
        )
        memory = {tensor.data_ptr() for tensor in given}
        written += [tensor for tensor in made if tensor.data_ptr() not in memory]
        if not written or function.is_view or "empty" in function.overloadpacket.__name__:
            return out
        self.operations += 1
        # An expanded tensor is smaller than its shape says.
        self.bytes += sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in given + written)
        if formula := FORMULAS.get(function.overloadpacket):
            dtype = next((SHORT[tensor.dtype] for tensor in given if tensor.dtype in SHORT and tensor.ndim > 1), "fp32")
            name = "tf32" if dtype == "fp32" and self.tf32 else dtype
            self.flops[name] += formula(*args, **kwargs, out_val=out)
        return out


def count(call: Callable[[], object], device: torch.device, tf32: bool) -> dict[str, Any]:
    """{"flops": {dtype: number}, "bytes", "operations"} of a call."""
    with Count(device, tf32) as counted:
        call()
    return {"flops": dict(counted.flops), "bytes": counted.bytes, "operations": counted.operations}


def measure_ceilings(world: World) -> Ceilings:
    """What this device reaches; leaves TF32 off."""
    device = world.device
    edge, size = SIZES[device.type]

    def fastest(call: Callable[[], object], times: int = 1) -> float:
        return min([timed(world, lambda: [call() for _ in range(times)]) for _ in range(REPEATS)][1:]) / times

    rates = {}
    for name, dtype in (DTYPES | ({"tf32": torch.float32} if device.type == "cuda" else {})).items():
        set_tf32(name == "tf32")
        square = torch.randn(edge, edge, device=device).to(dtype)
        rates[name] = 2 * edge**3 / fastest(partial(torch.mm, square, square))
    set_tf32(False)
    large = torch.zeros(size // 4, device=device)
    copying = fastest(partial(torch.empty_like(large).copy_, large), COPIES)
    launching = fastest(partial(torch.zeros((), device=device).add_, 1), LAUNCHES)
    del square, large
    release(device)
    return Ceilings(rates, 2 * size / copying, launching)
