"""torchrun --nproc_per_node=8 -m dist_amp.train [--config FILE ...] [--section.key VALUE ...]

Train the task for train.steps steps; evaluate, save and report on the way; write RUN/summary.json.
"""

import gc
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__" and {"-h", "--help"} & {*sys.argv}:
    from dist_amp.config.help import show_and_exit

    show_and_exit(sys.argv[1:])  # torch's import takes seconds

from torch import Tensor

from dist_amp.checkpoint.compatibility import with_rows_as_begun
from dist_amp.checkpoint.resume import checkpoint_to_resume, with_dtype
from dist_amp.checkpoint.saver import best_metric_problem
from dist_amp.checkpoint.state import load
from dist_amp.config.load import load_config
from dist_amp.config.task_class import find_task
from dist_amp.config.text import to_toml
from dist_amp.distributed.process import tell_launcher
from dist_amp.errors import Failure
from dist_amp.files import present, run_dir
from dist_amp.run import Run, ScriptRun, build_run, run_folder
from dist_amp.settings import Config
from dist_amp.step import evaluate, train_step
from dist_amp.supervise.failure import report_failure, supervised
from dist_amp.supervise.lifecycle import (
    Job,
    Stop,
    close_run,
    is_finished,
    open_run,
    saved_summary,
)
from dist_amp.supervise.observers import add_observers
from dist_amp.supervise.preflight import check_launch, make_folder, only_live_run
from dist_amp.supervise.stop import AgreedStop, close_preempted
from dist_amp.telemetry.step_report import StepReport
from dist_amp.world import start


def train(run: ScriptRun, stop: Stop) -> Literal["completed", "preempted"]:
    """Take the remaining steps. Every rank takes the same path through this loop."""
    error: BaseException | None = None
    try:
        add_observers(run, stop)
        # Scanning the modules in each full collection of garbage took 127 ms.
        gc.collect()
        gc.freeze()
        loop(run, stop)
    except BaseException as raised:
        error = raised
        raise
    finally:
        gc.unfreeze()
        run.observers.close(error)
    run.world.raise_first(run.observers.problem)
    return "preempted" if stop.agreed and not stop.by_task else "completed"


def loop(run: ScriptRun, stop: Stop) -> None:
    config = run.config
    stop.poll(now=True)  # a signal in the warm-up
    if run.step and evaluation_is_due(run) and not stop.agreed:
        run_evaluation(run, stop)  # it was stopped before or in this one
    while run.step < config.train.steps and not stop.agreed:
        report = train_step(run, next(run.data))
        if run.observers.problem is not None:
            stop.end(str(run.observers.problem))
        stop.poll()
        # Of the step before, if it was a log step: they have arrived by now.
        read_metrics(run)
        is_last = run.step == config.train.steps
        logs = is_due(config.metrics.log_every, run)
        saves = is_due(config.checkpoint.every, run)
        evaluates = evaluation_is_due(run)
        if logs:
            begin_metrics(run, report)
        # What waits for the device anyway, or is kept, comes after the checks.
        if stop.agreed or saves or evaluates or is_last:
            read_metrics(run)
        if evaluates and not stop.agreed:
            run_evaluation(run, stop)
            # Refused at the first evaluation that shows it, once its step is saved.
            saves |= config.checkpoint.every != "off" and bool(best_metric_problem(run))
        if stop.by_task and not logs:
            begin_metrics(run, report)
            read_metrics(run)
        if saves and not stop.agreed:
            run.saver.save(wait=is_last)
    if stop.agreed and config.checkpoint.every != "off":
        run.saver.save(wait=True)


def is_due(every: int | Literal["off"], run: Run) -> bool:
    """Whether what happens every `every` steps, and at the last one, happens after this step."""
    return every != "off" and (run.step % every == 0 or run.step == run.config.train.steps)


def evaluation_is_due(run: Run) -> bool:
    if run.validation is None or run.metrics.evaluated_step == run.step:
        return False
    return is_due(run.config.eval.every, run)


def run_evaluation(run: Run, stop: Stop) -> None:
    """Evaluate and write the values. If it is interrupted, a resumed run repeats it."""
    with run.world.clock.hold("evaluation"):
        rewind = run.parallel.restore_point()
        values = evaluate(run, stop.poll)
        if stop.agreed:
            rewind()
            return
        from dist_amp.optimizers.groups import call_on_evaluation

        wish = run.metrics.write_evaluation(run.step, values, partial(call_on_evaluation, run))
        stop.end(wish)
        run.observers.tell("after_evaluation")
    stop.poll(now=True)


def begin_metrics(run: Run, report: StepReport) -> None:
    """Start copying the metrics of a log step to the host."""
    of_task: dict[str, Tensor] = {}
    if hasattr(run.task, "train_metrics"):
        from dist_amp.supervise.callbacks import train_metrics

        of_task = train_metrics(run, report)
    run.metrics.begin(run.step, run.schedule, run.scaler, run.data, of_task)


def read_metrics(run: ScriptRun) -> None:
    """Read, write and check the metrics of a log step, if there are any pending."""
    if (row := run.metrics.read(run.saver.is_done())) is not None:
        run.metrics.write(row)
        run.observers.tell("on_log", row)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status. An existing process group is used and kept."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if {"-h", "--help", "--print_config", "--print-config"} & {*argv}:
            from dist_amp.config.help import show_if_asked

            show_if_asked(argv, "python -m dist_amp.train")
            return 0
        config = load_config(argv)
        find_task(config.task.target)  # the default may be missing
        check_launch()
        with supervised(config, start(config.run)) as job, ExitStack() as contexts:
            return run_job(config, job, contexts)
    except Failure as error:  # before this process joined the others
        return report_failure(error, None)[0]
    except SystemExit as reported:
        return int(reported.code or 0)


def fit(run: ScriptRun) -> dict[str, Any]:
    """Train a run that a script or notebook has built, as the command does; returns its summary.

    Every rank calls it. At step 0 it resumes as `run.resume` says. Ctrl-C stops the run after a
    step, saves it and raises KeyboardInterrupt; a further fit(run) continues. So does one of the
    run built again, after any end. Errors: what ended it; ConfigError as for `ScriptRun.fitting`;
    SystemExit with the exit status after another signal, and after any error of several ranks.
    """
    if threading.current_thread() is not threading.main_thread():
        run.world.warn(
            "fit(run) runs in a thread, where no signal can stop it after a step: call it in the "
            'main thread, or let the task\'s on_step return "stop"'
        )
    check_launch()
    config = replace(run.config, run=replace(run.config.run, dir=str(run.folder)))
    run.config = config
    if run.step:  # its own checkpoints don't stop run.resume=never
        config = replace(config, run=replace(config.run, resume="auto"))
    raises = run.world.world_size == 1
    with supervised(config, nullcontext(run.world), raises) as job, ExitStack() as contexts:
        status = run_job(config, job, contexts, run)
    summary = run.world.from_main(saved_summary(run.folder))
    if status and raises and summary["cause"] == "SIGINT":
        raise KeyboardInterrupt(f"stopped after step {run.step}; fit(run) continues")
    if status:
        raise SystemExit(status)
    return summary


def run_job(config: Config, job: Job, contexts: ExitStack, run: ScriptRun | None = None) -> int:
    """Build the run, unless it is given, train it and leave its summary; return the exit status."""
    world = job.world
    if present("diagnostics.consistency"):
        from dist_amp.diagnostics.consistency import check_ranks_agree

        check_ranks_agree(config.task.target, to_toml(config), world)
    if config.debug.audit_every != "off":
        from dist_amp.diagnostics.audit import check_settings

        check_settings(config, world)
    job.folder = folder = run_folder(config.run, world)
    config = replace(config, run=replace(config.run, dir=run_dir(folder)))
    make_folder(folder, config, world)
    contexts.enter_context(only_live_run(folder, world))
    if config.debug.profile != "off":
        from dist_amp.diagnostics.profiling import memory_history

        contexts.enter_context(memory_history(folder, world))
    # From here on a signal stops the run after a step; one that comes earlier, before the first.
    stop = contexts.enter_context(AgreedStop(world))
    if "://" in config.run.dir:
        from dist_amp.storage.mirror import mirrored

        contexts.enter_context(mirrored(config.run, job))
    if config.compile.blocks and present("scaling.compile"):
        from dist_amp.scaling.compile import keep_code

        keep_code(folder, config.compile, world)
    if run is not None:
        contexts.enter_context(run.fitting())
    else:
        run = newest_run(config, job, folder)
    job.run = run
    if run.step and is_finished(run):
        return 0
    open_run(run)
    job.startup.lap("checks")
    train(run, stop)
    if stop.agreed and not stop.by_task:
        status = close_preempted(run, stop)
    else:
        status = close_run(run, stop)
    tell_launcher(status)
    return status


def newest_run(config: Config, job: Job, folder: Path) -> ScriptRun:
    """The config's run, from the newest checkpoint in its folder if there is one."""
    startup = job.startup
    startup.lap("checks")
    config = with_dtype(config, folder, job.world)
    checkpoint = checkpoint_to_resume(config, folder, job.world)
    if checkpoint is not None:
        config = with_rows_as_begun(config, checkpoint)
    startup.lap("restore")
    run = build_run(config, job.world, resumes=checkpoint is not None)
    startup.lap("model")
    run.observers.begin(run)
    if checkpoint is not None:
        load(run, checkpoint)
    startup.lap("restore")
    startup.watch(run)
    return run


if __name__ == "__main__":
    sys.exit(main())
