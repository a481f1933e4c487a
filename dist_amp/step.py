"""The training step, `train_step`, and the evaluation, `evaluate`, of a `Run`.

A step sums gradients over `accumulation_steps` micro-batches per rank (fewer at an epoch's end),
then updates the parameters. If any rank's gradients are inf or nan, all ranks skip the update.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dist_amp.config.validate import check_loss, check_model_use, check_weight
from dist_amp.data import Batches, Padding
from dist_amp.errors import DataError
from dist_amp.optim import Schedule
from dist_amp.parallel import Parallel
from dist_amp.precision import Clip, Precision, Scaler
from dist_amp.settings import Config
from dist_amp.task import Task
from dist_amp.telemetry.metrics import Metrics
from dist_amp.telemetry.observer import Observers, defines
from dist_amp.telemetry.step_report import StepReport
from dist_amp.telemetry.sums import WeightedMeans
from dist_amp.world import World


@dataclass(repr=False)  # a repr would print the whole model
class Run:
    """All objects of one training run. `step` counts the steps so far, skipped ones included."""

    config: Config
    world: World
    folder: Path
    task: Task
    precision: Precision
    parallel: Parallel
    scaler: Scaler
    clip: Clip
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    data: Batches
    validation: Batches | None
    metrics: Metrics
    observers: Observers
    step: int = 0
    current_batch: Any = None  # the micro-batch being computed, for error reports
    resumed_from_step: int | None = None
    resumed_from: Path | None = None

    @property
    def model(self) -> nn.Module:
        """The model to call: wrapped by DDP, sharded by FSDP2, or plain in one process."""
        return self.parallel.model

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients; batch-norm statistics are averaged over the ranks."""
        with ExitStack() as contexts:
            contexts.enter_context(self.parallel.evaluating())
            for observer in self.observers:
                if defines(observer, "evaluating"):  # EMA: evaluate with the averaged weights
                    contexts.enter_context(observer.evaluating())
            yield


def train_step(run: Run, micro_batches: Sequence[Any]) -> StepReport:
    """Take one step on this rank's micro-batches. Every rank must pass the same number of them.

    A `Padding` repeats a real micro-batch with weight 0, for ranks that would have fewer. With a
    fused optimizer and without parallel.cpu_offload there is no host-device synchronisation.
    """
    for before_step in run.observers.before_step:  # metrics, checks and your own observers
        before_step(micro_batches)
    clock = run.world.clock  # measures the time of each phase
    # Micro-batches may differ in weight (samples or tokens), so averaging their mean losses would
    # be wrong: divide by the total over all ranks. This all-reduce overlaps with the forward.
    total_weight = run.parallel.sum_over_ranks(weights_of(run.task, micro_batches))
    losses = []
    with run.precision.autocast_cache(len(micro_batches)):  # casts each parameter once per step
        for is_last, batch in mark_last(micro_batches):
            # By default only the last backward reduces gradients over the ranks (DDP's no_sync).
            with run.parallel.gradient_sync(is_last):
                run.current_batch = batch
                clock.enter("forward")
                with run.precision.autocast():
                    loss = loss_of(run.task, run.model, batch, run.world.device)
                losses.append(loss.detach())
                clock.enter("backward")
                # Equals scaler.scale(loss / mean weight per rank).backward() with fewer operations.
                # Not the total weight, because DDP and FSDP2 average gradients over the ranks.
                loss.backward(run.scaler.scale(total_weight.inverse_mean))
    run.current_batch = None
    clock.enter("optimizer")
    norm = run.parallel.global_grad_norm()  # of gradients that include the loss scale
    norm = run.scaler.unscale_and_clip(run.optimizer, norm, run.clip)  # unscaled; before clipping
    run.scaler.step(run.optimizer)  # changes nothing if any rank's gradients are not finite
    run.scaler.update()
    run.schedule.step(run.scaler.applied)  # a skipped step keeps the learning rate
    run.parallel.zero_grad()
    clock.enter("other")
    run.step += 1
    report = StepReport(losses, total_weight.total, norm, run.scaler.applied)
    for after_step in run.observers.after_step:
        after_step(report, micro_batches)
    return report


def evaluate(run: Run, stop: Callable[[], bool] | None = None) -> dict[str, float]:
    """Returns {metric: weighted mean over all ranks}: the validation loss and the task's metrics.

    Returns {} without a validation split, or if `stop` returns True. `stop` is called before each
    step of the evaluation, and must return the same on every rank.
    """
    if run.validation is None:
        return {}
    metrics = getattr(run.task, "metrics", None)
    means = WeightedMeans(run.world, run.config.parallel.bit_exact)
    steps = run.validation.steps_in_one_epoch(run.config.eval.batches)
    with run.world.clock.hold("evaluation"), run.evaluating():  # hold: no other phase begins
        run.observers.tell("during_evaluation", 0, steps)  # to show the progress
        for done, micro_batches in enumerate(run.validation.one_epoch(steps), start=1):
            if stop is not None and stop():
                return {}
            for batch in micro_batches:
                run.current_batch = batch
                is_padding = isinstance(batch, Padding)
                content = batch.batch if is_padding else batch
                with run.precision.autocast():
                    values = {}  # {name: sum over the batch, or (sum, its own weight)}
                    if metrics is not None:
                        values = dict(metrics(run.parallel.module, content))  # not DDP's forward
                    if "loss" not in values:
                        values["loss"] = run.task.loss_sum(run.model, content)
                    means.add(values, run.task.weight(content), 0.0 if is_padding else 1.0)
            run.current_batch = None
            run.observers.tell("during_evaluation", done, steps)
    return means.over_all_ranks()


def weights_of(task: Task, micro_batches: Sequence[Any]) -> list[float | Tensor]:
    """The weight of each micro-batch: a number, or a scalar tensor."""
    if not micro_batches:
        raise DataError("train_step got no micro-batches; pass it next(run.data)")
    weights = [0.0 if isinstance(batch, Padding) else task.weight(batch) for batch in micro_batches]
    for weight in weights:
        check_weight(weight)
    return weights


def loss_of(task: Task, model: nn.Module, batch: Any, device: torch.device) -> Tensor:
    """Loss sum: a float32 scalar. Padding gets 0 * loss, so its backward runs the collectives."""
    is_padding = isinstance(batch, Padding)
    content = batch.batch if is_padding else batch
    try:
        loss = task.loss_sum(model, content)
        check_loss(loss, device)
    except Exception as error:
        check_model_use(error)  # raises a clearer error for a wrong use of the model
        raise
    return loss * 0.0 if is_padding else loss


def mark_last(items: Sequence[Any]) -> Iterator[tuple[bool, Any]]:
    for number, item in enumerate(items, start=1):
        yield number == len(items), item
