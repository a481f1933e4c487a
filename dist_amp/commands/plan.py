"""python -m dist_amp.plan [--world_size N] [--device_memory_GiB G] [--json] [settings as for dist_amp.train]

What a config will do on any number of ranks, from one machine and without a GPU: batch and epochs, the memory of each
rank, what a step sends, the size of checkpoints, and the strategy that "auto" picks. Nothing is trained or written, and
the model is built without memory for its parameters. It plans for GPUs; --run.device cpu plans for processes on a CPU.

Activations are left out, because they depend on kernels and the compiler: `python -m dist_amp.bench activations` and a
few steps measure them. So is what CUDA and NCCL take, about 1 to 2 GiB of each GPU (assumed).

Exit status: that of the training it plans: 64 for a wrong setting, 65 for the data or the task.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

import torch
from tabulate import tabulate

from dist_amp.commands.command_line import Parser, exit_status
from dist_amp.commands.planned import Plan, Way, make_plan
from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError, DataError, in_one_line
from dist_amp.supervise.out_of_memory import USABLE, size
from dist_amp.verify.collectives import RANKS_PER_MACHINE

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
    parser = Parser("python -m dist_amp.plan", __doc__)
    default = torch.cuda.device_count() or RANKS_PER_MACHINE
    parser.add_argument(
        "--world_size", "--world-size", type=int, default=default, help="ranks; default: this machine's GPUs, or 8"
    )
    parser.add_argument(
        "--device_memory_GiB",
        "--device-memory-GiB",
        type=float,
        default=None,
        help="of each rank; default: this machine's",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options, words = parser.parse_known_args(argv)
    if options.world_size < 1:
        raise ConfigError(f"--world_size={options.world_size} must be at least 1")
    memory = options.device_memory_GiB
    if memory is not None and not 0 < memory < float("inf"):
        raise ConfigError(f"--device_memory_GiB={memory:g} must be above 0, such as 80")
    try:
        with redirect_stdout(sys.stderr):  # what the task prints is no part of the plan
            plan = make_plan(load_config(words), options.world_size, round((memory or 0) * 2**30))
    except SystemExit as error:
        raise DataError(f"the task ended the process: {in_one_line(error)}; raise an error that says why") from error
    print(json.dumps(facts(plan), indent=2) if options.json else "\n".join(lines(plan)), flush=True)
    if plan.refused is not None:
        raise plan.refused
    return 0


def lines(plan: Plan) -> list[str]:
    """The plan as text."""
    config, notes = plan.config, [note for note in dict.fromkeys(plan.world.notes) if not note.startswith("blocks: ")]
    said = [note for note in notes if not note.startswith("warning: ")]
    heads = {
        "task": config.task.target,
        "model": model_text(plan),
        "ranks": ranks_text(plan),
        "batch": batch_text(plan),
        "data": data_text(plan),
        "compute": compute_text(plan),
        "checkpoint": checkpoint_text(plan),
    }
    text = [f"{name:<12}{value}" for name, value in heads.items() if value]
    text += ["", *table(plan), ""]
    text += ["* what this config runs"] if any(way.chosen for way in plan.ways) else []
    text += [f"{way.name}: not possible: {way.problem}" for way in plan.ways if way.problem]
    text += [fit_text(plan)] if plan.device_memory else []
    return [*text, *said, *(note for note in notes if note not in said)]


def model_text(plan: Plan) -> str:
    trained, everything = plan.parameters
    of_it = "all trained" if trained == everything else f"{trained:,} trained ({100 * trained / everything:.2g} %)"
    blocks = ", ".join(f"{count} x {name}" for name, count in plan.blocks.items())
    blocks = f"{blocks} with {100 * plan.share_of_blocks:.0f} % of them" if blocks else "no blocks"
    return f"{type(plan.module).__name__}, {everything:,} parameters, {of_it}; {blocks}"


def ranks_text(plan: Plan) -> str:
    world, kind = plan.world, "GPU" if plan.world.device.type == "cuda" else "process"
    each = f", {size(plan.device_memory)} each" if plan.device_memory else ""
    machines = f", {world.local_world_size} to a machine (assumed)" if world.world_size > RANKS_PER_MACHINE else ""
    plural = "" if world.world_size == 1 else "s" if kind == "GPU" else "es"
    return f"{world.world_size:,} {kind}{plural}{each}{machines}"


def batch_text(plan: Plan) -> str:
    train, micro = plan.config.train, plan.micro_batches
    text = f"{plan.samples_per_step:,} samples per step = {train.micro_batch_size} x {plan.world.world_size:,} ranks"
    text += f" x {micro} micro-batch{'es' if micro > 1 else ''}"
    return text + (f"; {plan.tokens_per_step:,} tokens per step" if plan.tokens_per_step else "")


def data_text(plan: Plan) -> str:
    if not plan.samples:
        return ""
    text = f"{plan.samples:,} samples"
    if plan.steps_per_epoch:
        epochs = plan.config.train.steps / plan.steps_per_epoch
        text += f", {plan.steps_per_epoch:,} steps per epoch; {plan.config.train.steps:,} steps are {epochs:.3g} epochs"
    if plan.tokens_per_step:
        text += f", {plan.config.train.steps * plan.tokens_per_step / 1e6:,.1f} M tokens"
    return text


def compute_text(plan: Plan) -> str:
    if not plan.flops_per_sample:
        return ""
    of_rank = plan.flops_per_sample * plan.samples_per_step / plan.world.world_size
    text = f"{short(plan.flops_per_sample)}FLOP per sample, {short(of_rank)}FLOP per rank and step"
    if plan.peak_flops:
        seconds = of_rank / plan.peak_flops
        text += f"; at {short(plan.peak_flops)}FLOP/s and 40 % MFU (assumed) {seconds / 0.4:.3g} s per step"
        text += f", {seconds / 0.4 * plan.config.train.steps / 3600:,.3g} h for all steps"
    return text


def short(number: float) -> str:
    """A number in three digits, with a prefix of its unit: "2.62 G"."""
    prefix = next((one for one in reversed(PREFIXES) if number >= 1000 ** PREFIXES.index(one)), "")
    return f"{number / 1000 ** PREFIXES.index(prefix):.4g} {prefix}"


def checkpoint_text(plan: Plan) -> str:
    keep, each = plan.config.checkpoint.keep, plan.checkpoint_bytes
    if not plan.checkpoints:
        return "off"
    return f"{size(each)}; at most {plan.checkpoints} on the disk with keep={keep}: {size(plan.checkpoints * each)}"


def table(plan: Plan) -> list[str]:
    """A column per strategy: what each rank holds, and what it sends."""
    ways = [way for way in plan.ways if way.memory is not None]
    most = max((way.memory.total for way in ways if way.memory is not None), default=0)
    unit, scale = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    sent_most = max((way.sent_bytes for way in ways), default=0)
    sent_unit, sent_scale = ("GB", 1e9) if sent_most >= 1e9 else ("MB", 1e6)
    rows = []
    for name, label in ROWS.items():
        cells = [getattr(way.memory, name) for way in ways]
        if any(cells):
            rows.append([label, *(f"{cell / scale:,.2f}" if cell else "-" for cell in cells)])
    rows.append(["sum", *(f"{way.memory.total / scale:,.2f}" for way in ways if way.memory is not None)])
    if any(way.memory is not None and way.on_device != way.memory.total for way in ways):
        rows.append(["of it on the device", *(f"{way.on_device / scale:,.2f}" for way in ways)])
    if plan.device_memory:
        left = (size(plan.device_memory - way.on_device) if fits(plan, way) else "too large" for way in ways)
        rows.append([f"left of {size(plan.device_memory)}", *left])
    if plan.world.world_size > 1:
        rows.append([f"sent per step, {sent_unit}", *(f"{way.sent_bytes / sent_scale:,.2f}" for way in ways)])
    rows.append(["computes in", *(way.precision for way in ways)])
    head = [f"{unit} on each rank", *(f"{way.name} *" if way.chosen else way.name for way in ways)]
    align = ["left", *["right"] * len(ways)]
    return tabulate(rows, head, "simple", disable_numparse=True, colalign=align).splitlines()


def fits(plan: Plan, way: Way) -> bool:
    """Whether a rank's device holds it, leaving a share for fragments, although nothing for activations."""
    return not way.problem and way.on_device <= USABLE * plan.device_memory


def fit_text(plan: Plan) -> str:
    """What the row of what is left means, in a sentence."""
    named = [way.name for way in plan.ways if fits(plan, way)]
    if not named:
        every = " (every)" if plan.micro_batches > 1 else ""
        more = f"fsdp{every} does on {plan.fits_from:,} ranks" if plan.fits_from else "nor does fsdp on more ranks"
        return f"nothing fits into {100 * USABLE:.0f} % of the device; {more}"
    chosen = next((way for way in plan.ways if way.chosen), None)
    warning = f"; {chosen.name}, which is chosen, does not" if chosen is not None and not fits(plan, chosen) else ""
    return f"{', '.join(named)} fit{'s' if len(named) == 1 else ''}, without activations{warning}"


def facts(plan: Plan) -> dict[str, object]:
    """The plan as JSON; bytes and counts."""
    trained, everything = plan.parameters
    return {
        "task": plan.config.task.target,
        "model": {
            "class": type(plan.module).__name__,
            "parameters": everything,
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
        "strategies": [
            {
                **{name: value for name, value in way._asdict().items() if name != "memory"},
                "memory": way.memory._asdict() if way.memory is not None else None,
                "fits": fits(plan, way) if plan.device_memory else None,
            }
            for way in plan.ways
        ],
        "fits_from_ranks": plan.fits_from,
        "notes": list(dict.fromkeys(plan.world.notes)),
    }


if __name__ == "__main__":
    sys.exit(main())
