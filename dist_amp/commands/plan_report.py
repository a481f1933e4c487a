"""A plan: as data, which --json prints, and as text."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dist_amp.config.memory import size_text
from dist_amp.settings import Config
from dist_amp.supervise.command_line import columns

RANKS_PER_MACHINE = 8  # assumed where no ranks were launched
USABLE = 0.95  # the share of a device to plan for; fragmentation takes the rest. Assumed.

ROWS = {
    "parameters": "parameters, buffers",
    "gradients": "gradients",
    "moments": "optimizer state",
    "average": "moving average",
}

PHASES = ("forward", "backward", "optimizer")


@dataclass
class StrategyPlan:
    """One strategy: what a step takes of a rank, or the problem for which training refuses it."""

    name: str = ""
    ranks: int = 0
    chosen: bool = False
    problem: str = ""
    fits: bool | None = None  # into the device, with room for fragments; None: not known
    precision: str = ""  # and who casts
    memory: dict[str, int] = field(default_factory=dict)  # bytes of what is kept, by ROWS
    peaks: dict[str, int] = field(default_factory=dict)  # bytes on the device, by phase
    on_device: int = 0  # the highest of them
    seconds: dict[str, float] = field(default_factory=dict)  # by phase; sending; the whole step
    limits: dict[str, str] = field(default_factory=dict)  # of each phase: compute or memory
    sent_bytes: float = 0.0
    collectives: int = 0
    checkpoint_bytes: int = 0  # of all ranks


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
    over_ranks: list[StrategyPlan] = field(default_factory=list)
    strategies: list[StrategyPlan] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def lines(plan: Plan, config: Config) -> list[str]:
    text = [f"{name:<12}{value}" for name, value in heads(plan, config).items() if value]
    text += ["", *table(plan.strategies, plan.device_memory_bytes), ""]
    if any(one.chosen for one in plan.strategies):
        text.append("* what this config runs")
    for one in (*plan.strategies, *plan.over_ranks):
        if one.problem:
            text.append(f"{one.name}: not possible: {one.problem}")
    if plan.fits_with:
        text.append(f"it fits with: {plan.fits_with}")
    elif all(one.fits is False for one in plan.strategies if not one.problem):
        text.append(f"nothing fits into {100 * USABLE:.0f} % of the device; use more ranks")
    if plan.largest_micro_batch:
        text.append(f"largest train.micro_batch_size that fits: {plan.largest_micro_batch}")
    if plan.over_ranks:
        text += ["", *table(plan.over_ranks, plan.device_memory_bytes), ""]
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


def table(plans: list[StrategyPlan], device_memory: int) -> list[str]:
    """A column per strategy, or number of ranks: what each rank holds, sends and takes."""
    strategies = [one for one in plans if not one.problem]
    rows = [["on each rank", *(one.name + " *" * one.chosen for one in strategies)]]

    def add(label: str, values: Iterable[float]) -> None:
        if any(values := list(values)):
            rows.append([label, *(size_text(value) if value else "" for value in values)])

    for name, label in ROWS.items():
        add(label, (one.memory[name] for one in strategies))
    for phase in PHASES:
        add(f"peak in {phase}", (one.peaks.get(phase, 0) for one in strategies))
    if device_memory:
        left = [f"left of {size_text(device_memory)}"]
        for one in strategies:
            room = size_text(device_memory - one.on_device)
            left.append("too large" if one.fits is False else room)
        rows.append(left)
    add("sent per step", (one.sent_bytes for one in strategies))
    if any(one.seconds for one in strategies):
        for phase in (*PHASES, "sending", "step"):
            rows.append([f"time, {phase}", *(time_text(one, phase) for one in strategies)])
    rows.append(["computes in", *(one.precision for one in strategies)])
    rule = ["-" * max(map(len, column)) for column in zip(*rows, strict=True)]
    return columns([rows[0], rule, *rows[1:]])


def time_text(one: StrategyPlan, phase: str) -> str:
    """Such as "12.3 ms, memory", by what limits it."""
    if not one.seconds:
        return ""
    text = f"{1000 * one.seconds[phase]:,.1f} ms"
    if phase in one.limits:
        text += f", {one.limits[phase]}"
    return text
