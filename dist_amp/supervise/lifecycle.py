"""One run from its folder to its summary: all that happens around the training loop (train.py).

`run_job` locks the run's folder, handles signals, builds or resumes the run, writes its first files
and calls the training loop. A completed run ends in `close_run`, one that a signal stopped in
`close_preempted`. Errors go to the caller, `supervise` in failure.py.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dist_amp.checkpoint.format import (
    CONFIG,
    all_checkpoints,
    config_at,
    quarantine_after,
    step_of,
)
from dist_amp.checkpoint.resume import checkpoint_to_resume, with_dtype
from dist_amp.checkpoint.state import load
from dist_amp.config.text import to_toml
from dist_amp.data import Batches
from dist_amp.diagnostics.limits import Limits
from dist_amp.distributed.process import tell_launcher
from dist_amp.errors import SAVED_AND_STOPPED, NumericsError
from dist_amp.files import plain_json, present, run_dir, write_durably
from dist_amp.loading.plan import shuffled_order
from dist_amp.run import Run, ScriptRun, build_run, run_folder
from dist_amp.settings import Config
from dist_amp.supervise.banner import closing_table, print_banner, print_next_command
from dist_amp.supervise.preflight import (
    check_free_space,
    make_folder,
    only_live_run,
    warn_about_unread_settings,
)
from dist_amp.supervise.stop import AgreedStop
from dist_amp.telemetry.startup import Startup
from dist_amp.world import World

Train = Callable[[ScriptRun, AgreedStop], None]

MIN_EVAL_BATCHES = 16  # micro-batches per rank: with fewer the loss would be too noisy


@dataclass
class Job:
    """What is known of a run so far, for a report of its end."""

    config: Config
    world: World
    startup: Startup = field(default_factory=Startup)
    folder: Path | None = None
    run: ScriptRun | None = None
    status: int | None = None  # the exit status, once a failure has been reported
    at_end: Callable[[], object] = nullcontext  # called once the process has left its groups

    @property
    def steps_taken(self) -> int:  # -1 before there is a run
        return self.run.step if self.run is not None else -1

    def close(self) -> None:
        if self.run is not None:
            self.run.data.close()
            self.run.metrics.close_files()


def run_job(job: Job, train: Train, run: ScriptRun | None = None) -> int:
    """Train a run and write its summary; returns the exit status. run: from fit(run), if given."""
    config, world = job.config, job.world
    if present("diagnostics.consistency"):
        from dist_amp.diagnostics.consistency import check_ranks_agree

        check_ranks_agree(config.task.target, to_toml(config), world)
    if config.debug.audit_every != "off":
        from dist_amp.diagnostics.audit import check_settings

        check_settings(config, world)
    job.folder = folder = run_folder(config.run, world)
    config = replace(config, run=replace(config.run, dir=run_dir(folder)))  # resolves run.dir=auto
    make_folder(folder, config, world)
    with ExitStack() as contexts:
        contexts.enter_context(only_live_run(folder, world))
        if config.debug.profile != "off":
            from dist_amp.diagnostics.profiling import memory_history

            contexts.enter_context(memory_history(folder, world))
        # From here on a signal only sets a flag: the run stops before the first step or after one.
        stop = contexts.enter_context(AgreedStop(world))
        if "://" in config.run.dir:
            from dist_amp.storage.mirror import mirror_run

            mirror_run(config.run, job)
        if config.compile.blocks and present("scaling.compile"):
            from dist_amp.scaling.compile import keep_code

            keep_code(folder, config.compile, world)  # a restart reads it from there
        if run is None:
            run = build_or_resume(config, job, folder)
        else:  # fit(run)
            add_user_observers(run)
            contexts.enter_context(run.fitting())
        job.run = run
        world.raise_first(run.observers.problem)  # a user's observer could not load its state
        if run.step and is_finished(run):
            return 0
        open_run(run)
        job.startup.lap("checks")  # counts the time since the last lap as spent on checks
        train(run, stop)
        if stop.agreed and not stop.by_task:
            status = close_preempted(run, stop)
        else:
            status = close_run(run, stop)
        world.raise_first(run.observers.problem)  # the summary() of a user's observer failed
        tell_launcher(status)
        return status


def add_user_observers(run: ScriptRun) -> None:
    if run.config.run.observers or hasattr(run.task, "observers"):
        from dist_amp.supervise.callbacks import add_own_observers

        add_own_observers(run)


def build_or_resume(config: Config, job: Job, folder: Path) -> ScriptRun:
    """Build the config's run; load the checkpoint that `run.resume` selects, if there is one."""
    startup = job.startup
    startup.lap("checks")  # ends this phase; each lap below also ends the phase that it names
    config = with_dtype(config, folder, job.world)
    checkpoint = checkpoint_to_resume(config, folder, job.world)
    startup.lap("restore")
    run = build_run(config, job.world, resumes=checkpoint is not None)
    startup.lap("model")
    add_user_observers(run)
    run.observers.begin(run)
    if checkpoint is not None:
        load(run, checkpoint)
    startup.lap("restore")
    startup.watch(run)
    return run


def add_observers(run: ScriptRun, stop: AgreedStop) -> None:
    """Add the observers that settings enable and whose files exist, in the order of their calls."""
    config = run.config
    add = run.observers.add
    add(run.metrics)
    if any("lr_scale" in group for group in run.optimizer.param_groups):
        from dist_amp.optimizers.groups import GroupRates

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
    # Before the observers below, which assume that all ranks skipped the same steps.
    if present("diagnostics.consistency"):
        from dist_amp.diagnostics.consistency import Consistency

        add(Consistency(run))
    if config.debug.audit_every != "off":
        from dist_amp.diagnostics.audit import Audit

        add(Audit(run))
    if config.debug.nonfinite != "off" and present("diagnostics.nonfinite_replay"):
        from dist_amp.diagnostics.nonfinite_replay import NonfiniteReplay

        nonfinite = NonfiniteReplay(run)
        add(nonfinite)
        add(Limits(run, nonfinite.start_of_skips))
    else:
        add(Limits(run))
    if present("diagnostics.first_steps"):
        from dist_amp.diagnostics.first_steps import FirstSteps

        add(FirstSteps(run))
    may_lose_updates = config.parallel.param_dtype == "bf16" and present("diagnostics.numerics")
    if config.debug.numerics or may_lose_updates:
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


def is_finished(run: Run) -> bool:
    """Whether the run has no steps left, or its task has ended it; if so, prints which."""
    steps = run.config.train.steps
    summary = saved_summary(run.folder)
    completed = summary.get("stopped_by") == "completed"
    reason = ""
    if completed and summary.get("cause") and summary.get("steps") == run.step:
        reason = (
            f"it ended after {run.step} of train.steps={steps}, because the task's "
            f"{summary['cause']}; to continue, start a new run with --run.resume {run.folder} "
            "--run.dir NEW"
        )
    # If not completed, the run's own end is repeated, but not another run's (run.resume=PATH).
    elif run.step >= steps and (completed or not all_checkpoints(run.folder)):
        reason = f"it took {run.step} of train.steps={steps}; raise train.steps to continue"
    reason = run.world.from_main(reason)
    if reason:
        run.world.say(f"{run.folder} is finished: {reason}")
    return reason != ""


def open_run(run: Run) -> None:
    """Print the banner, check settings and disk, and write the run's first files."""
    print_banner(run)
    if run.validation is not None and run.config.eval.batches == "auto":
        bound_evaluation(run, run.validation)
    warn_about_unread_settings(run)
    check_free_space(run)
    settings = to_toml(run.config)
    if run.world.is_main:
        run.folder.mkdir(parents=True, exist_ok=True)
        for path in quarantine_after(run.folder, run.step):
            run.world.warn(f"{path} is a rejected checkpoint; its steps are taken again")
        if (run.folder / CONFIG).exists():
            # If settings changed, keep the config of the steps so far under another name.
            previous = config_at(run.folder, run.step)
            if run.step and previous.read_text() != settings:
                previous.replace(run.folder / f"config_until_step_{run.step:08d}.toml")
            for path in run.folder.glob("config_until_step_*.toml"):
                if step_of(path) > run.step:  # from steps that are taken again
                    path.unlink()
        (run.folder / CONFIG).write_text(settings)
    run.metrics.open(run.folder, run.step, settings)
    if present("supervise.environment"):
        from dist_amp.supervise.environment import report_environment

        report_environment(run)


def bound_evaluation(run: Run, validation: Batches) -> None:
    """Resolve eval.batches=auto: a tenth of the training time, if a forward takes a third of it,
    but at least MIN_EVAL_BATCHES. Drawn once, at random, since datasets may be sorted by class.
    """
    config = run.config
    plan = validation.plan
    per_step = run.data.plan.global_batch_size / plan.global_batch_size  # micro-batches per rank
    training = 3 * per_step * min(float(config.eval.every), config.train.steps)  # in forwards
    batches = max(MIN_EVAL_BATCHES, int(0.1 * training))
    samples = batches * plan.global_batch_size
    if samples >= plan.length:
        return
    run.config = replace(config, eval=replace(config.eval, batches=batches))
    if not hasattr(validation.fetch.dataset, "shuffled"):  # Parquet: random reads would be slow
        validation.plan = replace(plan, order=shuffled_order(plan.length))
    run.world.say(
        f"eval   uses {samples:,} of the {plan.length:,} held-out samples, the same each time, "
        f"and takes about {batches / training:.0%} of training's time; --eval.batches all uses all"
    )


def close_preempted(run: Run, stop: AgreedStop) -> int:
    """End a run that a signal stopped; returns the exit status, 75, or 1 if nothing was saved."""
    cause = next(filter(None, run.world.gather(stop.requested_by)))
    status = 1
    outcome = "checkpoint.every=off, so nothing was saved"
    if run.config.checkpoint.every != "off":
        status = SAVED_AND_STOPPED
        outcome = f"to continue, start the same job again with --run.dir {run_dir(run.folder)}"
    if run.world.is_main:
        write_summary(run.folder, run, "preempted", status, cause)
    run.world.say(f"stopped after step {run.step} by {cause}; {outcome}")
    return status


def close_run(run: Run, stop: AgreedStop) -> int:
    """End a completed run. Raises NumericsError if all steps, or the last two, were skipped."""
    skipped = int(run.schedule.skips_in_a_row)
    if skipped > 1 or not run.schedule.applied_steps:
        fix = "precision.dtype=bf16 or --use_amp false, " if run.precision.name == "fp16" else ""
        raise NumericsError(
            f"the last {skipped} of {run.step} steps were skipped: their gradients were inf or "
            f"nan; use {fix}a lower optim.lr, or more steps if the loss scale was still falling, "
            "or check the task's loss and data"
        )
    cause = ""
    if stop.by_task and run.step < run.config.train.steps:
        cause = next(filter(None, run.world.gather(stop.ended_by)))
        steps = run.config.train.steps
        run.world.say(f"ended after step {run.step} of {steps}: the task's {cause}")
    if hasattr(run.task, "sample") and present("supervise.sampling"):
        from dist_amp.supervise.sampling import show_sample

        show_sample(run)
    if run.world.is_main:
        summary = write_summary(run.folder, run, "completed", 0, cause)
        run.world.say(closing_table(summary, run.folder))
        print_next_command(run)
    return 0


def saved_summary(folder: Path) -> dict[str, Any]:
    """The content of RUN/summary.json; {} if the file is missing or damaged."""
    with suppress(Exception):  # a damaged file may raise errors of many types
        summary = {**json.loads((folder / "summary.json").read_text())}
        if isinstance(summary.get("steps", 0), int):
            return summary
    return {}


def write_summary(
    folder: Path, run: Run | None, stopped_by: str, exit_code: int, cause: str
) -> dict[str, Any]:
    """Write RUN/summary.json from the last logged metrics and return it; asks no other rank."""
    summary: dict[str, Any] = {"stopped_by": stopped_by, "exit_code": exit_code, "cause": cause}
    if run is not None:
        summary |= summary_of(run, failed=stopped_by == "failed")
    write_durably(folder / "summary.json", json.dumps(plain_json(summary), indent=2) + "\n")
    return summary


def summary_of(run: Run, failed: bool) -> dict[str, Any]:
    """The entries of summary.json on the run. failed: read nothing from the device: it may hang."""
    metrics = run.metrics
    hosts = dict(enumerate(metrics.hosts))
    ranks: list[dict[str, Any]] = []
    for rank, tags in enumerate(metrics.rank_table()):
        entry = {
            "rank": rank,
            "host": hosts.get(rank, ""),  # "": a rank of an earlier start, which had more ranks
            "peak_memory_bytes": int(tags["memory/peak_bytes"]),
            "items_per_second": tags["throughput/items_per_second"],
            "local_seconds": tags.get("time/local_seconds", 0.0),
            "tokens_per_second": tags.get("throughput/tokens_per_second", 0.0),
        }
        if "throughput/mfu" in tags:
            entry["mfu"] = tags["throughput/mfu"]
        ranks.append(entry)
    summary: dict[str, Any] = {
        "steps": run.step,
        "world_size": run.world.world_size,
        "strategy": run.parallel.strategy,
        "precision": run.precision.name,
        "resumed_from_step": run.resumed_from_step,
        "items_per_second": sum(rank["items_per_second"] for rank in ranks),
        "ranks": ranks,
        "evaluation": metrics.evaluation,
        "best_evaluation": metrics.best,
    }
    summary |= run.observers.tell("summary", failed)
    if ranks and all("mfu" in rank for rank in ranks):
        summary["mfu"] = sum(rank["mfu"] for rank in ranks) / len(ranks)
    if logged := metrics.last_logged:
        skipped = logged["amp/skipped_steps"]
        applied = logged["step"] - skipped
        if not failed:  # else as of the last log step
            applied, skipped, _ = run.schedule.counters.tolist()
        summary |= {
            "applied_steps": int(applied),
            "skipped_steps": int(skipped),
            "final_loss": logged["train/loss"],
            "loss_scale": logged["amp/loss_scale"],
        }
    return summary
