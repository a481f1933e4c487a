"""Hooks into FSDP2 that time its waits, and raise errors for uses that it silently gets wrong.

FSDP2 calls collectives in a block's forward and backward, so all ranks must call the same blocks in
the same order, and each rank's loss must depend on all of them. Each rank checks its own calls
before a collective would be out of order; in the first forwards, ranks also compare their calls.
FSDP2 computes with gathered copies of its own parameters. It is an error if a forward writes to
parameters (the writes would be lost) or is called with substitutes (which would be ignored).

If torch renames the private methods used here, waits count as forward and backward time.

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
# wait for the reduction. Timing them takes 2 us per unit and step (measured).
WAITS = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")

# Forwards checked for writes to parameters: a teacher's first updates may not change its values.
CHECKED_FORWARDS = 16

# Forwards in which the ranks compare which blocks they called, by a collective between CPUs.
COMPARED_FORWARDS = 2


def hook_units(model: nn.Module, blocks: Collection[nn.Module], world: World) -> None:
    """Time the waits of an FSDP2 model, and check how it is used. blocks: its sharded blocks."""
    time_gathers(model, world.clock)
    BlockCalls(model, blocks, world)
    if not hasattr(model, "set_reduce_scatter_unused_params"):  # torch before 2.13 lacks this
        for group in fsdp_groups(model):
            group.post_backward = partial(_post_backward, group, group.post_backward)


def groups_of(unit: Any) -> list[Any]:
    """The parameter groups of an FSDP2 unit: at most one with torch before 2.13."""
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
    """Count the time that FSDP2's units spend in WAITS as communication."""
    # On a GPU, unshard only queues an all-gather, which overlaps with computation.
    names = [name for name in WAITS if not (clock.on_gpu and name == "unshard")]
    for group in fsdp_groups(model):
        for name in names:
            if hasattr(group, name):
                setattr(group, name, partial(_timed, clock, getattr(group, name)))


def _timed(clock: PhaseClock, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    previous = clock.enter("communication")
    try:
        return method(*args, **kwargs)
    finally:
        clock.enter(previous)


class BlockCalls:
    """Hooks on an FSDP2 model and its blocks that make the checks described at the file's top.

    Backward reaches blocks in the reverse order of their calls. When it reaches a block, it must
    have reached all blocks that were called later; the loss does not depend on those it skipped.
    """

    def __init__(self, model: nn.Module, blocks: Collection[nn.Module], world: World):
        self._names = {part: name for name, part in model.named_modules() if part in blocks}
        self._model = model
        self._world = world
        self._forwards = 0  # number of forwards with gradients
        self._in_forward = False  # stays False while backward recomputes a block
        self._calls: list[nn.Module] = []  # the blocks that this forward called, in order
        self._pending: list[nn.Module] = []  # calls that backward has yet to reach, the last next
        # Before FSDP2's hook, which replaces parameters by gathered ones.
        model.register_forward_pre_hook(self._before_forward, prepend=True)
        # Before FSDP2's hook, so that our hooks on the gradient of an output run before FSDP2's.
        model.register_forward_hook(self._after_forward, prepend=True)
        for block in self._names:
            block.register_forward_hook(self._after_block, prepend=True)

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        if self._forwards < COMPARED_FORWARDS:
            self._check_parameters()
        self._calls = []
        self._pending = []
        self._in_forward = True

    def _after_block(self, block: nn.Module, inputs: Any, output: Any) -> None:
        if not self._in_forward:
            return
        self._calls.append(block)
        if torch.is_grad_enabled():
            self._check_writes(block)
        trained = trained_tensors(output)
        if trained:
            self._pending.append(block)
        for tensor in trained:
            tensor.register_hook(partial(self._visit, block))

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        self._in_forward = False
        trained = trained_tensors(output)
        if torch.is_grad_enabled():
            self._check_writes(model)
            self._forwards += 1
            if self._forwards <= COMPARED_FORWARDS:
                self._compare_calls()
            # FSDP2 starts to reduce at the gradient of a block's output, or of the model's output.
            if not trained and not self._pending:
                self._fail(
                    f"the model's output, of type {type(output).__name__}, has no tensor that "
                    "FSDP2 finds and that requires a gradient, so gradients would not be reduced; "
                    "return a tensor, tuple, dict or dataclass"
                )
        if missing := [name for block, name in self._names.items() if block not in self._calls]:
            self._fail(
                f"the model's forward did not call its block {missing[0]} ({len(missing)} of "
                f"{len(self._names)} blocks not called), but all ranks must gather its shards "
                "together; return blocks(model) and units(model) without it from the task, so that "
                "it is part of a larger unit"
            )
        for tensor in trained:
            tensor.register_hook(lambda _: call_after_backward(self._visit))

    def _visit(self, block: nn.Module | None = None, gradient: Tensor | None = None) -> None:
        """Called when backward reaches a block, and without a block when backward has ended."""
        if self._pending and block in (None, *self._pending):
            last = self._pending.pop()
            if last is not block:
                self._fail(
                    f"the loss does not depend on the block {self._names[last]}, whose gradients "
                    "all ranks must reduce together, in backward() and not in torch.autograd.grad; "
                    "let the loss depend on all blocks"
                )

    def _fail(self, text: str) -> None:
        raise DataError(f"rank {self._world.rank}: {text}, or use parallel.strategy=ddp")

    def _compare_calls(self) -> None:
        calls = self._world.gather([self._names[block] for block in self._calls])
        for rank, names in enumerate(calls):
            if names != calls[0]:
                raise DataError(
                    f"rank 0 calls the blocks {', '.join(calls[0])} and rank {rank} "
                    f"{', '.join(names)}, but FSDP2 gathers a block's shards from all ranks at "
                    "each call; let all ranks call the same blocks in the same order, equally "
                    "often, or use parallel.strategy=ddp"
                )

    def _check_parameters(self) -> None:
        """Reject substitutes for parameters: FSDP2 would replace them by its own."""
        for parameter in [p for group in fsdp_groups(self._model) for p in group.fsdp_params]:
            place = parameter._module_info
            current = getattr(place.module, place.param_name)
            gathered = getattr(parameter, "_unsharded_param", None)  # None before the first gather
            if current is not parameter.sharded_param and current is not gathered:
                self._fail(
                    f"the model is called with a {place.param_name} of a "
                    f"{type(place.module).__name__} that is not its own, as by "
                    "torch.func.functional_call in meta-learning, but FSDP2 computes with its own; "
                    "call the model as loss_sum gets it"
                )

    @torch.no_grad()
    def _check_writes(self, unit: nn.Module) -> None:
        """Reject writes to gathered parameters: FSDP2 frees them, so the writes are lost."""
        if self._forwards >= CHECKED_FORWARDS:
            return
        for parameter in [p for group in groups_of(unit) for p in group.fsdp_params]:
            if is_written(parameter.unsharded_param, parameter.sharded_param):
                self._fail(
                    f"the model's forward changes its parameter {parameter._param_fqn}, but under "
                    "FSDP2 the change is lost, because only a gathered copy is written to; change "
                    "it in on_step(run, report)"
                )


def is_written(whole: Tensor, sharded: Any) -> bool:
    """Whether this rank's rows of a gathered parameter differ from its shard."""
    shard = sharded.to_local()
    mesh = sharded.device_mesh
    begin = math.ceil(len(whole) / mesh.size(-1)) * mesh.get_local_rank(mesh_dim=-1)
    gathered = whole[begin : begin + len(shard)]
    shard = shard.to(whole.device, whole.dtype)
    return not torch.allclose(gathered, shard, rtol=0, atol=0, equal_nan=True)


def trained_tensors(output: Any) -> list[Tensor]:
    return [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]


def _post_backward(group: Any, post_backward: Any, *unused: Any) -> None:
    """Before torch 2.13: also reduce zeros for unused parameters; all in the reduction's dtype."""
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
