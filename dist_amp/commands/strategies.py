"""One strategy on imagined ranks: whether training would run, what a rank holds, and its time."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dist_amp.commands.devices import Device
from dist_amp.commands.estimates import Memory, Setup, Step, memory_of, of_a_step
from dist_amp.commands.plan_report import PHASES, StrategyPlan
from dist_amp.commands.simulation import ImaginedWorld, Simulation, simulate
from dist_amp.config.auto import (
    SHARDED,
    accumulation_steps,
    pick_cast,
    pick_strategy,
    replicas_of,
)
from dist_amp.config.memory import USABLE, auto_strategy
from dist_amp.config.validate import check_parallel
from dist_amp.errors import DataError, in_one_line
from dist_amp.loading.loader import Fetch
from dist_amp.loading.plan import Shard
from dist_amp.precision import Precision, build_precision
from dist_amp.scaling.blocks import pick_blocks, units_of
from dist_amp.scaling.compile import pick_compile
from dist_amp.settings import Config, ParallelConfig, Strategy
from dist_amp.task import Task
from dist_amp.world import World

LIMITS = ("compute", "memory")


@dataclass(frozen=True)
class Job:
    """What a plan is made for."""

    config: Config
    task: Task
    module: nn.Module  # on the meta device
    world: ImaginedWorld
    device_memory: int
    gpu: Device | None
    dataset: Any = None
    batch: Any = None  # a micro-batch

    @property
    def micro_batches(self) -> int:
        return accumulation_steps(self.config.train, self.world.world_size)

    @property
    def room(self) -> float:
        """Bytes to plan for; inf if the device is not known."""
        return USABLE * self.device_memory or math.inf


def choose(config: ParallelConfig, module: nn.Module, world: World, memory: int) -> Strategy | str:
    """The strategy that training will pick; "" if that depends on a device that is not known."""
    if config.strategy != "auto" or world.world_size == 1:
        return pick_strategy(config, module, world)
    if world.device.type == "cpu":
        return auto_strategy(module, world, 0)
    if memory:
        return auto_strategy(module, world, memory)
    world.say(
        "parallel.strategy=auto depends on the GPU's memory; give --device or --device_memory_GiB"
    )
    return ""


def candidates(
    parallel: ParallelConfig, world: World, micro_batches: int
) -> list[tuple[str, Strategy, ParallelConfig]]:
    """(name, strategy, its settings); fsdp with both values of accumulate_reduce."""
    if world.world_size == 1:
        return [("single", "single", parallel)]
    last = replace(parallel, accumulate_reduce="last")
    every = replace(parallel, accumulate_reduce="every")
    sharded: list[tuple[str, Strategy, ParallelConfig]] = [("fsdp", "fsdp", parallel)]
    if micro_batches > 1 and not parallel.bit_exact:
        sharded = [("fsdp (last)", "fsdp", last), ("fsdp (every)", "fsdp", every)]
    hsdp = f"hsdp of {replicas_of(parallel, world)}"
    return [("ddp", "ddp", parallel), *sharded, (hsdp, "hsdp", parallel)]


def plan_strategy(name: str, strategy: Strategy, job: Job) -> tuple[StrategyPlan, Setup]:
    """(the plan, its setup). Errors: a Failure where training would refuse it."""
    one = StrategyPlan(name, chosen=False)
    precision = checked(job.config, strategy, job.task, job.module, job.world)
    setup = Setup(
        job.config, strategy, job.world, job.task, job.module, precision, job.micro_batches
    )
    step = of_a_step(setup)
    one.precision = precision.name
    if precision.cast_by != "nothing":
        one.precision += f", {precision.cast_by}"
    one.memory = memory_of(setup)
    one.on_device = one.memory.total
    one.sent_bytes = sum(times * collective.sent for collective, times in step.items())
    one.collectives = step.total()
    try:
        simulated = simulated_step(strategy, one.memory, job)
    except Exception as error:
        one.without_peaks = in_one_line(error)
        simulated = None
    if simulated is not None:
        on_host = 0
        one.peaks = simulated.peaks
        if setup.shards and job.config.parallel.cpu_offload:
            on_host = one.memory.total - one.memory.gradients
            one.peaks = {phase: simulated.peaks[phase] - on_host for phase in PHASES[:2]}
        one.on_device = max(one.peaks.values())
        if job.gpu is not None:
            plan_time(one, simulated, step, job.gpu, job.world)
    if one.on_device > job.room:
        one.fits = False
    elif job.device_memory and one.peaks:
        one.fits = True
    return one, setup


def simulated_step(strategy: Strategy, memory: Memory, job: Job) -> Simulation | None:
    """None without data, or if the state alone does not fit. Errors: those of `simulate`."""
    state_fits = memory.total <= job.room or job.config.parallel.cpu_offload
    if job.batch is None or not state_fits:
        return None
    parallel = replace(job.config.parallel, cpu_offload=False, bit_exact=False)
    config = replace(job.config, parallel=parallel)
    return simulate(config, strategy, job.world, job.task, job.module, job.batch, job.gpu)


def plan_time(
    one: StrategyPlan, simulated: Simulation, step: Step, gpu: Device, world: World
) -> None:
    """Seconds of a step: of computing or of sending, which overlap, whichever is longer."""
    for phase in PHASES:
        parts = {limit: simulated.seconds.get((phase, limit), 0.0) for limit in LIMITS}
        one.seconds[phase] = sum(parts.values())
        one.limits[phase] = max(LIMITS, key=lambda limit: parts[limit])
    sending = 0.0
    # A ring over several machines enters and leaves each by every network card.
    over_all = min(gpu.machine, world.local_world_size * gpu.network)
    for collective, times in step.items():
        rate = over_all
        if world.world_size == world.local_world_size:
            rate = gpu.machine
        elif collective.ranks < world.world_size:  # hsdp
            rate = gpu.machine
            if collective.kind == "all_reduce":
                rate = gpu.network
        sending += times * collective.sent / rate
    one.seconds["sending"] = sending
    one.seconds["step"] = max(sending, sum(one.seconds[phase] for phase in PHASES))


def checked(
    config: Config, strategy: Strategy, task: Task, module: nn.Module, world: World
) -> Precision:
    """The precision in a strategy, after the checks that training makes. Errors: theirs."""
    cast = pick_cast(config.precision, strategy, module, world)
    check_parallel(config.parallel, strategy, cast, module, world)
    computes_on = world
    if world.device.type == "cuda" and not torch.cuda.is_available():
        # As rank 1, so that what this CPU can compute is not measured.
        computes_on = replace(world, rank=1, device=torch.device("cpu"))
    if computes_on is world:
        pick_compile(config, strategy, task, module, world)
    if config.compile.blocks and world.device.type == "cuda":
        world.say("planned without compile.blocks, which takes as much memory or less")
    if config.precision.matmul == "fp8":
        world.say("precision.matmul=fp8 is planned as bf16: products take less time")
    sharded = strategy in SHARDED
    precision = build_precision(cast, sharded, computes_on)
    if sharded:
        units_of(task, module, pick_blocks(strategy, task, module, world))
    return precision


def batch_of(config: Config, task: Any, dataset: Any) -> Any:
    """A micro-batch of the first samples, which come again if there are too few. Errors: its."""
    indices = [index % len(dataset) for index in range(config.train.micro_batch_size)]
    batch = Fetch(dataset, task, "training")[Shard(tuple(indices), seed=config.run.seed)]
    if isinstance(batch, DataError):
        raise batch
    return batch
