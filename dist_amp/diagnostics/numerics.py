"""What half precision loses, measured at log steps with debug.numerics=true, per parameter group.

`numerics/underflow_share/GROUP`: gradients that are zero in fp16 at the current loss scale, as a
share of those that are not zero in float32, in the step's first micro-batch.
`numerics/lost_update_share/GROUP`: elements with a gradient whose stored value the step did not
change. Measuring changes no step.

Docs: docs/debugging.md
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from dist_amp.errors import ConfigError
from dist_amp.run import Run
from dist_amp.scaling.compile import stance
from dist_amp.step import loss_of, weights_of
from dist_amp.telemetry.observer import Observer
from dist_amp.telemetry.step_report import LogRow, StepReport, Tags
from dist_amp.world import local

# Above these shares there is a warning. Assumed, with a reason: gradients of which 5 % would vanish
# in fp16 hurt the accuracy of Micikevicius et al. 2018, arXiv:1710.03740, section 3.1.
UNDERFLOW_LIMIT = 0.05
LOST_UPDATE_LIMIT = 0.5  # assumed
# bf16 keeps 8 bits: the next value is |p| x 2^-8 to |p| x 2^-7 away, and rounding loses a step of
# less than half of it.
SURELY_LOST = 2.0**-9


class Numerics(Observer):
    """Measures log steps; warns at the start of updates that bf16 loses. Errors: ConfigError."""

    def __init__(self, run: Run):
        self.run = run
        self.measured: dict[int, Tags] = {}  # by step, until its metrics are written
        self._groups: dict[str, list[Tensor]] = {}
        for number, group in enumerate(run.optimizer.param_groups):
            self._groups[group.get("name", f"group {number}")] = group["params"]
        self._before: dict[Tensor, Tensor] = {}  # this rank's parameters before the update
        self._hooks: list[Any] = []  # in a log step
        self._scale = 1.0  # before the step
        self._warned: set[str] = set()
        if run.config.debug.numerics and run.scaler.scales and run.precision.cast_by == "policy":
            raise ConfigError(
                "debug.numerics=true compares fp16 with float32, and FSDP's mixed-precision policy "
                "computes in one of them only; use precision.cast_by=autocast"
            )
        if run.config.optim.name == "adamw":
            self._warn_of_bf16_storage(run.config.optim.lr)

    def _warn_of_bf16_storage(self, lr: float) -> None:
        """Warn if bf16 storage will lose AdamW's updates, whose size is about lr; one host read."""
        counts = self._zeros()
        for row, parameters in zip(counts, self._groups.values(), strict=True):
            for p in parameters:
                if p.dtype == torch.bfloat16:
                    lost = local(p).detach().float().abs() * SURELY_LOST > lr
                    _add(row, lost, torch.ones_like(lost))
        for group, share in self._shares(counts).items():
            self._warn_of_lost_updates(group, share, lr)

    def before_step(self, micro_batches: Sequence[Any]) -> None:
        run = self.run
        step = run.step + 1
        is_log_step = step % run.config.metrics.log_every == 0 or step == run.config.train.steps
        if not (run.config.debug.numerics and is_log_step):
            return
        self._underflow = self._zeros()
        self._lost_updates = self._zeros()
        if run.scaler.scales:
            with run.world.clock.hold("diagnostics"):
                self._count_underflow(micro_batches)
                self._scale = run.scaler.scale_tensor.item()
        self._hooks = [
            run.optimizer.register_step_pre_hook(self._keep_parameters),
            run.optimizer.register_step_post_hook(self._count_lost_updates),
        ]

    def after_step(
        self,
        report: StepReport,
        micro_batches: Sequence[Any],
    ) -> None:
        if not self._hooks:
            return
        run = self.run
        self.close(None)
        with run.world.clock.hold("diagnostics"):
            underflow = self._shares(self._underflow)
            # The fused kernel is called for skipped steps too.
            lost_updates = self._shares(self._lost_updates * report.applied)
            tags = {f"numerics/underflow_share/{group}": x for group, x in underflow.items()}
            tags |= {f"numerics/lost_update_share/{group}": x for group, x in lost_updates.items()}
            self.measured[run.step] = tags
            for group, share in underflow.items():
                if share > UNDERFLOW_LIMIT:
                    self._warn_once(
                        f"underflow of {group}",
                        f"{100 * share:.0f} % of the gradients of {group} underflow to zero in "
                        f"fp16 at loss scale {self._scale:g}; use a higher "
                        "precision.scaler.init_scale, or precision.dtype=bf16",
                    )
            for group, share in lost_updates.items():
                self._warn_of_lost_updates(group, share, float(run.schedule.last_lr))

    def tags(self, row: LogRow) -> Tags:
        """What was measured at this log step, for rank 0's line of metrics.jsonl."""
        tags = self.measured.pop(row.step, {})
        return tags if self.run.world.is_main else {}

    def close(self, error: BaseException | None = None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _count_underflow(self, micro_batches: Sequence[Any]) -> None:
        """Of this rank's gradients; under FSDP of those summed over ranks, as its shards are."""
        run = self.run
        weights = weights_of(run.task, micro_batches, run.world.device)
        weight = run.world.sum(weights.sum())
        factor = run.world.world_size / weight
        scaled = factor * run.scaler.scale_tensor
        nonzero_in_fp16 = self._nonzero_gradients(micro_batches[0], scaled, fp16=True)
        nonzero = self._nonzero_gradients(micro_batches[0], factor, fp16=False)
        for row, parameters in zip(self._underflow, self._groups.values(), strict=True):
            for p in nonzero.keys() & nonzero_in_fp16.keys() & set(parameters):
                _add(row, nonzero[p] & ~nonzero_in_fp16[p], nonzero[p])

    def _nonzero_gradients(
        self,
        batch: Any,
        factor: Tensor,
        fp16: bool,
    ) -> dict[Tensor, Tensor]:
        """A mask per parameter, of a loss times `factor`; changes no state."""
        run = self.run
        parallel = run.parallel
        with (
            parallel.no_side_effects(),
            stance("eager_on_recompile"),
            parallel.gradient_sync(parallel.sharded),
        ):
            with run.precision.autocast() if fp16 else nullcontext():
                loss = loss_of(run.task, run.model, batch, run.world.device)
            (loss * factor).backward()
            return {p: local(p.grad) != 0 for p in parallel.parameters if p.grad is not None}

    def _keep_parameters(self, *_: Any) -> None:
        """Right before the update, when it is known which parameters have a gradient."""
        with self.run.world.clock.hold("diagnostics"):
            parameters = self.run.parallel.parameters
            self._before = {p: local(p).detach().clone() for p in parameters if p.grad is not None}

    def _count_lost_updates(self, *_: Any) -> None:
        with self.run.world.clock.hold("diagnostics"):
            for row, parameters in zip(self._lost_updates, self._groups.values(), strict=True):
                for p in parameters:
                    if p in self._before and p.grad is not None:
                        nonzero = local(p.grad) != 0
                        _add(row, nonzero & (local(p).detach() == self._before.pop(p)), nonzero)

    def _zeros(self) -> Tensor:
        """[groups, 2]: elements that were lost, elements that could have been."""
        shape = (len(self._groups), 2)
        return torch.zeros(shape, dtype=torch.float64, device=self.run.world.device)

    def _shares(self, counts: Tensor) -> dict[str, float]:
        """{group: lost / all} over all ranks, for groups that have any; one host read."""
        # HSDP's replicas count the same elements, which cancels in the ratio.
        totals = zip(self._groups, self.run.world.sum(counts).tolist(), strict=True)
        return {name: lost / count for name, (lost, count) in totals if count}

    def _warn_of_lost_updates(
        self,
        group: str,
        share: float,
        lr: float,
    ) -> None:
        in_bf16 = any(p.dtype == torch.bfloat16 for p in self._groups[group])
        if in_bf16 and share > LOST_UPDATE_LIMIT:
            self._warn_once(
                f"lost updates of {group}",
                f"{100 * share:.0f} % of the updates of {group} are lost to rounding: bf16 storage "
                f"keeps 8 bits and lr {lr:g} moves less; use parallel.param_dtype=fp32 or a higher "
                "optim.lr",
            )

    def _warn_once(
        self,
        key: str,
        text: str,
    ) -> None:
        if key not in self._warned:
            self._warned.add(key)
            self.run.world.warn(text)


def _add(
    row: Tensor,
    lost: Tensor,
    of: Tensor,
) -> None:
    """Add the counts of two masks to a row [2]."""
    row += torch.stack([lost.sum(), of.sum()]).to(row.device)
