"""One optimizer step, from micro-batches to the applied or skipped update; and its counterpart without gradients.

Words: a micro-batch is one forward and backward; a step is one optimizer step from `accumulation_steps` of them, fewer
where an epoch ends; a step is applied or skipped.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dist_amp.config.task_class import as_scalar, check_loss, check_metrics
from dist_amp.data import Padding
from dist_amp.errors import add_context, error_context
from dist_amp.run import Run
from dist_amp.task import Task
from dist_amp.telemetry.async_copy import StepReport


def train_step(run: Run, micro_batches: Sequence[Any]) -> StepReport:
    """Apply one optimizer step from this rank's micro-batches, or skip it on all ranks; with optim.fused nothing waits.

    Every rank calls it with equally many micro-batches; `Padding` counts for nothing. Apart from the loss normalizer
    and the norm that all ranks agree on, these are the lines of torch's AMP tutorial.
    """
    run.normalizer.begin(total_weight(run.task, micro_batches, run.world.device))
    losses = []
    with run.precision.cast_weights_once(len(micro_batches), run.parallel.sharded):
        for is_last, batch in mark_last(micro_batches):
            with run.parallel.gradient_sync(is_last):  # DDP's no_sync, FSDP2's set_requires_gradient_sync
                with run.precision.autocast():
                    loss = loss_of(run.task, run.model, batch, run.world.device)
                losses.append(loss.detach())
                loss = run.normalizer.normalize(loss, is_last)
                run.scaler.scale(loss).backward()
    norm = run.parallel.global_grad_norm(run.normalizer, run.scaler)
    norm = run.scaler.unscale_and_clip(run.optimizer, norm, run.normalizer.correction, run.clip)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.schedule.step(run.scaler.applied)
    run.optimizer.zero_grad(set_to_none=True)
    return StepReport(losses, run.normalizer.weight, norm, run.scaler.applied)


@error_context(evaluation=True)
def evaluate(run: Run, stop: Callable[[], bool] | None = None) -> dict[str, float]:
    """The held-out loss, and the task's own metrics: weighted means over all ranks, equal on every rank.

    Empty where the task holds nothing out, and where `stop`, called between batches, returned True on every rank.
    """
    if run.validation is None:
        return {}
    metrics = getattr(run.task, "metrics", None)
    weight = torch.zeros((), dtype=torch.float64, device=run.world.device)
    sums: dict[str, Tensor] = {}
    with run.parallel.evaluating():
        for micro_batches in run.validation.one_epoch(run.config.eval.batches):
            if stop is not None and stop():
                return {}
            for batch in micro_batches:
                content, counts = (batch.batch, 0.0) if isinstance(batch, Padding) else (batch, 1.0)
                with run.precision.autocast(), error_context(batch=batch):
                    values = check_metrics(metrics(run.model, content), sums) if metrics else {}
                    if "loss" not in values:
                        values["loss"] = run.task.loss_sum(run.model, content)
                for name, value in values.items():
                    value = as_scalar(value, f"metrics() gave {name}", run.world.device)
                    sums[name] = sums.get(name, 0.0) + value.detach().double() * counts
                weight += as_scalar(run.task.weight(content), "weight() returned", run.world.device) * counts
    totals = run.world.sum(torch.stack([weight, *sums.values()])).tolist()
    return {name: total / totals[0] if totals[0] else math.nan for name, total in zip(sums, totals[1:], strict=True)}


def total_weight(task: Task, micro_batches: Sequence[Any], device: torch.device) -> Tensor:
    """What this rank's micro-batches count for: scalar float32 on the device; plain numbers reach it without a copy."""
    weights = [task.weight(batch) for batch in micro_batches if not isinstance(batch, Padding)]
    total = torch.full((), float(sum(w for w in weights if not isinstance(w, Tensor))), device=device)
    for weight in weights:
        if isinstance(weight, Tensor):
            total += as_scalar(weight, "weight() returned", device)
    return total


def loss_of(task: Task, model: nn.Module, batch: Any, device: torch.device) -> Tensor:
    """The task's loss sum of a micro-batch, checked by what the host knows of it; 0 times the loss for padding."""
    padding = isinstance(batch, Padding)
    try:
        loss = check_loss(task.loss_sum(model, batch.batch if padding else batch), device)
    except BaseException as error:  # a context manager would cost each micro-batch a microsecond
        add_context(error, batch=batch)
        raise
    return loss * 0.0 if padding else loss


def mark_last(items: Sequence[Any]) -> Iterator[tuple[bool, Any]]:
    """(whether it is the last, item) for each item."""
    for number, item in enumerate(items, start=1):
        yield number == len(items), item
