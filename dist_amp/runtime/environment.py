"""This process's place among all, from torchrun's environment variables or from the process group that exists."""

import os
from typing import NamedTuple

import torch
import torch.distributed as dist

from dist_amp.errors import ConfigError
from dist_amp.runtime.machine import check_architecture, check_gpus_are_used, why_unused
from dist_amp.settings import RunConfig


class Place(NamedTuple):
    """Words as torchrun defines them."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device


def environment_number(name: str, default: int) -> int:
    """A non-negative integer from the environment. Errors: ConfigError for anything else."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdigit():
        raise ConfigError(f"{name}={text!r} in the environment is not a whole number; start with torchrun, or unset it")
    return int(text)


def place_of(config: RunConfig) -> Place:
    """This process's ranks and device, as torchrun or an existing process group has them; no group is made."""
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    else:
        missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
        if len(missing) == 1:
            raise ConfigError(f"{missing[0]} is not set although its partner is; start with torchrun, or unset both")
        rank, world_size = environment_number("RANK", 0), environment_number("WORLD_SIZE", 1)
    if rank >= world_size:
        raise ConfigError(f"RANK={rank} must be below WORLD_SIZE={world_size}; start with torchrun")
    if config.device != "cpu" and not torch.cuda.is_available():
        if config.device == "cuda":
            raise ConfigError(f"run.device=cuda, but {why_unused() or 'torch finds no GPU'}; use run.device=cpu")
        check_gpus_are_used()
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    gpus = torch.cuda.device_count() if on_gpu else 0
    # Launchers other than torchrun may not say how the ranks fall on machines: then one rank per GPU.
    local_world_size = environment_number("LOCAL_WORLD_SIZE", min(world_size, gpus or world_size))
    local_rank = environment_number("LOCAL_RANK", rank % local_world_size)
    # Some show each process one GPU, its own; torchrun shows all of them to all.
    if on_gpu and local_world_size > gpus and (gpus > 1 or "TORCHELASTIC_RUN_ID" in os.environ):
        raise ConfigError(
            f"{local_world_size} processes on this machine (nproc_per_node) are more than its {gpus} GPUs; "
            f"use --nproc_per_node={gpus}, or --run.device cpu"
        )
    device = torch.device("cuda", local_rank % gpus) if on_gpu else torch.device("cpu")
    if on_gpu:
        check_architecture(device)
    return Place(rank, local_rank, world_size, local_world_size, device)
