"""The dtype in which each module computes in a forward and loss under the config's autocast.

    print(dtype_report(config))

Autocast casts the inputs of each operation, and operations are recorded with these cast inputs.
Costly operations are those whose FLOPs torch counts: matrix products, convolutions, attention.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from dist_amp.diagnostics.trace import Event, Recorder, clean_name
from dist_amp.errors import columns
from dist_amp.precision import DTYPES
from dist_amp.run import build_run
from dist_amp.settings import Config, ParallelConfig
from dist_amp.task import Task
from dist_amp.world import World

SHORT = {dtype: name for name, dtype in DTYPES.items()} | {torch.float64: "fp64"}

# torch's registry lacks the CPU's attention.
CPU_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
COSTLY = {CPU_ATTENTION, *map(str, flop_registry)}

# Operations that only move or cast elements; views are not recorded at all.
MOVES = re.compile(
    "_to_copy|copy_|clone|_unsafe_view|detach|zeros_like|ones_like|empty_like|cat|stack"
)

WHY = """\
Why: autocast is off there (autocast(enabled=False), custom_fwd(cast_inputs=torch.float32)), or it
does not know the operation. Cast its inputs and weights yourself, or turn autocast on for it."""


def dtype_report(config: Config, world: World | None = None, task: Task | None = None) -> str:
    """A table of the dtypes in the first micro-batch. Raises the errors of `build_run`.

    A row has the distinct dtypes of a module, in order of first use.
    """
    config = replace(
        config,
        run=replace(config.run, dir="unused", resume="never"),
        data=replace(config.data, workers=0),  # only one batch is needed
        # FSDP's mixed-precision policy needs several ranks, so autocast is recorded instead.
        precision=replace(config.precision, cast_by="auto"),
        parallel=ParallelConfig(),
        compile=replace(config.compile, blocks=False),
        eval=replace(config.eval, every="off"),
    )
    run = build_run(config, world, task)
    model = run.parallel.module
    recorder = Recorder(run.task, model, dtypes_of, ("forward", "op"), inputs=True)
    with recorder, run.precision.autocast():
        recorder.loss_sum(model, next(run.data)[0])
    run.close()
    precision = run.precision.name
    rows, costly = table_of(model, recorder.events)
    table = "\n".join(columns(list(dict.fromkeys(rows)), left=len(rows[0])))
    if precision == "fp32":
        return f"precision.use_amp=false: everything is computed in float32\n\n{table}"
    head = (
        f"autocast to {precision} on {run.world.device.type}; one micro-batch, forward and loss\n"
        "(a sharded run casts by FSDP's policy, norms too, unless precision.cast_by=autocast)"
    )
    count = f"{len(costly)} costly operations"
    about = f"All {count} (products, convolutions, attention) run in {precision}."
    if wide := [text for text in costly if not re.search("bf16|fp16|float8", text)]:
        about = "\n".join([f"In float32, {len(wide)} of {count}:", *wide, WHY])
    return f"{head}\n\n{table}\n\n{about}"


def dtypes_of(values: Sequence[Tensor]) -> list[str]:
    return [SHORT.get(v.dtype, str(v.dtype).removeprefix("torch.")) for v in values]


def table_of(model: nn.Module, events: Sequence[Event]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Returns (rows of the table, a line for each costly operation).

    A called module has a row if it has no children, has weights of its own or ran costly
    operations. Numbers in names become *, so that equal blocks have equal rows.
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
    header = ("module", "class", "inputs", "weights", "computed in", "outputs")
    rows: list[tuple[str, ...]] = [header]
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
