"""python -m dist_amp.plan [--world_size N] [--device NAME | --device_memory_GiB G]
[--largest_micro_batch] [--over_ranks] [--json] [settings as for dist_amp.train]

Predict what a config will do on any number of ranks, without a GPU: batch and epochs, memory per
rank, bytes sent and time per step, checkpoint size, and the strategy that "auto" picks. Nothing is
trained or written. A step of your task runs on tensors without memory, of the shapes of the first
micro-batch; its allocations are counted. If what the config runs does not fit, the least change
that does is looked for. Plans are for GPUs, or with --run.device cpu for processes on a CPU.

Not included: the memory of CUDA and NCCL, about 1 to 2 GiB of each GPU (assumed), what kernels need
within themselves, compiled blocks, and diagnostics. Times assume 60 % of the device's arithmetic,
80 % of its bandwidths, and sending that overlaps computing.

Exit status: that of the training it plans: 64 for a wrong setting, 65 for the data or the task.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from dist_amp.bit_exact import exact_config
from dist_amp.commands.devices import Device, find_device
from dist_amp.commands.estimates import (
    Memory,
    Setup,
    Step,
    checkpoint_bytes,
    memory_of,
    of_a_step,
)
from dist_amp.commands.simulation import ImaginedWorld, Simulation, simulate
from dist_amp.config.auto import (
    SHARDED,
    accumulation_steps,
    pick_cast,
    pick_reduction,
    pick_strategy,
    replicas_of,
)
from dist_amp.config.load import load_config
from dist_amp.config.memory import USABLE, auto_strategy, capacity_of, size_text
from dist_amp.config.task_class import build_task
from dist_amp.config.validate import check_length, check_parallel
from dist_amp.errors import ConfigError, DataError, Failure, first_line, in_one_line
from dist_amp.loading.loader import Fetch
from dist_amp.loading.plan import Shard
from dist_amp.precision import Precision, build_precision
from dist_amp.scaling.blocks import blocks_of, parameters_in, pick_blocks, units_of
from dist_amp.scaling.compile import pick_compile
from dist_amp.scaling.float32 import to_float32
from dist_amp.scaling.meta import built_on_meta, parameters_on_meta
from dist_amp.settings import Config, ParallelConfig, Strategy
from dist_amp.supervise.command_line import Parser, columns, exit_status
from dist_amp.supervise.preflight import BESIDES_KEPT
from dist_amp.task import Task, build_split, built_model
from dist_amp.telemetry.mfu import flops_per_item
from dist_amp.world import World

RANKS_PER_MACHINE = 8  # assumed where no ranks were launched

ROWS = {
    "parameters": "parameters, buffers",
    "gradients": "gradients",
    "moments": "optimizer state",
    "average": "moving average",
}
PHASES = ("forward", "backward", "optimizer")
LIMITS = ("compute", "memory")
LARGEST = 2**16  # micro-batches beyond it are not tried
MANY_RANKS = (8, 64, 512, 4096)


def main(argv: Sequence[str] | None = None) -> int:
    return exit_status(run, argv)


def run(argv: Sequence[str]) -> None:
    parser = Parser("python -m dist_amp.plan", __doc__)
    parser.add_argument(
        "--world_size",
        "--world-size",
        type=int,
        default=torch.cuda.device_count() or RANKS_PER_MACHINE,
        help="ranks; default: this machine's GPUs, or 8",
    )
    parser.add_argument(
        "--device_memory_GiB",
        "--device-memory-GiB",
        type=float,
        default=0,
        help="of each rank; default: this machine's",
    )
    parser.add_argument("--device", default="", help="such as h100-80gb; its memory and its speed")
    parser.add_argument(
        "--largest_micro_batch",
        "--largest-micro-batch",
        action="store_true",
        help="find the largest train.micro_batch_size that fits",
    )
    parser.add_argument(
        "--over_ranks",
        "--over-ranks",
        action="store_true",
        help="a table over 8, 64, 512 and 4,096 ranks",
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
    if options.json:
        print(json.dumps(asdict(plan), indent=2), flush=True)
    else:
        print("\n".join(lines(plan, config)), flush=True)
    if refused is not None:
        raise refused


# --- the plan


@dataclass
class StrategyPlan:
    """One strategy. Bytes are of the rank that holds most."""

    name: str
    chosen: bool
    fits: bool | None = None  # into the device, with room for fragments; None: not known
    precision: str = ""  # and who casts
    memory: Memory | None = None
    peaks: dict[str, int] = field(default_factory=dict)  # on the device, by phase
    on_device: int = 0  # the highest of them; without one, of the state
    seconds: dict[str, float] = field(default_factory=dict)  # by phase; sending; the whole step
    limits: dict[str, str] = field(default_factory=dict)  # of each phase: compute or memory
    sent_bytes: float = 0.0  # by each rank in a step
    collectives: int = 0
    without_peaks: str = ""  # why they are not known: the step needs values
    problem: str = ""  # why training would refuse it


@dataclass
class Plan:
    """What --json prints; 0 where it is not known, and the notes have the reasons."""

    task: str
    model: dict[str, Any]
    world_size: int
    device: str
    device_memory_bytes: int
    micro_batch_size: int
    micro_batches: int
    samples_per_step: int
    steps: int
    tokens_per_step: int = 0
    samples: int = 0
    steps_per_epoch: int = 0
    flops_per_sample: float = 0.0
    checkpoint_bytes: int = 0
    checkpoints_on_disk: int = 0  # the most at once
    fits_with: str = ""  # settings that make it fit, if it doesn't
    largest_micro_batch: int = 0
    over_ranks: list[dict[str, Any]] = field(default_factory=list)
    strategies: list[StrategyPlan] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


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
    job = Job(config, task, module, world, device_memory, gpu)
    refused = None
    try:
        job = plan_data(plan, job)
    except Exception as error:
        world.warn(f"training would end at its data: {in_one_line(error)}")
        refused = error
    chosen = plan_strategies(plan, job, only_chosen)
    if largest:
        if not (chosen and device_memory):
            raise ConfigError("--largest_micro_batch needs --device or --device_memory_GiB")
        train = replace(config.train, global_batch_size="auto")
        any_batch = replace(job, config=replace(config, train=train))
        plan.largest_micro_batch = largest_micro_batch(chosen, any_batch)  # type: ignore[arg-type]
    try:
        with parameters_on_meta():  # the task may build its model again
            plan.flops_per_sample = flops_per_item(task, module)
    except DataError as error:
        world.say(f"without memory for the parameters {error}; FLOPs are left out")
    return plan, refused


def build_module(task: Task, config: Config, world: World) -> nn.Module:
    """The model on the meta device; whole, with a warning, if it can't be built there."""
    module, problem = built_on_meta(task, torch.device("cpu"))
    if problem and not hasattr(task, "load"):
        world.warn(
            f"every rank will hold the whole model in host memory until it is sharded: {problem}"
        )
    if module is None:
        module = built_model(task)
    if converted := to_float32(module, frozen_too=not config.precision.use_amp):
        world.say(converted)
    return module


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


def plan_strategies(plan: Plan, job: Job, only_chosen: bool) -> Strategy | str:
    """Every strategy, and what a checkpoint takes; returns the chosen strategy, if it is known.

    Errors: what training raises for the chosen one.
    """
    config, world = job.config, job.world
    chosen = choose(config.parallel, job.module, world, plan.device_memory_bytes)
    if hasattr(job.task, "optimizer"):
        world.say(
            "the task's optimizer is assumed to keep two values per parameter, as AdamW does, and "
            "to send nothing"
        )
    for name, strategy, parallel in candidates(config.parallel, world, job.micro_batches):
        is_chosen = strategy == chosen and parallel == config.parallel
        if only_chosen and not is_chosen:
            continue
        # The warnings about other strategies are of no interest.
        noted_in = world if is_chosen else replace(world, notes=[])
        candidate = replace(job, config=replace(config, parallel=parallel), world=noted_in)
        try:
            one, setup = plan_strategy(name, strategy, candidate)
        except Failure as error:
            if is_chosen:
                raise
            plan.strategies.append(StrategyPlan(name, chosen=False, problem=first_line(error)))
            continue
        one.chosen = is_chosen
        plan.strategies.append(one)
        if is_chosen or not plan.checkpoint_bytes:
            plan.checkpoint_bytes = checkpoint_bytes(setup)
        if is_chosen and one.fits is False:
            plan.fits_with = settings_that_fit(strategy, candidate)
    if config.checkpoint.every != "off":
        to_come = math.ceil(config.train.steps / config.checkpoint.every)
        plan.checkpoints_on_disk = min(config.checkpoint.keep + BESIDES_KEPT, to_come)
    return chosen


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


# --- what fits


def with_settings(config: Config, settings: dict[str, Any]) -> Config:
    """The config with these keys set."""
    for key, value in settings.items():
        section, name = key.split(".")
        changed = replace(getattr(config, section), **{name: value})
        config = replace(config, **{section: changed})
    return config


def in_words(settings: dict[str, Any]) -> str:
    return " ".join(f"--{key} {str(value).lower()}" for key, value in settings.items())


def settings_that_fit(strategy: Strategy, job: Job) -> str:
    """The least costly change that fits, as a command line; "" if none does."""
    for settings in changes(strategy, job):
        if fitting(settings["parallel.strategy"], job, settings):
            return in_words(settings)
    return ""


def fitting(strategy: Strategy, job: Job, settings: dict[str, Any]) -> bool:
    """Whether the config fits with these settings."""
    config = with_settings(job.config, settings)
    size = config.train.micro_batch_size
    batch = job.batch
    if size != job.config.train.micro_batch_size and batch is not None:
        batch = batch_of(config, job.task, job.dataset)
    world = replace(job.world, notes=[])
    changed = replace(job, config=config, world=world, batch=batch)
    try:
        return bool(plan_strategy("", strategy, changed)[0].fits)
    except Failure:
        return False


def changes(strategy: Strategy, job: Job) -> Iterator[dict[str, Any]]:
    """Settings that take less memory than the config's, the least costly first."""
    strategies = [strategy]
    if strategy == "ddp":
        strategies.append("fsdp")
    for used in strategies:
        first = {"parallel.strategy": used}
        for kept in ("none", "selective", "full"):
            second = first | {"parallel.activation_checkpointing": kept}
            if (used, kept) != (strategy, "none"):
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


def largest_micro_batch(strategy: Strategy, job: Job) -> int:
    """The largest train.micro_batch_size that fits, within 1/16; 0 if none does."""

    def fits(size: int) -> bool:
        return fitting(strategy, job, {"train.micro_batch_size": size})

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


# --- strategies


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
        world.say("blocks are planned as they are without compile.blocks")
    if config.precision.matmul == "fp8":
        world.say("precision.matmul=fp8 is planned as bf16: products take less time")
    sharded = strategy in SHARDED
    precision = build_precision(cast, sharded, computes_on)
    if sharded:
        units_of(task, module, pick_blocks(strategy, task, module, world))
    return precision


def plan_data(plan: Plan, job: Job) -> Job:
    """Samples, epochs and tokens; the job with its data. Errors: what would end the training."""
    config, task = job.config, job.task
    size = config.train.micro_batch_size
    dataset = build_split(task, "train", World())
    if dataset is not None:
        plan.samples = len(dataset)
    check_length(plan.samples, size, plan.micro_batches, job.world)
    plan.steps_per_epoch, rest = divmod(plan.samples, plan.samples_per_step)
    if rest and not config.data.drop_last:
        plan.steps_per_epoch += 1
    batch = batch_of(config, task, dataset)
    if hasattr(task, "tokens"):
        plan.tokens_per_step = task.tokens(batch) * plan.samples_per_step // size
    return replace(job, dataset=dataset, batch=batch)


def batch_of(config: Config, task: Any, dataset: Any) -> Any:
    """A micro-batch of the first samples, which come again if there are too few. Errors: its."""
    indices = [index % len(dataset) for index in range(config.train.micro_batch_size)]
    batch = Fetch(dataset, task, "training")[Shard(tuple(indices), seed=config.run.seed)]
    if isinstance(batch, DataError):
        raise batch
    return batch


# --- as text


def lines(plan: Plan, config: Config) -> list[str]:
    text = [f"{name:<12}{value}" for name, value in heads(plan, config).items() if value]
    text += ["", *table(plan), ""]
    if any(one.chosen for one in plan.strategies):
        text.append("* what this config runs")
    text += [f"{one.name}: not possible: {one.problem}" for one in plan.strategies if one.problem]
    for problem in sorted({one.without_peaks for one in plan.strategies} - {""}):
        text.append(f"without activations: a step on tensors without values raised {problem}")
    if plan.fits_with:
        text.append(f"it fits with: {plan.fits_with}")
    elif all(one.fits is False for one in plan.strategies if not one.problem):
        text.append(f"nothing fits into {100 * USABLE:.0f} % of the device; use more ranks")
    if plan.largest_micro_batch:
        text.append(f"largest train.micro_batch_size that fits: {plan.largest_micro_batch}")
    if plan.over_ranks:
        text += [*table_over_ranks(plan), ""]
    notes = [note for note in plan.notes if not note.startswith("blocks: ")]
    return text + sorted(notes, key=lambda note: note.startswith("warning: "))  # warnings last


def heads(plan: Plan, config: Config) -> dict[str, str]:
    """{heading: facts}; "" for those that are not known."""
    model = plan.model
    blocks = ", ".join(f"{count} x {name}" for name, count in model["blocks"].items())
    share = 100 * model["in_blocks"] / model["parameters"]
    ranks = f"{plan.world_size:,} x {plan.device}"
    if plan.device_memory_bytes:
        ranks += f", {size_text(plan.device_memory_bytes)} each"
    if plan.world_size > RANKS_PER_MACHINE:
        ranks += f", {RANKS_PER_MACHINE} to a machine (assumed)"
    batch = f"{plan.samples_per_step:,} samples per step = {plan.world_size:,} ranks x "
    batch += f"{plan.micro_batches} x micro-batch of {plan.micro_batch_size}"
    data = compute = ""
    if plan.steps_per_epoch:
        epochs = plan.steps / plan.steps_per_epoch
        data = f"{plan.samples:,} samples, {plan.steps_per_epoch:,} steps per epoch; "
        data += f"{plan.steps:,} steps are {epochs:.3g} epochs"
    if plan.tokens_per_step:
        batch += f"; {plan.tokens_per_step:,} tokens per step"
        data += f", {plan.steps * plan.tokens_per_step / 1e6:,.1f} M tokens"
    if plan.flops_per_sample:
        flops = plan.flops_per_sample * plan.samples_per_step / plan.world_size
        compute = f"{plan.flops_per_sample:.4g} FLOP per sample, {flops:.4g} per rank and step"
    checkpoint = "off"
    if plan.checkpoints_on_disk:
        on_disk = size_text(plan.checkpoints_on_disk * plan.checkpoint_bytes)
        checkpoint = f"{size_text(plan.checkpoint_bytes)}; at most {plan.checkpoints_on_disk} on "
        checkpoint += f"the disk with keep={config.checkpoint.keep}: {on_disk}"
    return {
        "task": plan.task,
        "model": f"{model['class']}, {model['parameters']:,} parameters, {model['trained']:,} "
        f"trained; {blocks or 'no blocks'} with {share:.0f} % of them",
        "ranks": ranks,
        "batch": batch,
        "data": data,
        "compute": compute,
        "checkpoint": checkpoint,
    }


def time_text(one: StrategyPlan, phase: str) -> str:
    """Such as "12.3 ms, memory", by what limits it."""
    if not one.seconds:
        return ""
    text = f"{1000 * one.seconds[phase]:,.1f} ms"
    if phase in one.limits:
        text += f", {one.limits[phase]}"
    return text


def table_over_ranks(plan: Plan) -> list[str]:
    """A row per number of ranks."""
    problems = []
    rows = [["ranks", "strategy", "on each rank", "fits", "sent per step", "time of a step"]]
    for row in plan.over_ranks:
        if "on_device" not in row:
            rows.append([f"{row['ranks']:,}", "not known", *4 * [""]])
            if "problem" in row:
                problems.append(f"{row['ranks']:,} ranks: {row['problem']}")
            continue
        fits = "not known"
        if row["fits"] is not None:
            fits = "yes" if row["fits"] else "no"
        seconds = ""
        if row["seconds"]:
            seconds = f"{1000 * row['seconds']:,.1f} ms"
        sizes = [size_text(row["on_device"]), fits, size_text(row["sent_bytes"])]
        rows.append([f"{row['ranks']:,}", row["strategy"], *sizes, seconds])
    return [*columns(rows, left=2), *problems]


def table(plan: Plan) -> list[str]:
    """A column per strategy: what each rank holds, and what it sends."""
    strategies = [one for one in plan.strategies if not one.problem]
    memories = [one.memory for one in strategies if one.memory]
    rows = [["on each rank", *(one.name + " *" * one.chosen for one in strategies)]]

    def add(label: str, values: Iterable[float]) -> None:
        if any(values := list(values)):
            rows.append([label, *(size_text(value) if value else "" for value in values)])

    for name, label in ROWS.items():
        add(label, (getattr(memory, name) for memory in memories))
    for phase in PHASES:
        add(f"peak in {phase}", (one.peaks.get(phase, 0) for one in strategies))
    if not any(one.peaks for one in strategies):
        add("sum, without activations", (memory.total for memory in memories))
    if plan.device_memory_bytes:
        left = [f"left of {size_text(plan.device_memory_bytes)}"]
        for one in strategies:
            room = size_text(plan.device_memory_bytes - one.on_device)
            left.append("too large" if one.fits is False else room)
        rows.append(left)
    add("sent per step", (one.sent_bytes for one in strategies))
    for phase in (*PHASES, "sending"):
        if any(one.seconds for one in strategies):
            rows.append([f"time, {phase}", *(time_text(one, phase) for one in strategies)])
    if any(one.seconds for one in strategies):
        rows.append(["time, step", *(time_text(one, "step") for one in strategies)])
    rows.append(["computes in", *(one.precision for one in strategies)])
    rule = ["-" * max(map(len, column)) for column in zip(*rows, strict=True)]
    return columns([rows[0], rule, *rows[1:]])


if __name__ == "__main__":
    sys.exit(main())
