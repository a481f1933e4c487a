"""One optimizer step, from micro-batches to the applied or skipped update; and its counterpart without gradients.

Words: a micro-batch is one forward and backward; a step is one optimizer step from `accumulation_steps` of them, fewer
where an epoch ends; a step is applied or skipped.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dist_amp.config.task_class import as_scalar, check_loss, check_model_use, check_weight
from dist_amp.data import Padding
from dist_amp.errors import DataError, add_context, error_context
from dist_amp.run import Run
from dist_amp.task import Task
from dist_amp.telemetry.async_copy import StepReport
from dist_amp.telemetry.weighted_means import WeightedMeans


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
                run.world.clock.enter("forward")
                with run.precision.autocast():
                    loss = loss_of(run.task, run.model, batch, run.world.device)
                losses.append(loss.detach())
                loss = run.normalizer.normalize(loss, is_last)
                run.world.clock.enter("backward")
                run.scaler.scale(loss).backward()
    run.world.clock.enter("optimizer")
    norm = run.parallel.global_grad_norm(run.normalizer, run.scaler)
    norm = run.scaler.unscale_and_clip(run.optimizer, norm, run.normalizer.correction, run.clip)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.schedule.step(run.scaler.applied)
    run.optimizer.zero_grad(set_to_none=True)
    if run.parallel.ema is not None:
        run.parallel.ema.update(run.scaler.applied)
    run.world.clock.enter("other")
    run.step += 1
    return StepReport(losses, run.normalizer.weight, norm, run.scaler.applied)


@error_context(evaluation=True)
def evaluate(run: Run, stop: Callable[[], bool] | None = None) -> dict[str, float]:
    """The held-out loss, and the task's own metrics: weighted means over all ranks, equal on every rank.

    Empty where the task holds nothing out, and where `stop`, called between batches, returned True on every rank.
    """
    if run.validation is None:
        return {}
    metrics = getattr(run.task, "metrics", None)
    means = WeightedMeans(run.world)
    with run.world.clock.hold("evaluation"), run.parallel.evaluating():
        for micro_batches in run.validation.one_epoch(run.config.eval.batches):
            if stop is not None and stop():
                return {}
            for batch in micro_batches:
                content, counts = (batch.batch, 0.0) if isinstance(batch, Padding) else (batch, 1.0)
                with run.precision.autocast(), error_context(batch=batch):
                    values = means.checked(metrics(run.parallel.module, content)) if metrics else {}
                    if "loss" not in values:
                        values["loss"] = run.task.loss_sum(run.model, content)
                    means.add(values, run.task.weight(content), counts)
    return means.over_all_ranks()


def total_weight(task: Task, micro_batches: Sequence[Any], device: torch.device) -> Tensor:
    """What this rank's micro-batches count for: scalar float32 on the device; plain numbers reach it without a copy."""
    if not micro_batches:
        raise DataError("train_step got no micro-batches; give it those of one step, as next(run.data) returns them")
    weights = []
    for batch in micro_batches:
        if not isinstance(batch, Padding):
            try:
                weights.append(check_weight(task.weight(batch)))
            except BaseException as error:
                add_context(error, batch=batch)
                raise
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
        check_model_use(error)
        raise
    return loss * 0.0 if padding else loss


def mark_last(items: Sequence[Any]) -> Iterator[tuple[bool, Any]]:
    """(whether it is the last, item) for each item."""
    for number, item in enumerate(items, start=1):
        yield number == len(items), item
