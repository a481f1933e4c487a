"""Calls of a task that leave the run as it was: a copy of the task, and modules put back."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dist_amp.run import Run
from dist_amp.world import local

OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@contextmanager
def without_effects(run: Run) -> Iterator[Any]:
    """A copy of the task to call; inside, what modules keep besides tensors are copies too.

    Use it inside `no_side_effects`. A call that writes to a parameter, on any rank, fails.
    Errors: those of copy.deepcopy.
    """
    module = run.parallel.module
    dataset = run.data.fetch.dataset
    # These are not copied, nor what the dataset holds: it may be large, and is only read.
    shared = [run.model, *module.modules(), *module.parameters(), *module.buffers()]
    if dataset is not run.task:
        shared += [dataset, *getattr(dataset, "__dict__", {}).values()]
    memo = {id(one): one for one in shared if one is not run.task}
    parts = [vars(part) for part in module.modules()]
    before = [dict(part) for part in parts]
    kept = [
        {k: v for k, v in part.items() if k not in OF_EVERY_MODULE and not k.startswith("__")}
        for part in before
    ]
    task, fetch, copies = copy.deepcopy((run.task, run.data.fetch, kept), memo)
    run.data.fetch, fetch = fetch, run.data.fetch
    try:
        for part, copied in zip(parts, copies, strict=True):
            part.update(copied)
        with NoWrites(module.parameters()):
            yield task
    finally:
        run.data.fetch = fetch
        for part, values in zip(parts, before, strict=True):
            for name in part.keys() - values.keys():
                del part[name]
            part.update(values)


class NoWrites(TorchDispatchMode):
    """Refuses operations that write to one of the tensors."""

    supports_higher_order_operators = True

    def __init__(self, kept: Iterable[Tensor]):
        super().__init__()
        self._storages = {self._starts(one.detach()) for one in kept}

    def _starts(self, tensor: Tensor) -> int:
        return local(tensor).untyped_storage().data_ptr()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        schema = getattr(function, "_schema", None)
        for argument, value in zip(getattr(schema, "arguments", ()), args, strict=False):
            written = tree_leaves(value) if argument.is_write else []
            for one in written:
                if isinstance(one, Tensor) and self._starts(one) in self._storages:
                    raise RuntimeError(f"{function} would change a parameter")
        return function(*args, **(kwargs or {}))
