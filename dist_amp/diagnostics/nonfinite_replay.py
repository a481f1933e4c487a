"""Replays skipped steps to report the module that caused an inf or nan.

At the log step after a skip, all ranks compute the skipped step's micro-batches again, recorded by
trace.Recorder. The loss scale is 1, so an overflow caused by fp16's loss scale is not reported.
If the loss is not finite, the cause is the first module with finite inputs and non-finite output;
otherwise the first autograd node that receives finite gradients and returns a non-finite one.

Docs: docs/debugging.md
"""

import copy
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from dist_amp.data import Batches, Indexed, Padding
from dist_amp.diagnostics.trace import TASK, Event, Operations, call_of, recorded_backward
from dist_amp.distributed.process import random_state, set_random_state
from dist_amp.errors import in_one_line
from dist_amp.precision import DTYPES
from dist_amp.run import Run
from dist_amp.scaling.compile import stance
from dist_amp.step import weights_of
from dist_amp.telemetry.observer import Observer
from dist_amp.telemetry.step_report import LogRow, StepReport
from dist_amp.world import local

MAX_REPLAYS = 3  # per log interval in fp16, where most skips come from the loss scale alone
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
LISTED = 8  # samples shown in a message


# ---- the report


@dataclass(frozen=True)
class TensorStats:
    """Statistics of a tensor when it was recorded. what: its role, such as "input"."""

    what: str
    dtype: str
    shape: list[int]
    nan: int
    inf: int
    span: list[float]  # [lowest, highest] finite value; [] if there is none
    rows: list[int] = field(default_factory=list)  # the first rows of dim 0 with an inf or nan

    @property
    def is_finite(self) -> bool:
        return not self.nan + self.inf

    def __str__(self) -> str:
        what = f"{self.what} {self.dtype} {self.shape}"
        span = "..".join(f"{bound:.6g}" for bound in self.span) or "none"
        if self.is_finite:
            return f"{what} {span}"
        return f"{what} has {self.nan} nan and {self.inf} inf, finite range {span}"


@dataclass(frozen=True)
class NonFinite:
    """Where the first inf or nan of a step appeared."""

    phase: Literal["batch", "forward", "loss", "backward"]
    module: str  # "" is the model itself
    module_class: str
    tensors: list[TensorStats]  # first the non-finite tensors, then the ones they come from
    operation: str = ""  # the autograd node, for the phase "backward"
    step: int = 0
    rank: int = 0
    micro_batch: int = 0
    samples: list[int] = field(default_factory=list)  # the micro-batch's dataset indices
    other_ranks: list[int] = field(default_factory=list)  # that also have an inf or nan

    @property
    def location(self) -> str:
        samples = listed(self.samples)
        rows = self.tensors[0].rows
        has_samples = self.tensors[0].shape[:1] == [len(self.samples)]
        if self.phase in ("batch", "forward") and has_samples and len(rows) < len(self.samples):
            samples += f"; not finite: {listed([self.samples[row] for row in rows])}"
        module = f"{self.module or 'the model'} ({self.module_class})"
        place = {
            "batch": "the batch itself",
            "loss": self.module,
            "forward": f"forward of {module}",
            "backward": f"backward of {module}, in {self.operation}",
        }[self.phase]
        return f"rank {self.rank}, micro-batch {self.micro_batch} (samples {samples}), {place}"

    def __str__(self) -> str:
        text = f"{self.location}: {'; '.join(map(str, self.tensors))}"
        if self.other_ranks:
            text += f"; also on ranks {', '.join(map(str, self.other_ranks))}"
        return text


def listed(samples: Sequence[int]) -> str:
    return ", ".join([*map(str, samples[:LISTED]), *(["..."] if len(samples) > LISTED else [])])


def stats_of(values: Sequence[Tensor], what: str = "") -> list[TensorStats]:
    """Statistics of this rank's shard of each floating-point tensor. Waits for the device."""
    stats = []
    for tensor in values:
        part = local(tensor).detach()
        # float8 tensors, of one byte per element, don't support the operations below.
        if part.layout != torch.strided or not part.is_floating_point() or part.element_size() == 1:
            continue
        dtype = DTYPE_NAMES.get(part.dtype, str(part.dtype).removeprefix("torch."))
        nan = inf = 0
        rows: list[int] = []
        span: list[float] = []
        if part.numel():
            span = [bound.item() for bound in torch.aminmax(part)]  # allocates no large tensor
        if not all(map(math.isfinite, span)):  # only now pay for masks of the tensor's size
            is_finite = part.isfinite()
            nan, inf = int(part.isnan().sum()), int(part.isinf().sum())
            finite = part[is_finite]
            span = [bound.item() for bound in torch.aminmax(finite)] if finite.numel() else []
            bad_rows = (~is_finite).reshape(*part.shape[:1], -1).any(-1)
            rows = bad_rows.nonzero().flatten()[: LISTED + 1].tolist()
        stats.append(TensorStats(what, dtype, list(tensor.shape), nan, inf, span, rows))
    return stats


def nonfinite(stats: Sequence[TensorStats]) -> list[TensorStats]:
    return [each for each in stats if not each.is_finite]


def labelled(what: str, stats: Sequence[TensorStats]) -> list[TensorStats]:
    return [replace(each, what=what) for each in stats]


# ---- the first inf or nan of a micro-batch


def first_nonfinite(events: Sequence[Event]) -> NonFinite | None:
    """The cause of a non-finite loss or parameter gradient; None if all of them are finite."""
    (loss,) = (event for event in events if event.kind == "loss")
    gradients = [event for event in events if event.kind == "gradient"]
    if not (nonfinite(loss.values) or any(nonfinite(event.values) for event in gradients)):
        return None
    calls = [event for event in events if event.kind == "forward"]
    if nonfinite(loss.values):
        for call in calls:
            is_origin = nonfinite(call.values) and not nonfinite(call.inputs)
            # An attention mask's -inf is harmless: the outputs of its outer modules are finite.
            if is_origin and all(nonfinite(outer.values) for outer in call.callers):
                stats = labelled("output", call.values) + labelled("input", call.inputs)
                return NonFinite("forward", call.module, call.module_class, stats)
        stats = labelled("loss", loss.values)
        for call in calls[-1:]:  # the last call to return is the model's, if it was called
            stats += labelled("output", call.values)
        return NonFinite("loss", TASK, "", stats)
    for event in events:
        if event.kind == "backward" and nonfinite(event.values) and not nonfinite(event.inputs):
            stats = labelled("gradient returned", nonfinite(event.values))
            stats += labelled("gradient received", event.inputs)
            if owner := call_of(event, events):
                stats += labelled("output", owner.values) + labelled("input", owner.inputs)
                return NonFinite("backward", owner.module, owner.module_class, stats, event.name)
            return NonFinite("backward", TASK, "", stats, event.name)
    return None


def find_nonfinite(run: Run, task: Any, batch: Any, factor: Tensor) -> NonFinite | None:
    """The first inf or nan of a micro-batch's forward and backward. Leaves .grad unchanged.

    batch: a micro-batch or Padding; factor: 1 / (mean weight per rank), scales its loss.
    """
    kinds = ("forward", "backward")
    # Compiled code runs no hooks; anomaly detection would raise before the cause is found.
    with stance("force_eager"), torch.autograd.set_detect_anomaly(False):
        loss, events = recorded_backward(run, task, batch, factor, stats_of, kinds, inputs=True)
    fault = first_nonfinite(events)
    if loss.isfinite() and not factor.isfinite():
        stats = stats_of([factor], "1 / (mean weight per rank)")
        fault = NonFinite("loss", "the task's weight", "", stats)
    if fault is None:
        return None
    content = batch.batch if isinstance(batch, Padding) else batch  # may itself be the cause
    stats = []
    for path, leaf in tree_flatten_with_path(content)[0]:
        if isinstance(leaf, Tensor):
            stats += nonfinite(stats_of([leaf], f"batch{keystr(path)}"))
    return NonFinite("batch", "", "", stats) if stats else fault


def find_in_micro_batches(
    run: Run, step: int, micro_batches: Indexed, task: Any
) -> NonFinite | str:
    """This rank's first NonFinite; otherwise the error that a replay raised, as text, or ""."""
    rank, world_size = run.world.rank, run.world.world_size
    weights = weights_of(task, [batch for batch, _ in micro_batches])
    factor = run.parallel.sum_over_ranks(weights).inverse_mean
    first: NonFinite | str = ""
    for number, (batch, samples) in enumerate(micro_batches):
        if run.config.parallel.bit_exact:
            from dist_amp.bit_exact import seed_micro_batch

            seed_micro_batch(run.config.run.seed, step - 1, number * world_size + rank)
        fault = None
        try:
            fault = find_nonfinite(run, task, batch, factor)
        except Exception as error:
            if run.parallel.sharded:
                raise  # the other ranks wait in a collective of this forward: end the run
            first = first or f"{type(error).__name__}: {error}"
        if fault is not None and not isinstance(first, NonFinite):
            first = replace(fault, step=step, rank=rank, micro_batch=number, samples=list(samples))
    return first


class NonfiniteReplay(Observer):
    """Replays skipped steps on all ranks at the next log step; with debug.nonfinite=step, at once,
    before the parameters change, for which it waits for the device after each step.
    """

    def __init__(self, run: Run):
        self.run = run
        self.faults: list[NonFinite] = []
        self._at_each_step = run.config.debug.nonfinite == "step"
        # For each step since the last log step: (step, data position before it, is applied).
        self._pending: list[tuple[int, int, Tensor]] = []
        self._position = run.data.position
        self._reported: set[tuple[str, str, int]] = set()  # (module, phase, rank)
        self._random: dict[str, Tensor] | None = None  # before a step, with debug.nonfinite=step
        if self._at_each_step:
            self._random = random_state(run.world.device)

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        if self._at_each_step:
            if not report.applied.item():
                self._replay(self.run.step, self._position)
            self._random = random_state(self.run.world.device)
        else:
            self._pending.append((self.run.step, self._position, report.applied))
        self._position = self.run.data.position

    def on_log(self, row: LogRow) -> None:
        """Replay the first skipped step; in fp16 up to MAX_REPLAYS, until one has an inf or nan."""
        pending = [entry for entry in self._pending if entry[0] <= row.step]
        self._pending = self._pending[len(pending) :]
        if not (row["skipped_in_interval"] and pending):
            return
        applied = torch.stack([entry[2] for entry in pending]).tolist()
        skipped = [entry for entry, good in zip(pending, applied, strict=True) if not good]
        for step, position, _ in skipped[:MAX_REPLAYS]:
            if self._replay(step, position) or not self.run.scaler.scales:
                return

    def start_of_skips(self, row: LogRow) -> str:
        """Where the current series of skipped steps started, to end an error message; or ""."""
        since = row.step - int(row["skips_in_a_row"]) + 1
        for fault in self.faults:
            if fault.step >= since:
                return f"; first: step {fault.step}, {fault.location}"
        return ""

    def _replay(self, step: int, position: int) -> bool:
        """Replay a step on all ranks, report its first inf or nan, return whether it has one."""
        run = self.run
        world = run.world
        with world.clock.hold("diagnostics"):
            try:
                task, data = copy_of_task(run)
            except Exception as error:
                cause = f"the task can't be copied ({in_one_line(error)})"
                world.warn(f"step {step} was skipped, but can't be replayed: {cause}")
                return False
            with run.parallel.no_side_effects(), no_writes(run.parallel.module.parameters()):
                micro_batches = data.at(position)
                if self._random is not None:
                    set_random_state(self._random, world.device)
                fault = find_in_micro_batches(run, step, micro_batches, task)
            results = world.gather(fault)
        faults = [result for result in results if isinstance(result, NonFinite)]
        failures = [f"rank {rank}: {cause}" for rank, cause in enumerate(results) if cause]
        if faults:
            first, *later = faults
            self._report(replace(first, other_ranks=[fault.rank for fault in later]))
        elif failures:
            text = "; ".join(failures)
            world.warn(f"step {step} was skipped, and replaying it failed on {text}")
        elif not run.scaler.scales:  # in fp16 the loss scale was too high, which is normal
            world.warn(
                f"step {step} was skipped, but its replay is finite: the cause was a random "
                "augmentation or dropout, only the gradients' norm overflowed, or the parameters "
                "have changed since, which debug.nonfinite=step prevents"
            )
        return bool(faults)

    def _report(self, fault: NonFinite) -> None:
        """Append to reports.jsonl; warn once per module, phase and rank."""
        run = self.run
        self.faults.append(fault)
        hint = ""
        # A run in a script or notebook, stepped by the user's own loop, may have no folder.
        if run.folder.is_dir():
            hint = f"; see dist_amp replay {run.folder} --step {fault.step}"
            if run.world.is_main:
                folder = run.folder / "nonfinite"
                folder.mkdir(exist_ok=True)
                with (folder / "reports.jsonl").open("a") as file:
                    file.write(json.dumps(asdict(fault)) + "\n")
        key = (fault.module, fault.phase, fault.rank)
        if key not in self._reported:
            self._reported.add(key)
            run.world.warn(f"step {fault.step} was skipped: on {fault}{hint}")


# ---- a replay must not change the run


def copy_of_task(run: Run) -> tuple[Any, Batches]:
    """Returns (deep copy of the task, copy of run.data that uses it). Raises what deepcopy does.

    Both share the run's model and dataset, which may be large, so call the task in `no_writes`.
    """
    module = run.parallel.module
    dataset = run.data.fetch.dataset
    shared = [run.model, *module.modules(), *module.parameters(), *module.buffers()]
    if dataset is not run.task:
        shared += [dataset, *getattr(dataset, "__dict__", {}).values()]
    memo = {id(part): part for part in shared if part is not run.task}  # deepcopy keeps these
    data = copy.copy(run.data)
    task, data.fetch = copy.deepcopy((run.task, run.data.fetch), memo)
    return task, data


def no_writes(parameters: Iterable[Tensor]) -> Operations:
    """A context in which each operation that would write to a parameter raises RuntimeError."""
    storages = {storage_of(parameter.detach()) for parameter in parameters}

    def check(function: Any, args: Any) -> None:
        schema = getattr(function, "_schema", None)
        for argument, value in zip(getattr(schema, "arguments", ()), args, strict=False):
            for tensor in tree_leaves(value) if argument.is_write else ():
                if isinstance(tensor, Tensor) and storage_of(tensor) in storages:
                    raise RuntimeError(f"{function} would change a parameter")

    return Operations(before=check)


def storage_of(tensor: Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()
