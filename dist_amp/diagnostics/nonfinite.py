"""The first module with an inf or nan, in one forward and backward of a micro-batch.

Forward: the first module whose output is not finite while its inputs are. Backward: the first
operation of the graph that gets a finite gradient and returns one that is not, and its module.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from dist_amp.data import Padding
from dist_amp.precision import DTYPES, Precision
from dist_amp.scaling.compile import stance
from dist_amp.step import loss_of
from dist_amp.task import Task
from dist_amp.world import local

# The number that autograd will give to the next node of the graph; it has no public name.
sequence_number = torch._C._autograd._get_sequence_nr
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
TASK = "the task's loss_sum"
LISTED = 8  # samples that are shown


# ---- what is reported ----


@dataclass(frozen=True)
class TensorStats:
    """What a tensor held when a hook saw it."""

    what: str
    dtype: str
    shape: list[int]
    nan: int
    inf: int
    span: list[float]  # lowest and highest finite value; empty if there is none
    rows: list[int] = field(default_factory=list)  # of dimension 0, not finite: the first few

    @property
    def finite(self) -> bool:
        return not self.nan + self.inf

    def __str__(self) -> str:
        what = f"{self.what} {self.dtype} {self.shape}"
        span = "..".join(f"{bound:.6g}" for bound in self.span)
        if self.finite:
            return f"{what} {span or 'empty'}"
        counts = {"nan": self.nan, "inf": self.inf}
        text = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        rest = f"finite part {span}" if span else "nothing finite"
        return f"{what} has {text}, {rest}"


@dataclass(frozen=True)
class NonFinite:
    """The first inf or nan of a step, and where it appeared."""

    phase: Literal["batch", "parameters", "forward", "loss", "backward"]
    module: str  # "" is the model itself
    module_class: str
    tensors: list[TensorStats]  # first what is not finite, then what it was computed from
    operation: str = ""  # of the backward graph
    step: int = 0
    rank: int = 0
    micro_batch: int = 0
    samples: list[int] = field(default_factory=list)
    other_ranks: list[int] = field(default_factory=list)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "NonFinite":
        """From a line of RUN/nonfinite/reports.jsonl."""
        return cls(**values | {"tensors": [TensorStats(**stats) for stats in values["tensors"]]})

    @property
    def where(self) -> str:
        samples = listed(self.samples)
        if self.phase in ("batch", "forward"):
            first = self.tensors[0]
            by_sample = first.shape[:1] == [len(self.samples)]
            if by_sample and 0 < len(first.rows) < len(self.samples):
                samples += f"; not finite: {listed([self.samples[row] for row in first.rows])}"
        module = self.module
        if self.module_class:
            module = f"{module or 'the model'} ({self.module_class})"
        place = {
            "batch": "the batch itself",
            "parameters": f"the parameters of {module}",
            "loss": module,
            "forward": f"forward of {module}",
            "backward": f"backward of {module}, in {self.operation}",
        }[self.phase]
        return f"rank {self.rank}, micro-batch {self.micro_batch} (samples {samples}), {place}"

    def __str__(self) -> str:
        text = f"{self.where}: {'; '.join(map(str, self.tensors))}"
        if self.other_ranks:
            text += f"; also on ranks {', '.join(map(str, self.other_ranks))}"
        return text


def listed(samples: Sequence[int]) -> str:
    shown = list(map(str, samples[:LISTED]))
    if len(samples) > LISTED:
        shown.append("...")
    return ", ".join(shown)


@torch.no_grad()
def stats_of(what: str, values: Any) -> list[TensorStats]:
    """Of this rank's part of each floating-point tensor in nested containers; reads the device."""
    stats = []
    for leaf in tree_leaves(values):
        if not isinstance(leaf, Tensor):
            continue
        part = local(leaf).detach()
        # float8 lacks the operations below.
        if part.layout == torch.strided and part.is_floating_point() and part.element_size() > 1:
            dtype = DTYPE_NAMES.get(part.dtype, str(part.dtype).removeprefix("torch."))
            stats.append(TensorStats(what, dtype, list(leaf.shape), *_counts(part)))
    return stats


def _counts(values: Tensor) -> tuple[int, int, list[float], list[int]]:
    """(nan, inf, span, rows) of a tensor."""
    if not values.numel():
        return 0, 0, [], []
    span = [bound.item() for bound in torch.aminmax(values)]  # allocates nothing if all is finite
    if all(map(math.isfinite, span)):
        return 0, 0, span, []
    is_finite = values.isfinite()
    finite = values[is_finite]
    span = []
    if finite.numel():
        span = [bound.item() for bound in torch.aminmax(finite)]
    rows = (~is_finite).reshape(*values.shape[:1], -1).any(-1).nonzero().flatten()[: LISTED + 1]
    return int(values.isnan().sum()), int(values.isinf().sum()), span, rows.tolist()


def bad(stats: Iterable[TensorStats]) -> list[TensorStats]:
    return [one for one in stats if not one.finite]


# ---- one forward and backward with hooks, which change no value ----


@dataclass(eq=False)
class ModuleCall:
    """One call of a module; its graph nodes have numbers from `begin` to below `end`."""

    module: str
    module_class: str
    begin: int
    outer: list["ModuleCall"]  # the calls that it is inside of
    inputs: list[TensorStats]
    outputs: list[TensorStats] = field(default_factory=list)
    end: int = 0

    @property
    def is_cause(self) -> bool:
        """Whether it made an inf or nan that every outer call returned, unlike a mask's -inf."""
        made = bad(self.outputs) and not bad(self.inputs)
        return bool(made) and all(bad(call.outputs) for call in self.outer)


@contextmanager
def recorded_calls(model: nn.Module) -> Iterator[list[ModuleCall]]:
    """The calls of the model's modules, in the order in which they return."""
    returned: list[ModuleCall] = []
    running: list[ModuleCall] = []

    def begin(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = stats_of("input", (args, kwargs))  # before an in-place module overwrites them
        outer = list(running)
        running.append(ModuleCall(name, class_name(module), sequence_number(), outer, inputs))

    def end(module: nn.Module, args: Any, output: Any) -> None:
        call = running.pop()
        call.end = sequence_number()
        call.outputs = stats_of("output", output)
        returned.append(call)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            before = partial(begin, clean_name(name))
            hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(end))
        yield returned


class BackwardHooks:
    """Hooks on every node of the graph of `loss`."""

    def __init__(self, loss: Tensor):
        # The nodes that got finite gradients and returned others, in backward's order.
        self.origins: list[tuple[Any, list[TensorStats]]] = []
        # Whether a gradient that is not finite got to a parameter: a ReLU or a mask may have turned
        # it into zeros before.
        self.reached_a_parameter = False
        for node in nodes_of(loss):
            node.register_hook(partial(self._check, node))

    def _check(
        self, node: Any, returned: Sequence[Tensor | None], received: Sequence[Tensor | None]
    ) -> None:
        faults = []
        for gradient, (following, _) in zip(returned, node.next_functions, strict=False):
            if stats := bad(stats_of("gradient returned", gradient)):
                faults += stats
                self.reached_a_parameter |= is_leaf(following)
        if faults:
            before = stats_of("gradient received", list(received))
            if not bad(before):
                self.origins.append((node, faults + before))

    def cause(self, calls: Sequence[ModuleCall]) -> NonFinite | None:
        if not (self.origins and self.reached_a_parameter):
            return None
        node, gradients = self.origins[0]
        number = node._sequence_nr()
        for call in calls:  # inner ones first
            if call.begin <= number < call.end:
                tensors = gradients + call.outputs + call.inputs
                return NonFinite("backward", call.module, call.module_class, tensors, node.name())
        return NonFinite("backward", TASK, "", gradients, node.name())


def nodes_of(loss: Tensor) -> set[Any]:
    """The nodes of the autograd graph, without those that accumulate parameters' gradients."""
    nodes: set[Any] = set()
    ahead: list[Any] = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in nodes and not is_leaf(node):
            nodes.add(node)
            ahead += [following for following, _ in node.next_functions]
    return nodes


def is_leaf(node: Any) -> bool:
    return node.name() == "torch::autograd::AccumulateGrad"


def clean_name(name: str) -> str:
    """A module's or parameter's name in the user's model, without the parts that wrappers add."""
    parts = name.split(".")
    return ".".join(p for p in parts if p not in ("_checkpoint_wrapped_module", "_orig_mod"))


def class_name(module: nn.Module) -> str:
    """The class in the user's code: FSDP derives another."""
    return next(cls.__name__ for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def forward_cause(calls: Sequence[ModuleCall], loss: Tensor) -> NonFinite:
    """For a loss that is not finite: the first module that made it so, else the task."""
    for call in calls:
        if call.is_cause:
            tensors = call.outputs + call.inputs
            return NonFinite("forward", call.module, call.module_class, tensors)
    outputs = [one for call in calls[-1:] for one in call.outputs]
    return NonFinite("loss", TASK, "", stats_of("loss", loss) + outputs)


def find_nonfinite(
    task: Task, model: nn.Module, batch: Any, share: Tensor, precision: Precision
) -> NonFinite | None:
    """The first inf or nan of one forward and backward, which leaves gradients behind; or None.

    batch: as a step takes it; share: what its loss is multiplied by, scalar float32.
    """
    # Compiled code calls no hooks, and anomaly detection would raise before the cause is found.
    with stance("force_eager"), torch.autograd.set_detect_anomaly(False):
        with recorded_calls(model) as calls, precision.autocast():
            loss = loss_of(task, model, batch, precision.device)
        shared = loss * share
        hooks = BackwardHooks(shared)
        shared.backward()
    fault = hooks.cause(calls)
    if not loss.isfinite():
        fault = forward_cause(calls, loss)
    elif not share.isfinite():
        fault = NonFinite("loss", "the task's weight", "", stats_of("world_size / weight", share))
    if fault is None:
        return None
    for name, parameter in model.named_parameters():
        if stats := bad(stats_of(clean_name(name), parameter)):
            owner = name.rpartition(".")[0]
            of_class = class_name(model.get_submodule(owner))
            return NonFinite("parameters", clean_name(owner), of_class, stats)
    stats = []
    for path, leaf in tree_flatten_with_path(unpadded(batch))[0]:
        stats += bad(stats_of(f"batch{keystr(path)}", leaf))
    if stats:
        return NonFinite("batch", "", "", stats)
    return fault


def unpadded(batch: Any) -> Any:
    return batch.batch if isinstance(batch, Padding) else batch
