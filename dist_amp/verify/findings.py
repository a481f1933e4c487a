"""Checks the task itself, so that no strategy is blamed for the task's own problems.

Most checks run the model twice in ways that should agree, compare the two runs call by call, and
report the first module whose output differs although its inputs are equal.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from dist_amp.config.auto import batch_statistics
from dist_amp.diagnostics.first_steps import untrained_text
from dist_amp.diagnostics.trace import TASK, Event, Recorder, first_difference
from dist_amp.distributed.process import seed_all
from dist_amp.loading.nested import tensors
from dist_amp.scaling.meta import build_module
from dist_amp.task import attributes_of
from dist_amp.verify.reference import Reference, Values, gradients_of, relative_error
from dist_amp.world import as_scalar

SAMPLES = 8  # in a batch of these checks; the comparison itself takes more
IGNORE_INDEX = -100  # the label that cross-entropy ignores
ROUNDING = 1e-6  # assumed relative error of float32 gradients; 3e-8 to 3e-6 in tests/families.py
TRIES = 3  # batches; in at least one, the gradients must be the sum of the halves' gradients
BY_MICRO_BATCH = (
    "each micro-batch over all ranks is compared with the same samples in one process, and no step "
    "is partial"
)


class WrongTask(Exception):
    """The task has an error, or can't be compared."""


@dataclass(frozen=True)
class Trace:
    """One forward and backward. calls: of modules, inner before outer, with copies of tensors."""

    loss: Tensor
    unused: list[str]  # parameters without a gradient
    gradients: Values
    calls: list[Event]


def inspect_task(reference: Reference) -> Iterator[str]:
    """Check the task. Yields a note on each harmless finding, and raises WrongTask for an error.

    Fills `reference.eval_classes`, the classes of modules to compare in evaluation mode.
    """
    yield from _note_left_out(reference)
    batch = reference.batch(reference.step_samples[0][:SAMPLES])
    first = trace(reference, batch)
    _check_trained_elsewhere(reference, batch)
    if not all(value.isfinite().all() for value in (first.loss, *first.gradients.values())):
        raise WrongTask(
            "loss or gradients of the first samples are not finite in float32, with the initial "
            "weights"
        )
    error, label = first_change(first, trace(reference, batch))
    if error > reference.rounding_error:
        raise WrongTask(
            f"{label} is not deterministic: two identical runs differ by {error:.1e}; make it "
            "deterministic (run.deterministic=true does that for kernels)"
        )
    # Packing comes first, because it needs training mode: later checks may set evaluation mode.
    yield from _check_packing(reference, batch)
    yield from _check_random(reference, batch)
    yield from _check_state(reference, batch)
    yield from _check_sums(reference)
    _check_dtype_of_loss(reference, batch)
    if unused := trace(reference, batch).unused:
        yield (
            f"{unused[0]} ({len(unused)} such) gets no gradient from {SAMPLES} samples, which "
            "counts as zero: fine for a mixture's idle experts; otherwise use it, or set "
            "requires_grad=False"
        )


def trace(reference: Reference, batch: Any, seed: int = 0) -> Trace:
    """Run the model with its initial weights on a batch."""
    model = reference.model()
    recorder = Recorder(reference.task, model, copies, ("forward",), inputs=True)
    seed_all(seed)
    with recorder:
        loss = reference.loss_and_backward(model, batch, task=recorder)
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    calls = [event for event in recorder.events if event.kind == "forward"]
    return Trace(loss.detach(), unused, gradients_of(model), calls)


def copies(values: list[Tensor]) -> list[Tensor]:
    return [value.clone() for value in values]


def _label(name: str, kind: str) -> str:
    return f"{name} ({kind})" if name else kind


def first_change(a: Trace, b: Trace, tolerance: float = 0.0) -> tuple[float, str]:
    """Returns (relative error, label) of the first module whose output differs for equal inputs, or
    else of the loss. If tensors in `a` have more rows than in `b`, only the first are compared.
    """
    if pair := first_difference(a.calls, b.calls, _error, tolerance):
        call, counterpart = pair
        return _error(call.values, counterpart.values), _label(call.module, call.module_class)
    return _error([a.loss], [b.loss]), TASK


def _error(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest error of all pairs, relative to the largest element; nan if shapes differ."""
    errors = [0.0]
    for x, y in zip(a, b, strict=False):
        if x.ndim and y.ndim:
            x = x[: len(y)]
        if x.shape != y.shape:
            errors.append(torch.nan)
        elif not torch.equal(x, y):
            x, y = x.double(), y.double()
            errors.append(float((x - y).abs().max() / x.abs().max().clamp(min=1e-30)))
    return max(errors, key=lambda error: (error != error, error))


def _note_left_out(reference: Reference) -> Iterator[str]:
    if names := " and ".join(reference.task.left_out):
        yield f"not compared: the task's {names}; the steps are those of torch's SGD and AdamW"
    labels = [
        _label(name, type(part).__name__)
        for name, part in build_module(reference.task.task).named_modules()
        if isinstance(part, _DropoutNd) or (isinstance(part, nn.RNNBase) and part.dropout)
    ]
    if labels:
        yield f"{labels[0]} ({len(labels)} such): dropout is off for the comparison"


def _check_trained_elsewhere(reference: Reference, batch: Any) -> None:
    """Raises WrongTask if the loss depends on trainable parameters outside of the model."""
    model = reference.model()
    reference.loss_and_backward(model, batch)
    for name, leaves in attributes_of(reference.task.task, model).items():
        trained = [p for p in leaves if isinstance(p, nn.Parameter) and p.requires_grad]
        if any(p.grad is not None for p in trained):
            raise WrongTask(untrained_text(name, len(trained)))


def _check_random(reference: Reference, batch: Any) -> Iterator[str]:
    def find() -> str:
        tolerance = reference.rounding_error
        traces = trace(reference, batch), trace(reference, batch, seed=1)
        error, label = first_change(*traces, tolerance)
        return label if error > tolerance else ""

    reason = "the result is drawn at random in training mode"
    fix = (
        "draw each sample's random numbers in the task's augment(sample, rng) and put them into "
        "the sample: then they are the same on every reading"
    )
    yield from _use_evaluation_mode(reference, find, reason, fix)


def _check_state(reference: Reference, batch: Any) -> Iterator[str]:
    """Find state that forward changes, such as a teacher's weights, except batch statistics."""
    model = reference.model()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # or a teacher that starts as an equal copy does not change
                parameter.mul_(1.01)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reference.loss_and_backward(model, batch)
    counters = [*batch_statistics(model), "num_batches_tracked"]
    changed = [
        name
        for name, value in model.state_dict().items()
        if not name.endswith(tuple(counters)) and not torch.equal(value, before[name])
    ]
    if changed:
        reference.by_micro_batch = True
        yield f"forward changes {changed[0]} ({len(changed)} such): {BY_MICRO_BATCH}"


def _check_sums(reference: Reference) -> Iterator[str]:
    """Check that a batch's loss, gradients and weight are the sums of its halves'."""
    if getattr(reference.task, "couples_samples", False):
        reference.by_micro_batch = True
        yield f"the task has couples_samples=True: {BY_MICRO_BATCH}"
        return
    for name, part in reference.model().named_modules():
        if getattr(part, "scale_grad_by_freq", False) and part.weight.requires_grad:
            raise WrongTask(
                f"the layer {name} has scale_grad_by_freq=True, which counts indices in each "
                "micro-batch alone; use False"
            )
    reason = "the result depends on the whole batch (batch statistics), and changes if it is split"
    fix = "use a layer that treats each sample on its own, such as group norm"
    yield from _use_evaluation_mode(reference, partial(_find_non_sum, reference), reason, fix)
    samples = reference.step_samples[0][:SAMPLES]
    weights = [reference.task.weight(batch) for batch in _halved(reference, samples)]
    weight, *parts = [as_scalar(x, reference.device) for x in weights]
    total = torch.stack(parts).sum()
    if not torch.isclose(weight, total, rtol=1e-6):
        raise WrongTask(
            f"the task's weight of {len(samples)} samples is {weight:g}, but its halves add up to "
            f"{total:g}: it must count what loss_sum sums over"
        )


def _halved(reference: Reference, samples: list[int]) -> list[Any]:
    middle = len(samples) // 2
    return [reference.batch(part) for part in (samples, samples[:middle], samples[middle:])]


def _find_non_sum(reference: Reference) -> str:
    """The module whose result depends on the whole batch, or "". Raises WrongTask for the loss."""
    tolerance = 10 * reference.rounding_error
    errors = []
    for start in range(0, TRIES * SAMPLES, SAMPLES):
        samples = reference.step_samples[0][start : start + SAMPLES]
        whole, first, second = [trace(reference, part) for part in _halved(reference, samples)]
        halves = first.loss + second.loss
        added = {name: value + second.gradients[name] for name, value in first.gradients.items()}
        errors.append(relative_error(added, whole.gradients))
        if not torch.isclose(whole.loss, halves, rtol=tolerance, atol=0):
            break
        # The effect of rounding alone: a term of the whole batch does not depend on its order.
        reordered = trace(reference, reference.batch(samples[::-1]))
        rounding = relative_error(reordered.gradients, whole.gradients)
        # Rounding can also flip a router or a ReLU, but rarely in all tries.
        if not errors[-1] > 10 * max(rounding, ROUNDING):
            return ""
    # Scalar outputs are left out: they are losses inside the model, which need not be sums.
    calls = [replace(c, values=[value for value in c.values if value.ndim]) for c in whole.calls]
    _, label = first_change(replace(whole, calls=calls), first, tolerance)
    if label != TASK:
        return label
    text = (
        f"{TASK} of {SAMPLES} samples is {whole.loss:.6g}, and its halves add up to {halves:.6g}, "
        f"their gradients differ by {min(errors):.1e}: "
    )
    if halves > 1.5 * whole.loss > 0:
        raise WrongTask(f'{text}it must be a sum over samples, not a mean (reduction="sum")')
    raise WrongTask(
        f"{text}it must be a sum over samples, without terms of the whole batch, such as a "
        "mixture's load-balancing loss (verify with a coefficient of 0, for Hugging Face "
        "router_aux_loss_coef in the model's config.json) or a contrastive loss "
        "(docs/recipes.md shows one that verify can compare)"
    )


def _use_evaluation_mode(
    reference: Reference, find: Callable[[], str], reason: str, fix: str
) -> Iterator[str]:
    """Put the classes of modules that `find` returns into evaluation mode, until it returns ""."""
    while label := find():
        kind = label.rpartition(" ")[2].strip("()")
        if kind in reference.eval_classes:
            reason += ", in evaluation mode too"
        if label == TASK or kind in reference.eval_classes:
            raise WrongTask(f"{label}: {reason}, so it can't be compared; {fix}")
        reference.eval_classes.add(kind)
        yield f"{label}: {reason}; every {kind} is compared in evaluation mode"


def _check_dtype_of_loss(reference: Reference, batch: Any) -> None:
    """Raises WrongTask if the loss changes when the model's output is cast to float32 first."""
    dtype = replace(reference.config.precision, use_amp=True).name
    losses = []
    for hook in (lambda *_: None, _to_float32):
        model = reference.model()
        model.register_forward_hook(hook)
        seed_all(0)
        try:
            with reference.autocast(dtype), torch.no_grad():
                losses.append(reference.task.loss_sum(model, batch).float())
        except RuntimeError:  # the device can't compute it: `verify` skips these rows with a note
            return
    error = _error(losses[1:], losses[:1])
    if error > reference.rounding_error:
        raise WrongTask(
            f"the loss is computed in half precision: under {dtype} it differs by {error:.1e} from "
            "the float32 loss of the same outputs; cast them first, as in `logits.float()`"
        )


def _to_float32(module: nn.Module, inputs: Any, output: Any) -> None:
    for tensor in tensors(output):
        if tensor.dtype in (torch.float16, torch.bfloat16):
            tensor.data = tensor.float()


def _check_packing(reference: Reference, batch: Any) -> Iterator[str]:
    """Check that attention does not cross the documents of a row, if the batch has position_ids.

    Only every second document gets labels. The gradient of their loss with respect to the other
    documents' embeddings is exactly 0 if attention is masked; otherwise raises WrongTask.
    """
    if not isinstance(batch, Mapping) or not isinstance(batch.get("position_ids"), Tensor):
        return
    unchecked = (
        "packed documents are not checked for leaks, which needs an nn.Embedding of input_ids, "
        "labels of the same shape, and a row with two documents"
    )
    ids: Any = batch.get("input_ids")
    labels: Any = batch.get("labels")
    positions = batch["position_ids"]
    if any(getattr(part, "shape", None) != positions.shape for part in (ids, labels)):
        yield unchecked
        return
    is_labelled = (positions == 0).cumsum(1) % 2 == 0  # [rows, tokens]: every second document
    if not (is_labelled[:, 1:] & (labels[:, 1:] != IGNORE_INDEX)).any():
        yield unchecked
        return
    model = reference.model()
    embedded: list[Tensor] = []  # the embeddings of input_ids

    def embed(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        tokens = next(tensors(args), torch.empty(0))  # a forward may drop the last tokens
        if tokens.ndim != 2 or not torch.equal(tokens, ids[:, : tokens.shape[1]]):
            return None
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(embed)
    seed_all(0)
    labelled = {**batch, "labels": torch.where(is_labelled, labels, IGNORE_INDEX)}
    loss = reference.task.loss_sum(model, labelled)
    if not embedded:
        yield unchecked
        return
    leaked = 0.0  # the largest gradient at another document
    for gradient in torch.autograd.grad(loss, embedded, materialize_grads=True):
        by_token = gradient.abs().flatten(2).amax(2)
        leaked = max(leaked, float(by_token[~is_labelled[:, : by_token.shape[1]]].max()))
    if leaked > 0.0:
        raise WrongTask(
            "packed documents leak: the gradient of a document's loss with respect to another's "
            f"embeddings is up to {leaked:.2g}, and must be 0; call the model with "
            "use_cache=False and without an attention_mask of ones: otherwise it takes a row for "
            "one document; if the model mixes tokens whatever position_ids are, use "
            "data.pack=off"
        )
    rows = int(is_labelled.any(1).sum())
    yield f"no cross-document attention in packed rows: {rows} rows, gradient exactly 0"
