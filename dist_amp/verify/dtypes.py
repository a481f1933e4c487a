"""The dtype in which each module computes, in one forward and loss under the config's autocast.

    print(dtype_report(config))

Autocast decides per operation, so operations are recorded, after autocast's casts. Costly
operations are those whose FLOPs torch counts: matrix products, convolutions, attention.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from dist_amp.config.task_class import build_task
from dist_amp.data import build_batches
from dist_amp.diagnostics.trace import Event, Recorder, clean_name
from dist_amp.distributed.process import seed_all
from dist_amp.errors import columns
from dist_amp.precision import DTYPES, build_precision
from dist_amp.scaling.meta import build_whole
from dist_amp.settings import Config
from dist_amp.task import Task, build_split
from dist_amp.world import World, locate

SHORT = {dtype: name for name, dtype in DTYPES.items()} | {torch.float64: "fp64"}

# torch's registry lacks the CPU's attention.
CPU_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
COSTLY = {CPU_ATTENTION, *map(str, flop_registry)}

# Operations that only move or cast elements; views are recognised by torch.
MOVES = re.compile(
    "_to_copy|copy_|clone|_unsafe_view|detach|zeros_like|ones_like|empty_like|cat|stack"
)

WHY = """\
Why: autocast is off there (autocast(enabled=False), custom_fwd(cast_inputs=torch.float32)), or it
does not know the operation. Cast its inputs and weights yourself, or end that block before it."""


def dtype_report(config: Config, world: World | None = None, task: Task | None = None) -> str:
    """A table of the dtypes in the first micro-batch, in this process only. Errors: as `build_run`.

    A row has the distinct dtypes of a module, in order of first use.
    """
    world = world or locate(config.run)
    task = task or build_task(config)
    seed_all(config.run.seed)
    model = build_whole(task, world.device, frozen_too=not config.precision.use_amp)
    batches = build_batches(
        replace(config.data, workers=0),  # only one batch is needed
        task,
        build_split(task, "train", world),
        world,
        micro_batch_size=config.train.micro_batch_size,
        accumulation_steps=1,
        seed=config.run.seed,
    )
    # A policy needs ranks to shard over, so autocast is what is recorded.
    precision = build_precision(replace(config.precision, cast_by="auto"), False, world)
    recorder = Recorder(task, model, dtypes_of, ("forward", "op"), inputs=True)
    with recorder, precision.autocast():
        recorder.loss_sum(model, next(batches)[0])
    rows, costly = table_of(model, recorder.events)
    table = "\n".join(columns(list(dict.fromkeys(rows)), left=len(rows[0])))
    if precision.name == "fp32":
        return f"precision.use_amp=false: all is computed in float32, by request\n\n{table}"
    head = (
        f"autocast to {precision.name} on {world.device.type}; one micro-batch, forward and loss\n"
        "(a sharded run casts by FSDP's policy, norms too, unless precision.cast_by=autocast)"
    )
    count = f"{len(costly)} costly operations"
    about = f"All {count} (products, convolutions, attention) run in {precision.name}."
    if wide := [text for text in costly if not re.search("bf16|fp16", text)]:
        about = "\n".join([f"In float32, {len(wide)} of {count}:", *wide, WHY])
    return f"{head}\n\n{table}\n\n{about}"


def dtypes_of(values: Sequence[Tensor]) -> list[str]:
    return [SHORT.get(v.dtype, str(v.dtype).removeprefix("torch.")) for v in values]


def table_of(model: nn.Module, events: Sequence[Event]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Returns (rows of the table, a line for each costly operation).

    Rows are of the modules that ran and have no children, weights of their own, or costly
    operations. Numbers in names are *, so that equal blocks have equal rows.
    """
    # {(module, column): distinct dtypes, in order}
    cells: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    costly = []
    for event in events:
        place = event.module
        if event.kind != "op":
            cells[place, "inputs"] |= dict.fromkeys(event.inputs)
            cells[place, "outputs"] |= dict.fromkeys(event.values)
            continue
        name = event.name.removeprefix("aten.")
        dtypes = dict.fromkeys(d for d in event.inputs if d.startswith(("fp", "bf", "float")))
        if event.name in COSTLY:
            cells[place, "products"] |= dtypes
            costly.append(f"  {place or '(model)'}: {name} in {' '.join(dtypes)}")
        elif not MOVES.fullmatch(name):
            cells[place, "other"] |= dtypes
    rows: list[tuple[str, ...]] = [
        ("module", "class", "inputs", "weights", "computed in", "outputs")
    ]
    for name, module in model.named_modules():
        place = clean_name(name)
        weights = list(module.parameters(recurse=False))
        computes = not list(module.children()) or weights or cells[place, "products"]
        if computes and cells[place, "outputs"]:
            cells[place, "weights"] |= dict.fromkeys(dtypes_of(weights))
            computed = "products" if cells[place, "products"] else "other"
            names = ("inputs", "weights", computed, "outputs")
            texts = (" ".join(cells[place, column]) or "-" for column in names)
            shown = re.sub(r"\b\d+\b", "*", place or "(model)")
            rows.append((shown, type(module).__name__, *texts))
    return rows, costly
