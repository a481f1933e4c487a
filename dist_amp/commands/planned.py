"""The facts of `dist_amp.plan`, by formulas and a model on the meta device."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from dist_amp.commands.estimates import (
    RANKS_PER_MACHINE,
    Memory,
    Model,
    checkpoint_bytes,
    memory_of,
    moments_of,
    of_a_step,
)
from dist_amp.config.auto import (
    accumulation_steps,
    auto_strategy,
    pick_cast,
    pick_strategy,
    replicas_of,
)
from dist_amp.config.memory import USABLE, adamw_state_bytes, capacity_of, size_text, tensor_bytes
from dist_amp.config.task_class import build_task
from dist_amp.config.validate import check_length, check_parallel, check_shardable
from dist_amp.distributed.process import seed_all
from dist_amp.errors import DataError, Failure, first_line, in_one_line
from dist_amp.loading.loader import Fetch
from dist_amp.loading.plan import Request
from dist_amp.precision import build_precision, to_float32
from dist_amp.scaling.blocks import blocks_of, parameters_in, pick_blocks, units_of
from dist_amp.scaling.compile import check_compile
from dist_amp.scaling.meta import built_on_meta, parameters_on_meta
from dist_amp.settings import Config, ParallelConfig, Strategy
from dist_amp.supervise.preflight import BESIDES_KEPT
from dist_amp.task import Task, build_split, built_model, check_model
from dist_amp.telemetry.mfu import flops_per_item, known_peak
from dist_amp.world import World

MOST_RANKS = 2**16  # tried, to find a number of ranks on which the model fits


@dataclass(frozen=True)
class SimulatedWorld(World):
    """Ranks that do not exist; what training would print at its start is kept in `notes`."""

    notes: list[str] = field(default_factory=list, compare=False)

    def say(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.notes.append(f"warning: {text}")


class StrategyPlan(NamedTuple):
    """One strategy. Bytes are of the rank that holds most."""

    name: str
    chosen: bool
    precision: str = ""  # and who casts
    memory: Memory | None = None
    on_device: int = 0  # of the memory; under CPU offload the rest is the host's
    sent_bytes: float = 0.0  # by each rank in a step
    collectives: int = 0
    problem: str = ""  # why training would refuse it


@dataclass
class Plan:
    """What a config will do. 0 and "" where it is not known; the world's notes have the reasons."""

    config: Config
    world: SimulatedWorld
    device_memory: int  # bytes
    module: nn.Module
    blocks: dict[str, int] = field(default_factory=dict)  # {class: count}
    share_of_blocks: float = 0.0  # of the parameters
    micro_batches: int = 1
    samples_per_step: int = 0
    tokens_per_step: int = 0
    samples: int = 0
    steps_per_epoch: int = 0
    flops_per_sample: float = 0.0
    peak_flops: float = 0.0
    checkpoint_bytes: int = 0
    checkpoints: int = 0  # the most that are on the disk at once
    strategies: list[StrategyPlan] = field(default_factory=list)
    fits_from: int = 0  # ranks on which fsdp fits, if nothing fits on these
    refused: BaseException | None = None  # what would end the training at its start

    @property
    def parameters(self) -> tuple[int, int]:
        """(trained, all)."""
        parameters = list(self.module.parameters())
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        return trained, sum(p.numel() for p in parameters)


def make_plan(config: Config, world_size: int, device_memory: int) -> Plan:
    """Plan for `world_size` ranks.

    device_memory: bytes of each rank's; 0: this machine's own, if it has such a device. Errors:
    those that training raises when it builds the task and its model.
    """
    device = torch.device("cpu" if config.run.device == "cpu" else "cuda")
    per_machine = min(world_size, RANKS_PER_MACHINE)
    world = SimulatedWorld(world_size=world_size, local_world_size=per_machine, device=device)
    if not device_memory and (device.type == "cpu" or torch.cuda.is_available()):
        device_memory = capacity_of(world)[0]
    micro_batches = accumulation_steps(config.train, world_size)
    task = build_task(config.task, config.data)
    seed_all(config.run.seed)
    module = build_module(task, config, world)
    plan = Plan(config, world, device_memory, module, micro_batches=micro_batches)
    plan.samples_per_step = config.train.micro_batch_size * world_size * micro_batches
    blocks = blocks_of(task, module)
    plan.blocks = dict(Counter(type(block).__name__ for block in blocks))
    plan.share_of_blocks = parameters_in(blocks) / max(1, parameters_in([module]))
    describe_strategies(plan, task)
    describe_compute(plan, task)
    describe_data(plan, task)
    return plan


def build_module(task: Task, config: Config, world: World) -> nn.Module:
    """The model on the meta device; whole, with a note, if it can't be built there."""
    module, problem = built_on_meta(task)
    shardable = config.parallel.strategy != "ddp" and world.world_size > 1
    if problem and shardable and not hasattr(task, "load"):
        world.warn(
            f"every rank will hold the whole model in host memory until it is sharded: {problem}"
        )
    if module is None:
        module = built_model(task)
        world.say(
            f"the model took {size_text(tensor_bytes(module.parameters()))} of host memory to plan "
            "for: it can't be built on the meta device"
        )
    if converted := to_float32(module, frozen_too=not config.precision.use_amp):
        world.say(converted)
    return module


def describe_strategies(plan: Plan, task: Task) -> None:
    """Every strategy, and what a checkpoint takes.

    Errors: what training raises for the strategy that is chosen.
    """
    config, world = plan.config, plan.world
    chosen = choose(plan)
    moments = moments_or_assumed(plan, task)
    for name, strategy, parallel in candidates(config, world, plan.micro_batches):
        is_chosen = strategy == chosen and parallel == config.parallel
        # The warnings about other strategies are of no interest.
        noted_in = world if is_chosen else replace(world, notes=[])
        candidate = replace(config, parallel=parallel)
        try:
            model = checked_model(candidate, strategy, task, noted_in, plan)
        except Failure as error:
            if is_chosen:
                raise
            plan.strategies.append(StrategyPlan(name, False, problem=first_line(error)))
            continue
        estimate = estimated(candidate, strategy, model, world, moments)
        plan.strategies.append(estimate._replace(name=name, chosen=is_chosen))
    room = USABLE * plan.device_memory
    if plan.device_memory and all(one.on_device > room for one in plan.strategies):
        plan.fits_from = ranks_that_fit(plan, task, moments)
    sharded = chosen in ("fsdp", "hsdp")
    plan.checkpoint_bytes = checkpoint_bytes(config, plan.module, moments, sharded)
    if config.checkpoint.every != "off":
        to_come = math.ceil(config.train.steps / config.checkpoint.every)
        plan.checkpoints = min(config.checkpoint.keep + BESIDES_KEPT, to_come)


def choose(plan: Plan) -> Strategy | str:
    """The strategy that training will pick; "" if that depends on a device that is not known."""
    config, world, module = plan.config.parallel, plan.world, plan.module
    if config.strategy != "auto" or world.world_size == 1:
        return pick_strategy(config, module, world)
    if world.device.type == "cpu":
        return auto_strategy(module, world, 0)
    if plan.device_memory:
        return auto_strategy(module, world, plan.device_memory)
    world.say(
        f"parallel.strategy=auto: ddp on devices of {size_text(2 * adamw_state_bytes(module))} and "
        "more, else fsdp; give --device_memory_GiB to see which"
    )
    return ""


def candidates(
    config: Config, world: World, micro_batches: int
) -> list[tuple[str, Strategy, ParallelConfig]]:
    """(name, strategy, its settings); fsdp with both values of accumulate_reduce."""
    parallel = config.parallel
    if world.world_size == 1:
        return [("single", "single", parallel)]
    last = replace(parallel, accumulate_reduce="last")
    every = replace(parallel, accumulate_reduce="every")
    sharded: list[tuple[str, Strategy, ParallelConfig]] = [("fsdp", "fsdp", parallel)]
    if micro_batches > 1:
        sharded = [("fsdp (last)", "fsdp", last), ("fsdp (every)", "fsdp", every)]
    hsdp = f"hsdp of {replicas_of(parallel, world)}"
    return [("ddp", "ddp", parallel), *sharded, (hsdp, "hsdp", parallel)]


def checked_model(
    config: Config, strategy: Strategy, task: Task, world: SimulatedWorld, plan: Plan
) -> Model:
    """The model in a strategy, after the checks that training makes. Errors: theirs."""
    module = plan.module
    check_model(module, strategy)
    cast = pick_cast(config.precision, strategy, module, world)
    check_parallel(config.parallel, strategy, cast, world)
    computes_on = world
    if world.device.type == "cuda" and not torch.cuda.is_available():
        # As rank 1, so that what this CPU can compute is not measured.
        computes_on = replace(world, rank=1, device=torch.device("cpu"))
    if computes_on is world or not config.compile.blocks:
        check_compile(config.compile, strategy, plan.micro_batches, world)
    else:
        world.say("[compile] is not checked: there is no GPU here")
    sharded = strategy in ("fsdp", "hsdp")
    precision = build_precision(cast, sharded, computes_on)
    if sharded:
        units_of(task, module, pick_blocks(strategy, task, module, world))
        check_shardable(strategy, module, precision.cast_by == "policy")
    return Model(task, module, precision, plan.micro_batches)


def estimated(
    config: Config,
    strategy: Strategy,
    model: Model,
    world: World,
    moments: Mapping[nn.Parameter, float],
) -> StrategyPlan:
    """What a strategy holds and sends."""
    shards = 0
    if strategy == "fsdp":
        shards = world.world_size
    elif strategy == "hsdp":
        shards = world.world_size // replicas_of(config.parallel, world)
    memory = memory_of(config, model, shards, moments)
    if strategy == "ddp" and model.micro_batches > 1:  # they add up beside DDP's buckets
        memory = memory._replace(gradients=2 * memory.gradients)
    on_device = memory.total
    if shards and config.parallel.cpu_offload:
        on_device = memory.computing
        if config.parallel.accumulate_reduce == "last" and model.micro_batches > 1:
            on_device += memory.gradients
    step = of_a_step(config, strategy, model, world)
    precision = model.precision.name
    if model.precision.cast_by != "nothing":
        precision += f", {model.precision.cast_by}"
    return StrategyPlan(
        strategy,
        chosen=False,
        precision=precision,
        memory=memory,
        on_device=on_device,
        sent_bytes=sum(times * one.sent for one, times in step.items()),
        collectives=step.total(),
    )


def moments_or_assumed(plan: Plan, task: Any) -> Mapping[nn.Parameter, float]:
    """As `moments_of`; AdamW's where a task's optimizer can't be stepped on the meta device."""
    if hasattr(task, "optimizer") and plan.world.world_size > 1:
        plan.world.say("what the task's optimizer itself may send is left out")
    try:
        return moments_of(plan.config.optim, task, plan.module)
    except Exception as error:
        # A Failure with a cause is what the task's code raised, maybe for want of values.
        if isinstance(error, Failure) and error.__cause__ is None:
            raise
        plan.world.warn(
            "the state of the task's optimizer can't be seen without a real step "
            f"({in_one_line(error)}): it is assumed to be twice the parameters, as AdamW's"
        )
        return {p: 2 for p in plan.module.parameters() if p.requires_grad}


def ranks_that_fit(plan: Plan, task: Task, moments: Mapping[nn.Parameter, float]) -> int:
    """The number of ranks, doubled from the present one, on which fsdp fits; 0 if there is none."""
    config = replace(plan.config, parallel=replace(plan.config.parallel, accumulate_reduce="every"))
    ranks = 2 * plan.world.world_size
    while ranks <= MOST_RANKS:
        world = replace(plan.world, world_size=ranks, notes=[])
        try:
            model = checked_model(config, "fsdp", task, world, plan)
        except Failure:
            return 0
        needed = estimated(config, "fsdp", model, world, moments).on_device
        if needed <= USABLE * plan.device_memory:
            return ranks
        ranks *= 2
    return 0


def describe_compute(plan: Plan, task: Task) -> None:
    """Floating-point operations, as the task counts them."""
    precision = plan.config.precision
    if plan.config.metrics.peak_flops != "auto":
        plan.peak_flops = plan.config.metrics.peak_flops
    elif plan.world.device.type == "cuda" and torch.cuda.is_available():
        uses_tf32 = precision.name == "fp32" and precision.tf32
        dtype = "tf32" if uses_tf32 else precision.name
        plan.peak_flops = known_peak(torch.cuda.get_device_name(), dtype)
    try:
        with parameters_on_meta():  # the task may build its model again
            plan.flops_per_sample = flops_per_item(task, plan.module)
    except DataError as error:
        plan.world.say(f"without memory for the parameters {error}; FLOPs are left out")


def describe_data(plan: Plan, task: Any) -> None:
    """Samples, epochs and tokens; an error that would end the training is kept in `refused`."""
    train = plan.config.train
    try:
        dataset = build_split(task, "train", World())
        if dataset is not None:
            plan.samples = len(dataset)
        check_length(plan.samples, train.micro_batch_size, plan.micro_batches, plan.world)
        full_steps, rest = divmod(plan.samples, plan.samples_per_step)
        plan.steps_per_epoch = full_steps
        if rest and not plan.config.data.drop_last:
            plan.steps_per_epoch += 1
        if hasattr(task, "tokens"):
            request = Request(plan.config.run.seed, tuple(range(train.micro_batch_size)))
            batch = Fetch(dataset, task, "training")[request]
            if isinstance(batch, DataError):
                raise batch
            tokens = task.tokens(batch)
            plan.tokens_per_step = tokens * plan.samples_per_step // train.micro_batch_size
    except Exception as error:
        plan.refused = error
        plan.world.warn(f"training would end at its data: {in_one_line(error)}")
