"""python -m dist_amp.plan [--world_size N] [--device_memory_GiB G] [--json] [settings as for
dist_amp.train]

Predict what a config will do on any number of ranks, without a GPU: batch and epochs, memory per
rank, bytes sent per step, checkpoint size, and the strategy that "auto" picks. Nothing is trained
or written, and the model is built without memory for its parameters. Plans are for GPUs, or with
--run.device cpu for processes on a CPU. Activations are not included, nor the memory of CUDA and
NCCL, about 1 to 2 GiB of each GPU (assumed); `python -m benchmarks activations` measures the first.

Exit status: that of the training it plans: 64 for a wrong setting, 65 for the data or the task.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from dist_amp.bit_exact import exact_config
from dist_amp.commands.estimates import Memory, Setup, checkpoint_bytes, memory_of, of_a_step
from dist_amp.config.auto import SHARDED, accumulation_steps, pick_cast, pick_strategy, replicas_of
from dist_amp.config.load import load_config
from dist_amp.config.memory import USABLE, auto_strategy, capacity_of, size_text
from dist_amp.config.task_class import build_task
from dist_amp.config.validate import check_length, check_parallel
from dist_amp.errors import ConfigError, DataError, Failure, first_line, in_one_line
from dist_amp.loading.loader import Fetch
from dist_amp.loading.plan import Shard
from dist_amp.precision import Precision, build_precision
from dist_amp.scaling.blocks import blocks_of, parameters_in, pick_blocks, units_of
from dist_amp.scaling.compile import check_compile
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
    "computing": "gathered or cast weights",
}


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
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    options, words = parser.parse_known_args(argv)
    memory = options.device_memory_GiB
    if options.world_size < 1 or not 0 <= memory < math.inf:
        raise ConfigError(
            f"--world_size={options.world_size} must be at least 1, and "
            f"--device_memory_GiB={memory:g} at least 0"
        )
    try:
        with redirect_stdout(sys.stderr):  # what the task prints is no part of the plan
            config = load_config(words)
            plan, refused = make_plan(config, options.world_size, round(memory * 2**30))
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
    fits: bool | None = None  # into the device, without activations but with room for fragments
    precision: str = ""  # and who casts
    memory: Memory | None = None
    on_device: int = 0  # of the memory; under CPU offload the rest is the host's
    sent_bytes: float = 0.0  # by each rank in a step
    collectives: int = 0
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
    strategies: list[StrategyPlan] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SimulatedWorld(World):
    """Ranks that do not exist; what training would print at its start is kept in `notes`."""

    notes: list[str] = field(default_factory=list, compare=False)

    def say(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}")


def make_plan(
    config: Config, world_size: int, device_memory: int
) -> tuple[Plan, BaseException | None]:
    """(the plan, the error by which the training would end at its data).

    device_memory: bytes of each rank's; 0: this machine's own, if it has such a device. Errors:
    those that training raises when it builds the task and its model.
    """
    device = torch.device("cpu" if config.run.device == "cpu" else "cuda")
    per_machine = min(world_size, RANKS_PER_MACHINE)
    world = SimulatedWorld(world_size=world_size, local_world_size=per_machine, device=device)
    if config.parallel.bit_exact:
        config = exact_config(config, world)
    if not device_memory and (device.type == "cpu" or torch.cuda.is_available()):
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
        device=device.type,
        device_memory_bytes=device_memory,
        micro_batch_size=config.train.micro_batch_size,
        micro_batches=micro_batches,
        samples_per_step=config.train.micro_batch_size * world_size * micro_batches,
        steps=config.train.steps,
        notes=world.notes,
    )
    plan_strategies(plan, config, task, module, world)
    try:
        with parameters_on_meta():  # the task may build its model again
            plan.flops_per_sample = flops_per_item(task, module)
    except DataError as error:
        world.say(f"without memory for the parameters {error}; FLOPs are left out")
    return plan, plan_data(plan, config, task, world)


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


def plan_strategies(
    plan: Plan, config: Config, task: Task, module: nn.Module, world: SimulatedWorld
) -> None:
    """Every strategy, and what a checkpoint takes. Errors: what training raises for the chosen."""
    chosen = choose(config.parallel, module, world, plan.device_memory_bytes)
    if hasattr(task, "optimizer"):
        world.say(
            "the task's optimizer is assumed to keep two values per parameter, as AdamW does, and "
            "to send nothing"
        )
    for name, strategy, parallel in candidates(config.parallel, world, plan.micro_batches):
        one = StrategyPlan(name, chosen=strategy == chosen and parallel == config.parallel)
        plan.strategies.append(one)
        # The warnings about other strategies are of no interest.
        noted_in = world if one.chosen else replace(world, notes=[])
        candidate = replace(config, parallel=parallel)
        try:
            precision = checked(candidate, strategy, task, module, noted_in)
        except Failure as error:
            if one.chosen:
                raise
            one.problem = first_line(error)
            continue
        setup = Setup(candidate, strategy, world, task, module, precision, plan.micro_batches)
        step = of_a_step(setup)
        one.precision = precision.name
        if precision.cast_by != "nothing":
            one.precision += f", {precision.cast_by}"
        one.memory = memory_of(setup)
        one.on_device = one.memory.total
        if strategy in SHARDED and parallel.cpu_offload:
            one.on_device = one.memory.computing
            if parallel.accumulate_reduce == "last" and plan.micro_batches > 1:
                one.on_device += one.memory.gradients
        if plan.device_memory_bytes:
            one.fits = one.on_device <= USABLE * plan.device_memory_bytes
        one.sent_bytes = sum(times * collective.sent for collective, times in step.items())
        one.collectives = step.total()
        if one.chosen or not plan.checkpoint_bytes:
            plan.checkpoint_bytes = checkpoint_bytes(setup)
    if config.checkpoint.every != "off":
        to_come = math.ceil(config.train.steps / config.checkpoint.every)
        plan.checkpoints_on_disk = min(config.checkpoint.keep + BESIDES_KEPT, to_come)


def choose(config: ParallelConfig, module: nn.Module, world: World, memory: int) -> Strategy | str:
    """The strategy that training will pick; "" if that depends on a device that is not known."""
    if config.strategy != "auto" or world.world_size == 1:
        return pick_strategy(config, module, world)
    if world.device.type == "cpu":
        return auto_strategy(module, world, 0)
    if memory:
        return auto_strategy(module, world, memory)
    world.say("parallel.strategy=auto depends on the GPU's memory; give --device_memory_GiB")
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
    if computes_on is world or not config.compile.blocks:
        micro_batches = accumulation_steps(config.train, world.world_size)
        check_compile(config.compile, strategy, micro_batches, world)
    else:
        world.say("[compile] is not checked: there is no GPU here")
    sharded = strategy in SHARDED
    precision = build_precision(cast, sharded, computes_on)
    if sharded:
        units_of(task, module, pick_blocks(strategy, task, module, world))
    return precision


def plan_data(plan: Plan, config: Config, task: Any, world: World) -> Exception | None:
    """Samples, epochs and tokens; returns an error that would end the training."""
    size = config.train.micro_batch_size
    try:
        dataset = build_split(task, "train", World())
        if dataset is not None:
            plan.samples = len(dataset)
        check_length(plan.samples, size, plan.micro_batches, world)
        plan.steps_per_epoch, rest = divmod(plan.samples, plan.samples_per_step)
        if rest and not config.data.drop_last:
            plan.steps_per_epoch += 1
        if hasattr(task, "tokens"):
            shard = Shard(tuple(range(size)), seed=config.run.seed)
            batch = Fetch(dataset, task, "training")[shard]
            if isinstance(batch, DataError):
                raise batch
            plan.tokens_per_step = task.tokens(batch) * plan.samples_per_step // size
    except Exception as error:
        world.warn(f"training would end at its data: {in_one_line(error)}")
        return error
    return None


# --- as text


def lines(plan: Plan, config: Config) -> list[str]:
    text = [f"{name:<12}{value}" for name, value in heads(plan, config).items() if value]
    text += ["", *table(plan), ""]
    if any(one.chosen for one in plan.strategies):
        text.append("* what this config runs")
    text += [f"{one.name}: not possible: {one.problem}" for one in plan.strategies if one.problem]
    if plan.device_memory_bytes and not any(one.fits for one in plan.strategies):
        text.append(f"nothing fits into {100 * USABLE:.0f} % of the device; use more ranks")
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


def table(plan: Plan) -> list[str]:
    """A column per strategy: what each rank holds, and what it sends."""
    strategies = [one for one in plan.strategies if not one.problem]
    memories = [one.memory for one in strategies if one.memory]
    rows = [["on each rank", *(one.name + " *" * one.chosen for one in strategies)]]

    def add(label: str, values: Iterable[float]) -> None:
        if any(values := list(values)):
            rows.append([label, *map(size_text, values)])

    for name, label in ROWS.items():
        add(label, (getattr(memory, name) for memory in memories))
    add("sum, without activations", (memory.total for memory in memories))
    if plan.device_memory_bytes:
        left = [f"left of {size_text(plan.device_memory_bytes)}"]
        for one in strategies:
            room = size_text(plan.device_memory_bytes - one.on_device)
            left.append(room if one.fits else "too large")
        rows.append(left)
    add("sent per step", (one.sent_bytes for one in strategies))
    rows.append(["computes in", *(one.precision for one in strategies)])
    rule = ["-" * max(map(len, column)) for column in zip(*rows, strict=True)]
    return columns([rows[0], rule, *rows[1:]])


if __name__ == "__main__":
    sys.exit(main())
