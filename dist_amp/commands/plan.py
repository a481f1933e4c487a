"""python -m dist_amp.plan [--world_size N] [--device NAME | --device_memory_GiB G]
[--largest_micro_batch] [--over_ranks] [--json] [settings of dist_amp.train]

Predict what a config will do on any number of ranks, without a GPU: batch and epochs, memory per
rank, bytes sent and time per step, checkpoint size, and the strategy that "auto" picks. Nothing is
trained or written. A step of your task runs on tensors without memory, of the shapes of the first
micro-batch; what it allocates and sends is counted. If what the config runs does not fit, the least
change that does is looked for. Plans are for GPUs, or with --run.device cpu for processes on a CPU.

Not included: the memory of CUDA and NCCL, about 1 to 2 GiB of each GPU (assumed), what kernels need
within themselves, compiled blocks, and diagnostics. Times assume 60 % of the device's arithmetic,
80 % of its bandwidths, and sending that overlaps computing.

Exit status: that of the training it plans: 64 for a wrong setting, 65 for the data or the task.

Docs: docs/recipes.md
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from dist_amp.bit_exact import exact_config
from dist_amp.commands.devices import Device, find_device
from dist_amp.commands.plan_report import RANKS_PER_MACHINE, Plan, StrategyPlan, lines
from dist_amp.commands.simulation import ImaginedWorld, Job, batch_of, simulate
from dist_amp.config.auto import (
    SHARDED,
    accumulation_steps,
    pick_cast,
    pick_reduction,
    pick_strategy,
    replicas_of,
)
from dist_amp.config.load import load_config
from dist_amp.config.memory import auto_strategy, capacity_of
from dist_amp.config.task_class import build_task
from dist_amp.config.validate import check_length, check_parallel
from dist_amp.errors import ConfigError, DataError, Failure, first_line, in_one_line
from dist_amp.scaling.blocks import blocks_of, parameters_in
from dist_amp.scaling.float32 import to_float32
from dist_amp.scaling.meta import built_on_meta, parameters_on_meta
from dist_amp.settings import Config, ParallelConfig, Strategy
from dist_amp.supervise.command_line import Parser, command
from dist_amp.supervise.preflight import BESIDES_KEPT
from dist_amp.task import Task, build_split, built_model
from dist_amp.telemetry.mfu import flops_per_item
from dist_amp.world import World

MANY_RANKS = (8, 64, 512, 4096)
LARGEST = 2**16  # micro-batches beyond it are not tried


@command()
def main(argv: Sequence[str]) -> None:
    parser = Parser("python -m dist_amp.plan", __doc__)
    ranks = torch.cuda.device_count() or RANKS_PER_MACHINE
    parser.add_argument(
        "--world_size", type=int, default=ranks, help="ranks; default: this machine's GPUs, or 8"
    )
    parser.add_argument("--device", default="", help="such as h100-80gb; its memory and its speed")
    parser.add_argument(
        "--device_memory_GiB", type=float, default=0, help="of each rank; default: this machine's"
    )
    for name, about in (
        ("--largest_micro_batch", "find the largest train.micro_batch_size that fits"),
        ("--over_ranks", "a table over 8, 64, 512 and 4,096 ranks"),
        ("--json", "print one JSON object, no table"),
    ):
        parser.add_argument(name, action="store_true", help=about)
    options, words = parser.parse_known_args(argv)
    if options.world_size < 1 or not 0 <= options.device_memory_GiB < math.inf:
        raise ConfigError(
            f"--world_size={options.world_size} must be at least 1, and "
            f"--device_memory_GiB={options.device_memory_GiB:g} at least 0"
        )
    try:
        with redirect_stdout(sys.stderr):  # what the task prints is no part of the plan
            config = load_config(words)
            if options.device and config.run.device == "cpu":
                raise ConfigError(
                    f"--device={options.device} is a GPU, and run.device=cpu plans for processes "
                    "on a CPU; leave one of them out"
                )
            gpu = find_device(options.device) if options.device else None
            memory = round(options.device_memory_GiB * 2**30)
            largest = options.largest_micro_batch
            plan = make_plan(config, options.world_size, memory, gpu, largest=largest)
            if options.over_ranks:
                plan.over_ranks = over_ranks(config, memory, gpu)
    except SystemExit as error:
        raise DataError(
            f"the task ended the process: {in_one_line(error)}; raise an error that says why"
        ) from error
    text = json.dumps(asdict(plan), indent=2) if options.json else "\n".join(lines(plan, config))
    print(text, flush=True)


def make_plan(
    config: Config,
    world_size: int,
    memory: int,
    gpu: Device | None = None,
    only_chosen: bool = False,
    largest: bool = False,
) -> Plan:
    """memory: bytes of each rank's device; 0: the GPU's, or this machine's if it has such a device.
    only_chosen: without other strategies. largest: look for the largest micro-batch.

    Errors: those that training raises before its first step, and in it.
    """
    device = torch.device("cpu" if config.run.device == "cpu" else "cuda")
    per_machine = min(world_size, RANKS_PER_MACHINE)
    world = ImaginedWorld(world_size=world_size, local_world_size=per_machine, device=device)
    if config.parallel.bit_exact:
        config = exact_config(config, world)
    if gpu is not None:
        gpu = replace(gpu, tf32=config.precision.tf32)
        memory = memory or gpu.mebibytes * 2**20
    elif not memory and (device.type == "cpu" or torch.cuda.is_available()):
        memory = capacity_of(world)[0]
    size = config.train.micro_batch_size
    micro_batches = accumulation_steps(config.train, world_size)
    task = build_task(config)
    module = build_module(task, config, world)
    dataset = build_split(task, "train", World())
    samples = 0 if dataset is None else len(dataset)
    check_length(samples, size, micro_batches, config.data.drop_last, world)
    samples_per_step = size * world_size * micro_batches
    steps_per_epoch, rest = divmod(samples, samples_per_step)
    room = memory if memory and device.type == "cuda" else math.inf
    config = replace(config, parallel=pick_reduction(config.parallel, module, world, room))
    strategy = choose(config.parallel, module, world, memory)
    if largest and not (strategy and memory):
        raise ConfigError("--largest_micro_batch needs --device or --device_memory_GiB")
    job = Job(config, strategy, world, task, module, dataset, gpu, memory)  # type: ignore[arg-type]
    blocks = blocks_of(task, module)
    plan = Plan(
        task=config.task.target,
        model={
            "class": type(module).__name__,
            "parameters": parameters_in([module]),
            "trained": sum(p.numel() for p in module.parameters() if p.requires_grad),
            "blocks": dict(Counter(type(block).__name__ for block in blocks)),
            "in_blocks": parameters_in(blocks),
        },
        world_size=world_size,
        device=gpu.name if gpu else device.type,
        device_memory_bytes=memory,
        micro_batch_size=size,
        micro_batches=micro_batches,
        samples_per_step=samples_per_step,
        steps=config.train.steps,
        samples=samples,
        steps_per_epoch=steps_per_epoch + (rest > 0 and not config.data.drop_last),
        notes=world.notes,
    )
    if hasattr(task, "tokens"):
        plan.tokens_per_step = task.tokens(batch_of(job)) * samples_per_step // size
    try:
        with parameters_on_meta():  # the task may build its model again
            plan.flops_per_sample = flops_per_item(task, module)
    except DataError as error:
        world.say(f"without memory for the parameters {error}; FLOPs are left out")
    if config.compile.blocks and device.type == "cuda":
        world.say("planned without compile.blocks, which takes as much memory or less")
    if config.precision.dtype == "fp8":
        world.say("precision.dtype=fp8 is planned as bf16: products take less time")
    plan_strategies(plan, job, only_chosen)
    if largest:
        train = replace(config.train, global_batch_size="auto")
        plan.largest_micro_batch = largest_micro_batch(
            replace(job, config=replace(config, train=train))
        )
    return plan


def build_module(task: Task, config: Config, world: World) -> nn.Module:
    """The model on the meta device; whole, with a warning, if it can't be built there."""
    module, problem = built_on_meta(task)
    if problem and not hasattr(task, "load"):
        world.warn(
            f"every rank will hold the whole model in host memory until it is sharded: {problem}"
        )
    if module is None:
        module = built_model(task)
    module.train()
    if converted := to_float32(module, frozen_too=not config.precision.use_amp):
        world.say(converted)
    return module


def choose(config: ParallelConfig, module: nn.Module, world: World, memory: int) -> str:
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
    sharded: list[tuple[str, Strategy, ParallelConfig]] = [("fsdp", "fsdp", parallel)]
    if job.micro_batches > 1 and not parallel.bit_exact:
        last, every = (replace(parallel, accumulate_reduce=value) for value in ("last", "every"))
        sharded = [("fsdp (last)", "fsdp", last), ("fsdp (every)", "fsdp", every)]
    hsdp = f"hsdp of {replicas_of(parallel, job.world)}"
    return [("ddp", "ddp", parallel), *sharded, (hsdp, "hsdp", parallel)]


def plan_strategies(plan: Plan, job: Job, only_chosen: bool) -> None:
    """Add every strategy, and what a checkpoint takes. Errors: the chosen one's, or if all fail."""
    config, world = job.config, job.world
    failure: Failure | None = None
    for name, strategy, parallel in candidates(job):
        is_chosen = strategy == job.strategy and parallel == config.parallel
        if only_chosen and not is_chosen:
            continue
        candidate = replace(
            job,
            config=replace(config, parallel=parallel),
            strategy=strategy,
            # The warnings about other strategies are of no interest.
            world=world if is_chosen else replace(world, notes=[]),
        )
        try:
            one = plan_strategy(candidate)
        except Failure as error:
            if is_chosen:
                raise
            failure = failure or error
            plan.strategies.append(StrategyPlan(name=name, problem=first_line(error)))
            continue
        one.name, one.chosen = name, is_chosen
        plan.strategies.append(one)
        if is_chosen or not plan.checkpoint_bytes:
            plan.checkpoint_bytes = one.checkpoint_bytes
        if is_chosen and one.fits is False:
            plan.fits_with = settings_that_fit(candidate)
    if failure and all(one.problem for one in plan.strategies):
        raise failure
    if config.checkpoint.every != "off":
        to_come = math.ceil(config.train.steps / config.checkpoint.every)
        plan.checkpoints_on_disk = min(config.checkpoint.keep + BESIDES_KEPT, to_come)


def plan_strategy(job: Job) -> StrategyPlan:
    """Errors: Failure if training would refuse the strategy, or if the step needs values."""
    config = job.config
    cast = pick_cast(config.precision, job.strategy, job.module, job.world)
    check_parallel(config.parallel, job.strategy, cast, job.module, job.world)
    try:
        return simulate(job)
    except Failure:
        raise
    except Exception as error:
        raise DataError(
            "a plan runs the step on tensors without values, and this one can't run so: "
            f"{in_one_line(error)}"
        ) from error


def over_ranks(config: Config, memory: int, gpu: Device | None) -> list[StrategyPlan]:
    """What the chosen strategy takes on more and more ranks."""
    plans = []
    for ranks in MANY_RANKS:
        one = StrategyPlan(problem="parallel.strategy=auto depends on the GPU's memory")
        try:
            for one in make_plan(config, ranks, memory, gpu, only_chosen=True).strategies:
                one.chosen = False
        except Failure as error:
            one = StrategyPlan(problem=first_line(error))
        one.ranks, one.name = ranks, f"{ranks:,} x {one.name or 'ranks'}"
        plans.append(one)
    return plans


# --- what fits into a device


def settings_that_fit(job: Job) -> str:
    """The least costly change that fits, as a command line; "" if none does."""
    for settings in changes(job):
        if fits(job, settings):
            return " ".join(f"--{key} {str(value).lower()}" for key, value in settings.items())
    return ""


def changes(job: Job) -> Iterator[dict[str, Any]]:
    """Settings that take less memory than the config's, the least costly first."""
    settings: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp") if job.strategy == "ddp" else (job.strategy,):
        for kept in ("none", "selective", "full"):
            settings = {
                "parallel.strategy": strategy,
                "parallel.activation_checkpointing": kept,
            }
            if (strategy, kept) != (job.strategy, "none"):
                yield settings
    size, rounds = job.config.train.micro_batch_size, job.micro_batches
    while size % 2 == 0:
        size //= 2
        rounds *= 2
        settings = settings | {"train.micro_batch_size": size}
        if job.config.train.global_batch_size == "auto":
            settings["train.accumulation_steps"] = rounds
        yield settings
    if strategy in SHARDED:
        yield settings | {"parallel.cpu_offload": True}


def largest_micro_batch(job: Job) -> int:
    """The largest train.micro_batch_size that fits, within 1/16; 0 if none does."""
    low, high = 0, 1
    while high <= LARGEST and fits(job, {"train.micro_batch_size": high}):
        low, high = high, 2 * high
    while high <= LARGEST and high - low > max(1, low // 16):
        middle = (low + high) // 2
        if fits(job, {"train.micro_batch_size": middle}):
            low = middle
        else:
            high = middle
    return low


def fits(job: Job, settings: dict[str, Any]) -> bool:
    """Whether the config fits with these settings."""
    config = job.config
    for key, value in settings.items():
        section, name = key.split(".")
        changed = replace(getattr(config, section), **{name: value})
        config = replace(config, **{section: changed})
    strategy = settings.get("parallel.strategy", job.strategy)
    world = replace(job.world, notes=[])
    try:
        changed_job = replace(job, config=config, strategy=strategy, world=world)
        return bool(plan_strategy(changed_job).fits)
    except Failure:
        return False


if __name__ == "__main__":
    sys.exit(main())
