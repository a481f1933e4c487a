"""precision.dtype=fp8: float8 matrix products in the blocks' linear layers, by torchao.

Each product casts its operands to float8, with one scale per tensor from its largest magnitude.
Results, parameters, gradients, FSDP2's all-gathers and checkpoints keep their dtypes. Source:
Micikevicius et al. 2022, arXiv:2209.05433.

Docs: docs/configuration.md
"""

import logging
from collections import Counter
from typing import Any

import torch
from torch import nn

from dist_amp.errors import ConfigError
from dist_amp.scaling.blocks import blocks_of, shared_parameters
from dist_amp.settings import Config
from dist_amp.world import World

MULTIPLE = 16  # torch._scaled_mm needs both sizes of a weight to be multiples of this
CAPABILITY = (8, 9)  # compute capability of the first GPUs with float8 tensor cores


def check_float8(config: Config, world: World) -> None:
    """Raises ConfigError if the precision settings or the device don't allow float8."""
    problem = ""
    if config.precision.name == "fp32":
        problem = "use_amp=false computes in float32: use --use_amp true"
    elif world.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(world.device)
        if (major, minor) < CAPABILITY:
            name = torch.cuda.get_device_name(world.device)
            problem = (
                f"it needs compute capability 8.9 (L4, L40S, RTX 4090, H100 and later), and {name} "
                f"has {major}.{minor}"
            )
    if problem:
        raise ConfigError(f"precision.dtype=fp8: {problem}; or use precision.dtype=bf16")


def to_float8(config: Config, task: Any, module: nn.Module, world: World) -> None:
    """Convert the blocks' linear layers in place, before anything wraps them.

    Layers with hooks, shared or frozen weights, or sizes that are not multiples of 16 are left
    unchanged. On a CPU, float8 is emulated. Raises ConfigError if no layer can be converted.
    """
    check_float8(config, world)
    try:
        # torchao warns about each of its kernels that this machine can't load.
        logging.getLogger("torchao").setLevel(logging.ERROR)
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ConfigError(
            f"precision.dtype=fp8 needs torchao ({error}): pip install torchao, or use "
            "precision.dtype=bf16"
        ) from error
    linears = linears_in_blocks(task, module)
    chosen = {part for part in linears if can_use_float8(part)}
    if not chosen:
        raise ConfigError(
            f"precision.dtype=fp8: none of the {len(linears)} linear layers in the model's blocks "
            f"can be converted; their sizes must be multiples of {MULTIPLE}, and their weights "
            "trained, not shared and without hooks; use precision.dtype=bf16"
        )
    on_gpu = world.device.type == "cuda"
    # pad_inner_dim: a weight's gradient sums over the batch's rows, which may not be 16 x n.
    options = Float8LinearConfig(emulate=not on_gpu, pad_inner_dim=True)
    convert_to_float8_training(
        module, module_filter_fn=lambda part, name: part in chosen, config=options
    )
    world.say(f"precision.dtype=fp8: {len(chosen)} of {len(linears)} linear layers in blocks")
    if not on_gpu:
        world.warn("precision.dtype=fp8 is emulated on a CPU: slower, and rounded as on a GPU")
    elif config.compile.blocks is False:
        world.warn("precision.dtype=fp8 gains speed only with compile.blocks, which is off")


def linears_in_blocks(task: Any, module: nn.Module) -> list[nn.Linear]:
    """The blocks' linear layers, without those that share a weight or are registered twice."""
    copies = Counter(id(part) for _, part in module.named_modules(remove_duplicate=False))
    parts = [part for block in blocks_of(task, module) for part in block.modules()]
    linears = [part for part in parts if type(part) is nn.Linear and copies[id(part)] == 1]
    shared = shared_parameters(module, linears)
    return [part for part in linears if part not in shared and part is not module]


def can_use_float8(linear: nn.Linear) -> bool:
    has_hooks = linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks
    sizes_fit = linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0
    return linear.weight.requires_grad and sizes_fit and not has_hooks
