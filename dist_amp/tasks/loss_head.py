"""Cross-entropy over a large vocabulary, without all logits in memory at once.

The logits of 65,536 tokens over a vocabulary of 50,304 take 12.3 GiB in float32, and so do their
softmax and gradient. So the tokens are split into chunks, and one chunk at a time gets logits,
losses and gradients. If the losses are summed, forward already computes the gradients, and backward
multiplies them by the sum's gradient: logits are computed once. If each token's loss is returned,
each has its own gradient, which only backward knows: it computes the logits again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_amp.sources.token_shards import IGNORE_INDEX

AUTO_BYTES = 2**29  # of a chunk's float32 logits; smaller matrices slow a GPU down (assumed)
Chunk = int | Literal["auto", "off"]  # tokens in a chunk; off: all in one
Reduction = Literal["sum", "none", "hits"]


class LossHead(nn.Linear):
    """A head without bias: x [..., width] -> logits [..., vocabulary], or losses if given targets.

    Reductions of the cross-entropy, for N targets in all: sum: scalar float32; a target of -100 is
    ignored. none: the losses [N] float32, 0 for -100. hits: [2, N] float32, without a gradient: the
    losses, and 1.0 where the target has the largest logit.
    """

    chunk: Chunk = "auto"
    computes_loss = True  # so that it is compiled, like blocks
    _loss: tuple[Tensor, Reduction] | None = None  # set inside `losses_of`

    @contextmanager
    def losses_of(self, targets: Tensor, reduction: Reduction = "sum") -> Iterator[None]:
        """Context in which the head returns losses, for models that do not pass it the targets."""
        self._loss = (targets, reduction)
        try:
            yield
        finally:
            self._loss = None

    def forward(
        self, x: Tensor, targets: Tensor | None = None, reduction: Reduction = "sum"
    ) -> Tensor:
        if self._loss is not None:
            targets, reduction = self._loss
        if targets is None:
            return super().forward(x)
        x = x.flatten(0, -2)
        targets = targets.flatten()
        chunk = self.tokens_at_a_time(len(x))
        if reduction == "hits":
            return self._hits(x, targets, chunk)
        if len(x) <= chunk:
            return losses_of(super().forward(x), targets, reduction)
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        options = (reduction, chunk, dtype, torch.is_grad_enabled())
        return ChunkedLoss.apply(x, self.weight, targets, *options)  # type: ignore[no-any-return]

    def tokens_at_a_time(self, tokens: int) -> int:
        if self.chunk == "off":
            return tokens
        if self.chunk == "auto":
            return max(1, AUTO_BYTES // (4 * self.out_features))
        return self.chunk

    @torch.no_grad()
    def _hits(self, x: Tensor, targets: Tensor, chunk: int) -> Tensor:
        rows = []
        for part, target in zip(x.split(chunk), targets.split(chunk), strict=True):
            rows.append(losses_of(super().forward(part), target, "hits"))
        return torch.cat(rows, dim=1)


def losses_of(logits: Tensor, targets: Tensor, reduction: Reduction) -> Tensor:
    """`LossHead`'s losses for logits [..., vocabulary] and targets [...]."""
    logits = logits.float().flatten(0, -2)
    targets = targets.flatten()
    if reduction != "hits":
        return F.cross_entropy(logits, targets, reduction=reduction)
    losses = F.cross_entropy(logits, targets, reduction="none")
    return torch.stack((losses, logits.argmax(1).eq(targets).float()))


class ChunkedLoss(torch.autograd.Function):
    """Chunked cross-entropy, summed or per token; see the top of this file."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        reduction: Literal["sum", "none"],
        chunk: int,
        dtype: torch.dtype,
        with_gradient: bool,
    ) -> Tensor:
        """x [N, width], weight [vocabulary, width], targets [N]; dtype: of matrix products."""
        ctx.is_sum = reduction == "sum"
        ctx.options = (chunk, dtype)
        ctx.needed = ctx.needs_input_grad[:2]
        ctx.dtypes = (x.dtype, weight.dtype)
        needed = (False, False)
        if ctx.is_sum and with_gradient:
            needed = ctx.needed
        losses, *gradients = chunked(x, weight, targets, None, needed, *ctx.options)
        if ctx.is_sum:
            ctx.save_for_backward(*gradients)
            return losses.sum()
        ctx.save_for_backward(x, weight, targets)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph=True: second derivatives would silently be 0
            raise RuntimeError(
                "the chunked loss has no second derivative; use --task.args.loss_chunk off"
            )
        input_gradients: list[Tensor | None] = [None] * 7
        gradients = ctx.saved_tensors
        if not ctx.is_sum:
            x, weight, targets = ctx.saved_tensors
            _, *gradients = chunked(x, weight, targets, gradient, ctx.needed, *ctx.options)
        for number, tensor in enumerate(gradients):
            if tensor is None:
                continue
            if ctx.is_sum:
                tensor = tensor * gradient
            input_gradients[number] = tensor.to(ctx.dtypes[number])
        return tuple(input_gradients)


def chunked(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor | None,
    needed: tuple[bool, bool],
    chunk: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns (losses [N] float32, gradients of their weighted sum for x and for weight).

    A gradient that is not needed is None. scale: the sum's weights [N]; None: all 1.
    """
    needs_x, needs_weight = needed
    # The loss scale is applied only in backward: float16 would lose these small gradients.
    dtype_back = torch.float32 if dtype == torch.float16 else dtype
    losses = []
    grad_x_chunks = []
    grad_weight = None
    if needs_weight:
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        matrix = weight.to(dtype)
        matrix_back = matrix
        if dtype_back != dtype:
            matrix_back = weight.to(dtype_back)
        for start in range(0, len(x), chunk):
            rows = slice(start, start + chunk)
            part = x[rows]
            target = targets[rows]
            log_p = F.log_softmax(part.to(dtype) @ matrix.t(), 1, dtype=torch.float32)
            losses.append(F.nll_loss(log_p, target, reduction="none"))
            if not (needs_x or needs_weight):
                continue
            # Gradient with respect to the logits: softmax minus one-hot, or 0 for ignored targets.
            index = target.clamp(min=0)[:, None]
            gradient = log_p.exp_()
            gradient.scatter_add_(1, index, gradient.new_full(index.shape, -1.0))
            if scale is not None:
                gradient.mul_(scale[rows, None])
            gradient.masked_fill_((target == IGNORE_INDEX)[:, None], 0.0)
            gradient = gradient.to(dtype_back)
            if needs_x:
                grad_x_chunks.append(gradient @ matrix_back)
            if grad_weight is not None:
                grad_weight += gradient.t() @ part.to(dtype_back)
    grad_x = torch.cat(grad_x_chunks) if needs_x else None
    return torch.cat(losses), grad_x, grad_weight
