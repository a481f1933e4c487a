"""Lets the ranks of an FSDP2 model depend on different blocks in a step (ranks_skip_blocks).

FSDP2 reduces a block when its backward comes, so ranks whose losses depend on different blocks
would reduce them in different orders. Its public `set_reduce_scatter_unused_params` adds zeros for
parameters without a gradient, but does not order blocks, and in torch 2.13 it can't mix the float32
gradients of earlier micro-batches with half-precision ones. This patches private methods of FSDP2's
parameter groups, so only a task with `ranks_skip_blocks = True` gets it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from dist_amp.errors import ConfigError
from dist_amp.scaling.block_calls import trained_tensors
from dist_amp.scaling.fsdp_groups import fsdp_units, groups_of


class ReduceEveryBlock:
    """Makes every rank gather and reduce the same blocks in the same order in each backward.

    A block that was called and on which the loss does not depend is reduced as zeros, when the
    backward reaches a block that was called before it, or ends. Autograd takes blocks in the
    reverse order of their calls, so it can't reach the later one any more.
    """

    def __init__(self, model: nn.Module):
        """Errors: ConfigError if this release of torch has other private names."""
        root: Any = model
        units = fsdp_units(model)
        if not units:
            raise ConfigError(
                f"the task has ranks_skip_blocks=True, for which torch {torch.__version__} is not "
                "known well enough; use parallel.strategy=ddp"
            )
        self._called: list[Any] = []  # the blocks' parameter groups, until their backward
        self._in_forward = False  # false while a block is recomputed
        self._pre_backward: dict[Any, Any] = {}
        root.register_forward_pre_hook(self._begin)
        root.register_forward_hook(self._end)
        for unit in units:
            state = unit._get_fsdp_state()
            state._root_post_backward_final_callback = partial(
                self._finish, state._root_post_backward_final_callback
            )
            for group in groups_of(unit):
                group.post_backward = partial(_post_backward, group, group.post_backward)
                self._pre_backward[group] = group.pre_backward
                group.pre_backward = partial(self._reach, group)
                if unit is not root:
                    unit.register_forward_hook(partial(self._note, group))

    def _begin(self, model: Any, inputs: Any) -> None:
        self._called = []
        self._in_forward = torch.is_grad_enabled()

    def _end(self, model: Any, inputs: Any, output: Any) -> None:
        self._in_forward = False

    def _note(self, group: Any, block: Any, inputs: Any, output: Any) -> None:
        # Not a frozen trunk, which no rank gathers a second time.
        if self._in_forward and trained_tensors(output):
            self._called.append(group)

    def _reach(self, group: Any, prefetch: bool, *unused: Any) -> None:
        if group in self._called:
            while (last := self._called.pop()) is not group:
                self._skip(last, prefetch)
        self._pre_backward[group](prefetch, *unused)

    def _skip(self, group: Any, prefetch: bool) -> None:
        self._pre_backward[group](prefetch)
        group.post_backward()

    def _finish(self, final_callback: Any) -> None:
        while self._called:
            self._skip(self._called.pop(), True)
        final_callback()


def _post_backward(group: Any, post_backward: Any, *unused: Any) -> None:
    if group.reduce_grads:
        trained = [
            p
            for p in group.fsdp_params
            if hasattr(p, "_unsharded_param") and p.unsharded_param.requires_grad
        ]
        for p in trained:
            if p.unsharded_param.grad is None and p.unsharded_accumulated_grad is None:
                dtype = getattr(p.unsharded_param, "grad_dtype", None)
                p.unsharded_param.grad = torch.zeros_like(p.unsharded_param, dtype=dtype)
        # All in the dtype of the reduction, in which earlier micro-batches were added up.
        if not all(hasattr(p, "accumulate_unsharded_grad_if_needed") for p in trained):
            _cast_to_one_dtype([p.unsharded_param for p in trained])
        elif any(p.unsharded_accumulated_grad is not None for p in trained):
            for p in trained:
                p.accumulate_unsharded_grad_if_needed()
                p.to_accumulated_grad_if_needed()
    post_backward(*unused)


def _cast_to_one_dtype(parameters: Sequence[Any]) -> None:
    """For torch 2.15, which accumulates in `grad`: in float32, if two micro-batches had one."""
    dtypes = {p.grad.dtype for p in parameters}
    if len(dtypes) > 1:
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        for p in parameters:
            p.grad_dtype = None  # allows any
            p.grad = p.grad.to(widest)
