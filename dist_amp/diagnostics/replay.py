"""NonfiniteReplay of skipped steps: the micro-batch that was not finite is replayed, named and kept.

At a log step after a skip all ranks fetch that step's micro-batches again and run them with hooks (nonfinite.py), at a
loss scale of 1: what only overflows under fp16's scale is the scaler's normal cycle, and no fault. The micro-batch is
kept in RUN/nonfinite for `python -m dist_amp.verify --replay FILE`. To delete: this file, debug.nonfinite and its lines
in train.py.
"""

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.utils._pytree import tree_map_only

from dist_amp.checkpoint.state import as_it_was
from dist_amp.data import Padding
from dist_amp.diagnostics.nonfinite import Fault, examine
from dist_amp.run import Run
from dist_amp.runtime.random_state import random_state, set_random_state
from dist_amp.step import total_weight
from dist_amp.telemetry.async_copy import StepReport
from dist_amp.telemetry.metrics import LogRow
from dist_amp.telemetry.writers import plain_json

MAX_FILES = 8  # kept in a run's folder

MAX_WEIGHT_BYTES = 2**30  # above it a file is kept without the weights

MAX_REPLAYS = 3  # skipped steps of one interval that are looked at, while fp16's scale alone explains them


@dataclass(frozen=True)
class Offender:
    """A micro-batch of this rank in which a fault was met again, and what replaying it takes."""

    fault: Fault
    batch: Any
    share: float
    random: dict[str, Tensor]


class NonfiniteReplay:
    """Stands beside the loop: `after_step` with every step's report, `look` at every log step.

    Notes of each step only what is on the host; a read, and a replay on all ranks, cost only intervals with a skip.
    """

    def __init__(self, run: Run):
        self.run = run
        self.when = run.config.debug.nonfinite
        self.faults: list[Fault] = []
        self._notes: list[tuple[int, int, Tensor]] = []  # step, samples consumed before it, applied
        self._position = run.data.position
        self._skipped = int(run.schedule.skipped_steps)
        self._met: Counter[tuple[str, str, int]] = Counter()
        self._folder = run.folder / "nonfinite"
        # A run that is stepped by hand has no folder, and gets none.
        self._writes = run.world.from_main(str(run.folder.is_dir())) == "True"
        self._files = int(run.world.from_main(str(len(list(self._folder.glob("*.pt"))))))
        self._random = random_state(run.world.device) if self.when == "step" else None

    def after_step(self, report: StepReport) -> None:
        """Note the step; with debug.nonfinite=step, read whether it was skipped, and look into it at once."""
        if self.when == "log":
            self._notes.append((self.run.step, self._position, report.applied))
        elif self.when == "step":
            if not report.applied.item():
                self._replay(self.run.step, self._position)
            self._random = random_state(self.run.world.device)
        self._position = self.run.data.position

    def look(self, row: LogRow) -> None:
        """At a log step: if steps were skipped since the last one, replay the first. Every rank calls it."""
        notes = [note for note in self._notes if note[0] <= row.step]
        self._notes = self._notes[len(notes) :]
        more = row["skipped_steps"] > self._skipped
        self._skipped = int(row["skipped_steps"])
        if not more or not notes:
            return
        applied = torch.stack([one for _, _, one in notes]).tolist()
        skipped = [(step, position) for (step, position, _), good in zip(notes, applied, strict=True) if not good]
        for step, position in skipped[: MAX_REPLAYS if self.run.scaler.scales else 1]:
            if self._replay(step, position):
                return

    def where(self, row: LogRow) -> str:
        """Where the skips that go on at this log step began, for the end of an error; empty where it is not known."""
        since = row.step - int(row["skips_in_a_row"]) + 1
        return next((f"; first: step {f.step}, {f.where}" for f in self.faults if f.step >= since), "")

    def _replay(self, step: int, position: int) -> bool:
        """Replay a step on all ranks, and report its first fault; return whether there was one."""
        with self.run.metrics.off_the_clock():
            with as_it_was(self.run):
                mine, failure = self._examine_all(step, position)
            told = self.run.world.gather_texts(json.dumps(asdict(mine.fault)) if mine else failure)
            found = [Fault.from_json(text) for text in told if text.startswith("{")]
            if not found:
                self._nothing_found(step, [f"rank {rank}: {why}" for rank, why in enumerate(told) if why])
                return False
            # A sharded parameter is known to be bad only where its shard is; to the others its module looks guilty.
            chief = min(found, key=lambda fault: (fault.phase != "parameters", fault.rank))
            self._report(replace(chief, other_ranks=[f.rank for f in found if f is not chief]), mine)
        return True

    def _examine_all(self, step: int, position: int) -> tuple[Offender | None, str]:
        """(this rank's first offender, or why its replay failed); sharding needs every micro-batch on every rank."""
        run = self.run
        if self._random is not None:
            set_random_state(self._random, run.world.device)
        fetched = run.data.at(position)
        if self._random is not None and run.config.data.workers:  # their draws were not this process's
            set_random_state(self._random, run.world.device)
        weight = run.world.sum(total_weight(run.task, [batch for batch, _ in fetched], run.world.device))
        share = run.world.world_size / weight
        mine, failure = None, ""
        for number, (batch, samples) in enumerate(fetched):
            random = random_state(run.world.device)
            try:
                with run.parallel.gradient_sync(True):
                    fault = examine(run.task, run.parallel.module, batch, share, run.precision)
            except Exception as error:
                if run.parallel.sharded:
                    raise  # the other ranks are in a collective of this forward
                fault, failure = None, f"{type(error).__name__}: {error}"
            run.optimizer.zero_grad(set_to_none=True)
            if fault is not None and mine is None:
                fault = replace(fault, step=step, rank=run.world.rank, micro_batch=number, samples=list(samples))
                mine = Offender(fault, batch, share.item(), random)
        return mine, failure

    def _nothing_found(self, step: int, failures: list[str]) -> None:
        """fp16's scale was too high, as in its normal cycle; in another precision, say what it may have been."""
        if failures:
            self.run.world.warn(f"step {step} was skipped, and replaying it failed on {'; '.join(failures)}")
        elif not self.run.scaler.scales:
            exact = "" if self.when == "step" else "; debug.nonfinite=step looks with the parameters as they were"
            self.run.world.warn(
                f"step {step} was skipped, but replayed it is finite: the parameters have moved on, it was a random "
                f"augmentation or dropout, or the gradients' norm alone overflowed{exact}"
            )

    def _report(self, fault: Fault, mine: Offender | None) -> None:
        """To the console once per module, phase and rank; to reports.jsonl each time. Every rank calls it."""
        world = self.run.world
        self.faults.append(fault)
        self._met[fault.key] += 1
        if world.is_main and self._writes:
            line = {**asdict(fault), "met": self._met[fault.key]}
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / "reports.jsonl").open("a") as file:
                file.write(json.dumps(plain_json(line)) + "\n")
        if self._met[fault.key] > 1:
            return
        kept = f"; {MAX_FILES} micro-batches are kept already" if self._writes else ""
        if self._writes and self._files < MAX_FILES:
            self._files += 1
            kept = "; " + world.gather_texts(self._keep(fault, mine))[fault.rank]
        world.warn(f"step {fault.step} was skipped: on {fault}{kept}")

    def _keep(self, fault: Fault, mine: Offender | None) -> str:
        """Write the offending rank's file, by that rank; return what to say of it. Every rank calls it."""
        weights = self._weights(fault.rank)
        if mine is None or fault.rank != self.run.world.rank:
            return ""
        from dist_amp.config.load import to_toml

        path = self._folder / f"step_{fault.step:08d}_rank{fault.rank:05d}.pt"
        padding = isinstance(mine.batch, Padding)
        kept = {
            "dist_amp": "nonfinite",
            "report": json.dumps(asdict(fault)),
            "batch": _on_host(mine.batch.batch if padding else mine.batch),
            "padding": padding,
            "share": mine.share,
            "scale": self.run.scaler.scale_tensor.item(),
            "random": mine.random,
            "config": to_toml(self.run.config),
            "weights": weights,
        }
        fresh = path.with_suffix(".writing")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(kept, fresh)
            os.replace(fresh, path)
        except Exception as error:  # a full disk, or a batch that can't be pickled, is no reason to end the run
            fresh.unlink(missing_ok=True)
            return f"it could not be kept: {error}"
        return f"kept in {path}; python -m dist_amp.verify --replay {path}"

    def _weights(self, rank: int) -> dict[str, Any] | None:
        """The whole model's state on the host of `rank`, gathered one tensor at a time; None where it is too large."""
        state: dict[str, Any] = get_model_state_dict(self.run.model)
        sizes = [value.numel() * value.element_size() for value in state.values() if isinstance(value, Tensor)]
        if sum(sizes) > MAX_WEIGHT_BYTES:
            return None
        whole: dict[str, Any] = {}
        for name, value in state.items():
            if hasattr(value, "full_tensor"):
                value = value.to(self.run.world.device).full_tensor()
            if rank == self.run.world.rank:
                whole[name] = _on_host(value)
        return whole


def _on_host(values: Any) -> Any:
    """Copies on the CPU, and of what is seen alone: a view would be saved with all that it is a view of."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), values)
