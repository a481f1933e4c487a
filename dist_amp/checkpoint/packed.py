"""States that are saved as bytes: the task's, and those of observers that hold more than tensors.

Each rank saves its own, as NAME.RANK. At another world size, rank r loads the state of rank r
modulo the saved world size. A state that torch.load(weights_only=True) can't read is not saved.
"""

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dist_amp.checkpoint.format import State
from dist_amp.errors import DataError, in_one_line
from dist_amp.step import Run
from dist_amp.task import Task, call_task
from dist_amp.telemetry.observer import Observer, defines

OBSERVER = "observer "  # followed by the class: the name of an observer's state


class TaskState(Observer):
    """Saves what a task's state_dict() returns."""

    name = "task"

    def __init__(self, task: Task):
        self._task: Any = task

    def state_dict(self) -> Any:
        return call_task(DataError, "state_dict()", self._task.state_dict)

    def load_state_dict(self, state: Any) -> None:
        call_task(DataError, "load_state_dict(state)", self._task.load_state_dict, state)


def packed_observers(run: Run) -> dict[str, Any]:
    """{name: observer whose state is packed}; of several observers of a class, only the first."""
    observers: dict[str, Any] = {}
    for observer in run.observers:
        if defines(observer, "state_dict") and not hasattr(observer, "section"):
            name = getattr(observer, "name", OBSERVER + type(observer).__name__)
            observers.setdefault(name, observer)
    return observers


def packed_states(run: Run) -> State:
    """{name: {this rank: [bytes] uint8}}. Raises DataError as for `pack`."""
    rank = str(run.world.rank)
    return {
        name: {rank: pack(run.observers.call(observer, "state_dict"), name)}
        for name, observer in packed_observers(run).items()
    }


def pack(state: Any, name: str) -> Tensor:
    """A state as [bytes] uint8. Raises DataError for a state that `unpack` can't read."""
    file = io.BytesIO()
    torch.save(state, file)
    content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    unpack(content, name)
    return content


def unpack(content: Tensor, name: str) -> Any:
    """The state that was packed; nothing in it is executed. Raises DataError."""
    try:
        return torch.load(io.BytesIO(content.numpy().tobytes()), "cpu", weights_only=True)
    except Exception as error:
        raise DataError(
            f"the {name}'s state_dict() can't be read back: {in_one_line(error)}; return only "
            "tensors, numbers, strings, and lists and dicts of these"
        ) from error


def expected_states(run: Run, metadata: Mapping[str, Any], saved_ranks: int) -> State:
    """{name: {rank: empty [bytes] uint8}} for the states that this rank loads."""
    states: State = {}
    for name in packed_observers(run):
        entries = [metadata.get(f"{name}.{rank}") for rank in range(saved_ranks)]
        # An observer that failed on some ranks has no state there: no rank loads any.
        if all(isinstance(entry, TensorStorageMetadata) for entry in entries):
            rank = run.world.rank % saved_ranks
            entry: Any = entries[rank]
            states[name] = {str(rank): torch.empty(entry.size, dtype=torch.uint8)}
    return states


def load_packed(run: Run, state: State, saved_ranks: int) -> None:
    """Give each observer its state, after it was read into `expected_states`."""
    for name, observer in packed_observers(run).items():
        if name not in state:
            run.world.warn(
                f"the checkpoint has no state of the {name}, which starts from its initial state"
            )
            continue
        if saved_ranks != run.world.world_size:
            run.world.warn(
                f"the checkpoint has a state of the {name} for each of {saved_ranks} ranks: rank r "
                f"of {run.world.world_size} loads that of rank r mod {saved_ranks}"
            )
        (content,) = state[name].values()
        if (loaded := unpack(content, name)) is not None:  # None: there was nothing to save
            run.observers.call(observer, "load_state_dict", loaded)
