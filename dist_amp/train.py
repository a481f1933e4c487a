"""The main job: torchrun --nproc_per_node=8 -m dist_amp.train [--config FILE.toml ...] [--section.key VALUE ...]

Train the task for train.steps steps; evaluate, save and report on the way; leave RUN/summary.json behind.
"""

import itertools
import json
import math
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from dist_amp.blocks import as_compiled_so_far
from dist_amp.checkpoint import Saver, rewind_point
from dist_amp.checkpoint_files import MANIFEST, all_checkpoints, appears, set_aside_after, write_synced
from dist_amp.checks import Tripwires
from dist_amp.config import ConfigError, Failure
from dist_amp.explain import Roll, explain_data, explain_disk
from dist_amp.failure import in_one_line, report_failure
from dist_amp.guards import check_alike, check_free_space, check_restarts, die_with_torchrun, only_live_run
from dist_amp.memory import explain_memory
from dist_amp.metrics import LogRow
from dist_amp.metrics_files import plain_json
from dist_amp.numerics import Numerics
from dist_amp.peaks import item_seconds_at_peak
from dist_amp.profiling import Profile, check_debug, memory_history
from dist_amp.provenance import Provenance
from dist_amp.run import Config, Run, build_run, load_config, show_help, to_toml
from dist_amp.runtime import (
    SAVED_AND_STOPPED,
    AgreedStop,
    DataError,
    NumericsError,
    World,
    attempt,
    run_folder,
    scheduled_garbage,
    start,
)
from dist_amp.step import evaluate, train_step


def train(run: Run, stop: AgreedStop) -> str:
    """Take the steps that are left; return "completed" or "preempted". Every rank takes the same way through."""
    config, last = run.config, run.config.train.steps

    def due(every: int | Literal["off"]) -> bool:
        return every != "off" and (run.step % every == 0 or run.step == last)

    def hold_out() -> bool:
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

    tripwires, provenance, numerics = Tripwires(run), Provenance(run), Numerics(run)
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
            stopping = hold_out()
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
                stopping = hold_out()
            if saves and not stopping:
                save(wait=run.step == last)
            collect_garbage(run.step)
        if stopping and config.checkpoint.every != "off":
            save(wait=True)
    return "preempted" if stopping else "completed"


def stop_if_hopeless(row: LogRow, config: Config, first: str = "") -> None:
    """Errors: DataError where nothing in a step counts; NumericsError for a collapsed scale or too many skips.

    first: where the skips began, if it is known.
    """
    least, endless = row["least_weight"], row["weight_sum"] == math.inf
    if endless or not least > 0:
        raise DataError(
            f"in the steps up to {row.step} a total weight was {math.inf if endless else least:g}; the task's "
            "weight(batch) is what the loss is divided by, and must be above 0"
        )
    if config.precision.name == "fp16" and row["loss_scale"] < config.precision.scaler.min_scale:
        raise NumericsError(
            f"the loss scale fell to {row['loss_scale']:g} up to step {row.step}, below "
            f"precision.scaler.min_scale={config.precision.scaler.min_scale:g}: gradients stay infinite or nan "
            "whatever the scale; try precision.dtype=bf16, a lower optim.lr or --use_amp false, or mend the module "
            f"that is reported as first not finite{first}"
        )
    if row["skips_in_a_row"] >= config.train.max_skips_in_a_row:
        advice = "a lower optim.lr, or --use_amp false" if config.precision.name != "fp32" else "a lower optim.lr"
        raise NumericsError(
            f"{row['skips_in_a_row']:.0f} steps in a row were not finite and were skipped, up to step {row.step} "
            f"(loss {row.loss:g}); the limit is train.max_skips_in_a_row={config.train.max_skips_in_a_row}; "
            f"try {advice}, or look at the data{first}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status. A process group that is there already is used and left."""
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
        with start(config.run) as world:
            return run_and_report(config, world)
    except Failure as error:  # found before this process joined the others
        return report_failure(error, None)[0]
    except SystemExit as reported:
        return int(reported.code or 0)


def run_and_report(config: Config, world: World) -> int:
    """Train, and leave a summary whatever happens; return the exit status.

    A failure is reported here, while the store that tells the ranks who is first is still there.
    """
    run, roll, folder = None, Roll(world), None
    try:
        check_alike(config.task.target, to_toml(config), world)  # before the config decides who waits for whom
        check_debug(config.debug, world)
        folder = run_folder(config.run, world)
        config = replace(config, run=replace(config.run, dir=str(folder)))
        make_folder(folder, config, world)
        # The signals are heard from here on: one in the warm-up stops the run before its first step.
        recording = memory_history(config.debug, folder, world)
        with only_live_run(folder, world), recording, AgreedStop(world) as stop:
            run = build_run(config, world)
            return run_to_the_end(run, stop)
    except BaseException as raised:
        batches = [one for one in (run.data, run.validation) if one is not None] if run is not None else []
        if run is not None:
            with suppress(Exception):
                run.metrics.rescue(config.train.steps)
        told = explain_memory(explain_data(raised, world.rank, batches), config, world, run)
        error = roll.explain(told if folder is None else explain_disk(told, folder))
        status, first = report_failure(error, world)
        with suppress(OSError):  # a folder that may not be entered can't even be looked for
            kept = run is None and folder is not None and (folder / "summary.json").exists()  # what it holds stays
            if first and folder is not None and folder.is_dir() and not kept:
                cause = str(error) if isinstance(error, Failure) else f"rank {world.rank}: {in_one_line(error)}"
                write_summary(folder, run, "failed", status, cause)
        raise SystemExit(status) from raised  # through the with-block of `start`: the others are not waited for
    finally:
        roll.close()
        if run is not None:
            run.data.close()
            run.metrics.close()


def make_folder(folder: Path, config: Config, world: World) -> None:
    """Errors: Failure where the folder can't be written; ConfigError where it holds a run that is not to be resumed."""
    if world.is_main:
        if config.run.resume == "never" and all_checkpoints(folder) and not attempt():
            raise ConfigError(f"run.dir={folder} holds a run already; choose another, or go on with run.resume=auto")
        try:
            if (folder / MANIFEST).exists():
                raise ConfigError(
                    f"run.dir={folder} is a checkpoint; name a run's folder, and give this one as run.resume"
                )
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".writable").touch()
            (folder / ".writable").unlink()
        except OSError as error:
            raise Failure(
                f"run.dir={folder} can't be written ({error.strerror}); choose another with --run.dir"
            ) from error
    world.barrier()
    missing = world.gather_texts("" if config.checkpoint.every == "off" or appears(folder) else platform.node())
    if host := next(filter(None, missing), ""):
        raise Failure(f"run.dir={folder} is not there on {host}: put it on a disk that all ranks share")


def run_to_the_end(run: Run, stop: AgreedStop) -> int:
    """Take the run's steps, then show and summarise what came of them; return the exit status."""
    steps = run.config.train.steps
    # Without checkpoints of its own: it was to begin from another run's, which has no steps left.
    finished = run.step >= steps and (is_completed(run.folder) or not all_checkpoints(run.folder))
    if run.world.from_main(str(finished)) == "True":
        run.world.say(
            f"{run.folder} is finished: it took {run.step} of train.steps={steps}; raise train.steps to go on"
        )
        return 0
    introduce(run)
    run.metrics.item_seconds_at_peak = item_seconds_at_peak(run)
    check_free_space(run)
    if run.world.is_main:
        for path in set_aside_after(run.folder, run.step):
            run.world.warn(f"{path} was refused: it is kept under this name, and its steps are taken again")
        (run.folder / "config.toml").write_text(run.config_text)
    run.metrics.open(run.folder, run.step, run.config_text)
    stopped_by = train(run, stop)
    if stopped_by == "preempted":
        cause = stop.requested_by or "a signal to another rank"
        saved = run.config.checkpoint.every != "off"
        status = SAVED_AND_STOPPED if saved else 1  # what was not saved would begin anew each time it is started
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


def introduce(run: Run) -> None:
    """Say what is about to run."""
    world, plan, precision = run.world, run.data.plan, run.precision
    parameters = sum(p.numel() for p in run.parallel.module.parameters())
    accumulation = plan.global_batch_size // (plan.micro_batch_size * plan.world_size)
    where = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    cast = f" cast by {precision.cast_by}" if precision.cast_by != "nothing" else ""
    begin, source = ", from step 0: it holds no checkpoint", run.resumed_from
    if source is not None:
        own = source.resolve().is_relative_to(run.folder.resolve())
        begin = f", resumed from step {run.step}" + ("" if own else f" ({source})")
        if own and run.config.run.resume not in ("auto", "never", str(source)):
            begin += f"; it has gone on since it began from run.resume={run.config.run.resume}"
    held_out = run.validation.plan.length if run.validation else 0
    world.say(
        f"run    {run.folder}{begin}\n"
        f"model  {parameters:,} parameters, {run.parallel.strategy} on {world.world_size} x {where}, "
        f"{precision.name}{cast}\n"
        f"batch  {plan.global_batch_size} samples = {plan.micro_batch_size} x {plan.world_size} ranks x "
        f"{accumulation} micro-batches\n"
        f"data   {plan.length:,} samples to train on, {held_out:,} held out\n"
        f"watch  tensorboard --logdir {run.folder}/tensorboard"
    )


def is_completed(folder: Path) -> bool:
    """Whether its summary says so; a run that was killed after its last checkpoint still owes one."""
    try:
        return bool(json.loads((folder / "summary.json").read_text())["stopped_by"] == "completed")
    except (OSError, ValueError, LookupError):
        return False


def write_summary(folder: Path, run: Run | None, stopped_by: str, exit_code: int, cause: str) -> dict[str, Any]:
    """RUN/summary.json, from the figures of the last log step, so that rank 0 alone can write it."""
    summary: dict[str, Any] = {"stopped_by": stopped_by, "exit_code": exit_code, "cause": cause}
    if run is not None:
        logged, ranks = run.metrics.logged, run.metrics.rank_table()
        summary |= {
            "steps": run.step,
            "world_size": run.world.world_size,
            "strategy": run.parallel.strategy,
            "precision": run.precision.name,
            "resumed_from_step": run.resumed_from_step,
            "items_per_second": sum(rank["items_per_second"] for rank in ranks),
            "ranks": ranks,
            "evaluation": run.metrics.evaluation,
            "best_evaluation": run.metrics.best,
        }
        if ranks and all("mfu" in rank for rank in ranks):
            summary["mfu"] = sum(rank["mfu"] for rank in ranks) / len(ranks)
        if logged:
            summary |= {
                "applied_steps": int(logged["step"] - logged["amp/skipped_steps"]),
                "skipped_steps": int(logged["amp/skipped_steps"]),
                "final_loss": logged["train/loss"],
                "loss_scale": logged["amp/loss_scale"],
            }
    fresh = folder / ".summary.json.writing"
    write_synced(fresh, json.dumps(plain_json(summary), indent=2) + "\n")
    fresh.replace(folder / "summary.json")
    return summary


def closing_table(summary: dict[str, Any], folder: Path) -> str:
    """Each rank's throughput and memory, and where the rest is."""
    with_mfu = "mfu" in summary
    lines = [
        f"{'rank':>4}  {'host':<20} {'peak memory':>12} {'items/s':>10} {'tokens/s':>12}" + f"{'mfu':>11}" * with_mfu
    ]
    for rank in summary["ranks"]:
        lines.append(
            f"{rank['rank']:>4}  {rank['host']:<20} {rank['peak_memory_bytes'] / 2**20:>8,.0f} MiB "
            f"{rank['items_per_second']:>10,.1f} {rank['tokens_per_second']:>12,.0f}"
            + (f" {100 * rank['mfu']:>8.3g} %" if with_mfu else "")
        )
    held_out = "".join(f", held-out {name} {value:.4f}" for name, value in summary["evaluation"].items())
    done = f"{summary['steps']} steps"
    if "final_loss" in summary:  # not where an evaluation alone was owed, and the figures before it are gone
        done += f" ({summary['applied_steps']} applied, {summary['skipped_steps']} skipped)"
        done += f", loss {float(summary['final_loss']):.4f}"
    return "\n".join([*lines, f"done: {done}{held_out}", f"all of it is in {folder}"])


if __name__ == "__main__":
    sys.exit(main())
