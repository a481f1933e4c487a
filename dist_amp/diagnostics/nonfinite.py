"""Find the first inf or nan of a micro-batch: one forward and backward with hooks.

Forward: the first module whose output is not finite while its inputs are. Backward: the first
operation that receives a finite gradient and returns one that is not, and the module that recorded
it. Backward is checked per node of the autograd graph, so in-place operations and repeated calls of
one module are distinguished.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from dist_amp.data import Padding
from dist_amp.precision import DTYPES, Precision
from dist_amp.scaling.compile import uncompiled
from dist_amp.step import loss_of
from dist_amp.task import Task
from dist_amp.world import local

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
TASK = "the task's loss_sum"


@dataclass(frozen=True)
class TensorStats:
    """What a tensor held when a hook saw it."""

    what: str
    dtype: str
    shape: list[int]
    nan: int
    inf: int
    span: list[float]  # lowest and highest finite value; empty if there is none

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
    def from_json(cls, text: str) -> "NonFinite":
        values = json.loads(text)
        return cls(**values | {"tensors": [TensorStats(**stats) for stats in values["tensors"]]})

    @property
    def where(self) -> str:
        """Rank, micro-batch, samples, phase and module."""
        samples = ", ".join(map(str, self.samples[:8]))
        if len(self.samples) > 8:
            samples += ", ..."
        module = self.module
        if self.module_class:
            module = f"{module or 'the model'} ({self.module_class})"
        place = f"{self.phase} of {module}"
        if self.operation:
            place += f", in {self.operation}"
        if self.phase == "batch":
            place = f"the batch itself, first used by {module}"
        elif self.phase == "parameters":
            place = f"the parameters of {module}"
        elif self.phase == "loss":
            place = module
        return f"rank {self.rank}, micro-batch {self.micro_batch} (samples {samples}), {place}"

    def __str__(self) -> str:
        text = f"{self.where}: {'; '.join(map(str, self.tensors))}"
        if self.other_ranks:
            text += f"; also on ranks {', '.join(map(str, self.other_ranks))}"
        return text


@torch.no_grad()
def tensor_stats(what: str, tensor: Tensor) -> TensorStats | None:
    """The range of this rank's part of a tensor, and how much of it is not finite; waits for the
    device.

    None for a tensor that is sparse or holds no floating-point numbers.
    """
    values = local(tensor).detach()
    if not (values.is_floating_point() or values.is_complex()) or values.layout != torch.strided:
        return None
    dtype = DTYPE_NAMES.get(values.dtype, str(values.dtype).removeprefix("torch."))
    stats = TensorStats(what, dtype, list(tensor.shape), 0, 0, [])
    if values.numel() == 0:
        return stats
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.element_size() == 1:  # float8 lacks the operations below
        values = values.float()
    span = [bound.item() for bound in torch.aminmax(values)]  # allocates nothing if all is finite
    if all(map(math.isfinite, span)):
        return replace(stats, span=span)
    finite = values[values.isfinite()]
    span = []
    if finite.numel():
        span = [bound.item() for bound in torch.aminmax(finite)]
    return replace(stats, nan=int(values.isnan().sum()), inf=int(values.isinf().sum()), span=span)


def all_stats(what: str, values: Any) -> list[TensorStats]:
    """`tensor_stats` of every tensor in nested containers."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return [stats for leaf in leaves if (stats := tensor_stats(what, leaf)) is not None]


def all_finite(stats: Iterable[TensorStats]) -> bool:
    return all(one.finite for one in stats)


@dataclass(eq=False)
class ModuleCall:
    """One call of a module; the graph nodes it recorded have sequence numbers from `begin` to below
    `end`.
    """

    module: str
    module_class: str
    begin: int
    outer: list["ModuleCall"]  # the calls that it is inside of
    inputs: list[TensorStats]
    outputs: list[TensorStats] = field(default_factory=list)
    end: int = 0

    @property
    def is_cause(self) -> bool:
        """Whether it made an inf or nan that went on. Otherwise it went no further than an outer
        call, such as an attention mask's -inf.
        """
        if not all_finite(self.inputs) or all_finite(self.outputs):
            return False
        return not any(all_finite(call.outputs) for call in self.outer)


class ForwardBackwardHooks:
    """Hooks on all modules and graph nodes for one forward and backward; they change no value."""

    def __init__(self, model: nn.Module):
        self.calls: list[ModuleCall] = []  # in the order in which they began
        self.returned: list[ModuleCall] = []  # in the order in which they returned
        self._model = model
        self._open: list[ModuleCall] = []
        self._handles: list[Any] = []
        # Nodes that returned a non-finite gradient: the nodes that received it.
        self._passed_to: dict[Any, list[Any]] = {}
        # Of these, in backward's order, those that received finite ones.
        self._origins: list[tuple[Any, list[TensorStats]]] = []
        self._call_counts: Counter[str] = Counter()
        self._parameter_names: dict[int, str] = {}
        self._in_forward = True  # activation checkpointing calls modules again in backward

    def __enter__(self) -> Self:
        for name, module in self._model.named_modules():
            before = partial(self._before_module, clean_name(name))
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after_module))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before_module(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._in_forward:
            return
        # Sharded parameters are gathered by now.
        for last_part, parameter in module.named_parameters(recurse=False):
            self._parameter_names.setdefault(id(parameter), f"{name}.{last_part}".lstrip("."))
        self._call_counts[name] += 1
        of_class = class_name(module)
        if self._call_counts[name] > 1:
            of_class += f", call {self._call_counts[name]}"
        inputs = all_stats("input", (args, kwargs))  # before an in-place module overwrites them
        call = ModuleCall(name, of_class, sequence_number(), list(self._open), inputs)
        self.calls.append(call)
        self._open.append(call)

    def _after_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._in_forward:
            call = self._open.pop()
            call.end = sequence_number()
            call.outputs = all_stats("output", output)
            self.returned.append(call)

    def forward_cause(self, loss: Tensor) -> NonFinite:
        """For a loss that is not finite: the first module that made it so, else the task."""
        for call in self.returned:
            if call.is_cause:
                worst_first = sorted(call.outputs, key=lambda stats: (not stats.nan, stats.finite))
                tensors = worst_first + call.inputs
                return NonFinite("forward", call.module, call.module_class, tensors)
        outputs = self.calls[0].outputs if self.calls else []
        return NonFinite("loss", TASK, "", [*all_stats("loss", loss), *outputs])

    def watch_backward(self, loss: Tensor) -> None:
        """Hook every node of the graph of `loss`; call it between forward and backward."""
        self._in_forward = False
        for node in reachable(
            loss.grad_fn, lambda node: [next_ for next_, _ in node.next_functions]
        ):
            if not is_leaf(node):
                self._handles.append(node.register_hook(partial(self._after_node, node)))

    def _after_node(
        self, node: Any, returned: Sequence[Tensor | None], received: Sequence[Tensor | None]
    ) -> None:
        bad = []
        for gradient, (following, _) in zip(returned, node.next_functions, strict=False):
            if gradient is None:
                continue
            stats = tensor_stats(self._gradient_name(following), gradient)
            if stats is not None and not stats.finite:
                bad.append(stats)
                self._passed_to.setdefault(node, []).append(following)
        if bad:
            before = all_stats("gradient received", list(received))
            if all_finite(before):
                self._origins.append((node, bad + before))

    def backward_cause(self) -> NonFinite | None:
        """The first operation to return a non-finite gradient that reaches a parameter.

        Others are harmless: a later operation, such as a mask or a ReLU, turns what they return
        into zeros.
        """
        for node, gradients in self._origins:
            if not any(map(is_leaf, reachable(node, lambda node: self._passed_to.get(node, [])))):
                continue
            number = node._sequence_nr()
            around = [call for call in self.calls if call.begin <= number < call.end]
            if not around:
                return NonFinite("backward", TASK, "", gradients, node.name())
            call = around[-1]  # the innermost began last
            tensors = gradients + call.outputs + call.inputs
            return NonFinite("backward", call.module, call.module_class, tensors, node.name())
        return None

    def _gradient_name(self, node: Any) -> str:
        """Names the gradient that goes to `node`: a parameter's, possibly transposed or cast first,
        or any other.
        """
        while node is not None and node.name() in ("TBackward0", "ToCopyBackward0"):
            node = node.next_functions[0][0]
        if node is not None and is_leaf(node) and id(node.variable) in self._parameter_names:
            return f"gradient of {self._parameter_names[id(node.variable)]}"
        return "gradient passed on"


def reachable(start: Any, following: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """Every node that can be reached from `start`, itself included, each once."""
    seen = {start, None}
    ahead = [start]
    while ahead:
        node = ahead.pop()
        yield node
        new = set(following(node)) - seen
        seen |= new
        ahead += new


def sequence_number() -> int:
    """The number that autograd will give to the next node of the graph; diagnostics only, torch has
    no public name.
    """
    return torch._C._autograd._get_sequence_nr()


def clean_name(name: str) -> str:
    """A module's or parameter's name in the user's model, without the parts that wrappers add."""
    parts = name.split(".")
    return ".".join(p for p in parts if p not in ("_checkpoint_wrapped_module", "_orig_mod"))


def class_name(module: nn.Module) -> str:
    """The class in the user's code: FSDP derives another."""
    return next(cls.__name__ for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def is_leaf(node: Any) -> bool:
    """Whether a node accumulates into a parameter's gradient."""
    return node.name() == "torch::autograd::AccumulateGrad"


def find_nonfinite(
    task: Task, model: nn.Module, batch: Any, share: Tensor, precision: Precision
) -> NonFinite | None:
    """The first inf or nan of one forward and backward; None if all is finite. Leaves gradients
    behind.

    batch: as a step takes it; share: what its loss is multiplied by, scalar float32. The loss scale
    is 1.
    """
    hooks = ForwardBackwardHooks(model)
    # Compiled code calls no hooks, and anomaly detection would raise before the cause is found.
    with hooks, uncompiled(), torch.autograd.set_detect_anomaly(False):
        with precision.autocast():
            loss = loss_of(task, model, batch, precision.device)
        shared = loss * share
        hooks.watch_backward(shared)
        shared.backward()
    fault = hooks.backward_cause()
    if not loss.isfinite():
        fault = hooks.forward_cause(loss)
    elif not share.isfinite():
        fault = NonFinite("loss", "the task's weight", "", all_stats("world_size / weight", share))
    if fault is None:
        return None
    return nonfinite_parameters(model) or nonfinite_batch(batch, hooks, fault) or fault


def nonfinite_parameters(model: nn.Module) -> NonFinite | None:
    for name, parameter in model.named_parameters():
        stats = tensor_stats(clean_name(name), parameter)
        if stats is not None and not stats.finite:
            owner = name.rpartition(".")[0]
            of_class = class_name(model.get_submodule(owner))
            return NonFinite("parameters", clean_name(owner), of_class, [stats])
    return None


def nonfinite_batch(batch: Any, hooks: ForwardBackwardHooks, fault: NonFinite) -> NonFinite | None:
    """The same fault, blamed on the batch and the first module that it spoiled."""
    leaves = tree_flatten_with_path(batch.batch if isinstance(batch, Padding) else batch)[0]
    bad = []
    for path, leaf in leaves:
        if isinstance(leaf, Tensor):
            bad += [one for one in all_stats(f"batch{keystr(path)}", leaf) if not one.finite]
    if not bad:
        return None
    user: ModuleCall | NonFinite = fault
    for call in reversed(hooks.returned):
        if not all_finite(call.outputs):
            user = call
    return NonFinite("batch", user.module, user.module_class, bad)
