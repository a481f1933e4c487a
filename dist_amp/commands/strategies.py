"""One strategy on imagined ranks: whether training would run, what a rank holds, and its time; and
what changes of a config, or micro-batches, fit into a device.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from dist_amp.commands.devices import Device
from dist_amp.commands.estimates import Step, memory_of, of_a_step
from dist_amp.commands.plan_report import PHASES, StrategyPlan
from dist_amp.commands.simulation import ImaginedDevice, Job, simulate
from dist_amp.config.auto import SHARDED, pick_cast, pick_strategy, replicas_of
from dist_amp.config.memory import auto_strategy
from dist_amp.config.validate import check_parallel
from dist_amp.errors import DataError, Failure, in_one_line
from dist_amp.loading.loader import Fetch
from dist_amp.loading.plan import Shard
from dist_amp.precision import Precision, build_precision
from dist_amp.scaling.blocks import pick_blocks, units_of
from dist_amp.scaling.compile import pick_compile
from dist_amp.settings import Config, ParallelConfig, Strategy
from dist_amp.world import World

LIMITS = ("compute", "memory")
LARGEST = 2**16  # micro-batches beyond it are not tried


def choose(
    config: ParallelConfig, module: nn.Module, world: World, memory: int
) -> Strategy | Literal[""]:
    """The strategy that training will pick; "" if that depends on a device that is not known."""
    if config.strategy != "auto" or world.world_size == 1 or world.device.type == "cpu":
        return pick_strategy(config, module, world)
    if memory:
        return auto_strategy(module, world, memory)
    world.say(
        "parallel.strategy=auto depends on the GPU's memory; give --device or --device_memory_GiB"
    )
    return ""


def candidates(job: Job) -> list[tuple[str, Strategy, ParallelConfig]]:
    """(name, strategy, its settings); fsdp with both values of accumulate_reduce."""
    parallel = job.config.parallel
    if job.world.world_size == 1:
        return [("single", "single", parallel)]
    last = replace(parallel, accumulate_reduce="last")
    every = replace(parallel, accumulate_reduce="every")
    sharded: list[tuple[str, Strategy, ParallelConfig]] = [("fsdp", "fsdp", parallel)]
    if job.micro_batches > 1 and not parallel.bit_exact:
        sharded = [("fsdp (last)", "fsdp", last), ("fsdp (every)", "fsdp", every)]
    hsdp = f"hsdp of {replicas_of(parallel, job.world)}"
    return [("ddp", "ddp", parallel), *sharded, (hsdp, "hsdp", parallel)]


def plan_strategy(name: str, job: Job) -> StrategyPlan:
    """The plan of the job's strategy. Errors: a Failure where training would refuse it."""
    one = StrategyPlan(name, chosen=False)
    job = replace(job, precision=checked(job))
    step = of_a_step(job)
    one.precision = job.precision.name
    if job.precision.cast_by != "nothing":
        one.precision += f", {job.precision.cast_by}"
    one.memory = memory_of(job)
    one.on_device = one.memory.total
    one.sent_bytes = sum(times * collective.sent for collective, times in step.items())
    one.collectives = step.total()
    simulated = None
    state_fits = one.memory.total <= job.room or job.config.parallel.cpu_offload
    if job.batch is not None and state_fits:
        try:
            simulated = simulate(job)
        except Exception as error:
            one.without_peaks = in_one_line(error)
    if simulated is not None:
        on_host = 0
        one.peaks = dict(simulated.peaks)
        if job.shards and job.config.parallel.cpu_offload:
            on_host = one.memory.total - one.memory.gradients
            one.peaks = {phase: simulated.peaks[phase] - on_host for phase in PHASES[:2]}
        one.on_device = max(one.peaks.values())
        if job.gpu is not None:
            plan_time(one, simulated, step, job.gpu, job.world)
    if one.on_device > job.room:
        one.fits = False
    elif job.device_memory and one.peaks:
        one.fits = True
    return one


def plan_time(
    one: StrategyPlan, simulated: ImaginedDevice, step: Step, gpu: Device, world: World
) -> None:
    """Seconds of a step: of computing or of sending, which overlap, whichever is longer."""
    for phase in PHASES:
        parts = {limit: simulated.seconds[phase, limit] for limit in LIMITS}
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


def checked(job: Job) -> Precision:
    """The precision in a strategy, after the checks that training makes. Errors: theirs."""
    config, strategy, task, module = job.config, job.strategy, job.task, job.module
    world: World = job.world
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


# --- what fits into a device


def settings_that_fit(job: Job) -> str:
    """The least costly change that fits, as a command line; "" if none does."""
    for settings in changes(job):
        if fitting(job, settings):
            return " ".join(f"--{key} {str(value).lower()}" for key, value in settings.items())
    return ""


def changes(job: Job) -> Iterator[dict[str, Any]]:
    """Settings that take less memory than the config's, the least costly first."""
    strategies = [job.strategy]
    if job.strategy == "ddp":
        strategies.append("fsdp")
    for used in strategies:
        first = {"parallel.strategy": used}
        for kept in ("none", "selective", "full"):
            second = first | {"parallel.activation_checkpointing": kept}
            if (used, kept) != (job.strategy, "none"):
                yield second
    size, rounds = job.config.train.micro_batch_size, job.micro_batches
    last: dict[str, Any] = {
        "parallel.strategy": used,
        "parallel.activation_checkpointing": "full",
    }
    while size % 2 == 0:
        size //= 2
        rounds *= 2
        last = {**last, "train.micro_batch_size": size}
        if job.config.train.global_batch_size == "auto":
            last["train.accumulation_steps"] = rounds
        yield last
    if used in SHARDED:
        yield last | {"parallel.cpu_offload": True}


def largest_micro_batch(job: Job) -> int:
    """The largest train.micro_batch_size that fits, within 1/16; 0 if none does."""

    def fits(size: int) -> bool:
        return fitting(job, {"train.micro_batch_size": size})

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if high > LARGEST:
            return low
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def fitting(job: Job, settings: dict[str, Any]) -> bool:
    """Whether the config fits with these settings."""
    config = with_settings(job.config, settings)
    size = config.train.micro_batch_size
    batch = job.batch
    if size != job.config.train.micro_batch_size and batch is not None:
        batch = batch_of(config, job.task, job.dataset)
    strategy = settings.get("parallel.strategy", job.strategy)
    world = replace(job.world, notes=[])
    changed = replace(job, config=config, strategy=strategy, world=world, batch=batch)
    try:
        return bool(plan_strategy("", changed).fits)
    except Failure:
        return False


def with_settings(config: Config, settings: dict[str, Any]) -> Config:
    """The config with these keys set."""
    for key, value in settings.items():
        section, name = key.split(".")
        changed = replace(getattr(config, section), **{name: value})
        config = replace(config, **{section: changed})
    return config
