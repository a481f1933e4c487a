"""Findings: what in the task itself makes two ways of running differ, so that no strategy is blamed for it.

A task that is not deterministic, or whose loss is not the sum of its samples' losses, as with batch statistics, can't
equal one process with the whole batch. The first module that gives other results the second time, or for half of its
inputs, is named.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map

from dist_amp.config.task_class import as_scalar
from dist_amp.runtime.meta import build_module
from dist_amp.runtime.parameter_dtype import to_float32
from dist_amp.runtime.random_state import random_state, seed_all, set_random_state
from dist_amp.verify.dtypes import tensors_in
from dist_amp.verify.packing import leaks
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

    loss: Tensor
    unused: list[str]  # parameters without a gradient
    gradients: Values
    outputs: list[tuple[str, Tensor]]


def inspect_task(reference: Reference) -> list[Finding]:
    """Check the task; sets `reference.task.eval_modules` to what can only be compared in evaluation mode."""
    findings = [*_left_out(reference), *_stored_dtype(reference), *_dropout(reference)]
    samples = reference.step_samples(True)[0][:SAMPLES]
    first, second = trace(reference, samples), trace(reference, samples)
    if not all(value.isfinite().all() for value in (first.loss, *first.gradients.values())):
        text = "loss or gradients of the first samples are not finite in float32, with the initial weights"
        return [*findings, Finding(text, fails=True)]
    error, where = _first_difference(first, second)
    if error > reference.rounding_error:
        text = f"{where} is not deterministic: two identical runs differ by {error:.1e}; make it deterministic"
        return [*findings, Finding(f"{text} (run.deterministic=true does that for kernels)", fails=True)]
    if error:
        text = f"two identical runs differ by rounding ({error:.1e}, first in {where})"
        findings.append(Finding(f"{text}; run.deterministic=true makes them equal"))
    text, fails = leaks(reference, len(samples))  # in training mode, so before batch statistics are left out
    if text:
        findings.append(Finding(text, fails))
    findings += [*_random(reference, samples), *_sums(reference, samples), *_weights(reference, samples)]
    return [*findings, *_half_loss(reference, samples), *_unused(first)]


def trace(reference: Reference, indices: list[int], seed: int = 0) -> Trace:
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
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    return Trace(loss.detach(), unused, cloned(gradients_of(model)), outputs)


def _label(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def _first_difference(a: Trace, b: Trace, tolerance: float = 0.0) -> tuple[float, str]:
    """(relative error, label) of the first module output that differs, else of the loss."""
    for (name, x), (_, y) in zip(a.outputs, b.outputs, strict=False):
        if x.shape == y.shape and (error := _error(x, y)) > tolerance:
            return error, name
    return _error(a.loss, b.loss), "the task's loss_sum"


def _error(x: Tensor, y: Tensor) -> float:
    return ((x - y).abs().max() / x.abs().max().clamp(min=1e-30)).item() if x.numel() else 0.0


def _left_out(reference: Reference) -> list[Finding]:
    names = " and ".join(reference.task.left_out)
    text = f"not compared: the task's {names}; the steps are those of torch's SGD and AdamW"
    return [Finding(text)] if names else []


def _stored_dtype(reference: Reference) -> list[Finding]:
    converted = to_float32(build_module(reference.task), frozen_too=False)
    return [Finding(converted)] if converted else []


def _dropout(reference: Reference) -> list[Finding]:
    modules = reference.model().named_modules()
    labels = [_label(name, module) for name, module in modules if isinstance(module, _DropoutNd)]
    return [Finding(f"{_shortened(labels)}: dropout is off for the comparison")] if labels else []


def _shortened(labels: list[str]) -> str:
    return ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")


def _compare_in_evaluation_mode(reference: Reference, where: str, why: str) -> Finding:
    """Put all modules of the class of the one labelled `where` into evaluation mode; fails if they are already."""
    modules = {_label(name, module): (name, type(module)) for name, module in reference.model().named_modules()}
    kind = modules[where][1] if where in modules else None
    same_class = {label: name for label, (name, other) in modules.items() if other is kind}
    if set(same_class.values()) <= reference.task.eval_modules:
        return Finding(f"{where}: {why}, in evaluation mode too; it can't be compared", fails=True)
    reference.task.eval_modules |= set(same_class.values())
    return Finding(f"{_shortened(list(same_class))}: {why}; compared in evaluation mode")


def _random(reference: Reference, indices: list[int]) -> list[Finding]:
    """What draws random numbers, class by class."""
    findings: list[Finding] = []
    while not any(finding.fails for finding in findings):
        first, second = trace(reference, indices), trace(reference, indices, seed=1)
        if _first_difference(first, second, reference.rounding_error)[0] <= reference.rounding_error:
            break
        where = SecondCalls(reference, rows="all").run(indices) or "the task's loss_sum"
        why = "the result is drawn at random in training mode"
        findings.append(_compare_in_evaluation_mode(reference, where, why))
    return findings


def _sums(reference: Reference, indices: list[int]) -> list[Finding]:
    """What prevents the loss of a batch from being the sum of those of its halves, class by class."""
    findings: list[Finding] = []
    half = len(indices) // 2
    while not any(finding.fails for finding in findings):
        loss, *parts = [trace(reference, part).loss for part in (indices, indices[:half], indices[half:])]
        if torch.isclose(loss, parts[0] + parts[1], rtol=10 * reference.rounding_error, atol=0):
            break
        if where := SecondCalls(reference, rows="half").run(indices):
            why = "the result depends on the whole batch (batch statistics), which no split of it can equal"
            findings.append(_compare_in_evaluation_mode(reference, where, why))
            continue
        text = (
            f"the task's loss_sum of {len(indices)} samples is {loss:.6g}, but its halves add up to "
            f'{parts[0] + parts[1]:.6g}: it must be a sum over samples, not a mean (reduction="sum"), without terms of '
            "the whole batch, such as a load-balancing loss"
        )
        findings.append(Finding(text, fails=True))
    return findings


class SecondCalls:
    """Calls each module a second time, to find the first, inner ones before outer ones, whose own result changes.

    rows: "all" changes the random numbers alone, "half" also takes the first half of the inputs. A module is left out
    that does not repeat its result for equal inputs and random numbers, or that can't take half of its inputs.
    """

    def __init__(self, reference: Reference, rows: Literal["all", "half"]):
        self.found = ""
        self._reference = reference
        self._rows = rows
        self._calls: list[tuple[Any, Any]] = []  # (inputs, random state) of those that are running, the innermost last
        self._checking = False

    def run(self, indices: list[int]) -> str:
        """The label of the module found; "" if none."""
        model = self._reference.model()
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._begin, with_kwargs=True)
            module.register_forward_hook(partial(self._check, _label(name, module)), with_kwargs=True)
        seed_all(0)
        with torch.no_grad():
            self._reference.task.loss_sum(model, self._reference.batch(indices))
        return self.found

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._checking:
            inputs = tree_map(_copy, (args, kwargs))  # the module may write to its own, such as a cache of keys
            self._calls.append((inputs, random_state(self._reference.device)))

    def _check(self, label: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._checking:
            return
        (inputs, random), result = self._calls.pop(), next(tensors_in(output), None)
        if self.found or result is None or not result.is_floating_point() or not result.ndim:
            return
        rows = len(result) // 2 if self._rows == "half" else len(result)
        cut = tree_map(partial(_copy, length=len(result), rows=rows), inputs)
        self._checking = True
        try:
            set_random_state(random, self._reference.device)
            same = next(tensors_in(module(*inputs[0], **inputs[1])))
            other = next(tensors_in(module(*cut[0], **cut[1])))  # with the random numbers that follow
        except Exception:
            return
        finally:
            self._checking = False
        if not self._differs(same, result) and self._differs(other, result[:rows]):
            self.found = label

    def _differs(self, a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and _error(a, b) > self._reference.rounding_error


def _copy(value: Any, length: int = 0, rows: int = 0) -> Any:
    """A copy of an input, of its first rows if it is a tensor of this length; as it is if it can't be copied."""
    if isinstance(value, Tensor):
        return value[:rows].clone() if value.ndim and len(value) == length else value.clone()
    try:
        return deepcopy(value)
    except Exception:
        return value


def _weights(reference: Reference, indices: list[int]) -> list[Finding]:
    """Whether the weight of a batch is the sum of those of its halves."""
    half = len(indices) // 2
    weights = [reference.task.weight(reference.batch(part)) for part in (indices, indices[:half], indices[half:])]
    weight, *parts = [as_scalar(weight, "weight() returned", reference.device).cpu() for weight in weights]
    if torch.isclose(weight, parts[0] + parts[1], rtol=1e-6):
        return []
    text = (
        f"the task's weight of {len(indices)} samples is {weight:g}, but its halves add up to "
        f"{parts[0] + parts[1]:g}: it must count what loss_sum sums over"
    )
    return [Finding(text, fails=True)]


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


def _unused(first: Trace) -> list[Finding]:
    """Trained parameters without a gradient."""
    if not first.unused:
        return []
    text = f"{first.unused[0]} ({len(first.unused)} such) gets no gradient from {SAMPLES} samples, which counts as zero"
    return [Finding(f"{text}: right for a mixture's idle experts; else use it, or set requires_grad=False")]
