"""Where a value first was not finite: one forward and backward with hooks names its first inf or nan.

Forward: the first module whose output is not finite while its inputs are. Backward: the first operation of the graph
that is given a finite gradient and passes on one that is not, and the module that it was recorded in: nodes of the
graph are looked at, not modules, so that in-place operations and modules called many times are told apart.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from dist_amp.data import Padding
from dist_amp.fast.compile import uncompiled
from dist_amp.fast.fused import local
from dist_amp.precision import DTYPES, Precision
from dist_amp.step import loss_of
from dist_amp.task import Task

SHORT = {dtype: name for name, dtype in DTYPES.items()}

TASK = "the task's loss_sum"


@dataclass(frozen=True)
class Seen:
    """What a tensor held when it was seen."""

    what: str
    dtype: str
    shape: list[int]
    nan: int
    inf: int
    span: list[float]  # lowest and highest of its finite part; empty where it has none

    @property
    def severity(self) -> int:
        """0: finite; 1: has inf; 2: has nan."""
        return 2 if self.nan else min(self.inf, 1)

    def __str__(self) -> str:
        counts = [f"{number} {name}" for name, number in (("nan", self.nan), ("inf", self.inf)) if number]
        span = "..".join(f"{bound:.6g}" for bound in self.span)
        what = f"{self.what} {self.dtype} {self.shape}"
        if not counts:
            return f"{what} {span or 'empty'}"
        return f"{what} has {', '.join(counts)}, {f'finite part {span}' if span else 'nothing finite'}"


@dataclass(frozen=True)
class Fault:
    """The first value of a step that was not finite, and where it was."""

    phase: Literal["batch", "parameters", "forward", "loss", "backward"]
    module: str  # "" is the model itself
    module_class: str
    tensors: list[Seen]  # what is not finite first, then what it was made from
    operation: str = ""  # of the backward graph
    step: int = 0
    rank: int = 0
    micro_batch: int = 0
    samples: list[int] = field(default_factory=list)
    other_ranks: list[int] = field(default_factory=list)

    @classmethod
    def from_json(cls, text: str) -> "Fault":
        values = json.loads(text)
        return cls(**values | {"tensors": [Seen(**seen) for seen in values["tensors"]]})

    @property
    def key(self) -> tuple[str, str, int]:
        """By this a fault is the same as an earlier one."""
        return self.module, self.phase, self.rank

    @property
    def where(self) -> str:
        """Rank, micro-batch, samples, phase and module."""
        samples = ", ".join(map(str, self.samples[:8])) + (", ..." if len(self.samples) > 8 else "")
        module = f"{self.module or 'the model'} ({self.module_class})" if self.module_class else self.module
        by = f", in {self.operation}" if self.operation else ""
        words = {
            "batch": f"the batch itself, which {module} meets first",
            "parameters": f"the parameters of {module}",
            "loss": module,
        }.get(self.phase, f"{self.phase} of {module}{by}")
        return f"rank {self.rank}, micro-batch {self.micro_batch} (samples {samples}), {words}"

    def __str__(self) -> str:
        others = f"; so it is on ranks {', '.join(map(str, self.other_ranks))}" if self.other_ranks else ""
        return f"{self.where}: {'; '.join(map(str, self.tensors))}{others}"


@torch.no_grad()
def see(what: str, tensor: Tensor) -> Seen | None:
    """A tensor's range and what is not finite in it; None where it holds no floating-point numbers. Reads it."""
    values = local(tensor).detach()
    if not (values.is_floating_point() or values.is_complex()) or values.layout != torch.strided:
        return None
    about = (what, SHORT.get(values.dtype, str(values.dtype).removeprefix("torch.")), list(tensor.shape))
    values = torch.view_as_real(values) if values.is_complex() else values
    values = values.float() if values.element_size() == 1 else values
    if values.numel() == 0:
        return Seen(*about, 0, 0, [])
    span = [bound.item() for bound in torch.aminmax(values)]  # of all of it; copies nothing
    if all(map(math.isfinite, span)):
        return Seen(*about, 0, 0, span)
    nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
    finite = values[values.isfinite()]
    return Seen(*about, nan, inf, [bound.item() for bound in torch.aminmax(finite)] if finite.numel() else [])


def see_all(what: str, values: Any) -> list[Seen]:
    """Each tensor in nested containers, as `see` has it."""
    return [seen for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and (seen := see(what, leaf))]


def severity(seen: Sequence[Seen]) -> int:
    return max((one.severity for one in seen), default=0)


@dataclass(eq=False)
class Call:
    """One call of a module; the graph's nodes that it recorded have numbers from `begin` to below `end`."""

    module: str
    kind: str
    number: int  # which call of this module, from 1
    begin: int
    inputs: list[Seen]
    outputs: list[Seen] = field(default_factory=list)
    end: int = 0

    @property
    def module_class(self) -> str:
        return self.kind if self.number == 1 else f"{self.kind}, call {self.number}"


class Watch:
    """Hooks on all modules of a model, for one forward and one backward; they change nothing of what passes."""

    def __init__(self, model: nn.Module):
        self.calls: list[Call] = []  # in the order in which they began
        self.suspects: list[Call] = []  # output worse than the inputs, in the order in which they ended
        self.first_met: Call | None = None  # the first to end with an output that is not finite
        self._model = model
        self._open: list[Call] = []
        self._handles: list[Any] = []
        # Nodes that passed on what is not finite, in backward's order: gradients, where those went, if it began here.
        self._bad: dict[Any, tuple[list[Seen], list[Any], bool]] = {}
        self._counts: Counter[str] = Counter()
        self._parameters: dict[int, str] = {}
        self._in_forward = True  # activation checkpointing calls modules again in backward

    def __enter__(self) -> "Watch":
        for name, module in self._model.named_modules():
            name = _plain(name)
            before = module.register_forward_pre_hook(self._before(name), with_kwargs=True)
            self._handles += [before, module.register_forward_hook(self._after, with_kwargs=True)]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._in_forward:
                return
            for own, parameter in module.named_parameters(recurse=False):  # gathered by now, where they are sharded
                self._parameters.setdefault(id(parameter), f"{name}.{own}".lstrip("."))
            self._counts[name] += 1
            inputs = see_all("input", (args, kwargs))  # now: an in-place module overwrites them
            begin = torch._C._autograd._get_sequence_nr()
            call = Call(name, _class_name(module), self._counts[name], begin, inputs)
            self.calls.append(call)
            self._open.append(call)

        return hook

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._in_forward:
            return
        call = self._open.pop()
        call.end, call.outputs = torch._C._autograd._get_sequence_nr(), see_all("output", output)
        if severity(call.outputs) == 0:
            # What was not finite inside of it went no further, as where an attention's mask is -inf.
            inside = set(self.calls[self.calls.index(call) :])
            self.suspects = [suspect for suspect in self.suspects if suspect not in inside]
        elif severity(call.outputs) > severity(call.inputs):
            self.suspects.append(call)
        if severity(call.outputs) and self.first_met is None:
            self.first_met = call

    def forward_fault(self, loss: Tensor) -> Fault:
        """Of a loss that is not finite: the first module that made it so, or the task."""
        with_good_inputs = [call for call in self.suspects if severity(call.inputs) == 0]
        for call in with_good_inputs or self.suspects:
            worst_first = sorted(call.outputs, key=lambda seen: -seen.severity)
            return Fault("forward", call.module, call.module_class, worst_first + call.inputs)
        outputs = self.calls[0].outputs if self.calls else []
        return Fault("loss", TASK, "", [*see_all("loss", loss), *outputs])

    def follow(self, loss: Tensor) -> None:
        """Look at every operation of the coming backward of `loss`."""
        self._in_forward = False
        seen: set[Any] = set()
        ahead = [loss.grad_fn]
        while ahead:
            node = ahead.pop()
            if node is None or node in seen or _is_leaf(node):
                continue
            seen.add(node)
            self._handles.append(node.register_hook(self._at(node)))
            ahead += [following for following, _ in node.next_functions]

    def _at(self, node: Any) -> Callable[..., None]:
        def hook(passed_on: Sequence[Tensor | None], received: Sequence[Tensor | None]) -> None:
            bad, gone_to = [], []
            for gradient, (following, _) in zip(passed_on, node.next_functions, strict=False):
                seen = see(self._gradient_name(following), gradient) if gradient is not None else None
                if seen is not None and seen.severity:
                    bad.append(seen)
                    gone_to.append(following)
            if bad:
                before = see_all("gradient received", list(received))
                self._bad[node] = (bad + before, gone_to, severity(bad) > severity(before))

        return hook

    def backward_fault(self) -> Fault | None:
        """The first operation to pass on what is not finite and then spoils a parameter's gradient.

        Others do no harm: a later operation makes zeros of what they pass on, as a mask or a ReLU does.
        """
        for node, (gradients, _, began_here) in self._bad.items():
            if not (began_here and self._reaches_a_leaf(node)):
                continue
            number = node._sequence_nr()
            around = [call for call in self.calls if call.begin <= number < call.end]
            if not around:
                return Fault("backward", TASK, "", gradients, node.name())
            call = around[-1]  # the innermost began last
            tensors = gradients + call.outputs + call.inputs
            return Fault("backward", call.module, call.module_class, tensors, node.name())
        return None

    def _reaches_a_leaf(self, node: Any) -> bool:
        seen: set[Any] = set()
        ahead = [node]
        while ahead:
            node = ahead.pop()
            if _is_leaf(node):
                return True
            if node not in seen and node in self._bad:
                seen.add(node)
                ahead += self._bad[node][1]
        return False

    def _gradient_name(self, node: Any) -> str:
        """Whose gradient goes to `node`: a parameter's, which may be transposed or cast on its way, or none's."""
        while node is not None and node.name() in ("TBackward0", "ToCopyBackward0"):
            node = node.next_functions[0][0]
        name = self._parameters.get(id(node.variable)) if node is not None and _is_leaf(node) else None
        return f"gradient of {name}" if name else "gradient passed on"


def _plain(name: str) -> str:
    """A module's or parameter's name as the user wrote it, without those of wrappers."""
    return name.replace("_checkpoint_wrapped_module", "").replace("_orig_mod", "").replace("..", ".").strip(".")


def _class_name(module: nn.Module) -> str:
    """The class as the user wrote it: FSDP derives one of its own."""
    return next(cls.__name__ for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def _is_leaf(node: Any) -> bool:
    """Whether a node of the graph is where a parameter's gradient ends up."""
    return node.name() == "torch::autograd::AccumulateGrad"


def examine(task: Task, model: nn.Module, batch: Any, share: Tensor, precision: Precision) -> Fault | None:
    """One forward and backward, watched; the first thing that was not finite, or None. Gradients are left behind.

    batch: as a step takes it; share: what its loss is multiplied by, scalar float32. The loss scale is 1.
    """
    watch = Watch(model)
    # Compiled code calls no hooks, and anomaly detection would raise where we want to look.
    with watch, uncompiled(), torch.autograd.set_detect_anomaly(False):
        with precision.autocast():
            loss = loss_of(task, model, batch, precision.device)
        shared = loss * share
        watch.follow(shared)
        shared.backward()
    fault = watch.backward_fault()
    if not loss.isfinite():
        fault = watch.forward_fault(loss)
    elif not share.isfinite():
        fault = Fault("loss", "the task's weight", "", see_all("world_size / weight", share))
    return fault and (_bad_parameters(model) or _bad_batch(batch, watch, fault) or fault)


def _bad_parameters(model: nn.Module) -> Fault | None:
    for name, parameter in model.named_parameters():
        seen = see(name, parameter)
        if seen is not None and seen.severity:
            owner = name.rpartition(".")[0]
            kind = _class_name(model.get_submodule(owner))
            return Fault("parameters", _plain(owner), kind, [replace(seen, what=_plain(name))])
    return None


def _bad_batch(batch: Any, watch: Watch, fault: Fault) -> Fault | None:
    content = batch.batch if isinstance(batch, Padding) else batch
    found = tree_flatten_with_path(content)[0]
    seen = [see(f"batch{keystr(path)}", leaf) for path, leaf in found if isinstance(leaf, Tensor)]
    bad = [one for one in seen if one is not None and one.severity]
    if not bad:
        return None
    first = watch.first_met
    module, kind = (first.module, first.module_class) if first else (fault.module, fault.module_class)
    return replace(fault, phase="batch", module=module, module_class=kind, tensors=bad, operation="")
