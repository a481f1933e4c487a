"""Refuses what can't be trained: settings that do not work together, or what a task returns."""

import re
from collections.abc import Mapping
from functools import cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import IterableDataset

from dist_amp.config.auto import SHARDED, batch_statistics, replicas_of
from dist_amp.errors import ConfigError, DataError, first_line
from dist_amp.files import present
from dist_amp.settings import ParallelConfig, PrecisionConfig, ScalerConfig, Strategy, TrainConfig
from dist_amp.world import World

# ---- settings


def check_parallel(
    config: ParallelConfig,
    strategy: Strategy,
    precision: PrecisionConfig,
    module: nn.Module,
    world: World,
) -> None:
    """Reject a strategy that the model rules out, and settings of [parallel] that do not fit."""
    on_cpu = world.device.type == "cpu"
    for name, part in module.named_modules():
        if getattr(part, "max_norm", None) is not None and strategy != "single":
            raise ConfigError(
                f"the layer {name} has max_norm={part.max_norm:g}, by which its forward rescales "
                "the rows that this rank's batch reads, so that the ranks' weights would differ; "
                "leave it out, and call torch.nn.functional.embedding in a forward with "
                "torch.renorm(weight, 2, 0, max_norm), or renormalise in on_step(run, report)"
            )
    if strategy in SHARDED:
        check_shardable(strategy, module)
        check_sharded(config, precision, module)
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
    if strategy == "hsdp" and world.world_size % replicas_of(config, world):
        divisors = [n for n in range(1, world.world_size + 1) if world.world_size % n == 0]
        raise ConfigError(
            f"parallel.replicas={replicas_of(config, world)} does not divide {world.world_size} "
            f"ranks; use one of {divisors}"
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


def check_sharded(config: ParallelConfig, precision: PrecisionConfig, module: nn.Module) -> None:
    """Reject dtypes of sharded parameters and gradients that need another precision."""
    casts = precision.use_amp and precision.cast_by != "autocast"
    for name in ("param_dtype", "reduce_dtype"):
        dtype = getattr(config, name)
        if dtype != "fp32" and not casts:
            raise ConfigError(
                f"parallel.{name}={dtype} needs use_amp=true and precision.cast_by=policy: "
                "otherwise parameters are float32; use fp32"
            )
    if config.reduce_dtype == "fp16" and precision.name != "fp16":
        raise ConfigError(
            "parallel.reduce_dtype=fp16 needs precision.dtype=fp16: without its loss scaler "
            "small gradients become zero; use fp32 or bf16"
        )
    statistics = batch_statistics(module)
    if casts and statistics:
        raise ConfigError(
            "precision.cast_by=policy would cast the weights of "
            f"{next(iter(statistics)).rpartition('.')[0]} but not its batch statistics; use "
            "precision.cast_by=autocast"
        )


def check_shardable(strategy: Strategy, module: nn.Module) -> None:
    """Reject a parameter that FSDP2 can't shard: a scalar, not contiguous, or with a hook."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ConfigError(
                f"the parameter {name} has a hook from build_model, and {strategy} would lose it "
                "with the parameter that it replaces; register it on the module, whose hooks stay, "
                "or use parallel.strategy=ddp"
            )
        what = ""
        if parameter.ndim == 0:
            what = "a scalar; give it the shape [1]"
        elif not parameter.is_contiguous():
            what = "not contiguous, as with memory_format=torch.channels_last; make it contiguous"
        if what:
            raise ConfigError(
                f"{strategy} can't shard the parameter {name}, which is {what} in build_model, or "
                "use parallel.strategy=ddp"
            )


def check_precision(config: PrecisionConfig, sharded: bool, world: World) -> None:
    """Reject a precision that the device, the strategy or its own settings rule out."""
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
    if config.cast_by != "auto" and not config.use_amp:
        raise ConfigError(
            f"precision.cast_by={config.cast_by} casts, but use_amp=false computes in float32; use "
            "auto"
        )
    if config.scaler != ScalerConfig() and config.name != "fp16":
        world.warn(
            f"precision.scaler has no effect in {config.name}: only fp16 needs a loss scaler"
        )


@cache  # a process that builds several runs warns once
def warn_once(world: World, text: str) -> None:
    world.warn(text)


# ---- what a task returns


def check_dataset(dataset: Any, split: str) -> None:
    """Errors: DataError for anything but a map-style dataset; None is a split without one."""
    by_index = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    is_other = isinstance(dataset, str | bytes | Mapping | IterableDataset)
    if dataset is not None and (is_other or not by_index):
        raise DataError(
            f"the task's build_dataset({split!r}) returned a {type(dataset).__name__}, not samples "
            "by number; return a map-style dataset. A stream can't be resumed exactly: set "
            "data.path to its files, or save it with save_to_disk"
        )


def check_length(
    length: int, micro_batch_size: int, accumulation_steps: int, drop_last: bool, world: World
) -> None:
    """Errors: DataError for a dataset that is empty, or smaller than a batch that was asked for."""
    if length == 0:
        raise DataError(
            "the training dataset is empty; check data.name, data.path and the task's build_dataset"
        )
    global_batch_size = micro_batch_size * accumulation_steps * world.world_size
    is_default = micro_batch_size * accumulation_steps == TrainConfig.micro_batch_size
    if length < global_batch_size and (drop_last or not is_default):
        samples = "sample" if length == 1 else "samples"
        raise DataError(
            f"the training dataset has {length} {samples}, fewer than one global batch of "
            f"{global_batch_size} = micro_batch_size {micro_batch_size} x {world.world_size} ranks "
            f"x accumulation_steps {accumulation_steps}; use more data or a smaller batch"
        )


def check_coupled(task: Any, split: str, length: int, batch: int, world: World) -> None:
    """Errors: ConfigError for coupled samples of a last, smaller batch. batch: of all ranks."""
    if getattr(task, "couples_samples", False) and world.world_size > 1 and length % batch:
        raise ConfigError(
            f"the task has couples_samples=True, and the last of the {split} batches of {batch} "
            f"has {length % batch} of the {length} samples, unequally many on the ranks; use "
            f"data.drop_last=true to train, and hold out a multiple of {batch}"
        )


def check_model(module: Any) -> None:
    """Errors: DataError for what can't be trained; ConfigError for a part from torch.export."""
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
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise DataError(
                f"the parameter {name} of the task's model has no shape before its first forward; "
                "call the model once in build_model, or give the layer its input size"
            )
        if parameter.requires_grad and parameter.is_complex():
            raise DataError(
                f"the parameter {name} of the task's model is {parameter.dtype}, and only real "
                "ones are trained; use torch.view_as_complex in forward"
            )
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) is True and hasattr(part, "embedding_dim"):
            raise DataError(
                f"the layer {name} of the task's model has sparse gradients, which are neither "
                "reduced nor clipped; use sparse=False"
            )
        if part.train.__module__ == "torch.export.exported_program":
            what = f"{name or 'the root'} of the task's model is from torch.export"
            raise ConfigError(f"{what}, and can't train(); return the model that was exported")
    if not any(p.requires_grad for p in module.parameters()):
        raise DataError(
            f"none of the {len(list(module.parameters()))} parameters of the task's model is "
            "trained; build_model must leave some of them with requires_grad=True"
        )


def check_kept_state(task: Any) -> None:
    """Errors: ConfigError for one of state_dict and load_state_dict alone, or odd `unsaved`."""
    methods = [name for name in ("state_dict", "load_state_dict") if hasattr(task, name)]
    if len(methods) == 1:
        raise ConfigError(
            f"the task has {methods[0]}, but not both of state_dict() and load_state_dict(state), "
            "which save and restore what it keeps; add the other"
        )
    unsaved = getattr(task, "unsaved", ())
    if not isinstance(unsaved, tuple | list | set):
        raise ConfigError(f"the task's unsaved={unsaved!r}: give a tuple of names")


def check_scalar(value: Any, what: str, rule: str = "a number or a scalar tensor") -> None:
    """Errors: DataError for anything else. what: such as "weight(batch) returned"."""
    if isinstance(value, Real) or (isinstance(value, Tensor) and value.ndim == 0):
        return
    shown = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        shown = f"a tensor of shape {list(value.shape)}"
    raise DataError(f"the task's {what} {shown}, not {rule}")


def check_weight(weight: Any, what: str = "weight(batch) returned") -> None:
    """Errors: DataError for a weight of a batch, or of a metric, that is negative or no scalar."""
    rule = "what counts in the batch: a number or a scalar tensor, at least 0"
    check_scalar(weight, what, rule)
    if isinstance(weight, Real) and weight < 0:
        raise DataError(f"the task's {what} {weight:g}, not {rule}")


def check_loss(loss: Any, device: torch.device) -> None:
    """Errors: DataError unless it is a float32 scalar with a gradient on the device."""
    is_scalar = isinstance(loss, Tensor) and loss.ndim == 0 and loss.dtype == torch.float32
    if is_scalar and loss.device == device and loss.requires_grad:
        return
    what = type(loss).__name__  # only now: a text per micro-batch would cost 4 us
    if isinstance(loss, Tensor):
        what = f"{loss.dtype} of shape {list(loss.shape)} on {loss.device}"
        what += f" with requires_grad={loss.requires_grad}"
    raise DataError(
        f"the task's loss_sum returned {what}, not a float32 scalar on {device} with a gradient; "
        "sum over all elements, and compute the loss in float32, as in `logits.float()`"
    )


# What torch says of a part of a wrapped or sharded model that is used without a call of the whole.
OF_WRAPPED_MODELS = (
    "'DistributedDataParallel' object",
    "'FSDPCommContext' object",
    "mixed torch.Tensor and DTensor",
)


def check_model_use(error: BaseException) -> None:
    """Errors: DataError in place of one from a use of the model that only one process allows."""
    if any(text in str(error) for text in OF_WRAPPED_MODELS):
        raise DataError(
            f"the task's loss_sum did more with its model than call it ({first_line(error)}); over "
            "several ranks the model is wrapped or sharded: call model(...) once per batch, and "
            "choose submodules in the model's forward"
        ) from error
    if re.search("dtype|scalar type", str(error)) and re.search("[Dd]ouble", str(error)):
        raise DataError(
            f"the task's loss_sum computes in float64 ({first_line(error)}), and parameters are "
            "trained in float32; leave out .double() for inputs and targets"
        ) from error
