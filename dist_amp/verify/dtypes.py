"""The dtype in which each module computes, in one forward and loss under the config's autocast.

    print(dtype_report(config).text)

Autocast decides per operation, so operations are recorded, after autocast's casts. Costly
operations are those whose FLOPs torch counts: matrix products, convolutions, attention.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dist_amp.config.auto import batch_statistics
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

aten = torch.ops.aten

SHORT = {dtype: name for name, dtype in DTYPES.items()} | {torch.float64: "fp64"}
HALF, WIDE = {"bf16", "fp16"}, {"fp32", "fp64"}

# torch's registry lacks the CPU's attention.
attention = flop_registry[aten._scaled_dot_product_flash_attention]
FORMULAS = {aten._scaled_dot_product_flash_attention_for_cpu: attention, **flop_registry}

# Operations that only move or cast elements; views are recognised by torch.
MOVES = re.compile(
    "_to_copy|copy_|clone|_unsafe_view|detach|zeros_like|ones_like|empty_like|cat|stack"
)
# Operations that add up many rounded elements.
SUMS = re.compile(
    "sum|mean|nll_loss2?d?_forward|mse_loss|smooth_l1_loss|huber_loss|binary_cross_entropy|dot|"
    "linalg_vector_norm|logsumexp|var|std"
)

LOSS = "loss_sum"  # the path of operations outside all modules

WHY = """\
Why: autocast is off there (autocast(enabled=False), custom_fwd(cast_inputs=torch.float32)), or it
does not know the operation (in-place and out= products, custom operations). A .float() before an
ordinary product is not enough: autocast casts its result again.
Fix: end the autocast(enabled=False) block before the product, or cast its inputs and weights
yourself."""

SUMMED = """\
Sums in half precision, rounded at every addition and quick to overflow in fp16; use .float():"""

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
    """A costly operation or a sum, and the module in whose forward it runs."""

    path: str
    kind: str
    name: str
    operands: str  # as "fp32 x fp32"
    flops: int = 0


@dataclass(frozen=True)
class DtypeReport:
    """The dtypes of one forward and loss."""

    dtype: str  # bf16, fp16, or fp32 where precision.use_amp=false
    device: torch.device
    by_policy: bool  # whether a run would cast by FSDP's policy
    rows: list[Row]  # in the model's order, the loss last
    costly: list[Operation]
    half_sums: list[Operation]  # sums to a scalar in half precision
    never_called: list[tuple[str, str]]  # (path, class)

    @property
    def in_float32(self) -> list[Operation]:
        """The costly operations that mixed precision does not reach."""
        if self.dtype == "fp32":
            return []
        return [one for one in self.costly if set(one.operands.split(" x ")) <= WIDE]

    @property
    def text(self) -> str:
        """The table, then whatever needs attention."""
        header = ("module", "class", "inputs", "weights", "computed in", "outputs")
        table = "\n".join(columns([header, *merged(self.rows)], left=len(header)))
        if self.dtype == "fp32":
            parts = ["precision.use_amp=false: all is computed in float32, by request", table]
        else:
            head = f"autocast to {self.dtype} on {self.device.type}"
            parts = [f"{head}; one micro-batch, forward and loss", table, self._about_costly()]
        if self.half_sums:
            sums = merged(one[:4] for one in self.half_sums)
            lines = [f"  {path} ({kind}): {name} of {dtype}" for path, kind, name, dtype in sums]
            parts.append("\n".join([SUMMED, *lines]))
        if (dtype := self.rows[-1].outputs) != "fp32":
            parts.append(
                f"The loss is {dtype}, which a run rejects; compute it in float32, by .float()"
            )
        if self.never_called:
            names = [f"  {path} ({kind})" for path, kind in merged(self.never_called)]
            parts.append("\n".join(["Never called:", *names]))
        if self.by_policy:
            parts.append(POLICY)
        return "\n\n".join(parts)

    def _about_costly(self) -> str:
        """Which costly operations stay in float32, with their share of the FLOPs."""
        wide = self.in_float32
        count = f"{len(self.costly)} costly operations"
        if not wide:
            return f"All {count} (products, convolutions, attention) run in {self.dtype}."
        total = max(1, sum(one.flops for one in self.costly))
        share = 100 * sum(one.flops for one in wide) / total
        stay = "stay" if len(wide) > 1 else "stays"
        lines = [
            f"{len(wide)} of {count} {stay} in float32 ({share:.0f} % of the forward's FLOPs):"
        ]
        groups = merged(one[:4] for one in wide)
        flops = [sum(wide[at].flops for at in members) for members in groups.values()]
        for (path, kind, name, operands), of_group in sorted(
            zip(groups, flops, strict=True), key=lambda item: -item[1]
        ):
            percent = 100 * of_group / total
            lines.append(f"  {path} ({kind}): {name} {operands}, {percent:.0f} %")
        return "\n".join([*lines, WHY])


def dtype_report(
    config: Config, world: World | None = None, task: Task | None = None
) -> DtypeReport:
    """Run the task's model on its first micro-batch, in this process only, and record the dtypes.

    task: an object to use in place of `task.target`. Errors: those of `run.build_run`.
    """
    world = world or locate(config.run)
    task = task or build_task(config.task, config.data)
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
    autocasts = config.precision.cast_by == "autocast" or batch_statistics(model)
    return DtypeReport(
        precision.name,
        world.device,
        by_policy=sharded and config.precision.use_amp and not autocasts,
        rows=recorder.rows(),
        costly=recorder.costly,
        half_sums=recorder.half_sums,
        never_called=recorder.never_called(),
    )


class DtypeRecorder(TorchDispatchMode):
    """Records the dtypes of the inputs, outputs and operations of each module of `model`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.modules = {name or "(model)": module for name, module in model.named_modules()}
        self.costly: list[Operation] = []
        self.half_sums: list[Operation] = []
        self._running = [LOSS]
        self._used: set[int] = set()  # ids of the tensors that operations took
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
        """Record the dtypes of the tensors in `value`, which may be nested."""
        self._columns[path, column] |= dict.fromkeys(dtypes_in(value))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        taken = list(tensors((args, kwargs)))
        self._used |= set(map(id, taken))
        floating = [tensor for tensor in taken if tensor.is_floating_point()]
        name = function.overloadpacket.__name__
        if function.is_view or MOVES.fullmatch(name) or not floating:
            return out
        path = self._running[-1]
        if formula := FORMULAS.get(function.overloadpacket):
            self.add(path, "products", floating)
            try:
                flops = formula(*args, **kwargs, out_val=out)
            except Exception:  # the formula does not cover this form of the operation
                flops = 0
            if "attention" in name:
                name = "attention"
            operands = " x ".join(dtypes_in([t for t in floating if t.ndim > 1]))  # without a bias
            self.costly.append(Operation(path, self._kind(path), name, operands, flops))
            return out
        self.add(path, "other", floating)
        result = next(tensors(out))
        if SUMS.fullmatch(name) and floating[0].numel() > 1 and result.numel() == 1:
            (dtype,) = dtypes_in(result)
            if dtype in HALF:
                self.half_sums.append(Operation(path, self._kind(path), name, dtype))
        return out

    def rows(self) -> list[Row]:
        """The modules that ran and have no children, weights of their own, or costly operations."""
        costly = {operation.path for operation in self.costly}
        paths = [
            path
            for path in self.modules
            if self._ran(path) and (path in costly or self._computes(path))
        ]
        return [self._row(path) for path in (*paths, LOSS)]

    def never_called(self) -> list[tuple[str, str]]:
        """(path, class) of modules whose forward did not run and whose weights were not used."""
        never = []
        for path, module in self.modules.items():
            # A ModuleList or a ParameterList has no forward.
            has_forward = type(module).forward is not nn.Module.forward
            used = self._ran(path) or any(id(p) in self._used for p in module.parameters())
            if has_forward and self._computes(path) and not used:
                never.append((path, self._kind(path)))
        return never

    def _ran(self, path: str) -> bool:
        return (path, "inputs") in self._columns

    def _computes(self, path: str) -> bool:
        module = self.modules[path]
        return not list(module.children()) or bool(list(module.parameters(recurse=False)))

    def _kind(self, path: str) -> str:
        return "the task" if path == LOSS else type(self.modules[path]).__name__

    def _row(self, path: str) -> Row:
        if path != LOSS:
            self.add(path, "weights", list(self.modules[path].parameters(recurse=False)))
        cells = {
            name: " ".join(self._columns.get((path, name), {}))
            for name in ("inputs", "weights", "products", "other", "outputs")
        }
        cells["computed"] = cells.pop("products") or cells.pop("other")
        cells.pop("other", None)
        return Row(path, self._kind(path), **{name: text or "-" for name, text in cells.items()})


def dtypes_in(value: Any) -> list[str]:
    """Of the tensors in nested containers."""
    dtypes = [tensor.dtype for tensor in tensors(value)]
    return [SHORT.get(dtype, str(dtype).removeprefix("torch.")) for dtype in dtypes]


def merged(rows: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], list[int]]:
    """{a row: the indices of those it stands for}, which differ only in numbers of the path, the
    first cell: blocks.0-11.up.
    """
    groups: dict[Any, list[tuple[int, list[str]]]] = defaultdict(list)
    for index, (path, *cells) in enumerate(rows):
        groups[re.sub(r"\b\d+\b", "#", path), *cells].append((index, path.split(".")))
    named = {}
    for (_, *cells), members in groups.items():
        parts = zip(*(path for _, path in members), strict=True)
        named[".".join(map(in_one, parts)), *cells] = [index for index, _ in members]
    return named


def in_one(parts: Iterable[str]) -> str:
    """Equal names as one, numbers as a range or a list."""
    distinct = sorted(set(parts), key=lambda part: (len(part), part))
    if len(distinct) > 1 and int(distinct[-1]) - int(distinct[0]) == len(distinct) - 1:
        return f"{distinct[0]}-{distinct[-1]}"
    return ",".join(distinct)
