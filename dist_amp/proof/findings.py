"""Findings: what in a task itself makes two ways of running differ, so that no strategy is blamed for it.

A task whose runs differ by themselves, whose loss is not the sum over its samples, or whose modules look at the whole
batch can't equal one process with the whole batch. Each is told by running the model twice and comparing what every
module puts out: the first module that differs is named.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves, tree_map

from dist_amp.proof.reference import Exam, Values, copies, gradients_of
from dist_amp.runtime import seed_all
from dist_amp.step import scalar

SAMPLES = 8  # enough to split; the comparison itself takes more


@dataclass(frozen=True)
class Finding:
    """One line for the user. fails: the task is wrong, or can't be compared."""

    text: str
    fails: bool = False


@dataclass
class Trace:
    """One forward and backward: loss sum, gradients, and each module call's first floating-point output, in order."""

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

    differs, where = _apart(exam, *twice(0))
    if differs > exam.rounding("fp32"):
        return [
            *findings,
            Finding(
                f"{where} is not deterministic: two identical runs differ by {differs:.1e}; make it "
                "repeat itself (run.deterministic=true helps with kernels)",
                fails=True,
            ),
        ]
    if differs:
        findings.append(
            Finding(
                f"two identical runs differ by rounding ({differs:.1e}, first in {where}); "
                "run.deterministic=true makes them equal"
            )
        )
    findings += _silence(exam, lambda: twice(1), "draws random numbers in training mode")
    findings += _silence(exam, split, "depends on the whole batch (batch statistics), which no splitting can equal")
    return [*findings, *_sums(exam, whole), *_half_loss(exam, whole), *_unused(exam, whole)]


def trace(exam: Exam, indices: list[int], seed: int) -> Trace:
    """Run the model with its initial weights on these samples."""
    model, batch = exam.model(), exam.batch(indices)
    outputs: list[tuple[str, Tensor]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            floats = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            outputs.extend((name, leaf.detach().clone()) for leaf in floats[:1])

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(note(_named(name, module)))
    seed_all(seed)
    loss = exam.task.loss_sum(model, batch)
    loss.backward()
    return Trace(loss.detach(), copies(gradients_of(model)), outputs)


def _named(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def _apart(exam: Exam, a: Trace, b: Trace) -> tuple[float, str]:
    """(how far two traces are apart, relative to the largest value; the first place where they are).

    b may be of the first half of a's samples: then a's are cut to them, and rounding does not count.
    """
    same_batch = a.outputs[-1][1].shape == b.outputs[-1][1].shape
    least = 0.0 if same_batch else exam.rounding("fp32")
    for (name, x), (_, y) in zip(a.outputs, b.outputs, strict=False):
        x = x[: len(y)] if x.ndim and len(x) == 2 * len(y) else x
        if x.shape == y.shape and (error := _error(x, y)) > least:
            return error, name
    return (_error(a.loss, b.loss), "the task's loss_sum") if same_batch else (0.0, "")


def _error(x: Tensor, y: Tensor) -> float:
    return ((x - y).abs().max() / x.abs().max().clamp(min=1e-30)).item() if x.numel() else 0.0


def _dropout(exam: Exam) -> list[Finding]:
    off = [name for name, module in exam.model().named_modules() if isinstance(module, _DropoutNd)]
    return [Finding(f"dropout is off for the comparison: {', '.join(off[:3])}{' ...' * (len(off) > 3)}")] if off else []


def _silence(exam: Exam, runs: Callable[[], tuple[Trace, Trace]], why: str) -> list[Finding]:
    """Put modules into evaluation mode until the two runs agree."""
    findings: list[Finding] = []
    while True:
        differs, where = _apart(exam, *runs())
        if differs <= exam.rounding("fp32"):
            return findings
        modules = {_named(name, module): module for name, module in exam.model().named_modules()}
        module = modules.get(where)
        alike = {other for other, part in exam.model().named_modules() if type(part) is type(module)}
        if module is None or alike <= exam.task.quiet:
            return [*findings, Finding(f"{where} {why}, in evaluation mode too; it can't be compared", fails=True)]
        exam.task.quiet |= alike
        more = f" and {len(alike) - 1} like it" if len(alike) > 1 else ""
        findings.append(Finding(f"{where}{more} {why}; compared in evaluation mode"))


def _sums(exam: Exam, indices: list[int]) -> list[Finding]:
    """Whether loss and weight of a batch are the sums of its parts'."""
    parts = [indices[: len(indices) // 2], indices[len(indices) // 2 :]]
    whole, *halves = [trace(exam, part, 0).loss for part in (indices, *parts)]
    findings = []
    if not torch.isclose(whole, sum(halves, torch.zeros_like(whole)), rtol=10 * exam.rounding("fp32"), atol=0):
        findings.append(Finding(
            f"the task's loss_sum of {len(indices)} samples is {whole:.6g}, and {sum(halves):.6g} for its halves added "
            "up: it must be a sum over samples, not a mean (reduction=\"sum\")", fails=True))  # fmt: skip
    whole, *halves = [
        scalar(exam.task.weight(exam.batch(part)), "weight", exam.device).cpu() for part in (indices, *parts)
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
            model.register_forward_hook(lambda module, inputs, output: tree_map(_float, output))
        seed_all(0)
        with exam.autocast(dtype), torch.no_grad():
            return exam.task.loss_sum(model, exam.batch(indices)).float()

    as_it_is, in_float32 = loss(False), loss(True)
    error = _error(in_float32, as_it_is)
    if not error > exam.rounding("fp32"):
        return []
    return [Finding(f"the loss is computed in half precision: under {dtype} it is {error:.1e} off what float32 makes "
                    "of the same outputs; cast them first, as in `logits.float()`", fails=True)]  # fmt: skip


def _float(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _unused(exam: Exam, indices: list[int]) -> list[Finding]:
    got = trace(exam, indices, 0).gradients
    lost = [name for name, p in exam.model().named_parameters() if p.requires_grad and name not in got]
    if not lost:
        return []
    return [Finding(f"the parameter {lost[0]} ({len(lost)} such) gets no gradient from the loss; use it, or set "
                    "requires_grad=False", fails=True)]  # fmt: skip
