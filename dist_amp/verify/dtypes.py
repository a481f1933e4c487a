"""In which dtype each module computes: one forward and loss of a task under the config's autocast.

    print(dtype_report(config).text)

Autocast decides per operation, so operations are recorded, after autocast's casts. Costly operations are those whose
FLOPs torch counts: matrix products, convolutions, attention.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dist_amp.config.task_class import build_split, build_task
from dist_amp.data import build_batches
from dist_amp.precision import build_precision
from dist_amp.runtime.batch_statistics import batch_statistics
from dist_amp.runtime.meta import build_whole
from dist_amp.runtime.random_state import seed_all
from dist_amp.settings import Config
from dist_amp.task import Task
from dist_amp.world import World, locate

aten = torch.ops.aten

WIDTH = 120

SHORT = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

HALF, WIDE = {"bf16", "fp16"}, {"fp32", "fp64"}

# torch's registry lacks the CPU's attention.
FORMULAS = {
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    **flop_registry,
}

# Operations that only move or cast elements; views are recognised by torch.
MOVES = {
    "_to_copy", "copy_", "clone", "_unsafe_view", "detach", "zeros_like", "ones_like", "empty_like", "cat", "stack",
}  # fmt: skip

# Operations that add up many rounded elements.
SUMS = {
    "sum", "mean", "nll_loss_forward", "nll_loss2d_forward", "mse_loss", "smooth_l1_loss", "huber_loss",
    "binary_cross_entropy", "dot", "linalg_vector_norm", "logsumexp", "var", "std",
}  # fmt: skip

LOSS = "loss_sum"  # the path of operations outside all modules

WHY = """\
Why: autocast is off there (autocast(enabled=False), custom_fwd(cast_inputs=torch.float32)), or it does not know the
operation (in-place and out= products, operations of your own). A .float() before an ordinary product is not enough:
autocast casts its result again.
Fix: end the autocast(enabled=False) block before the product, or cast its inputs and weights yourself."""

POLICY = """\
A sharded run casts by FSDP's policy instead of autocast, unless precision.cast_by=autocast. A block then computes
everything in half precision, norms included."""


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
        return [(o, flops) for o, flops in self.costly if self.dtype != "fp32" and set(o.operands.split(" x ")) <= WIDE]

    @property
    def text(self) -> str:
        """The table, then whatever needs attention."""
        head = f"autocast to {self.dtype} on {self.device.type}; one micro-batch, forward and loss"
        if self.dtype == "fp32":
            head = "precision.use_amp=false: all is computed in float32, by request"
        rows = [row for row, _ in merged((row, 0) for row in self.rows)]
        parts = [head, table([("module", "class", "inputs", "weights", "computed in", "outputs"), *rows])]
        if self.dtype != "fp32":
            parts.append(self._about_costly())
        if self.half_sums:
            about = "Sums in half precision, rounded at every addition and quick to overflow in fp16; use .float():"
            lines = [f"  {path} ({kind}): {name} of {dtype}" for (path, kind, name, dtype), _ in merged(self.half_sums)]
            parts.append("\n".join([about, *lines]))
        if self.rows[-1].outputs != "fp32":
            parts.append(
                f"The loss is {self.rows[-1].outputs}, which a run rejects; compute it in float32, by .float()"
            )
        if self.never_called:
            names = [f"{path} ({kind})" for (path, kind), _ in merged((row, 0) for row in self.never_called)]
            parts.append("Never called:\n" + "\n".join(f"  {name}" for name in names))
        return "\n\n".join([*parts, POLICY] if self.by_policy else parts)

    def _about_costly(self) -> str:
        """Which costly operations stay in float32, with their share of the FLOPs."""
        wide, total = self.in_float32, max(1, sum(flops for _, flops in self.costly))
        if not wide:
            return f"All {len(self.costly)} costly operations (products, convolutions, attention) run in {self.dtype}."
        share = 100 * sum(flops for _, flops in wide) / total
        about = (
            f"{len(wide)} of {len(self.costly)} costly operations {'stay' if len(wide) > 1 else 'stays'} in float32 "
            f"({share:.0f} % of the forward's FLOPs):"
        )
        lines = [
            f"  {path} ({kind}): {name} {operands}, {100 * flops / total:.0f} %"
            for (path, kind, name, operands), flops in sorted(merged(wide), key=lambda item: -item[1])
        ]
        return "\n".join([about, *lines, WHY])


def dtype_report(config: Config, world: World | None = None, task: Task | None = None) -> DtypeReport:
    """Run the task's model on its first micro-batch, in this process only, and record the dtypes.

    task: an object to use in place of `task.target`. Errors: those of `run.build_run`.
    """
    world = locate(config.run) if world is None else world
    task = build_task(config.task, config.data) if task is None else task
    seed_all(config.run.seed)
    model = build_whole(task, world.device, frozen_too=not config.precision.use_amp)
    split, size = build_split(task, "train", world), config.train.micro_batch_size
    # Without loader workers: only one batch is needed.
    batches = build_batches(replace(config.data, workers=0), task, split, size, 1, config.run.seed, world)
    batch = next(batches)[0]
    # A policy needs ranks to shard over, so autocast is what is recorded.
    precision = build_precision(replace(config.precision, cast_by="auto"), False, world)
    with DtypeRecorder(model) as recorder, precision.autocast():
        recorder.add(LOSS, "inputs", batch)
        recorder.add(LOSS, "outputs", task.loss_sum(model, batch))
    sharded = config.parallel.strategy in ("fsdp", "hsdp") and config.precision.cast_by != "autocast"
    sharded = sharded and not batch_statistics(model)  # config.auto.pick_cast
    return DtypeReport(
        precision.name,
        world.device,
        sharded and config.precision.use_amp,
        recorder.rows(),
        recorder.costly,
        recorder.half_sums,
        recorder.never_called(),
    )


class DtypeRecorder(TorchDispatchMode):
    """Records the dtypes of each module's inputs, outputs and operations while it is active."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.modules = {name or "(model)": module for name, module in model.named_modules()}
        self.costly: list[tuple[Operation, int]] = []
        self.half_sums: list[tuple[Operation, int]] = []
        self._running = [LOSS]
        self._used: set[int] = set()  # ids of the tensors that operations took
        self._columns: dict[tuple[str, str], dict[str, None]] = {}  # (path, column) -> distinct dtypes, in order
        self._hooks: list[Any] = []

    def __enter__(self) -> "DtypeRecorder":
        for path, module in self.modules.items():
            self._hook(path, module)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def _hook(self, path: str, module: nn.Module) -> None:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._running.append(path)
            self.add(path, "inputs", (args, kwargs))

        def leave(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._running.pop()
            self.add(path, "outputs", output)

        self._hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._hooks.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))

    def add(self, path: str, column: str, value: Any) -> None:
        """Record the dtypes of the tensors in `value`, which may be nested."""
        self._columns.setdefault((path, column), {}).update(dict.fromkeys(dtypes_in(value)))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        name, path = function.overloadpacket.__name__, self._running[-1]
        self._used |= {id(tensor) for tensor in tensors_in((args, kwargs))}
        floating = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
        if function.is_view or name in MOVES or not floating:
            return out
        formula = FORMULAS.get(function.overloadpacket)
        self.add(path, "products" if formula else "other", floating)
        if formula:
            operands = " x ".join(dtypes_in([tensor for tensor in floating if tensor.ndim > 1]))  # without a bias
            operation = Operation(path, self._kind(path), "attention" if "attention" in name else name, operands)
            try:
                flops = formula(*args, **kwargs, out_val=out)
            except Exception:  # the formula does not cover this form of the operation
                flops = 0
            self.costly.append((operation, flops))
        elif name in SUMS and floating[0].numel() > 1 and next(tensors_in(out)).numel() == 1:
            dtype = dtypes_in(out)[0]
            if dtype in HALF:
                self.half_sums.append((Operation(path, self._kind(path), name, dtype), 0))
        return out

    def rows(self) -> list[Row]:
        """The modules that ran and have no children, weights of their own, or costly operations."""
        costly = {operation.path for operation, _ in self.costly}
        shown = [path for path in self.modules if self._ran(path) and (path in costly or self._computes(path))]
        return [self._row(path) for path in [*shown, LOSS]]

    def never_called(self) -> list[tuple[str, str]]:
        """(path, class) of modules with a forward that did not run and whose weights no operation used."""
        return [
            (path, self._kind(path))
            for path, module in self.modules.items()
            # A ModuleList or a ParameterList has no forward.
            if not self._ran(path)
            and self._computes(path)
            and type(module).forward is not nn.Module.forward
            and not any(id(p) in self._used for p in module.parameters())
        ]

    def _ran(self, path: str) -> bool:
        return (path, "inputs") in self._columns

    def _computes(self, path: str) -> bool:
        module = self.modules[path]
        return not list(module.children()) or bool(list(module.parameters(recurse=False)))

    def _kind(self, path: str) -> str:
        return "the task" if path == LOSS else type(self.modules[path]).__name__

    def _row(self, path: str) -> Row:
        inputs, outputs, products, other = (
            " ".join(self._columns.get((path, column), {})) for column in ("inputs", "outputs", "products", "other")
        )
        weights = [] if path == LOSS else list(self.modules[path].parameters(recurse=False))
        stored = " ".join(dict.fromkeys(dtypes_in(weights)))
        return Row(path, self._kind(path), inputs or "-", stored or "-", products or other or "-", outputs or "-")


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
    return [SHORT.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")) for tensor in tensors_in(value)]


def merged(rows: Iterable[tuple[tuple[str, ...], int]]) -> list[tuple[tuple[str, ...], int]]:
    """Merge rows (path, cell ...) that differ only in one number of the path, as blocks.0-11.up; amounts add up."""
    split = [(tuple(row[0].split(".")), row[1:], amount) for row, amount in rows]
    for position in range(max((len(parts) for parts, _, _ in split), default=0)):
        groups: dict[Any, tuple[list[str], list[int]]] = {}
        for parts, cells, amount in split:
            number = [part for part in parts[position : position + 1] if part.isdigit()]
            pattern = (*parts[:position], "#", *parts[position + 1 :]) if number else parts
            numbers, amounts = groups.setdefault((pattern, cells), ([], []))
            numbers += number
            amounts.append(amount)
        split = [
            (tuple(ranges(numbers) if part == "#" else part for part in pattern), cells, sum(amounts))
            for (pattern, cells), (numbers, amounts) in groups.items()
        ]
    return [((".".join(parts), *cells), amount) for parts, cells, amount in split]


def ranges(numbers: Iterable[str]) -> str:
    """["0", "1", "2", "5"] -> "0-2,5"."""
    runs: list[list[int]] = []
    for number in sorted(set(map(int, numbers))):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Aligned columns, two spaces apart; the first is shortened if a line would be wider than WIDTH."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[0] = min(widths[0], max(20, WIDTH - sum(widths[1:]) - 2 * len(widths[1:])))
    lines = []
    for path, *cells in rows:
        short = path if len(path) <= widths[0] else f"...{path[3 - widths[0] :]}"
        lines.append("  ".join(map(str.ljust, [short, *cells], widths)).rstrip())
    return "\n".join(lines)
