"""The comparison: each step's gradients and update, of one way of running, with the reference's.

Every step is compared where it begins: the reference computes the gradients of the step's whole
batch at the cell's parameters and buffers, so that a rounding error of one step does not change
what the next one is compared with, as it would where it flips a ReLU or a router. The first
parameters are the initial weights, bit for bit, and each step's end is the next one's start, so the
steps together are proven. The reference's optimizer takes one textbook step from the cell's
parameters with the cell's gradients, which were compared already; its moments are the reference's
from the first step on, so moments that a cell loses or gets wrong show in its parameters.

The bounds are derived, not tuned; u is the unit roundoff of a dtype: 2^-24 fp32, 2^-12 fp16, 2^-9
bf16.

gradients: n x u + 4 e, relative to the largest element. Each of the n results that forward and
    backward round adds about one u. Long sums with cancellation and flipped ReLUs add more: e is
    the error of plain torch in one process, in this precision, with the batch whole and in twelve
    parts; times 4, for later steps and other orders of summation. n and e are measured on the task,
    at the first step; where a step exceeds that, again at its parameters, with the cell's
    micro-batches as parts. At most 0.45, so that a factor of two is always found.
parameters: u x (3 P + 50 D) + 4 e in all precisions, since parameters and updates are float32. A
    parameter is rounded three times: decay's factor, its product, the sum with the change. AdamW
    rounds the change 19 times (unscaling and clipping 7, two moments 6, step 6), and early rounding
    errors of its moments count at most 2.4 times, 1 over the root of the least share that a
    gradient has in the second moment. P is the largest parameter, D the largest change. e, the
    error of plain torch's float32 step against its float64 step from the same states, adds what the
    norm's long sum rounds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dist_amp.loading.plan import Shard, shard_step
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
    """One way of running. accumulation: micro-batches in each of the steps."""

    strategy: Strategy
    precision: Literal["fp32", "bf16", "fp16"]
    optimizer: Literal["sgd", "adamw"] = "sgd"
    clip_by: Literal["norm", "value", "off"] = "norm"
    fused: bool = True
    accumulation: tuple[int, ...] = (1, 3, 4, 4, 3)
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
    """What a cell did: the states that its optimizer got, buffers at each step's start, the end."""

    reference: Reference
    cell: Cell
    ranks: int
    states: list[State]
    buffers: Sequence[Values]
    end: Values

    def start(self, step: int) -> Values:
        """Parameters and buffers at which a step's gradients were computed."""
        return {**self.states[step].parameters, **self.buffers[step]}

    def shards(self, step: int) -> list[list[Shard]]:
        """Each rank's micro-batches of a step."""
        samples = self.reference.step_samples[step]
        size = self.reference.global_batch // (self.ranks * self.cell.accumulation[step])
        return [shard_step(samples, self.ranks, size, rank) for rank in range(self.ranks)]

    def bound(self, step: int, error: float) -> float:
        """The bound of a step's gradients: the first step's, or its own where `error` exceeds that
        and it is larger.
        """
        bound = self.reference.bound(self.cell.precision)
        if error <= bound:
            return bound
        parts = [shard.indices for rank in self.shards(step) for shard in rank if shard.counts]
        at_step, _ = self.reference.bound_at(self.cell.precision, parts, self.start(step))
        return max(bound, at_step)


def compare(run: Comparison) -> Verdict:
    """The largest errors of all steps, and the cause of the first that exceeds its bound."""
    reference, cell, states = run.reference, run.cell, run.states
    if len(states) != STEPS:
        times = f"the optimizer was applied {len(states)} times in {STEPS} steps"
        return Verdict(cause=f"{times}; it must be once in each")
    cause = ""
    if any(not torch.equal(states[0].parameters[n], x) for n, x in reference.initial.items()):
        cause = "the initial weights are not those that build_model makes from run.seed"
    ends = [*(state.parameters for state in states[1:]), run.end]
    updates = reference.updates(cell.optimizer, cell.clip_by, states)
    update_bound = bound_of_updates(run, updates)
    gradients = []  # (whether a step's exceed the bound, error / bound, error, bound)
    update_errors = []
    for step, state in enumerate(states):
        truth, _ = reference.gradients([reference.step_samples[step]], run.start(step))
        error = relative_error(state.gradients, truth)
        bound = run.bound(step, error)
        update_error = largest(difference(ends[step], updates[step]))
        # "not <=" in place of ">", for nan
        if not cause and not error <= bound:
            cause = about_gradients(run, step, truth)
        if not cause and not update_error <= update_bound:
            cause = about_update(run, step, ends[step], update_bound)
        gradients.append((not error <= bound, error / bound, error, bound))
        update_errors.append(update_error)
    _, _, error, bound = max(gradients)
    return Verdict(error, bound, max(update_errors), update_bound, cause)


def bound_of_updates(run: Comparison, updates: Sequence[Values]) -> float:
    """The bound on the error of the parameters. updates: the reference's, in float64."""
    rounded = run.reference.updates(run.cell.optimizer, run.cell.clip_by, run.states, torch.float32)
    changes = []
    errors = []
    for step, update in enumerate(updates):
        changes.append(largest(difference(update, run.states[step].parameters)))
        errors.append(largest(difference(rounded[step], update)))
    parameters = map(largest, [*updates, run.states[0].parameters])
    roundings = 3 * max(parameters) + 50 * max(changes)
    return UNIT_ROUNDOFF["fp32"] * roundings + 4 * max(errors)


# ---- which known mistake gives these values ----


def about_update(run: Comparison, step: int, end: Values, bound: float) -> str:
    """What is wrong with a step's update, with the well-known mistake that gives it if one does."""
    mistakes: dict[str, dict[str, Any]] = {
        "the gradients were not clipped": {"clip_by": "off"},
        "the optimizer's moments are lost between steps": {"remembers": False},
        "weight decay is missing": {"decays": False},
        "the learning rate is the next step's; it follows applied steps": {"ahead": 1},
        "the learning rate is the step's before; it follows applied steps": {"ahead": -1},
    }
    why = "check unscaling, clipping, learning rate and optimizer"
    if largest(difference(end, run.states[step].parameters)) == 0:
        why = "none moved: the optimizer's step changes nothing"
    for text, mistake in mistakes.items():
        options = {"clip_by": run.cell.clip_by, **mistake}
        values = run.reference.updates(run.cell.optimizer, states=run.states, **options)[step]
        if largest(difference(end, values)) <= bound:
            why = text
    return f"the gradients of step {step + 1} are right, the parameters after it are not: {why}"


def about_gradients(run: Comparison, step: int, truth: Values) -> str:
    """Which step's gradients are wrong, and the well-known mistake that gives them, if one does."""
    count = run.cell.accumulation[step]
    plural = "es" if count > 1 else ""
    text = f"the gradients of step {step + 1} ({count} micro-batch{plural}) are off"
    if why := diagnose(run, step, truth):
        text += f": {why}"
    return text


def diagnose(run: Comparison, step: int, truth: Values) -> str:
    """The well-known mistake that gives exactly these gradients; "" if none does."""
    gradients = run.states[step].gradients
    tolerance = 2 * run.reference.bound(run.cell.precision)
    if not all(value.isfinite().all() for value in gradients.values()):
        text = "they are not finite"
        if run.cell.precision == "fp16":
            text += ", at a loss scale at which plain autocast is"
        return text
    products = sum((gradients[name] * value).sum() for name, value in truth.items())
    factor = float(products / sum(value.square().sum() for value in truth.values()))
    scaled_truth = {name: factor * value for name, value in truth.items()}
    if abs(factor - 1) >= tolerance and relative_error(gradients, scaled_truth) <= tolerance:
        return about_factor(run, step, factor, tolerance)
    for text, values in gradients_by_mistake(run, step).items():
        if relative_error(gradients, values) <= tolerance:
            return text
    return ""


def about_factor(run: Comparison, step: int, factor: float, tolerance: float) -> str:
    """The mistake by which all gradients are `factor` times the right ones."""
    if run.cell.clip_by == "norm":
        norm = math.hypot(*(value.norm().item() for value in run.states[step].gradients.values()))
        limit = run.reference.hyperparameters.max_grad_norm
        if math.isclose(norm, limit, rel_tol=0.01):
            return "they were clipped before the optimizer clips them"
        if run.cell.precision == "fp16" and norm < limit / 4 and factor < 0.1:
            return "they were clipped before they were unscaled"
    accumulation = run.cell.accumulation[step]
    mistakes = {
        accumulation: "the division by accumulation_steps is missing",
        1 / accumulation: "they are divided by accumulation_steps twice",
        run.ranks: "they are summed over ranks, not averaged",
        1 / run.ranks: "they are divided by the number of ranks twice",
    }
    text = f"all of them are {factor:.4g} times what they should be"
    for value, why in mistakes.items():
        if math.isclose(factor, value, rel_tol=tolerance):
            return f"{text}; {why}"
    return text


def gradients_by_mistake(run: Comparison, step: int) -> dict[str, Values]:
    """{mistake: the gradients that it gives in this step}."""
    reference, ranks = run.reference, run.ranks
    shards = run.shards(step)
    accumulation = len(shards[0])  # fewer in the partial step at an epoch's end
    weight = torch.zeros(ranks, accumulation, dtype=torch.float64)
    sums: dict[tuple[int, int], Values] = {}  # of the gradients, by rank and micro-batch
    for rank, number in torch.cartesian_prod(*map(torch.arange, weight.shape)).tolist():
        shard = shards[rank][number]
        of_shard = float(reference.task.weight(reference.batch(shard.indices))) * shard.counts
        if of_shard:
            mean, _ = reference.gradients([shard.indices], run.start(step))
            weight[rank, number] = of_shard
            sums[rank, number] = {name: value * of_shard for name, value in mean.items()}
    total = weight.sum()
    last = torch.arange(accumulation) == accumulation - 1
    rank_0 = (torch.arange(ranks) == 0)[:, None] * ranks / total
    # What each mistake multiplies a micro-batch's gradients by: [ranks, micro-batches].
    factors = {
        "each micro-batch is divided by its own weight, not by that of all ranks and "
        "micro-batches": 1 / (ranks * accumulation * weight),
        "each rank divides by its own weight, not by that of all ranks": 1
        / (ranks * weight.sum(1, keepdim=True)),
        "each round of micro-batches is divided by its own weight and not by accumulation_steps": 1
        / weight.sum(0),
        "each micro-batch is divided by its own weight and not by accumulation_steps": 1
        / (ranks * weight),
        "rank 0 used its own gradients alone; they must be summed over ranks": rank_0,
        "only the last micro-batch counts: gradients are cleared between micro-batches": last
        / total,
        "only the last micro-batch is summed over ranks: no_sync must surround forward and "
        "backward": torch.where(last, 1 / total, rank_0),
    }
    mixed: dict[str, Values] = {}
    for mistake, factor in factors.items():
        factor = factor.expand_as(weight)
        mixed[mistake] = {
            name: torch.stack([float(factor[at]) * part[name] for at, part in sums.items()]).sum(0)
            for name in run.states[step].gradients
        }
    return mixed
