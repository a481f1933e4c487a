"""Which observers watch a fit: the one list of them."""

from collections.abc import Sequence
from typing import Any

from dist_amp.diagnostics.limits import Limits
from dist_amp.files import present
from dist_amp.run import Run, ScriptRun
from dist_amp.supervise.lifecycle import Stop
from dist_amp.telemetry.metrics import Metrics
from dist_amp.telemetry.observer import Observer
from dist_amp.telemetry.step_report import LogRow, StepReport, Tags


def add_observers(run: ScriptRun, stop: Stop) -> None:
    """Add what watches a fit, in order: what settings ask for, and features that are present."""
    config = run.config
    add = run.observers.add
    add(Recorder(run.metrics))
    add(GroupRates(run))
    shows_mfu = run.world.device.type == "cuda" or config.metrics.peak_flops != "auto"
    if shows_mfu and present("telemetry.mfu"):
        from dist_amp.telemetry.mfu import find_mfu

        if (mfu := find_mfu(run.world, config, run.task, run.parallel)) is not None:
            add(mfu)
    if present("telemetry.goodput"):
        from dist_amp.telemetry.goodput import Goodput

        add(Goodput(run.metrics, run.folder))
    if present("telemetry.console"):
        from dist_amp.telemetry.console import Console

        scale = run.scaler.scale_tensor.item()
        add(Console(run.metrics, run.step, config.train.steps, scale))
    # Before the others, which assume that all ranks skipped the same steps.
    if present("diagnostics.consistency"):
        from dist_amp.diagnostics.consistency import Consistency

        add(Consistency(run))
    if config.debug.audit_every != "off":
        from dist_amp.diagnostics.audit import Audit

        add(Audit(run))
    nonfinite = None
    if config.debug.nonfinite != "off" and present("diagnostics.nonfinite_replay"):
        from dist_amp.diagnostics.nonfinite_replay import NonfiniteReplay

        nonfinite = NonfiniteReplay(run)
        add(nonfinite)
    add(Limits(run, nonfinite))
    if present("diagnostics.first_steps"):
        from dist_amp.diagnostics.first_steps import FirstSteps

        add(FirstSteps(run))
    rounds = config.parallel.param_dtype == "bf16" and present("diagnostics.numerics")
    if config.debug.numerics or rounds:
        from dist_amp.diagnostics.numerics import Numerics

        add(Numerics(run))
    if config.metrics.fingerprint != "off":
        from dist_amp.diagnostics.fingerprint import Fingerprint

        add(Fingerprint(run))
    if config.debug.profile != "off":
        from dist_amp.diagnostics.profiling import Profile

        add(Profile(run))
    if present("diagnostics.slow_ranks"):
        from dist_amp.diagnostics.slow_ranks import SlowRanks

        add(SlowRanks(run))
    if present("telemetry.health"):
        from dist_amp.telemetry.health import Health

        add(Health(run.metrics))
    if hasattr(run.task, "sample") and present("supervise.sampling"):
        from dist_amp.supervise.sampling import Sampling

        add(Sampling(run))
    if present("supervise.callbacks"):
        from dist_amp.supervise.callbacks import Callbacks

        add(Callbacks(run, stop))
    if config.run.eviction_notice != "off" and present("supervise.eviction"):
        from dist_amp.supervise.eviction import EvictionNotice

        add(EvictionNotice(run, stop))
    add(run.saver)


class Recorder(Observer):
    """Gives the metrics each step's report."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        self._metrics.record(report)


class GroupRates(Observer):
    """Logs the learning rate of each parameter group, where they differ."""

    def __init__(self, run: Run):
        groups = run.optimizer.param_groups
        self._scales = {
            f"train/lr_{group.get('name', number)}": group.get("lr_scale", 1.0)
            for number, group in enumerate(groups)
            if run.world.is_main and any("lr_scale" in group for group in groups)
        }

    def tags(self, row: LogRow) -> Tags:
        return {tag: row["lr"] * scale for tag, scale in self._scales.items()}
