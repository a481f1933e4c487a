"""What half precision loses, measured at log steps with debug.numerics=true, per group of parameters:

- `numerics/underflow_share/GROUP`: gradients that are zero in fp16 at the present loss scale, of those that are not
  zero in float32, in the step's first micro-batch;
- `numerics/lost_update_share/GROUP`: elements with a gradient whose stored value the step did not change.

A run that is measured takes the very same steps. Beside the core: delete this file, the field and its lines in
train.py, and it is gone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dist_amp.checkpoint.state import as_it_was
from dist_amp.errors import ConfigError
from dist_amp.fast.compile import as_compiled_so_far
from dist_amp.fast.fused import local
from dist_amp.run import Run
from dist_amp.step import loss_of, total_weight

# Above it there is a warning. Assumed, with a reason: gradients of which 5 % would vanish in fp16 hurt the accuracy of
# Micikevicius et al. 2018, arXiv:1710.03740, section 3.1.
UNDERFLOW_BOUND = 0.05

LOST_BOUND = 0.5

# bf16 keeps 8 bits: the next value is |p| x 2^-8 to |p| x 2^-7 away, and rounding loses a step of less than half of it.
SURELY_LOST = 2.0**-9


class Numerics:
    """Measures a run's steps; does nothing unless debug.numerics=true, but for the warning at the start.

    Errors: ConfigError in fp16 where FSDP's policy casts.
    """

    def __init__(self, run: Run):
        self.run = run
        self.groups = run.optimizer.param_groups
        self.names = [group.get("name", f"group {number}") for number, group in enumerate(self.groups)]
        self.on = run.config.debug.numerics
        self._warned: set[tuple[str, str]] = set()
        if self.on and run.scaler.scales and run.precision.cast_by == "policy":
            raise ConfigError(
                "debug.numerics=true compares fp16 to float32, which FSDP's policy can't compute in beside; use "
                "precision.cast_by=autocast"
            )
        self._warn_ahead()

    def _warn_ahead(self) -> None:
        """Warn where bf16 storage will lose AdamW's updates, which are about lr; one read."""
        optim = self.run.config.optim
        if optim.name != "adamw" or not any(map(_in_bf16, self.groups)):
            return
        counts = self._zeros()
        for row, group in enumerate(self.groups):
            for p in filter(_is_bf16, group["params"]):
                value = local(p).detach().float()
                _add(counts[row], value.abs() * SURELY_LOST > optim.lr, torch.ones_like(value, dtype=torch.bool))
        self._judge("lost_update_share", self._shares([counts])[0], optim.lr)

    @contextmanager
    def measuring(self, micro_batches: Sequence[Any]) -> Iterator[None]:
        """Around a step on `micro_batches`: measure it if it is to be logged, write, warn. Every rank calls it."""
        run, step = self.run, self.run.step + 1
        if not self.on or (step % run.config.metrics.log_every and step != run.config.train.steps):
            yield
            return
        measured = {}
        if run.scaler.scales:
            with run.metrics.off_the_clock():
                measured["underflow_share"] = self._underflow(micro_batches)
        scale, applied_before = run.scaler.scale_tensor.clone(), run.schedule.applied_steps.clone()
        with self._counting_lost_updates() as counts:
            yield
        with run.metrics.off_the_clock():
            # The fused kernel is called for a skipped step too, which loses nothing.
            measured["lost_update_share"] = counts * (run.schedule.applied_steps - applied_before).to(counts.device)
            shares = dict(zip(measured, self._shares(list(measured.values())), strict=True))
            tags = {
                f"numerics/{measure}/{group}": share
                for measure, of_groups in shares.items()
                for group, share in of_groups.items()
            }
            if tags:
                run.metrics.write_scalars(step, tags)
            for measure, of_groups in shares.items():
                self._judge(measure, of_groups, float(run.schedule.last_lr), float(scale))

    def _underflow(self, micro_batches: Sequence[Any]) -> Tensor:
        """[groups, 2]: elements that are zero in fp16 alone, elements that are not zero in float32; this rank's.

        Under FSDP of gradients summed over ranks, as its shards are; else of the rank's own.
        """
        run = self.run
        weight = run.world.sum(total_weight(run.task, micro_batches, run.world.device))
        factor, batch = run.world.world_size / weight, micro_batches[0]
        zero = self._replay(
            batch, factor, run.precision.autocast(), lambda loss: run.scaler.scale(loss).backward(), lambda g: g == 0
        )
        some = self._replay(batch, factor, nullcontext(), Tensor.backward, lambda g: g != 0)
        counts = self._zeros()
        for row, group in enumerate(self.groups):
            for p in group["params"]:
                if p in zero and p in some:
                    _add(counts[row], zero[p] & some[p], some[p])
        return counts

    def _replay(
        self,
        batch: Any,
        factor: Tensor,
        casting: AbstractContextManager[Any],
        backward: Callable[[Tensor], None],
        look: Callable[[Tensor], Tensor],
    ) -> dict[Tensor, Tensor]:
        """Forward and backward of one micro-batch, leaving no trace: `look` at each parameter's gradient."""
        run = self.run
        with as_it_was(run), as_compiled_so_far(), run.parallel.gradient_sync(run.parallel.sharded):
            with casting:
                loss = loss_of(run.task, run.model, batch, run.world.device)
            backward(loss * factor)
            return {p: look(local(p.grad)) for p in run.parallel.parameters if p.grad is not None}

    @contextmanager
    def _counting_lost_updates(self) -> Iterator[Tensor]:
        """[groups, 2], filled by the step inside: elements that stayed as they were, elements with a gradient."""
        run, counts = self.run, self._zeros()
        before: dict[Tensor, Tensor] = {}

        def keep(*_: Any) -> None:
            with run.metrics.off_the_clock():
                before.update({p: local(p).detach().clone() for p in run.parallel.parameters if p.grad is not None})

        def compare(*_: Any) -> None:
            with run.metrics.off_the_clock():
                for row, group in enumerate(self.groups):
                    for p in group["params"]:
                        if p in before:
                            some = local(p.grad) != 0
                            _add(counts[row], some & (local(p).detach() == before.pop(p)), some)

        optimizer = run.optimizer
        hooks = optimizer.register_step_pre_hook(keep), optimizer.register_step_post_hook(compare)
        try:
            yield counts
        finally:
            for hook in hooks:
                hook.remove()

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self.groups), 2, dtype=torch.float64, device=self.run.world.device)

    def _shares(self, counts: list[Tensor]) -> list[dict[str, float]]:
        """Per measure {group: lost / all} over all ranks, without groups that have none; one read."""
        # HSDP's replicas count alike, so the ratios are those of one.
        totals = self.run.world.sum(torch.stack(counts)).tolist()
        return [{name: lost / of for name, (lost, of) in zip(self.names, rows, strict=True) if of} for rows in totals]

    def _judge(self, measure: str, shares: dict[str, float], lr: float, scale: float = 1.0) -> None:
        """Warn, once per measure and group, of a share above its bound."""
        bound = UNDERFLOW_BOUND if measure == "underflow_share" else LOST_BOUND
        for group, share in shares.items():
            harmless = measure == "lost_update_share" and not _in_bf16(self.groups[self.names.index(group)])
            if share <= bound or harmless or (measure, group) in self._warned:
                continue
            self._warned.add((measure, group))
            if measure == "underflow_share":
                text = (
                    f"gradients of {group} underflow to zero in fp16 at loss scale {scale:g}; use a higher "
                    "precision.scaler.init_scale, or precision.dtype=bf16"
                )
            else:
                text = (
                    f"updates of {group} are lost to rounding: bf16 storage keeps 8 bits and lr {lr:g} moves less; "
                    "use parallel.param_dtype=fp32 or a higher optim.lr"
                )
            self.run.world.warn(f"{100 * share:.0f} % of the {text}")


def _add(row: Tensor, lost: Tensor, of: Tensor) -> None:
    """Count two masks into a row [2]."""
    row += torch.stack([lost.sum(), of.sum()]).to(row.device)


def _is_bf16(parameter: Tensor) -> bool:
    return parameter.dtype == torch.bfloat16


def _in_bf16(group: dict[str, Any]) -> bool:
    return any(map(_is_bf16, group["params"]))
