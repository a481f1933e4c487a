"""A record of a forward and backward, event by event, to be compared or searched.

`Recorder` is a task around the user's task. While its `loss_sum` runs, hooks on the modules note
what they return, and a dispatch mode what operations do. Then hooks on the graph of the loss note,
while backward runs, what each of its nodes returns and what arrives at each parameter: the gradient
of this micro-batch on this rank, before it is reduced. `recorded_step` takes a step of a run with
such a task, and also records the gradients that the optimizer gets. `look` says what is kept of the
tensors: hashes, statistics, dtypes. What activation checkpointing computes again lies outside of
`loss_sum`, and is no event. A compiled block is one call, unless it runs under
`stance("force_eager")`. No value is changed, and afterwards no hook is left.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from operator import ne
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from dist_amp.data import Padding
from dist_amp.loading.nested import tensors
from dist_amp.step import Run, loss_of, train_step
from dist_amp.telemetry.step_report import StepReport

Kind = Literal["parameter", "forward", "op", "loss", "backward", "gradient", "update"]
Look = Callable[[list[Tensor]], Any]

TASK = "the task's loss_sum"  # in place of a module, where none runs
LEAF = "torch::autograd::AccumulateGrad"
CHUNK = 2**20  # elements hashed at a time, which bounds the memory it takes
SAMPLED_ELEMENTS = 2**16  # of a batch's tensor that are hashed, evenly spread
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# The number that autograd will give to the next node of the graph; it has no public name.
sequence_number = torch._C._autograd._get_sequence_nr


@dataclass(eq=False)
class Event:
    """Something that was computed, and what `look` kept of it."""

    kind: Kind
    module: str  # by its name in the user's model, which is "" for the model itself
    values: Any  # what `look` returned for the result; "update": for the step's gradient
    name: str = ""  # of the parameter, the operation, or the node of the backward graph
    inputs: Any = None  # what `look` returned for the inputs, if they are recorded
    micro_batch: int = 0  # counting calls of loss_sum
    module_class: str = ""
    callers: Sequence["Event"] = ()  # the calls of modules that a forward is inside of
    nodes: range = field(default_factory=lambda: range(0))  # of the backward graph, by number


class Recorder:
    """A task whose loss_sum is recorded. kinds: those of the events; a loss is always one."""

    def __init__(
        self,
        task: Any,
        model: nn.Module,
        look: Look,
        kinds: Collection[str],
        inputs: bool = False,
        drop_gradients: bool = False,
    ):
        """inputs: whether to look at the inputs of modules, operations and nodes, too.

        drop_gradients: whether parameters keep no gradient; "gradient" must be among the kinds.
        """
        self.task = task
        self.events: list[Event] = []
        self._model = model
        self._look = look
        self._kinds = kinds
        self._with_inputs = inputs
        self._drop_gradients = drop_gradients
        self._micro_batch = -1  # before the first call of loss_sum
        self._is_on = False
        self._running: list[Event] = []  # calls of modules, innermost last
        self._names: dict[int, str] = {}  # of parameters, by id
        self._hooks = ExitStack()
        self._graph_hooks = ExitStack()  # of one micro-batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def __enter__(self) -> Self:
        for name, parameter in self._model.named_parameters():
            self._names[id(parameter)] = clean_name(name)
        module: nn.Module
        for name, module in self._model.named_modules():
            if isinstance(module, FSDPModule):
                self._hooks.enter_context(
                    module.register_forward_pre_hook(partial(self._name_parameters, name))
                )
            if "forward" in self._kinds or "op" in self._kinds:
                enter = partial(self._enter, clean_name(name))
                self._hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
                self._hooks.enter_context(
                    module.register_forward_hook(self._leave, always_call=True)
                )
        return self

    def __exit__(self, *error: object) -> None:
        self._graph_hooks.close()
        self._hooks.close()

    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        self._micro_batch += 1
        self._graph_hooks.close()
        with ExitStack() as contexts:
            if "op" in self._kinds:
                contexts.enter_context(Operations(self._operation))
            self._is_on = True
            try:
                loss = self.task.loss_sum(model, batch)
            finally:
                self._is_on = False
                self._running.clear()
        self._add("loss", TASK, loss)
        if "backward" in self._kinds or "gradient" in self._kinds:
            self._watch_backward(getattr(loss, "grad_fn", None))
        return loss

    def _add(
        self, kind: Kind, module: str, content: Any, name: str = "", inputs: Any = None
    ) -> None:
        values = self._seen(content)
        inputs = self._seen(inputs) if self._with_inputs else None
        self.events.append(Event(kind, module, values, name, inputs, self._micro_batch))

    def _seen(self, content: Any) -> Any:
        before, self._is_on = self._is_on, False  # what `look` computes is no operation
        with torch.no_grad():
            values = self._look([tensor.detach() for tensor in tensors(content)])
        self._is_on = before
        return values

    # ---- forward

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        # A compiler that looks into a block sees hooks that do nothing.
        if not torch.compiler.is_compiling() and self._is_on:
            call = Event("forward", name, None, callers=list(self._running))
            call.micro_batch = self._micro_batch
            call.module_class = class_name(module)
            if self._with_inputs:  # before an in-place module overwrites them
                call.inputs = self._seen((args, kwargs))
            call.nodes = range(sequence_number(), 0)
            self._running.append(call)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._is_on:
            call = self._running.pop()
            call.nodes = range(call.nodes.start, sequence_number())
            call.values = self._seen(output)
            if "forward" in self._kinds:
                self.events.append(call)

    def _operation(self, function: Any, inputs: Any, output: Any) -> None:
        if self._is_on and not getattr(function, "is_view", False):
            module = self._running[-1].module if self._running else TASK
            name = str(getattr(function, "overloadpacket", function))
            if "empty" not in name:  # whose values are what memory held
                self._add("op", module, output, name, inputs)

    def _name_parameters(self, prefix: str, module: nn.Module, args: Any) -> None:
        """FSDP2 gathers a unit's parameters, as other tensors, right before its forward."""
        for name, parameter in module.named_parameters(prefix):
            self._names[id(parameter)] = clean_name(name)

    # ---- backward

    def _watch_backward(self, node: Any) -> None:
        seen: set[Any] = set()
        ahead = [node]
        while ahead:
            node = ahead.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            ahead += [following for following, _ in node.next_functions]
            if node.name() == LEAF:
                name = self._names.get(id(node.variable))
                if name and "gradient" in self._kinds:
                    arrive = partial(self._arrive, name)
                    self._graph_hooks.callback(node.register_prehook(arrive).remove)
            elif "backward" in self._kinds:
                note = partial(self._node, node.name(), node._sequence_nr())
                self._graph_hooks.callback(node.register_hook(note).remove)

    def _node(self, name: str, number: int, returned: Any, received: Any) -> None:
        self._add("backward", TASK, returned, name, received)
        self.events[-1].nodes = range(number, number + 1)

    def _arrive(self, name: str, gradients: Any) -> Any:
        self._add("gradient", name.rpartition(".")[0], gradients, name)
        return (None,) if self._drop_gradients else None

    def before_update(self, *_: Any) -> None:
        """A hook of the optimizer. From the last parameter to the first: backward's order."""
        if "update" in self._kinds:
            for name, parameter in reversed([*self._model.named_parameters()]):
                if parameter.grad is not None:
                    name = clean_name(name)
                    self._add("update", name.rpartition(".")[0], parameter.grad, name)


class Operations(TorchDispatchMode):
    """Calls before(function, args) and after(function, inputs, output) around each operation."""

    supports_higher_order_operators = True

    def __init__(self, after: Any = None, before: Any = None):
        super().__init__()
        self._before = before
        self._after = after

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise torch runs compiled blocks eagerly, and verify would check that

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self._before is not None:
            self._before(function, args)
        output = function(*args, **(kwargs or {}))
        if self._after is not None:
            self._after(function, (args, kwargs), output)
        return output


def recorded_step(
    run: Run, micro_batches: Sequence[Any], look: Look, kinds: Collection[str]
) -> tuple[StepReport, list[Event]]:
    """Take a step, and record it; look and kinds: see Recorder."""
    recorder = Recorder(run.task, run.parallel.module, look, kinds)
    recorded_run = replace(run, task=recorder)
    with recorder, run.optimizer.register_step_pre_hook(recorder.before_update):
        report = train_step(recorded_run, micro_batches)
    run.step = recorded_run.step
    return report, recorder.events


def recorded_backward(
    run: Run,
    task: Any,
    batch: Any,
    factor: Tensor,
    look: Look,
    kinds: Collection[str],
    inputs: bool = False,
) -> tuple[Tensor, list[Event]]:
    """Take the loss of a micro-batch, and the backward of `factor` times it, and record them.

    Gradients are neither kept nor reduced over ranks. look, kinds, inputs: see Recorder.
    """
    module: Any = run.parallel.module  # without DDP, which would reduce
    recorder = Recorder(task, module, look, {*kinds, "gradient"}, inputs, drop_gradients=True)
    if run.parallel.sharded:
        module.set_requires_gradient_sync(False)
    try:
        with recorder:
            with run.precision.autocast():
                loss = loss_of(recorder, module, batch, run.world.device)
            (loss * factor).backward()
    finally:
        if run.parallel.sharded:
            module.set_requires_gradient_sync(True)
    return loss.detach(), recorder.events


# ---- what events say


def call_of(event: Event, events: Iterable[Event]) -> Event | None:
    """The innermost call of a module that made this node of the backward graph."""
    calls = (call for call in events if call.kind == "forward")
    return next((call for call in calls if event.nodes.start in call.nodes), None)


def first_difference(
    a: Iterable[Event],
    b: Iterable[Event],
    error: Callable[[Any, Any], float] = ne,
    tolerance: float = 0.0,
) -> tuple[Event, Event] | None:
    """The first event whose values differ though its inputs do not, in `a` and in `b`.

    An event's counterpart has the same kind, module and name, and is the nth of these in its
    micro-batch too. What only one side has is left out: a rank's idle expert, another operation.
    """
    counterparts: dict[tuple[Any, ...], deque[Event]] = defaultdict(deque)
    for event in b:
        counterparts[event.kind, event.micro_batch, event.module, event.name].append(event)
    for event in a:
        if same := counterparts[event.kind, event.micro_batch, event.module, event.name]:
            other = same.popleft()
            seen = event.inputs is not None
            if seen and error(event.inputs, other.inputs) > tolerance:
                continue
            if error(event.values, other.values) > tolerance:
                return event, other
    return None


def clean_name(name: str) -> str:
    """A module's or parameter's name in the user's model, without the parts that wrappers add."""
    parts = name.split(".")
    return ".".join(p for p in parts if p not in ("_checkpoint_wrapped_module", "_orig_mod"))


def class_name(module: nn.Module) -> str:
    """The class in the user's code: FSDP derives another."""
    return next(cls.__name__ for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


# ---- hashes


def hash_tensor(tensor: Tensor, first: int = 0) -> Tensor:
    """A hash of a tensor's bits and their order: scalar int64 on its device.

    first: the index of the tensor's first element in the whole tensor that it is a part of; the
    hashes of the parts add up to the whole's. Each element is mixed with its index by splitmix64's
    finaliser (Steele et al. 2014, doi:10.1145/2660193.2660195); integers wrap around.
    """
    values = tensor.detach().resolve_conj().resolve_neg()
    if values.is_complex():
        values = torch.view_as_real(values)
    bits = values.reshape(-1).view(BITS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(CHUNK):
        mixed = torch.arange(first + 1, first + 1 + len(chunk), device=bits.device)
        mixed.mul_(-7046029254386353131).add_(chunk)
        mixed.bitwise_xor_(mixed >> 30).mul_(-4658895280553007687)
        mixed.bitwise_xor_(mixed >> 27).mul_(-7723592293110705685)
        total += mixed.sum()
        first += len(chunk)
    return total


def hash_of(parts: Iterable[Tensor]) -> int:
    """One hash of several tensors and their order; sparse and nested ones are left out."""
    total = 0
    for number, tensor in enumerate(parts):
        if tensor.layout == torch.strided and not tensor.is_nested:
            # Times an odd number, so that exchanged tensors are noticed.
            total += int(hash_tensor(tensor)) * (2 * number + 1)
    return total % 2**64


def hash_samples(micro_batches: Iterable[Any], device: torch.device) -> Tensor:
    """A hash of what a step was fed, without padding: scalar int64 on the device."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for leaf in tensors([batch for batch in micro_batches if not isinstance(batch, Padding)]):
        if leaf.layout == torch.strided and not leaf.is_nested:
            flat = leaf.reshape(-1)
            total += hash_tensor(flat[:: max(1, flat.numel() // SAMPLED_ELEMENTS)]).to(device)
    return total
