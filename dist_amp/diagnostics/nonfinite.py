"""Replay of skipped steps: report the first module with an inf or nan, and keep the micro-batch
that caused it.

At a log step after a skip, all ranks fetch that step's micro-batches again and run them with hooks
at a loss scale of 1: an overflow caused by fp16's scale alone is part of the scaler's normal cycle
and is not reported. Forward: the first module whose output is not finite while its inputs are.
Backward: the first operation that receives a finite gradient and returns one that is not, and the
module that recorded it; checked per node of the autograd graph, so in-place operations and repeated
calls of one module are distinguished. The micro-batch is kept in RUN/nonfinite for `python -m
dist_amp.verify --replay FILE`.
"""

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map_only

from dist_amp.data import Padding
from dist_amp.distributed.process import random_state, set_random_state
from dist_amp.loading.nested import plain_mappings
from dist_amp.precision import DTYPES, Precision
from dist_amp.run import Run
from dist_amp.scaling.compile import uncompiled
from dist_amp.step import loss_of, weight_of
from dist_amp.task import Task
from dist_amp.telemetry.step_report import LogRow, Observer, StepReport
from dist_amp.world import local

MAX_FILES = 8  # kept in a run's folder
MAX_WEIGHT_BYTES = 2**30  # above it a file is kept without the weights
# Skipped steps of one interval that are replayed while only fp16's scale explains them.
MAX_REPLAYS = 3
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
TASK = "the task's loss_sum"


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
        place = {
            "batch": f"the batch itself, first used by {module}",
            "parameters": f"the parameters of {module}",
            "loss": module,
        }.get(self.phase, f"{self.phase} of {module}")
        if self.operation:
            place += f", in {self.operation}"
        return f"rank {self.rank}, micro-batch {self.micro_batch} (samples {samples}), {place}"

    def __str__(self) -> str:
        text = f"{self.where}: {'; '.join(map(str, self.tensors))}"
        if self.other_ranks:
            text += f"; also on ranks {', '.join(map(str, self.other_ranks))}"
        return text


@torch.no_grad()
def stats_of(what: str, values: Any) -> list[TensorStats]:
    """Of this rank's part of each floating-point tensor in nested containers; reads the device."""
    found = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            part = local(leaf).detach()
            if part.layout == torch.strided and (part.is_floating_point() or part.is_complex()):
                dtype = DTYPE_NAMES.get(part.dtype, str(part.dtype).removeprefix("torch."))
                found.append(TensorStats(what, dtype, list(leaf.shape), *_counts(part)))
    return found


def _counts(values: Tensor) -> tuple[int, int, list[float]]:
    """(nan, inf, span) of a tensor."""
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.element_size() == 1:  # float8 lacks the operations below
        values = values.float()
    if not values.numel():
        return 0, 0, []
    span = [bound.item() for bound in torch.aminmax(values)]  # allocates nothing if all is finite
    if all(map(math.isfinite, span)):
        return 0, 0, span
    finite = values[values.isfinite()]
    span = []
    if finite.numel():
        span = [bound.item() for bound in torch.aminmax(finite)]
    return int(values.isnan().sum()), int(values.isinf().sum()), span


def bad(stats: Iterable[TensorStats]) -> list[TensorStats]:
    return [one for one in stats if not one.finite]


# ---- one forward and backward with hooks ----


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


class ForwardBackwardHooks:
    """Hooks on all modules and graph nodes for one forward and backward; they change no value."""

    def __init__(self, model: nn.Module):
        self.calls: list[ModuleCall] = []  # in the order in which they began
        self.returned: list[ModuleCall] = []  # in the order in which they returned
        self._model = model
        self._open: list[ModuleCall] = []
        self._handles: list[Any] = []
        # Nodes that returned a non-finite gradient: the nodes that received it.
        self._passed_to: dict[Any, list[Any]] = defaultdict(list)
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
        inputs = stats_of("input", (args, kwargs))  # before an in-place module overwrites them
        call = ModuleCall(name, of_class, sequence_number(), list(self._open), inputs)
        self.calls.append(call)
        self._open.append(call)

    def _after_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._in_forward:
            call = self._open.pop()
            call.end = sequence_number()
            call.outputs = stats_of("output", output)
            self.returned.append(call)

    def forward_cause(self, loss: Tensor) -> NonFinite:
        """For a loss that is not finite: the first module that made it so, else the task."""
        for call in self.returned:
            if call.is_cause:
                worst_first = sorted(call.outputs, key=lambda stats: (not stats.nan, stats.finite))
                tensors = worst_first + call.inputs
                return NonFinite("forward", call.module, call.module_class, tensors)
        outputs = [one for call in self.calls[:1] for one in call.outputs]
        return NonFinite("loss", TASK, "", [*stats_of("loss", loss), *outputs])

    def watch_backward(self, loss: Tensor) -> None:
        """Hook every node of the graph of `loss`; call it between forward and backward."""
        self._in_forward = False
        for node in reachable(
            loss.grad_fn, lambda node: [after for after, _ in node.next_functions]
        ):
            if not is_leaf(node):
                self._handles.append(node.register_hook(partial(self._after_node, node)))

    def _after_node(
        self, node: Any, returned: Sequence[Tensor | None], received: Sequence[Tensor | None]
    ) -> None:
        found = []
        for gradient, (following, _) in zip(returned, node.next_functions, strict=False):
            if stats := bad(stats_of(self._gradient_name(following), gradient)):
                found += stats
                self._passed_to[node].append(following)
        if found:
            before = stats_of("gradient received", list(received))
            if not bad(before):
                self._origins.append((node, found + before))

    def backward_cause(self) -> NonFinite | None:
        """The first operation to return a non-finite gradient that reaches a parameter; others
        are harmless: a later one, such as a mask or a ReLU, turns what they return into zeros.
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
        """Of the gradient that goes to `node`: a parameter's, possibly transposed or cast first."""
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
    """The number that autograd will give to the next node of the graph; it has no public name."""
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
    """The first inf or nan of one forward and backward, which leaves gradients behind; or None.

    batch: as a step takes it; share: what its loss is multiplied by, scalar float32.
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
        fault = NonFinite("loss", "the task's weight", "", stats_of("world_size / weight", share))
    if fault is None:
        return None
    for name, parameter in model.named_parameters():
        if stats := bad(stats_of(clean_name(name), parameter)):
            owner = name.rpartition(".")[0]
            of_class = class_name(model.get_submodule(owner))
            return NonFinite("parameters", clean_name(owner), of_class, stats)
    content = batch.batch if isinstance(batch, Padding) else batch
    stats = []
    for path, leaf in tree_flatten_with_path(content)[0]:
        stats += bad(stats_of(f"batch{keystr(path)}", leaf))
    if stats:  # blame the batch, and the first module that it spoiled
        users: list[Any] = [call for call in hooks.returned if bad(call.outputs)]
        user = [*users, fault][0]
        return NonFinite("batch", user.module, user.module_class, stats)
    return fault


# ---- the replay of skipped steps ----


class NonfiniteReplay(Observer):
    """Replays on all ranks, and reads the device, only in intervals with a skip; or, with
    debug.nonfinite=step, reads each step's outcome and replays with the parameters as they were.
    """

    def __init__(self, run: Run):
        self.run = run
        self.faults: list[NonFinite] = []
        self._at_each_step = run.config.debug.nonfinite == "step"
        # (step, position of the data before it, whether it was applied) since the last log step
        self._notes: list[tuple[int, int, Tensor]] = []
        self._position = run.data.position
        self._skipped = int(run.schedule.skipped_steps)
        self._repetitions: Counter[tuple[str, str, int]] = Counter()
        self._folder = run.folder / "nonfinite"
        # Stepping a run in a script or a notebook writes no files: it has no folder.
        self._has_folder = run.world.from_main(str(run.folder.is_dir())) == "True"
        self._files = int(run.world.from_main(str(len(list(self._folder.glob("*.pt"))))))
        self._random: dict[str, Tensor] | None = None  # before the step, if each is watched
        if self._at_each_step:
            self._random = random_state(run.world.device)

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        if self._at_each_step:
            if not report.applied.item():
                self._replay(self.run.step, self._position)
            self._random = random_state(self.run.world.device)
        else:
            self._notes.append((self.run.step, self._position, report.applied))
        self._position = self.run.data.position

    def on_log(self, row: LogRow) -> None:
        """Replay the interval's skipped steps, until one is not finite at a loss scale of 1."""
        notes = [note for note in self._notes if note[0] <= row.step]
        self._notes = self._notes[len(notes) :]
        before = self._skipped
        self._skipped = int(row["skipped_steps"])
        if self._skipped == before or not notes:
            return
        applied = torch.stack([note[2] for note in notes]).tolist()
        skipped = [note for note, good in zip(notes, applied, strict=True) if not good]
        replays = MAX_REPLAYS if self.run.scaler.scales else 1
        for step, position, _ in skipped[:replays]:
            if self._replay(step, position):
                return

    def where(self, row: LogRow) -> str:
        """Where the uninterrupted skips up to this log step began, to end an error with."""
        since = row.step - int(row["skips_in_a_row"]) + 1
        for fault in self.faults:
            if fault.step >= since:
                return f"; first: step {fault.step}, {fault.where}"
        return ""

    def _replay(self, step: int, position: int) -> bool:
        """Replay a step on all ranks and report its first inf or nan; return whether it has one."""
        world = self.run.world
        with world.clock.hold("diagnostics"):
            with self.run.parallel.no_side_effects():
                text, kept = self._replay_micro_batches(step, position)
            results = world.gather_texts(text)
            faults = [NonFinite.from_json(text) for text in results if text.startswith("{")]
            if not faults:
                self._warn_nothing_found(step, results)
                return False
            # Only the rank that holds a sharded parameter's bad part sees it; the others blame the
            # module's forward.
            first = min(faults, key=lambda fault: (fault.phase != "parameters", fault.rank))
            others = [fault.rank for fault in faults if fault is not first]
            self._report(replace(first, other_ranks=others), kept)
        return True

    def _replay_micro_batches(self, step: int, position: int) -> tuple[str, dict[str, Any]]:
        """(this rank's first fault as JSON, or why its replay failed; what replaying it takes).

        Every rank runs all of its micro-batches: sharded models need all ranks in each forward.
        """
        run = self.run
        device = run.world.device
        if self._random is not None:
            set_random_state(self._random, device)
        fetched = run.data.at(position)
        if self._random is not None and run.config.data.workers:
            set_random_state(self._random, device)  # workers drew their random numbers elsewhere
        weight = run.world.sum(weight_of(run.task, [batch for batch, _ in fetched], device))
        share = run.world.world_size / weight
        text = ""
        kept: dict[str, Any] = {}
        for number, (batch, samples) in enumerate(fetched):
            random = random_state(device)
            fault = None
            try:
                with run.parallel.gradient_sync(True):
                    module = run.parallel.module
                    fault = find_nonfinite(run.task, module, batch, share, run.precision)
            except Exception as error:
                if run.parallel.sharded:
                    raise  # the other ranks are in a collective of this forward
                text = text or f"{type(error).__name__}: {error}"
            run.optimizer.zero_grad(set_to_none=True)
            if fault is not None and not kept:
                at: dict[str, Any] = {"step": step, "rank": run.world.rank, "micro_batch": number}
                text = json.dumps(asdict(replace(fault, **at, samples=list(samples))))
                kept = {"batch": batch, "share": share.item(), "random": random}
        return text, kept

    def _warn_nothing_found(self, step: int, results: list[str]) -> None:
        warn = self.run.world.warn
        failures = [f"rank {rank}: {why}" for rank, why in enumerate(results) if why]
        if failures:
            warn(f"step {step} was skipped, and replaying it failed on {'; '.join(failures)}")
        elif not self.run.scaler.scales:  # in fp16 the scale was too high, its normal cycle
            text = (
                f"step {step} was skipped, but its replay is finite: the parameters have changed "
                "since, the cause was a random augmentation or dropout, or only the gradients' "
                "norm overflowed"
            )
            if not self._at_each_step:
                text += "; debug.nonfinite=step replays with the parameters as they were"
            warn(text)

    def _report(self, fault: NonFinite, kept: dict[str, Any]) -> None:
        """To reports.jsonl each time; to the console once per module, phase and rank."""
        world = self.run.world
        key = (fault.module, fault.phase, fault.rank)
        self.faults.append(fault)
        self._repetitions[key] += 1
        if world.is_main and self._has_folder:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / "reports.jsonl").open("a") as file:
                file.write(json.dumps({**asdict(fault), "met": self._repetitions[key]}) + "\n")
        if self._repetitions[key] > 1:
            return
        text = f"step {fault.step} was skipped: on {fault}"
        if self._has_folder and self._files < MAX_FILES:
            self._files += 1
            text += "; " + world.gather_texts(self._keep(fault, kept))[fault.rank]
        elif self._has_folder:
            text += f"; {MAX_FILES} micro-batches are kept already"
        world.warn(text)

    def _keep(self, fault: NonFinite, kept: dict[str, Any]) -> str:
        """Write the file, on the rank of the micro-batch; return where. Every rank calls it."""
        run = self.run
        weights = None
        parameters = run.parallel.module.parameters()
        if sum(p.numel() * p.element_size() for p in parameters) <= MAX_WEIGHT_BYTES:
            options = StateDictOptions(full_state_dict=True)
            weights = get_model_state_dict(run.model, options=options)
        if fault.rank != run.world.rank:
            return ""
        path = self._folder / f"step_{fault.step:08d}_rank{fault.rank:05d}.pt"
        batch = kept["batch"]
        padding = isinstance(batch, Padding)
        content = {
            "dist_amp": "nonfinite",
            "report": json.dumps(asdict(fault)),
            **kept,
            "batch": _on_host(batch.batch if padding else batch),
            "padding": padding,
            "scale": run.scaler.scale_tensor.item(),
            "config": run.config_text,
            "weights": _on_host(weights),
        }
        unfinished = path.with_suffix(".writing")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(content, unfinished)
            os.replace(unfinished, path)
        except Exception as error:
            # A full disk, or a batch that can't be pickled, must not end the run.
            unfinished.unlink(missing_ok=True)
            return f"it could not be kept: {error}"
        return f"kept in {path}; python -m dist_amp.verify --replay {path}"


def _on_host(values: Any) -> Any:
    """Copies in host memory; without a copy, a view would be saved with all of its storage."""
    plain = plain_mappings(values)
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), plain)
