"""python -m dist_amp.plan [--world_size N] [--device NAME | --device_memory_GiB G]
[--largest_micro_batch] [--over_ranks] [--json] [settings of dist_amp.train]

Predict what a config will do on any number of ranks, without a GPU: batch and epochs, memory per
rank, bytes sent and time per step, checkpoint size, and the strategy that "auto" picks. Nothing is
trained or written. A step of your task runs on tensors without memory, of the shapes of the first
micro-batch; its allocations are counted. If what the config runs does not fit, the least change
that does is looked for. Plans are for GPUs, or with --run.device cpu for processes on a CPU.

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
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from dist_amp.bit_exact import exact_config
from dist_amp.commands.devices import Device, find_device
from dist_amp.commands.estimates import checkpoint_bytes
from dist_amp.commands.plan_report import RANKS_PER_MACHINE, Plan, StrategyPlan, lines
from dist_amp.commands.simulation import ImaginedWorld, Job
from dist_amp.commands.strategies import (
    batch_of,
    candidates,
    choose,
    largest_micro_batch,
    plan_strategy,
    settings_that_fit,
)
from dist_amp.config.auto import accumulation_steps, pick_reduction
from dist_amp.config.load import load_config
from dist_amp.config.memory import capacity_of
from dist_amp.config.task_class import build_task
from dist_amp.config.validate import check_length
from dist_amp.errors import ConfigError, DataError, Failure, first_line, in_one_line
from dist_amp.scaling.blocks import blocks_of, parameters_in
from dist_amp.scaling.float32 import to_float32
from dist_amp.scaling.meta import built_on_meta, parameters_on_meta
from dist_amp.settings import Config
from dist_amp.supervise.command_line import Parser, command
from dist_amp.supervise.preflight import BESIDES_KEPT
from dist_amp.task import Task, build_split, built_model
from dist_amp.telemetry.mfu import flops_per_item
from dist_amp.world import World

MANY_RANKS = (8, 64, 512, 4096)


@command()
def main(argv: Sequence[str]) -> None:
    parser = Parser("python -m dist_amp.plan", __doc__)
    parser.add_argument(
        "--world_size",
        type=int,
        default=torch.cuda.device_count() or RANKS_PER_MACHINE,
        help="ranks; default: this machine's GPUs, or 8",
    )
    parser.add_argument(
        "--device_memory_GiB", type=float, default=0, help="of each rank; default: this machine's"
    )
    parser.add_argument("--device", default="", help="such as h100-80gb; its memory and its speed")
    parser.add_argument(
        "--largest_micro_batch",
        action="store_true",
        help="find the largest train.micro_batch_size that fits",
    )
    parser.add_argument(
        "--over_ranks", action="store_true", help="a table over 8, 64, 512 and 4,096 ranks"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    options, words = parser.parse_known_args(argv)
    if options.world_size < 1 or not 0 <= options.device_memory_GiB < math.inf:
        raise ConfigError(
            f"--world_size={options.world_size} must be at least 1, and "
            f"--device_memory_GiB={options.device_memory_GiB:g} at least 0"
        )
    try:
        with redirect_stdout(sys.stderr):  # what the task prints is no part of the plan
            config = load_config(words)
            device = None
            if options.device:
                if config.run.device == "cpu":
                    raise ConfigError(
                        f"--device={options.device} is a GPU, and run.device=cpu plans for "
                        "processes on a CPU; leave one of them out"
                    )
                device = find_device(options.device, config.precision.tf32)
            memory = round(options.device_memory_GiB * 2**30)
            largest = options.largest_micro_batch
            plan, refused = make_plan(config, options.world_size, memory, device, largest=largest)
            if options.over_ranks:
                plan.over_ranks = over_ranks(config, memory, device)
    except SystemExit as error:
        raise DataError(
            f"the task ended the process: {in_one_line(error)}; raise an error that says why"
        ) from error
    text = lines(plan, config)
    if options.json:
        text = [json.dumps(asdict(plan), indent=2)]
    print("\n".join(text), flush=True)
    if refused is not None:
        raise refused


def make_plan(
    config: Config,
    world_size: int,
    device_memory: int,
    gpu: Device | None = None,
    only_chosen: bool = False,
    largest: bool = False,
) -> tuple[Plan, BaseException | None]:
    """(the plan, the error by which the training would end at its data).

    device_memory: bytes of each rank's; 0: the GPU's, or this machine's own if it has such a
    device. only_chosen: without other strategies. largest: look for the largest micro-batch.
    Errors: those that training raises when it builds the task and its model.
    """
    device = torch.device("cpu" if config.run.device == "cpu" else "cuda")
    per_machine = min(world_size, RANKS_PER_MACHINE)
    world = ImaginedWorld(world_size=world_size, local_world_size=per_machine, device=device)
    if config.parallel.bit_exact:
        config = exact_config(config, world)
    if gpu is not None:
        device_memory = device_memory or gpu.memory
    elif not device_memory and (device.type == "cpu" or torch.cuda.is_available()):
        device_memory = capacity_of(world)[0]
    micro_batches = accumulation_steps(config.train, world_size)
    task = build_task(config)
    module = build_module(task, config, world)
    blocks = blocks_of(task, module)
    facts = {
        "class": type(module).__name__,
        "parameters": parameters_in([module]),
        "trained": sum(p.numel() for p in module.parameters() if p.requires_grad),
        "blocks": dict(Counter(type(block).__name__ for block in blocks)),
        "in_blocks": parameters_in(blocks),
    }
    plan = Plan(
        task=config.task.target,
        model=facts,
        world_size=world_size,
        device=gpu.name if gpu else device.type,
        device_memory_bytes=device_memory,
        micro_batch_size=config.train.micro_batch_size,
        micro_batches=micro_batches,
        samples_per_step=config.train.micro_batch_size * world_size * micro_batches,
        steps=config.train.steps,
        notes=world.notes,
    )
    room = math.inf
    if device_memory and device.type == "cuda":
        room = device_memory
    config = replace(config, parallel=pick_reduction(config.parallel, module, world, room))
    refused = dataset = batch = None
    try:
        dataset, batch = plan_data(plan, config, task, world)
    except Exception as error:
        world.warn(f"training would end at its data: {in_one_line(error)}")
        refused = error
    job = Job(
        config=config,
        strategy=choose(config.parallel, module, world, device_memory),  # type: ignore[arg-type]
        world=world,
        task=task,
        module=module,
        precision=None,  # type: ignore[arg-type]  # each strategy has its own
        device_memory=device_memory,
        gpu=gpu,
        dataset=dataset,
        batch=batch,
    )
    plan_strategies(plan, job, only_chosen)
    if largest:
        if not (job.strategy and device_memory):
            raise ConfigError("--largest_micro_batch needs --device or --device_memory_GiB")
        train = replace(config.train, global_batch_size="auto")
        any_batch = replace(job, config=replace(config, train=train))
        plan.largest_micro_batch = largest_micro_batch(any_batch)
    try:
        with parameters_on_meta():  # the task may build its model again
            plan.flops_per_sample = flops_per_item(task, module)
    except DataError as error:
        world.say(f"without memory for the parameters {error}; FLOPs are left out")
    return plan, refused


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


def plan_data(plan: Plan, config: Config, task: Task, world: World) -> tuple[Any, Any]:
    """Plan samples, epochs and tokens; returns the dataset and a micro-batch.

    Errors: what would end the training.
    """
    size = config.train.micro_batch_size
    dataset = build_split(task, "train", World())
    if dataset is not None:
        plan.samples = len(dataset)
    check_length(plan.samples, size, plan.micro_batches, config.data.drop_last, world)
    plan.steps_per_epoch, rest = divmod(plan.samples, plan.samples_per_step)
    if rest and not config.data.drop_last:
        plan.steps_per_epoch += 1
    batch = batch_of(config, task, dataset)
    if hasattr(task, "tokens"):
        plan.tokens_per_step = task.tokens(batch) * plan.samples_per_step // size
    return dataset, batch


def plan_strategies(plan: Plan, job: Job, only_chosen: bool) -> None:
    """Every strategy, and what a checkpoint takes. job: of the chosen one, "" if that is not known.

    Errors: what training raises for the chosen one.
    """
    config, world = job.config, job.world
    if hasattr(job.task, "optimizer"):
        world.say(
            "the task's optimizer is assumed to keep two values per parameter, as AdamW does, and "
            "to send nothing"
        )
    for name, strategy, parallel in candidates(job):
        is_chosen = strategy == job.strategy and parallel == config.parallel
        if only_chosen and not is_chosen:
            continue
        # The warnings about other strategies are of no interest.
        noted_in = world if is_chosen else replace(world, notes=[])
        changed = replace(config, parallel=parallel)
        candidate = replace(job, config=changed, strategy=strategy, world=noted_in)
        try:
            one = plan_strategy(name, candidate)
        except Failure as error:
            if is_chosen:
                raise
            plan.strategies.append(StrategyPlan(name, chosen=False, problem=first_line(error)))
            continue
        one.chosen = is_chosen
        plan.strategies.append(one)
        if is_chosen or not plan.checkpoint_bytes:
            plan.checkpoint_bytes = checkpoint_bytes(candidate)
        if is_chosen and one.fits is False:
            plan.fits_with = settings_that_fit(candidate)
    if config.checkpoint.every != "off":
        to_come = math.ceil(config.train.steps / config.checkpoint.every)
        plan.checkpoints_on_disk = min(config.checkpoint.keep + BESIDES_KEPT, to_come)


def over_ranks(config: Config, memory: int, gpu: Device | None) -> list[dict[str, Any]]:
    """What the chosen strategy takes on more and more ranks."""
    rows = []
    for ranks in MANY_RANKS:
        row: dict[str, Any] = {"ranks": ranks}
        try:
            plan, refused = make_plan(config, ranks, memory, gpu, only_chosen=True)
        except ConfigError as error:
            refused = error
        if refused is not None:
            rows.append(row | {"problem": first_line(refused)})
            continue
        for one in plan.strategies:
            if one.chosen:
                row |= {"strategy": one.name, "on_device": one.on_device, "fits": one.fits}
                row |= {"sent_bytes": one.sent_bytes, "seconds": one.seconds.get("step", 0)}
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
