"""Replay of skipped steps: report the first module with an inf or nan, and keep the micro-batch
that caused it.

At a log step after a skip, all ranks fetch that step's micro-batches again and run them with hooks
(nonfinite.py) at a loss scale of 1: an overflow caused by fp16's scale alone is part of the
scaler's normal cycle and is not reported. The micro-batch is kept in RUN/nonfinite for `python -m
dist_amp.verify --replay FILE`.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils._pytree import tree_map_only

from dist_amp.data import Padding
from dist_amp.diagnostics.nonfinite import NonFinite, find_nonfinite
from dist_amp.distributed.random_state import random_state, set_random_state
from dist_amp.files import plain_json
from dist_amp.loading.nested import plain_mappings
from dist_amp.run import Run
from dist_amp.step import weight_of
from dist_amp.telemetry.step_report import LogRow, Observer, StepReport

MAX_FILES = 8  # kept in a run's folder
MAX_WEIGHT_BYTES = 2**30  # above it a file is kept without the weights
# Skipped steps of one interval that are replayed while only fp16's scale explains them.
MAX_REPLAYS = 3


@dataclass(frozen=True)
class KeptMicroBatch:
    """A micro-batch of this rank that is not finite when replayed, and what replaying it again
    takes.
    """

    fault: NonFinite
    batch: Any
    share: float
    random: dict[str, Tensor]


@dataclass(frozen=True)
class StepNote:
    """A step since the last log step."""

    step: int
    position: int  # of the data before it
    applied: Tensor


class NonfiniteReplay(Observer):
    """Replays on all ranks, and reads the device, only in intervals with a skip; other steps are
    noted on the host.

    With debug.nonfinite=step, it reads every step's outcome and replays with the parameters exactly
    as they were.
    """

    def __init__(self, run: Run):
        self.run = run
        self.faults: list[NonFinite] = []
        self._at_each_step = run.config.debug.nonfinite == "step"
        self._notes: list[StepNote] = []
        self._position = run.data.position
        self._skipped = int(run.schedule.skipped_steps)
        self._repetitions: Counter[tuple[str, str, int]] = Counter()
        self._folder = run.folder / "nonfinite"
        # Stepping a run in a script or a notebook writes no files: it has no folder.
        self._has_folder = run.world.from_main(str(run.folder.is_dir())) == "True"
        self._files = int(run.world.from_main(str(len(list(self._folder.glob("*.pt"))))))
        self._random: dict[str, Tensor] | None = None  # before the step, if each is watched
        if self._at_each_step:
            self._random = random_state(run.world.device)

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        if self._at_each_step:
            if not report.applied.item():
                self._replay(self.run.step, self._position)
            self._random = random_state(self.run.world.device)
        else:
            self._notes.append(StepNote(self.run.step, self._position, report.applied))
        self._position = self.run.data.position

    def on_log(self, row: LogRow) -> None:
        """If steps were skipped in this interval, replay the first that is not finite at a loss
        scale of 1.
        """
        notes = [note for note in self._notes if note.step <= row.step]
        self._notes = self._notes[len(notes) :]
        before = self._skipped
        self._skipped = int(row["skipped_steps"])
        if self._skipped == before or not notes:
            return
        applied = torch.stack([note.applied for note in notes]).tolist()
        skipped = [note for note, good in zip(notes, applied, strict=True) if not good]
        replays = MAX_REPLAYS if self.run.scaler.scales else 1
        for note in skipped[:replays]:
            if self._replay(note.step, note.position):
                return

    def where(self, row: LogRow) -> str:
        """Where the uninterrupted skips up to this log step began, to end an error with; empty if
        it is not known.
        """
        since = row.step - int(row["skips_in_a_row"]) + 1
        for fault in self.faults:
            if fault.step >= since:
                return f"; first: step {fault.step}, {fault.where}"
        return ""

    def _replay(self, step: int, position: int) -> bool:
        """Replay a step on all ranks and report its first inf or nan; return whether it has one."""
        world = self.run.world
        with world.clock.hold("diagnostics"):
            with self.run.parallel.no_side_effects():
                kept, failure = self._replay_micro_batches(step, position)
            text = json.dumps(asdict(kept.fault)) if kept else failure
            results = world.gather_texts(text)
            faults = [NonFinite.from_json(text) for text in results if text.startswith("{")]
            if not faults:
                failures = [f"rank {rank}: {why}" for rank, why in enumerate(results) if why]
                self._warn_nothing_found(step, failures)
                return False
            # Only the rank that holds a sharded parameter's bad part sees it; the others blame the
            # module's forward.
            first = min(faults, key=lambda fault: (fault.phase != "parameters", fault.rank))
            others = [fault.rank for fault in faults if fault is not first]
            self._report(replace(first, other_ranks=others), kept)
        return True

    def _replay_micro_batches(self, step: int, position: int) -> tuple[KeptMicroBatch | None, str]:
        """(this rank's first non-finite micro-batch, or why its replay failed).

        Every rank runs all of its micro-batches: sharded models need all ranks in each forward.
        """
        run = self.run
        device = run.world.device
        if self._random is not None:
            set_random_state(self._random, device)
        fetched = run.data.at(position)
        if self._random is not None and run.config.data.workers:
            set_random_state(self._random, device)  # workers drew their random numbers elsewhere
        weight = run.world.sum(weight_of(run.task, [batch for batch, _ in fetched], device))
        share = run.world.world_size / weight
        kept = None
        failure = ""
        for number, (batch, samples) in enumerate(fetched):
            random = random_state(device)
            fault = None
            try:
                with run.parallel.gradient_sync(True):
                    fault = find_nonfinite(
                        run.task, run.parallel.module, batch, share, run.precision
                    )
            except Exception as error:
                if run.parallel.sharded:
                    raise  # the other ranks are in a collective of this forward
                failure = f"{type(error).__name__}: {error}"
            run.optimizer.zero_grad(set_to_none=True)
            if fault is not None and kept is None:
                fault = replace(fault, step=step, rank=run.world.rank, micro_batch=number)
                fault = replace(fault, samples=list(samples))
                kept = KeptMicroBatch(fault, batch, share.item(), random)
        return kept, failure

    def _warn_nothing_found(self, step: int, failures: list[str]) -> None:
        warn = self.run.world.warn
        if failures:
            warn(f"step {step} was skipped, and replaying it failed on {'; '.join(failures)}")
        elif not self.run.scaler.scales:  # in fp16 the scale was too high, its normal cycle
            text = (
                f"step {step} was skipped, but its replay is finite: the parameters have changed "
                "since, the cause was a random augmentation or dropout, or only the gradients' "
                "norm overflowed"
            )
            if not self._at_each_step:
                text += "; debug.nonfinite=step replays with the parameters as they were"
            warn(text)

    def _report(self, fault: NonFinite, kept: KeptMicroBatch | None) -> None:
        """To reports.jsonl each time, to the console once per module, phase and rank. Every rank
        calls it.
        """
        world = self.run.world
        key = (fault.module, fault.phase, fault.rank)
        self.faults.append(fault)
        self._repetitions[key] += 1
        if world.is_main and self._has_folder:
            line = {**asdict(fault), "met": self._repetitions[key]}
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / "reports.jsonl").open("a") as file:
                file.write(json.dumps(plain_json(line)) + "\n")
        if self._repetitions[key] > 1:
            return
        text = f"step {fault.step} was skipped: on {fault}"
        if self._has_folder and self._files < MAX_FILES:
            self._files += 1
            text += "; " + world.gather_texts(self._keep(fault, kept))[fault.rank]
        elif self._has_folder:
            text += f"; {MAX_FILES} micro-batches are kept already"
        world.warn(text)

    def _keep(self, fault: NonFinite, kept: KeptMicroBatch | None) -> str:
        """Write the file, on the rank of the micro-batch; return where. Every rank calls it."""
        run = self.run
        module = run.parallel.module
        weights = None
        if sum(p.numel() * p.element_size() for p in module.parameters()) <= MAX_WEIGHT_BYTES:
            options = StateDictOptions(full_state_dict=True)
            weights = get_model_state_dict(run.model, options=options)
        if kept is None or fault.rank != run.world.rank:
            return ""
        path = self._folder / f"step_{fault.step:08d}_rank{fault.rank:05d}.pt"
        padding = isinstance(kept.batch, Padding)
        content = {
            "dist_amp": "nonfinite",
            "report": json.dumps(asdict(fault)),
            "batch": _on_host(kept.batch.batch if padding else kept.batch),
            "padding": padding,
            "share": kept.share,
            "scale": run.scaler.scale_tensor.item(),
            "random": kept.random,
            "config": run.config_text,
            "weights": _on_host(weights),
        }
        unfinished = path.with_suffix(".writing")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(content, unfinished)
            os.replace(unfinished, path)
        except Exception as error:
            # A full disk, or a batch that can't be pickled, must not end the run.
            unfinished.unlink(missing_ok=True)
            return f"it could not be kept: {error}"
        return f"kept in {path}; python -m dist_amp.verify --replay {path}"


def _on_host(values: Any) -> Any:
    """Copies in host memory; without a copy, a view would be saved with all of its storage."""
    return tree_map_only(
        Tensor, lambda tensor: tensor.detach().cpu().clone(), plain_mappings(values)
    )
