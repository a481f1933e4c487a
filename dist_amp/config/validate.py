"""Rejects settings that do not work together or on this device, before anything is built; errors name a fix."""

from functools import cache

import torch
from torch import nn

from dist_amp.errors import ConfigError, DataError
from dist_amp.runtime.batch_statistics import batch_statistics
from dist_amp.runtime.native_precision import CAPABILITY, EMULATED, cpu_slowdown
from dist_amp.settings import ParallelConfig, PrecisionConfig, ScalerConfig, Strategy, TrainConfig
from dist_amp.world import World


def check_dtype(config: PrecisionConfig, world: World) -> None:
    """Reject a dtype that the device can't compute in; warn about one that it only emulates."""
    if not config.use_amp or torch.version.hip:  # ROCm's GPUs compute in both
        return
    if world.device.type == "cpu":
        if world.is_main:
            warn_if_emulated(config.dtype, world)
        return
    capability = torch.cuda.get_device_capability(world.device)
    native, works = CAPABILITY[config.dtype]
    device = f"{torch.cuda.get_device_name(world.device)} (compute capability {capability[0]}.{capability[1]})"
    if capability < works:
        usable = [name for name, (_, since) in CAPABILITY.items() if capability >= since]
        others = f"precision.dtype={' or '.join(usable)}, or " if usable else ""
        raise ConfigError(f"precision.dtype={config.dtype}: {device} does not support it; use {others}--use_amp false")
    if capability < native:
        instead = "--precision.dtype fp16" if capability >= CAPABILITY["fp16"][0] else "--use_amp false"
        world.warn(f"{device} only emulates {config.dtype}, which is slower than float32; use {instead}")


@cache  # a process that builds several runs warns once
def warn_if_emulated(dtype: str, world: World) -> None:
    """Warn about a dtype in which this CPU is slower than in float32, with the cost and what to use."""
    if (slowdown := cpu_slowdown(dtype)) >= EMULATED:
        world.warn(
            f"this CPU only emulates {dtype}: a matrix product takes {slowdown:.0f} times as long as in float32; "
            "use --use_amp false"
        )


def check_parallel(config: ParallelConfig, strategy: Strategy, precision: PrecisionConfig, world: World) -> None:
    """Reject settings that do not work together; each error says what would."""
    on_cpu = world.device.type == "cpu"
    if strategy in ("fsdp", "hsdp"):
        dtypes = {name: getattr(config, name) for name in ("param_dtype", "reduce_dtype")}
        half = next((f"parallel.{name}={dtype}" for name, dtype in dtypes.items() if dtype != "fp32"), None)
        if half and not precision.use_amp:
            raise ConfigError(f"{half} needs use_amp=true: use_amp=false is float32 everywhere; use fp32")
        if half and precision.cast_by == "autocast":
            raise ConfigError(f"{half} needs precision.cast_by=policy: autocast works on float32 parameters; use fp32")
        if config.reduce_dtype == "fp16" and precision.name != "fp16":
            raise ConfigError(
                "parallel.reduce_dtype=fp16 needs precision.dtype=fp16: without its loss scaler small gradients become "
                "zero; use fp32 or bf16"
            )
        if config.comm_dtype != "off":
            world.warn(f"parallel.comm_dtype={config.comm_dtype} has no effect under {strategy}: use reduce_dtype")
        if config.cpu_offload and on_cpu:
            raise ConfigError(
                "parallel.cpu_offload=true needs a GPU to offload from, and run.device is the CPU; use false"
            )
    if strategy == "hsdp" and world.world_size % (replicas := replicas_of(config, world)):
        divisors = [n for n in range(1, world.world_size + 1) if world.world_size % n == 0]
        raise ConfigError(
            f"parallel.replicas={replicas} does not divide {world.world_size} ranks; use one of {divisors}"
        )
    if strategy == "ddp" and config.comm_dtype == "fp16" and precision.name != "fp16":
        raise ConfigError(
            "parallel.comm_dtype=fp16 needs precision.dtype=fp16: without its loss scaler small gradients become zero; "
            "use bf16 or off"
        )
    if strategy == "ddp" and config.comm_dtype == "bf16" and on_cpu:
        raise ConfigError("parallel.comm_dtype=bf16 needs GPUs: on a CPU gloo does not sum bf16; use off")


def check_shardable(strategy: Strategy, module: nn.Module, policy: bool) -> None:
    """Reject a model that FSDP2 can't shard. policy: whether its policy casts.

    Errors: ConfigError for batch statistics beside cast weights, and a parameter that is a scalar or not contiguous.
    """
    if policy and (statistics := batch_statistics(module)):
        raise ConfigError(
            f"precision.cast_by=policy would cast the weights of {next(iter(statistics)).rpartition('.')[0]} but not "
            "its batch statistics; use precision.cast_by=autocast"
        )
    for name, parameter in module.named_parameters():
        if parameter.ndim == 0:
            raise ConfigError(
                f"the parameter {name} is a scalar, and {strategy} shards the first dimension; give it the shape [1] "
                "in build_model, or use parallel.strategy=ddp"
            )
        if not parameter.is_contiguous():
            raise ConfigError(
                f"the parameter {name} is not contiguous, as with memory_format=torch.channels_last, and {strategy} "
                "shards contiguous ones only; make it contiguous in build_model, or use parallel.strategy=ddp"
            )


def replicas_of(config: ParallelConfig, world: World) -> int:
    """How many copies of the model hsdp has."""
    if config.replicas != "auto":
        return config.replicas
    machines = world.world_size // world.local_world_size
    return machines if machines > 1 else 2


def accumulation_steps(config: TrainConfig, world_size: int) -> int:
    """Micro-batches per step, from accumulation_steps or global_batch_size, whichever is set."""
    per_round = config.micro_batch_size * world_size
    if config.global_batch_size == "auto":
        return 1 if config.accumulation_steps == "auto" else config.accumulation_steps
    wanted, rest = divmod(config.global_batch_size, per_round)
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    if rest:
        near = max(1, round(config.global_batch_size / per_round)) * per_round
        raise ConfigError(
            f"train.global_batch_size={config.global_batch_size} is not a multiple of micro_batch_size "
            f"{config.micro_batch_size} x {ranks} = {per_round}; use global_batch_size={near}"
        )
    if config.accumulation_steps not in ("auto", wanted):
        product = per_round * config.accumulation_steps
        raise ConfigError(
            f"train.global_batch_size={config.global_batch_size} is not micro_batch_size {config.micro_batch_size} x "
            f"{ranks} x accumulation_steps {config.accumulation_steps} = {product}; use accumulation_steps={wanted}"
        )
    return wanted


def check_length(length: int, micro_batch_size: int, accumulation_steps: int, world: World) -> None:
    """Errors: DataError for a training dataset of so many samples that does not fill one global batch."""
    if length == 0:
        raise DataError(
            "the training dataset is empty; check data.name, data.path, data.split and the task's build_dataset"
        )
    global_batch_size = micro_batch_size * accumulation_steps * world.world_size
    if length < global_batch_size:
        raise DataError(
            f"the training dataset has {length} samples, fewer than one global batch of {global_batch_size} = "
            f"micro_batch_size {micro_batch_size} x {world.world_size} ranks x accumulation_steps "
            f"{accumulation_steps}; use more data or a smaller batch"
        )


def check_precision(config: PrecisionConfig, sharded: bool, world: World) -> None:
    """Reject a precision that the device, the strategy or its own settings rule out."""
    check_dtype(config, world)
    if config.cast_by == "policy" and not sharded:
        raise ConfigError(
            "precision.cast_by=policy needs parallel.strategy fsdp or hsdp; use precision.cast_by=autocast"
        )
    if config.cast_by != "auto" and not config.use_amp:
        raise ConfigError(f"precision.cast_by={config.cast_by} casts, but use_amp=false computes in float32; use auto")
    if config.scaler != ScalerConfig() and config.name != "fp16":
        world.warn(f"precision.scaler has no effect in {config.name}: only fp16 needs a loss scaler")
    if config.scaler.init_scale < config.scaler.min_scale and config.name == "fp16":
        raise ConfigError(
            f"precision.scaler.init_scale={config.scaler.init_scale:g} is below precision.scaler.min_scale="
            f"{config.scaler.min_scale:g}, at which the run ends; raise the one or lower the other"
        )
