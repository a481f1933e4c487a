"""One optimizer step, from micro-batches to the applied or skipped update; and its counterpart without gradients.

Words: a micro-batch is one forward and backward; a step is one optimizer step from `accumulation_steps` of them, fewer
where an epoch ends; a step is applied or skipped.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import torch
from torch import Tensor

from dist_amp.config import ConfigError, Range
from dist_amp.data import Padding
from dist_amp.interval import StepReport
from dist_amp.runtime import DataError
from dist_amp.task import Task

if TYPE_CHECKING:
    from dist_amp.run import Run

Count = Annotated[int, Range(low=1)]
T = TypeVar("T")


@dataclass(frozen=True)
class TrainConfig:
    steps: Annotated[int, Range(low=1, high=10_000_000)] = 100
    """Optimizer steps, applied or skipped."""
    micro_batch_size: Count = 8
    """Samples in one forward and backward of one rank."""
    accumulation_steps: Count | Literal["auto"] = "auto"
    """Micro-batches in a step; auto: as global_batch_size asks for, else 1."""
    global_batch_size: Count | Literal["auto"] = "auto"
    """Samples in a step over all ranks: micro_batch_size x ranks x accumulation_steps; auto: that product."""
    clip_by: Literal["norm", "value", "off"] = "norm"
    """Limit the norm of all gradients together, or each of their elements, or nothing."""
    max_grad_norm: Annotated[float, Range(above=0)] = 1.0
    """The limit of clip_by=norm."""
    max_grad_value: Annotated[float, Range(above=0)] = 1.0
    """The limit of clip_by=value."""
    max_skips_in_a_row: Count = 50
    """End the run when so many steps in a row were skipped; looked at every metrics.log_every steps."""
    gc_every: Count | Literal["off"] = 50
    """Steps between Python's collections of garbage, on all ranks at once; off: whenever Python likes, which holds up
    the other ranks for each rank's."""


@dataclass(frozen=True)
class EvalConfig:
    every: Count | Literal["off"] = 100
    """Steps between evaluations; there is one at the end as well. off: none at all."""
    batches: Count | Literal["all"] = "all"
    """How many micro-batches of each rank an evaluation takes."""


def accumulation_steps(config: TrainConfig, world_size: int) -> int:
    """Micro-batches per step, from whichever of accumulation_steps and global_batch_size is set."""
    per_round = config.micro_batch_size * world_size
    if config.global_batch_size == "auto":
        return 1 if config.accumulation_steps == "auto" else config.accumulation_steps
    wanted, rest = divmod(config.global_batch_size, per_round)
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    if rest:
        near = max(1, round(config.global_batch_size / per_round)) * per_round
        raise ConfigError(
            f"train.global_batch_size={config.global_batch_size} is not a multiple of micro_batch_size "
            f"{config.micro_batch_size} x {ranks} = {per_round}; use global_batch_size={near}"
        )
    if config.accumulation_steps not in ("auto", wanted):
        product = per_round * config.accumulation_steps
        raise ConfigError(
            f"train.global_batch_size={config.global_batch_size} is not micro_batch_size {config.micro_batch_size} x "
            f"{ranks} x accumulation_steps {config.accumulation_steps} = {product}; use accumulation_steps={wanted}"
        )
    return wanted


def train_step(run: "Run", micro_batches: Sequence[Any]) -> StepReport:
    """Apply one optimizer step from this rank's micro-batches; nothing here waits for the device.

    Every rank calls it with equally many micro-batches; `Padding` counts for nothing.
    """
    # A mean of means is biased when masks or tails are uneven: normalise once, by what counts on all ranks. That is
    # known only when the gradients are; the small difference to what was expected is divided out with the loss scale.
    own_weight = total_weight(run.task, micro_batches, run.world.device)
    # The strategies average gradients over ranks, so that the mean over ranks is what a rank's losses are divided by.
    expected = run.parallel.expected_weight(own_weight)
    factor = run.precision.scale / expected
    losses = []
    with run.precision.weights_cast_once(len(micro_batches)):
        for is_last, batch in mark_last(micro_batches):
            with run.parallel.gradient_sync(is_last):
                with run.precision.autocast():
                    loss = loss_of(run.task, run.model, batch, run.world.device)
                (loss * factor).backward()
            losses.append(loss.detach())
    totals = run.parallel.totals(own_weight, expected, run.precision)
    applied = run.optimizer.apply(totals.norm, totals.divisor, run.precision)
    return StepReport(losses, totals.weight, totals.norm, applied)


def evaluate(run: "Run", stop: Callable[[], bool] | None = None) -> dict[str, float]:
    """The held-out loss, and the task's own metrics: weighted means over all ranks, equal on every rank.

    Empty where the task holds nothing out, and where `stop`, called between batches, returned True on every rank.
    """
    if run.validation is None:
        return {}
    metrics = getattr(run.task, "metrics", None)
    weight = run.parallel.zero().double()
    sums: dict[str, Tensor] = {}
    with run.parallel.evaluating():
        for micro_batches in run.validation.one_epoch(run.config.eval.batches):
            if stop is not None and stop():
                return {}
            for batch in micro_batches:
                content, share = (batch.batch, 0.0) if isinstance(batch, Padding) else (batch, 1.0)
                with run.precision.autocast():
                    values = metrics(run.model, content) if metrics else {}
                    if "loss" not in values:
                        values["loss"] = run.task.loss_sum(run.model, content)
                for name, value in values.items():
                    value = scalar(value, f"the task's metrics() gave {name}", run.world.device)
                    sums[name] = sums.get(name, 0.0) + value.detach().double() * share
                weight += scalar(run.task.weight(content), "the task's weight() returned", run.world.device) * share
    totals = run.parallel.sum(torch.stack([weight, *sums.values()])).tolist()
    return {name: total / totals[0] if totals[0] else math.nan for name, total in zip(sums, totals[1:], strict=True)}


def total_weight(task: Task, micro_batches: Sequence[Any], device: torch.device) -> Tensor:
    """What this rank's micro-batches count for: scalar float32 on the device; plain numbers reach it without a copy."""
    weights = [task.weight(batch) for batch in micro_batches if not isinstance(batch, Padding)]
    total = torch.full((), float(sum(w for w in weights if not isinstance(w, Tensor))), device=device)
    for weight in weights:
        if isinstance(weight, Tensor):
            total += scalar(weight, "the task's weight() returned", device)
    return total


def scalar(value: float | Tensor, what: str, device: torch.device) -> Tensor:
    """The value as a scalar tensor. Errors: DataError for a tensor of another shape."""
    if not isinstance(value, Tensor):
        return torch.full((), float(value), device=device)
    if value.ndim != 0:
        raise DataError(f"{what} a tensor of shape {list(value.shape)}, not a number or a scalar tensor; sum it up")
    return value


def loss_of(task: Task, model: torch.nn.Module, batch: Any, device: torch.device) -> Tensor:
    """The task's loss sum of a micro-batch, checked by what the host knows of it: shape, dtype, device, gradient."""
    loss = task.loss_sum(model, batch.batch if isinstance(batch, Padding) else batch)
    if not isinstance(loss, Tensor) or loss.ndim != 0 or loss.dtype != torch.float32:
        what = f"{loss.dtype} of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise DataError(
            f"the task's loss_sum returned {what}, not a float32 scalar; sum over all elements, and compute the loss "
            "in float32, as in `logits.float()`"
        )
    if loss.device != device:
        raise DataError(f"the task's loss_sum returned a loss on {loss.device}, not on {device} where its batch is")
    if not loss.requires_grad:
        raise DataError(
            "the task's loss_sum returned a loss without a gradient; it must depend on the model's parameters"
        )
    return loss * 0.0 if isinstance(batch, Padding) else loss


def mark_last(items: Sequence[T]) -> Iterator[tuple[bool, T]]:
    """(whether it is the last, item) for each item."""
    for number, item in enumerate(items, start=1):
        yield number == len(items), item
