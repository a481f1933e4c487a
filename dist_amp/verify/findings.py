"""Findings: what in the task itself makes two ways of running differ, so that no strategy is blamed for it.

A task that is not deterministic, whose loss is not the sum over its samples, or whose modules depend on the whole batch
can't equal one process with the whole batch. Each is found by running the model twice and comparing the outputs of
every module: the first module that differs is named.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map

from dist_amp.config.task_class import as_scalar
from dist_amp.runtime.random_state import seed_all
from dist_amp.verify.dtypes import tensors_in
from dist_amp.verify.reference import Reference, Values, cloned, gradients_of

SAMPLES = 8  # enough to split; the comparison itself takes more


@dataclass(frozen=True)
class Finding:
    """One line for the user. fails: the task is wrong, or can't be compared."""

    text: str
    fails: bool = False


@dataclass
class Trace:
    """One forward and backward: loss sum, gradients, and the floating-point outputs of each module call, in order."""

    samples: int
    loss: Tensor
    gradients: Values
    outputs: list[tuple[str, Tensor]]


def inspect_task(reference: Reference) -> list[Finding]:
    """Check the task; sets `reference.task.eval_modules` to what can only be compared in evaluation mode."""
    findings = _dropout(reference)
    samples = reference.step_samples(True)[0][:SAMPLES]

    def repeated(seed: int) -> tuple[Trace, Trace]:
        return trace(reference, samples, 0), trace(reference, samples, seed)

    def split() -> tuple[Trace, Trace]:
        return trace(reference, samples, 0), trace(reference, samples[: SAMPLES // 2], 0)

    first, second = repeated(seed=0)
    if not all(value.isfinite().all() for value in (first.loss, *first.gradients.values())):
        text = "loss or gradients of the first samples are not finite in float32, with the initial weights"
        return [*findings, Finding(text, fails=True)]
    error, where = _first_difference(reference, first, second)
    if error > reference.rounding_error:
        text = f"{where} is not deterministic: two identical runs differ by {error:.1e}; make it deterministic"
        return [*findings, Finding(f"{text} (run.deterministic=true does that for kernels)", fails=True)]
    if error:
        text = f"two identical runs differ by rounding ({error:.1e}, first in {where})"
        findings.append(Finding(f"{text}; run.deterministic=true makes them equal"))
    findings += _compare_in_evaluation_mode(
        reference, lambda: repeated(seed=1), "the result is drawn at random in training mode"
    )
    findings += _compare_in_evaluation_mode(
        reference, split, "the result depends on the whole batch (batch statistics), which no split of it can equal"
    )
    return [*findings, *_sums(reference, samples), *_half_loss(reference, samples), *_unused(reference, first)]


def trace(reference: Reference, indices: list[int], seed: int) -> Trace:
    """Run the model with its initial weights on these samples."""
    model, batch = reference.model(), reference.batch(indices)
    outputs: list[tuple[str, Tensor]] = []

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            floats = (tensor for tensor in tensors_in(output) if tensor.is_floating_point())
            outputs.extend((name, tensor.detach().clone()) for tensor in floats)

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(record(_label(name, module)))
    seed_all(seed)
    loss = reference.task.loss_sum(model, batch)
    loss.backward()
    return Trace(len(indices), loss.detach(), cloned(gradients_of(model)), outputs)


def _label(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def _first_difference(reference: Reference, a: Trace, b: Trace) -> tuple[float, str]:
    """(relative error, label) of the first module output that differs, else of the loss.

    If b has the first half of a's samples, its outputs are compared with that half of a's, up to rounding errors.
    """
    pairs = [(name, x, y) for (name, x), (_, y) in zip(a.outputs, b.outputs, strict=False)]
    halved = a.samples != b.samples
    if halved:
        pairs = [(name, x[: len(y)], y) for name, x, y in pairs if x.ndim and y.ndim and len(x) == 2 * len(y)]
    tolerance = reference.rounding_error if halved else 0.0
    for name, x, y in pairs:
        if x.shape == y.shape and (error := _error(x, y)) > tolerance:
            return error, name
    return (0.0, "") if halved else (_error(a.loss, b.loss), "the task's loss_sum")


def _error(x: Tensor, y: Tensor) -> float:
    return ((x - y).abs().max() / x.abs().max().clamp(min=1e-30)).item() if x.numel() else 0.0


def _dropout(reference: Reference) -> list[Finding]:
    modules = reference.model().named_modules()
    labels = [_label(name, module) for name, module in modules if isinstance(module, _DropoutNd)]
    return [Finding(f"{_shortened(labels)}: dropout is off for the comparison")] if labels else []


def _shortened(labels: list[str]) -> str:
    return ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")


def _compare_in_evaluation_mode(
    reference: Reference, runs: Callable[[], tuple[Trace, Trace]], why: str
) -> list[Finding]:
    """Put all modules of a class into evaluation mode, class by class, until the two runs agree."""
    findings: list[Finding] = []
    while True:
        error, where = _first_difference(reference, *runs())
        if error <= reference.rounding_error:
            return findings
        modules = {_label(name, module): (name, type(module)) for name, module in reference.model().named_modules()}
        kind = modules[where][1] if where in modules else None
        same_class = {label: name for label, (name, other) in modules.items() if other is kind}
        if set(same_class.values()) <= reference.task.eval_modules:
            text = f"{where}: {why}, in evaluation mode too; it can't be compared"
            return [*findings, Finding(text, fails=True)]
        reference.task.eval_modules |= set(same_class.values())
        findings.append(Finding(f"{_shortened(list(same_class))}: {why}; compared in evaluation mode"))


def _sums(reference: Reference, indices: list[int]) -> list[Finding]:
    """Whether loss and weight of a batch are the sums of those of its halves."""
    parts = (indices, indices[: len(indices) // 2], indices[len(indices) // 2 :])
    findings, task = [], reference.task
    loss, *halves = [trace(reference, part, 0).loss for part in parts]
    if not torch.isclose(loss, halves[0] + halves[1], rtol=10 * reference.rounding_error, atol=0):
        findings.append(
            f"the task's loss_sum of {len(indices)} samples is {loss:.6g}, but its halves add up to "
            f'{halves[0] + halves[1]:.6g}: it must be a sum over samples, not a mean (reduction="sum")'
        )
    weights = [task.weight(reference.batch(part)) for part in parts]
    weight, *halves = [as_scalar(weight, "weight() returned", reference.device).cpu() for weight in weights]
    if not torch.isclose(weight, halves[0] + halves[1], rtol=1e-6):
        findings.append(
            f"the task's weight of {len(indices)} samples is {weight:g}, but its halves add up to "
            f"{halves[0] + halves[1]:g}: it must count what loss_sum sums over"
        )
    return [Finding(text, fails=True) for text in findings]


def _half_loss(reference: Reference, indices: list[int]) -> list[Finding]:
    """Whether the loss changes if the model's output is cast to float32 first."""
    dtype = reference.config.precision.dtype

    def loss(cast: bool) -> Tensor:
        model = reference.model()
        if cast:
            model.register_forward_hook(lambda module, inputs, output: _to_float32(output))
        seed_all(0)
        with reference.autocast(dtype), torch.no_grad():
            return reference.task.loss_sum(model, reference.batch(indices)).float()

    error = _error(loss(cast=True), loss(cast=False))
    if not error > reference.rounding_error:
        return []
    text = f"the loss is computed in half precision: under {dtype} it differs by {error:.1e} from the float32 loss of"
    return [Finding(f"{text} the same outputs; cast them first, as in `logits.float()`", fails=True)]


def _to_float32(value: Any) -> Any:
    """The value with the floating-point tensors in nested dicts, lists, tuples and dataclasses in float32."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{item.name: _to_float32(getattr(value, item.name)) for item in fields(value)})
    return tree_map(lambda leaf: leaf if leaf is value else _to_float32(leaf), value)


def _unused(reference: Reference, first: Trace) -> list[Finding]:
    """Trained parameters that get no gradient."""
    parameters = reference.model().named_parameters()
    unused = [name for name, p in parameters if p.requires_grad and name not in first.gradients]
    if not unused:
        return []
    text = f"the parameter {unused[0]} ({len(unused)} such) gets no gradient from the loss"
    return [Finding(f"{text}; use it, or set requires_grad=False", fails=True)]
