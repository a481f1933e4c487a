"""The facts of `dist_amp.plan`: what a config will do, by formulas and a model without memory for its parameters."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from dist_amp.config.auto import (
    auto_need,
    auto_strategy,
    blocks_of,
    parameters_in,
    pick_blocks,
    pick_cast,
    pick_strategy,
    units_of,
)
from dist_amp.config.task_class import build_split, build_task, built_model, check_model
from dist_amp.config.validate import accumulation_steps, check_length, check_parallel, check_shardable, replicas_of
from dist_amp.errors import DataError, Failure, first_line, in_one_line
from dist_amp.fast.compile import check_compile
from dist_amp.precision import build_precision
from dist_amp.runtime.initial_weights import built_on_meta
from dist_amp.runtime.loader import Fetch
from dist_amp.runtime.meta import in_training_mode, parameters_on_meta
from dist_amp.runtime.parameter_dtype import to_float32
from dist_amp.runtime.plan import Request
from dist_amp.runtime.random_state import seed_all
from dist_amp.settings import Config, ParallelConfig, Strategy
from dist_amp.supervise.out_of_memory import USABLE, capacity_of, size
from dist_amp.supervise.preflight import BESIDES_KEPT
from dist_amp.task import Task
from dist_amp.telemetry.mfu import flops_per_item, known_peak
from dist_amp.verify.collectives import (
    RANKS_PER_MACHINE,
    STEP_SUMS,
    Collective,
    Model,
    groups_of_muon,
    of_a_step,
    of_muon,
)
from dist_amp.verify.memory import Memory, checkpoint_bytes, memory_of, moments_of
from dist_amp.world import World

MOST_RANKS = 2**16  # looked at for a number of ranks on which the model fits


@dataclass(frozen=True)
class PlannedWorld(World):
    """Ranks that do not exist; what training would print at its start is kept in `notes`."""

    notes: list[str] = field(default_factory=list, compare=False)

    def say(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.notes.append(f"warning: {text}")


class Way(NamedTuple):
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
    """What a config will do. 0 and "" where it is not known; `notes` has the reasons."""

    config: Config
    world: PlannedWorld
    device_memory: int  # bytes
    module: nn.Module
    blocks: dict[str, int] = field(default_factory=dict)  # {class: how many}
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
    ways: list[Way] = field(default_factory=list)
    fits_from: int = 0  # ranks, under the sharded strategy that takes least, if nothing fits on these
    refused: BaseException | None = None  # what would end the training at its start

    @property
    def parameters(self) -> tuple[int, int]:
        """(trained, all)."""
        parameters = list(self.module.parameters())
        return sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)


def make_plan(config: Config, world_size: int, device_memory: int) -> Plan:
    """Plan for so many ranks. device_memory: of each, in bytes; 0: this machine's own, if it has such a device.

    Errors: as training the config raises them when it builds the task and its model.
    """
    device = torch.device("cpu" if config.run.device == "cpu" else "cuda")
    world = PlannedWorld(world_size=world_size, local_world_size=min(world_size, RANKS_PER_MACHINE), device=device)
    if not device_memory and (device.type == "cpu" or torch.cuda.is_available()):
        device_memory = capacity_of(replace(world, device=device))[0]
    micro_batches = accumulation_steps(config.train, world_size)
    task = build_task(config.task, config.data)
    seed_all(config.run.seed)
    plan = Plan(config, world, device_memory, build_module(task, config, world), micro_batches=micro_batches)
    plan.samples_per_step = config.train.micro_batch_size * world_size * micro_batches
    blocks = blocks_of(task, plan.module)
    plan.blocks = dict(Counter(type(block).__name__ for block in blocks))
    plan.share_of_blocks = parameters_in(blocks) / max(1, parameters_in([plan.module]))
    describe_ways(plan, task)
    describe_compute(plan, task)
    describe_data(plan, task)
    return plan


def build_module(task: Task, config: Config, world: World) -> nn.Module:
    """The model on the meta device; whole if it can't be built there, with a note. Errors: as build_model raises."""
    module, problem = built_on_meta(task)
    if problem and config.parallel.strategy != "ddp" and world.world_size > 1 and not hasattr(task, "load"):
        world.warn(f"every rank will hold the whole model in host memory until it is sharded: {problem}")
    if module is None:
        module = built_model(task)
        whole = sum(p.numel() * p.element_size() for p in module.parameters())
        world.say(f"the model took {size(whole)} of host memory to plan for: it can't be built on the meta device")
    if converted := to_float32(module, frozen_too=not config.precision.use_amp):
        world.say(converted)
    return in_training_mode(module)


def describe_ways(plan: Plan, task: Task) -> None:
    """Every strategy, and what a checkpoint takes. Errors: what training raises for the strategy that is chosen."""
    config, world, module = plan.config, plan.world, plan.module
    chosen = choose(plan)
    moments = moments_or_assumed(plan, task)
    for name, strategy, parallel in candidates(config, world, plan.micro_batches):
        aside = replace(world, notes=[])  # other strategies' warnings are of no interest
        is_chosen = strategy == chosen and parallel == config.parallel
        try:
            model = laid_out(config, strategy, parallel, task, module, world if is_chosen else aside, plan)
        except Failure as error:
            if is_chosen:
                raise
            plan.ways.append(Way(name, False, problem=first_line(error)))
            continue
        plan.ways.append(way(name, is_chosen, strategy, replace(config, parallel=parallel), model, world, moments))
    if plan.device_memory and all(w.on_device > USABLE * plan.device_memory for w in plan.ways):
        plan.fits_from = ranks_that_fit(plan, task, moments)
    plan.checkpoint_bytes = checkpoint_bytes(config, module, moments, chosen in ("fsdp", "hsdp"))
    if config.checkpoint.every != "off":
        to_come = math.ceil(config.train.steps / config.checkpoint.every)
        plan.checkpoints = min(config.checkpoint.keep + BESIDES_KEPT, to_come)


def choose(plan: Plan) -> Strategy | str:
    """The strategy that training will pick, noting why; "" if it depends on a device that is not known."""
    config, world, module = plan.config.parallel, plan.world, plan.module
    if config.strategy != "auto" or world.world_size == 1:
        return pick_strategy(config, module, world)
    if world.device.type == "cpu":
        return auto_strategy(module, world, 0)
    if plan.device_memory:
        return auto_strategy(module, world, plan.device_memory)
    world.say(
        f"parallel.strategy=auto: ddp on devices of {size(2 * auto_need(module))} and more, else fsdp; give "
        "--device_memory_GiB to see which"
    )
    return ""


def candidates(config: Config, world: World, micro_batches: int) -> list[tuple[str, Strategy, ParallelConfig]]:
    """(name, strategy, its settings): the configured ones, and fsdp in both its ways to accumulate."""
    parallel = config.parallel
    if world.world_size == 1:
        return [("single", "single", parallel)]
    hsdp: tuple[str, Strategy, ParallelConfig] = (f"hsdp of {replicas_of(parallel, world)}", "hsdp", parallel)
    if micro_batches == 1:
        return [("ddp", "ddp", parallel), ("fsdp", "fsdp", parallel), hsdp]
    last, every = (replace(parallel, accumulate_reduce=when) for when in ("last", "every"))
    return [("ddp", "ddp", parallel), ("fsdp (last)", "fsdp", last), ("fsdp (every)", "fsdp", every), hsdp]


def laid_out(
    config: Config,
    strategy: Strategy,
    parallel: ParallelConfig,
    task: Task,
    module: nn.Module,
    world: PlannedWorld,
    plan: Plan,
) -> Model:
    """The model in a strategy, after the checks that training makes. Errors: as those."""
    config = replace(config, parallel=parallel)
    check_model(module, strategy)
    cast = pick_cast(config.precision, strategy, module, world)
    check_parallel(parallel, strategy, cast, world)
    here = world
    if world.device.type == "cuda" and not torch.cuda.is_available():
        here = replace(world, rank=1, device=torch.device("cpu"))  # nothing measures what this CPU can do for rank 1
    if here is world or not config.compile.blocks:
        check_compile(config.compile, strategy, plan.micro_batches, world)
    else:
        world.say("[compile] is not checked: there is no GPU here")
    precision = build_precision(cast, strategy in ("fsdp", "hsdp"), here)
    units_of(task, module, pick_blocks(config, strategy, task, module, world))
    if strategy in ("fsdp", "hsdp"):
        check_shardable(strategy, module, precision.cast_by == "policy")
    return Model(task, module, precision, plan.micro_batches)


def way(
    name: str,
    chosen: bool,
    strategy: Strategy,
    config: Config,
    model: Model,
    world: World,
    moments: Mapping[nn.Parameter, float],
) -> Way:
    """What a strategy takes and sends."""
    sharded, parallel = strategy in ("fsdp", "hsdp"), config.parallel
    shards = world.world_size // (replicas_of(parallel, world) if strategy == "hsdp" else 1) if sharded else 0
    memory = memory_of(config, model, shards, moments)
    on_device = memory.total
    if sharded and parallel.cpu_offload:
        accumulates = parallel.accumulate_reduce == "last" and model.micro_batches > 1
        on_device = memory.computing + (memory.gradients if accumulates else 0)
    step = of_a_step(parallel, strategy, model, world)
    if sharded:
        step += of_muon(groups_of_muon(config, model.task, model.module), shards)
    if sharded or (strategy == "ddp" and parallel.comm_dtype != "off"):
        step[Collective("all_reduce", world.world_size, STEP_SUMS, STEP_SUMS)] += 1
    cast = "" if model.precision.cast_by == "nothing" else f", {model.precision.cast_by}"
    sent = sum(times * one.sent for one, times in step.items())
    return Way(name, chosen, f"{model.precision.name}{cast}", memory, on_device, sent, step.total())


def moments_or_assumed(plan: Plan, task: Any) -> Mapping[nn.Parameter, float]:
    """As `moments_of`; where a task's optimizer can't be stepped on the meta device, AdamW's, with a warning."""
    if hasattr(task, "optimizer") and plan.world.world_size > 1:
        plan.world.say("what the task's optimizer itself may send is left out")
    try:
        return moments_of(plan.config.optim, task, plan.module)
    except Exception as error:
        if isinstance(error, Failure) and error.__cause__ is None:  # not what its code raised, maybe for want of values
            raise
        plan.world.warn(
            f"the state of the task's optimizer can't be seen without a real step ({in_one_line(error)}): it is "
            "assumed to be twice the parameters, as AdamW's"
        )
        return {p: 2 for p in plan.module.parameters() if p.requires_grad}


def ranks_that_fit(plan: Plan, task: Task, moments: Mapping[nn.Parameter, float]) -> int:
    """The number of ranks, doubled from the present one, on which fsdp fits; 0 if there is none."""
    config = replace(plan.config, parallel=replace(plan.config.parallel, accumulate_reduce="every"))
    ranks = 2 * plan.world.world_size
    while ranks <= MOST_RANKS:
        world = replace(plan.world, world_size=ranks, notes=[])
        try:
            model = laid_out(config, "fsdp", config.parallel, task, plan.module, world, plan)
        except Failure:
            return 0
        if way("fsdp", False, "fsdp", config, model, world, moments).on_device <= USABLE * plan.device_memory:
            return ranks
        ranks *= 2
    return 0


def describe_compute(plan: Plan, task: Task) -> None:
    """Floating-point operations, by the task's own count, which may build its model again: without memory, too."""
    precision, peak = plan.config.precision, plan.config.metrics.peak_flops
    if peak != "auto":
        plan.peak_flops = peak
    elif plan.world.device.type == "cuda" and torch.cuda.is_available():
        dtype = "tf32" if precision.name == "fp32" and precision.tf32 else precision.name
        plan.peak_flops = known_peak(torch.cuda.get_device_name(), dtype)
    try:
        with parameters_on_meta():
            plan.flops_per_sample = flops_per_item(task, plan.module)
    except DataError as error:
        plan.world.say(f"without memory for the parameters {error}; FLOPs are left out")


def describe_data(plan: Plan, task: Any) -> None:
    """Samples, epochs and tokens; data that training would refuse is kept in `refused`, and the plan goes on."""
    train = plan.config.train
    try:
        dataset = build_split(task, "train", World())
        plan.samples = len(dataset) if dataset is not None else 0
        check_length(plan.samples, train.micro_batch_size, plan.micro_batches, plan.world)
        epoch = plan.samples / plan.samples_per_step
        plan.steps_per_epoch = math.floor(epoch) if plan.config.data.drop_last else math.ceil(epoch)
        if hasattr(task, "tokens"):
            request = Request(plan.config.run.seed, tuple(range(train.micro_batch_size)))
            batch = Fetch(dataset, task, "training")[request]
            if isinstance(batch, DataError):
                raise batch
            plan.tokens_per_step = task.tokens(batch) * plan.samples_per_step // train.micro_batch_size
    except Exception as error:
        plan.refused = error
        plan.world.warn(f"training would end at its data: {in_one_line(error)}")
