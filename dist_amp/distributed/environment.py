"""This process's rank and device, by torchrun's variables or the existing process group."""

import os
from typing import NamedTuple

import torch
import torch.distributed as dist

from dist_amp.errors import ConfigError
from dist_amp.settings import RunConfig

LAUNCHER = "DIST_AMP_LAUNCHER"  # in the environment of ranks: the process id of `dist_amp launch`


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
        raise ConfigError(
            f"{name}={text!r} in the environment is not a whole number; start with torchrun, or "
            "unset it"
        )
    return int(text)


def place_of(config: RunConfig) -> Place:
    """This process's ranks and device, by torchrun's variables or the existing process group."""
    rank, world_size = _rank_and_world_size()
    if config.device != "cpu" and not torch.cuda.is_available():
        from dist_amp.distributed.gpu_checks import check_gpus_are_used

        check_gpus_are_used(device=config.device)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device=cuda, but torch finds no GPU; use run.device=cpu")
    device = torch.device("cpu")
    gpus = 0
    if config.device != "cpu" and torch.cuda.is_available():
        gpus = torch.cuda.device_count()
    # Other launchers than torchrun may not say how ranks fall on machines: then one rank per GPU.
    local_world_size = environment_number("LOCAL_WORLD_SIZE", min(world_size, gpus or world_size))
    local_rank = environment_number("LOCAL_RANK", rank % local_world_size)
    # Some launchers show each process one GPU only; torchrun shows all of them to all.
    one_gpu_each = gpus == 1 and "TORCHELASTIC_RUN_ID" not in os.environ
    if gpus and local_world_size > gpus and not one_gpu_each:
        raise ConfigError(
            f"{local_world_size} processes on this machine (nproc_per_node) are more than its "
            f"{gpus} GPUs; use --nproc_per_node={gpus}, or --run.device cpu"
        )
    if gpus:
        device = torch.device("cuda", local_rank % gpus)
    if device.type == "cuda":
        from dist_amp.distributed.gpu_checks import check_architecture

        check_architecture(device)
    return Place(rank, local_rank, world_size, local_world_size, device)


def _rank_and_world_size() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
    if len(missing) == 1:
        raise ConfigError(
            f"{missing[0]} is not set although its partner is; start with torchrun, or unset both"
        )
    rank = environment_number("RANK", 0)
    world_size = environment_number("WORLD_SIZE", 1)
    if rank >= world_size:
        raise ConfigError(f"RANK={rank} must be below WORLD_SIZE={world_size}; start with torchrun")
    return rank, world_size


def attempt() -> int:
    """How many times torchrun has restarted these processes."""
    return environment_number("TORCHELASTIC_RESTART_COUNT", 0)
