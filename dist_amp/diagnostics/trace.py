"""Records what a forward and a backward compute, as a list of events to compare or search.

`Recorder` wraps the user's task and is used in its place. During its `loss_sum`, hooks on the
modules record each output, and a dispatch mode records each operation. Then it puts hooks on the
nodes of the loss's autograd graph, which record during backward the gradient that each node returns
and the gradient that arrives at each parameter: that of this micro-batch on this rank, before it is
reduced. `summarize` is called with the tensors of an event, and returns what the event keeps of
them: hashes, statistics, dtypes or copies. Recording changes no result, and leaves no hook behind.

`recorded_step` takes a run's step in this way, and also records the gradients that the optimizer
gets. What activation checkpointing recomputes is not recorded, because that happens outside of
`loss_sum`. A compiled block is one event, unless compile.stance("force_eager") runs it eagerly.
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
Summarize = Callable[[list[Tensor]], Any]

TASK = "the task's loss_sum"  # the module of an event outside of all modules
LEAF = "torch::autograd::AccumulateGrad"  # the node at which a parameter's gradient arrives
CHUNK = 2**20  # elements hashed at a time, to bound the memory
SAMPLED_ELEMENTS = 2**16  # about how many of a batch's tensor are hashed, evenly spread
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size

# Returns the number that autograd will give to the next graph node; it has no public name.
sequence_number = torch._C._autograd._get_sequence_nr


@dataclass(eq=False)
class Event:
    """Something that was computed. values, inputs: what `summarize` returned for its tensors."""

    kind: Kind
    module: str  # its name in the user's model, "" for the model itself; or TASK
    values: Any  # of the result; of an "update": the gradient that the optimizer gets
    name: str = ""  # of the parameter, the operation, or the node of the autograd graph
    inputs: Any = None  # if they are recorded
    micro_batch: int = 0  # counts the calls of loss_sum
    module_class: str = ""
    callers: Sequence["Event"] = ()  # for a forward: the forwards that called it, outermost first
    nodes: range = field(default_factory=lambda: range(0))  # of the graph nodes it made, or its own


class Recorder:
    """A task whose loss_sum is recorded. kinds: of events to record; the loss always is."""

    def __init__(
        self,
        task: Any,
        model: nn.Module,
        summarize: Summarize,
        kinds: Collection[str],
        inputs: bool = False,
        drop_gradients: bool = False,
    ):
        """inputs: whether to record the inputs of modules, operations and nodes, too.

        drop_gradients: leave the parameters' .grad as it is; "gradient" must be among the kinds.
        """
        self.task = task
        self.events: list[Event] = []
        self._model = model
        self._summarize = summarize
        self._kinds = kinds
        self._with_inputs = inputs
        self._drop_gradients = drop_gradients
        self._micro_batch = -1  # before the first call of loss_sum
        self._is_on = False  # in loss_sum, but not in `summarize`
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
                enter = partial(self._enter_module, clean_name(name))
                self._hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
                self._hooks.enter_context(
                    module.register_forward_hook(self._leave_module, always_call=True)
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
                contexts.enter_context(Operations(self._record_operation))
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
        values = self._summary(content)
        inputs = self._summary(inputs) if self._with_inputs else None
        self.events.append(Event(kind, module, values, name, inputs, self._micro_batch))

    def _summary(self, content: Any) -> Any:
        before, self._is_on = self._is_on, False  # operations of `summarize` are no events
        with torch.no_grad():
            values = self._summarize([tensor.detach() for tensor in tensors(content)])
        self._is_on = before
        return values

    # ---- forward

    def _enter_module(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        # While a block is compiled, its hooks must do nothing, or they would be compiled with it.
        if not torch.compiler.is_compiling() and self._is_on:
            call = Event("forward", name, None, callers=list(self._running))
            call.micro_batch = self._micro_batch
            call.module_class = class_name(module)
            if self._with_inputs:  # now, before an in-place module overwrites them
                call.inputs = self._summary((args, kwargs))
            call.nodes = range(sequence_number(), 0)
            self._running.append(call)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._is_on:
            call = self._running.pop()
            call.nodes = range(call.nodes.start, sequence_number())
            call.values = self._summary(output)
            if "forward" in self._kinds:
                self.events.append(call)

    def _record_operation(self, function: Any, inputs: Any, output: Any) -> None:
        if self._is_on and not getattr(function, "is_view", False):
            module = self._running[-1].module if self._running else TASK
            name = str(getattr(function, "overloadpacket", function))
            if "empty" not in name:  # which returns whatever the memory held
                self._add("op", module, output, name, inputs)

    def _name_parameters(self, prefix: str, module: nn.Module, args: Any) -> None:
        """Called before a unit's forward, for which FSDP2 has gathered new parameter tensors."""
        for name, parameter in module.named_parameters(prefix):
            self._names[id(parameter)] = clean_name(name)

    # ---- backward

    def _watch_backward(self, node: Any) -> None:
        visited: set[Any] = set()
        to_visit = [node]
        while to_visit:
            node = to_visit.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            to_visit += [following for following, _ in node.next_functions]
            if node.name() == LEAF:
                name = self._names.get(id(node.variable))
                if name and "gradient" in self._kinds:
                    record = partial(self._record_gradient, name)
                    self._graph_hooks.callback(node.register_prehook(record).remove)
            elif "backward" in self._kinds:
                record = partial(self._record_node, node.name(), node._sequence_nr())
                self._graph_hooks.callback(node.register_hook(record).remove)

    def _record_node(self, name: str, number: int, returned: Any, received: Any) -> None:
        self._add("backward", TASK, returned, name, received)
        self.events[-1].nodes = range(number, number + 1)

    def _record_gradient(self, name: str, gradients: Any) -> Any:
        self._add("gradient", name.rpartition(".")[0], gradients, name)
        return (None,) if self._drop_gradients else None

    def before_update(self, *_: Any) -> None:
        """A hook of the optimizer. Records the last parameter first: backward's order."""
        if "update" in self._kinds:
            for name, parameter in reversed([*self._model.named_parameters()]):
                if parameter.grad is not None:
                    name = clean_name(name)
                    self._add("update", name.rpartition(".")[0], parameter.grad, name)


class Operations(TorchDispatchMode):
    """Calls before(function, args) and after(function, inputs, output) for each operation."""

    supports_higher_order_operators = True  # otherwise torch raises an error for them

    def __init__(self, after: Any = None, before: Any = None):
        super().__init__()
        self._before = before
        self._after = after

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch runs compiled blocks eagerly, and verify does not check them

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
    run: Run, micro_batches: Sequence[Any], summarize: Summarize, kinds: Collection[str]
) -> tuple[StepReport, list[Event]]:
    """Take a step, and record it. summarize, kinds: see Recorder."""
    recorder = Recorder(run.task, run.parallel.module, summarize, kinds)
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
    summarize: Summarize,
    kinds: Collection[str],
    inputs: bool = False,
) -> tuple[Tensor, list[Event]]:
    """Returns (a micro-batch's loss, the events of its forward and of backward on factor * loss).

    Gradients are neither kept nor reduced over ranks. summarize, kinds, inputs: see Recorder.
    """
    module: Any = run.parallel.module  # without DDP, which would reduce
    recorder = Recorder(task, module, summarize, {*kinds, "gradient"}, inputs, drop_gradients=True)
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


# ---- events


def call_of(event: Event, events: Iterable[Event]) -> Event | None:
    """The innermost module call whose forward made this event's node of the autograd graph."""
    calls = (call for call in events if call.kind == "forward")
    return next((call for call in calls if event.nodes.start in call.nodes), None)


def first_difference(
    a: Iterable[Event],
    b: Iterable[Event],
    error: Callable[[Any, Any], float] = ne,
    tolerance: float = 0.0,
) -> tuple[Event, Event] | None:
    """The first event in `a` whose values, but not inputs, differ from its counterpart's in `b`.

    Returns both. The nth event of a kind, module, name and micro-batch in `a` has the nth in `b` as
    its counterpart. Events without one are left out, such as those of a rank's idle expert.
    """
    counterparts: dict[tuple[Any, ...], deque[Event]] = defaultdict(deque)
    for event in b:
        counterparts[event.kind, event.micro_batch, event.module, event.name].append(event)
    for event in a:
        if queue := counterparts[event.kind, event.micro_batch, event.module, event.name]:
            other = queue.popleft()
            has_inputs = event.inputs is not None
            if has_inputs and error(event.inputs, other.inputs) > tolerance:
                continue
            if error(event.values, other.values) > tolerance:
                return event, other
    return None


def clean_name(name: str) -> str:
    """A module's or parameter's name in the user's model, without the parts added by wrappers."""
    parts = name.split(".")
    return ".".join(p for p in parts if p not in ("_checkpoint_wrapped_module", "_orig_mod"))


def class_name(module: nn.Module) -> str:
    """The class in the user's code: FSDP2 replaces it by a subclass."""
    return next(cls.__name__ for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


# ---- hashes


def hash_tensor(tensor: Tensor, first: int = 0) -> Tensor:
    """A hash of a tensor's bits and their order: scalar int64 on its device.

    first: the index of the tensor's first element in the whole tensor, if it is a shard; the hashes
    of the shards add up to the whole's. Each element is mixed with its index by splitmix64's
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
    """One hash of several tensors, in order; sparse and nested ones are left out."""
    total = 0
    for number, tensor in enumerate(parts):
        if tensor.layout == torch.strided and not tensor.is_nested:
            # Times an odd number, so that swapping two tensors changes the sum.
            total += int(hash_tensor(tensor)) * (2 * number + 1)
    return total % 2**64


def hash_samples(micro_batches: Iterable[Any], device: torch.device) -> Tensor:
    """A hash of a step's micro-batches, without padding: scalar int64 on the device."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for leaf in tensors([batch for batch in micro_batches if not isinstance(batch, Padding)]):
        if leaf.layout == torch.strided and not leaf.is_nested:
            flat = leaf.reshape(-1)
            total += hash_tensor(flat[:: max(1, flat.numel() // SAMPLED_ELEMENTS)]).to(device)
    return total
