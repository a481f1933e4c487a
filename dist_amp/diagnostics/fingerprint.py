"""Hashes of each module's parameters and gradients, every metrics.fingerprint steps.

The next log step writes {"fingerprints": {step: {"parameters": {module: hash}, "gradients": ...}}}
to metrics.jsonl, both from before the update. Each rank hashes its own shards. The sum of a
tensor's shard hashes is its whole hash, so hashes don't depend on world size or strategy.

Docs: docs/debugging.md
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from dist_amp.diagnostics.trace import clean_name, hash_tensor
from dist_amp.run import Run
from dist_amp.telemetry.observer import Observer
from dist_amp.telemetry.step_report import LogRow, StepReport
from dist_amp.world import local

KINDS = ("parameters", "gradients")


class Fingerprint(Observer):
    """Hashes parameters, and gradients if the optimizer is called (not in all skipped steps)."""

    def __init__(self, run: Run):
        self._run = run
        self._every: Any = run.config.metrics.fingerprint  # not "off"
        names, parameters = zip(*run.parallel.module.named_parameters(), strict=True)
        # A parameter of the model itself, outside of submodules, is listed under its own name.
        modules = [clean_name(name).rpartition(".")[0] or name for name in names]
        self._names = list(dict.fromkeys(modules))
        self._module_of = [self._names.index(module) for module in modules]  # by parameter
        shards = run.world.world_size // run.parallel.replicas
        # What this rank hashes: (parameter, index of its shard's first element in the parameter).
        self._parts: list[tuple[nn.Parameter, int]] = []
        if run.world.rank < shards:  # the other ranks hold replicas of these shards
            for parameter in parameters:
                first = 0
                if shards > 1:  # FSDP2 gives each rank ceil(rows / shards) rows, the last fewer
                    rows = -(-parameter.shape[0] // shards)
                    first = run.world.rank * rows * parameter[:1].numel()
                self._parts.append((parameter, first))
        self._hashes: list[Tensor] = []  # of this step, one tensor per kind
        self._hook = ExitStack()  # on the optimizer, during a step that is hashed
        self._copies: dict[int, Tensor] = {}  # {step: hashes}, being copied to the host

    def before_step(self, micro_batches: Sequence[Any]) -> None:
        step = self._run.step + 1
        if step == 1 or step % self._every == 0:
            self._hash("parameters")
            hook = self._run.optimizer.register_step_pre_hook(lambda *_: self._hash("gradients"))
            self._hook.enter_context(hook)

    def _hash(self, kind: str) -> None:
        """Append the hashes of this rank's shards, summed per module: [modules] int64."""
        world = self._run.world
        hashes = torch.zeros(len(self._names), dtype=torch.int64, device=world.device)
        with world.clock.hold("diagnostics"):
            for number, (parameter, first) in enumerate(self._parts):
                tensor = parameter.grad if kind == "gradients" else parameter
                if tensor is not None:
                    # Each has its own odd factor, so that swapping two changes the sum.
                    value = hash_tensor(local(tensor), first) * (2 * number + 1)
                    hashes[self._module_of[number]] += value.to(world.device)
        self._hashes.append(hashes)

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        if not self._hashes:
            return
        self._hook.close()
        with self._run.world.clock.hold("diagnostics"):
            hashes = self._run.world.sum(torch.stack(self._hashes))
            # Queued before the log step's own copy, which is waited for, so `tags` can read it.
            self._copies[self._run.step] = hashes.to("cpu", non_blocking=True)
        self._hashes = []

    def close(self, error: BaseException | None = None) -> None:
        self._hook.close()

    def tags(self, row: LogRow) -> dict[str, Any]:
        written = {}
        for step in [step for step in self._copies if step <= row.step]:
            # As text, because JSON readers may round integers above 2^53.
            rows = self._copies.pop(step).tolist()
            hashes = [[f"{value % 2**64:016x}" for value in row] for row in rows]
            written[str(step)] = {
                kind: dict(zip(self._names, values, strict=True))
                for kind, values in zip(KINDS, hashes, strict=False)
            }
        return {"fingerprints": written} if written and self._run.world.is_main else {}
