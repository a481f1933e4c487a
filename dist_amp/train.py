"""torchrun --nproc_per_node=8 -m dist_amp.train [--config FILE ...] [--section.key VALUE ...]

Train the task for train.steps steps; evaluate, save and report on the way; write RUN/summary.json.
From the outside in: `main` reads the config, `supervise` joins the ranks and reports errors,
`run_job` builds or resumes the run, `train` adds observers, `loop` takes the steps.

After each step every rank takes the actions that are due, in this order:

    log       start copying the metrics to the host; they are read after the next step
    evaluate  on the validation samples
    save      a checkpoint
    stop      after the last step; or, with a last checkpoint, once the ranks have agreed to stop

All ranks stop after the same step if any of them gets a signal, if the task asks for it, or if an
observer fails. An evaluation in progress is cut short; the resumed run repeats it. Before it
evaluates, saves or stops, the loop checks the pending metrics: a run that fails is not saved.
"""

import gc
import sys
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

if __name__ == "__main__" and {"-h", "--help"} & {*sys.argv}:
    from dist_amp.config.help import show_and_exit

    show_and_exit(sys.argv[1:])  # before torch is imported, which takes seconds

from torch import Tensor

from dist_amp.config.load import load_config
from dist_amp.config.task_class import find_class, find_task
from dist_amp.errors import Failure
from dist_amp.run import ScriptRun
from dist_amp.step import evaluate, train_step
from dist_amp.supervise.failure import report_failure, supervise
from dist_amp.supervise.lifecycle import add_observers, run_job, saved_summary
from dist_amp.supervise.preflight import check_launch
from dist_amp.supervise.stop import AgreedStop
from dist_amp.telemetry.step_report import StepReport
from dist_amp.world import start

Action = Literal["log", "evaluate", "save", "stop", "step"]


def train(run: ScriptRun, stop: AgreedStop) -> None:
    """Take the remaining steps. Raises Failure if an observer failed, after the run is saved."""
    error: BaseException | None = None
    try:
        add_observers(run, stop)
        # Exclude the objects that exist now from garbage collection: a full one took 127 ms.
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


def loop(run: ScriptRun, stop: AgreedStop) -> None:
    """Take the steps, and the actions due after each: the same on every rank."""
    report: StepReport | None = None
    done: set[Action] = {"log", "save"}  # actions since the last step; neither is due at the start
    stop.poll(now=True)  # a signal may have come while the run was built
    while (action := due(run, stop, done)) != "stop":  # an evaluation may end the run
        done.add(action)
        if action == "step":
            report = train_step(run, next(run.data))
            done = set()
            if run.observers.problem is not None:
                stop.end(str(run.observers.problem))
            stop.poll()
            read_metrics(run)  # of the previous step, while the device computes this one
        elif action == "log":
            assert report is not None
            begin_metrics(run, report)
        elif action == "evaluate":
            read_metrics(run)
            run_evaluation(run, stop)
        elif action == "save":
            read_metrics(run)
            run.saver.save(wait=run.step == run.config.train.steps)
    read_metrics(run)
    if stop.agreed and run.config.checkpoint.every != "off":
        run.saver.save(wait=True)


def due(run: ScriptRun, stop: AgreedStop, done: Collection[Action]) -> Action:
    """The next action, in the order of this file's docstring. done: actions since the last step."""
    config = run.config
    is_last = run.step >= config.train.steps

    def is_due(every: int | Literal["off"]) -> bool:
        return every != "off" and (is_last or run.step % every == 0)

    if "log" not in done and (is_due(config.metrics.log_every) or stop.by_task):
        return "log"
    if stop.agreed:
        return "stop"
    is_evaluated = run.metrics.evaluated_step == run.step
    if run.validation is not None and not is_evaluated and is_due(config.eval.every):
        return "evaluate"
    if "save" not in done and is_due(config.checkpoint.every):
        return "save"
    return "stop" if is_last else "step"


def run_evaluation(run: ScriptRun, stop: AgreedStop) -> None:
    """Evaluate and write the results; if the ranks agree to stop meanwhile, undo the evaluation."""
    with run.world.clock.hold("evaluation"):
        restore = run.parallel.restore_point()
        values = evaluate(run, stop.poll)
        if stop.agreed:  # the resumed run repeats the evaluation from the same random state
            restore()
            return
        from dist_amp.optimizers.groups import call_on_evaluation

        # Calls the task's on_evaluation, and returns "" or, if that asks to stop, the request.
        stop.end(run.metrics.write_evaluation(run.step, values, partial(call_on_evaluation, run)))
        run.observers.tell("after_evaluation")
    stop.poll(now=True)


def begin_metrics(run: ScriptRun, report: StepReport) -> None:
    task_metrics: dict[str, Tensor] = {}
    if hasattr(run.task, "train_metrics"):
        from dist_amp.supervise.callbacks import train_metrics

        task_metrics = train_metrics(run, report)
    run.metrics.begin(run.step, run.schedule, run.scaler, run.data, task_metrics)


def read_metrics(run: ScriptRun) -> None:
    """Read and write the metrics of the last log step, if pending; on_log checks them."""
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
        find_task(config.task.target)  # load_config accepts a default task whose file is missing
        for target in config.run.observers:
            find_class(target, "run.observers")
        check_launch()
        return supervise(config, start(config.run), partial(run_job, train=train))
    except Failure as error:  # raised before this process joined the other ranks
        return report_failure(error, None)[0]
    except SystemExit as reported:
        return int(reported.code or 0)


def fit(run: ScriptRun) -> dict[str, Any]:
    """Train a run built in a script or notebook, as the train command does; returns its summary.

    Every rank must call it. At step 0 it resumes as the setting run.resume says. After Ctrl-C one
    process alone saves the run and raises KeyboardInterrupt; fit(run) then continues. After any
    other end, build the run again. Raises the error that ended the run, or SystemExit with the
    exit status after other signals or on several ranks; ConfigError as for `ScriptRun.fitting`.
    """
    check_launch()
    config = replace(run.config, run=replace(run.config.run, dir=str(run.folder)))
    run.config = config
    if run.step:  # run.resume=never rejects a folder with checkpoints, but these are its own
        config = replace(config, run=replace(config.run, resume="auto"))
    raises = run.world.world_size == 1
    work = partial(run_job, train=train, run=run)
    status = supervise(config, nullcontext(run.world), work, raises)
    summary = run.world.from_main(saved_summary(run.folder))
    if status and raises and summary["cause"] == "SIGINT":
        raise KeyboardInterrupt(f"stopped after step {run.step}; fit(run) continues")
    if status:
        raise SystemExit(status)
    return summary


if __name__ == "__main__":
    sys.exit(main())
