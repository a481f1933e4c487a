"""The values that `auto` settings resolve to, for this model and these ranks."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dist_amp.errors import ConfigError
from dist_amp.settings import ParallelConfig, PrecisionConfig, Strategy, TrainConfig
from dist_amp.world import World

SHARDED = ("fsdp", "hsdp")


def pick_strategy(
    config: ParallelConfig, module: nn.Module, world: World, memory: float = 0
) -> Strategy:
    """The strategy for this model on these ranks; prints which one "auto" picked, and why.

    memory: bytes per GPU; 0: read them from this rank's GPU. Raises ConfigError.
    """
    if world.world_size == 1:
        if config.strategy not in ("auto", "single"):
            world.warn(
                f"parallel.strategy={config.strategy} needs more than one process; running as "
                "single"
            )
        return "single"
    if config.strategy == "single":
        raise ConfigError(
            f"parallel.strategy=single is for one process, but there are {world.world_size}; "
            "use auto, ddp, fsdp or hsdp"
        )
    if config.strategy != "auto":
        return config.strategy
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    # Weights, gradients and AdamW's two moments: 16 bytes per trained float32 parameter.
    size = sum(p.nbytes for p in module.parameters()) + 3 * 4 * trained
    strategy: Strategy = "ddp"
    reason = "fit in the host's memory"
    if world.device.type == "cuda":
        memory = memory or torch.cuda.get_device_properties(world.device).total_memory
        reason = f"fit in half of the device's {memory / 2**30:.1f} GiB"
        ranks = world.local_world_size  # on one machine
        if size > memory / 2:
            strategy = "fsdp"
            reason = f"do not {reason}"
        if strategy == "fsdp" and 1 < ranks < world.world_size and size / ranks <= memory / 2:
            strategy = "hsdp"
            reason += f", but do when sharded over the {ranks} ranks of a machine"
    state = f"weights, gradients and moments ({size / 2**30:.2f} GiB)"
    world.say(f"parallel.strategy=auto: {strategy}, because {state} {reason}")
    return strategy


def pick_reduction(
    config: ParallelConfig, module: nn.Module, world: World, memory: float = 0
) -> ParallelConfig:
    """The config with `accumulate_reduce=auto` resolved; if it becomes "every", prints why.

    memory: bytes per GPU; 0: read them from this rank's GPU. The limit, a quarter, is assumed.
    """
    if config.accumulate_reduce != "auto":
        return config
    if not memory:
        memory = torch.cuda.get_device_properties(world.device).total_memory
    size = 4 * sum(p.numel() for p in module.parameters() if p.requires_grad)
    if size <= memory / 4:
        return replace(config, accumulate_reduce="last")
    world.say(
        f"parallel.accumulate_reduce=auto: every, because whole gradients ({size / 2**30:.2f} "
        f"GiB) take more than a quarter of the device's {memory / 2**30:.1f} GiB"
    )
    return replace(config, accumulate_reduce="every")


def pick_cast(
    config: PrecisionConfig, strategy: Strategy, module: nn.Module, world: World
) -> PrecisionConfig:
    """The config. Under fsdp and hsdp `cast_by=auto` becomes autocast, and prints why, if the model
    has buffers that FSDP2's policy would not cast.
    """
    if not config.use_amp or config.cast_by != "auto" or strategy not in SHARDED:
        return config
    reason = reason_against_policy(module)
    if not reason:
        return config
    world.say(f"precision.cast_by=auto: autocast, because {reason}")
    return replace(config, cast_by="autocast")


def reason_against_policy(module: nn.Module) -> str:
    """Why FSDP2's policy can't cast this model; "" if no reason is known."""
    statistics = batch_statistics(module)
    if statistics:
        norm = next(iter(statistics)).rpartition(".")[0]
        return f"the policy would not cast the batch statistics of {norm}"
    for path, part in module.named_modules():
        is_parametrized = isinstance(part, parametrize.ParametrizationList)
        # Spectral norm and orthogonal parametrizations have such buffers, weight norm has none.
        if is_parametrized and any(buffer.is_floating_point() for buffer in part.buffers()):
            layer = path.partition(".parametrizations")[0]
            return f"the policy would not cast the buffers of {layer}'s parametrization"
    return ""


def batch_statistics(module: nn.Module) -> dict[str, Tensor]:
    """{name in the state dict: buffer that is computed from the batches}.

    Batch norm's running mean and variance; fake quantisation's ranges and the scales from them.
    """
    return {
        f"{path}.{name}".lstrip("."): statistic
        for path, part in module.named_modules()
        for name, statistic in part.named_buffers(recurse=False)
        if name in ("running_mean", "running_var")
        or (name in ("min_val", "max_val") and hasattr(part, "calculate_qparams"))
        or (name in ("scale", "zero_point") and hasattr(part, "fake_quant_enabled"))
    }


def replicas_of(config: ParallelConfig, world: World) -> int:
    """How many copies of the model hsdp keeps; auto: one per machine, or two on one machine."""
    if config.replicas != "auto":
        return config.replicas
    return max(2, world.world_size // world.local_world_size)


def accumulation_steps(config: TrainConfig, world_size: int) -> int:
    """Micro-batches per rank and step, from accumulation_steps or global_batch_size."""
    per_round = config.micro_batch_size * world_size  # samples in one micro-batch of every rank
    if config.global_batch_size == "auto":
        if config.accumulation_steps == "auto":
            return 1
        return config.accumulation_steps
    steps, rest = divmod(config.global_batch_size, per_round)
    if rest:
        near = max(1, round(config.global_batch_size / per_round)) * per_round
        raise ConfigError(
            f"train.global_batch_size={config.global_batch_size} is not a multiple of "
            f"micro_batch_size {config.micro_batch_size} x world size {world_size} = {per_round}; "
            f"use global_batch_size={near}"
        )
    if config.accumulation_steps not in ("auto", steps):
        product = per_round * config.accumulation_steps
        raise ConfigError(
            f"train.global_batch_size={config.global_batch_size} is not micro_batch_size "
            f"{config.micro_batch_size} x world size {world_size} x accumulation_steps "
            f"{config.accumulation_steps} = {product}; use accumulation_steps={steps}"
        )
    return steps
