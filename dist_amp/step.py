"""One optimizer step, from micro-batches to the applied or skipped update; and the evaluation.

A micro-batch is one forward and backward. A step is one optimizer step from `accumulation_steps`
micro-batches, or fewer at the end of an epoch. It is applied or skipped, the same on all ranks.
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


@dataclass(repr=False)  # it would print the whole model
class Run:
    """Everything that one run needs. `step` counts the steps taken, applied or skipped."""

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
    current_batch: Any = None  # the micro-batch in use, for the report of an error
    resumed_from_step: int | None = None
    resumed_from: Path | None = None

    @property
    def model(self) -> nn.Module:
        """The model to call: wrapped or sharded."""
        return self.parallel.model

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients, with batch statistics averaged over the ranks."""
        with ExitStack() as contexts:
            contexts.enter_context(self.parallel.evaluating())
            for observer in self.observers:
                if defines(observer, "evaluating"):
                    contexts.enter_context(observer.evaluating())
            yield


def train_step(run: Run, micro_batches: Sequence[Any]) -> StepReport:
    """Apply one optimizer step from this rank's micro-batches, or skip it on all ranks.

    Given optim.fused and no parallel.cpu_offload, the host never waits for the device here.
    Every rank must pass the same number of micro-batches; a `Padding` has weight 0.
    """
    for before_step in run.observers.before_step:  # callbacks: metrics, checks, your own
        before_step(micro_batches)
    clock = run.world.clock  # measures the time of each phase
    # Micro-batches may differ in weight (samples, tokens), so a mean of their means is wrong:
    # divide by the weight of all ranks and micro-batches. This all-reduce overlaps the forward.
    total_weight = run.parallel.sum_over_ranks(weights_of(run.task, micro_batches))
    losses = []
    with run.precision.autocast_cache(len(micro_batches)):  # casts each weight once per step
        for is_last, batch in mark_last(micro_batches):
            # Only the last reduces by default: DDP's no_sync, FSDP2's set_requires_gradient_sync.
            with run.parallel.gradient_sync(is_last):
                run.current_batch = batch
                clock.enter("forward")
                with run.precision.autocast():
                    loss = loss_of(run.task, run.model, batch, run.world.device)
                losses.append(loss.detach())
                clock.enter("backward")
                # The same gradients as (loss / mean weight).backward(), with fewer operations. DDP
                # and FSDP2 average gradients over ranks, so it is the mean weight per rank.
                loss.backward(run.scaler.scale(total_weight.inverse_mean))
    run.current_batch = None
    clock.enter("optimizer")
    norm = run.parallel.global_grad_norm()  # of the scaled gradients
    norm = run.scaler.unscale_and_clip(run.optimizer, norm, run.clip)
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
    """The validation loss and the task's metrics, {name: weighted mean over all ranks}.

    Empty without a validation split, or if `stop` returns True: it is called before each step, and
    must return the same on every rank.
    """
    if run.validation is None:
        return {}
    metrics = getattr(run.task, "metrics", None)
    means = WeightedMeans(run.world, run.config.parallel.bit_exact)
    steps = run.validation.steps_in_one_epoch(run.config.eval.batches)
    with run.world.clock.hold("evaluation"), run.evaluating():
        run.observers.tell("during_evaluation", 0, steps)
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
                        values = dict(metrics(run.parallel.module, content))  # without DDP
                    if "loss" not in values:
                        values["loss"] = run.task.loss_sum(run.model, content)
                    means.add(values, run.task.weight(content), 0.0 if is_padding else 1.0)
            run.current_batch = None
            run.observers.tell("during_evaluation", done, steps)
    return means.over_all_ranks()


def weights_of(task: Task, micro_batches: Sequence[Any]) -> list[float | Tensor]:
    """The weight of each of this rank's micro-batches: a number, or a scalar tensor."""
    if not micro_batches:
        raise DataError("train_step got no micro-batches; pass it next(run.data)")
    weights = [0.0 if isinstance(batch, Padding) else task.weight(batch) for batch in micro_batches]
    for weight in weights:
        check_weight(weight)
    return weights


def loss_of(task: Task, model: nn.Module, batch: Any, device: torch.device) -> Tensor:
    """Loss sum of a micro-batch, a float32 scalar; 0 for padding, whose backward still runs."""
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
