"""The cross-entropy of a large vocabulary without all of its logits in memory at once.

The logits of 65,536 tokens and 50,304 words take 12.3 GiB in float32, several times over with their
softmax and gradient. Here the logits of some tokens at a time become the loss and its gradient,
which is a product with the loss's own gradient later, so the head is computed once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_amp.sources.token_shards import IGNORE_INDEX

AUTO_BYTES = 2**29  # of float32 logits at a time; smaller matrices slow a GPU down (assumed)
Reduction = Literal["sum", "none"]


class LossHead(nn.Linear):
    """A head without bias: x [..., width] -> logits [..., vocabulary], or losses given targets.

    sum: the cross-entropy of all targets [...] but those of -100, scalar float32. none: without a
    gradient, [2, targets] float32: each one's loss, and 1 where it has the largest logit.
    """

    chunk: int | Literal["auto", "off"] = "auto"  # tokens; off: all
    computes_loss = True  # so it is compiled as the task's loss_sum is
    _targets: tuple[Tensor, Reduction] | tuple[()] = ()

    @contextmanager
    def losses_of(self, targets: Tensor, reduction: Reduction = "sum") -> Iterator[None]:
        """Inside, the head returns losses: for models that do not pass targets on to it."""
        self._targets = (targets, reduction)
        try:
            yield
        finally:
            self._targets = ()

    def forward(self, x: Tensor, *loss: Any) -> Tensor:
        """loss: targets and, unless it is sum, the reduction."""
        loss = loss or self._targets
        if not loss:
            return super().forward(x)
        x = x.flatten(0, -2)
        targets = loss[0].flatten()
        chunk = self.tokens_at_a_time(len(x))
        if loss[1:] == ("none",):
            return self._each(x, targets, chunk)
        if len(x) <= chunk:
            return losses_of(super().forward(x), targets, "sum")
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        options = (chunk, dtype, torch.is_grad_enabled())
        return ChunkedLoss.apply(x, self.weight, targets, *options)  # type: ignore[no-any-return]

    def tokens_at_a_time(self, tokens: int) -> int:
        if self.chunk == "off":
            return tokens
        if self.chunk == "auto":
            return max(1, AUTO_BYTES // (4 * self.out_features))
        return self.chunk

    @torch.no_grad()
    def _each(self, x: Tensor, targets: Tensor, chunk: int) -> Tensor:
        rows = []
        for part, target in zip(x.split(chunk), targets.split(chunk), strict=True):
            rows.append(losses_of(super().forward(part), target, "none"))
        return torch.cat(rows, dim=1)


def losses_of(logits: Tensor, targets: Tensor, reduction: Reduction) -> Tensor:
    """What `LossHead` returns, of logits [..., vocabulary] and targets [...]."""
    logits = logits.float().flatten(0, -2)
    targets = targets.flatten()
    losses = F.cross_entropy(logits, targets, reduction=reduction)
    if reduction == "sum":
        return losses
    return torch.stack((losses, logits.argmax(1).eq(targets).float()))


class ChunkedLoss(torch.autograd.Function):
    """Summed cross-entropy, whose gradients the forward computes with it, in float32 sums."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        dtype: torch.dtype,
        with_gradient: bool,
    ) -> Tensor:
        """x [N, width], weight [vocabulary, width], targets [N]; dtype: of the products."""
        needs_x = with_gradient and ctx.needs_input_grad[0]
        needs_weight = with_gradient and ctx.needs_input_grad[1]
        # Before the loss scale, float16 would lose small probabilities.
        dtype_back = torch.float32 if dtype == torch.float16 else dtype
        total = x.new_zeros((), dtype=torch.float32)
        grad_x = []
        grad_weight = None
        if needs_weight:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            matrix = weight.to(dtype)
            matrix_back = matrix
            if dtype_back != dtype:
                matrix_back = weight.to(dtype_back)
            for part, target in zip(x.split(chunk), targets.split(chunk), strict=True):
                log_p = F.log_softmax(part.to(dtype) @ matrix.t(), 1, dtype=torch.float32)
                total += F.nll_loss(log_p, target, reduction="sum")
                if not (needs_x or needs_weight):
                    continue
                place = target.clamp(min=0)[:, None]  # not that of a target that is ignored
                gradient = log_p.exp_()
                gradient.scatter_add_(1, place, gradient.new_full(place.shape, -1.0))
                gradient.masked_fill_((target == IGNORE_INDEX)[:, None], 0.0)
                gradient = gradient.to(dtype_back)
                if needs_x:
                    grad_x.append(gradient @ matrix_back)
                if grad_weight is not None:
                    grad_weight += gradient.t() @ part.to(dtype_back)
        ctx.save_for_backward(torch.cat(grad_x) if needs_x else None, grad_weight)
        ctx.dtypes = (x.dtype, weight.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph=True; its gradient would be 0 in silence
            raise RuntimeError(
                "the loss in chunks has no second derivative; use --task.args.loss_chunk off"
            )
        of_inputs: list[Tensor | None] = [None] * 6
        for number, tensor in enumerate(ctx.saved_tensors):
            if tensor is not None:
                of_inputs[number] = (tensor * gradient).to(ctx.dtypes[number])
        return tuple(of_inputs)
