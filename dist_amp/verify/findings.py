"""Findings: what in a task itself makes two ways of running differ, so that no strategy is blamed for it.

A task whose runs differ by themselves, whose loss is not the sum over its samples, or whose modules look at the whole
batch can't equal one process with the whole batch. Each is told by running the model twice and comparing what every
module puts out: the first module that differs is named.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map

from dist_amp.runtime.random_state import seed_all
from dist_amp.config.task_class import as_scalar
from dist_amp.verify.dtypes import tensors_in
from dist_amp.verify.reference import Exam, Values, copies, gradients_of

SAMPLES = 8  # enough to split; the comparison itself takes more


@dataclass(frozen=True)
class Finding:
    """One line for the user. fails: the task is wrong, or can't be compared."""

    text: str
    fails: bool = False


@dataclass
class Trace:
    """One forward and backward: loss sum, gradients, and each module call's floating-point outputs, in order."""

    samples: int
    loss: Tensor
    gradients: Values
    outputs: list[tuple[str, Tensor]]


def find(exam: Exam) -> list[Finding]:
    """Look at the task, and set `exam.task.quiet` to the modules that can only be compared in evaluation mode."""
    findings = _dropout(exam)
    half, whole = exam.windows(True)[0][: SAMPLES // 2], exam.windows(True)[0][:SAMPLES]

    def twice(seed: int) -> tuple[Trace, Trace]:
        return trace(exam, whole, 0), trace(exam, whole, seed)

    def split() -> tuple[Trace, Trace]:
        return trace(exam, whole, 0), trace(exam, half, 0)

    first, again = twice(0)
    if not all(value.isfinite().all() for value in (first.loss, *first.gradients.values())):
        text = "loss or gradients of the first samples are not finite in float32, with the initial weights"
        return [*findings, Finding(text, fails=True)]
    differs, where = _apart(exam, first, again)
    if differs > exam.rounding:
        text = f"{where} is not deterministic: two identical runs differ by {differs:.1e}; make it repeat itself"
        return [*findings, Finding(f"{text} (run.deterministic=true helps with kernels)", fails=True)]
    if differs:
        text = f"two identical runs differ by rounding ({differs:.1e}, first in {where})"
        findings.append(Finding(f"{text}; run.deterministic=true makes them equal"))
    findings += _silence(exam, lambda: twice(1), "the result is drawn at random in training mode")
    findings += _silence(
        exam, split, "the result depends on the whole batch (batch statistics), which no splitting can equal"
    )
    return [*findings, *_sums(exam, whole), *_half_loss(exam, whole), *_unused(exam, whole)]


def trace(exam: Exam, indices: list[int], seed: int) -> Trace:
    """Run the model with its initial weights on these samples."""
    model, batch = exam.model(), exam.batch(indices)
    outputs: list[tuple[str, Tensor]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            floats = (tensor for tensor in tensors_in(output) if tensor.is_floating_point())
            outputs.extend((name, tensor.detach().clone()) for tensor in floats)

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(note(_named(name, module)))
    seed_all(seed)
    loss = exam.task.loss_sum(model, batch)
    loss.backward()
    return Trace(len(indices), loss.detach(), copies(gradients_of(model)), outputs)


def _named(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def _apart(exam: Exam, a: Trace, b: Trace) -> tuple[float, str]:
    """(how far two traces are apart, relative to the largest value; the first place where they are).

    b may be of the first half of a's samples: then outputs of half the length are compared with the half of a's, and
    rounding does not count.
    """
    pairs = [(name, x, y) for (name, x), (_, y) in zip(a.outputs, b.outputs, strict=False)]
    if a.samples != b.samples:
        pairs = [(name, x[: len(y)], y) for name, x, y in pairs if x.ndim and y.ndim and len(x) == 2 * len(y)]
    least, rest = (0.0, "the task's loss_sum") if a.samples == b.samples else (exam.rounding, "")
    far = ((_error(x, y), name) for name, x, y in pairs if x.shape == y.shape)
    return next((found for found in far if found[0] > least), (_error(a.loss, b.loss) if rest else 0.0, rest))


def _error(x: Tensor, y: Tensor) -> float:
    return ((x - y).abs().max() / x.abs().max().clamp(min=1e-30)).item() if x.numel() else 0.0


def _dropout(exam: Exam) -> list[Finding]:
    off = [_named(name, module) for name, module in exam.model().named_modules() if isinstance(module, _DropoutNd)]
    return [Finding(f"{_listed(off)}: dropout is off for the comparison")] if off else []


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _silence(exam: Exam, runs: Callable[[], tuple[Trace, Trace]], why: str) -> list[Finding]:
    """Put modules into evaluation mode until the two runs agree."""
    findings: list[Finding] = []
    while True:
        differs, where = _apart(exam, *runs())
        if differs <= exam.rounding:
            return findings
        modules = {_named(name, module): (name, module) for name, module in exam.model().named_modules()}
        kind = type(modules[where][1]) if where in modules else None
        alike = {label: name for label, (name, module) in modules.items() if type(module) is kind}
        if not alike or set(alike.values()) <= exam.task.quiet:
            return [*findings, Finding(f"{where}: {why}, in evaluation mode too; it can't be compared", fails=True)]
        exam.task.quiet |= set(alike.values())
        findings.append(Finding(f"{_listed(list(alike))}: {why}; compared in evaluation mode"))


def _sums(exam: Exam, indices: list[int]) -> list[Finding]:
    """Whether loss and weight of a batch are the sums of its parts'."""
    parts = [indices[: len(indices) // 2], indices[len(indices) // 2 :]]
    whole, *halves = [trace(exam, part, 0).loss for part in (indices, *parts)]
    findings = []
    if not torch.isclose(whole, sum(halves, torch.zeros_like(whole)), rtol=10 * exam.rounding, atol=0):
        findings.append(Finding(
            f"the task's loss_sum of {len(indices)} samples is {whole:.6g}, and {sum(halves):.6g} for its halves added "
            "up: it must be a sum over samples, not a mean (reduction=\"sum\")", fails=True))  # fmt: skip
    whole, *halves = [
        as_scalar(exam.task.weight(exam.batch(part)), "weight", exam.device).cpu() for part in (indices, *parts)
    ]
    if not torch.isclose(whole, halves[0] + halves[1], rtol=1e-6):
        findings.append(Finding(
            f"the task's weight of {len(indices)} samples is {whole:g}, and {halves[0] + halves[1]:g} for its halves "
            "added up: it must count what loss_sum sums over", fails=True))  # fmt: skip
    return findings


def _half_loss(exam: Exam, indices: list[int]) -> list[Finding]:
    """Whether the loss changes when the model's output is cast to float32 before it."""
    dtype = exam.config.precision.dtype

    def loss(cast: bool) -> Tensor:
        model = exam.model()
        if cast:
            model.register_forward_hook(lambda module, inputs, output: _in_float32(output))
        seed_all(0)
        with exam.autocast(dtype), torch.no_grad():
            return exam.task.loss_sum(model, exam.batch(indices)).float()

    as_it_is, in_float32 = loss(False), loss(True)
    error = _error(in_float32, as_it_is)
    if not error > exam.rounding:
        return []
    return [Finding(f"the loss is computed in half precision: under {dtype} it is {error:.1e} off what float32 makes "
                    "of the same outputs; cast them first, as in `logits.float()`", fails=True)]  # fmt: skip


def _in_float32(value: Any) -> Any:
    """The floating-point tensors in nested dicts, lists, tuples and dataclasses as float32."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{item.name: _in_float32(getattr(value, item.name)) for item in fields(value)})
    return tree_map(lambda leaf: leaf if leaf is value else _in_float32(leaf), value)


def _unused(exam: Exam, indices: list[int]) -> list[Finding]:
    got = trace(exam, indices, 0).gradients
    lost = [name for name, p in exam.model().named_parameters() if p.requires_grad and name not in got]
    if not lost:
        return []
    return [Finding(f"the parameter {lost[0]} ({len(lost)} such) gets no gradient from the loss; use it, or set "
                    "requires_grad=False", fails=True)]  # fmt: skip
