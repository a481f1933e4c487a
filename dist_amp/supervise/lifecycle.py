"""What happens around the loop: whether a run has steps left, its files opened, its summary and sample written."""

import inspect
from dataclasses import fields, is_dataclass

from dist_amp.checkpoint.format import all_checkpoints, quarantine_after
from dist_amp.config.task_class import INJECTED
from dist_amp.errors import SAVED_AND_STOPPED, NumericsError
from dist_amp.run import Run
from dist_amp.runtime.batch_statistics import first_batch_norm
from dist_amp.runtime.plan import shard_step
from dist_amp.settings import DataConfig, SourceConfig
from dist_amp.sources.load import TOKEN_SETTINGS
from dist_amp.supervise.environment import report_environment
from dist_amp.supervise.preflight import check_free_space
from dist_amp.supervise.sampling import show_sample
from dist_amp.supervise.signals import AgreedStop
from dist_amp.telemetry.mfu import item_seconds_at_peak
from dist_amp.telemetry.summary import closing_table, ended_early, is_completed, print_banner, write_summary
from dist_amp.telemetry.tensorboard_view import add_overview


def is_finished(run: Run) -> bool:
    """Whether the run has no steps left, or its task ended it, and its summary is written; says so."""
    early = run.world.from_main(ended_early(run.folder, run.step))
    if early:
        run.world.say(
            f"{run.folder} is finished: it ended after {run.step} of train.steps={run.config.train.steps}, because the "
            f"task's {early}; to go on, start a new run with --run.resume {run.folder} --run.dir NEW"
        )
        return True
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
    print_banner(run)
    warn_about_small_batches(run)
    warn_about_unread_settings(run)
    run.metrics.item_seconds_at_peak = item_seconds_at_peak(run)
    run.metrics.lr_scales = {
        str(group.get("name", number)): group.get("lr_scale", 1.0)
        for number, group in enumerate(run.optimizer.param_groups)
        if any("lr_scale" in other for other in run.optimizer.param_groups)
    }
    check_free_space(run)
    if run.world.is_main:
        for path in quarantine_after(run.folder, run.step):
            run.world.warn(f"{path} was refused: it is kept under this name, and its steps are taken again")
        (run.folder / "config.toml").write_text(run.config_text)
    run.metrics.open(run.folder, run.step, run.config_text)
    run.metrics.open_console(run.step, run.config.train.steps, float(run.scaler.scale_tensor))
    run.metrics.write_first(add_overview(run.step, hasattr(run.task, "tokens")))
    report_environment(run)


def warn_about_small_batches(run: Run) -> None:
    """Warn where batch norm meets smaller micro-batches than the others, at the end of an epoch that is reached."""
    plan, norm = run.data.plan, first_batch_norm(run.parallel.module)
    rest, ranks = plan.length % plan.global_batch_size, plan.world_size
    ends = run.config.train.steps > plan.length // plan.global_batch_size
    if not (norm and rest and ends) or plan.drop_last:
        return
    shards = [shard_step(range(rest), ranks, plan.micro_batch_size, rank) for rank in range(ranks)]
    smallest = min(len(shard.indices) for rank in shards for shard in rank)
    if smallest < plan.micro_batch_size:
        run.world.warn(
            f"the last step of an epoch has {rest} of {plan.global_batch_size} samples, so batch norm ({norm}) gets "
            f"micro-batches of {smallest} in place of {plan.micro_batch_size}"
            f"{', and a single sample may have no variance' if smallest == 1 else ''}; use data.drop_last=true"
        )


def warn_about_unread_settings(run: Run) -> None:
    """Warn of settings that have no effect, since the task's constructor does not take the data section."""
    if INJECTED in inspect.signature(type(run.task)).parameters:
        return
    default, ours = DataConfig(), run.config.data
    names = (*(item.name for item in fields(SourceConfig)), *TOKEN_SETTINGS)
    unread = [f"data.{name}={getattr(ours, name)}" for name in names if getattr(ours, name) != getattr(default, name)]
    unread += [f"data.sources.{item.name}" for item in fields(ours.sources)] if is_dataclass(ours.sources) else []
    if unread:
        run.world.warn(
            f"{', '.join(unread)}: nothing reads this, because {type(run.task).__name__}'s constructor has no "
            "parameter `data`; add one and read from it in build_dataset (docs/data.md), or remove the setting"
        )


def close_run(run: Run, stop: AgreedStop, stopped_by: str) -> int:
    """Write the summary, and a sample of a completed run; return the exit status.

    Errors: NumericsError for a run in which no step was applied: it is not done, whatever its steps.
    """
    run.metrics.close_console()
    if stopped_by == "preempted":
        cause = stop.requested_by or "a signal to another rank"
        saved = run.config.checkpoint.every != "off"
        status = SAVED_AND_STOPPED if saved else 1  # 75 would restart it, each time from the beginning
        if run.world.is_main:
            write_summary(run.folder, run, stopped_by, status, cause)
        then = f"go on with --run.dir {run.folder}" if saved else "checkpoint.every=off, so nothing was saved"
        run.world.say(f"stopped after step {run.step} by {cause}; {then}")
        return status
    if not run.schedule.applied_steps:
        amp = "precision.dtype=bf16 or --use_amp false, " if run.precision.name == "fp16" else ""
        raise NumericsError(
            f"none of the {run.step} steps was applied: the gradients of each were inf or nan, and the model is as it "
            f"was at the start; use {amp}a lower optim.lr, or more steps if the loss scale was still falling, or check "
            "the task's loss and data"
        )
    early = ""
    if stop.by_task and run.step < run.config.train.steps:
        early = next(filter(None, run.world.gather_texts(stop.ended_by)))
        run.world.say(f"ended after step {run.step} of {run.config.train.steps}: the task's {early}")
    show_sample(run)
    if run.world.is_main:
        summary = write_summary(run.folder, run, stopped_by, 0, early)
        print(closing_table(summary, run.folder), flush=True)
    return 0
