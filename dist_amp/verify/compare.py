"""The comparison: each step's gradients, and the parameters, of one way of running against the reference's.

The bounds are derived, not tuned:

    gradients   n x u + 4 e, relative to the largest element. Each of the n results that forward and backward round
                adds about one unit roundoff u of the dtype (2^-24 fp32, 2^-12 fp16, 2^-9 bf16). Long sums with
                cancellation add more: e is the error of plain torch in one process, in this precision, with the batch
                whole and in twelve parts; times 4, for later steps and other orders of summation. n and e are measured
                on the task. At most 0.45, so that a factor of two is always found.
    parameters  fp32: 1e-6 of the largest parameter, or of 1; bf16, fp16: the gradients' bound times the largest
                parameter change
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from dist_amp.data import build_batches, shard_step
from dist_amp.diagnostics import consistency
from dist_amp.fast.fused import local
from dist_amp.optim import learning_rate
from dist_amp.run import Run, build_run
from dist_amp.settings import (
    CheckpointConfig,
    Config,
    DebugConfig,
    EvalConfig,
    ParallelConfig,
    ScalerConfig,
    Strategy,
    TrainConfig,
)
from dist_amp.step import train_step
from dist_amp.verify.reference import (
    STEPS,
    OperationCounter,
    Reference,
    State,
    Values,
    difference,
    gradients_of,
    largest,
    relative_error,
    sums_over_ranks,
)
from dist_amp.world import World

FLOAT32_PARAMETER_BOUND = 1e-6


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


def check_cell(world: World, reference: Reference, cell: Cell, step: Callable[..., Any] = train_step) -> Verdict:
    """Take the cell's steps and compare them with the reference; every rank calls it, rank 0 gets the verdict.

    step: called in place of train_step.
    """
    reference.task.length = reference.epoch_length(cell.partial)
    run = build_run(config_of(reference, cell, world), world, reference.task)
    consistency.check_start(run)
    micro_batches, _ = micro_batches_at(run, reference, max(cell.accumulation), 0)
    faults = by_rank(world.gather_texts(fault_of_skip(run, reference, micro_batches, step)))
    if faults:  # start again, so that this fault alone does not make the following steps wrong
        run = build_run(config_of(reference, cell, world), world, reference.task)
    captured = capture(run)
    position, reductions = 0, []
    for accumulation in cell.accumulation:
        micro_batches, position = micro_batches_at(run, reference, accumulation, position)
        with OperationCounter(sums_over_ranks) as counter:
            step(run, micro_batches)
        run.step += 1
        reductions.append(counter.count)
    state_fault, faults = fault_of_state(run), [*faults, consistency.find_mismatch(run)]
    if cell.accumulate_reduce == "last" and len(set(reductions)) > 1:
        faults.append(
            f"steps of {cell.accumulation} micro-batches sum over ranks {reductions} times, not equally often; only the"
            " last may reduce gradients: each other one needs no_sync around its forward and its backward"
        )
    parameters = {name: full(p) for name, p in run.parallel.module.named_parameters() if p.requires_grad}
    try:
        verdict = compare(reference, cell, world, captured, parameters) if world.is_main else Verdict()
    finally:
        world.wait_long()  # for rank 0, which alone computes the reference
    # Wrong gradients can lead to skipped steps, so they come before a wrong count.
    causes = [verdict.cause or state_fault, *faults]
    return replace(verdict, cause="; ".join(filter(None, causes)))


def config_of(reference: Reference, cell: Cell, world: World) -> Config:
    """The user's config, with the settings of the cell and of the reference."""
    user, scaled, half = reference.config, reference.hyperparameters, cell.precision != "fp32"
    cast_by = user.precision.cast_by if half and cell.strategy in ("fsdp", "hsdp") else "auto"
    if half and any(isinstance(part, _NormBase) for part in reference.model().modules()):
        cast_by = "autocast"  # a policy would cast batch norm's weights but not its statistics
    scaler = ScalerConfig()
    if cell.precision == "fp16":
        scale = reference.init_scale
        scaler = ScalerConfig(init_scale=scale, growth_interval=2, min_scale=scale / 4)
    precision = replace(user.precision, use_amp=half, cast_by=cast_by, tf32=False, scaler=scaler)
    if cell.precision != "fp32":
        precision = replace(precision, dtype=cell.precision)
    divides = user.parallel.replicas != "auto" and world.world_size % user.parallel.replicas == 0
    return replace(
        user,
        run=replace(user.run, dir="unused", resume="never"),
        data=replace(user.data, workers=0, shuffle=True),
        precision=precision,
        parallel=ParallelConfig(
            cell.strategy,
            user.parallel.replicas if divides else "auto",
            accumulate_reduce=cell.accumulate_reduce,
            activation_checkpointing=user.parallel.activation_checkpointing,
        ),
        train=TrainConfig(
            steps=STEPS,
            micro_batch_size=reference.global_batch // world.world_size,
            clip_by=cell.clip_by,
            max_grad_norm=scaled.max_grad_norm,
            max_grad_value=scaled.max_grad_value,
        ),
        optim=reference.optim_config(cell.optimizer, cell.fused),
        eval=EvalConfig(every="off"),
        checkpoint=CheckpointConfig(every="off"),
        debug=DebugConfig(),  # anomaly detection would raise in the step that must be skipped
    )


def capture(run: Run) -> list[State]:
    """Record parameters and gradients before each optimizer step: unsharded, in float32, on rank 0 only."""
    captured: list[State] = []
    unscale_and_clip = run.scaler.unscale_and_clip

    def recorded(optimizer: Any, norm: Tensor, correction: Tensor | None, clip: Any) -> Tensor:
        divisor = run.scaler.scale_tensor * (1.0 if correction is None else correction)
        trained = {name: p for name, p in run.parallel.module.named_parameters() if p.requires_grad}
        gradients = {name: full(p.grad).float() / divisor for name, p in trained.items() if p.grad is not None}
        parameters = {name: full(p) for name, p in trained.items()}
        if run.world.is_main:
            captured.append(State(parameters, gradients))
        return unscale_and_clip(optimizer, norm, correction, clip)

    run.scaler.unscale_and_clip = recorded  # type: ignore[method-assign, assignment]
    return captured


def micro_batches_at(run: Run, reference: Reference, accumulation: int, position: int) -> tuple[list[Any], int]:
    """This rank's micro-batches of the step at `position`, and the position after it."""
    task, config = reference.task, run.config
    size = reference.global_batch // (run.world.world_size * accumulation)
    dataset = task.build_dataset("train")
    batches = build_batches(config.data, task, dataset, size, accumulation, config.run.seed, run.world)
    batches.position = position
    return next(batches), batches.position


def fault_of_skip(run: Run, reference: Reference, micro_batches: list[Any], step: Callable[..., Any]) -> str:
    """Take a step whose loss is infinite on the last rank only. Returns what it changed on this rank, or ""."""

    def state() -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {"the learning rate": run.schedule.lr}
        for name, parameter in run.parallel.module.named_parameters():
            moments = run.optimizer.state.get(parameter, {}).items()
            tensors |= {name: parameter, **{f"{kind} of {name}": moment for kind, moment in moments}}
        return {name: local(tensor).detach().clone() for name, tensor in tensors.items()}

    before, scale = state(), run.scaler.scale_tensor.clone()
    reference.task.infinite_loss = run.world.rank == run.world.world_size - 1
    report = step(run, micro_batches)
    reference.task.infinite_loss = False
    if report.applied:
        return "it was applied; one norm over all ranks must decide for all"
    after = state()
    if changed := [name for name in before if not torch.equal(before[name], after[name])]:
        return f"it changed {changed[0]}; a skipped step must change nothing"
    if (counted := run.schedule.counters.tolist()) != [0, 1, 1]:
        return f"it counted as {counted[0]} applied, {counted[1]} skipped; the schedule follows applied steps only"
    backed_off = scale * (run.config.precision.scaler.backoff_factor if run.scaler.scales else 1)
    if run.scaler.scale_tensor != backed_off:
        left = run.scaler.get_scale()
        return f"it left the loss scale at {left:g}, not {backed_off:g}; update() must run once per step"
    return ""


def by_rank(texts: list[str]) -> list[str]:
    """The faults of a skipped step, each once, with the ranks that have it; texts: one per rank, "" for no fault."""
    where = f"a step that is not finite on rank {len(texts) - 1} must be skipped, but on rank"
    ranks = {fault: [str(rank) for rank, text in enumerate(texts) if text == fault] for fault in texts if fault}
    return [f"{where}{'s' * (len(found) > 1)} {', '.join(found)} {fault}" for fault, found in ranks.items()]


def fault_of_state(run: Run) -> str:
    """What is wrong with loss scale, counters or learning rate on any rank after STEPS applied steps; "": nothing."""
    optim, scaler = run.config.optim, run.config.precision.scaler
    growths, left = divmod(STEPS, scaler.growth_interval)
    expected = {
        "the learning rate": (run.schedule.last_lr, learning_rate(optim, STEPS - 1, STEPS), "it follows applied steps"),
        "applied_steps": (run.schedule.applied_steps, STEPS, "the optimizer must be applied once per step"),
        "skipped_steps": (run.schedule.skipped_steps, 1, "the optimizer must be applied once per step"),
    }
    if state := run.scaler.state_dict():
        scale = scaler.init_scale * scaler.backoff_factor * scaler.growth_factor**growths
        expected["the loss scale"] = (state["scale"], scale, "update() must run once per step")
        expected["the growth tracker"] = (state["growth_tracker"], left, "update() must run once per step")
    values = torch.stack([value.double().to(run.world.device) for value, _, _ in expected.values()])
    for rank, row in enumerate(run.world.gather(values).tolist()):
        for (name, (_, wanted, rule)), value in zip(expected.items(), row, strict=True):
            if not math.isclose(value, wanted, rel_tol=1e-6):
                return (
                    f"rank {rank}: {name} is {value:g}, not {wanted:g} as after {STEPS} steps and a skipped one; {rule}"
                )
    return ""


def compare(reference: Reference, cell: Cell, world: World, captured: list[State], end: Values) -> Verdict:
    """The errors of all steps' gradients and of all parameters, and the cause if one exceeds its bound."""
    if len(captured) != STEPS:
        return Verdict(
            cause=f"the optimizer was applied {len(captured)} times in {STEPS} steps; it must be once in each"
        )
    true = reference.trajectory(cell.optimizer, cell.clip_by, cell.partial)
    start, bound = true.states[0].parameters, reference.bound(cell.precision)
    parameter_bound = bound * largest(difference(true.end, start))
    if cell.precision == "fp32":
        parameter_bound = FLOAT32_PARAMETER_BOUND * max(1.0, largest(true.end))
    errors = [relative_error(mine.gradients, step.gradients) for mine, step in zip(captured, true.states, strict=True)]
    before = [(mine.parameters, step.parameters) for mine, step in zip(captured, true.states, strict=True)]
    parameter_errors = [largest(difference(a, b)) for a, b in [*before, (end, true.end)]]
    wrong_gradient = next((n for n, error in enumerate(errors) if not error <= bound), STEPS)
    wrong_update = next((n for n, error in enumerate(parameter_errors) if not error <= parameter_bound), STEPS + 1) - 1
    cause = ""
    if wrong_update == -1:
        cause = "the initial weights are not those that build_model makes from run.seed"
    elif wrong_gradient <= min(wrong_update, STEPS - 1):
        count = cell.accumulation[wrong_gradient]
        cause = f"the gradients of step {wrong_gradient + 1} ({count} micro-batch{'es' * (count > 1)}) are off"
        if why := diagnose(reference, cell, world, captured[wrong_gradient].gradients, wrong_gradient):
            cause = f"{cause}: {why}"
    elif wrong_update < STEPS:
        cause = f"the gradients of step {wrong_update + 1} are right, the parameters after it are not: " + (
            "none moved; the optimizer holds other tensors than the model"
            if largest(difference(end, start)) == 0
            else "check unscaling, clipping, learning rate and optimizer"
        )
    return Verdict(max(errors), bound, max(parameter_errors), parameter_bound, cause)


def diagnose(reference: Reference, cell: Cell, world: World, gradients: Values, step: int) -> str:
    """The well-known mistake that gives exactly these gradients; "" if none does."""
    accumulation, ranks, tolerance = cell.accumulation[step], world.world_size, 2 * reference.bound(cell.precision)
    if not all(value.isfinite().all() for value in gradients.values()):
        return "they are not finite" + ", at a loss scale at which plain autocast is" * (cell.precision == "fp16")
    truth = reference.trajectory(cell.optimizer, cell.clip_by, cell.partial).states[step].gradients
    factor = float(sum((gradients[n] * truth[n]).sum() for n in truth) / sum(truth[n].square().sum() for n in truth))
    scaled_truth = {name: factor * value for name, value in truth.items()}
    if abs(factor - 1) < tolerance or relative_error(gradients, scaled_truth) > tolerance:
        mistakes = gradients_by_mistake(reference, cell, world, step).items()
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


def gradients_by_mistake(reference: Reference, cell: Cell, world: World, step: int) -> dict[str, Values]:
    """{mistake: the gradients that it gives in this step}, from each rank's and micro-batch's own gradients."""
    samples, ranks = reference.step_samples(cell.partial)[step], world.world_size
    size = reference.global_batch // (ranks * cell.accumulation[step])
    accumulation = len(shard_step(samples, ranks, size, rank=0))  # fewer in the partial step at an epoch's end
    start = reference.trajectory(cell.optimizer, cell.clip_by, cell.partial).states[step].parameters
    parts: list[tuple[int, int, float, Values]] = []  # (rank, micro-batch, weight, gradients); without padding
    for rank in range(ranks):
        for number, share in enumerate(shard_step(samples, ranks, size, rank)):
            model, batch = reference.model(start), reference.batch(share.indices)
            reference.task.loss_sum(model, batch).backward()
            if weight := float(reference.task.weight(batch)) * share.counts:
                parts.append((rank, number, weight, gradients_of(model)))
    total = sum(weight for _, _, weight, _ in parts)
    rank_tags = [sum(weight for r, _, weight, _ in parts if r == rank) for rank in range(ranks)]
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
            lambda r, n, weight: 1 / (ranks * rank_tags[r])
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


def full(tensor: Tensor) -> Tensor:
    """A copy of the full tensor; a collective if it is sharded."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
