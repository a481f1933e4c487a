"""What a user brings: a plain class with four methods, found by `--task.target my_file:MyTask`.

No base class and no registry: `Task` only writes the methods down. Optional methods, by name:

    collate(samples)        list of samples -> batch; default: PyTorch's default collate
    augment(sample, rng)    sample -> training sample; rng: a torch.Generator, the only source of
                            randomness, seeded by run.seed, epoch and sample, so that world size
                            and workers change nothing
    blocks(model)           list of modules: the units that FSDP shards and gathers; default: see
                            scaling/blocks.py
    units(model)            more such units, such as an untied embedding and head; each forward
                            calls each once
    ranks_skip_blocks       True if the losses of two ranks may depend on different blocks
                            in one micro-batch; every rank still calls every block
    tokens(batch)           int: how many tokens a batch holds, for tokens per second
    flops_per_item(model)   number: floating-point operations of one sample's forward and backward,
                            for MFU; a multiply-add is two, recomputation none;
                            telemetry.mfu.count_flops counts them
    metrics(model, batch)   dict of scalar sums for evaluation, each divided by the total weight as
                            the loss is, or of pairs (sum, weight); the model comes without DDP's
                            wrapper; with a "loss" among them, loss_sum is not called again
    load(model)             fills the parameters, sharded or whole, from files: build_model's are on
                            the meta device
    export(model, folder)   writes what `export --format hf` exports; default:
                            model.save_pretrained(folder)
    sample(model)           a sample from the trained model: a text, or an image [C, H, W] in 0..1
    groups(model)           list of dicts: "params" (names, fnmatch patterns, or parameters of
                            `model`, which is sharded already), and "name", "lr_scale" (times
                            optim.lr), "weight_decay" if they differ
    optimizer(groups, lr)   a torch optimizer of these groups; its learning rates are set each step
    schedule(step)          the factor of optim.lr after `step` applied steps, warm-up included
    on_step(run, report), on_evaluation(run, values), train_metrics(run, report)
                            called by the main job: see supervise/callbacks.py

A constructor parameter called `data` gets the `[data]` section; every other one is set by
`--task.args.NAME VALUE`.
"""

import sys
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from dist_amp.distributed.process import hide_progress_bars
from dist_amp.errors import DataError, Failure, first_line, in_one_line
from dist_amp.settings import Strategy
from dist_amp.world import World


class Task(Protocol):
    """What the loop asks of a user's class. A batch is collated samples, moved to the device."""

    def build_model(self) -> nn.Module:
        """The model, on the CPU, in float32; the random seed is set and equal on all ranks."""

    def build_dataset(self, split: str) -> Any:
        """The samples of "train" or "validation", with len() and []; None for no validation."""

    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss, summed over what `weight` counts: a float32 scalar on the model's device.

        Call `model(...)` once, and only that: over several ranks the model is wrapped or sharded.
        Leave the parameters as they are: autocast casts each once per step.
        """

    def weight(self, batch: Any) -> float | Tensor:
        """What the loss is divided by, over all ranks and micro-batches: a number or a scalar."""


def call_task(
    kind: type[Failure], name: str, method: Callable[..., Any], *args: Any, when: str = ""
) -> Any:
    """What the task's method returns. Errors: `kind`, in one line that names the file and line."""
    try:
        return method(*args)
    except Failure:
        raise
    except Exception as error:
        raise kind(f"the task's {name} failed{when}: {in_one_line(error)}; fix it") from error


def as_scalar(value: float | Tensor, what: str, device: torch.device) -> Tensor:
    """The value as a scalar tensor. Errors: DataError for a tensor of another shape."""
    if isinstance(value, Real):
        return torch.full((), float(value), device=device)
    if not isinstance(value, Tensor):
        raise DataError(
            f"the task's {what} a {type(value).__name__}, not a number or a scalar tensor"
        )
    if value.ndim != 0:
        raise DataError(
            f"the task's {what} a tensor of shape {list(value.shape)}, not a number or a scalar "
            "tensor; sum it up"
        )
    return value.to(device)


def check_weight(weight: float | Tensor, source: str = "weight(batch) returned") -> float | Tensor:
    """The weight of a batch, or of a metric. Errors: DataError for a negative number, or none."""
    if isinstance(weight, Tensor) or (isinstance(weight, Real) and not weight < 0):
        return weight
    what = type(weight).__name__
    if isinstance(weight, Real):
        what = f"{weight:g}"
    raise DataError(
        f"the task's {source} {what}; return what counts in the batch: a number or scalar tensor, "
        "at least 0"
    )


def built_model(task: Task) -> nn.Module:
    """The task's model, in training mode.

    Errors: DataError for anything else, and if it has nothing to train or complex parameters.
    """
    module = task.build_model()
    if not isinstance(module, nn.Module):
        raise DataError(
            f"the task's build_model returned {type(module).__name__}; return the model, an "
            "nn.Module"
        )
    if not any(p.requires_grad for p in module.parameters()):
        raise DataError(
            f"none of the {len(list(module.parameters()))} parameters of the task's model is "
            "trained; build_model must leave some of them with requires_grad=True"
        )
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise DataError(
                f"the parameter {name} of the task's model is {parameter.dtype}, and only real "
                "ones are trained; store it with a last dimension of 2, and use "
                "torch.view_as_complex in forward"
            )
    if not any(part.training for part in module.modules()):
        module.train()  # pretrained models come in evaluation mode
    return module


def check_loss(loss: Any, device: torch.device) -> Tensor:
    """The loss, if it is a float32 scalar with a gradient on the device; nothing is read back.

    Errors: DataError.
    """
    if not isinstance(loss, Tensor) or loss.ndim != 0 or loss.dtype != torch.float32:
        what = type(loss).__name__
        if isinstance(loss, Tensor):
            what = f"{loss.dtype} of shape {list(loss.shape)}"
        raise DataError(
            f"the task's loss_sum returned {what}, not a float32 scalar; sum over all elements, "
            "and compute the loss in float32, as in `logits.float()`"
        )
    if loss.device != device:
        raise DataError(
            f"the task's loss_sum returned a loss on {loss.device}, not on {device} where its "
            "batch is"
        )
    if not loss.requires_grad:
        raise DataError(
            "the task's loss_sum returned a loss without a gradient; it must depend on the model's "
            "parameters"
        )
    return loss


def check_model(model: nn.Module, strategy: Strategy) -> None:
    """Errors: DataError for a model that can't be called, which DDP and FSDP2 do."""
    if strategy != "single" and isinstance(model, nn.ModuleDict | nn.ModuleList):
        raise DataError(
            f"the task's build_model returned a {type(model).__name__}, which can't be called, and "
            f"parallel.strategy={strategy} works through calls; put its parts into an nn.Module "
            "with a forward"
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


def build_split(task: Task, split: Literal["train", "validation"], world: World) -> Any:
    """The task's dataset of a split; each node's first rank goes first, and fills the caches."""
    if not (world.is_main and sys.stderr.isatty()):
        hide_progress_bars()
    if world.local_rank != 0:
        world.wait_long()
    dataset = task.build_dataset(split)
    if world.local_rank == 0:
        world.wait_long()
    if dataset is not None:
        check_dataset(dataset, split)
    return dataset


def check_dataset(dataset: Any, split: str) -> None:
    """Errors: DataError for anything but a map-style dataset."""
    is_other = isinstance(dataset, str | bytes | Mapping)
    by_index = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if by_index and not is_other and not isinstance(dataset, IterableDataset):
        return
    fix = "return a map-style dataset"
    if hasattr(dataset, "__iter__") and not is_other:
        fix += (
            ", since a stream can't be resumed exactly: in its place set data.path to its files, "
            "with data.view=parquet for Parquet, save it with save_to_disk, or its tokens with "
            "python -m dist_amp.tokenize"
        )
    raise DataError(
        f"the task's build_dataset({split!r}) returned a {type(dataset).__name__}, not samples by "
        f"number; {fix}"
    )
