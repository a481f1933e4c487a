"""Refuses settings that do not work together, with this model or on this device."""

from torch import nn

from dist_amp.config.auto import SHARDED, batch_statistics, replicas_of
from dist_amp.errors import ConfigError, DataError
from dist_amp.settings import ParallelConfig, PrecisionConfig, ScalerConfig, Strategy
from dist_amp.world import World


def check_parallel(
    config: ParallelConfig, strategy: Strategy, precision: PrecisionConfig, world: World
) -> None:
    """Reject settings of [parallel] that do not work together; each error says what would."""
    on_cpu = world.device.type == "cpu"
    if strategy in SHARDED:
        check_sharded(config, precision)
        if config.comm_dtype != "off":
            world.warn(
                f"parallel.comm_dtype={config.comm_dtype} has no effect under {strategy}: use "
                "reduce_dtype"
            )
        if config.cpu_offload and on_cpu:
            raise ConfigError(
                "parallel.cpu_offload=true needs a GPU to offload from, and run.device is the CPU; "
                "use false"
            )
    if strategy == "hsdp":
        replicas = replicas_of(config, world)
        divisors = [n for n in range(1, world.world_size + 1) if world.world_size % n == 0]
        if replicas not in divisors:
            raise ConfigError(
                f"parallel.replicas={replicas} does not divide {world.world_size} ranks; use one "
                f"of {divisors}"
            )
    if strategy == "ddp" and config.comm_dtype == "fp16" and precision.name != "fp16":
        raise ConfigError(
            "parallel.comm_dtype=fp16 needs precision.dtype=fp16: without its loss scaler small "
            "gradients become zero; use bf16 or off"
        )
    if strategy == "ddp" and config.comm_dtype == "bf16" and on_cpu:
        raise ConfigError(
            "parallel.comm_dtype=bf16 needs GPUs: on a CPU gloo does not sum bf16; use off"
        )


def check_sharded(config: ParallelConfig, precision: PrecisionConfig) -> None:
    """Reject dtypes of sharded parameters and gradients that need another precision."""
    for name in ("param_dtype", "reduce_dtype"):
        dtype = getattr(config, name)
        if dtype != "fp32" and not precision.use_amp:
            raise ConfigError(
                f"parallel.{name}={dtype} needs use_amp=true: use_amp=false is float32 everywhere; "
                "use fp32"
            )
        if dtype != "fp32" and precision.cast_by == "autocast":
            raise ConfigError(
                f"parallel.{name}={dtype} needs precision.cast_by=policy: autocast works on "
                "float32 parameters; use fp32"
            )
    if config.reduce_dtype == "fp16" and precision.name != "fp16":
        raise ConfigError(
            "parallel.reduce_dtype=fp16 needs precision.dtype=fp16: without its loss scaler "
            "small gradients become zero; use fp32 or bf16"
        )


def check_shardable(strategy: Strategy, module: nn.Module, policy: bool) -> None:
    """Reject a model that FSDP2 can't shard. policy: whether its policy casts.

    Errors: ConfigError for batch statistics beside cast weights, and a parameter that is a scalar
    or not contiguous.
    """
    statistics = batch_statistics(module)
    if policy and statistics:
        raise ConfigError(
            "precision.cast_by=policy would cast the weights of "
            f"{next(iter(statistics)).rpartition('.')[0]} but not its batch statistics; use "
            "precision.cast_by=autocast"
        )
    for name, parameter in module.named_parameters():
        if parameter.ndim == 0:
            raise ConfigError(
                f"the parameter {name} is a scalar, and {strategy} shards the first dimension; "
                "give it the shape [1] in build_model, or use parallel.strategy=ddp"
            )
        if not parameter.is_contiguous():
            raise ConfigError(
                f"the parameter {name} is not contiguous, as with "
                f"memory_format=torch.channels_last, and {strategy} shards contiguous ones only; "
                "make it contiguous in build_model, or use parallel.strategy=ddp"
            )


def check_length(length: int, micro_batch_size: int, accumulation_steps: int, world: World) -> None:
    """Errors: DataError for a training dataset of this length if it fills no global batch."""
    if length == 0:
        raise DataError(
            "the training dataset is empty; check data.name, data.path, data.split and the task's "
            "build_dataset"
        )
    global_batch_size = micro_batch_size * accumulation_steps * world.world_size
    if length < global_batch_size:
        raise DataError(
            f"the training dataset has {length} samples, fewer than one global batch of "
            f"{global_batch_size} = micro_batch_size {micro_batch_size} x {world.world_size} ranks "
            f"x accumulation_steps {accumulation_steps}; use more data or a smaller batch"
        )


def check_precision(config: PrecisionConfig, sharded: bool, world: World) -> None:
    """Reject a precision that the device, the strategy or its own settings rule out."""
    if config.use_amp:
        from dist_amp.config.native_precision import check_dtype

        check_dtype(config.dtype, world)
    if config.cast_by == "policy" and not sharded:
        raise ConfigError(
            "precision.cast_by=policy needs parallel.strategy fsdp or hsdp; use "
            "precision.cast_by=autocast"
        )
    if config.cast_by != "auto" and not config.use_amp:
        raise ConfigError(
            f"precision.cast_by={config.cast_by} casts, but use_amp=false computes in float32; use "
            "auto"
        )
    if config.scaler != ScalerConfig() and config.name != "fp16":
        world.warn(
            f"precision.scaler has no effect in {config.name}: only fp16 needs a loss scaler"
        )
