"""The comparison: a way of running takes the reference's steps, or is told what it does instead.

Each step's gradients and the parameters are compared. The bounds are derived, not tuned:

    gradients   n x u + 4 e, relative to the largest element. Each of the n results that are rounded on the way through
                forward and backward adds about one unit roundoff u of the format (2^-24 fp32, 2^-12 fp16, 2^-9 bf16).
                Long sums with cancellation add more: e is how far plain torch in one process is off, in this format,
                with the batch whole and in twelve parts; four times, for later steps and other orders of summation.
                n and e are measured on the task. Never above 0.45: a factor of two must show.
    parameters  fp32: 1e-6 of the largest parameter, or of 1; half formats: the gradients' bound of the largest movement
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode

from dist_amp.data import build_batches, shard_step
from dist_amp.diagnostics import consistency as checks
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
from dist_amp.verify.reference import STEPS, Exam, State, Values, difference, gradients_of, largest, relative_error
from dist_amp.world import World

FLOAT32_PARAMETERS = 1e-6


@dataclass(frozen=True)
class Cell:
    """One way of running. accumulation: micro-batches per step, step after step."""

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
    """How far a cell is from the reference. cause: what is wrong, empty where nothing is."""

    gradient_error: float = math.nan
    gradient_bound: float = math.nan
    parameter_error: float = math.nan
    parameter_bound: float = math.nan
    cause: str = ""


def examine(world: World, exam: Exam, cell: Cell, step: Callable[..., Any] = train_step) -> Verdict:
    """Take the cell's steps and compare them with the reference; every rank calls it, rank 0 gets the verdict.

    step: what takes a step, in place of train_step.
    """
    exam.task.length = exam.epoch(cell.partial)
    run = build_run(config_of(exam, cell, world), world, exam.task)
    checks.at_start(run)
    captured = capture(run)
    micro_batches, _ = micro_batches_at(run, exam, max(cell.accumulation), 0)
    faults = by_rank(world.gather_texts(skip_changes_something(run, exam, micro_batches, step)))
    captured.clear()
    position, reductions = 0, []
    for accumulation in cell.accumulation:
        micro_batches, position = micro_batches_at(run, exam, accumulation, position)
        with Reductions() as seen:
            step(run, micro_batches)
        run.step += 1
        reductions.append(seen.count)
    counts, faults = scale_and_counts(run), [*faults, checks.disagreement(run)]
    if cell.accumulate_reduce == "last" and len(set(reductions)) > 1:
        faults.append(
            f"sums over ranks: {reductions} in steps of {cell.accumulation} micro-batches, not equally many; gradients "
            "must travel with the last micro-batch alone: no_sync around its forward and its backward"
        )
    parameters = {name: whole(p) for name, p in run.parallel.module.named_parameters() if p.requires_grad}
    try:
        verdict = compare(exam, cell, world, captured, parameters) if world.is_main else Verdict()
    finally:
        world.wait_long()  # for rank 0, which computes the reference alone
    # Where gradients are off, steps may have been skipped for it.
    causes = [verdict.cause or counts, *faults]
    return replace(verdict, cause="; ".join(filter(None, causes)))


def config_of(exam: Exam, cell: Cell, world: World) -> Config:
    """The user's config with what the cell and the comparison say."""
    user, scaled, half = exam.config, exam.scaled, cell.precision != "fp32"
    cast_by = user.precision.cast_by if half and cell.strategy in ("fsdp", "hsdp") else "auto"
    if half and any(isinstance(part, _NormBase) for part in exam.model().modules()):
        cast_by = "autocast"  # a policy would cast batch norm's weights and not its statistics
    precision = replace(user.precision, use_amp=half, cast_by=cast_by, tf32=False, scaler=ScalerConfig())
    if cell.precision != "fp32":
        precision = replace(precision, dtype=cell.precision)
    if cell.precision == "fp16":
        scaler = ScalerConfig(init_scale=exam.init_scale, growth_interval=2, min_scale=exam.init_scale / 4)
        precision = replace(precision, scaler=scaler)
    fits = user.parallel.replicas != "auto" and world.world_size % user.parallel.replicas == 0
    return replace(
        user,
        run=replace(user.run, dir="unused", resume="never"),
        data=replace(user.data, workers=0, shuffle=True),
        precision=precision,
        parallel=ParallelConfig(
            cell.strategy,
            user.parallel.replicas if fits else "auto",
            accumulate_reduce=cell.accumulate_reduce,
            activation_checkpointing=user.parallel.activation_checkpointing,
        ),
        train=TrainConfig(
            steps=STEPS,
            micro_batch_size=exam.global_batch // world.world_size,
            clip_by=cell.clip_by,
            max_grad_norm=scaled.max_grad_norm,
            max_grad_value=scaled.max_grad_value,
        ),
        optim=exam.optim_of(cell.optimizer, cell.fused),
        eval=EvalConfig(every="off"),
        checkpoint=CheckpointConfig(every="off"),
        debug=DebugConfig(),  # anomaly detection would raise in the step that is to be skipped
    )


def capture(run: Run) -> list[State]:
    """What every step's optimizer is about to take: whole, in float32, on rank 0 alone."""
    captured: list[State] = []
    unscale_and_clip = run.scaler.unscale_and_clip

    def watched(optimizer: Any, norm: Tensor, correction: Tensor | None, clip: Any) -> Tensor:
        divisor = run.scaler.scale_tensor * (1.0 if correction is None else correction)
        trained = {name: p for name, p in run.parallel.module.named_parameters() if p.requires_grad}
        gradients = {name: whole(p.grad).float() / divisor for name, p in trained.items() if p.grad is not None}
        parameters = {name: whole(p) for name, p in trained.items()}
        if run.world.is_main:
            captured.append(State(parameters, gradients))
        return unscale_and_clip(optimizer, norm, correction, clip)

    run.scaler.unscale_and_clip = watched  # type: ignore[method-assign]
    return captured


def micro_batches_at(run: Run, exam: Exam, accumulation: int, position: int) -> tuple[list[Any], int]:
    """This rank's micro-batches of the step at `position`, and the position after it."""
    size = exam.global_batch // (run.world.world_size * accumulation)
    dataset = exam.task.build_dataset("train")
    batches = build_batches(run.config.data, exam.task, dataset, size, accumulation, run.config.run.seed, run.world)
    batches.position = position
    return next(batches), batches.position


def skip_changes_something(run: Run, exam: Exam, micro_batches: list[Any], step: Callable[..., Any]) -> str:
    """Take a step whose loss is infinite on the last rank alone. Returns what it changed on this rank, or ""."""

    def state() -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {"the learning rate": run.schedule.lr}
        for name, parameter in run.parallel.module.named_parameters():
            moments = run.optimizer.state.get(parameter, {}).items()
            tensors |= {name: parameter, **{f"{kind} of {name}": moment for kind, moment in moments}}
        return {name: local(tensor).detach().clone() for name, tensor in tensors.items()}

    before, scale = state(), run.scaler.scale_tensor.clone()
    exam.task.spoilt = run.world.rank == run.world.world_size - 1
    report = step(run, micro_batches)
    exam.task.spoilt = False
    if report.applied:
        return "it was applied; one norm over all ranks must decide for all"
    after = state()
    if changed := [name for name in before if not torch.equal(before[name], after[name])]:
        return f"it changed {changed[0]}; a skipped step must change nothing"
    if (counted := run.schedule.counters.tolist()) != [0, 1, 1]:
        return f"it counted as {counted[0]} applied, {counted[1]} skipped; the schedule follows applied steps alone"
    backed_off = scale * (run.config.precision.scaler.backoff_factor if run.scaler.scales else 1)
    if run.scaler.scale_tensor != backed_off:
        left = run.scaler.get_scale()
        return f"it left the loss scale at {left:g}, not {backed_off:g}; update() must run once per step"
    return ""


def by_rank(texts: list[str]) -> list[str]:
    """What the ranks found, each finding once, with the ranks that found it."""
    found: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text:
            found.setdefault(text, []).append(rank)
    last = len(texts) - 1
    return [
        f"a step not finite on rank {last} was skipped, but on rank{'s' if len(ranks) > 1 else ''} "
        f"{', '.join(map(str, ranks))} {text}"
        for text, ranks in found.items()
    ]


def scale_and_counts(run: Run) -> str:
    """Whether scaler, counts and learning rate are on every rank what STEPS applied steps make of them; "" if so."""
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
    figures = torch.stack([value.double().to(run.world.device) for value, _, _ in expected.values()])
    for rank, row in enumerate(run.world.gather(figures).tolist()):
        for (name, (_, wanted, rule)), value in zip(expected.items(), row, strict=True):
            if not math.isclose(value, wanted, rel_tol=1e-6):
                return (
                    f"rank {rank}: {name} is {value:g}, not {wanted:g} as after {STEPS} steps and a skipped one; {rule}"
                )
    return ""


def compare(exam: Exam, cell: Cell, world: World, captured: list[State], end: Values) -> Verdict:
    """The errors of all steps' gradients and of all parameters, and the cause if one is out of bounds."""
    if len(captured) != STEPS:
        return Verdict(
            cause=f"the optimizer was applied {len(captured)} times in {STEPS} steps; it must be once in each"
        )
    path = exam.trajectory(cell.optimizer, cell.clip_by, cell.partial)
    start, bound = path.states[0].parameters, exam.bound(cell.precision)
    drift_bound = bound * largest(difference(path.end, start))
    if cell.precision == "fp32":
        drift_bound = FLOAT32_PARAMETERS * max(1.0, largest(path.end))
    errors = [relative_error(mine.gradients, true.gradients) for mine, true in zip(captured, path.states, strict=True)]
    mine, truth = [state.parameters for state in captured], [state.parameters for state in path.states]
    drifts = [largest(difference(a, b)) for a, b in zip([*mine, end], [*truth, path.end], strict=True)]
    wrong_gradient = next((n for n, error in enumerate(errors) if not error <= bound), STEPS)
    wrong_update = next((n for n, drift in enumerate(drifts) if not drift <= drift_bound), STEPS + 1) - 1
    cause = ""
    if wrong_update == -1:
        cause = "the initial weights are not those that build_model makes from run.seed"
    elif wrong_gradient <= min(wrong_update, STEPS - 1):
        count = cell.accumulation[wrong_gradient]
        cause = f"the gradients of step {wrong_gradient + 1} ({count} micro-batch{'es' * (count > 1)}) are off"
        if why := suspect(exam, cell, world, captured[wrong_gradient].gradients, wrong_gradient):
            cause = f"{cause}: {why}"
    elif wrong_update < STEPS:
        still = largest(difference(end, start)) == 0
        cause = f"the gradients of step {wrong_update + 1} are right, the parameters after it are not: " + (
            "none moved; the optimizer holds other tensors than the model"
            if still
            else "look at unscaling, clipping, learning rate and optimizer"
        )
    return Verdict(max(errors), bound, max(drifts), drift_bound, cause)


def suspect(exam: Exam, cell: Cell, world: World, gradients: Values, step: int) -> str:
    """What well-known mistake would give just these gradients; "" if none of them does."""
    accumulation, ranks, close = cell.accumulation[step], world.world_size, 2 * exam.bound(cell.precision)
    if not all(value.isfinite().all() for value in gradients.values()):
        return "they are not finite" + ", at a loss scale that was with plain autocast" * (cell.precision == "fp16")
    truth = exam.trajectory(cell.optimizer, cell.clip_by, cell.partial).states[step].gradients
    factor = float(sum((gradients[n] * truth[n]).sum() for n in truth) / sum(truth[n].square().sum() for n in truth))
    if abs(factor - 1) < close or relative_error(gradients, {n: factor * truth[n] for n in truth}) > close:
        likely = suspects(exam, cell, world, step).items()
        return next((text for text, values in likely if relative_error(gradients, values) <= close), "")
    norm = math.sqrt(sum(value.square().sum().item() for value in gradients.values()))
    limit = exam.scaled.max_grad_norm
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
    near = next((text for value, text in known.items() if math.isclose(factor, value, rel_tol=close)), "")
    return f"all of them are {factor:.4g} times what they should be{near}"


def suspects(exam: Exam, cell: Cell, world: World, step: int) -> dict[str, Values]:
    """What known mistakes make of a step: {mistake: gradients}, from each rank's and micro-batch's own gradients."""
    window, ranks = exam.windows(cell.partial)[step], world.world_size
    size = exam.global_batch // (ranks * cell.accumulation[step])
    start = exam.trajectory(cell.optimizer, cell.clip_by, cell.partial).states[step].parameters
    sums, weights = [], []  # [rank][micro-batch]
    for rank in range(ranks):
        shares = shard_step(window, ranks, size, rank)
        models = [exam.model(start) for _ in shares]
        for model, share in zip(models, shares, strict=True):
            exam.task.loss_sum(model, exam.batch(share.indices)).backward()
        sums.append([gradients_of(model) for model in models])
        weights.append([float(exam.task.weight(exam.batch(share.indices))) * share.counts for share in shares])

    def mix(weight_of: Callable[[int, int], float]) -> Values:
        """Sum of all micro-batches' gradients, each with a factor."""
        total: Values = {}
        for rank, row in enumerate(sums):
            for number, values in enumerate(row):
                if not weights[rank][number]:  # padding, or nothing that counts
                    continue
                factor = weight_of(rank, number)
                total = {name: total.get(name, 0.0) + value * factor for name, value in values.items()}
        return total

    whole_weight = sum(map(sum, weights))
    column = [sum(row[number] for row in weights) for number in range(len(weights[0]))]
    accumulation = len(column)
    last = accumulation - 1
    return {
        "each micro-batch is divided by its own weight, not by that of all ranks and micro-batches": mix(
            lambda r, k: 1 / (ranks * accumulation * weights[r][k])
        ),
        "each rank divides by its own weight, not by that of all ranks": mix(
            lambda r, k: 1 / (ranks * sum(weights[r]))
        ),
        "each round of micro-batches is divided by its own weight and not by accumulation_steps": mix(
            lambda r, k: 1 / column[k]
        ),
        "each micro-batch is divided by its own weight and not by accumulation_steps": mix(
            lambda r, k: 1 / (ranks * weights[r][k])
        ),
        "rank 0 used its own gradients alone; they must be summed over ranks": mix(
            lambda r, k: (ranks if r == 0 else 0) / whole_weight
        ),
        "only the last micro-batch counts: gradients were cleared between micro-batches": mix(
            lambda r, k: (k == last) / whole_weight
        ),
        "only the last micro-batch was summed over ranks: no_sync must surround forward and backward": mix(
            lambda r, k: (1 if k == last else ranks * (r == 0)) / whole_weight
        ),
    }


def whole(tensor: Tensor) -> Tensor:
    """The full value of a tensor that may be sharded; a collective then."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


class Reductions(TorchDispatchMode):
    """Counts the collectives that sum gradients over ranks."""

    supports_higher_order_operators = True  # as compiled code has

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch would run compiled blocks as they are written, and verify would prove those

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        self.count += "c10d" in name and ("reduce_scatter" in name or "allreduce" in name)
        return function(*args, **(kwargs or {}))
