"""Whether packed documents see one another: the gradient of one's loss with respect to another's embeddings.

It is 0 exactly where attention masks the other documents, because what is masked has a weight of exactly 0; and so is
every part of a sum that its gradient is made of.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dist_amp.runtime.random_state import seed_all
from dist_amp.sources.token_shards import NOT_LEARNED
from dist_amp.verify.dtypes import tensors_in
from dist_amp.verify.reference import Reference


def leaks(reference: Reference, rows: int) -> tuple[str, bool]:
    """(one line, whether the task is wrong) of a task whose batches have position_ids, else ("", False).

    Takes the first `rows` samples that have a second document in a row.
    """
    unchecked = "packed documents are not checked for leaks"
    for first in range(0, reference.task.length, rows):
        batch = reference.batch(range(first, min(first + rows, reference.task.length)))
        names = ("input_ids", "position_ids", "labels")
        ids, positions, labels = (batch.get(name) if isinstance(batch, Mapping) else None for name in names)
        if not (isinstance(ids, Tensor) and isinstance(positions, Tensor) and ids.shape == positions.shape):
            return "", False
        if not isinstance(labels, Tensor) or labels.shape != ids.shape:
            return f"{unchecked}: the batch has no labels like its input_ids", False
        odd = (positions == 0).cumsum(1) % 2 == 0  # the tokens of every second document
        if (odd[:, 1:] & (labels[:, 1:] != NOT_LEARNED)).any():
            break
    else:
        return f"{unchecked}: no row of {reference.task.length} has a second one that counts", False
    # Half of the documents learn, every second one; nothing of the others may reach their loss.
    learned = {**batch, "labels": torch.where(odd, labels, NOT_LEARNED)}
    share, probe = _gradient_share(reference, learned, ids, odd)
    if share is None:
        return f"{unchecked}: no nn.Embedding takes input_ids", False
    if share == 0.0:
        return f"packed documents do not see one another: {int(odd.any(1).sum())} rows, gradient exactly 0", False
    other = {**learned, "input_ids": torch.where(odd, ids, ids.roll(1, 1))}  # the same tokens, in other places
    where = _first_change(reference, learned, other, odd)
    text = f"packed documents leak in {where}: the gradient of a document's loss with respect to another's embeddings"
    return f"{text} is {share:.2g} of that with respect to its own, and must be 0: {probe.cause(where)}", True


class _Probe:
    """Hooks on a model: the outputs of embeddings that take input_ids, as leaves, and what the model is called with."""

    def __init__(self, model: nn.Module, ids: Tensor):
        self.embedded: list[Tensor] = []
        self._model, self._ids, self._kwargs = model, ids, {}  # type: ignore[var-annotated]
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.register_forward_hook(self._embed)
        model.register_forward_pre_hook(self._enter, with_kwargs=True)

    def _embed(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        given = args[0] if args else None
        if not isinstance(given, Tensor) or given.ndim != 2 or not torch.equal(given, self._ids[:, : given.shape[1]]):
            return None
        self.embedded.append(output.detach().requires_grad_())
        return self.embedded[-1]

    def _enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._kwargs = kwargs

    def cause(self, where: str) -> str:
        """The likely cause, and its fix, of a leak that begins in the module of this label."""
        mask, cache = self._kwargs.get("attention_mask"), self._kwargs.get("use_cache")
        if "attention" not in where.lower():
            return "it mixes tokens without regard to position_ids; use data.pack=off, or a module that takes them"
        if isinstance(mask, Tensor) and mask.ndim == 2 and bool(mask.all()):
            return (
                "the model is called with an attention_mask of ones, and then takes a row for one document; leave "
                "attention_mask out"
            )
        config = getattr(self._model, "config", None)
        if cache or (cache is None and getattr(config, "use_cache", False)):
            return (
                "the model is called with use_cache at its default, true, and with a cache it takes a row for one "
                "document; call it with use_cache=False"
            )
        return "its mask does not tell documents by position_ids; use data.pack=off, or another attention"


def _gradient_share(reference: Reference, batch: Any, ids: Tensor, odd: Tensor) -> tuple[float | None, _Probe]:
    """The largest gradient at the tokens of even documents over that at the odd ones', which alone learn."""
    model = reference.model()
    probe = _Probe(model, ids)
    seed_all(0)
    loss = reference.task.loss_sum(model, batch)
    gradients = [
        gradient.abs().flatten(2).amax(2)
        for gradient in torch.autograd.grad(loss, probe.embedded, allow_unused=True)
        if gradient is not None
    ] if probe.embedded else []  # fmt: skip
    if not gradients:
        return None, probe
    own = max(float(one[odd[:, : one.shape[1]]].max()) for one in gradients)
    others = max(float(one[~odd[:, : one.shape[1]]].max()) for one in gradients)
    return others / max(own, 1e-30), probe


def _first_change(reference: Reference, batch: Any, other: Any, odd: Tensor) -> str:
    """The label of the innermost module that changes odd documents' tokens, in its output and not yet in its input."""
    calls = [_calls(reference, one, odd.shape) for one in (batch, other)]
    for (label, *before), (_, *after) in zip(*calls, strict=False):
        same = [a is not None and b is not None and _same(a, b, odd) for a, b in zip(before, after, strict=True)]
        if same == [True, False]:
            return label
    return "the model"


def _same(a: Tensor, b: Tensor, chosen: Tensor) -> bool:
    chosen = chosen[:, : a.shape[1]]
    return a.shape == b.shape and torch.equal(a[chosen], b[chosen])


def _calls(reference: Reference, batch: Any, shape: torch.Size) -> list[tuple[str, Tensor | None, Tensor | None]]:
    """(label, first input by token, first output by token) of each module, inner ones before outer ones."""
    model = reference.model()
    found: list[tuple[str, Tensor | None, Tensor | None]] = []

    def record(label: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        before, after = (_by_token(next(tensors_in(value), None), shape) for value in ([args, kwargs], output))
        found.append((label, before, after))

    for name, module in model.named_modules():
        label = f"{name} ({type(module).__name__})" if name else "the model"
        module.register_forward_hook(partial(record, label), with_kwargs=True)
    seed_all(0)
    with torch.no_grad():
        reference.task.loss_sum(model, batch)
    return found


def _by_token(value: Tensor | None, shape: torch.Size) -> Tensor | None:
    """A copy as [B, T, ...], T tokens or, for a model that gets all but the last, T - 1; None if it is neither."""
    rows, most = shape
    if value is None:
        return None
    for length in (most, most - 1):
        if value.shape[:2] == (rows, length):
            return value.clone()
        if value.ndim == 3 and value.shape[0] == rows and value.shape[2] == length:  # channels first
            return value.transpose(1, 2).clone()
        if value.ndim == 2 and value.shape[0] == rows * length:
            return value.unflatten(0, (rows, length)).clone()
    return None
