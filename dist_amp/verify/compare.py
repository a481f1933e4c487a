"""The comparison: each step's gradients, and its update, of one way of running against the reference's.

Every step is compared where it begins: the reference computes the gradients of the step's whole batch at the cell's own
parameters and buffers, so that a rounding error of one step does not change what the next one is compared with, as it
would where it flips a ReLU or a router. The first parameters are the initial weights, bit for bit, and each step's end
is the next one's start, so the steps together are proven. The reference's optimizer takes one textbook step from the
cell's parameters with the cell's gradients, which were compared already; its moments are its own from the first step
on, so moments that a cell loses or gets wrong show in its parameters.

The bounds are derived, not tuned; u is the unit roundoff of a dtype: 2^-24 fp32, 2^-12 fp16, 2^-9 bf16.

    gradients   n x u + 4 e, relative to the largest element. Each of the n results that forward and backward round
                adds about one u. Long sums with cancellation and flipped ReLUs add more: e is the error of plain torch
                in one process, in this precision, with the batch whole and in twelve parts; times 4, for later steps
                and other orders of summation. n and e are measured on the task, at the first step; where a step exceeds
                that, again at its own parameters, with the cell's own micro-batches as parts. At most 0.45, so that a
                factor of two is always found.
    parameters  u x (3 P + 50 D) + 4 e in all precisions, since parameters and updates are float32. A parameter is
                rounded three times: decay's factor, its product, the sum with the change. AdamW rounds the change 19
                times (unscaling and clipping 7, two moments 6, step 6), and early rounding errors of its moments count
                at most 2.4 times, 1 over the root of the least share that a gradient has in the second moment. P is the
                largest parameter, D the largest change. e, the error of plain torch's float32 step against its float64
                step from the same states, adds what the norm's long sum rounds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dist_amp.runtime.plan import Shard, shard_step
from dist_amp.settings import (
    Strategy,
)
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
from dist_amp.world import World


@dataclass(frozen=True)
class Cell:
    """One way of running. accumulation: micro-batches in each of the steps."""

    strategy: Strategy
    precision: Literal["fp32", "bf16", "fp16"]
    optimizer: Literal["sgd", "adamw"] = "sgd"
    clip_by: Literal["norm", "value", "off"] = "norm"
    fused: bool = True
    accumulation: tuple[int, ...] = (1, 3, 4, 4, 3)
    partial: bool = True  # the fourth step ends an epoch
    accumulate_reduce: Literal["last", "every"] = "last"


@dataclass(frozen=True)
class Verdict:
    """How far a cell is from the reference. cause: what is wrong; "": nothing."""

    gradient_error: float = math.nan
    gradient_bound: float = math.nan
    parameter_error: float = math.nan
    parameter_bound: float = math.nan
    cause: str = ""


@dataclass(frozen=True)
class Comparison:
    """What a cell did: its states in each step's middle, the buffers at each step's start, and the last parameters."""

    reference: Reference
    cell: Cell
    world: World
    states: list[State]
    buffers: Sequence[Values]
    end: Values

    def start(self, step: int) -> Values:
        """Parameters and buffers at which a step's gradients were computed."""
        return {**self.states[step].parameters, **self.buffers[step]}

    def samples(self, step: int) -> list[int]:
        return self.reference.step_samples(self.cell.partial)[step]

    def shards(self, step: int) -> list[tuple[int, int, Shard]]:
        """(rank, micro-batch, its samples) of a step."""
        ranks = self.world.world_size
        size = self.reference.global_batch // (ranks * self.cell.accumulation[step])
        shards = [shard_step(self.samples(step), ranks, size, rank) for rank in range(ranks)]
        return [(rank, number, shard) for rank in range(ranks) for number, shard in enumerate(shards[rank])]

    def bound(self, step: int, error: float) -> float:
        """The bound of a step's gradients: the first step's or, if `error` exceeds that, its own if that is larger."""
        bound, precision = self.reference.bound(self.cell.precision), self.cell.precision
        if error <= bound:
            return bound
        parts = [shard.indices for _, _, shard in self.shards(step) if shard.counts]
        return max(bound, self.reference.bound_at(precision, parts, self.start(step))[0])


def compare(run: Comparison) -> Verdict:
    """The largest errors of all steps' gradients and updates, and the cause of the first that exceeds its bound."""
    reference, cell, states = run.reference, run.cell, run.states
    if len(states) != STEPS:
        return Verdict(cause=f"the optimizer was applied {len(states)} times in {STEPS} steps; it must be once in each")
    truths = [reference.gradients([run.samples(step)], run.start(step))[0] for step in range(STEPS)]
    errors = [relative_error(state.gradients, truth) for state, truth in zip(states, truths, strict=True)]
    bounds = [run.bound(step, error) for step, error in enumerate(errors)]
    updates = reference.updates(cell.optimizer, cell.clip_by, states)
    plain = reference.updates(cell.optimizer, cell.clip_by, states, torch.float32)
    change = max(largest(difference(new, state.parameters)) for new, state in zip(updates, states, strict=True))
    roundings = 3 * max(map(largest, [*updates, states[0].parameters])) + 50 * change
    own_error = max(largest(difference(a, b)) for a, b in zip(plain, updates, strict=True))
    update_bound = UNIT_ROUNDOFF["fp32"] * roundings + 4 * own_error
    ends = [*(state.parameters for state in states[1:]), run.end]
    update_errors = [largest(difference(mine, true)) for mine, true in zip(ends, updates, strict=True)]
    cause = ""
    if any(not torch.equal(states[0].parameters[name], value) for name, value in reference.initial.items()):
        cause = "the initial weights are not those that build_model makes from run.seed"
    for step in range(STEPS):
        if not cause and not errors[step] <= bounds[step]:
            cause = about_gradients(run, step, truths[step])
        if not cause and not update_errors[step] <= update_bound:
            cause = about_update(run, step, ends[step], update_bound)
    worst = max(range(STEPS), key=lambda step: (not errors[step] <= bounds[step], errors[step] / bounds[step]))
    return Verdict(errors[worst], bounds[worst], max(update_errors), update_bound, cause)


def about_update(run: Comparison, step: int, end: Values, bound: float) -> str:
    """What is wrong with a step's update, with the well-known mistake that gives it if one does."""
    cell, before = run.cell, run.states[step].parameters
    mistakes: dict[str, dict[str, Any]] = {
        "the gradients were not clipped": {"clip_by": "off"},
        "the optimizer's moments are lost between steps": {"remembers": False},
        "weight decay is missing": {"decays": False},
        "the learning rate is the next step's; it follows applied steps": {"ahead": 1},
        "the learning rate is the step's before; it follows applied steps": {"ahead": -1},
    }
    why = "check unscaling, clipping, learning rate and optimizer"
    if largest(difference(end, before)) == 0:
        why = "none moved: the optimizer's step changes nothing"
    for text, options in mistakes.items():
        values = run.reference.updates(cell.optimizer, states=run.states, **{"clip_by": cell.clip_by, **options})[step]
        if largest(difference(end, values)) <= bound:
            why = text
    return f"the gradients of step {step + 1} are right, the parameters after it are not: {why}"


def about_gradients(run: Comparison, step: int, truth: Values) -> str:
    """Which step's gradients are wrong, with the well-known mistake that gives exactly these if one does."""
    count, why = run.cell.accumulation[step], diagnose(run, step, truth)
    text = f"the gradients of step {step + 1} ({count} micro-batch{'es' * (count > 1)}) are off"
    return f"{text}: {why}" if why else text


def diagnose(run: Comparison, step: int, truth: Values) -> str:
    """The well-known mistake that gives exactly these gradients; "" if none does."""
    reference, cell, gradients = run.reference, run.cell, run.states[step].gradients
    accumulation, ranks, tolerance = cell.accumulation[step], run.world.world_size, 2 * reference.bound(cell.precision)
    if not all(value.isfinite().all() for value in gradients.values()):
        return "they are not finite" + ", at a loss scale at which plain autocast is" * (cell.precision == "fp16")
    factor = float(sum((gradients[n] * truth[n]).sum() for n in truth) / sum(truth[n].square().sum() for n in truth))
    scaled_truth = {name: factor * value for name, value in truth.items()}
    if abs(factor - 1) < tolerance or relative_error(gradients, scaled_truth) > tolerance:
        mistakes = gradients_by_mistake(run, step).items()
        return next((text for text, values in mistakes if relative_error(gradients, values) <= tolerance), "")
    norm = math.sqrt(sum(value.square().sum().item() for value in gradients.values()))
    limit = reference.hyperparameters.max_grad_norm
    if cell.clip_by == "norm" and math.isclose(norm, limit, rel_tol=0.01):
        return "they were clipped before the optimizer clips them"
    if cell.clip_by == "norm" and cell.precision == "fp16" and norm < limit / 4 and factor < 0.1:
        return "they were clipped before they were unscaled"
    known = {
        accumulation: "; the division by accumulation_steps is missing",
        1 / accumulation: "; they are divided by accumulation_steps twice",
        ranks: "; they are summed over ranks, not averaged",
        1 / ranks: "; they are divided by the number of ranks twice",
    }
    why = next((text for value, text in known.items() if math.isclose(factor, value, rel_tol=tolerance)), "")
    return f"all of them are {factor:.4g} times what they should be{why}"


def gradients_by_mistake(run: Comparison, step: int) -> dict[str, Values]:
    """{mistake: the gradients that it gives in this step}, from each rank's and micro-batch's own gradients."""
    reference, ranks, shards = run.reference, run.world.world_size, run.shards(step)
    accumulation = 1 + max(number for _, number, _ in shards)  # fewer in the partial step at an epoch's end
    parts: list[tuple[int, int, float, Values]] = []  # (rank, micro-batch, weight, gradients of the sum); no padding
    for rank, number, shard in shards:
        if weight := float(reference.task.weight(reference.batch(shard.indices))) * shard.counts:
            mean, _ = reference.gradients([shard.indices], run.start(step))
            parts.append((rank, number, weight, {name: value * weight for name, value in mean.items()}))
    total = sum(weight for _, _, weight, _ in parts)
    of_rank = [sum(weight for r, _, weight, _ in parts if r == rank) for rank in range(ranks)]
    of_number = [sum(weight for _, n, weight, _ in parts if n == number) for number in range(accumulation)]

    def mix(factor_of: Callable[[int, int, float], float]) -> Values:
        """The sum of all micro-batches' gradients, each times factor_of(rank, micro-batch, its weight)."""
        mixed: Values = {}
        for rank, number, weight, values in parts:
            factor = factor_of(rank, number, weight)
            mixed = {name: mixed.get(name, 0.0) + value * factor for name, value in values.items()}
        return mixed

    return {
        "each micro-batch is divided by its own weight, not by that of all ranks and micro-batches": mix(
            lambda r, n, weight: 1 / (ranks * accumulation * weight)
        ),
        "each rank divides by its own weight, not by that of all ranks": mix(
            lambda r, n, weight: 1 / (ranks * of_rank[r])
        ),
        "each round of micro-batches is divided by its own weight and not by accumulation_steps": mix(
            lambda r, n, weight: 1 / of_number[n]
        ),
        "each micro-batch is divided by its own weight and not by accumulation_steps": mix(
            lambda r, n, weight: 1 / (ranks * weight)
        ),
        "rank 0 used its own gradients alone; they must be summed over ranks": mix(
            lambda r, n, weight: ranks * (r == 0) / total
        ),
        "only the last micro-batch counts: gradients are cleared between micro-batches": mix(
            lambda r, n, weight: (n == accumulation - 1) / total
        ),
        "only the last micro-batch is summed over ranks: no_sync must surround forward and backward": mix(
            lambda r, n, weight: (1 if n == accumulation - 1 else ranks * (r == 0)) / total
        ),
    }
