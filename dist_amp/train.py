"""The main job: torchrun --nproc_per_node=8 -m dist_amp.train [--config FILE.toml ...] [--section.key VALUE ...]

Train the task for train.steps steps; evaluate, save and report on the way; leave RUN/summary.json behind.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Literal

from dist_amp.checkpoint.saver import Saver
from dist_amp.checkpoint.state import restore_point
from dist_amp.config.load import load_config, show_if_asked, to_toml
from dist_amp.diagnostics.consistency import Consistency
from dist_amp.diagnostics.first_steps import FirstSteps
from dist_amp.diagnostics.limits import Limits
from dist_amp.diagnostics.numerics import Numerics
from dist_amp.diagnostics.profiling import Profile, check_debug, memory_history
from dist_amp.diagnostics.replay import NonfiniteReplay
from dist_amp.diagnostics.slow_ranks import SlowRanks
from dist_amp.errors import Failure
from dist_amp.run import Run, build_run
from dist_amp.runtime.garbage import scheduled_garbage
from dist_amp.runtime.run_folder import run_folder
from dist_amp.step import evaluate, train_step
from dist_amp.supervise import preflight
from dist_amp.supervise.callbacks import Callbacks, train_metrics
from dist_amp.supervise.failure import report_failure, supervised
from dist_amp.supervise.lifecycle import close_run, is_finished, open_run
from dist_amp.supervise.signals import AgreedStop
from dist_amp.telemetry.health import Health
from dist_amp.telemetry.observer import Observer
from dist_amp.world import start


def observers_of(run: Run) -> tuple[Observer, ...]:
    """What watches the run from beside the loop, in order. To delete a feature, delete its file and its entry here."""
    nonfinite = NonfiniteReplay(run)
    # Consistency first: the others assume that all ranks skipped the same steps.
    checks = Consistency(run), nonfinite, Limits(run, nonfinite), FirstSteps(run)
    return *checks, Numerics(run), Profile(run), SlowRanks(run), Health(run.world, run.metrics.add)


def train(run: Run, stop: AgreedStop) -> Literal["completed", "preempted"]:
    """Take the remaining steps. Every rank takes the same path through this loop."""
    config, last = run.config, run.config.train.steps
    with ExitStack() as contexts:
        saver = Saver(run)
        observers = tuple(map(contexts.enter_context, (*observers_of(run), Callbacks(run, stop), saver)))
        collect_garbage = contexts.enter_context(scheduled_garbage(config.train.gc_every))
        stopping = stop.poll_now()  # a signal in the warm-up
        if not stopping and run.step and evaluation_is_due(run):  # the run was stopped before or in its evaluation
            stopping = run_evaluation(run, stop, observers, collect_garbage)
        while not stopping and run.step < last:
            micro_batches = next(run.data)
            if any(observer.reads_before_step for observer in observers):
                read_metrics(run, observers)
            for observer in observers:
                observer.before_step(micro_batches)
            report = train_step(run, micro_batches)
            if run.step < last:
                run.data.prefetch()
            run.metrics.record(report)
            for observer in observers:
                observer.after_step(report, micro_batches)
            stopping = stop.poll()
            read_metrics(run, observers)  # of the step before, if it was a log step: they have arrived by now
            if is_due(config.metrics.log_every, run):
                run.metrics.begin(run.step, run.schedule, run.scaler, run.data, train_metrics(run, report))
            saves, evaluates = is_due(config.checkpoint.every, run), evaluation_is_due(run)
            if stopping or saves or evaluates or run.step == last:
                read_metrics(run, observers)  # what waits for the device anyway, or is kept, comes after the checks
            if evaluates and not stopping:
                stopping = run_evaluation(run, stop, observers, collect_garbage)
            if stop.by_task and not is_due(config.metrics.log_every, run):
                run.metrics.begin(run.step, run.schedule, run.scaler, run.data, train_metrics(run, report))
                read_metrics(run, observers)
            if saves and not stopping:
                saver.save(wait=run.step == last)
            collect_garbage(run.step)
        if stopping and config.checkpoint.every != "off":
            saver.save(wait=True)
    return "preempted" if stopping and not stop.by_task else "completed"


def is_due(every: int | Literal["off"], run: Run) -> bool:
    """Whether something that happens every so many steps, and at the last one, happens after this step."""
    return every != "off" and (run.step % every == 0 or run.step == run.config.train.steps)


def evaluation_is_due(run: Run) -> bool:
    return run.validation is not None and is_due(run.config.eval.every, run) and run.metrics.evaluated_step < run.step


def run_evaluation(
    run: Run, stop: AgreedStop, observers: Sequence[Observer], collect_garbage: Callable[[int], None]
) -> bool:
    """Evaluate and write the values; return whether to stop: a run that a stop interrupted here evaluates again."""
    with run.world.clock.hold("evaluation"):
        rewind, batches = restore_point(run), itertools.count(1)

        def interrupted() -> bool:
            collect_garbage(next(batches))
            return stop.poll("evaluation")

        values = evaluate(run, interrupted)
        if stop.agreed:
            rewind()
            return True
        run.metrics.write_evaluation(run.step, values)
        for observer in observers:
            observer.after_evaluation()
    return hasattr(run.task, "on_evaluation") and stop.poll_now()


def read_metrics(run: Run, observers: Sequence[Observer]) -> None:
    """Read, write and check the metrics of a log step, if there are any pending."""
    if (row := run.metrics.read()) is not None:
        run.metrics.write(row, run.config.train.steps)
        for observer in observers:
            observer.on_log(row)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status. A process group that exists already is used and left as it is."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if show_if_asked(argv, "python -m dist_amp.train", __doc__):
            return 0
        config = load_config(argv)
        preflight.check_restarts()
        preflight.die_with_torchrun()
        with start(config.run) as world, supervised(config, world) as job:
            preflight.check_ranks_agree(config.task.target, to_toml(config), world)  # the rest needs equal ones
            check_debug(config.debug, world)
            folder = job.folder = run_folder(config.run, world)
            config = replace(config, run=replace(config.run, dir=str(folder)))
            preflight.make_folder(folder, config, world)
            recording = memory_history(config.debug, folder, world)
            # From here on a signal stops the run after a step; one that comes earlier, before the first step.
            with preflight.only_live_run(folder, world), recording, AgreedStop(world) as stop:
                run = job.run = build_run(config, world)
                if is_finished(run):
                    return 0
                open_run(run)
                return close_run(run, stop, train(run, stop))
    except Failure as error:  # before this process joined the others
        return report_failure(error, None)[0]
    except SystemExit as reported:
        return int(reported.code or 0)


if __name__ == "__main__":
    sys.exit(main())
