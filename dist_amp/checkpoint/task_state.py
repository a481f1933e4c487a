"""Warns of what a task without state_dict(), or its optimizer, keeps where no checkpoint looks.

What they keep outside the model is compared at the first two saves: what has changed in between
would begin again with its first value in a resumed run.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor

from dist_amp.step import Run
from dist_amp.task import attributes_of
from dist_amp.world import local

FIXES = {
    "the task": "give the task state_dict() and load_state_dict(state), or name it in the task's "
    "`unsaved` if each step sets it anew",
    "the optimizer": "keep it in optimizer.state",
}

SAMPLED_ELEMENTS = 2**16  # of a tensor, spread over it, that are compared


class Unsaved:
    """Compares what the task and the optimizer keep at the first two saves."""

    def __init__(self, run: Run):
        self._run = run
        self._saves = 0
        self._first: dict[str, dict[str, list[str]]] = {}

    def compare(self) -> None:
        """Called at each save; at the second it warns of what has changed since the first."""
        self._saves += 1
        if self._saves > 2:
            return
        run = self._run
        of_optimizer = attributes_of(run.optimizer, run.parallel.module)
        for group in run.optimizer.param_groups:  # a resumed run has the config's options
            for key in group.keys() - {"params", "lr"}:
                of_optimizer[f"{key} of {group['name']}"] = [group[key]]
        kept = {"the optimizer": of_optimizer}
        if not hasattr(run.task, "state_dict"):
            kept["the task"] = attributes_of(run.task, run.parallel.module)
        unsaved = getattr(run.task, "unsaved", ())
        for owner, leaves in kept.items():
            now = {name: [*map(digest, leaves[name])] for name in leaves if name not in unsaved}
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
