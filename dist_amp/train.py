"""The main job: torchrun --nproc_per_node=8 -m dist_amp.train [--config FILE.toml ...] [--section.key VALUE ...]

Train the task for train.steps steps; evaluate, save and report on the way; leave RUN/summary.json behind.
"""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from dist_amp.checkpoint.format import all_checkpoints, quarantine_after
from dist_amp.checkpoint.saver import Saver
from dist_amp.checkpoint.state import rewind_point
from dist_amp.config.load import load_config, show_help, to_toml
from dist_amp.diagnostics.consistency import Consistency
from dist_amp.diagnostics.limits import stop_if_hopeless
from dist_amp.diagnostics.numerics import Numerics
from dist_amp.diagnostics.profiling import Profile, check_debug, memory_history
from dist_amp.diagnostics.replay import NonfiniteReplay
from dist_amp.errors import SAVED_AND_STOPPED, Failure, in_one_line
from dist_amp.fast.compile import as_compiled_so_far
from dist_amp.run import Run, build_run
from dist_amp.runtime.garbage import scheduled_garbage
from dist_amp.runtime.run_folder import run_folder
from dist_amp.step import evaluate, train_step
from dist_amp.supervise.failure import report_failure, supervised
from dist_amp.supervise.preflight import (
    check_free_space,
    check_ranks_agree,
    check_restarts,
    die_with_torchrun,
    make_folder,
    only_live_run,
)
from dist_amp.supervise.signals import AgreedStop
from dist_amp.telemetry.mfu import item_seconds_at_peak
from dist_amp.telemetry.summary import closing_table, introduce, is_completed, write_summary
from dist_amp.world import start


def train(run: Run, stop: AgreedStop) -> str:
    """Take the steps that are left; return "completed" or "preempted". Every rank takes the same way through."""
    config, last = run.config, run.config.train.steps

    def due(every: int | Literal["off"]) -> bool:
        return every != "off" and (run.step % every == 0 or run.step == last)

    def run_evaluation() -> bool:
        """Evaluate; return whether a stop came in between, and it is to be done anew."""
        with run.metrics.off_the_clock():
            rewind, batches = rewind_point(run), itertools.count(1)

            def between_batches() -> bool:
                collect_garbage(next(batches))
                return stop.poll()

            values = evaluate(run, between_batches)
            if stop.agreed:
                rewind()
            else:
                run.metrics.write_evaluation(run.step, values)
                tripwires.after_averaging()
        return stop.agreed

    def owes_evaluation() -> bool:
        return run.validation is not None and due(config.eval.every) and run.metrics.evaluated_step < run.step

    tripwires, provenance, numerics = Consistency(run), NonfiniteReplay(run), Numerics(run)
    with Saver(run) as saver, Profile(run) as profile, scheduled_garbage(config.train.gc_every) as collect_garbage:

        def save(wait: bool) -> None:
            with run.metrics.off_the_clock():
                saver.save(wait)

        def look() -> None:
            """Read, write and judge the figures that were begun at a log step."""
            if (row := run.metrics.read()) is None:
                return
            run.metrics.write(row, last)
            tripwires.look(row)  # first: what follows takes it that all ranks skipped the same steps
            provenance.look(row)
            stop_if_hopeless(row, config, provenance.where(row))
            saver.look()

        stopping = stop.poll_now()  # a signal in the warm-up
        if not stopping and run.step and owes_evaluation():  # stopped in the midst of it
            stopping = run_evaluation()
        while not stopping and run.step < last:
            micro_batches = next(run.data)
            if numerics.on:  # it writes a line of its own
                look()
            with numerics.measuring(micro_batches):
                report = train_step(run, micro_batches)
            run.step += 1
            run.metrics.record(report)
            tripwires.after_step(micro_batches)
            provenance.after_step(report)
            stopping = stop.poll()
            look()  # at the figures of the step before, if it was a log step
            if due(config.metrics.log_every):
                run.metrics.begin(run.step, run.optimizer, run.precision, run.data)
            profile.after_step()
            saves = due(config.checkpoint.every)
            if stopping or saves or owes_evaluation() or run.step == last:
                look()  # what waits for the device anyway, or is to be kept, comes after it
            if not stopping and owes_evaluation():
                stopping = run_evaluation()
            if saves and not stopping:
                save(wait=run.step == last)
            collect_garbage(run.step)
        if stopping and config.checkpoint.every != "off":
            save(wait=True)
    return "preempted" if stopping else "completed"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status. A process group that exists already is used and left as it is."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if {"-h", "--help"} & set(argv):
            print(show_help(argv, "python -m dist_amp.train", __doc__))
            return 0
        words = [word for word in argv if word.replace("-", "_") != "__print_config"]
        config = load_config(words)
        if len(words) < len(argv):
            print(to_toml(config), end="")
            return 0
        check_restarts()
        die_with_torchrun()
        with start(config.run) as world, supervised(config, world) as job:
            check_ranks_agree(config.task.target, to_toml(config), world)  # first: what follows takes equal configs
            check_debug(config.debug, world)
            folder = job.folder = run_folder(config.run, world)
            config = replace(config, run=replace(config.run, dir=str(folder)))
            make_folder(folder, config, world)
            recording = memory_history(config.debug, folder, world)
            # From here on a signal stops the run after a step; one that comes in the warm-up, before the first step.
            with only_live_run(folder, world), recording, AgreedStop(world) as stop:
                run = job.run = build_run(config, world)
                if is_finished(run):
                    return 0
                open_run(run)
                return close_run(run, stop, train(run, stop))
    except Failure as error:  # before this process joined the others
        return report_failure(error, None)[0]
    except SystemExit as reported:
        return int(reported.code or 0)


def is_finished(run: Run) -> bool:
    """Whether the run has no steps left and its summary is written; says so."""
    # Without checkpoints of its own, it was to start from another run's, which has no steps left.
    finished = run.step >= run.config.train.steps and (is_completed(run.folder) or not all_checkpoints(run.folder))
    if run.world.from_main(str(finished)) != "True":
        return False
    run.world.say(
        f"{run.folder} is finished: it took {run.step} of train.steps={run.config.train.steps}; raise train.steps to "
        "go on"
    )
    return True


def open_run(run: Run) -> None:
    """Print what is about to run, and open its files."""
    introduce(run)
    run.metrics.item_seconds_at_peak = item_seconds_at_peak(run)
    check_free_space(run)
    if run.world.is_main:
        for path in quarantine_after(run.folder, run.step):
            run.world.warn(f"{path} was refused: it is kept under this name, and its steps are taken again")
        (run.folder / "config.toml").write_text(run.config_text)
    run.metrics.open(run.folder, run.step, run.config_text)


def close_run(run: Run, stop: AgreedStop, stopped_by: str) -> int:
    """Write the summary, and a sample of a completed run; return the exit status."""
    if stopped_by == "preempted":
        cause = stop.requested_by or "a signal to another rank"
        saved = run.config.checkpoint.every != "off"
        status = SAVED_AND_STOPPED if saved else 1  # 75 would restart it, each time from the beginning
        if run.world.is_main:
            write_summary(run.folder, run, stopped_by, status, cause)
        then = f"go on with --run.dir {run.folder}" if saved else "checkpoint.every=off, so nothing was saved"
        run.world.say(f"stopped after step {run.step} by {cause}; {then}")
        return status
    if hasattr(run.task, "sample"):
        try:
            with run.parallel.evaluating(), run.precision.autocast(), as_compiled_so_far():
                run.metrics.write_sample(run.step, run.task.sample(run.parallel.module))
        except Exception as error:  # the training is done, and saved
            run.world.warn(
                f"the task's sample(model) failed: {in_one_line(error)}; python -m dist_amp.sample tries again"
            )
    if run.world.is_main:
        summary = write_summary(run.folder, run, stopped_by, 0, "")
        print(closing_table(summary, run.folder), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
