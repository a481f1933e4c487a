"""torchrun --nproc_per_node=8 -m dist_amp.train [--config FILE.toml ...] [--section.key VALUE ...]

Train the task for train.steps steps; evaluate, save and report on the way; write RUN/summary.json.
"""

import gc
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self

from dist_amp.checkpoint.resume import checkpoint_to_resume
from dist_amp.checkpoint.saver import Saver
from dist_amp.checkpoint.state import load
from dist_amp.config.load import load_config, to_toml
from dist_amp.errors import Failure
from dist_amp.run import Run, build_run, run_folder
from dist_amp.settings import Config
from dist_amp.step import evaluate, train_step
from dist_amp.supervise.failure import report_failure, supervised
from dist_amp.supervise.lifecycle import Job, close_run, is_finished, open_run
from dist_amp.supervise.stop import AgreedStop
from dist_amp.telemetry.step_report import Observer, StepReport
from dist_amp.world import World, start


def observers_of(run: Run, stop: AgreedStop) -> list[Observer]:
    """What watches the run from beside the loop, in order."""
    observers: list[Observer] = []
    from dist_amp.telemetry.console import Console

    scale = run.scaler.scale_tensor.item()
    observers.append(Console(run.metrics, run.step, run.config.train.steps, scale))
    # Before the others, which assume that all ranks skipped the same steps.
    from dist_amp.diagnostics.consistency import Consistency

    observers.append(Consistency(run))
    from dist_amp.diagnostics.limits import FirstSteps, Limits

    limits = Limits(run)
    if run.config.debug.nonfinite != "off":
        from dist_amp.diagnostics.nonfinite import NonfiniteReplay

        nonfinite = NonfiniteReplay(run)
        limits.first_nonfinite = nonfinite.where
        observers.append(nonfinite)
    observers += [limits, FirstSteps(run)]
    if run.config.debug.numerics or run.config.parallel.param_dtype == "bf16":
        from dist_amp.diagnostics.numerics import Numerics

        observers.append(Numerics(run))
    if run.config.debug.profile != "off":
        from dist_amp.diagnostics.profiling import Profile

        observers.append(Profile(run))
    from dist_amp.diagnostics.slow_ranks import SlowRanks

    observers.append(SlowRanks(run))
    from dist_amp.telemetry.health import Health

    observers.append(Health(run.metrics))
    if hasattr(run.task, "sample"):
        from dist_amp.supervise.sampling import Sampling

        observers.append(Sampling(run))
    from dist_amp.supervise.callbacks import Callbacks

    observers.append(Callbacks(run, stop))
    return [*observers, ScheduledGarbage(run)]


class ScheduledGarbage(Observer):
    """Collects Python's garbage every 50 steps on all ranks at once: each one stops the others.

    Objects that exist at the start (mostly modules) are frozen, because scanning them too made a
    full collection take 127 ms. Evaluations have no steps, and collect automatically.
    """

    def __init__(self, run: Run):
        self._run = run
        self._was_enabled = gc.isenabled()

    def __enter__(self) -> Self:
        if self._was_enabled:
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        if self._was_enabled and self._run.step % 50 == 0:
            gc.collect()

    def before_evaluation(self) -> None:
        if self._was_enabled:
            gc.enable()

    def after_evaluation(self) -> None:
        if self._was_enabled:
            gc.disable()

    def __exit__(self, *error: object) -> None:
        if self._was_enabled:
            gc.enable()
            gc.unfreeze()


def train(run: Run, stop: AgreedStop) -> Literal["completed", "preempted"]:
    """Take the remaining steps. Every rank takes the same path through this loop."""
    config = run.config
    saver = Saver(run)
    observers = [*observers_of(run, stop), saver]
    with ExitStack() as contexts:
        for observer in observers:
            contexts.enter_context(observer)
        stopping = stop.poll_now()  # a signal in the warm-up
        if run.step and evaluation_is_due(run) and not stopping:
            stopping = run_evaluation(run, stop, observers)  # it was stopped before or in this one
        while run.step < config.train.steps and not stopping:
            micro_batches = next(run.data)
            if any(observer.reads_before_step for observer in observers):
                read_metrics(run, observers)
            for observer in observers:
                observer.before_step(micro_batches)
            report = train_step(run, micro_batches)
            is_last = run.step == config.train.steps
            if not is_last:
                run.data.prefetch()
            run.metrics.record(report)
            for observer in observers:
                observer.after_step(report, micro_batches)
            stopping = stop.poll()
            # Of the step before, if it was a log step: they have arrived by now.
            read_metrics(run, observers)
            logs = is_due(config.metrics.log_every, run)
            saves = is_due(config.checkpoint.every, run)
            evaluates = evaluation_is_due(run)
            if logs:
                begin_metrics(run, report)
            # What waits for the device anyway, or is kept, comes after the checks.
            if stopping or saves or evaluates or is_last:
                read_metrics(run, observers)
            if evaluates and not stopping:
                stopping = run_evaluation(run, stop, observers)
            if stop.by_task and not logs:
                begin_metrics(run, report)
                read_metrics(run, observers)
            if saves and not stopping:
                saver.save(wait=is_last)
        if stopping and config.checkpoint.every != "off":
            saver.save(wait=True)
    return "preempted" if stopping and not stop.by_task else "completed"


def is_due(every: int | Literal["off"], run: Run) -> bool:
    """Whether what happens every `every` steps, and at the last one, happens after this step."""
    return every != "off" and (run.step % every == 0 or run.step == run.config.train.steps)


def evaluation_is_due(run: Run) -> bool:
    if run.validation is None or run.metrics.evaluated_step == run.step:
        return False
    return is_due(run.config.eval.every, run)


def run_evaluation(run: Run, stop: AgreedStop, observers: Sequence[Observer]) -> bool:
    """Evaluate and write the values; return whether to stop. If interrupted, it is repeated."""
    with run.world.clock.hold("evaluation"):
        for observer in observers:
            observer.before_evaluation()
        rewind = run.parallel.restore_point()
        values = evaluate(run, partial(stop.poll, "evaluation"))
        if stop.agreed:
            rewind()
            return True
        run.metrics.write_evaluation(run.step, values)
        for observer in observers:
            observer.after_evaluation()
    return hasattr(run.task, "on_evaluation") and stop.poll_now()


def begin_metrics(run: Run, report: StepReport) -> None:
    """Start copying the metrics of a log step to the host."""
    of_task = {}
    if hasattr(run.task, "train_metrics"):
        from dist_amp.supervise.callbacks import train_metrics

        of_task = train_metrics(run, report)
    run.metrics.begin(run.step, run.schedule, run.scaler, run.data, of_task)


def read_metrics(run: Run, observers: Sequence[Observer]) -> None:
    """Read, write and check the metrics of a log step, if there are any pending."""
    if (row := run.metrics.read()) is not None:
        run.metrics.write(row)
        for observer in observers:
            observer.on_log(row)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status. An existing process group is used and kept."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        from dist_amp.config.help import show_if_asked

        if show_if_asked(argv, "python -m dist_amp.train", __doc__):
            return 0
        config = load_config(argv)
        from dist_amp.supervise.preflight import check_launch

        check_launch()
        with start(config.run) as world, supervised(config, world) as job:
            return run_job(config, world, job)
    except Failure as error:  # before this process joined the others
        return report_failure(error, None)[0]
    except SystemExit as reported:
        return int(reported.code or 0)


def run_job(config: Config, world: World, job: Job) -> int:
    """Build the run, train it and leave its summary; return the exit status."""
    with ExitStack() as contexts:
        from dist_amp.supervise.preflight import check_ranks_agree

        check_ranks_agree(config.task.target, to_toml(config), world)
        folder = run_folder(config.run, world)
        job.folder = folder
        config = replace(config, run=replace(config.run, dir=str(folder)))
        from dist_amp.supervise.preflight import make_folder, only_live_run

        make_folder(folder, config, world)
        contexts.enter_context(only_live_run(folder, world))
        if config.debug.profile != "off":
            from dist_amp.diagnostics.profiling import memory_history

            contexts.enter_context(memory_history(folder, world))
        # From here on a signal stops the run after a step; one that comes earlier, before the
        # first step.
        stop = contexts.enter_context(AgreedStop(world))
        checkpoint = checkpoint_to_resume(config, folder, world)
        run = build_run(config, world, resumes=checkpoint is not None)
        if checkpoint is not None:
            load(run, checkpoint)
        job.run = run
        if is_finished(run):
            return 0
        open_run(run)
        return close_run(run, stop, train(run, stop))


if __name__ == "__main__":
    sys.exit(main())
