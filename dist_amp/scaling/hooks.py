"""Hooks into FSDP2: blocks that a rank leaves out are named, waits are timed, errors explained.

Without private names the waits count as forward and backward.

Docs: docs/collectives.md
"""

import math
import re
import traceback
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from dist_amp.clock import PhaseClock
from dist_amp.errors import ConfigError, DataError, first_line
from dist_amp.scaling.reduction import call_after_backward
from dist_amp.world import World

# Methods of FSDP2's parameter groups that gather parameters, wait for them, reduce gradients, and
# wait for those. Measured: 2 us a step for each unit.
WAITS = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")

# Long enough for a teacher, which equals the model at first, to move.
CHECKED_FORWARDS = 16

# In which the ranks compare which blocks they call, by a collective of the hosts at each call.
COMPARED_FORWARDS = 2

# What one process allows and FSDP2 does not: torch's words, what they mean, the fix.
ERRORS = (
    (
        "uniform gradient dtype",
        "a parameter, such as an idle expert's, had a gradient in some of the step's micro-batches "
        "only, which FSDP2's policy can't add up; use parallel.accumulate_reduce=every, or "
        "precision.cast_by=autocast",
    ),
    (
        "storage of size 0",
        "the loss differentiates twice, as a gradient penalty does, and FSDP2 has dropped the "
        "gathered parameters after the first time; use parallel.strategy=ddp",
    ),
    (
        "mixed torch.Tensor and DTensor",
        "the loss reads sharded parameters, as a penalty on them does; use optim.weight_decay, or "
        "parallel.strategy=ddp",
    ),
)
OF_DTYPES = re.compile(
    "have the same dtype|Unsupported dtype|expected scalar type|not implemented for '(BF|H)|"
    "Input type .* and (weight|bias) type"
)


class ExplainedErrors(AbstractContextManager[Any]):
    """A context around FSDP2's forward and backward.

    Errors: DataError in place of torch's own for what a model does and FSDP2 does not allow.
    """

    def __init__(self, rank: int, cast_by: str):
        self._rank = rank
        self._cast_by = cast_by

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        frames = [frame.f_code for frame, _ in traceback.walk_tb(where)]
        if isinstance(error, DataError) and torch.autograd.grad.__code__ in frames:
            raise DataError(
                f"rank {self._rank}: the loss calls torch.autograd.grad, as meta-learning does, "
                "and FSDP2 only gives gradients to backward; use parallel.strategy=ddp"
            )
        if not isinstance(error, AssertionError | RuntimeError):
            return
        for words, meaning in ERRORS:
            if words in str(error):
                raise DataError(f"rank {self._rank}: {meaning}")
        if self._cast_by == "policy" and OF_DTYPES.search(str(error)):
            raise DataError(
                f"rank {self._rank}: the model computes with what FSDP2's policy casts and with "
                f"what it doesn't, such as buffers ({first_line(error)}); use "
                "precision.cast_by=autocast"
            )


def hook_units(
    model: nn.Module, blocks: Collection[nn.Module], world: World, skips_blocks: bool
) -> None:
    """Time the waits of an FSDP2 model, and check that all ranks use the same blocks.

    skips_blocks: the task's ranks_skip_blocks. Errors: ConfigError.
    """
    if skips_blocks:
        raise ConfigError(
            "the task's ranks_skip_blocks=True: under fsdp and hsdp all ranks gather and reduce "
            "the same blocks; use parallel.strategy=ddp"
        )
    time_gathers(model, world.clock)
    BlockCalls(model, blocks, world)
    if not hasattr(model, "set_reduce_scatter_unused_params"):  # before torch 2.13
        for group in fsdp_groups(model):
            group.post_backward = partial(_post_backward, group, group.post_backward)


def groups_of(unit: Any) -> list[Any]:
    """The parameter groups of an FSDP2 unit: one at most before torch 2.13; private names."""
    if not hasattr(unit, "_get_fsdp_state"):
        return []
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    if state._fsdp_param_group is None:
        return []
    return [state._fsdp_param_group]


def fsdp_groups(model: Any) -> list[Any]:
    """All parameter groups of an FSDP2 model; none if torch's private names have changed."""
    units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    return [group for unit in units for group in groups_of(unit)]


def time_gathers(model: Any, clock: PhaseClock) -> None:
    """Count what FSDP2's units wait as communication; on a CPU their collectives too."""
    names = list(WAITS)
    if clock.on_gpu:
        names.remove("unshard")  # only queues work there, which runs beside the computation
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
    """Refuses a step in which ranks might use different blocks of an FSDP2 model.

    A block's forward and backward call collectives. Autograd takes blocks in the reverse order of
    their calls: where it reaches one, it has passed those that were called later. Each rank checks
    itself, before it would reduce out of order.
    """

    def __init__(self, model: nn.Module, blocks: Collection[nn.Module], world: World):
        """blocks: the sharded ones."""
        self._names = {part: name for name, part in model.named_modules() if part in blocks}
        self._world = world
        self._rank = world.rank
        self._missing: set[nn.Module] = set()
        self._called: list[nn.Module] = []  # until their backward
        self._in_forward = False  # false while a block is recomputed
        self._checked_forwards = 0
        self._model = model
        for name, part in model.named_modules():
            if getattr(part, "_compiled_call_impl", None) is None:
                continue
            if any(isinstance(unit, FSDPModule) for unit in part.modules()):
                raise ConfigError(
                    f"{name or 'the model'} is compiled in place, by compile(), and FSDP2's hooks "
                    "would be compiled with it; leave that call out, and set compile.blocks=true"
                )
        # First, since FSDP2 replaces a parameter as it gathers it.
        model.register_forward_pre_hook(self._begin, prepend=True)
        # First, so that the hooks of an output's gradient come before FSDP2's.
        model.register_forward_hook(self._end, prepend=True)
        self._compared_forwards = 0
        self._comparing = []
        for block in self._names:
            block.register_forward_hook(self._note, prepend=True)
            self._comparing.append(block.register_forward_pre_hook(self._compare, prepend=True))

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        if self._checked_forwards < COMPARED_FORWARDS:
            self._refuse_replaced()
        self._missing = set(self._names)
        self._called = []
        self._in_forward = True

    def _compare(self, block: nn.Module, inputs: Any = None) -> None:
        """Compare which block the ranks call, before its shards are gathered; for some forwards."""
        if not self._in_forward or not torch.is_grad_enabled():
            return
        places = ["", *self._names.values()]
        place = places.index(self._names.get(block, ""))
        calls = [places[place] for place in self._world.gather(place)]
        for rank, call in enumerate(calls):
            if call != calls[0]:
                here, there = (
                    f"its block {name}" if name else "no further" for name in (calls[0], call)
                )
                raise DataError(
                    f"rank 0 calls {here} where rank {rank} calls {there}, and FSDP2 gathers a "
                    "block's shards from all ranks at each call: let all ranks call the same "
                    "blocks in the same order, equally often, or use parallel.strategy=ddp"
                )

    def _note(self, block: nn.Module, inputs: Any, output: Any) -> None:
        if self._in_forward:
            self._missing.discard(block)
            self._refuse_writes(block)
            if trained := trained_tensors(output):
                self._called.append(block)
            for tensor in trained:
                tensor.register_hook(partial(self._reach, block))

    def _end(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if self._comparing and torch.is_grad_enabled():
            self._compare(model)
            self._compared_forwards += 1
            if self._compared_forwards == COMPARED_FORWARDS:
                while self._comparing:
                    self._comparing.pop().remove()
        self._in_forward = False
        self._refuse_writes(model)
        self._checked_forwards += 1
        if self._missing:
            self._refuse_missing()
        trained = trained_tensors(output)
        if not trained and not self._called and torch.is_grad_enabled():
            self._refuse_output(output)
        for tensor in trained:
            tensor.register_hook(self._begin_backward)

    def _refuse_replaced(self) -> None:
        """FSDP2 puts its own parameters in place of those that a call has brought along."""
        for parameter in [p for group in fsdp_groups(self._model) for p in group.fsdp_params]:
            place = parameter._module_info
            now = getattr(place.module, place.param_name)
            gathered = getattr(parameter, "_unsharded_param", None)  # None before the first time
            if now is not parameter.sharded_param and now is not gathered:
                names = {part: name for name, part in self._model.named_modules()}
                raise DataError(
                    f"rank {self._rank}: the model is called with another "
                    f"{names[place.module]}.{place.param_name} than its "
                    "own, as by torch.func.functional_call in meta-learning, and FSDP2 "
                    "computes with its own; use parallel.strategy=ddp, and call the model that "
                    "loss_sum gets"
                )

    def _refuse_missing(self) -> None:
        name = next(name for block, name in self._names.items() if block in self._missing)
        raise DataError(
            f"rank {self._rank}: the model's forward did not call its block {name} "
            f"({len(self._missing)} of {len(self._names)} such), whose shards all ranks gather "
            "at once; give the task a blocks(model) and units(model) without it, so that it is "
            "part of a larger unit, or use parallel.strategy=ddp"
        )

    def _refuse_output(self, output: Any) -> None:
        """A backward of the root alone begins at the output's tensors."""
        raise DataError(
            f"rank {self._rank}: the model's output, of type {type(output).__name__}, has no "
            "tensor that FSDP2 finds and that is trained, so gradients would not be reduced; "
            "return a tensor, tuple, dict or dataclass, or use parallel.strategy=ddp"
        )

    def _refuse_writes(self, unit: nn.Module) -> None:
        """FSDP2 drops a gathered parameter, and with it what the forward has written to it."""
        if self._checked_forwards < CHECKED_FORWARDS:
            for parameter in [p for group in groups_of(unit) for p in group.fsdp_params]:
                if is_written(parameter.unsharded_param, parameter.sharded_param):
                    raise DataError(
                        f"rank {self._rank}: the model's forward changes its parameter "
                        f"{parameter._param_fqn}, which is lost under FSDP2, since only a gathered "
                        "copy is changed; change it in on_step(run, report), or use "
                        "parallel.strategy=ddp"
                    )

    def _begin_backward(self, gradient: Tensor) -> None:
        call_after_backward(self._reach)

    def _reach(self, block: nn.Module | None = None, gradient: Tensor | None = None) -> None:
        """Autograd reaches a block, or its end: it has passed the blocks that were called later."""
        if not self._called or block not in (None, *self._called):
            return
        last = self._called.pop()
        if last is not block:
            self._refuse_unused(last)

    def _refuse_unused(self, block: nn.Module) -> None:
        raise DataError(
            f"rank {self._rank}: the loss does not depend on the block {self._names[block]}, "
            "whose gradients all ranks reduce at once; use parallel.strategy=ddp"
        )


@torch.no_grad()
def is_written(whole: Tensor, sharded: Any) -> bool:
    """Whether a gathered parameter has other values than the shard that this rank gave."""
    shard = sharded.to_local()
    if hasattr(shard, "fsdp_pre_all_gather"):  # gathered in other values, such as float8's
        return False
    mesh = sharded.device_mesh
    rows = math.ceil(len(whole) / mesh.size(-1))
    begin = rows * mesh.get_local_rank(mesh_dim=-1)
    mine = whole[begin : begin + len(shard)]
    given = shard.to(whole.device, whole.dtype)
    return not torch.allclose(mine, given, rtol=0, atol=0, equal_nan=True)


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
