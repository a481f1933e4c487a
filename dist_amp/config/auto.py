"""What "auto" resolves to: the strategy for a model on these ranks, and the blocks to shard it by."""

import torch
from torch import nn

from dist_amp.errors import ConfigError
from dist_amp.settings import ParallelConfig, Strategy
from dist_amp.world import World

BYTES_PER_PARAMETER = 16  # float32 parameter, gradient and AdamW's two moments


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
