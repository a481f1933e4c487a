"""Replay of skipped steps: report the module that caused an inf or nan.

At a log step after a skip, all ranks run that step's micro-batches again, with hooks and a loss
scale of 1, so that an overflow by fp16's scale alone is not reported.

Docs: docs/debugging.md
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from dist_amp.checkpoint.task_state import without_effects
from dist_amp.data import Indexed
from dist_amp.diagnostics.nonfinite import NonFinite, find_nonfinite
from dist_amp.distributed.process import random_state, set_random_state
from dist_amp.errors import in_one_line
from dist_amp.run import Run
from dist_amp.step import mark_last, weights_of
from dist_amp.telemetry.step_report import LogRow, Observer, StepReport

MAX_REPLAYS = 3  # of an interval in fp16, where the loss scale alone explains most skips


class NonfiniteReplay(Observer):
    """Replays on all ranks, and reads the device, only in intervals with a skip; or, with
    debug.nonfinite=step, reads each step's outcome and replays with the parameters as they were.
    """

    def __init__(self, run: Run):
        self.run = run
        self.faults: list[NonFinite] = []
        self._at_each_step = run.config.debug.nonfinite == "step"
        # (step, position of the data before it, whether it was applied) since the last log step
        self._notes: list[tuple[int, int, Tensor]] = []
        self._position = run.data.position
        self._skipped = int(run.schedule.skipped_steps)
        self._reported: set[tuple[str, str, int]] = set()
        self._folder = run.folder / "nonfinite"
        self._random: dict[str, Tensor] | None = None  # before the step, if each is watched
        if self._at_each_step:
            self._random = random_state(run.world.device)

    def after_step(
        self,
        report: StepReport,
        micro_batches: Sequence[Any],
    ) -> None:
        if self._at_each_step:
            if not report.applied.item():
                self._replay(self.run.step, self._position)
            self._random = random_state(self.run.world.device)
        else:
            self._notes.append((self.run.step, self._position, report.applied))
        self._position = self.run.data.position

    def on_log(self, row: LogRow) -> None:
        """Replay the interval's skipped steps, until one is not finite at a loss scale of 1."""
        notes = [note for note in self._notes if note[0] <= row.step]
        self._notes = self._notes[len(notes) :]
        before = self._skipped
        self._skipped = int(row["skipped_steps"])
        if self._skipped == before or not notes:
            return
        applied = torch.stack([note[2] for note in notes]).tolist()
        skipped = [note for note, good in zip(notes, applied, strict=True) if not good]
        for step, position, _ in skipped[:MAX_REPLAYS]:
            if self._replay(step, position) or not self.run.scaler.scales:
                return

    def where(self, row: LogRow) -> str:
        """Where the uninterrupted skips up to this log step began, to end an error with."""
        since = row.step - int(row["skips_in_a_row"]) + 1
        for fault in self.faults:
            if fault.step >= since:
                return f"; first: step {fault.step}, {fault.where}"
        return ""

    def _replay(
        self,
        step: int,
        position: int,
    ) -> bool:
        """Replay a step on all ranks and report its first inf or nan; return whether it has one."""
        world = self.run.world
        with world.clock.hold("diagnostics"):
            with self.run.parallel.no_side_effects(), ExitStack() as contexts:
                try:
                    task = contexts.enter_context(without_effects(self.run))
                except Exception as error:
                    why = f"the task can't be copied ({in_one_line(error)})"
                    world.warn(f"step {step} was skipped, and is not taken again: {why}")
                    return False
                fetched = self.run.data.at(position)
                if self._random is not None:
                    set_random_state(self._random, world.device)
                fault = find_in_micro_batches(self.run, step, fetched, task)
            results = world.gather(fault)
            faults = [result for result in results if isinstance(result, NonFinite)]
            if not faults:
                self._warn_nothing_found(step, results)
                return False
            # Only the rank that holds a sharded parameter's bad part sees it; the others blame the
            # module's forward.
            first = min(faults, key=lambda fault: (fault.phase != "parameters", fault.rank))
            others = [fault.rank for fault in faults if fault is not first]
            self._report(replace(first, other_ranks=others))
        return True

    def _warn_nothing_found(
        self,
        step: int,
        results: list[Any],
    ) -> None:
        warn = self.run.world.warn
        failures = [f"rank {rank}: {why}" for rank, why in enumerate(results) if why]
        if failures:
            warn(f"step {step} was skipped, and replaying it failed on {'; '.join(failures)}")
        elif not self.run.scaler.scales:  # in fp16 the scale was too high, its normal cycle
            warn(
                f"step {step} was skipped, but its replay is finite: the cause was a random "
                "augmentation or dropout, only the gradients' norm overflowed, or the parameters "
                "have changed since, which debug.nonfinite=step prevents"
            )

    def _report(self, fault: NonFinite) -> None:
        """To reports.jsonl each time; to the console once per module, phase and rank."""
        run = self.run
        self.faults.append(fault)
        look = ""
        # Stepping a run in a script or a notebook writes no files: it has no folder.
        if run.folder.is_dir():
            look = f"; see dist_amp replay {run.folder} --step {fault.step}"
            if run.world.is_main:
                self._folder.mkdir(exist_ok=True)
                with (self._folder / "reports.jsonl").open("a") as file:
                    file.write(json.dumps(asdict(fault)) + "\n")
        key = (fault.module, fault.phase, fault.rank)
        if key not in self._reported:
            self._reported.add(key)
            run.world.warn(f"step {fault.step} was skipped: on {fault}{look}")


def find_in_micro_batches(
    run: Run, step: int, micro_batches: Indexed, task: Any
) -> NonFinite | str:
    """This rank's first fault, or why its replay failed, or ""."""
    device = run.world.device
    weights = weights_of(task, [batch for batch, _ in micro_batches], device)
    share = run.world.world_size / run.world.sum(weights.sum())
    first: NonFinite | str = ""
    # A bit-exact run draws random numbers by the step and the micro-batch.
    taken = run.step
    run.step = step - 1
    exact = run.config.parallel.bit_exact
    for number, (is_last, (batch, samples)) in enumerate(mark_last(micro_batches)):
        fault = None
        try:
            with run.parallel.gradient_sync(is_last or not exact):
                module = run.parallel.module
                fault = find_nonfinite(task, module, batch, share, run.precision)
        except Exception as error:
            if run.parallel.sharded:
                raise  # the other ranks are in a collective of this forward
            first = first or f"{type(error).__name__}: {error}"
        run.optimizer.zero_grad(set_to_none=True)
        if fault is not None and not isinstance(first, NonFinite):
            at: dict[str, Any] = {"step": step, "rank": run.world.rank, "micro_batch": number}
            first = replace(fault, **at, samples=list(samples))
    run.step = taken
    return first
