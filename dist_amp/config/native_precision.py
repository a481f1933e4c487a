"""Which precision this machine computes natively: measured on a CPU, looked up for a GPU."""

import time
from functools import cache

import torch

from dist_amp.errors import ConfigError
from dist_amp.world import World

# (native from, works from): CUDA compute capabilities. Source: CUDA C++ programming guide,
# arithmetic instructions. Between the two, arithmetic is emulated or runs at a fraction of
# float32's rate.
CAPABILITY = {"bf16": ((8, 0), (5, 3)), "fp16": ((7, 0), (5, 3))}

# Measured on an AVX-512 CPU with torch 2.13: native bf16 takes 0.7 to 1.0 times float32's time,
# bf16 by AVX-512 without its bf16 instructions 3.1, bf16 by AVX2 27 to 33, emulated fp16 14 to 25.
EMULATED = 2.0

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SIZE, _REPEATS = 128, 5


@cache
def cpu_slowdown(dtype: str) -> float:
    """A matrix product's time on this CPU over float32's; EMULATED or more: not native.

    Timed, in 10 to 40 ms, since oneDNN claims bf16 wherever there is AVX-512.
    """
    generator = torch.Generator().manual_seed(0)  # leaves the process's random state alone
    matrix = torch.randn(_SIZE, _SIZE, generator=generator)
    halved = matrix.to(_HALF[dtype])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            seconds = [(_seconds(matrix), _seconds(halved)) for _ in range(1 + _REPEATS)]
    finally:
        torch.set_num_threads(threads)
    full, half = map(min, zip(*seconds[1:], strict=True))  # the first warms up
    return half / full


def _seconds(matrix: torch.Tensor) -> float:
    began = time.thread_time()
    matrix @ matrix
    return time.thread_time() - began


def support(dtype: str, capability: tuple[int, int]) -> str:
    """How a GPU of this compute capability computes in a dtype: native, emulated or none."""
    native, works = CAPABILITY[dtype]
    if torch.version.hip or capability >= native:  # ROCm's GPUs compute in both
        return "native"
    return "emulated" if capability >= works else "none"


def check_dtype(dtype: str, world: World) -> None:
    """Reject a dtype that the device can't compute in; warn about one that it only emulates."""
    if world.device.type == "cpu":
        if world.is_main:
            warn_if_emulated(dtype, world)
        return
    capability = torch.cuda.get_device_capability(world.device)
    kind = support(dtype, capability)
    name = torch.cuda.get_device_name(world.device)
    device = "{} (compute capability {}.{})".format(name, *capability)
    if kind == "none":
        usable = [other for other in CAPABILITY if support(other, capability) != "none"]
        instead = "--use_amp false"
        if usable:
            instead = f"precision.dtype={' or '.join(usable)}, or {instead}"
        raise ConfigError(f"precision.dtype={dtype}: {device} does not support it; use {instead}")
    if kind == "emulated":
        instead = "--use_amp false"
        if support("fp16", capability) == "native":
            instead = "--precision.dtype fp16"
        world.warn(f"{device} only emulates {dtype}, which is slower than float32; use {instead}")


@cache  # a process that builds several runs warns once
def warn_if_emulated(dtype: str, world: World) -> None:
    """Warn about a dtype in which this CPU is slower than in float32."""
    slowdown = cpu_slowdown(dtype)
    if slowdown >= EMULATED:
        world.warn(
            f"this CPU only emulates {dtype}: a matrix product takes {slowdown:.0f} times as long "
            "as in float32; use --use_amp false"
        )


@cache  # a process that builds several runs says it once
def cpu_dtype(world: World) -> str:
    """What `precision.dtype=auto` is on this CPU: "bf16" or "fp32", which a line explains."""
    slowdown = cpu_slowdown("bf16")
    if slowdown < EMULATED:
        return "bf16"
    world.say(
        f"precision.dtype=auto: float32, because this CPU only emulates bf16 ({slowdown:.0f} times "
        "slower); --use_amp true computes in bf16 all the same"
    )
    return "fp32"


def native_precision() -> tuple[str, str]:
    """("bf16", "fp16" or "float32", why): the first that the GPU, or else the CPU, has natively."""
    if not torch.cuda.is_available():
        slowdown = cpu_slowdown("bf16")
        if slowdown < EMULATED:
            return "bf16", "native on this CPU"
        return "float32", f"this CPU only emulates bf16 ({slowdown:.0f}x slower)"
    if torch.version.hip:
        return "bf16", "native on ROCm's GPUs"
    capability = torch.cuda.get_device_capability()
    native = [dtype for dtype in CAPABILITY if support(dtype, capability) == "native"]
    dtype = [*native, "float32"][0]
    return dtype, "native on GPUs of compute capability {}.{}".format(*capability)
