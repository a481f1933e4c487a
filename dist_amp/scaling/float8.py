"""Float8 matrix products in the blocks' linear layers, by torchao: precision.dtype=fp8.

Each product casts its operands with a scale per tensor, from their largest value; results,
parameters, gradients and checkpoints keep their dtypes. Under fsdp and hsdp weights are gathered in
float8, too. Source: Micikevicius et al. 2022, arXiv:2209.05433.

Docs: docs/configuration.md
"""

import logging
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dist_amp.errors import ConfigError
from dist_amp.scaling.blocks import blocks_of, shared_parameters
from dist_amp.settings import Config
from dist_amp.world import World

MULTIPLE = 16  # of both sizes of a weight: what torch._scaled_mm takes
CAPABILITY = (8, 9)  # of the first GPUs with float8 tensor cores


def check_float8(config: Config, world: World) -> None:
    """Errors: ConfigError for settings or a device that rule out float8."""
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

    Those with hooks, shared or frozen weights, or sizes that are no multiples of 16 stay as they
    are. On a CPU float8 is emulated. Errors: ConfigError.
    """
    check_float8(config, world)
    try:
        # It warns of each of its kernels that this machine can't load.
        logging.getLogger("torchao").setLevel(logging.ERROR)
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear
    except ImportError as error:
        raise ConfigError(
            f"precision.dtype=fp8 needs torchao ({error}): pip install torchao, or use "
            "precision.dtype=bf16"
        ) from error
    linears = linears_in_blocks(task, module)
    chosen = {part for part in linears if takes_float8(part)}
    if not chosen:
        raise ConfigError(
            f"precision.dtype=fp8: none of the {len(linears)} linear layers in the model's blocks "
            f"can be converted; their sizes must be multiples of {MULTIPLE}, and their weights "
            "trained, not shared and without hooks; use precision.dtype=bf16"
        )
    on_gpu = world.device.type == "cuda"
    # A weight's gradient sums over rows, whose number may be no multiple of 16.
    options = Float8LinearConfig(emulate=not on_gpu, pad_inner_dim=True)
    convert_to_float8_training(
        module, module_filter_fn=lambda part, name: part in chosen, config=options
    )
    for part in module.modules():
        if isinstance(part, Float8Linear):
            take_no_rows(part)
    world.say(f"precision.dtype=fp8: {len(chosen)} of {len(linears)} linear layers in blocks")
    if not on_gpu:
        world.warn("precision.dtype=fp8 is emulated on a CPU: slower, and rounded as on a GPU")
    elif config.compile.blocks is False:
        world.warn("precision.dtype=fp8 gains speed only with compile.blocks, which is off")


def linears_in_blocks(task: Any, module: nn.Module) -> list[nn.Linear]:
    """Each once, without those that share their weight or stand in several places."""
    places = Counter(id(part) for _, part in module.named_modules(remove_duplicate=False))
    parts = [part for block in blocks_of(task, module) for part in block.modules()]
    linears = [part for part in parts if type(part) is nn.Linear and places[id(part)] == 1]
    shared = shared_parameters(module, linears)
    return [part for part in linears if part not in shared and part is not module]


def takes_float8(linear: nn.Linear) -> bool:
    has_hooks = linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks
    sizes_fit = linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0
    return linear.weight.requires_grad and sizes_fit and not has_hooks


def take_no_rows(linear: nn.Linear) -> None:
    """Let a layer take an idle expert's input, which has no largest value."""
    in_float8 = linear.forward

    def forward(rows: Tensor) -> Tensor:
        if rows.numel():
            return in_float8(rows)
        row = in_float8(rows.new_zeros(1, linear.in_features))
        return row[:0].view(*rows.shape[:-1], linear.out_features)

    vars(linear)["forward"] = forward


def gather_in_float8(unit: nn.Module) -> None:
    """Let FSDP2 cast the weights of a unit's float8 layers before it gathers them.

    It comes right before fully_shard, when they have memory and their final dtype.
    """
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    FLOAT8_OPS_TABLE.setdefault(torch.ops.aten.zeros_like.default, zero_gradient)
    for part in unit.modules():
        if isinstance(part, Float8Linear) and not isinstance(part.weight, DTensor):
            dtype = part.config.cast_config_weight.target_dtype
            weight = part.weight
            part.weight = nn.Parameter(
                WeightWithDynamicFloat8CastTensor(weight.detach(), part.linear_mm_config, dtype)
            )
            vars(part.weight).update(vars(weight))  # the user's, such as no_decay


def zero_gradient(op: Any, args: Any, kwargs: Any) -> Tensor:
    """The gradient that FSDP2 uses for a gathered weight that got none, such as an expert's."""
    weight = args[0]
    return weight._data.new_zeros(weight.shape, dtype=weight._orig_dtype)


def scale_before_forwards(model: Any) -> None:
    """Compute the scales of all gathered weights before each forward, by one all-reduce.

    Otherwise each weight has an all-reduce of its own when it is gathered. Kept from a step's end,
    as torchao suggests, they would be wrong after a load, and for averaged weights.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    # Before FSDP2's, which begins to gather.
    model.register_forward_pre_hook(
        lambda *_: precompute_float8_dynamic_scale_for_fsdp(model), prepend=True
    )


def as_plain(tensor: Tensor) -> Tensor:
    """The same memory without the class that gathers it in float8, for checkpoints."""
    if not isinstance(tensor, DTensor) or not hasattr(tensor._local_tensor, "_tensor"):
        return tensor
    return DTensor.from_local(
        tensor._local_tensor._tensor,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
