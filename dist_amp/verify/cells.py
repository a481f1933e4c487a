"""The steps of one way of running: taken from a run as the main job builds it, captured, and given
to `compare`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from dist_amp.data import build_batches
from dist_amp.diagnostics import consistency
from dist_amp.optim import learning_rate
from dist_amp.run import Run, build_run
from dist_amp.settings import (
    CheckpointConfig,
    Config,
    DebugConfig,
    EvalConfig,
    ParallelConfig,
    PrecisionConfig,
    ScalerConfig,
    TrainConfig,
)
from dist_amp.step import train_step
from dist_amp.verify.compare import Cell, Comparison, Verdict, compare
from dist_amp.verify.reference import (
    STEPS,
    OperationCounter,
    Reference,
    State,
    gradient_of,
    sums_over_ranks,
)
from dist_amp.world import World, local


def check_cell(
    world: World, reference: Reference, cell: Cell, step: Callable[..., Any] = train_step
) -> Verdict:
    """Take the cell's steps and compare them with the reference's.

    Every rank calls it, and rank 0 gets the verdict. step: called in place of train_step.
    """
    reference.task.length = reference.epoch_length(cell.partial)
    run = build_run(config_of(reference, cell, world), world, reference.task)
    consistency.check_start(run)
    micro_batches, _ = micro_batches_at(run, reference, max(cell.accumulation), 0)
    faults = by_rank(world.gather_texts(fault_of_skip(run, reference, micro_batches, step)))
    if faults:  # start again, so that this fault alone does not make the following steps wrong
        run = build_run(config_of(reference, cell, world), world, reference.task)
    captured = capture(run)
    buffers = []
    reductions = []
    position = 0
    for accumulation in cell.accumulation:
        micro_batches, position = micro_batches_at(run, reference, accumulation, position)
        buffers.append(buffers_of(run))
        with OperationCounter(sums_over_ranks) as counter:
            step(run, micro_batches)
        reductions.append(counter.count)
    state_fault = fault_of_state(run)
    faults.append(consistency.find_mismatch(run))
    if cell.accumulate_reduce == "last" and len(set(reductions)) > 1:
        faults.append(
            f"steps of {cell.accumulation} micro-batches sum over ranks {reductions} times, not "
            "equally often; only the last may reduce gradients: each other one needs no_sync "
            "around its forward and its backward"
        )
    end = {name: full(p) for name, p in trained(run).items()}
    verdict = Verdict()
    try:
        if world.is_main:
            verdict = compare(Comparison(reference, cell, world, captured, buffers, end))
    finally:
        world.wait_long()  # for rank 0, which alone computes the reference
    # Wrong gradients can lead to skipped steps, so they come before a wrong count.
    causes = [verdict.cause or state_fault, *faults]
    return replace(verdict, cause="; ".join(filter(None, causes)))


def config_of(reference: Reference, cell: Cell, world: World) -> Config:
    """The user's config, with the settings of the cell and of the reference."""
    user = reference.config
    scaled = reference.hyperparameters
    replicas = user.parallel.replicas
    if replicas != "auto" and world.world_size % replicas:
        replicas = "auto"
    return replace(
        user,
        run=replace(user.run, dir="unused", resume="never"),
        data=replace(user.data, workers=0, shuffle=True, drop_last=False),
        precision=precision_of(reference, cell),
        parallel=ParallelConfig(
            cell.strategy,
            replicas,
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


def precision_of(reference: Reference, cell: Cell) -> PrecisionConfig:
    """The cell's precision, with a loss scale that grows and backs off within its steps."""
    user = replace(reference.config.precision, tf32=False, scaler=ScalerConfig())
    if cell.precision == "fp32":
        return replace(user, use_amp=False, cast_by="auto")
    cast_by = user.cast_by if cell.strategy in ("fsdp", "hsdp") else "auto"
    if any(isinstance(part, _NormBase) for part in reference.model().modules()):
        cast_by = "autocast"  # a policy would cast batch norm's weights but not its statistics
    scaler = ScalerConfig()
    if cell.precision == "fp16":
        scaler = ScalerConfig(init_scale=reference.init_scale, growth_interval=2)
    return replace(user, use_amp=True, dtype=cell.precision, cast_by=cast_by, scaler=scaler)


def capture(run: Run) -> list[State]:
    """Record each optimizer step's parameters and gradients: full, in float32, on rank 0 only."""
    captured: list[State] = []
    unscale_and_clip = run.scaler.unscale_and_clip

    def recorded(optimizer: Any, norm: Tensor, clip: Any) -> Tensor:
        gradients = {}
        parameters = {}
        for name, p in trained(run).items():
            gradients[name] = full(gradient_of(p)).float() / run.scaler.scale_tensor
            parameters[name] = full(p)
        if run.world.is_main:
            captured.append(State(parameters, gradients))
        return unscale_and_clip(optimizer, norm, clip)

    run.scaler.unscale_and_clip = recorded  # type: ignore[method-assign, assignment]
    return captured


def trained(run: Run) -> dict[str, Tensor]:
    return {name: p for name, p in run.parallel.module.named_parameters() if p.requires_grad}


def buffers_of(run: Run) -> dict[str, Tensor]:
    """This rank's buffers that are part of the model's state; others are caches."""
    module = run.parallel.module
    persistent = module.state_dict().keys()
    return {name: full(buffer) for name, buffer in module.named_buffers() if name in persistent}


def micro_batches_at(
    run: Run, reference: Reference, accumulation: int, position: int
) -> tuple[list[Any], int]:
    """This rank's micro-batches of the step at `position`, and the position after it."""
    task, config = reference.task, run.config
    size = reference.global_batch // (run.world.world_size * accumulation)
    dataset = task.build_dataset("train")
    batches = build_batches(
        config.data,
        task,
        dataset,
        run.world,
        micro_batch_size=size,
        accumulation_steps=accumulation,
        seed=config.run.seed,
    )
    batches.position = position
    return next(batches), batches.position


def fault_of_skip(
    run: Run, reference: Reference, micro_batches: list[Any], step: Callable[..., Any]
) -> str:
    """Take a step whose loss is infinite on the last rank only; return what it changed here."""
    before = state_of(run)
    scale = run.scaler.scale_tensor.clone()
    reference.task.infinite_loss = run.world.rank == run.world.world_size - 1
    report = step(run, micro_batches)
    reference.task.infinite_loss = False
    if report.applied:
        return "it was applied; one norm over all ranks must decide for all"
    after = state_of(run)
    for name, tensor in before.items():
        if not torch.equal(tensor, after[name]):
            return f"it changed {name}; a skipped step must change nothing"
    applied, skipped, _ = counters = run.schedule.counters.tolist()
    if counters != [0, 1, 1]:
        return (
            f"it counted as {applied} applied, {skipped} skipped; the schedule follows applied "
            "steps only"
        )
    if run.scaler.scales:
        scale *= run.config.precision.scaler.backoff_factor
    if run.scaler.scale_tensor != scale:
        return (
            f"it left the loss scale at {run.scaler.get_scale():g}, not {scale:g}; update() must "
            "run once per step"
        )
    return ""


def state_of(run: Run) -> dict[str, Tensor]:
    """Copies of this rank's parameters, optimizer state and learning rate."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in run.parallel.module.named_parameters():
        tensors[name] = parameter
        for kind, moment in run.optimizer.state.get(parameter, {}).items():
            tensors[f"{kind} of {name}"] = moment
    tensors["the learning rate"] = run.schedule.lr
    return {name: local(tensor).detach().clone() for name, tensor in tensors.items()}


def by_rank(texts: list[str]) -> list[str]:
    """Each fault of a skipped step once, with the ranks that have it. texts: one per rank."""
    faults = []
    for fault in dict.fromkeys(filter(None, texts)):
        ranks = [str(rank) for rank, text in enumerate(texts) if text == fault]
        plural = "s" if len(ranks) > 1 else ""
        faults.append(
            f"a step that is not finite on rank {len(texts) - 1} must be skipped, but on "
            f"rank{plural} {', '.join(ranks)} {fault}"
        )
    return faults


def fault_of_state(run: Run) -> str:
    """What is wrong with loss scale, counters or learning rate on any rank after all steps."""
    optim = run.config.optim
    scaler = run.config.precision.scaler
    growths, growth_tracker = divmod(STEPS, scaler.growth_interval)
    last_lr = learning_rate(optim, STEPS - 1, STEPS)
    once_applied = "the optimizer must be applied once per step"
    once_updated = "update() must run once per step"
    # {what: (the tensor, its value after STEPS applied steps, the rule)}
    expected = {
        "the learning rate": (run.schedule.last_lr, last_lr, "it follows applied steps"),
        "applied_steps": (run.schedule.applied_steps, STEPS, once_applied),
        "skipped_steps": (run.schedule.skipped_steps, 1, once_applied),
    }
    if state := run.scaler.state_dict():
        scale = scaler.init_scale * scaler.backoff_factor * scaler.growth_factor**growths
        expected["the loss scale"] = (state["scale"], scale, once_updated)
        expected["the growth tracker"] = (state["growth_tracker"], growth_tracker, once_updated)
    values = torch.stack([value.double().to(run.world.device) for value, _, _ in expected.values()])
    for rank, row in enumerate(run.world.gather(values).tolist()):
        for (name, (_, wanted, rule)), value in zip(expected.items(), row, strict=True):
            if not math.isclose(value, wanted, rel_tol=1e-6):
                return (
                    f"rank {rank}: {name} is {value:g}, not {wanted:g} as after {STEPS} steps and "
                    f"a skipped one; {rule}"
                )
    return ""


def full(tensor: Tensor) -> Tensor:
    """A copy of the full tensor; a collective if it is sharded."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
