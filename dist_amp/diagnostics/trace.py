"""Records the forward and backward of micro-batches, as a list of events to compare or search.

`Recorder` wraps the user's task and takes its place in a step. While the task's `loss_sum` runs,
hooks record each module's output, and a dispatch mode records each operation's. Then hooks on the
loss's autograd graph record, during the backward, the gradients that each node returns, and the
gradient of each parameter: for one micro-batch on this rank, before any reduction over ranks.
An event keeps what the caller's function `summarize` returns for its tensors, such as hashes,
statistics, dtypes or copies. Recording changes no result and leaves no hooks behind.

`recorded_step` records a whole training step, including the gradients that the optimizer gets.
Recomputation by activation checkpointing happens outside of `loss_sum` and is not recorded. Modules
inside a compiled block are not recorded, except under compile.stance("force_eager").
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

TASK = "the task's loss_sum"  # Event.module, for what happens outside of all modules
ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"  # adds to a parameter's .grad
CHUNK = 2**20  # elements hashed at a time, to bound the memory
SAMPLED_ELEMENTS = 2**16  # hashed per tensor of a batch, evenly spaced; at most twice as many
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element

# The sequence number of the next node that autograd creates. torch has no public function for it.
next_sequence_number = torch._C._autograd._get_sequence_nr


@dataclass(eq=False)
class Event:
    """One recorded computation. values, inputs: what `summarize` returned for those tensors."""

    kind: Kind  # Recorder makes no "parameter" events: diff and verify do, to compare parameters
    module: str  # the module's name in the user's model, "" for the model itself; or TASK
    values: Any  # of the output or gradient; "update": of the gradient that the optimizer gets
    name: str = ""  # name of the parameter, operation or autograd node
    inputs: Any = None  # None if they are not recorded; "backward": of the gradients it receives
    micro_batch: int = 0  # index of the loss_sum call
    module_class: str = ""
    callers: Sequence["Event"] = ()  # "forward": the enclosing module calls, outermost first
    nodes: range = field(default_factory=lambda: range(0))  # its autograd nodes' sequence numbers


class Recorder:
    """A task whose loss_sum is recorded. kinds: the events to record; "loss" always is."""

    def __init__(
        self,
        task: Any,
        model: nn.Module,
        summarize: Summarize,
        kinds: Collection[str],
        inputs: bool = False,
        drop_gradients: bool = False,
    ):
        """inputs: also record the inputs of modules, operations and autograd nodes.

        drop_gradients: leave each parameter's .grad unchanged. Requires the kind "gradient".
        """
        self.task = task
        self.events: list[Event] = []
        self._model = model
        self._summarize = summarize
        self._kinds = kinds
        self._with_inputs = inputs
        self._drop_gradients = drop_gradients
        self._micro_batch = -1  # loss_sum increments it
        self._is_recording = False  # True during loss_sum, except during `summarize`
        self._open_calls: list[Event] = []  # module calls that have not returned, innermost last
        self._names: dict[int, str] = {}  # {id(parameter): name}
        self._hooks = ExitStack()  # on modules
        self._graph_hooks = ExitStack()  # on the current micro-batch's autograd graph

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def __enter__(self) -> Self:
        self._name_parameters("", self._model, ())
        add = self._hooks.enter_context
        module: nn.Module
        for name, module in self._model.named_modules():
            if isinstance(module, FSDPModule):
                add(module.register_forward_pre_hook(partial(self._name_parameters, name)))
            if "forward" in self._kinds or "op" in self._kinds:
                enter = partial(self._enter_module, clean_name(name))
                add(module.register_forward_pre_hook(enter, with_kwargs=True))
                add(module.register_forward_hook(self._leave_module, always_call=True))
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
            self._is_recording = True
            try:
                loss = self.task.loss_sum(model, batch)
            finally:
                self._is_recording = False
                self._open_calls.clear()
        self._add("loss", TASK, loss)
        if "backward" in self._kinds or "gradient" in self._kinds:
            self._hook_backward(getattr(loss, "grad_fn", None))
        return loss

    def _add(
        self, kind: Kind, module: str, content: Any, name: str = "", inputs: Any = None
    ) -> None:
        values = self._summary(content)
        inputs = self._summary(inputs) if self._with_inputs else None
        self.events.append(Event(kind, module, values, name, inputs, self._micro_batch))

    def _summary(self, content: Any) -> Any:
        before, self._is_recording = self._is_recording, False  # skip `summarize`'s operations
        with torch.no_grad():
            values = self._summarize([tensor.detach() for tensor in tensors(content)])
        self._is_recording = before
        return values

    # ---- forward

    def _enter_module(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        # Hooks inside a block that torch.compile is tracing would be compiled into the block.
        if not torch.compiler.is_compiling() and self._is_recording:
            call = Event("forward", name, None, callers=list(self._open_calls))
            call.micro_batch = self._micro_batch
            call.module_class = class_name(module)
            if self._with_inputs:  # before the call, because an in-place module overwrites them
                call.inputs = self._summary((args, kwargs))
            call.nodes = range(next_sequence_number(), 0)  # _leave_module sets its end
            self._open_calls.append(call)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._is_recording:
            call = self._open_calls.pop()
            call.nodes = range(call.nodes.start, next_sequence_number())
            call.values = self._summary(output)
            if "forward" in self._kinds:
                self.events.append(call)

    def _record_operation(self, function: Any, inputs: Any, output: Any) -> None:
        if self._is_recording and not getattr(function, "is_view", False):
            module = self._open_calls[-1].module if self._open_calls else TASK
            name = str(getattr(function, "overloadpacket", function))
            if "empty" not in name:  # aten.empty returns uninitialised memory
                self._add("op", module, output, name, inputs)

    def _name_parameters(self, prefix: str, module: nn.Module, args: Any) -> None:
        """Also runs before an FSDP2 unit's forward, which uses newly gathered parameter tensors."""
        for name, parameter in module.named_parameters(prefix):
            self._names[id(parameter)] = clean_name(name)

    # ---- backward

    def _hook_backward(self, node: Any) -> None:
        visited: set[Any] = set()
        to_visit = [node]
        while to_visit:
            node = to_visit.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            to_visit += [next_node for next_node, _ in node.next_functions]
            if node.name() == ACCUMULATE_GRAD:
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
        """Optimizer hook that records gradients, last parameter first, as in the backward."""
        if "update" in self._kinds:
            for name, parameter in reversed([*self._model.named_parameters()]):
                if parameter.grad is not None:
                    name = clean_name(name)
                    self._add("update", name.rpartition(".")[0], parameter.grad, name)


class Operations(TorchDispatchMode):
    """Calls before(function, args) and after(function, inputs, output) for each operation."""

    supports_higher_order_operators = True  # without this, torch raises an error for them

    def __init__(self, after: Any = None, before: Any = None):
        super().__init__()
        self._before = before
        self._after = after

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise torch would run compiled blocks eagerly while this mode is active

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
    """Take a training step and record it. summarize, kinds: see Recorder."""
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
    """Record a micro-batch's forward and the backward of factor * loss. Returns (loss, events).

    Gradients are recorded, but neither kept nor reduced. summarize, kinds, inputs: see Recorder.
    """
    module: Any = run.parallel.module  # not DDP's wrapper, which would reduce the gradients
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
    """The innermost module call whose forward created a "backward" event's autograd node."""
    calls = (call for call in events if call.kind == "forward")
    return next((call for call in calls if event.nodes.start in call.nodes), None)


def first_difference(
    a: Iterable[Event],
    b: Iterable[Event],
    difference: Callable[[Any, Any], float] = ne,
    tolerance: float = 0.0,
) -> tuple[Event, Event] | None:
    """The first event in `a` with the same inputs, if recorded, but other values than in `b`.

    Returns (event, counterpart in `b`): the nth of the same kind, micro-batch, module and name.
    Events without one, such as an idle expert's, are skipped. Same: difference(x, y) <= tolerance.
    """
    counterparts: dict[tuple[Any, ...], deque[Event]] = defaultdict(deque)
    for event in b:
        counterparts[event.kind, event.micro_batch, event.module, event.name].append(event)
    for event in a:
        if queue := counterparts[event.kind, event.micro_batch, event.module, event.name]:
            counterpart = queue.popleft()
            has_inputs = event.inputs is not None
            if has_inputs and difference(event.inputs, counterpart.inputs) > tolerance:
                continue
            if difference(event.values, counterpart.values) > tolerance:
                return event, counterpart
    return None


def clean_name(name: str) -> str:
    """A module's or parameter's name in the user's model: without the prefixes of wrappers."""
    parts = name.split(".")
    return ".".join(p for p in parts if p not in ("_checkpoint_wrapped_module", "_orig_mod"))


def class_name(module: nn.Module) -> str:
    """The name of the user's class; FSDP2 replaces a module's class by a subclass."""
    return next(cls.__name__ for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


# ---- hashes


def hash_tensor(tensor: Tensor, first: int = 0) -> Tensor:
    """A hash of a tensor's bits in order: scalar int64 on the tensor's device.

    first: for a shard, the index of its first element in the whole tensor. The sum of all shards'
    hashes is then the whole tensor's hash. Each element is mixed with its index, after splitmix64's
    finaliser (Steele et al. 2014, doi:10.1145/2660193.2660195), and sums wrap around.
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
    """One hash of several tensors in order, without sparse and nested ones. Waits for the GPU."""
    total = 0
    for number, tensor in enumerate(parts):
        if tensor.layout == torch.strided and not tensor.is_nested:
            # Each tensor has its own odd factor, so that swapping two tensors changes the sum.
            total += int(hash_tensor(tensor)) * (2 * number + 1)
    return total % 2**64


def hash_samples(micro_batches: Iterable[Any], device: torch.device) -> Tensor:
    """A hash of elements sampled from a step's micro-batches, except padding: scalar int64."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for leaf in tensors([batch for batch in micro_batches if not isinstance(batch, Padding)]):
        if leaf.layout == torch.strided and not leaf.is_nested:
            flat = leaf.reshape(-1)
            total += hash_tensor(flat[:: max(1, flat.numel() // SAMPLED_ELEMENTS)]).to(device)
    return total
