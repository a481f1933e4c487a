"""Warns of state of the task or its optimizer that no checkpoint contains.

The attributes of the optimizer, and of a task without state_dict(), are compared between the first
two saves of a run. One that has changed would go back to its initial value in a resumed run.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor

from dist_amp.step import Run
from dist_amp.task import attributes_of
from dist_amp.world import local

FIXES = {
    "the task": "give the task state_dict() and load_state_dict(state), or list it in the task's "
    "`unsaved` if each step sets it anew",
    "the optimizer": "keep it in optimizer.state",
}

SAMPLED_ELEMENTS = 2**16  # compared per tensor, evenly spread over it


class Unsaved:
    """The attributes of the task and the optimizer at the first save."""

    def __init__(self, run: Run):
        self._run = run
        self._saves = 0
        self._first: dict[str, dict[str, list[str]]] = {}

    def compare(self) -> None:
        """Call it at each save; at the second one it warns of what has changed since the first."""
        self._saves += 1
        if self._saves > 2:
            return
        run = self._run
        optimizer_leaves = attributes_of(run.optimizer, run.parallel.module)
        for group in run.optimizer.param_groups:  # a resumed run takes these from the config
            for key in group.keys() - {"params", "lr"}:
                optimizer_leaves[f"{key} of {group['name']}"] = [group[key]]
        attributes = {"the optimizer": optimizer_leaves}
        if not hasattr(run.task, "state_dict"):
            attributes["the task"] = attributes_of(run.task, run.parallel.module)
        unsaved = getattr(run.task, "unsaved", ())
        for owner, leaves in attributes.items():
            now = {name: [*map(digest, leaves[name])] for name in leaves if name not in unsaved}
            before = self._first.setdefault(owner, now)
            if changed := [name for name in now if now[name] != before.get(name)]:
                run.world.warn(
                    f"{owner} keeps {', '.join(changed)}, which changed and is in no checkpoint: a "
                    f"resumed run would start with the initial value; {FIXES[owner]}, unless it is "
                    "computed from what is saved"
                )


def digest(leaf: Any) -> str:
    """A text that differs if the leaf does; of a large tensor only some elements are compared."""
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
        return repr(leaf)
    flat = local(leaf.detach()).reshape(-1)
    sampled = flat[:: max(1, len(flat) // SAMPLED_ELEMENTS)].cpu().contiguous()
    content = hashlib.sha256(sampled.view(torch.uint8).numpy().tobytes()).hexdigest()
    return f"{tuple(leaf.shape)} {content}"
