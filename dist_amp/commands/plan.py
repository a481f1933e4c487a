"""python -m dist_amp.plan [--world_size N] [--device NAME | --device_memory_GiB G]
[--largest_micro_batch] [--over_ranks] [--json] [settings of dist_amp.train]

Predict what a config will do on any number of ranks, without a GPU: memory per rank, bytes sent and
time per step under each strategy, and the strategy that "auto" picks. Nothing is trained or
written. A step of your task runs on tensors without memory, of the shapes of the first micro-batch;
what it allocates and sends is counted. Plans are for GPUs, or with --run.device cpu for processes
on a CPU.

Not included: the memory of CUDA and NCCL, about 1 to 2 GiB of each GPU (assumed), what kernels need
within themselves, and diagnostics. Times assume 60 % of the device's arithmetic, 80 % of its
bandwidths, and sending that overlaps computing.

Exit status: that of the training it plans: 64 for a wrong setting, 65 for the data or the task.

Docs: docs/recipes.md
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, replace

import torch

from dist_amp.commands.devices import Device, find_device
from dist_amp.commands.simulation import (
    HELD,
    PHASES,
    USABLE,
    ImaginedWorld,
    Job,
    StrategyPlan,
    simulate,
)
from dist_amp.config.auto import (
    accumulation_steps,
    pick_cast,
    pick_reduction,
    pick_strategy,
    replicas_of,
)
from dist_amp.config.load import load_config
from dist_amp.config.memory import capacity_of, size_text
from dist_amp.config.task_class import build_task
from dist_amp.config.validate import check_length, check_parallel
from dist_amp.errors import ConfigError, DataError, Failure, columns, first_line, in_one_line
from dist_amp.scaling.blocks import blocks_of, parameters_in
from dist_amp.scaling.float32 import to_float32
from dist_amp.scaling.meta import build_on_ranks
from dist_amp.settings import Config
from dist_amp.supervise.command_line import Parser, command
from dist_amp.task import build_split
from dist_amp.world import World

RANKS_PER_MACHINE = 8  # assumed where no ranks were launched
MANY_RANKS = (8, 64, 512, 4096)
LARGEST = 2**16  # micro-batches beyond it are not tried


@dataclass
class Plan:
    """The output of --json. facts: {heading: text}. device_memory: bytes; 0: not known."""

    facts: dict[str, str]
    device_memory: int
    strategies: list[StrategyPlan] = field(default_factory=list)
    largest_micro_batch: int | None = None
    over_ranks: list[StrategyPlan] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


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
    with redirect_stdout(sys.stderr):  # what the task prints is no part of the plan
        config = load_config(words)
        if options.device and config.run.device == "cpu":
            raise ConfigError(
                f"--device={options.device} is a GPU, and run.device=cpu plans for processes on a "
                "CPU; leave one of them out"
            )
        gpu = find_device(options.device) if options.device else None
        memory = round(options.device_memory_GiB * 2**30)
        largest = options.largest_micro_batch
        plan = make_plan(config, options.world_size, memory, gpu, largest=largest)
        if options.over_ranks:
            plan.over_ranks = over_ranks(config, memory, gpu)
    print(json.dumps(asdict(plan), indent=2) if options.json else "\n".join(lines(plan)))


# ---- the plan


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
    precision = config.precision
    if config.compile.blocks or config.parallel.bit_exact or precision.dtype == "fp8":
        world.say("planned without compile.blocks, parallel.bit_exact and float8")
    if gpu is not None:
        gpu = replace(gpu, tf32=precision.tf32)
        memory = memory or gpu.mebibytes * 2**20
    elif not memory and (device.type == "cpu" or torch.cuda.is_available()):
        memory = capacity_of(world)[0]

    size = config.train.micro_batch_size
    micro_batches = accumulation_steps(config.train, world_size)
    task = build_task(config)
    dataset = build_split(task, "train", World())
    samples = 0 if dataset is None else len(dataset)
    check_length(samples, size, micro_batches, config.data.drop_last, world)
    # The parameters are on the meta device, if the model can be built so.
    module = build_on_ranks(task, replace(world, device=torch.device("cpu")), resumes=False)
    module.train()
    if converted := to_float32(module, frozen_too=not precision.use_amp):
        world.say(converted)

    room = memory if memory and device.type == "cuda" else math.inf
    parallel = pick_reduction(config.parallel, module, world, room)
    parallel = replace(parallel, bit_exact=False)
    if precision.dtype == "fp8":
        precision = replace(precision, dtype="bf16")
    config = replace(config, parallel=parallel, precision=precision)
    strategy = ""
    if memory or parallel.strategy != "auto" or world_size == 1 or device.type == "cpu":
        strategy = pick_strategy(parallel, module, world, memory)
    else:
        world.say(
            "parallel.strategy=auto depends on the GPU's memory; give --device or "
            "--device_memory_GiB"
        )
    if largest and not (strategy and memory):
        raise ConfigError("--largest_micro_batch needs --device or --device_memory_GiB")
    job = Job(config, strategy, world, task, module, dataset, gpu, memory)  # type: ignore[arg-type]

    blocks = Counter(type(block).__name__ for block in blocks_of(task, module))
    in_blocks = ", ".join(f"{count} x {name}" for name, count in blocks.items())
    ranks = f"{world_size:,} x {gpu.name if gpu else device.type}"
    if memory:
        ranks += f", {size_text(memory)} each"
    if world_size > RANKS_PER_MACHINE:
        ranks += f", {RANKS_PER_MACHINE} to a machine (assumed)"
    batch = f"{size * world_size * micro_batches:,} samples per step = {world_size:,} ranks x "
    batch += f"{micro_batches} x micro-batch of {size}"
    if hasattr(task, "tokens"):
        tokens = task.tokens(job.batch()) * world_size * micro_batches
        batch += f"; {tokens:,} tokens per step"
    facts = {
        "task": config.task.target,
        "model": f"{type(module).__name__}, {parameters_in([module]):,} parameters; "
        f"{in_blocks or 'no blocks'}",
        "ranks": ranks,
        "batch": batch,
    }
    plan = Plan(facts, memory, notes=world.notes)

    names = ["single"] if world_size == 1 else ["ddp", "fsdp", "hsdp"]
    for name in [strategy] if only_chosen and strategy else names * (not only_chosen):
        chosen = name == strategy
        try:
            # What the world says of the other strategies is of no interest.
            candidate = job if chosen else replace(job, world=replace(world, notes=[]))
            option = simulated(replace(candidate, strategy=name))  # type: ignore[arg-type]
        except Failure as error:
            if chosen or len(names) == 1:
                raise
            option = StrategyPlan(problem=first_line(error))
        option.name, option.chosen = name, chosen
        if name == "hsdp":
            option.name = f"hsdp of {replicas_of(parallel, world)}"
        plan.strategies.append(option)
    if plan.strategies and all(option.problem for option in plan.strategies):
        raise DataError(plan.strategies[0].problem)
    if largest:
        plan.largest_micro_batch = largest_micro_batch(job)
    return plan


def simulated(job: Job) -> StrategyPlan:
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
    """Plans of the chosen strategy for growing numbers of ranks."""
    plans = []
    for ranks in MANY_RANKS:
        option = StrategyPlan(problem="parallel.strategy=auto depends on the GPU's memory")
        try:
            for option in make_plan(config, ranks, memory, gpu, only_chosen=True).strategies:
                option.chosen = False
        except Failure as error:
            option = StrategyPlan(problem=first_line(error))
        option.name = f"{ranks:,} x {option.name or 'ranks'}"
        plans.append(option)
    return plans


def largest_micro_batch(job: Job) -> int:
    """The largest train.micro_batch_size that fits, within 1/16; 0 if none does."""
    quiet = replace(job, world=replace(job.world, notes=[]))

    def fits(size: int) -> bool:
        train = replace(job.config.train, micro_batch_size=size, global_batch_size="auto")
        try:
            changed = replace(quiet, config=replace(job.config, train=train))
            return bool(simulated(changed).fits)
        except Failure:
            return False

    low, high = 0, 1
    while high <= LARGEST and fits(high):
        low, high = high, 2 * high
    while high <= LARGEST and high - low > max(1, low // 16):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


# ---- the plan as text


def lines(plan: Plan) -> list[str]:
    text = [f"{name:<12}{fact}" for name, fact in plan.facts.items()]
    text += ["", *table(plan.strategies, plan.device_memory), ""]
    if any(option.chosen for option in plan.strategies):
        text.append("* what this config runs")
    for option in (*plan.strategies, *plan.over_ranks):
        if option.problem:
            text.append(f"{option.name}: not possible: {option.problem}")
    if all(option.fits is False for option in plan.strategies if not option.problem):
        text.append(f"nothing fits into {100 * USABLE:.0f} % of the device; use more ranks")
    if plan.largest_micro_batch is not None:
        text.append(f"largest train.micro_batch_size that fits: {plan.largest_micro_batch}")
    if plan.over_ranks:
        text += ["", *table(plan.over_ranks, plan.device_memory), ""]
    notes = [note for note in plan.notes if not note.startswith("blocks: ")]
    return text + sorted(notes, key=lambda note: note.startswith("warning: "))  # warnings last


def table(plans: Sequence[StrategyPlan], device_memory: int) -> list[str]:
    """A column per strategy, or number of ranks: what each rank holds, sends and takes."""
    possible = [option for option in plans if not option.problem]
    rows = [["on each rank", *(option.name + " *" * option.chosen for option in possible)]]

    def add(label: str, sizes: Iterable[float]) -> None:
        if any(sizes := list(sizes)):
            rows.append([label, *(size_text(size) if size else "" for size in sizes)])

    for label in HELD:
        add(label, (option.memory[label] for option in possible))
    for phase in PHASES:
        add(f"peak in {phase}", (option.peaks.get(phase, 0) for option in possible))
    if device_memory:
        left = [f"left of {size_text(device_memory)}"]
        for option in possible:
            room = size_text(device_memory - option.on_device)
            left.append("too large" if option.fits is False else room)
        rows.append(left)
    add("sent per step", (option.sent_bytes for option in possible))
    for name in (*PHASES, "sending", "step"):
        if any(option.seconds for option in possible):
            times = [f"{1000 * option.seconds[name]:,.1f} ms" for option in possible]
            rows.append([f"time, {name}", *times])
    rows.append(["computes in", *(option.precision for option in possible)])
    rule = ["-" * max(map(len, column)) for column in zip(*rows, strict=True)]
    return columns([rows[0], rule, *rows[1:]])


if __name__ == "__main__":
    sys.exit(main())
