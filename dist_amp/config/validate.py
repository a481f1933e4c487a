"""Rejects what can't be trained: conflicting settings, and wrong results of a task's methods."""

from collections.abc import Mapping
from functools import cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from dist_amp.config.auto import SHARDED, replicas_of
from dist_amp.errors import ConfigError, DataError, first_line
from dist_amp.files import present
from dist_amp.settings import ParallelConfig, PrecisionConfig, Strategy, TrainConfig
from dist_amp.world import World

# ---- settings


def check_parallel(
    config: ParallelConfig,
    strategy: Strategy,
    precision: PrecisionConfig,
    module: nn.Module,
    world: World,
) -> None:
    """Raises ConfigError for [parallel] settings or parameter hooks that `strategy` rules out."""
    on_cpu = world.device.type == "cpu"
    sharded = strategy in SHARDED
    replicas = replicas_of(config, world)
    casts = precision.use_amp and precision.cast_by != "autocast"
    has_scaler = precision.name == "fp16"
    needs_fp16 = "needs precision.dtype=fp16: without its loss scaler small gradients become zero"
    needs_policy = "needs use_amp=true and precision.cast_by=policy: else parameters are float32"
    problem = ""
    if sharded and not casts and config.param_dtype != "fp32":
        problem = f"param_dtype={config.param_dtype} {needs_policy}; use fp32"
    elif sharded and not casts and config.reduce_dtype != "fp32":
        problem = f"reduce_dtype={config.reduce_dtype} {needs_policy}; use fp32"
    elif sharded and not has_scaler and config.reduce_dtype == "fp16":
        problem = f"reduce_dtype=fp16 {needs_fp16}; use fp32 or bf16"
    elif sharded and on_cpu and config.cpu_offload:
        problem = "cpu_offload=true needs a GPU, and run.device is the CPU; use false"
    elif strategy == "ddp" and not has_scaler and config.comm_dtype == "fp16":
        problem = f"comm_dtype=fp16 {needs_fp16}; use bf16 or off"
    elif strategy == "ddp" and on_cpu and config.comm_dtype == "bf16":
        problem = "comm_dtype=bf16 needs GPUs: on a CPU gloo does not sum bf16; use off"
    elif sharded and config.comm_dtype != "off":
        problem = f"comm_dtype={config.comm_dtype} has no effect under {strategy}; use reduce_dtype"
    elif strategy == "hsdp" and world.world_size % replicas:
        problem = f"replicas={replicas} does not divide {world.world_size} ranks; use one that does"
    if problem:
        raise ConfigError(f"parallel.{problem}")
    for name, parameter in module.named_parameters() if sharded else ():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ConfigError(
                f"{strategy} would lose the hook on the parameter {name} of build_model; register "
                "it on the module, or use parallel.strategy=ddp"
            )


def check_precision(config: PrecisionConfig, sharded: bool, world: World) -> None:
    """Raises ConfigError for a precision that the device or the strategy rules out."""
    on_cpu = world.device.type == "cpu"
    if config.use_amp and present("distributed.machine") and (world.is_main or not on_cpu):
        from dist_amp.distributed.machine import check_dtype

        if warning := check_dtype(config.name, world.device):
            warn_once(world, warning)
    if config.cast_by == "policy" and not sharded:
        raise ConfigError(
            "precision.cast_by=policy needs parallel.strategy fsdp or hsdp; use "
            "precision.cast_by=autocast"
        )


@cache  # a process that builds several runs warns once
def warn_once(world: World, text: str) -> None:
    world.warn(text)


# ---- what a task returns


def check_dataset(dataset: Any, split: str) -> None:
    """Raises DataError if it is not map-style, or empty for training. None: no such split."""
    has_indices = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    is_not_samples = isinstance(dataset, str | bytes | Mapping | IterableDataset)
    if dataset is not None and (is_not_samples or not has_indices):
        raise DataError(
            f"the task's build_dataset({split!r}) returned a {type(dataset).__name__}, not a "
            "map-style dataset; return one, with __len__ and __getitem__. Streams can't be resumed "
            "exactly: set data.path to its files, or save it with save_to_disk"
        )
    if split == "train" and (dataset is None or len(dataset) == 0):
        raise DataError(
            "the training dataset is empty; check data.name, data.path and the task's build_dataset"
        )


def check_length(
    length: int, micro_batch_size: int, accumulation_steps: int, drop_last: bool, world: World
) -> None:
    """Raises DataError for less than one global batch, with drop_last or a configured size."""
    global_batch_size = micro_batch_size * accumulation_steps * world.world_size
    is_default = micro_batch_size * accumulation_steps == TrainConfig.micro_batch_size
    if length < global_batch_size and (drop_last or not is_default):
        raise DataError(
            f"the training dataset has {length} samples, fewer than one global batch of "
            f"{global_batch_size} = micro_batch_size {micro_batch_size} x {world.world_size} ranks "
            f"x accumulation_steps {accumulation_steps}; use more data or a smaller batch"
        )


def check_coupled(task: Any, split: str, length: int, batch: int, world: World) -> None:
    """Raises ConfigError for coupled samples if the last batch is smaller. batch: of all ranks."""
    if getattr(task, "couples_samples", False) and world.world_size > 1 and length % batch:
        raise ConfigError(
            f"the task has couples_samples=True, but of {length} samples the last {split} batch "
            f"has {length % batch}, not {batch}, so ranks get unequal numbers of them; use "
            f"data.drop_last=true to train, and hold out a multiple of {batch}"
        )


def check_model(module: Any) -> None:
    """Raises DataError unless it is an uncompiled nn.Module with a parameter to train."""
    if not isinstance(module, nn.Module):
        raise DataError(
            f"the task's build_model returned {type(module).__name__}; return the model, an "
            "nn.Module"
        )
    if hasattr(module, "_orig_mod"):
        raise DataError(
            "the task's build_model returned a compiled model; return the model as it is, and set "
            "compile.blocks=true"
        )
    if not any(p.requires_grad for p in module.parameters()):
        raise DataError(
            "none of the parameters of the task's model is trained; build_model must leave some of "
            "them with requires_grad=True"
        )


def check_scalar(value: Any, what: str, rule: str = "a number or a scalar tensor") -> None:
    """Raises DataError unless it is a scalar. what: a text such as "weight(batch) returned"."""
    if isinstance(value, Real) or (isinstance(value, Tensor) and value.ndim == 0):
        return
    shown = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        shown = f"a tensor of shape {list(value.shape)}"
    raise DataError(f"the task's {what} {shown}, not {rule}")


def check_weight(weight: Any, what: str = "weight(batch) returned") -> None:
    """Raises DataError for a weight, of a batch or a metric, that is negative or no scalar."""
    rule = "a number or a scalar tensor that is at least 0"
    check_scalar(weight, what, rule)
    if isinstance(weight, Real) and weight < 0:
        raise DataError(f"the task's {what} {weight:g}, not {rule}")


def check_loss(loss: Any, device: torch.device) -> None:
    """Raises DataError unless it is a float32 scalar with a gradient on the device."""
    is_scalar = isinstance(loss, Tensor) and loss.ndim == 0 and loss.dtype == torch.float32
    if is_scalar and loss.device == device and loss.requires_grad:
        return
    what = type(loss).__name__  # only for the error: formatting takes 4 us per micro-batch
    if isinstance(loss, Tensor):
        what = f"{loss.dtype} of shape {list(loss.shape)} on {loss.device}"
        what += f" with requires_grad={loss.requires_grad}"
    raise DataError(
        f"the task's loss_sum returned {what}, not a float32 scalar on {device} with a gradient; "
        "sum over all elements, and compute the loss in float32, as in `logits.float()`"
    )


def check_model_use(error: BaseException) -> None:
    """Raises DataError instead of torch's error, if loss_sum used parts of a wrapped model."""
    wrapped_model_errors = (
        "'DistributedDataParallel' object",
        "'FSDPCommContext' object",
        "mixed torch.Tensor and DTensor",
    )
    if any(text in str(error) for text in wrapped_model_errors):
        raise DataError(
            f"the task's loss_sum did more with its model than call it ({first_line(error)}); over "
            "several ranks the model is wrapped or sharded: call model(...) once per batch, and "
            "choose submodules in the model's forward"
        ) from error
