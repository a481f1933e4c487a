"""States that are packed as bytes: a task's, and those of observers that are not tensors alone.

Each rank saves its own as NAME.RANK; at another world size rank r takes that of rank r modulo the
saved ones. What torch.load refuses with weights_only is refused when it is saved.
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

OBSERVER = "observer "  # and the class: the name of an observer's state


class TaskState(Observer):
    """Saves what a task's state_dict() returns."""

    name = "task"

    def __init__(self, task: Task):
        self._task: Any = task

    def state_dict(self) -> Any:
        return call_task(DataError, "state_dict()", self._task.state_dict)

    def load_state_dict(self, state: Any) -> None:
        call_task(DataError, "load_state_dict(state)", self._task.load_state_dict, state)


def packing(run: Run) -> dict[str, Any]:
    """{name: observer} of those whose state is packed; of two of one class the first."""
    observers: dict[str, Any] = {}
    for observer in run.observers:
        if defines(observer, "state_dict") and not hasattr(observer, "section"):
            name = getattr(observer, "name", OBSERVER + type(observer).__name__)
            observers.setdefault(name, observer)
    return observers


def packed_states(run: Run) -> State:
    """{name: {rank: [bytes] uint8}} of this rank. Errors: DataError as for `packed`."""
    rank = str(run.world.rank)
    return {
        name: {rank: packed(run.observers.call(observer, "state_dict"), name)}
        for name, observer in packing(run).items()
    }


def packed(state: Any, name: str) -> Tensor:
    """A state as [bytes] uint8. Errors: DataError for what a load would not accept."""
    file = io.BytesIO()
    torch.save(state, file)
    content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    unpacked(content, name)
    return content


def unpacked(content: Tensor, name: str) -> Any:
    """The state that was packed; nothing in it is executed."""
    try:
        return torch.load(io.BytesIO(content.numpy().tobytes()), "cpu", weights_only=True)
    except Exception as error:
        raise DataError(
            f"the {name}'s state_dict() can't be read back: {in_one_line(error)}; let it hold "
            "tensors, numbers, texts, and lists and dicts of these"
        ) from error


def expected_states(run: Run, metadata: Mapping[str, Any], saved_ranks: int) -> State:
    """{name: {rank: room for the state}} of what the checkpoint has for this rank."""
    states: State = {}
    for name in packing(run):
        entries = [metadata.get(f"{name}.{rank}") for rank in range(saved_ranks)]
        # An observer that failed on some ranks is missing there: it is left out on all.
        if all(isinstance(entry, TensorStorageMetadata) for entry in entries):
            rank = run.world.rank % saved_ranks
            room: Any = entries[rank]
            states[name] = {str(rank): torch.empty(room.size, dtype=torch.uint8)}
    return states


def load_packed(run: Run, state: State, saved_ranks: int) -> None:
    """Give each observer its part of what was read into `expected_states`."""
    for name, observer in packing(run).items():
        if name not in state:
            run.world.warn(
                f"the checkpoint has no state of the {name}; it starts with its first values"
            )
            continue
        if saved_ranks != run.world.world_size:
            run.world.warn(
                f"the checkpoint has a state of the {name} for each of {saved_ranks} ranks: rank r "
                f"of {run.world.world_size} takes that of rank r mod {saved_ranks}"
            )
        (content,) = state[name].values()
        if (kept := unpacked(content, name)) is not None:  # else an observer could not tell
            run.observers.call(observer, "load_state_dict", kept)
