"""Hooks into FSDP2: waits are timed, and what FSDP2 would compute wrongly in silence is refused.

A block's forward and backward call collectives, so all ranks must call the same blocks in the same
order, and their losses must depend on each. Each rank checks that by itself, before it would reduce
out of order; in the first forwards the ranks compare their calls, too. FSDP2 computes with gathered
copies of the parameters: a forward that writes to them, or is called with others, is refused.

Without private names the waits count as forward and backward.

Docs: docs/collectives.md
"""

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from dist_amp.clock import PhaseClock
from dist_amp.errors import DataError
from dist_amp.scaling.reduction import call_after_backward
from dist_amp.world import World

# Methods of FSDP2's parameter groups that gather parameters, wait for them, reduce gradients, and
# wait for those. Measured: 2 us a step for each unit.
WAITS = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")

# Long enough for a teacher, which equals the model at first, to move.
CHECKED_FORWARDS = 16

# In which the ranks compare which blocks they called, by a collective of the hosts.
COMPARED_FORWARDS = 2


def hook_units(model: nn.Module, blocks: Collection[nn.Module], world: World) -> None:
    """Time the waits of an FSDP2 model, and check how it is used. blocks: the sharded ones."""
    time_gathers(model, world.clock)
    BlockCalls(model, blocks, world)
    if not hasattr(model, "set_reduce_scatter_unused_params"):  # before torch 2.13
        for group in fsdp_groups(model):
            group.post_backward = partial(_post_backward, group, group.post_backward)


def groups_of(unit: Any) -> list[Any]:
    """The parameter groups of an FSDP2 unit, which has one at most before torch 2.13."""
    if not hasattr(unit, "_get_fsdp_state"):
        return []
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", [getattr(state, "_fsdp_param_group", None)])
    return [group for group in groups if group is not None]


def fsdp_groups(model: nn.Module) -> list[Any]:
    """All parameter groups of an FSDP2 model; none if torch's private names have changed."""
    units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    return [group for unit in units for group in groups_of(unit)]


def time_gathers(model: nn.Module, clock: PhaseClock) -> None:
    """Count what FSDP2's units wait as communication; on a CPU their collectives too."""
    # On a GPU unshard only queues work, which runs beside the computation.
    names = [name for name in WAITS if not (clock.on_gpu and name == "unshard")]
    for group in fsdp_groups(model):
        for name in names:
            if hasattr(group, name):
                setattr(group, name, partial(_timed, clock, getattr(group, name)))


def _timed(clock: PhaseClock, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before = clock.enter("communication")
    try:
        return method(*args, **kwargs)
    finally:
        clock.enter(before)


class BlockCalls:
    """Hooks on an FSDP2 model and its blocks that refuse what this file's top describes.

    Autograd takes blocks in the reverse order of their calls: where it reaches one, it has passed
    those that were called later, so these must have had their backward.
    """

    def __init__(self, model: nn.Module, blocks: Collection[nn.Module], world: World):
        self._names = {part: name for name, part in model.named_modules() if part in blocks}
        self._model = model
        self._world = world
        self._forwards = 0  # with gradients
        self._in_forward = False  # false while a block is recomputed
        self._calls: list[nn.Module] = []  # of this forward
        self._ahead: list[nn.Module] = []  # blocks whose backward is to come, the next one last
        # First, since FSDP2 replaces a parameter as it gathers it.
        model.register_forward_pre_hook(self._begin, prepend=True)
        # First, so that the hooks of an output's gradient come before FSDP2's.
        model.register_forward_hook(self._end, prepend=True)
        for block in self._names:
            block.register_forward_hook(self._note, prepend=True)

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        if self._forwards < COMPARED_FORWARDS:
            self._check_parameters()
        self._calls = []
        self._ahead = []
        self._in_forward = True

    def _note(self, block: nn.Module, inputs: Any, output: Any) -> None:
        if not self._in_forward:
            return
        self._calls.append(block)
        if torch.is_grad_enabled():
            self._check_writes(block)
        trained = trained_tensors(output)
        if trained:
            self._ahead.append(block)
        for tensor in trained:
            tensor.register_hook(partial(self._reach, block))

    def _end(self, model: nn.Module, inputs: Any, output: Any) -> None:
        self._in_forward = False
        trained = trained_tensors(output)
        if torch.is_grad_enabled():
            self._check_writes(model)
            self._forwards += 1
            if self._forwards <= COMPARED_FORWARDS:
                self._compare_calls()
            # A backward of the root alone begins at the output's tensors.
            if not trained and not self._ahead:
                self._refuse(
                    f"the model's output, of type {type(output).__name__}, has no tensor that "
                    "FSDP2 finds and that is trained, so gradients would not be reduced; return a "
                    "tensor, tuple, dict or dataclass"
                )
        if missing := [name for block, name in self._names.items() if block not in self._calls]:
            self._refuse(
                f"the model's forward did not call its block {missing[0]} ({len(missing)} of "
                f"{len(self._names)} such), whose shards all ranks gather at once; give the task a "
                "blocks(model) and units(model) without it, so that it is part of a larger unit"
            )
        for tensor in trained:
            tensor.register_hook(lambda _: call_after_backward(self._reach))

    def _reach(self, block: nn.Module | None = None, gradient: Tensor | None = None) -> None:
        """Autograd reaches a block, or its end: it has passed the blocks that were called later."""
        if self._ahead and block in (None, *self._ahead):
            last = self._ahead.pop()
            if last is not block:
                self._refuse(
                    f"the loss does not depend on the block {self._names[last]}, whose gradients "
                    "all ranks reduce at once, in a backward and not in torch.autograd.grad; let "
                    "the loss depend on all blocks"
                )

    def _refuse(self, text: str) -> None:
        raise DataError(f"rank {self._world.rank}: {text}, or use parallel.strategy=ddp")

    def _compare_calls(self) -> None:
        calls = self._world.gather([self._names[block] for block in self._calls])
        for rank, names in enumerate(calls):
            if names != calls[0]:
                raise DataError(
                    f"rank 0 calls the blocks {', '.join(calls[0])} and rank {rank} "
                    f"{', '.join(names)}, and FSDP2 gathers a block's shards from all ranks at "
                    "each call: let all ranks call the same blocks in the same order, equally "
                    "often, or use parallel.strategy=ddp"
                )

    def _check_parameters(self) -> None:
        """FSDP2 puts its own parameters in place of those that a call has brought along."""
        for parameter in [p for group in fsdp_groups(self._model) for p in group.fsdp_params]:
            place = parameter._module_info
            now = getattr(place.module, place.param_name)
            gathered = getattr(parameter, "_unsharded_param", None)  # None before the first time
            if now is not parameter.sharded_param and now is not gathered:
                self._refuse(
                    f"the model is called with another {place.param_name} of a "
                    f"{type(place.module).__name__} than its own, as by torch.func.functional_call "
                    "in meta-learning, and FSDP2 computes with its own; call the model that "
                    "loss_sum gets"
                )

    @torch.no_grad()
    def _check_writes(self, unit: nn.Module) -> None:
        """FSDP2 drops a gathered parameter, and with it what the forward has written to it."""
        if self._forwards >= CHECKED_FORWARDS:
            return
        for parameter in [p for group in groups_of(unit) for p in group.fsdp_params]:
            if is_written(parameter.unsharded_param, parameter.sharded_param):
                self._refuse(
                    f"the model's forward changes its parameter {parameter._param_fqn}, which is "
                    "lost under FSDP2, since only a gathered copy is changed; change it in "
                    "on_step(run, report)"
                )


def is_written(whole: Tensor, sharded: Any) -> bool:
    """Whether a gathered parameter has other values than this rank's shard."""
    shard = sharded.to_local()
    mesh = sharded.device_mesh
    begin = math.ceil(len(whole) / mesh.size(-1)) * mesh.get_local_rank(mesh_dim=-1)
    gathered = whole[begin : begin + len(shard)]
    shard = shard.to(whole.device, whole.dtype)
    return not torch.allclose(gathered, shard, rtol=0, atol=0, equal_nan=True)


def trained_tensors(output: Any) -> list[Tensor]:
    """The tensors of a block's output that depend on anything that is trained."""
    return [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]


def _post_backward(group: Any, post_backward: Any, *unused: Any) -> None:
    """Reduce zeros for parameters without a gradient, and all in the dtype of the reduction."""
    if group.reduce_grads:
        trained = [
            p
            for p in group.fsdp_params
            if hasattr(p, "_unsharded_param") and p.unsharded_param.requires_grad
        ]
        for p in trained:
            if p.unsharded_param.grad is None and p.unsharded_accumulated_grad is None:
                p.unsharded_param.grad = torch.zeros_like(p.unsharded_param)
        if any(p.unsharded_accumulated_grad is not None for p in trained):
            for p in trained:
                p.accumulate_unsharded_grad_if_needed()
                p.to_accumulated_grad_if_needed()
    post_backward(*unused)
