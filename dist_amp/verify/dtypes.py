"""The dtype in which each module computes, in one forward and loss under the config's autocast.

    print(dtype_report(config).text)

Autocast decides per operation, so operations are recorded, after autocast's casts. Costly
operations are those whose FLOPs torch counts: matrix products, convolutions, attention.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dist_amp.config.task_class import build_task
from dist_amp.data import build_batches
from dist_amp.distributed.process import seed_all
from dist_amp.loading.nested import tensors
from dist_amp.precision import DTYPES, build_precision
from dist_amp.scaling.meta import build_whole
from dist_amp.settings import Config
from dist_amp.supervise.command_line import columns
from dist_amp.task import Task, build_split
from dist_amp.world import World, locate

SHORT = {dtype: name for name, dtype in DTYPES.items()} | {torch.float64: "fp64"}
WIDE = {"fp32", "fp64"}

aten = torch.ops.aten
# torch's registry lacks the CPU's attention.
COSTLY = {aten._scaled_dot_product_flash_attention_for_cpu, *flop_registry}

# Operations that only move or cast elements; views are recognised by torch.
MOVES = re.compile(
    "_to_copy|copy_|clone|_unsafe_view|detach|zeros_like|ones_like|empty_like|cat|stack"
)

LOSS = "loss_sum"  # the path of operations outside all modules

WHY = """\
Why: autocast is off there (autocast(enabled=False), custom_fwd(cast_inputs=torch.float32)), or it
does not know the operation (in-place and out= products, custom operations). A .float() before an
ordinary product is not enough: autocast casts its result again.
Fix: end the autocast(enabled=False) block before the product, or cast its inputs and weights
yourself."""

POLICY = """\
A sharded run casts by FSDP's policy instead of autocast, unless precision.cast_by=autocast. A block
then computes everything in half precision, norms included."""


class Row(NamedTuple):
    """One module; each column lists distinct dtypes in order of first use."""

    path: str
    kind: str
    inputs: str
    weights: str
    computed: str
    outputs: str


class Operation(NamedTuple):
    """A costly operation, and the module in whose forward it runs."""

    path: str
    kind: str
    name: str
    operands: str  # as "fp32 x fp32"


@dataclass(frozen=True)
class DtypeReport:
    dtype: str  # bf16, fp16, or fp32 where precision.use_amp=false
    device: torch.device
    by_policy: bool  # whether a run would cast by FSDP's policy
    rows: list[Row]  # in the model's order, the loss last
    costly: list[Operation]

    @property
    def in_float32(self) -> list[Operation]:
        """The costly operations that mixed precision does not reach."""
        if self.dtype == "fp32":
            return []
        return [one for one in self.costly if set(one.operands.split(" x ")) <= WIDE]

    @property
    def text(self) -> str:
        header = ("module", "class", "inputs", "weights", "computed in", "outputs")
        # Equal rows of numbered blocks are shown once, as blocks.*.up.
        rows = dict.fromkeys((re.sub(r"\b\d+\b", "*", path), *row) for path, *row in self.rows)
        table = "\n".join(columns([header, *rows], left=len(header)))
        if self.dtype == "fp32":
            return f"precision.use_amp=false: all is computed in float32, by request\n\n{table}"
        head = f"autocast to {self.dtype} on {self.device.type}; one micro-batch, forward and loss"
        count = f"{len(self.costly)} costly operations"
        about = f"All {count} (products, convolutions, attention) run in {self.dtype}."
        if wide := self.in_float32:
            lines = [f"  {path} ({kind}): {name} {operands}" for path, kind, name, operands in wide]
            about = "\n".join([f"In float32, {len(wide)} of {count}:", *lines, WHY])
        parts = [head, table, about]
        if self.by_policy:
            parts.append(POLICY)
        return "\n\n".join(parts)


def dtype_report(
    config: Config, world: World | None = None, task: Task | None = None
) -> DtypeReport:
    """Record the dtypes of the first micro-batch, in this process only. Errors: as `build_run`."""
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
    batch = next(batches)[0]
    # A policy needs ranks to shard over, so autocast is what is recorded.
    precision = build_precision(replace(config.precision, cast_by="auto"), False, world)
    with DtypeRecorder(model) as recorder, precision.autocast():
        recorder.add(LOSS, "inputs", batch)
        recorder.add(LOSS, "outputs", task.loss_sum(model, batch))
    sharded = config.parallel.strategy in ("fsdp", "hsdp")
    by_policy = sharded and config.precision.cast_by != "autocast"
    return DtypeReport(precision.name, world.device, by_policy, recorder.rows(), recorder.costly)


class DtypeRecorder(TorchDispatchMode):
    """Records the dtypes of the inputs, outputs and operations of each module of `model`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.modules = {name or "(model)": module for name, module in model.named_modules()}
        self.costly: list[Operation] = []
        self._running = [LOSS]
        # {(path, column): distinct dtypes, in order}
        self._columns: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
        for path, module in self.modules.items():
            module.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True)
            module.register_forward_hook(partial(self._leave, path), always_call=True)

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._running.append(path)
        self.add(path, "inputs", (args, kwargs))

    def _leave(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()
        self.add(path, "outputs", output)

    def add(self, path: str, column: str, value: Any) -> None:
        self._columns[path, column] |= dict.fromkeys(dtypes_in(value))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        floating = [tensor for tensor in tensors((args, kwargs)) if tensor.is_floating_point()]
        name = function.overloadpacket.__name__
        if function.is_view or MOVES.fullmatch(name) or not floating:
            return out
        path = self._running[-1]
        if function.overloadpacket in COSTLY:
            self.add(path, "products", floating)
            if "attention" in name:
                name = "attention"
            operands = " x ".join(dtypes_in([t for t in floating if t.ndim > 1]))  # without a bias
            self.costly.append(Operation(path, self._kind(path), name, operands))
        else:
            self.add(path, "other", floating)
        return out

    def rows(self) -> list[Row]:
        """The modules that ran and have no children, weights of their own, or costly operations."""
        costly = {operation.path for operation in self.costly}
        rows = []
        for path, module in self.modules.items():
            weights = list(module.parameters(recurse=False))
            computes = not list(module.children()) or weights
            if (path, "inputs") in self._columns and (path in costly or computes):
                self.add(path, "weights", weights)
                rows.append(self._row(path))
        return [*rows, self._row(LOSS)]

    def _kind(self, path: str) -> str:
        return "the task" if path == LOSS else type(self.modules[path]).__name__

    def _row(self, path: str) -> Row:
        computed = "products" if self._columns[path, "products"] else "other"
        names = ("inputs", "weights", computed, "outputs")
        cells = (" ".join(self._columns[path, name]) or "-" for name in names)
        return Row(path, self._kind(path), *cells)


def dtypes_in(value: Any) -> list[str]:
    dtypes = [tensor.dtype for tensor in tensors(value)]
    return [SHORT.get(dtype, str(dtype).removeprefix("torch.")) for dtype in dtypes]
