"""Calls of a task that leave the run as it was: a copy of the task, and no writes to parameters."""

import copy
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dist_amp.data import Batches
from dist_amp.run import Run
from dist_amp.world import local


def copy_of_task(run: Run) -> tuple[Any, Batches]:
    """Copies of the task, and of the data that it collates. Errors: those of copy.deepcopy.

    The model and the dataset are shared: they may be large. Call the task inside `NoWrites`.
    """
    module = run.parallel.module
    dataset = run.data.fetch.dataset
    shared = [run.model, *module.modules(), *module.parameters(), *module.buffers()]
    if dataset is not run.task:
        shared += [dataset, *getattr(dataset, "__dict__", {}).values()]
    memo = {id(part): part for part in shared if part is not run.task}
    data = copy.copy(run.data)
    task, data.fetch = copy.deepcopy((run.task, run.data.fetch), memo)
    return task, data


class NoWrites(TorchDispatchMode):
    """Refuses operations that write to one of the tensors."""

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[Tensor]):
        super().__init__()
        self._storages = {storage_of(tensor.detach()) for tensor in tensors}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        schema = getattr(function, "_schema", None)
        for argument, value in zip(getattr(schema, "arguments", ()), args, strict=False):
            for tensor in tree_leaves(value) if argument.is_write else ():
                if isinstance(tensor, Tensor) and storage_of(tensor) in self._storages:
                    raise RuntimeError(f"{function} would change a parameter")
        return function(*args, **(kwargs or {}))


def storage_of(tensor: Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()
