"""Underflow and lost updates in half precision, per parameter group, with debug.numerics=true.

`numerics/underflow_share/GROUP`: of the gradient elements that are nonzero in float32, the share
that is zero in fp16 at the current loss scale; measured in the step's first micro-batch.
`numerics/lost_update_share/GROUP`: of the parameter elements with a nonzero gradient, the share
whose stored value the step did not change. Measuring does not change training.

Docs: docs/debugging.md
"""

from collections.abc import Mapping, Sequence
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

# Shares above which to warn; both are assumed. In Micikevicius et al. 2018, arXiv:1710.03740,
# section 3.1, accuracy suffered when about 5 % of the gradients would become zero in fp16.
UNDERFLOW_LIMIT = 0.05
LOST_UPDATE_LIMIT = 0.5
# bf16 has 8 significant bits: the value next to p is |p| x 2^-8 to |p| x 2^-7 away, and an update
# below half of that is rounded away. So an update below |p| x 2^-9 is lost for every p.
SURELY_LOST = 2.0**-9

Masks = Mapping[Tensor, Tensor]  # {parameter: bool mask of the shape of this rank's shard}


class Numerics(Observer):
    """Measures at log steps, and warns at the start if bf16 parameters would lose updates."""

    def __init__(self, run: Run):
        self.run = run
        self.measured: dict[int, Tags] = {}  # {step: tags}, until the step's metrics are written
        self._groups: dict[str, list[Tensor]] = {}
        for number, group in enumerate(run.optimizer.param_groups):
            self._groups[group.get("name", f"group {number}")] = group["params"]
        self._before: dict[Tensor, Tensor] = {}  # this rank's parameters before the update
        self._hooks: list[Any] = []  # on the optimizer, during a log step
        self._warned: set[tuple[str, str]] = set()
        if run.config.debug.numerics and run.scaler.scales and run.precision.cast_by == "policy":
            raise ConfigError(
                "debug.numerics=true compares fp16 with float32, but FSDP's mixed-precision policy "
                "computes in only one of them; use precision.cast_by=autocast"
            )
        if run.config.optim.name == "adamw":  # its updates are about as large as lr
            lr = run.config.optim.lr
            lost: dict[Tensor, Tensor] = {
                p: local(p).detach().float().abs() * SURELY_LOST > lr
                for p in run.parallel.parameters
                if p.dtype == torch.bfloat16
            }
            counted: dict[Tensor, Tensor] = {p: torch.ones_like(mask) for p, mask in lost.items()}
            self._warn_of_lost_updates(self._shares(lost, counted), lr)

    def before_step(self, micro_batches: Sequence[Any]) -> None:
        run = self.run
        step = run.step + 1
        is_log_step = step % run.config.metrics.log_every == 0 or step == run.config.train.steps
        if not (run.config.debug.numerics and is_log_step):
            return
        with run.world.clock.hold("diagnostics"):
            self.measured[step] = self._underflow(micro_batches) if run.scaler.scales else {}
        self._lost_shares: dict[str, float] = {}
        self._hooks = [
            run.optimizer.register_step_pre_hook(self._keep_parameters),
            run.optimizer.register_step_post_hook(self._count_lost_updates),
        ]

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        if self._hooks:
            self.close()
            self._warn_of_lost_updates(self._lost_shares, float(self.run.schedule.last_lr))

    def tags(self, row: LogRow) -> Tags:
        tags = self.measured.pop(row.step, {})
        return tags if self.run.world.is_main else {}

    def close(self, error: BaseException | None = None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _underflow(self, micro_batches: Sequence[Any]) -> Tags:
        """Compare fp16 gradients with float32 ones: before reduction, but under FSDP after it."""
        run = self.run
        weights = weights_of(run.task, micro_batches)
        factor = run.parallel.sum_over_ranks(weights).inverse_mean
        scale = run.scaler.scale_tensor
        in_fp16 = self._nonzero_gradients(micro_batches[0], factor * scale, fp16=True)
        in_fp32 = self._nonzero_gradients(micro_batches[0], factor, fp16=False)
        lost = {p: in_fp32[p] & ~in_fp16[p] for p in in_fp32.keys() & in_fp16.keys()}
        shares = self._shares(lost, in_fp32)
        for group, share in shares.items():
            if share > UNDERFLOW_LIMIT:
                self._warn_once(
                    ("underflow", group),
                    f"{100 * share:.0f} % of the gradients of {group} underflow to zero in fp16 at "
                    f"loss scale {scale.item():g}; use a higher precision.scaler.init_scale, or "
                    "precision.dtype=bf16",
                )
        return {f"numerics/underflow_share/{group}": share for group, share in shares.items()}

    def _nonzero_gradients(self, batch: Any, factor: Tensor, fp16: bool) -> Masks:
        """Masks of the nonzero gradient elements of loss * factor. Changes no state."""
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
        """Hook right before the update, when it is known which parameters have a gradient."""
        with self.run.world.clock.hold("diagnostics"):
            parameters = self.run.parallel.parameters
            self._before = {p: local(p).detach().clone() for p in parameters if p.grad is not None}

    def _count_lost_updates(self, *_: Any) -> None:
        run = self.run
        with run.world.clock.hold("diagnostics"):
            # A fused optimizer is also called in skipped steps, which must not count as lost.
            applied = run.scaler.applied
            nonzero = {p: local(p.grad) != 0 for p in self._before if p.grad is not None}
            lost = {
                p: mask & (local(p).detach() == self._before[p]) & applied
                for p, mask in nonzero.items()
            }
            self._before = {}
            shares = self._shares(lost, {p: mask & applied for p, mask in nonzero.items()})
        tags = {f"numerics/lost_update_share/{group}": share for group, share in shares.items()}
        self.measured[run.step + 1] |= tags
        self._lost_shares = shares

    def _shares(self, lost: Masks, counted: Masks) -> dict[str, float]:
        """{group: lost / counted elements of all ranks} where any count. Waits for the device."""
        device = self.run.world.device
        counts = torch.zeros(len(self._groups), 2, dtype=torch.float64, device=device)
        for row, parameters in zip(counts, self._groups.values(), strict=True):
            for p in parameters:
                if p in lost:
                    row += torch.stack([lost[p].sum(), counted[p].sum()]).to(device)
        # HSDP's replicas count the same elements, which cancels in the ratio.
        totals = zip(self._groups, self.run.world.sum(counts).tolist(), strict=True)
        return {name: part / total for name, (part, total) in totals if total}

    def _warn_of_lost_updates(self, shares: Mapping[str, float], lr: float) -> None:
        for group, share in shares.items():
            in_bf16 = any(p.dtype == torch.bfloat16 for p in self._groups[group])
            if in_bf16 and share > LOST_UPDATE_LIMIT:
                self._warn_once(
                    ("lost updates", group),
                    f"{100 * share:.0f} % of the updates of {group} are lost to rounding: bf16 has "
                    f"8 significant bits, too few for lr {lr:g}; use parallel.param_dtype=fp32 or "
                    "a higher optim.lr",
                )

    def _warn_once(self, key: tuple[str, str], text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            self.run.world.warn(text)
