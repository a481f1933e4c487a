"""When to stop a run that can't learn, and what to warn of in its first steps."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from dist_amp.errors import DataError, NumericsError, some_of
from dist_amp.files import present
from dist_amp.loading.plan import Shard
from dist_amp.parallel import norms_of
from dist_amp.run import Run
from dist_amp.telemetry.step_report import LogRow, Observer, StepReport
from dist_amp.world import local

MIN_SCALE = 1.0  # of the loss: what is still not finite at this scale has another cause
WATCHED_STEPS = 20  # long enough for a mixture's rarely chosen expert to get a sample
COMPARED_ELEMENTS = 1024  # of each parameter, before and after a step


class Limits(Observer):
    """Stops a run that can't recover, with `first_nonfinite`. Errors: DataError, NumericsError."""

    def __init__(self, run: Run):
        self._config = run.config
        self.first_nonfinite: Callable[[LogRow], str] = lambda row: ""

    def on_log(self, row: LogRow) -> None:
        precision = self._config.precision
        weight = row["min_weight"]  # inf if there was no step
        if row["weight_sum"] == math.inf:
            weight = row["weight_sum"]
        if row["weight_sum"] == math.inf or not weight > 0:
            advice = ""
            if weight == 0:
                advice = (
                    "; a resumed run comes to this step again: leave out the samples without a "
                    "label in build_dataset and resume with --run.allow_config_change true, or "
                    "return max(1, weight) there, which makes a step without labels one of loss 0"
                )
            raise DataError(
                f"in the steps up to {row.step} a total weight was {weight:g}; the task's "
                f"weight(batch) is what the loss is divided by, and must be above 0{advice}"
            )
        if precision.name == "fp16" and row["loss_scale"] < MIN_SCALE:
            raise NumericsError(
                f"the loss scale fell to {row['loss_scale']:g} up to step {row.step}, below "
                f"{MIN_SCALE:g}: gradients stay infinite or nan at any scale; try "
                "precision.dtype=bf16, a lower optim.lr or --use_amp false, or fix the module that "
                f"is reported as the first non-finite one{self.first_nonfinite(row)}"
            )
        limit = self._config.train.max_skips_in_a_row
        if row["skips_in_a_row"] >= limit:
            advice = "a lower optim.lr"
            if precision.name != "fp32":
                advice += ", or --use_amp false"
            raise NumericsError(
                f"{row['skips_in_a_row']:.0f} steps in a row were not finite and were skipped, up "
                f"to step {row.step} (loss {row.loss:g}); the limit is "
                f"train.max_skips_in_a_row={limit}; try {advice}, or check the data"
                f"{self.first_nonfinite(row)}"
            )


class FirstSteps(Observer):
    """Checks that the loss is a sum, parameters move, and each gets a gradient; few host reads."""

    def __init__(self, run: Run):
        self._run = run
        self._first_step = run.step + 1
        self._last_step = run.step + WATCHED_STEPS
        self._before: list[Tensor] = []
        self._moved = False
        parallel = run.parallel
        # [parameters]: of the norms of this rank's part of the gradients.
        self._gradient_sums = torch.zeros(len(parallel.parameters), device=parallel.state_device)
        self._hook = run.optimizer.register_step_pre_hook(self._add_gradients)

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def before_step(self, micro_batches: Sequence[Any]) -> None:
        if not self._moved:
            self._before = [part.clone() for part in self._sampled()]

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        compiles = self._run.config.compile.blocks and present("scaling.compile")
        if self._run.step == self._first_step and compiles:
            from dist_amp.scaling.compile import say_cost

            say_cost(self._run.world)
        if self._run.step == 1:
            warn_of_mean(self._run)
        if not self._moved:
            self._check_moved(report)
        if self._run.step == self._last_step:
            self._hook.remove()
            self._warn_of_idle_parameters()

    def _sampled(self) -> list[Tensor]:
        """Some elements of this rank's part of each parameter."""
        parameters = self._run.parallel.parameters
        return [local(p.detach()).reshape(-1)[:COMPARED_ELEMENTS] for p in parameters]

    @torch.no_grad()
    def _add_gradients(self, *_: Any) -> None:
        gradients = [p.grad for p in self._run.parallel.parameters]
        norms = norms_of([local(gradient) for gradient in gradients if gradient is not None])
        has_gradient = torch.tensor([gradient is not None for gradient in gradients])
        self._gradient_sums[has_gradient] += norms

    def _check_moved(self, report: StepReport) -> None:
        """Errors: NumericsError where an applied step changed no sampled element on any rank."""
        run = self._run
        moved = not all(map(torch.equal, self._before, self._sampled()))
        lr = run.schedule.last_lr.item()
        # Of all ranks: one whose copy of the gradients was damaged may have skipped alone.
        rows = run.world.gather((report.applied.item(), moved))
        self._moved = any(applied for applied, _ in rows)
        if not self._moved or any(moved for _, moved in rows) or not report.norm.item() * lr:
            return
        cause = (
            f"step {run.step} was applied with grad_norm {report.norm.item():.3g} at lr {lr:.3g}, "
            "but changed no parameter; "
        )
        if any(p.dtype != torch.float32 for p in run.parallel.parameters):
            # They may yet move, at a higher rate.
            run.world.warn(
                f"{cause}at this rate updates are lost to rounding: use parallel.param_dtype=fp32"
            )
            return
        raise NumericsError(
            f"{cause}check that the optimizer got the parameters of the model, and raise optim.lr"
        )

    def _warn_of_idle_parameters(self) -> None:
        """Name the parameters whose gradients were missing or zero in all steps on all ranks."""
        run = self._run
        parameters = run.parallel.parameters
        totals = run.world.sum(self._gradient_sums.to(run.world.device)).tolist()
        if not any(totals):  # all steps were skipped, and the optimizer was not called
            return
        names = {parameter: name for name, parameter in run.parallel.module.named_parameters()}
        idle = [names[p] for p, total in zip(parameters, totals, strict=True) if total == 0]
        if not idle:
            return
        run.world.warn(
            f"{some_of(idle)} got no gradient in {WATCHED_STEPS} steps: it counts as zero, and "
            "weight decay shrinks them; use them in the loss, or set requires_grad=False. For a "
            "mixture's experts that no sample chose yet, nothing is wrong"
        )


def warn_of_mean(run: Run) -> None:
    """Warn if loss_sum does not grow with the samples, by giving it those of a micro-batch twice.

    Every rank calls it. Not compiled, which would make slower kernels of any size. Tasks with a
    state_dict are left out, since a copy of what they keep, such as a teacher, may be large.
    """
    if hasattr(run.task, "state_dict"):
        return
    from dist_amp.checkpoint.task_state import without_effects

    _, indices = run.data.last_step[0]
    values = []
    torch.cuda.empty_cache()  # a larger batch between the others' leaves their memory in pieces
    with (
        run.parallel.no_side_effects(),
        torch.compiler.set_stance("force_eager"),
        suppress(Exception),  # of a task that can't be copied, or take twice the samples
        run.evaluating(),
        without_effects(run) as task,
    ):
        for samples in (indices, indices + indices):
            [(batch, _)] = run.data.fetched([Shard(samples)])
            with run.precision.autocast():
                loss = task.loss_sum(run.model, batch)
            values.append((float(loss), float(task.weight(batch))))
    torch.cuda.empty_cache()
    if len(values) < 2:
        return
    (loss_of_one, weight_of_one), (loss_of_two, weight_of_two) = values
    grows = abs(loss_of_two - loss_of_one) > 0.25 * abs(loss_of_one)
    if not grows and loss_of_one and weight_of_two > 1.5 * weight_of_one:
        run.world.warn(
            f"loss_sum returns {loss_of_one:.4g} for {len(indices)} samples and {loss_of_two:.4g} "
            f"for each of them twice, though weight(batch) grows from {weight_of_one:g} to "
            f"{weight_of_two:g}: it seems to be a mean; return the sum, as with reduction='sum', "
            "or the mean times the weight"
        )
