"""The dtype in which each module computes, in one forward and loss under the config's autocast.

    print(dtype_report(config).text)

Autocast decides per operation, so operations are recorded, after autocast's casts. Costly
operations are those whose FLOPs torch counts: matrix products, convolutions, attention.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dist_amp.config.auto import batch_statistics
from dist_amp.config.task_class import build_task
from dist_amp.data import build_batches
from dist_amp.distributed.process import seed_all
from dist_amp.precision import build_precision
from dist_amp.scaling.meta import build_whole
from dist_amp.settings import Config
from dist_amp.supervise.command_line import columns
from dist_amp.task import Task, build_split
from dist_amp.world import World, locate

aten = torch.ops.aten

WIDTH = 120

SHORT = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}

HALF, WIDE = {"bf16", "fp16"}, {"fp32", "fp64"}

# torch's registry lacks the CPU's attention.
FORMULAS = {
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        aten._scaled_dot_product_flash_attention
    ],
    **flop_registry,
}

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

POLICY = """\
A sharded run casts by FSDP's policy instead of autocast, unless precision.cast_by=autocast. A block
then computes everything in half precision, norms included."""

Amounts = dict[tuple[str, ...], int]  # {(path, other cells ...): FLOPs}


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


@dataclass(frozen=True)
class DtypeReport:
    """The dtypes of one forward and loss."""

    dtype: str  # bf16, fp16, or fp32 where precision.use_amp=false
    device: torch.device
    by_policy: bool  # whether a run would cast by FSDP's policy
    rows: list[Row]  # in the model's order, the loss last
    costly: list[tuple[Operation, int]]  # (operation, FLOPs)
    half_sums: list[tuple[Operation, int]]  # sums to a scalar in half precision; 0 FLOPs
    never_called: list[tuple[str, str]]  # (path, class)

    @property
    def in_float32(self) -> list[tuple[Operation, int]]:
        """The costly operations that mixed precision does not reach."""
        if self.dtype == "fp32":
            return []
        return [one for one in self.costly if set(one[0].operands.split(" x ")) <= WIDE]

    @property
    def text(self) -> str:
        """The table, then whatever needs attention."""
        rows = merged((row, 0) for row in self.rows)
        lines = table([("module", "class", "inputs", "weights", "computed in", "outputs"), *rows])
        head = f"autocast to {self.dtype} on {self.device.type}; one micro-batch, forward and loss"
        if self.dtype == "fp32":
            head = "precision.use_amp=false: all is computed in float32, by request"
        parts = [head, "\n".join(lines)]
        if self.dtype != "fp32":
            parts.append(self._about_costly())
        if self.half_sums:
            sums = [
                f"  {path} ({kind}): {name} of {dtype}"
                for path, kind, name, dtype in merged(self.half_sums)
            ]
            about = (
                "Sums in half precision, rounded at every addition and quick to overflow in fp16; "
                "use .float():"
            )
            parts.append("\n".join([about, *sums]))
        if self.rows[-1].outputs != "fp32":
            parts.append(
                f"The loss is {self.rows[-1].outputs}, which a run rejects; compute it in float32, "
                "by .float()"
            )
        if self.never_called:
            names = merged((row, 0) for row in self.never_called)
            parts.append("\n".join(["Never called:", *(f"  {path} ({k})" for path, k in names)]))
        if self.by_policy:
            parts.append(POLICY)
        return "\n\n".join(parts)

    def _about_costly(self) -> str:
        """Which costly operations stay in float32, with their share of the FLOPs."""
        wide = self.in_float32
        if not wide:
            return (
                f"All {len(self.costly)} costly operations (products, convolutions, attention) run "
                f"in {self.dtype}."
            )
        total = max(1, sum(flops for _, flops in self.costly))
        share = 100 * sum(flops for _, flops in wide) / total
        stay = "stay" if len(wide) > 1 else "stays"
        lines = [
            f"{len(wide)} of {len(self.costly)} costly operations {stay} in float32 ({share:.0f} % "
            "of the forward's FLOPs):"
        ]
        by_flops = sorted(merged(wide).items(), key=lambda item: -item[1])
        for (path, kind, name, operands), flops in by_flops:
            lines.append(f"  {path} ({kind}): {name} {operands}, {100 * flops / total:.0f} %")
        return "\n".join([*lines, WHY])


def dtype_report(
    config: Config, world: World | None = None, task: Task | None = None
) -> DtypeReport:
    """Run the task's model on its first micro-batch, in this process only, and record the dtypes.

    task: an object to use in place of `task.target`. Errors: those of `run.build_run`.
    """
    if world is None:
        world = locate(config.run)
    if task is None:
        task = build_task(config.task, config.data)
    seed_all(config.run.seed)
    model = build_whole(task, world.device, frozen_too=not config.precision.use_amp)
    split = build_split(task, "train", world)
    data = replace(config.data, workers=0)  # only one batch is needed
    batches = build_batches(
        data,
        task,
        split,
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
        self.costly: list[tuple[Operation, int]] = []
        self.half_sums: list[tuple[Operation, int]] = []
        self._running = [LOSS]
        self._used: set[int] = set()  # ids of the tensors that operations took
        # {(path, column): distinct dtypes, in order}
        self._columns: dict[tuple[str, str], dict[str, None]] = {}
        for path, module in self.modules.items():
            self._hook(path, module)

    def _hook(self, path: str, module: nn.Module) -> None:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._running.append(path)
            self.add(path, "inputs", (args, kwargs))

        def leave(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._running.pop()
            self.add(path, "outputs", output)

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave, with_kwargs=True, always_call=True)

    def add(self, path: str, column: str, value: Any) -> None:
        """Record the dtypes of the tensors in `value`, which may be nested."""
        self._columns.setdefault((path, column), {}).update(dict.fromkeys(dtypes_in(value)))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        taken = list(tensors_in((args, kwargs)))
        self._used |= set(map(id, taken))
        floating = [tensor for tensor in taken if tensor.is_floating_point()]
        name = function.overloadpacket.__name__
        if function.is_view or MOVES.fullmatch(name) or not floating:
            return out
        path = self._running[-1]
        formula = FORMULAS.get(function.overloadpacket)
        self.add(path, "products" if formula else "other", floating)
        if formula:
            try:
                flops = formula(*args, **kwargs, out_val=out)
            except Exception:  # the formula does not cover this form of the operation
                flops = 0
            if "attention" in name:
                name = "attention"
            operands = " x ".join(dtypes_in([t for t in floating if t.ndim > 1]))  # without a bias
            self.costly.append((Operation(path, self._kind(path), name, operands), flops))
        elif (
            SUMS.fullmatch(name) and floating[0].numel() > 1 and next(tensors_in(out)).numel() == 1
        ):
            dtype = dtypes_in(out)[0]
            if dtype in HALF:
                self.half_sums.append((Operation(path, self._kind(path), name, dtype), 0))
        return out

    def rows(self) -> list[Row]:
        """The modules that ran and have no children, weights of their own, or costly operations."""
        costly = {operation.path for operation, _ in self.costly}
        rows = []
        for path in self.modules:
            if self._ran(path) and (path in costly or self._computes(path)):
                rows.append(self._row(path))
        return [*rows, self._row(LOSS)]

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
        def column(name: str) -> str:
            return " ".join(self._columns.get((path, name), {}))

        weights = "-"
        if path != LOSS:
            weights = " ".join(dict.fromkeys(dtypes_in(self.modules[path]._parameters))) or "-"
        return Row(
            path,
            self._kind(path),
            inputs=column("inputs") or "-",
            weights=weights,
            computed=column("products") or column("other") or "-",
            outputs=column("outputs") or "-",
        )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested dicts, lists, tuples and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)
    elif is_dataclass(value):
        yield from tensors_in([getattr(value, item.name) for item in fields(value)])


def dtypes_in(value: Any) -> list[str]:
    return [
        SHORT.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        for tensor in tensors_in(value)
    ]


def merged(rows: Iterable[tuple[tuple[str, ...], int]]) -> Amounts:
    """Rows (path, cell ...) that differ only in numbers of the path as one: blocks.0-11.up.

    Amounts add up.
    """
    groups: dict[Any, list[tuple[list[str], int]]] = {}
    for (path, *cells), amount in rows:
        parts = path.split(".")
        pattern = tuple("#" if part.isdigit() else part for part in parts)
        groups.setdefault((pattern, *cells), []).append((parts, amount))
    amounts: Amounts = {}
    for (_, *cells), members in groups.items():
        columns_of_parts = zip(*(parts for parts, _ in members), strict=True)
        path = ".".join(map(joined, columns_of_parts))
        amounts[path, *cells] = sum(amount for _, amount in members)
    return amounts


def joined(parts: Iterable[str]) -> str:
    """Equal names as one, numbers as ranges: "0", "1", "2", "5" as 0-2,5."""
    distinct = set(parts)
    if not all(part.isdigit() for part in distinct):
        return distinct.pop()
    runs: list[list[int]] = []
    for number in sorted(map(int, distinct)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of aligned columns; the first is shortened if a line would be wider than WIDTH."""
    others = sum(max(map(len, column)) + 2 for column in list(zip(*rows, strict=True))[1:])
    room = max(20, WIDTH - others)
    shortened = []
    for path, *cells in rows:
        if len(path) > room:
            path = f"...{path[3 - room :]}"
        shortened.append([path, *cells])
    return columns(shortened, left=len(rows[0]))
