"""What half precision loses, measured at log steps with debug.numerics=true, per group of parameters.

- `numerics/underflow_share/GROUP`: gradients that are zero in fp16 at the current loss scale, as a share of those that
  are not zero in float32, in the step's first micro-batch.
- `numerics/lost_update_share/GROUP`: elements with a gradient whose stored value the step did not change.

Measuring changes no step.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from dist_amp.checkpoint.state import no_side_effects
from dist_amp.errors import ConfigError
from dist_amp.fast.compile import as_compiled_so_far
from dist_amp.fast.fused import local
from dist_amp.run import Run
from dist_amp.step import loss_of, total_weight
from dist_amp.telemetry.async_copy import StepReport
from dist_amp.telemetry.observer import Observer

# Above these shares there is a warning. Assumed, with a reason: gradients of which 5 % would vanish in fp16 hurt the
# accuracy of Micikevicius et al. 2018, arXiv:1710.03740, section 3.1.
UNDERFLOW_LIMIT = 0.05

LOST_UPDATE_LIMIT = 0.5  # assumed

# bf16 keeps 8 bits: the next value is |p| x 2^-8 to |p| x 2^-7 away, and rounding loses a step of less than half of it.
SURELY_LOST = 2.0**-9


class Numerics(Observer):
    """Measures log steps if debug.numerics=true; in any case, warns at the start about updates that bf16 will lose.

    Errors: ConfigError in fp16 with FSDP's mixed-precision policy.
    """

    def __init__(self, run: Run):
        self.run = run
        self.groups = run.optimizer.param_groups
        self.names = [group.get("name", f"group {number}") for number, group in enumerate(self.groups)]
        self.reads_before_step = run.config.debug.numerics
        # Per measure [groups, 2]: elements that were lost, elements that could have been; empty if not a log step.
        self._counts: dict[str, Tensor] = {}
        self._before: dict[Tensor, Tensor] = {}  # this rank's parameters before the update
        self._hooks: list[Any] = []
        self._scale = 1.0  # before the step
        self._in_bf16 = {
            name
            for name, group in zip(self.names, self.groups, strict=True)
            if any(p.dtype == torch.bfloat16 for p in group["params"])
        }
        self._warned: set[tuple[str, str]] = set()
        if run.config.debug.numerics and run.scaler.scales and run.precision.cast_by == "policy":
            raise ConfigError(
                "debug.numerics=true compares fp16 with float32, and FSDP's mixed-precision policy computes in one of "
                "them only; use precision.cast_by=autocast"
            )
        self._warn_of_bf16_storage()

    def _warn_of_bf16_storage(self) -> None:
        """Warn if bf16 storage will lose AdamW's updates, whose size is about lr; one host read."""
        optim = self.run.config.optim
        if optim.name != "adamw" or not self._in_bf16:
            return
        counts = self._zeros()
        for row, group in zip(counts, self.groups, strict=True):
            for p in group["params"]:
                if p.dtype == torch.bfloat16:
                    value = local(p).detach().float()
                    _add(row, value.abs() * SURELY_LOST > optim.lr, torch.ones_like(value, dtype=torch.bool))
        self._warn(self._shares({"lost_update_share": counts}), optim.lr)

    def before_step(self, micro_batches: Sequence[Any]) -> None:
        """Before a log step: count gradients that underflow, and hook the optimizer to count lost updates."""
        run, step = self.run, self.run.step + 1
        is_log_step = step % run.config.metrics.log_every == 0 or step == run.config.train.steps
        if not (run.config.debug.numerics and is_log_step):
            return
        self._counts = {"underflow_share": self._zeros(), "lost_update_share": self._zeros()}
        if run.scaler.scales:
            with run.world.clock.hold("diagnostics"):
                self._count_underflow(micro_batches)
                self._scale = run.scaler.scale_tensor.item()
        optimizer = run.optimizer
        self._hooks = [
            optimizer.register_step_pre_hook(self._keep_parameters),
            optimizer.register_step_post_hook(self._count_lost_updates),
        ]

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        """After a log step: write the shares, and warn if they are large."""
        if not self._counts:
            return
        run, counts, self._counts = self.run, self._counts, {}
        self._remove_hooks()
        with run.world.clock.hold("diagnostics"):
            counts["lost_update_share"] *= report.applied  # the fused kernel is called for skipped steps too
            shares = self._shares(counts)
            if shares:
                tags = {f"numerics/{measure}/{group}": share for (measure, group), share in shares.items()}
                run.metrics.write_scalars(run.step, tags)
            self._warn(shares, float(run.schedule.last_lr))

    def __exit__(self, *error: object) -> None:
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _count_underflow(self, micro_batches: Sequence[Any]) -> None:
        """Count elements that are zero in fp16 but not in float32, and those that are not zero in float32.

        Under FSDP they are gradients summed over ranks, as its shards are; otherwise this rank's own.
        """
        run = self.run
        weight = run.world.sum(total_weight(run.task, micro_batches, run.world.device))
        factor = run.world.world_size / weight
        nonzero_in_fp16 = self._nonzero_gradients(micro_batches[0], factor * run.scaler.scale_tensor, fp16=True)
        nonzero = self._nonzero_gradients(micro_batches[0], factor, fp16=False)
        for row, group in zip(self._counts["underflow_share"], self.groups, strict=True):
            for p in nonzero.keys() & nonzero_in_fp16.keys() & set(group["params"]):
                _add(row, nonzero[p] & ~nonzero_in_fp16[p], nonzero[p])

    def _nonzero_gradients(self, batch: Any, factor: Tensor, fp16: bool) -> dict[Tensor, Tensor]:
        """A mask per parameter, from one forward and backward that changes no state. factor: of the loss."""
        run = self.run
        with no_side_effects(run), as_compiled_so_far(), run.parallel.gradient_sync(run.parallel.sharded):
            with run.precision.autocast() if fp16 else nullcontext():
                loss = loss_of(run.task, run.model, batch, run.world.device)
            (loss * factor).backward()
            return {p: local(p.grad) != 0 for p in run.parallel.parameters if p.grad is not None}

    def _keep_parameters(self, *_: Any) -> None:
        """Right before the update, when it is known which parameters have a gradient."""
        with self.run.world.clock.hold("diagnostics"):
            parameters = self.run.parallel.parameters
            self._before = {p: local(p).detach().clone() for p in parameters if p.grad is not None}

    def _count_lost_updates(self, *_: Any) -> None:
        """Right after the update: count elements with a gradient that did not change, and all with a gradient."""
        with self.run.world.clock.hold("diagnostics"):
            for row, group in zip(self._counts["lost_update_share"], self.groups, strict=True):
                for p in group["params"]:
                    if p in self._before:
                        nonzero = local(p.grad) != 0
                        _add(row, nonzero & (local(p).detach() == self._before.pop(p)), nonzero)

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self.groups), 2, dtype=torch.float64, device=self.run.world.device)

    def _shares(self, counts: dict[str, Tensor]) -> dict[tuple[str, str], float]:
        """{(measure, group): lost / all} over all ranks, for groups that have any; one host read."""
        # HSDP's replicas count the same elements, which cancels in the ratio.
        totals = self.run.world.sum(torch.stack(list(counts.values()))).tolist()
        return {
            (measure, name): lost / of
            for measure, rows in zip(counts, totals, strict=True)
            for name, (lost, of) in zip(self.names, rows, strict=True)
            if of
        }

    def _warn(self, shares: dict[tuple[str, str], float], lr: float) -> None:
        """Warn about shares above their limits, once per measure and group."""
        for (measure, group), share in shares.items():
            if measure == "underflow_share":
                limit = UNDERFLOW_LIMIT
                text = (
                    f"gradients of {group} underflow to zero in fp16 at loss scale {self._scale:g}; use a higher "
                    "precision.scaler.init_scale, or precision.dtype=bf16"
                )
            else:
                limit = LOST_UPDATE_LIMIT if group in self._in_bf16 else 1.0
                text = (
                    f"updates of {group} are lost to rounding: bf16 storage keeps 8 bits and lr {lr:g} moves less; "
                    "use parallel.param_dtype=fp32 or a higher optim.lr"
                )
            if share > limit and (measure, group) not in self._warned:
                self._warned.add((measure, group))
                self.run.world.warn(f"{100 * share:.0f} % of the {text}")


def _add(row: Tensor, lost: Tensor, of: Tensor) -> None:
    """Add the counts of two masks to a row [2]."""
    row += torch.stack([lost.sum(), of.sum()]).to(row.device)
