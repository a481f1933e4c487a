"""python -m dist_amp.plan [--world_size N] [--device_memory_GiB G] [--json] [settings as for
dist_amp.train]

Predict what a config will do on any number of ranks, on one machine and without a GPU: batch and
epochs, memory per rank, bytes sent per step, checkpoint size, and the strategy that "auto" picks.
Nothing is trained or written, and the model is built without memory for its parameters. Plans are
for GPUs, or with --run.device cpu for processes on a CPU.

Activations are not included, because they depend on kernels and the compiler; `python -m benchmarks
activations` and a few steps measure them. Nor is the memory of CUDA and NCCL, about 1 to 2 GiB of
each GPU (assumed).

Exit status: that of the training it plans: 64 for a wrong setting, 65 for the data or the task.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout

import torch

from dist_amp.commands.estimates import RANKS_PER_MACHINE
from dist_amp.commands.planned import Plan, StrategyPlan, make_plan
from dist_amp.config.load import load_config
from dist_amp.config.memory import USABLE, size_text
from dist_amp.errors import ConfigError, DataError, in_one_line
from dist_amp.supervise.command_line import Parser, columns, exit_status

ROWS = {
    "parameters": "parameters, buffers",
    "gradients": "gradients",
    "moments": "optimizer state",
    "average": "moving average",
    "computing": "gathered or cast weights",
}

PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return exit_status(run, argv)


def run(argv: Sequence[str]) -> int:
    options, words = parse(argv)
    device_memory = 0
    if options.device_memory_GiB is not None:
        device_memory = round(options.device_memory_GiB * 2**30)
    try:
        with redirect_stdout(sys.stderr):  # what the task prints is no part of the plan
            plan = make_plan(load_config(words), options.world_size, device_memory)
    except SystemExit as error:
        raise DataError(
            f"the task ended the process: {in_one_line(error)}; raise an error that says why"
        ) from error
    if options.json:
        print(json.dumps(facts(plan), indent=2), flush=True)
    else:
        print("\n".join(lines(plan)), flush=True)
    if plan.refused is not None:
        raise plan.refused
    return 0


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(this command's options, the settings). Errors: ConfigError."""
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
        help="of each rank; default: this machine's",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    options, words = parser.parse_known_args(argv)
    if options.world_size < 1:
        raise ConfigError(f"--world_size={options.world_size} must be at least 1")
    memory = options.device_memory_GiB
    if memory is not None and not 0 < memory < float("inf"):
        raise ConfigError(f"--device_memory_GiB={memory:g} must be above 0, such as 80")
    return options, words


def lines(plan: Plan) -> list[str]:
    """The plan as text."""
    heads = {
        "task": plan.config.task.target,
        "model": model_text(plan),
        "ranks": ranks_text(plan),
        "batch": batch_text(plan),
        "data": data_text(plan),
        "compute": compute_text(plan),
        "checkpoint": checkpoint_text(plan),
    }
    text = [f"{name:<12}{value}" for name, value in heads.items() if value]
    text += ["", *table(plan), ""]
    if any(one.chosen for one in plan.strategies):
        text.append("* what this config runs")
    text += [f"{one.name}: not possible: {one.problem}" for one in plan.strategies if one.problem]
    if plan.device_memory:
        text.append(fit_text(plan))
    notes = [note for note in dict.fromkeys(plan.world.notes) if not note.startswith("blocks: ")]
    return text + sorted(notes, key=lambda note: note.startswith("warning: "))  # warnings last


def model_text(plan: Plan) -> str:
    trained, total = plan.parameters
    of_it = "all trained"
    if trained < total:
        of_it = f"{trained:,} trained ({100 * trained / total:.2g} %)"
    blocks = "no blocks"
    if plan.blocks:
        blocks = ", ".join(f"{count} x {name}" for name, count in plan.blocks.items())
        blocks += f" with {100 * plan.share_of_blocks:.0f} % of them"
    return f"{type(plan.module).__name__}, {total:,} parameters, {of_it}; {blocks}"


def ranks_text(plan: Plan) -> str:
    world = plan.world
    on_gpus = world.device.type == "cuda"
    singular, plural = ("GPU", "GPUs") if on_gpus else ("process", "processes")
    text = f"{world.world_size:,} {singular if world.world_size == 1 else plural}"
    if plan.device_memory:
        text += f", {size_text(plan.device_memory)} each"
    if world.world_size > RANKS_PER_MACHINE:
        text += f", {world.local_world_size} to a machine (assumed)"
    return text


def batch_text(plan: Plan) -> str:
    plural = "es" if plan.micro_batches > 1 else ""
    text = (
        f"{plan.samples_per_step:,} samples per step = {plan.config.train.micro_batch_size} x "
        f"{plan.world.world_size:,} ranks x {plan.micro_batches} micro-batch{plural}"
    )
    if plan.tokens_per_step:
        text += f"; {plan.tokens_per_step:,} tokens per step"
    return text


def data_text(plan: Plan) -> str:
    if not plan.samples:
        return ""
    steps = plan.config.train.steps
    text = f"{plan.samples:,} samples"
    if plan.steps_per_epoch:
        epochs = steps / plan.steps_per_epoch
        text += (
            f", {plan.steps_per_epoch:,} steps per epoch; {steps:,} steps are {epochs:.3g} epochs"
        )
    if plan.tokens_per_step:
        text += f", {steps * plan.tokens_per_step / 1e6:,.1f} M tokens"
    return text


def compute_text(plan: Plan) -> str:
    if not plan.flops_per_sample:
        return ""
    per_rank = plan.flops_per_sample * plan.samples_per_step / plan.world.world_size
    text = f"{short(plan.flops_per_sample)}FLOP per sample, {short(per_rank)}FLOP per rank and step"
    if plan.peak_flops:
        seconds = per_rank / plan.peak_flops / 0.4
        text += (
            f"; at {short(plan.peak_flops)}FLOP/s and 40 % MFU (assumed) {seconds:.3g} s per step"
        )
        text += f", {seconds * plan.config.train.steps / 3600:,.3g} h for all steps"
    return text


def short(number: float) -> str:
    """A number in four digits, with a prefix of its unit: "2.62 G"."""
    power = 0
    while number >= 1000 and power < len(PREFIXES) - 1:
        number /= 1000
        power += 1
    return f"{number:.4g} {PREFIXES[power]}"


def checkpoint_text(plan: Plan) -> str:
    if not plan.checkpoints:
        return "off"
    return (
        f"{size_text(plan.checkpoint_bytes)}; at most {plan.checkpoints} on the disk with "
        f"keep={plan.config.checkpoint.keep}: {size_text(plan.checkpoints * plan.checkpoint_bytes)}"
    )


def table(plan: Plan) -> list[str]:
    """A column per strategy: what each rank holds, and what it sends."""
    strategies = []
    memories = []
    for one in plan.strategies:
        if one.memory is not None:
            strategies.append(one)
            memories.append(one.memory)
    unit, scale = "MiB", 2**20
    if max((memory.total for memory in memories), default=0) >= 2**30:
        unit, scale = "GiB", 2**30
    sent_unit, sent_scale = "MB", 1e6
    if max((one.sent_bytes for one in strategies), default=0) >= 1e9:
        sent_unit, sent_scale = "GB", 1e9

    def row(label: str, values: Iterable[float], divisor: float) -> list[str]:
        return [label, *(f"{value / divisor:,.2f}" if value else "-" for value in values)]

    head = [f"{unit} on each rank"]
    for one in strategies:
        head.append(f"{one.name} *" if one.chosen else one.name)
    rows = [head]
    for name, label in ROWS.items():
        values = [getattr(memory, name) for memory in memories]
        if any(values):
            rows.append(row(label, values, scale))
    totals = [memory.total for memory in memories]
    on_device = [one.on_device for one in strategies]
    rows.append(row("sum", totals, scale))
    if on_device != totals:
        rows.append(row("of it on the device", on_device, scale))
    if plan.device_memory:
        left = [f"left of {size_text(plan.device_memory)}"]
        for one in strategies:
            room = size_text(plan.device_memory - one.on_device)
            left.append(room if fits(plan, one) else "too large")
        rows.append(left)
    if plan.world.world_size > 1:
        sent = (one.sent_bytes for one in strategies)
        rows.append(row(f"sent per step, {sent_unit}", sent, sent_scale))
    rows.append(["computes in", *(one.precision for one in strategies)])
    rule = ["-" * max(map(len, column)) for column in zip(*rows, strict=True)]
    return columns([rows[0], rule, *rows[1:]])


def fits(plan: Plan, one: StrategyPlan) -> bool:
    """Whether a rank's device holds it, leaving a share for fragments, but none for activations."""
    return not one.problem and one.on_device <= USABLE * plan.device_memory


def fit_text(plan: Plan) -> str:
    """What the row of what is left means, in a sentence."""
    fitting = [one.name for one in plan.strategies if fits(plan, one)]
    if not fitting:
        more = "nor does fsdp on more ranks"
        if plan.fits_from:
            every = " (every)" if plan.micro_batches > 1 else ""
            more = f"fsdp{every} does on {plan.fits_from:,} ranks"
        return f"nothing fits into {100 * USABLE:.0f} % of the device; {more}"
    text = f"{', '.join(fitting)} fit{'s' if len(fitting) == 1 else ''}, without activations"
    for one in plan.strategies:
        if one.chosen and not fits(plan, one):
            text += f"; {one.name}, which is chosen, does not"
    return text


def facts(plan: Plan) -> dict[str, object]:
    """The plan as JSON; bytes and counts."""
    trained, total = plan.parameters
    strategies = []
    for one in plan.strategies:
        strategy = one._asdict()
        strategy["memory"] = one.memory and one.memory._asdict()
        strategy["fits"] = fits(plan, one) if plan.device_memory else None
        strategies.append(strategy)
    return {
        "task": plan.config.task.target,
        "model": {
            "class": type(plan.module).__name__,
            "parameters": total,
            "trained": trained,
            "blocks": plan.blocks,
        },
        "world_size": plan.world.world_size,
        "device": plan.world.device.type,
        "device_memory_bytes": plan.device_memory,
        "micro_batch_size": plan.config.train.micro_batch_size,
        "micro_batches": plan.micro_batches,
        "samples_per_step": plan.samples_per_step,
        "tokens_per_step": plan.tokens_per_step,
        "samples": plan.samples,
        "steps_per_epoch": plan.steps_per_epoch,
        "steps": plan.config.train.steps,
        "flops_per_sample": plan.flops_per_sample,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "checkpoints_on_disk": plan.checkpoints,
        "strategies": strategies,
        "fits_from_ranks": plan.fits_from,
        "notes": list(dict.fromkeys(plan.world.notes)),
    }


if __name__ == "__main__":
    sys.exit(main())
