"""What a task, or its optimizer, keeps outside the model: saved where it says how, or warned of.

By state_dict() and load_state_dict(state), each rank's. Other attributes are lost on a resume.
"""

import hashlib
import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dist_amp.errors import CheckpointRejected, DataError, in_one_line
from dist_amp.step import Run
from dist_amp.task import call_task, kept_by
from dist_amp.world import World, local

FIXES = {
    "the task": "give the task state_dict() and load_state_dict(state), or name it in the task's "
    "`unsaved` if each step sets it anew",
    "the optimizer": "keep it in optimizer.state",
}

SAMPLED_ELEMENTS = 2**16  # of a tensor, spread over it, that are compared


# ---- a task that says what to save ----


def packed_state(task: Any) -> Tensor:
    """task.state_dict() as [bytes] uint8. Errors: DataError for what a load would not accept."""
    file = io.BytesIO()
    torch.save(call_task(DataError, "state_dict()", task.state_dict), file)
    content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    unpacked(content)
    return content


def unpacked(content: Tensor) -> Any:
    """The state that `packed_state` packed; nothing in it is executed."""
    try:
        return torch.load(io.BytesIO(content.numpy().tobytes()), "cpu", weights_only=True)
    except Exception as error:
        raise DataError(
            f"the task's state_dict() can't be read back: {in_one_line(error)}; let it hold "
            "tensors, numbers, texts, and lists and dicts of these"
        ) from error


def expected_state(metadata: Mapping[str, Any], rank: int) -> dict[str, Tensor]:
    """{name: room for the state} that this rank takes, modulo the saved world size; or {}."""
    saved = [name for name in metadata if name.startswith("task.")]
    if not saved:
        return {}
    name = str(rank % len(saved))
    entry = metadata.get(f"task.{name}")
    if not isinstance(entry, TensorStorageMetadata):
        raise CheckpointRejected(f".metadata has no task.{name} that is a tensor")
    return {name: torch.empty(entry.size, dtype=torch.uint8)}


def load_state(task: Any, states: Mapping[str, Tensor], saved_ranks: int, world: World) -> None:
    """Give the task what `expected_state` names, once it is read."""
    if not states:
        world.warn("the checkpoint has no state of the task; it starts with its first values")
        return
    if saved_ranks != world.world_size:
        world.warn(
            f"the checkpoint has a state of the task for each of {saved_ranks} ranks: rank r of "
            f"{world.world_size} takes that of rank r mod {saved_ranks}"
        )
    (content,) = states.values()
    call_task(DataError, "load_state_dict(state)", task.load_state_dict, unpacked(content))


# ---- what changes unsaved ----


class Unsaved:
    """Names what the task, or its optimizer, keeps where no checkpoint looks, once.

    It compares what they keep at the first two saves.
    """

    def __init__(self, run: Run):
        self._run = run
        self._saves = 0
        self._first: dict[str, dict[str, list[str]]] = {}

    def compare(self) -> None:
        """Call it at each save; at the second it warns of what has changed since the first."""
        self._saves += 1
        if self._saves > 2:
            return
        run = self._run
        owners: dict[str, Any] = {"the optimizer": run.optimizer}
        if not hasattr(run.task, "state_dict"):
            owners["the task"] = run.task
        unsaved = getattr(run.task, "unsaved", ())
        for owner, instance in owners.items():
            kept = kept_by(instance, run.parallel.module)
            now = {name: [*map(digest, kept[name])] for name in kept if name not in unsaved}
            before = self._first.setdefault(owner, now)
            if changed := [name for name in now if now[name] != before.get(name)]:
                run.world.warn(
                    f"{owner} keeps {', '.join(changed)}, which changed and is in no checkpoint: a "
                    f"resumed run would begin with the first value; {FIXES[owner]}, unless it is "
                    "made anew from what is saved"
                )


def digest(leaf: Any) -> str:
    """Tells whether a leaf has changed; of a large tensor some elements count."""
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
        return repr(leaf)
    flat = local(leaf.detach()).reshape(-1)
    sampled = flat[:: max(1, len(flat) // SAMPLED_ELEMENTS)].cpu().contiguous()
    content = hashlib.sha256(sampled.view(torch.uint8).numpy().tobytes()).hexdigest()
    return f"{tuple(leaf.shape)} {content}"
