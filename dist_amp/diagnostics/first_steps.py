"""Checks a run's first steps: the loss is a sum, ranks read different samples, parameters train.

Docs: docs/verification.md
"""

import copy
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from dist_amp.diagnostics.trace import hash_samples
from dist_amp.errors import DataError, NumericsError, some_of
from dist_amp.loading.loader import Fetch
from dist_amp.loading.plan import Shard
from dist_amp.parallel import norms_of
from dist_amp.run import Run
from dist_amp.task import attributes_of
from dist_amp.telemetry.observer import Observer
from dist_amp.telemetry.step_report import StepReport
from dist_amp.world import local

WATCHED_STEPS = 20  # enough for a rarely chosen expert of a mixture to get a sample
COMPARED_ELEMENTS = 1024  # per parameter, before and after a step


class FirstSteps(Observer):
    """Checks the first applied step and the first WATCHED_STEPS steps of a run or a resume."""

    def __init__(self, run: Run):
        self._run = run
        self._last_step = run.step + WATCHED_STEPS
        self._before: list[Tensor] = []
        self._is_update_checked = False
        self._sample_hashes: list[Tensor] = []  # one per step
        parallel = run.parallel
        # [parameters]: the norm of this rank's shard of each gradient, summed over the steps.
        self._gradient_sums = torch.zeros(len(parallel.parameters), device=parallel.state_device)
        warn_of_untrained(run)
        self._hook = run.optimizer.register_step_pre_hook(self._add_gradients)

    def close(self, error: BaseException | None = None) -> None:
        self._hook.remove()

    def before_step(self, micro_batches: Sequence[Any]) -> None:
        if not self._is_update_checked:
            self._before = [part.clone() for part in self._sampled()]

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        if self._run.step == 1:
            warn_of_mean(self._run)
        if not self._is_update_checked:
            self._check_update(report)
        self._sample_hashes.append(hash_samples(micro_batches, self._run.world.device))
        if self._run.step == self._last_step:
            self._hook.remove()
            self._run.observers.rest(self)
            check_samples_differ(self._run, self._sample_hashes)
            self._warn_of_idle_parameters()

    def _sampled(self) -> list[Tensor]:
        parameters = self._run.parallel.parameters
        return [local(p.detach()).reshape(-1)[:COMPARED_ELEMENTS] for p in parameters]

    @torch.no_grad()
    def _add_gradients(self, *_: Any) -> None:
        gradients: list[Any] = [p.grad for p in self._run.parallel.parameters]
        self._gradient_sums += norms_of([local(gradient) for gradient in gradients])

    def _check_update(self, report: StepReport) -> None:
        """Raises NumericsError if the first applied step changed no sampled element on any rank."""
        run = self._run
        changed = not all(map(torch.equal, self._before, self._sampled()))
        norm, lr = report.norm.item(), run.schedule.last_lr.item()
        # Gathered, so that all ranks do the same even if one of them wrongly skipped the step.
        rows = run.world.gather((report.applied.item(), changed))
        self._is_update_checked = any(applied for applied, _ in rows)
        if not self._is_update_checked or any(changed for _, changed in rows) or not norm * lr:
            return
        text = f"step {run.step} was applied with grad_norm {norm:.3g} at lr {lr:.3g}, but changed "
        text += "no parameter; check that the optimizer has the model's parameters, raise optim.lr "
        text += "or use parallel.param_dtype=fp32"
        if all(p.dtype == torch.float32 for p in run.parallel.parameters):
            raise NumericsError(text)
        run.world.warn(text)  # half-precision parameters may change once lr is higher

    def _warn_of_idle_parameters(self) -> None:
        """Warn of parameters whose gradients were missing or zero in all steps on all ranks."""
        run = self._run
        parameters = run.parallel.parameters
        totals = run.world.sum(self._gradient_sums.to(run.world.device)).tolist()
        if not any(totals):  # all steps were skipped without a call of the optimizer
            return
        names = {parameter: name for name, parameter in run.parallel.module.named_parameters()}
        idle = [names[p] for p, total in zip(parameters, totals, strict=True) if total == 0]
        if idle:
            run.world.warn(
                f"{some_of(idle)} got no gradient in {WATCHED_STEPS} steps: it counts as zero, so "
                "weight decay shrinks them; use them in the loss, or set requires_grad=False. This "
                "is normal for a mixture's experts that no sample has chosen yet"
            )


def check_samples_differ(run: Run, sample_hashes: list[Tensor]) -> None:
    """Raises DataError if two ranks got the same samples in every step, and not by chance."""
    rows = [tuple(row) for row in run.world.stack(torch.stack(sample_hashes)).tolist()]
    # With few distinct batches (little data), two ranks may draw the same ones by chance.
    distinct = len({value for row in rows for value in row})
    probability = math.comb(len(rows), 2) * float(distinct) ** -len(sample_hashes)
    first: dict[tuple[int, ...], int] = {}
    for rank, row in enumerate(rows):
        if first.setdefault(row, rank) != rank and probability < 1e-6:
            raise DataError(
                f"ranks {first[row]} and {rank} were fed the same samples up to step {run.step}: "
                "some samples count twice, others never; build_dataset must return the full "
                "dataset on every rank, because dist_amp shards it"
            )


def warn_of_untrained(run: Run) -> None:
    """Warn of trainable parameters that the task holds outside of its model."""
    for name, leaves in attributes_of(run.task, run.parallel.module).items():
        count = sum(isinstance(leaf, nn.Parameter) and leaf.requires_grad for leaf in leaves)
        if count:
            run.world.warn(untrained_text(name, count))


def untrained_text(name: str, count: int) -> str:
    return (
        f"the task's attribute {name} holds {count} trainable parameters that are not in the "
        "model, so nothing trains them: put them into the module that build_model returns, or set "
        "requires_grad=False"
    )


def warn_of_mean(run: Run) -> None:
    """Warn if loss_sum seems to be a mean: about the same if a micro-batch has each sample twice.

    loss_sum is called on deep copies of the task and its model, so that the run is unaffected.
    Skipped for sharded models and for tasks with a state_dict, which may be too large to copy (a
    teacher): there only `verify` finds a mean.
    """
    if run.parallel.sharded or hasattr(run.task, "state_dict"):
        return
    _, indices = run.data.last_step[0]
    dataset = run.data.fetch.dataset
    # The copies share the dataset, which may be large and is only read.
    shared = {}
    if dataset is not run.task:
        parts = (dataset, *getattr(dataset, "__dict__", {}).values())
        shared = {id(part): part for part in parts}
    values = []
    torch.cuda.empty_cache()  # or the larger batch would fragment the memory of ordinary ones
    with (
        run.parallel.no_side_effects(),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),  # don't compile for the larger batch
        suppress(Exception),  # the task can't be copied, or can't take twice the samples
    ):
        task, model = copy.deepcopy((run.task, run.parallel.module), shared)
        model.eval()
        fetch = Fetch(dataset, task, "training")
        for samples in (indices, indices + indices):
            (batch,) = run.data.to_device([fetch[Shard(samples)]])
            with run.precision.autocast():
                loss = task.loss_sum(model, batch)
            values.append((float(loss), float(task.weight(batch))))
    torch.cuda.empty_cache()
    if len(values) < 2:
        return
    (loss_once, weight_once), (loss_twice, weight_twice) = values
    is_close = abs(loss_twice - loss_once) <= 0.25 * abs(loss_once)  # False for nan
    if is_close and loss_once and weight_twice > 1.5 * weight_once:
        run.world.warn(
            f"loss_sum returns {loss_once:.4g} for {len(indices)} samples and {loss_twice:.4g} "
            f"if each is given twice, though weight(batch) grows from {weight_once:g} to "
            f"{weight_twice:g}: it seems to be a mean; return the sum, as with reduction='sum', "
            "or the mean times the weight"
        )
