"""Replay of skipped steps: report the first module with an inf or nan, and keep the micro-batch that caused it.

At a log step after a skip, all ranks fetch that step's micro-batches again and run them with hooks (nonfinite.py) at a
loss scale of 1: an overflow caused by fp16's scale alone is part of the scaler's normal cycle and is not reported. The
micro-batch is kept in RUN/nonfinite for `python -m dist_amp.verify --replay FILE`.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.utils._pytree import tree_map_only

from dist_amp.checkpoint.state import no_side_effects
from dist_amp.data import Padding
from dist_amp.diagnostics.nonfinite import NonFinite, find_nonfinite
from dist_amp.run import Run
from dist_amp.runtime.nested import plain_mappings
from dist_amp.runtime.random_state import random_state, set_random_state
from dist_amp.step import total_weight
from dist_amp.telemetry.async_copy import StepReport
from dist_amp.telemetry.log_row import LogRow
from dist_amp.telemetry.observer import Observer
from dist_amp.telemetry.writers import plain_json

MAX_FILES = 8  # kept in a run's folder

MAX_WEIGHT_BYTES = 2**30  # above it a file is kept without the weights

MAX_REPLAYS = 3  # skipped steps of one interval that are replayed while only fp16's scale explains them


@dataclass(frozen=True)
class KeptMicroBatch:
    """A micro-batch of this rank that is not finite when replayed, and what replaying it again takes."""

    found: NonFinite
    batch: Any
    share: float
    random: dict[str, Tensor]


class NonfiniteReplay(Observer):
    """Replays on all ranks, and reads the device, only in intervals with a skip; other steps are noted on the host.

    With debug.nonfinite=step, it reads every step's outcome and replays with the parameters exactly as they were.
    """

    def __init__(self, run: Run):
        self.run = run
        self.when = run.config.debug.nonfinite
        self.found: list[NonFinite] = []
        self._steps: list[tuple[int, int, Tensor]] = []  # not yet logged: step, data position before it, applied
        self._position = run.data.position
        self._skipped = int(run.schedule.skipped_steps)
        self._repetitions: Counter[tuple[str, str, int]] = Counter()
        self._folder = run.folder / "nonfinite"
        # Stepping a run in a script or a notebook writes no files: it has no folder.
        self._has_folder = run.world.from_main(str(run.folder.is_dir())) == "True"
        self._files = int(run.world.from_main(str(len(list(self._folder.glob("*.pt"))))))
        self._random = random_state(run.world.device) if self.when == "step" else None

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        if self.when == "log":
            self._steps.append((self.run.step, self._position, report.applied))
        elif self.when == "step":
            if not report.applied.item():
                self._replay(self.run.step, self._position)
            self._random = random_state(self.run.world.device)
        self._position = self.run.data.position

    def on_log(self, row: LogRow) -> None:
        """If steps were skipped in this interval, replay the first that is not finite at a loss scale of 1."""
        steps = [noted for noted in self._steps if noted[0] <= row.step]
        self._steps = self._steps[len(steps) :]
        before, self._skipped = self._skipped, int(row["skipped_steps"])
        if self._skipped == before or not steps:
            return
        applied = torch.stack([applied for _, _, applied in steps]).tolist()
        skipped = [(step, position) for (step, position, _), good in zip(steps, applied, strict=True) if not good]
        for step, position in skipped[: MAX_REPLAYS if self.run.scaler.scales else 1]:
            if self._replay(step, position):
                return

    def where(self, row: LogRow) -> str:
        """Where the uninterrupted skips up to this log step began, to end an error with; empty if it is not known."""
        since = row.step - int(row["skips_in_a_row"]) + 1
        return next((f"; first: step {one.step}, {one.where}" for one in self.found if one.step >= since), "")

    def _replay(self, step: int, position: int) -> bool:
        """Replay a step on all ranks and report its first inf or nan; return whether there was one."""
        world = self.run.world
        with self.run.world.clock.hold("diagnostics"):
            with no_side_effects(self.run):
                kept, failure = self._replay_micro_batches(step, position)
            results = world.gather_texts(json.dumps(asdict(kept.found)) if kept else failure)
            found = [NonFinite.from_json(text) for text in results if text.startswith("{")]
            if not found:
                self._warn_nothing_found(step, [f"rank {rank}: {why}" for rank, why in enumerate(results) if why])
                return False
            # Only the rank that holds a sharded parameter's bad part sees it; the others blame the module's forward.
            first = min(found, key=lambda one: (one.phase != "parameters", one.rank))
            self._report(replace(first, other_ranks=[one.rank for one in found if one is not first]), kept)
        return True

    def _replay_micro_batches(self, step: int, position: int) -> tuple[KeptMicroBatch | None, str]:
        """(this rank's first non-finite micro-batch, or why its replay failed).

        Every rank runs all of its micro-batches: sharded models need all ranks in each forward.
        """
        run, device = self.run, self.run.world.device
        if self._random is not None:
            set_random_state(self._random, device)
        fetched = run.data.at(position)
        if self._random is not None and run.config.data.workers:  # workers drew their random numbers elsewhere
            set_random_state(self._random, device)
        weight = run.world.sum(total_weight(run.task, [batch for batch, _ in fetched], device))
        share = run.world.world_size / weight
        kept, failure = None, ""
        for number, (batch, samples) in enumerate(fetched):
            random = random_state(device)
            try:
                with run.parallel.gradient_sync(True):
                    found = find_nonfinite(run.task, run.parallel.module, batch, share, run.precision)
            except Exception as error:
                if run.parallel.sharded:
                    raise  # the other ranks are in a collective of this forward
                found, failure = None, f"{type(error).__name__}: {error}"
            run.optimizer.zero_grad(set_to_none=True)
            if found is not None and kept is None:
                found = replace(found, step=step, rank=run.world.rank, micro_batch=number, samples=list(samples))
                kept = KeptMicroBatch(found, batch, share.item(), random)
        return kept, failure

    def _warn_nothing_found(self, step: int, failures: list[str]) -> None:
        if failures:
            self.run.world.warn(f"step {step} was skipped, and replaying it failed on {'; '.join(failures)}")
        elif not self.run.scaler.scales:  # in fp16 the scale was too high, which is its normal cycle
            exact = "" if self.when == "step" else "; debug.nonfinite=step replays with the parameters as they were"
            self.run.world.warn(
                f"step {step} was skipped, but its replay is finite: the parameters have changed since, the cause was "
                f"a random augmentation or dropout, or only the gradients' norm overflowed{exact}"
            )

    def _report(self, found: NonFinite, kept: KeptMicroBatch | None) -> None:
        """To reports.jsonl each time, to the console once per module, phase and rank. Every rank calls it."""
        world, key = self.run.world, (found.module, found.phase, found.rank)
        self.found.append(found)
        self._repetitions[key] += 1
        if world.is_main and self._has_folder:
            line = {**asdict(found), "met": self._repetitions[key]}
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / "reports.jsonl").open("a") as file:
                file.write(json.dumps(plain_json(line)) + "\n")
        if self._repetitions[key] > 1:
            return
        file_note = f"; {MAX_FILES} micro-batches are kept already" if self._has_folder else ""
        if self._has_folder and self._files < MAX_FILES:
            self._files += 1
            file_note = "; " + world.gather_texts(self._keep(found, kept))[found.rank]
        world.warn(f"step {found.step} was skipped: on {found}{file_note}")

    def _keep(self, found: NonFinite, kept: KeptMicroBatch | None) -> str:
        """Write the file, on the rank of the micro-batch; return where it is. Every rank calls it."""
        weights = self._weights(found.rank)
        if kept is None or found.rank != self.run.world.rank:
            return ""
        path = self._folder / f"step_{found.step:08d}_rank{found.rank:05d}.pt"
        padding = isinstance(kept.batch, Padding)
        content = {
            "dist_amp": "nonfinite",
            "report": json.dumps(asdict(found)),
            "batch": _on_host(kept.batch.batch if padding else kept.batch),
            "padding": padding,
            "share": kept.share,
            "scale": self.run.scaler.scale_tensor.item(),
            "random": kept.random,
            "config": self.run.config_text,
            "weights": weights,
        }
        unfinished = path.with_suffix(".writing")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(content, unfinished)
            os.replace(unfinished, path)
        except Exception as error:  # a full disk, or a batch that can't be pickled, must not end the run
            unfinished.unlink(missing_ok=True)
            return f"it could not be kept: {error}"
        return f"kept in {path}; python -m dist_amp.verify --replay {path}"

    def _weights(self, rank: int) -> dict[str, Any] | None:
        """The full model state in the host memory of `rank`, gathered tensor by tensor; None if it is too large."""
        state: dict[str, Any] = get_model_state_dict(self.run.model)
        sizes = [value.numel() * value.element_size() for value in state.values() if isinstance(value, Tensor)]
        if sum(sizes) > MAX_WEIGHT_BYTES:
            return None
        gathered: dict[str, Any] = {}
        for name, value in state.items():
            if hasattr(value, "full_tensor"):
                value = value.to(self.run.world.device).full_tensor()
            if rank == self.run.world.rank:
                gathered[name] = _on_host(value)
        return gathered


def _on_host(values: Any) -> Any:
    """Copies in host memory; without a copy, a view would be saved with all of its storage."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), plain_mappings(values))
