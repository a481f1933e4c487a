"""The main job's own loop on the stand-in, and what its steps did."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from dist_amp.checkpoint.background import Planner, Save, Staging, without_replicas
from dist_amp.checkpoint.state import take_snapshot
from dist_amp.config.load import load_config
from dist_amp.diagnostics import first_steps
from dist_amp.diagnostics.first_steps import FirstSteps
from dist_amp.optim import learning_rate
from dist_amp.run import Run, ScriptRun, build_run
from dist_amp.scaling import hooks
from dist_amp.step import evaluate, train_step
from dist_amp.supervise.lifecycle import open_run
from dist_amp.supervise.stop import AgreedStop
from dist_amp.telemetry.sums import Interval
from dist_amp.train import train
from dist_amp.world import World
from gpu_stand_in.records import Syncs, counted, launches_of, traced
from gpu_stand_in.stand_in import imagined

WARM_UP = 30  # until then the checks of the first steps read the device, and memory grows
STEPS = 50
QUIET = ["--checkpoint.every", "off", "--eval.every", "off", "--run.resume", "never"]
# Settings that are given come later and win; compiling takes this CPU minutes.
QUIET += ["--compile.blocks", "false"]


@dataclass(frozen=True)
class Steps:
    """What `STEPS` steps did, after `WARM_UP` others."""

    counts: dict[str, int]
    syncs: dict[str, int]
    lines: dict[str, str]
    peak_bytes: int
    reserved_bytes: int


class Window(AgreedStop):
    """Watches the loop from the end of step WARM_UP on, for STEPS steps. It never stops it."""

    def __init__(self) -> None:
        super().__init__(World())
        self.run: Any = None
        self.syncs = Syncs()
        self.counts: dict[str, int] = {}
        self._counting = counted()

    def poll(self, now: bool = False) -> bool:
        if self.run.step == WARM_UP and not now:
            self.counts = self._counting.__enter__()
            self.syncs.start()
            # NCCL's watchdog may hold DDP's first buckets, until it wakes, at an earlier peak.
            torch.cuda.reset_peak_memory_stats()
        if self.run.step == WARM_UP + STEPS:
            self.syncs.stop()
            self._counting.__exit__(None, None, None)
        return False


@contextmanager
def as_if_it_learned(run: Run) -> Iterator[None]:
    """The values of a healthy run in place of zeros, after the reads: else each step is skipped."""
    start_copy = Interval.start_copy
    read = Interval.read
    add = Interval._add
    logged = 0

    def start(interval: Interval, more: Mapping[str, Any]) -> None:
        nonlocal logged
        logged = run.step
        start_copy(interval, more)

    def read_some(interval: Interval) -> dict[str, float]:
        config = run.config
        lr = learning_rate(config.optim, logged - 1, config.train.steps, run.task)
        healthy = {"applied_steps": float(logged), "lr": lr, "loss_scale": 1024.0}
        healthy |= {"skipped_steps": 0.0, "skips_in_a_row": 0.0}
        return read(interval) | healthy

    def add_applied(interval: Interval, *values: float, applied: bool) -> None:
        add(interval, *(1.0 for _ in values), applied=True)

    def is_checked(checks: FirstSteps, report: Any) -> None:
        checks._is_update_checked = True

    with (
        patch.object(Interval, "start_copy", start),
        patch.object(Interval, "read", read_some),
        patch.object(Interval, "_add", add_applied),
        patch.object(FirstSteps, "_check_update", is_checked),
        patch.object(hooks, "is_written", lambda whole, sharded: False),
        patch.object(first_steps, "check_samples_differ", lambda run, samples: None),
    ):
        yield


def started(words: Sequence[object], ranks: int = 1) -> ScriptRun:
    config = load_config([*QUIET, *(str(word) for word in words)], environ={})
    return build_run(config, imagined(ranks))


def steps_of(words: Sequence[object], ranks: int = 1) -> Steps:
    """Train with these settings; the run's last step comes after the window."""
    window = Window()
    with tempfile.TemporaryDirectory() as folder:
        steps = ["--train.steps", WARM_UP + STEPS + 5, "--metrics.log_every", 5]
        window.run = run = started(["--run.dir", f"{folder}/run", *steps, *words], ranks)
        open_run(run)
        with as_if_it_learned(run):
            train(run, window)
        run.close()
    return Steps(
        window.counts,
        dict(window.syncs),
        window.syncs.lines,
        torch.cuda.max_memory_allocated(),
        torch.cuda.max_memory_reserved(),
    )


def kernels_of(words: Sequence[object]) -> set[str]:
    """The mangled names of what a step launches."""
    run = started(words)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "launches"
        with traced(trace):
            train_step(run, next(run.data))
        return {name for _, name in launches_of(trace)}


# ---- what happens before what ----


def nothing(*_: Any) -> None:
    """In place of a wait."""


def learning_rates_read(words: Sequence[object], planted: bool) -> list[float]:
    """Of two log steps: nan where the host reads them before they have arrived.

    planted: it does not wait for their copy.
    """
    run = started(words)
    rates = []
    for _ in range(2):
        run.metrics.after_step(train_step(run, next(run.data)))
        interval = run.metrics.interval
        run.metrics.begin(run.step, run.schedule, run.scaler, run.data)
        if planted:
            interval._copy[1].synchronize = nothing
        rates.append(run.metrics.read()["lr"])
    return rates


def unordered_accesses(words: Sequence[object], planted: str, ranks: int = 1) -> list[str]:
    """By torch's sanitizer: a tensor used on two streams, one of them writing, unordered.

    Each step is followed by the copy of a background save. planted: "prefetch": the stream that
    computes does not wait for the one that copies micro-batches; "staging": the copy of a save is
    made on a stream that does not wait for the one that computes.
    """
    from torch.cuda import _sanitizer as sanitizer

    sanitizer.enable_cuda_sanitizer()
    around_data: Any = nullcontext
    around_save: Any = nullcontext
    if planted == "prefetch":
        around_data = partial(patch.object, torch.cuda.Stream, "wait_stream", nothing)
    run = started(words, ranks)
    if planted == "staging":
        around_save = partial(torch.cuda.stream, torch.cuda.Stream())
    staging = Staging(run.world.device)
    try:
        with patch.object(hooks, "is_written", lambda whole, sharded: False):
            for _ in range(5):
                with around_data():
                    micro_batches = next(run.data)
                train_step(run, micro_batches)
                state = without_replicas(take_snapshot(run)[0], run.world)
                with around_save():
                    staging.copy(state)
    except sanitizer.CUDASanitizerErrors as found:
        return [str(error) for error in found.errors]
    return []


def saved_too_early(words: Sequence[object], planted: bool) -> list[str]:
    """Parameters that the thread of a background save reads before their copy has arrived.

    planted: the host does not wait for the copy.
    """
    run = started(words)
    train_step(run, next(run.data))
    early: list[str] = []

    def write(save: Save) -> None:
        model = save._state["model"]
        early.extend(name for name, value in model.items() if value.isnan().any())

    snapshot = take_snapshot(run)
    fault: Any = nullcontext()
    if planted:
        fault = patch.object(torch.cuda.Stream, "synchronize", nothing)
    with fault, patch.object(Save, "_write", write):
        Save(run, *snapshot, Planner(), Staging(run.world.device)).wait()
    return early


def overwritten_in_evaluation(words: Sequence[object], ranks: int) -> int:
    """How many copies from pinned memory the host has changed meanwhile, in an evaluation."""
    run = started([*words, "--eval.every", 1, "--eval.batches", 2], ranks)
    with patch.object(hooks, "is_written", lambda whole, sharded: False), counted() as happened:
        train_step(run, next(run.data))
        for observer in run.observers:  # of the weights' average
            for average in observer.state_dict().values():
                average.add_(1)
        evaluate(run)
        torch.cuda.synchronize()
    return happened["overwritten"]
