"""Compares the steps of a cell (strategy, precision, optimizer; on some ranks) with the reference.

Each step is compared from its own start: the reference computes the gradients of the whole batch at
the cell's parameters and buffers, so that a step's rounding errors do not affect the comparison of
the next. The first step must start at the initial weights, bit for bit, and each step where the one
before ended, so no change goes unchecked. The reference's optimizer takes a textbook step from the
cell's parameters with the cell's gradients, which have been compared by then. It keeps its own
moments from the first step on, so wrong moments in the cell are found.

If samples of a micro-batch are coupled, or forward changes a state (by_micro_batch), the reference
takes the step's micro-batches one after the other, each with the samples of all ranks.

The bounds are derived, not tuned. u is the unit roundoff: 2^-24 fp32, 2^-11 fp16, 2^-8 bf16.

gradients: n x u + 4 e, relative to the largest element. n is the number of operations in forward
    and backward that round; each adds about one u. Long sums with cancellation and flipped ReLUs
    add more: e is the error of plain torch in one process, in this precision, with the batch whole
    or in twelve parts. The 4 allows for later steps and other orders of summation. n and e are
    measured at the first step. If a step exceeds this bound, they are measured at that step, with
    the cell's micro-batches. The bound is at most 0.45, so that a factor of two is always found.
parameters: u x (3 P + 50 D) + 4 e, with float32's u, since all precisions update in float32. A
    parameter is rounded three times: weight decay's factor, its product, adding the change. AdamW
    rounds the change 19 times (unscaling and clipping 7, two moments 6, step 6), and early rounding
    errors of its moments count at most 2.4 times. P is the largest parameter, D the largest change.
    e is the error of plain torch's float32 step against its float64 step from the same states.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from dist_amp.loading.plan import shard_step
from dist_amp.settings import Strategy
from dist_amp.verify.reference import (
    STEPS,
    UNIT_ROUNDOFF,
    Reference,
    State,
    Values,
    difference,
    largest,
    relative_error,
)


@dataclass(frozen=True)
class Cell:
    """One combination to compare. accumulation: micro-batches in each of the STEPS steps."""

    strategy: Strategy
    precision: Literal["fp32", "bf16", "fp16"]
    optimizer: Literal["sgd", "adamw"] = "sgd"
    accumulation: tuple[int, ...] = (1, 3, 4, 4, 3)


@dataclass(frozen=True)
class Verdict:
    """A cell's largest errors and their bounds. cause: what is wrong, or ""."""

    gradient_error: float = math.nan
    gradient_bound: float = math.nan
    parameter_error: float = math.nan
    parameter_bound: float = math.nan
    cause: str = ""


@dataclass(frozen=True)
class Comparison:
    """What a cell computed. states: the optimizer's input at each step; end: last parameters."""

    reference: Reference
    cell: Cell
    ranks: int
    states: list[State]
    buffers: Sequence[Values]
    end: Values

    def values_at(self, step: int) -> Values:
        """The parameters and buffers at which a step's gradients were computed."""
        return {**self.states[step].parameters, **self.buffers[step]}

    def parts(self, step: int) -> list[tuple[int, ...]]:
        """Sample indices of each micro-batch of a step; of all ranks together if by_micro_batch."""
        samples = self.reference.step_samples[step]
        size = self.reference.global_batch // (self.ranks * self.cell.accumulation[step])
        shards = [shard_step(samples, self.ranks, size, rank) for rank in range(self.ranks)]
        if self.reference.by_micro_batch:
            groups = zip(*shards, strict=True)
            return [tuple(index for shard in group for index in shard.indices) for group in groups]
        return [shard.indices for rank in shards for shard in rank if shard.counts]

    def reference_gradients(self, step: int) -> Values:
        parts: Sequence[Sequence[int]] = [self.reference.step_samples[step]]
        if self.reference.by_micro_batch:
            parts = self.parts(step)
        return self.reference.gradients(parts, self.values_at(step))[0]

    def bound(self, step: int, error: float) -> float:
        """The bound on the gradients: the first step's, or this step's if `error` exceeds that."""
        bound = self.reference.bound(self.cell.precision)
        if error <= bound:
            return bound
        start = self.values_at(step)
        at_step, _ = self.reference.bound_at(self.cell.precision, self.parts(step), start)
        return max(bound, at_step)


def compare(record: Comparison) -> Verdict:
    """The largest errors of all steps, or the first step that exceeds a bound, with the cause."""
    reference, cell, states = record.reference, record.cell, record.states
    if len(states) != STEPS:
        times = f"the optimizer was applied {len(states)} times in {STEPS} steps"
        return Verdict(cause=f"{times}; each step must apply it once")
    if any(not torch.equal(states[0].parameters[n], x) for n, x in reference.initial.items()):
        cause = "the initial weights are not those that build_model makes from run.seed"
        return Verdict(cause=cause)
    ends = [*(state.parameters for state in states[1:]), record.end]
    updated = reference.parameters_after(cell.optimizer, states)
    update_bound = bound_of_update(record, updated)
    verdicts = []
    for step, state in enumerate(states):
        truth = record.reference_gradients(step)
        error = relative_error(state.gradients, truth)
        bound = record.bound(step, error)
        update_error = largest(difference(ends[step], updated[step]))
        cause = ""
        # "not <=" in place of ">", so that nan fails.
        if not error <= bound:
            cause = gradient_fault(record, step, truth)
        elif not update_error <= update_bound:
            cause = (
                f"the gradients of step {step + 1} are right, the parameters after it are not: "
                "check clipping, learning rate, weight decay and moments"
            )
        verdicts.append(Verdict(error, bound, update_error, update_bound, cause))
        if cause:
            return verdicts[-1]
    worst = max(verdicts, key=lambda verdict: verdict.gradient_error / verdict.gradient_bound)
    return replace(worst, parameter_error=max(verdict.parameter_error for verdict in verdicts))


def bound_of_update(record: Comparison, updated: Sequence[Values]) -> float:
    """The bound on the parameters' error. updated: the reference's parameters, in float64."""
    rounded = record.reference.parameters_after(record.cell.optimizer, record.states, torch.float32)
    changes = []
    errors = []
    for step, after in enumerate(updated):
        changes.append(largest(difference(after, record.states[step].parameters)))
        errors.append(largest(difference(rounded[step], after)))
    parameters = map(largest, [*updated, record.states[0].parameters])
    roundings = 3 * max(parameters) + 50 * max(changes)
    return UNIT_ROUNDOFF["fp32"] * roundings + 4 * max(errors)


def gradient_fault(record: Comparison, step: int, truth: Values) -> str:
    """What is wrong with a step's gradients. truth: the reference's gradients."""
    accumulation = record.cell.accumulation[step]
    micro_batches = "1 micro-batch" if accumulation == 1 else f"{accumulation} micro-batches"
    text = f"the gradients of step {step + 1} ({micro_batches}) are off"
    gradients = record.states[step].gradients
    if not all(value.isfinite().all() for value in gradients.values()):
        return f"{text}: they are not finite"
    tolerance = 2 * record.reference.bound(record.cell.precision)
    # The factor by which the gradients are too large, fitted by least squares.
    products = sum((gradients[name] * value).sum() for name, value in truth.items())
    factor = float(products / sum(value.square().sum() for value in truth.values()))
    scaled_truth = {name: factor * value for name, value in truth.items()}
    if not relative_error(gradients, scaled_truth) <= tolerance:
        return (
            f"{text}, and not by one factor: each micro-batch must be divided by the weight of all "
            "ranks and micro-batches, and gradients must be summed over them"
        )
    text += f": all of them are {factor:.4g} times what they should be"
    if record.cell.precision == "fp16" and factor < 0.01:
        return f"{text}; they were clipped before they were unscaled"
    mistakes = {
        accumulation: "the division by accumulation_steps is missing",
        1 / accumulation: "they are divided by accumulation_steps twice",
        record.ranks: "they are summed over ranks, not averaged",
        1 / record.ranks: "they are divided by the number of ranks twice",
    }
    for value, mistake in mistakes.items():
        if value != 1 and math.isclose(factor, value, rel_tol=tolerance):
            return f"{text}; {mistake}"
    return text
