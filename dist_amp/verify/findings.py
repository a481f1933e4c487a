"""Findings: what in the task makes two ways of running differ, so that no strategy is blamed.

A task that is not deterministic, or whose loss is not the sum of its samples' losses, as with batch
statistics, can't equal one process with the whole batch. The first module that gives other results
the second time, or for half of its inputs, is named.
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

from dist_amp.distributed.process import random_state, seed_all, set_random_state
from dist_amp.precision import to_float32
from dist_amp.scaling.meta import build_module
from dist_amp.task import as_scalar
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
    """One forward and backward: loss sum, gradients, and the floating-point outputs of each module
    call, in order.
    """

    loss: Tensor
    unused: list[str]  # parameters without a gradient
    gradients: Values
    outputs: list[tuple[str, Tensor]]


def inspect_task(reference: Reference) -> list[Finding]:
    """Check the task; sets `reference.task.eval_modules` to what is compared in evaluation mode."""
    findings = [*_left_out(reference), *_stored_dtype(reference), *_dropout(reference)]
    samples = reference.step_samples(True)[0][:SAMPLES]
    first = trace(reference, samples)
    if not all(value.isfinite().all() for value in (first.loss, *first.gradients.values())):
        text = (
            "loss or gradients of the first samples are not finite in float32, with the initial "
            "weights"
        )
        return [*findings, Finding(text, fails=True)]
    error, where = _first_difference(first, trace(reference, samples))
    if error > reference.rounding_error:
        text = (
            f"{where} is not deterministic: two identical runs differ by {error:.1e}; make it "
            "deterministic (run.deterministic=true does that for kernels)"
        )
        return [*findings, Finding(text, fails=True)]
    if error:
        text = f"two identical runs differ by rounding ({error:.1e}, first in {where})"
        findings.append(Finding(f"{text}; run.deterministic=true makes them equal"))
    # In training mode, so before batch statistics are left out.
    text, fails = leaks(reference, len(samples))
    if text:
        findings.append(Finding(text, fails))
    findings += _random(reference, samples)
    findings += _sums(reference, samples)
    findings += _weights(reference, samples)
    findings += _half_loss(reference, samples)
    return findings + _unused(first)


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
    if not names:
        return []
    text = f"not compared: the task's {names}; the steps are those of torch's SGD and AdamW"
    return [Finding(text)]


def _stored_dtype(reference: Reference) -> list[Finding]:
    converted = to_float32(build_module(reference.task), frozen_too=False)
    return [Finding(converted)] if converted else []


def _dropout(reference: Reference) -> list[Finding]:
    modules = reference.model().named_modules()
    labels = [_label(name, module) for name, module in modules if isinstance(module, _DropoutNd)]
    return [Finding(f"{_shortened(labels)}: dropout is off for the comparison")] if labels else []


def _shortened(labels: list[str]) -> str:
    text = ", ".join(labels[:3])
    if len(labels) > 3:
        text += f" and {len(labels) - 3} more"
    return text


def _compare_in_evaluation_mode(reference: Reference, where: str, why: str) -> Finding:
    """Put all modules of the class of the one labelled `where` into evaluation mode.

    It fails if they are already.
    """
    names = {}
    classes = {}
    for name, module in reference.model().named_modules():
        label = _label(name, module)
        names[label] = name
        classes[label] = type(module)
    same_class = [label for label in names if where in classes and classes[label] is classes[where]]
    to_evaluate = {names[label] for label in same_class}
    if to_evaluate <= reference.task.eval_modules:
        return Finding(f"{where}: {why}, in evaluation mode too; it can't be compared", fails=True)
    reference.task.eval_modules |= to_evaluate
    return Finding(f"{_shortened(same_class)}: {why}; compared in evaluation mode")


def _random(reference: Reference, indices: list[int]) -> list[Finding]:
    """What draws random numbers, class by class."""
    tolerance = reference.rounding_error
    findings: list[Finding] = []
    while not any(finding.fails for finding in findings):
        first = trace(reference, indices)
        second = trace(reference, indices, seed=1)
        error, _ = _first_difference(first, second, tolerance)
        if error <= tolerance:
            break
        where = SecondCalls(reference, rows="all").run(indices) or "the task's loss_sum"
        why = "the result is drawn at random in training mode"
        findings.append(_compare_in_evaluation_mode(reference, where, why))
    return findings


def _sums(reference: Reference, indices: list[int]) -> list[Finding]:
    """What prevents the loss of a batch from being the sum of those of its halves, by class."""
    findings: list[Finding] = []
    while not any(finding.fails for finding in findings):
        loss = trace(reference, indices).loss
        first, second = (trace(reference, half).loss for half in _halves(indices))
        halves = first + second
        if torch.isclose(loss, halves, rtol=10 * reference.rounding_error, atol=0):
            break
        if where := SecondCalls(reference, rows="half").run(indices):
            why = (
                "the result depends on the whole batch (batch statistics), which no split of it "
                "can equal"
            )
            findings.append(_compare_in_evaluation_mode(reference, where, why))
            continue
        text = (
            f"the task's loss_sum of {len(indices)} samples is {loss:.6g}, but its halves add up "
            f'to {halves:.6g}: it must be a sum over samples, not a mean (reduction="sum"), '
            "without terms of the whole batch, such as a load-balancing loss"
        )
        findings.append(Finding(text, fails=True))
    return findings


def _halves(indices: list[int]) -> tuple[list[int], list[int]]:
    middle = len(indices) // 2
    return indices[:middle], indices[middle:]


class SecondCalls:
    """Calls each module twice, to find the first, inner before outer, whose own result changes.

    rows: "all" changes the random numbers alone, "half" also takes the first half of the inputs. A
    module is left out that does not repeat its result for equal inputs and random numbers, or that
    can't take half of its inputs.
    """

    def __init__(self, reference: Reference, rows: Literal["all", "half"]):
        self._reference = reference
        self._rows = rows
        self._label = ""  # of the module whose result changes
        # (inputs, random state) of the modules that are running, the innermost last
        self._calls: list[tuple[Any, Any]] = []
        self._checking = False

    def run(self, indices: list[int]) -> str:
        """The label of the first module whose result changes; "" if none."""
        model = self._reference.model()
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._begin, with_kwargs=True)
            module.register_forward_hook(
                partial(self._check, _label(name, module)), with_kwargs=True
            )
        seed_all(0)
        with torch.no_grad():
            self._reference.task.loss_sum(model, self._reference.batch(indices))
        return self._label

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._checking:
            # A copy, because the module may write to its inputs, such as a cache of keys.
            inputs = tree_map(_copy, (args, kwargs))
            self._calls.append((inputs, random_state(self._reference.device)))

    def _check(self, label: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._checking:
            return
        inputs, random = self._calls.pop()
        result = next(tensors_in(output), None)
        if self._label or result is None or not result.is_floating_point() or not result.ndim:
            return
        rows = len(result)
        if self._rows == "half":
            rows //= 2
        cut = tree_map(partial(_copy, length=len(result), rows=rows), inputs)
        self._checking = True
        try:
            set_random_state(random, self._reference.device)
            same = next(tensors_in(module(*inputs[0], **inputs[1])))
            # With the random numbers that follow.
            other = next(tensors_in(module(*cut[0], **cut[1])))
        except Exception:
            return
        finally:
            self._checking = False
        if not self._differs(same, result) and self._differs(other, result[:rows]):
            self._label = label

    def _differs(self, a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and _error(a, b) > self._reference.rounding_error


def _copy(value: Any, length: int = 0, rows: int = 0) -> Any:
    """A copy of an input, where it can be copied; the first rows of a tensor of this length."""
    if isinstance(value, Tensor):
        return value[:rows].clone() if value.ndim and len(value) == length else value.clone()
    try:
        return deepcopy(value)
    except Exception:
        return value


def _weights(reference: Reference, indices: list[int]) -> list[Finding]:
    """Whether the weight of a batch is the sum of those of its halves."""

    def weight_of(part: list[int]) -> Tensor:
        weight = reference.task.weight(reference.batch(part))
        return as_scalar(weight, "weight() returned", reference.device).cpu()

    weight = weight_of(indices)
    first, second = map(weight_of, _halves(indices))
    halves = first + second
    if torch.isclose(weight, halves, rtol=1e-6):
        return []
    text = (
        f"the task's weight of {len(indices)} samples is {weight:g}, but its halves add up to "
        f"{halves:g}: it must count what loss_sum sums over"
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
    text = (
        f"the loss is computed in half precision: under {dtype} it differs by {error:.1e} from the "
        "float32 loss of the same outputs; cast them first, as in `logits.float()`"
    )
    return [Finding(text, fails=True)]


def _to_float32(value: Any) -> Any:
    """The value with its floating-point tensors, also in dataclasses, in float32."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if is_dataclass(value) and not isinstance(value, type):
        changed = {item.name: _to_float32(getattr(value, item.name)) for item in fields(value)}
        return replace(value, **changed)
    return tree_map(lambda leaf: leaf if leaf is value else _to_float32(leaf), value)


def _unused(first: Trace) -> list[Finding]:
    """Trained parameters without a gradient."""
    if not first.unused:
        return []
    text = (
        f"{first.unused[0]} ({len(first.unused)} such) gets no gradient from {SAMPLES} samples, "
        "which counts as zero: right for a mixture's idle experts; else use it, or set "
        "requires_grad=False"
    )
    return [Finding(text)]
