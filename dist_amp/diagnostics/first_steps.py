"""Checks of a run's first steps: that the parameters move, and that each of them gets a gradient."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dist_amp.errors import NumericsError
from dist_amp.fast.fused import local
from dist_amp.run import Run
from dist_amp.telemetry.async_copy import StepReport
from dist_amp.telemetry.observer import Observer

WATCHED_STEPS = 20  # long enough for a mixture's rarely chosen expert to get a sample

SAMPLED_ELEMENTS = 1024  # of each parameter, compared before and after a step


class FirstSteps(Observer):
    """Reads the device once after each step until one is applied, and once more after the watched steps."""

    def __init__(self, run: Run):
        self._run = run
        self._ends = run.step + WATCHED_STEPS
        self._before: list[Tensor] | None = None
        self._moved = False
        parameters = run.parallel.parameters
        run.parallel.gradient_sums = torch.zeros(len(parameters), device=run.parallel.state_device)

    def before_step(self, micro_batches: Sequence[Any]) -> None:
        if not self._moved:
            self._before = [part.clone() for part in self._sampled()]

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        if not self._moved:
            self._check_moved(report)
        if self._run.step == self._ends and self._run.parallel.gradient_sums is not None:
            sums, self._run.parallel.gradient_sums = self._run.parallel.gradient_sums, None
            self._warn_of_idle_parameters(sums)

    def _sampled(self) -> list[Tensor]:
        """Some elements of this rank's part of each parameter."""
        return [local(p.detach()).reshape(-1)[:SAMPLED_ELEMENTS] for p in self._run.parallel.parameters]

    def _check_moved(self, report: StepReport) -> None:
        """Errors: NumericsError where an applied step with a gradient left every sampled element on all ranks alone."""
        assert self._before is not None
        moved = any(not torch.equal(old, new) for old, new in zip(self._before, self._sampled(), strict=True))
        world, lr = self._run.world, self._run.schedule.last_lr.item()
        # Asked of all ranks together: one whose copy of the gradients was damaged may have skipped alone.
        rows = world.gather_numbers([report.applied.item(), float(moved)])
        self._moved = any(applied for applied, _ in rows)
        if not self._moved or any(moved for _, moved in rows) or not report.norm.item() * lr:
            return
        cause = (
            f"step {self._run.step} was applied with grad_norm {report.norm.item():.3g} at lr {lr:.3g}, but changed no "
            f"parameter; "
        )
        if any(p.dtype != torch.float32 for p in self._run.parallel.parameters):  # they may yet move, at a higher rate
            world.warn(f"{cause}at this rate updates are lost to rounding: use parallel.param_dtype=fp32")
            return
        raise NumericsError(f"{cause}check that the optimizer got the parameters of the model, and raise optim.lr")

    def _warn_of_idle_parameters(self, sums: Tensor) -> None:
        """Name the parameters whose gradients were missing, or zero, in all steps so far and on all ranks."""
        run = self._run
        totals = run.world.sum(sums.to(run.world.device)).tolist()
        trained = {parameter: name for name, parameter in run.parallel.module.named_parameters()}
        idle = [trained[p] for p, total in zip(run.parallel.parameters, totals, strict=True) if total == 0]
        if idle:
            more = f" and {len(idle) - 3} more" if len(idle) > 3 else ""
            run.world.warn(
                f"{', '.join(idle[:3])}{more} got no gradient in {WATCHED_STEPS} steps: it counts as zero, and weight "
                "decay shrinks them; use them in the loss, or set requires_grad=False. For a mixture's experts that no "
                "sample chose yet, nothing is wrong"
            )
