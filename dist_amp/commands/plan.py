"""python -m dist_amp.plan [OPTIONS] [SETTINGS]: predict memory and time per step, without a GPU.

    python -m dist_amp.plan --config fsdp_bf16 --device h100-80gb --world_size 64

It prints a table: each rank's memory, bytes sent and time per step, in a column per strategy; a *
marks the strategy that this config runs. Nothing is trained. A step of your task runs on tensors
that have the first micro-batch's shapes but no memory; its allocations and collectives are counted.
Ranks are GPUs, 8 to a machine (assumed), or with --run.device cpu processes on a CPU.

Not included: the memory of CUDA and NCCL, about 1 to 2 GiB of each GPU (assumed), most kernels'
internal buffers, diagnostics, compiled blocks, bit-exact sums and float8. Times assume 60 % of the
device's peak arithmetic, 80 % of its peak bandwidths, and communication that overlaps computation.

Exit status: 0 done, 64 a wrong setting, 65 an error in the data or the task.

Docs: docs/recipes.md
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dist_amp.commands.devices import DEVICES, Device
from dist_amp.commands.simulation import PHASES, USABLE, Job, StrategyPlan, simulate
from dist_amp.config.auto import accumulation_steps, pick_reduction, pick_strategy
from dist_amp.config.load import load_config
from dist_amp.config.memory import capacity_of, size_text
from dist_amp.config.task_class import build_task
from dist_amp.errors import ConfigError, DataError, Failure, columns, first_line
from dist_amp.scaling.blocks import parameters_in
from dist_amp.scaling.float32 import to_float32
from dist_amp.scaling.meta import build_on_ranks
from dist_amp.settings import Config, Strategy
from dist_amp.supervise.command_line import Parser, command
from dist_amp.task import build_split
from dist_amp.world import World

RANKS_PER_MACHINE = 8  # assumed
MANY_RANKS = (8, 64, 512, 4096)
LARGEST = 2**16  # the search for the largest micro-batch ends here


@command()
def main(argv: Sequence[str]) -> None:
    parser = Parser("python -m dist_amp.plan", __doc__)
    ranks = torch.cuda.device_count() or RANKS_PER_MACHINE
    add = parser.add_argument
    add("--world_size", type=int, default=ranks, help="ranks; default: this machine's GPUs, or 8")
    add("--device", choices=DEVICES, help="the GPU model: its memory and speed")
    add("--device_memory_GiB", type=float, default=0, help="memory per rank; default: the device's")
    text = "find the largest train.micro_batch_size that fits"
    add("--largest_micro_batch", action="store_true", help=text)
    add("--over_ranks", action="store_true", help="a table over 8, 64, 512 and 4,096 ranks")
    options, words = parser.parse_known_args(argv)
    if options.world_size < 1:
        raise ConfigError(f"--world_size={options.world_size} must be at least 1")
    config = load_config(words)
    gpu = DEVICES[options.device] if options.device else None
    memory = round(options.device_memory_GiB * 2**30)
    job = make_job(config, options.world_size, memory, gpu)
    if options.largest_micro_batch and not job.memory:
        raise ConfigError("--largest_micro_batch needs --device or --device_memory_GiB")
    if options.over_ranks and not job.strategy:
        raise ConfigError(
            "--over_ranks needs --device or --device_memory_GiB, on which parallel.strategy=auto "
            "depends"
        )
    plans, problems = compare(job)
    lines = [*facts(job), "", *table(plans, job.memory), "", *problems]
    if job.strategy:
        lines.append("* what this config runs")
    if not any(plan.fits for plan in plans):
        lines.append(f"nothing fits into {100 * USABLE:.0f} % of the device; use more ranks")
    if options.largest_micro_batch:
        lines.append(f"largest train.micro_batch_size that fits: {largest_micro_batch(job)}")
    if options.over_ranks:
        plans, problems = over_ranks(config, memory, gpu)
        lines += ["", *table(plans, job.memory), "", *problems]
    print("\n".join(lines))


# ---- the plan


def make_job(config: Config, world_size: int, memory: int, gpu: Device | None = None) -> Job:
    """The config on ranks that do not exist, under the strategy that training would choose.

    memory: bytes per rank; 0: those of `gpu`, or of this machine's device if that is of the same
    kind, CPU or GPU. Raises what training raises before its first step.
    """
    device = torch.device("cuda" if config.run.device != "cpu" or gpu else "cpu")
    per_machine = min(world_size, RANKS_PER_MACHINE)
    world = World(world_size=world_size, local_world_size=per_machine, device=device)
    precision = config.precision
    if precision.dtype == "fp8":
        precision = replace(precision, dtype="bf16")
    if gpu is not None:
        gpu = replace(gpu, tf32=precision.tf32)
        memory = memory or gpu.mebibytes * 2**20
    elif not memory and (device.type == "cpu" or torch.cuda.is_available()):
        memory = capacity_of(world)[0]

    accumulation_steps(config.train, world_size)  # raises if the batch sizes don't fit
    task = build_task(config)
    dataset = build_split(task, "train", World())
    # On the meta device, if the model can be built there: then its parameters take no memory.
    module = build_on_ranks(task, World(rank=1), resumes=False)
    module.train()
    if converted := to_float32(module, frozen_too=not precision.use_amp):
        world.say(converted)

    room = memory if memory and device.type == "cuda" else math.inf
    parallel = pick_reduction(config.parallel, module, world, room)
    strategy: Any = ""
    if memory or parallel.strategy != "auto" or world_size == 1 or device.type == "cpu":
        strategy = pick_strategy(parallel, module, world, memory)
    else:
        world.say(
            "parallel.strategy=auto depends on the GPU's memory; give --device or "
            "--device_memory_GiB"
        )
    config = replace(config, parallel=replace(parallel, bit_exact=False), precision=precision)
    return Job(config, strategy, world, task, module, dataset, gpu, memory)


def compare(job: Job) -> tuple[list[StrategyPlan], list[str]]:
    """Returns (plans of the possible strategies, a line on why for each that is not possible).

    Raises the errors of a step under the job's own strategy; DataError if none is possible.
    """
    plans = []
    problems = []
    strategies: list[Strategy] = ["ddp", "fsdp", "hsdp"]
    for name in strategies if job.world.world_size > 1 else [job.strategy]:
        is_chosen = name == job.strategy
        try:
            plan = simulate(replace(job, strategy=name))
            if is_chosen:
                plan.name += " *"
            plans.append(plan)
        except Failure as error:
            if is_chosen:
                raise
            problems.append(f"{name}: not possible: {first_line(error)}")
    if not plans:
        raise DataError(problems[0])
    return plans, problems


def over_ranks(
    config: Config, memory: int, gpu: Device | None
) -> tuple[list[StrategyPlan], list[str]]:
    """As `compare`, for the config's own strategy on growing numbers of ranks."""
    plans = []
    problems = []
    for ranks in MANY_RANKS:
        try:
            plan = simulate(make_job(config, ranks, memory, gpu))
            plan.name = f"{ranks:,} x {plan.name}"
            plans.append(plan)
        except Failure as error:
            problems.append(f"{ranks:,} ranks: not possible: {first_line(error)}")
    return plans, problems


def largest_micro_batch(job: Job) -> int:
    """The largest train.micro_batch_size that fits, within 1/16; 0 if none does."""

    def fits(size: int) -> bool:
        train = replace(job.config.train, micro_batch_size=size, global_batch_size="auto")
        return simulate(replace(job, config=replace(job.config, train=train))).fits

    low, size, high = 0, 1, LARGEST
    while high - low > max(1, low // 16):
        if fits(size):
            low = size
        else:
            high = size
        size = min(2 * size, (low + high) // 2)
    return low


# ---- the plan as text


def facts(job: Job) -> list[str]:
    world = job.world
    ranks = f"{world.world_size:,} x {job.gpu.model if job.gpu else world.device.type}"
    if job.memory:
        ranks += f", {size_text(job.memory)} each"
    size = job.config.train.micro_batch_size
    batches = world.world_size * job.micro_batches
    step = f"{world.world_size:,} ranks x {job.micro_batches} x micro-batch of {size}"
    step += f" = {batches * size:,} samples"
    if hasattr(job.task, "tokens"):
        step += f", {batches * job.task.tokens(job.batch()):,} tokens"
    return [
        f"model       {type(job.module).__name__}, {parameters_in([job.module]):,} parameters",
        f"ranks       {ranks}",
        f"step        {step}",
    ]


def table(plans: Sequence[StrategyPlan], device_memory: int) -> list[str]:
    rows: dict[str, list[str]] = {}
    for plan in plans:
        cells = {label: size_text(size) for label, size in plan.memory.items()}
        cells |= {f"peak in {phase}": size_text(plan.peaks.get(phase, 0)) for phase in PHASES}
        if device_memory:
            left = size_text(device_memory - plan.on_device)
            cells[f"left of {size_text(device_memory)}"] = left if plan.fits else "too large"
        cells["sent per step"] = size_text(plan.sent_bytes)
        cells |= {f"time, {name}": f"{1000 * s:,.1f} ms" for name, s in plan.seconds.items()}
        for label, cell in cells.items():
            rows.setdefault(label, []).append(cell)
    header = ["on each rank", *(plan.name for plan in plans)]
    shown = [[label, *cells] for label, cells in rows.items() if {*cells} != {size_text(0)}]
    rule = ["-" * max(map(len, column)) for column in zip(header, *shown, strict=True)]
    return columns([header, rule, *shown])


if __name__ == "__main__":
    sys.exit(main())
