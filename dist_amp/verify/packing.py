"""Whether attention crosses packed documents: the gradient of one's loss by another's embeddings.

It is exactly 0 where attention masks the other documents, because what is masked has a weight of
exactly 0; and so is every part of a sum that its gradient is made of.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from dist_amp.distributed.process import seed_all
from dist_amp.verify.dtypes import tensors_in
from dist_amp.verify.reference import Reference

IGNORE_INDEX = -100  # the label that cross-entropy ignores


def leaks(reference: Reference, rows: int) -> tuple[str, bool]:
    """(one line, whether the task is wrong) for a task whose batches have position_ids, else "".

    Takes the first `rows` samples that have a second document in a row.
    """
    unchecked = "packed documents are not checked for leaks"
    for first in range(0, reference.task.length, rows):
        batch = reference.batch(range(first, min(first + rows, reference.task.length)))
        if not isinstance(batch, Mapping):
            return "", False
        ids = batch.get("input_ids")
        positions = batch.get("position_ids")
        labels = batch.get("labels")
        if not isinstance(ids, Tensor) or not _shaped_like(positions, ids):
            return "", False
        if not _shaped_like(labels, ids):
            return f"{unchecked}: the batch has no labels like its input_ids", False
        second = (positions == 0).cumsum(1) % 2 == 0  # the tokens of every second document
        if (second[:, 1:] & (labels[:, 1:] != IGNORE_INDEX)).any():
            break
    else:
        return f"{unchecked}: no row of {reference.task.length} has a second one that counts", False
    # Only every second document has labels; nothing of the others may reach their loss.
    labelled = {**batch, "labels": torch.where(second, labels, IGNORE_INDEX)}
    probe = _Probe(reference.model(), ids)
    share = probe.gradient_share(reference, labelled, second)
    if share is None:
        return f"{unchecked}: no nn.Embedding takes input_ids", False
    if share == 0.0:
        checked = int(second.any(1).sum())
        return (
            f"no cross-document attention in packed rows: {checked} rows, gradient exactly 0",
            False,
        )
    # The same tokens, in other places.
    shuffled = {**labelled, "input_ids": torch.where(second, ids, ids.roll(1, 1))}
    where = _first_change(reference, labelled, shuffled, second)
    text = (
        f"packed documents leak in {where}: the gradient of a document's loss with respect to "
        f"another's embeddings is {share:.2g} of that with respect to its own, and must be 0: "
        f"{probe.cause(where)}"
    )
    return text, True


def _shaped_like(value: Any, ids: Tensor) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.shape == ids.shape


class _Probe:
    """A model with its embeddings of input_ids as leaves, and the arguments of its call."""

    def __init__(self, model: nn.Module, ids: Tensor):
        self._model = model
        self._ids = ids
        self._embedded: list[Tensor] = []
        self._kwargs: dict[str, Any] = {}
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.register_forward_hook(self._embed)
        model.register_forward_pre_hook(self._enter, with_kwargs=True)

    def _embed(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        taken = args[0] if args else None
        if not isinstance(taken, Tensor) or taken.ndim != 2:
            return None
        if not torch.equal(taken, self._ids[:, : taken.shape[1]]):
            return None
        self._embedded.append(output.detach().requires_grad_())
        return self._embedded[-1]

    def _enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._kwargs = kwargs

    def gradient_share(self, reference: Reference, batch: Any, second: Tensor) -> float | None:
        """The largest gradient at other documents' tokens over that at those of `second`.

        None if no embedding takes input_ids.
        """
        seed_all(0)
        loss = reference.task.loss_sum(self._model, batch)
        if not self._embedded:
            return None
        inside = []
        outside = []
        for gradient in torch.autograd.grad(loss, self._embedded, allow_unused=True):
            if gradient is not None:
                by_token = gradient.abs().flatten(2).amax(2)
                chosen = second[:, : by_token.shape[1]]
                inside.append(float(by_token[chosen].max()))
                outside.append(float(by_token[~chosen].max()))
        return max(outside) / max(*inside, 1e-30) if inside else None

    def cause(self, where: str) -> str:
        """The likely cause, and its fix, of a leak that begins in the module of this label."""
        if "attention" not in where.lower():
            return (
                "it mixes tokens without regard to position_ids; use data.pack=off, or a module "
                "that takes them"
            )
        mask = self._kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2 and bool(mask.all()):
            return (
                "the model is called with an attention_mask of ones, and then takes a row for one "
                "document; leave attention_mask out"
            )
        default = getattr(getattr(self._model, "config", None), "use_cache", False)
        if self._kwargs.get("use_cache", default):
            return (
                "the model is called with use_cache at its default, true, and with a cache it "
                "takes a row for one document; call it with use_cache=False"
            )
        return (
            "its mask does not tell documents by position_ids; use data.pack=off, or another "
            "attention"
        )


def _first_change(reference: Reference, batch: Any, other: Any, second: Tensor) -> str:
    """The innermost module whose output changes at documents' tokens, but not yet its input."""
    calls = _calls(reference, batch, second.shape)
    other_calls = _calls(reference, other, second.shape)
    for (label, before, after), (_, other_before, other_after) in zip(
        calls, other_calls, strict=False
    ):
        if _same(before, other_before, second) and not _same(after, other_after, second):
            return label
    return "the model"


def _same(a: Tensor | None, b: Tensor | None, chosen: Tensor) -> bool:
    if a is None or b is None or a.shape != b.shape:
        return False
    chosen = chosen[:, : a.shape[1]]
    return torch.equal(a[chosen], b[chosen])


def _calls(
    reference: Reference, batch: Any, shape: torch.Size
) -> list[tuple[str, Tensor | None, Tensor | None]]:
    """(label, first input by token, first output by token) of each module, inner before outer."""
    model = reference.model()
    calls: list[tuple[str, Tensor | None, Tensor | None]] = []

    def record(label: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        before = _by_token(next(tensors_in([args, kwargs]), None), shape)
        calls.append((label, before, _by_token(next(tensors_in(output), None), shape)))

    for name, module in model.named_modules():
        label = f"{name} ({type(module).__name__})" if name else "the model"
        module.register_forward_hook(partial(record, label), with_kwargs=True)
    seed_all(0)
    with torch.no_grad():
        reference.task.loss_sum(model, batch)
    return calls


def _by_token(value: Tensor | None, shape: torch.Size) -> Tensor | None:
    """A copy as [B, T, ...]; None if it is not by token. A model may get T - 1 of T tokens."""
    if value is None:
        return None
    rows, tokens = shape
    for length in (tokens, tokens - 1):
        if value.shape[:2] == (rows, length):
            return value.clone()
        if value.ndim == 3 and value.shape[0] == rows and value.shape[2] == length:
            return value.transpose(1, 2).clone()  # channels first
        if value.ndim == 2 and value.shape[0] == rows * length:
            return value.unflatten(0, (rows, length)).clone()
    return None
