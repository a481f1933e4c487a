"""How a run starts and ends: whether it has steps left, its banner, its files opened, and
RUN/summary.json.
"""

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dist_amp.checkpoint.format import MANIFEST, all_checkpoints, quarantine_after
from dist_amp.distributed.environment import attempt
from dist_amp.distributed.process_group import shared_store
from dist_amp.errors import SAVED_AND_STOPPED, ConfigError, Failure, NumericsError
from dist_amp.files import appears, plain_json, write_durably
from dist_amp.run import Run
from dist_amp.settings import Config
from dist_amp.supervise.stop import AgreedStop
from dist_amp.telemetry.metrics import Metrics
from dist_amp.world import World


@dataclass
class Job:
    """What is known of a run so far, for whatever explains how it ended; the block that runs sets
    each field as soon as it has it.
    """

    config: Config
    world: World
    folder: Path | None = None
    run: Run | None = None
    # Kept, because the groups may be aborted; None in one process.
    store: dist.Store | None = field(init=False, default=None)  # type: ignore[name-defined]

    def __post_init__(self) -> None:
        if dist.is_initialized():
            self.store = shared_store()

    @property
    def steps_taken(self) -> int:
        """-1 before there is a run."""
        return self.run.step if self.run is not None else -1

    def close(self) -> None:
        if self.run is not None:
            self.run.data.close()
            self.run.metrics.close()


# --- the start


def make_folder(folder: Path, config: Config, world: World) -> None:
    """Make the run's folder, or check that it can be used.

    Errors: Failure if it can't be written, or is missing on a rank's machine; ConfigError if it is
    a checkpoint, or holds a run that is not to be resumed.
    """
    if world.is_main:
        if config.run.resume == "never" and all_checkpoints(folder) and not attempt():
            raise ConfigError(
                f"run.dir={folder} holds a run already; choose another, or use run.resume=auto"
            )
        try:
            if (folder / MANIFEST).exists():
                raise ConfigError(
                    f"run.dir={folder} is a checkpoint; name a run's folder, and give this one as "
                    "run.resume"
                )
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".writable").touch()
            (folder / ".writable").unlink()
        except OSError as error:
            raise Failure(
                f"run.dir={folder} can't be written ({error.strerror}); choose another with "
                "--run.dir"
            ) from error
    world.barrier()
    is_missing = config.checkpoint.every != "off" and not appears(folder)
    missing_on = platform.node() if is_missing else ""
    if host := next(filter(None, world.gather_texts(missing_on)), ""):
        raise Failure(
            f"run.dir={folder} is not there on {host}: put it on a disk that all ranks share"
        )


def is_finished(run: Run) -> bool:
    """Whether the run has no steps left, or its task ended it; says so."""
    steps = run.config.train.steps
    early = run.world.from_main(ended_early(run.folder, run.step))
    if early:
        run.world.say(
            f"{run.folder} is finished: it ended after {run.step} of train.steps={steps}, because "
            f"the task's {early}; to go on, start a new run with --run.resume {run.folder} "
            "--run.dir NEW"
        )
        return True
    # Without checkpoints of its own, it was to start from another run's, which has no steps left.
    finished = run.step >= steps and (is_completed(run.folder) or not all_checkpoints(run.folder))
    if run.world.from_main(str(finished)) != "True":
        return False
    run.world.say(
        f"{run.folder} is finished: it took {run.step} of train.steps={steps}; raise train.steps "
        "to go on"
    )
    return True


def open_run(run: Run) -> None:
    """Print what is about to run, and open its files."""
    metrics = run.metrics
    print_banner(run)
    from dist_amp.supervise.preflight import check_run

    check_run(run)
    if run.world.is_main:
        for path in quarantine_after(run.folder, run.step):
            run.world.warn(
                f"{path} was refused: it is kept under this name, and its steps are taken again"
            )
        (run.folder / "config.toml").write_text(run.config_text)
    metrics.open(run.folder, run.step, run.config_text)
    log_group_rates(metrics, run.optimizer)
    from dist_amp.telemetry.tensorboard_view import add_overview

    metrics.write_first(add_overview(hasattr(run.task, "tokens")))
    if run.world.device.type == "cuda" or run.config.metrics.peak_flops != "auto":
        from dist_amp.telemetry.mfu import log_mfu

        log_mfu(metrics, run.config, run.task, run.parallel)
    from dist_amp.telemetry.goodput import Goodput

    goodput = Goodput(metrics, run.folder)
    metrics.more_tags.append(goodput.tags)
    metrics.summaries.append(goodput.summary)
    from dist_amp.supervise.environment import report_environment

    report_environment(run)


def log_group_rates(metrics: Metrics, optimizer: torch.optim.Optimizer) -> None:
    """Log the learning rate of each parameter group, where they differ."""
    groups = optimizer.param_groups
    if not metrics.world.is_main or not any("lr_scale" in group for group in groups):
        return
    scales = {
        f"train/lr_{group.get('name', number)}": group.get("lr_scale", 1.0)
        for number, group in enumerate(groups)
    }
    metrics.more_tags.append(lambda row: {tag: row["lr"] * scale for tag, scale in scales.items()})


def print_banner(run: Run) -> None:
    """Print what is about to run."""
    world = run.world
    plan = run.data.plan
    total = sum(p.numel() for p in run.parallel.module.parameters())
    trained = sum(p.numel() for p in run.parallel.parameters)
    parameters = f"{total:,} parameters"
    if trained < total:
        parameters += f" ({trained:,} trained)"
    device = "CPU"
    if world.device.type == "cuda":
        device = torch.cuda.get_device_name(world.device)
    precision = run.precision.name
    if run.precision.cast_by != "nothing":
        precision += f" cast by {run.precision.cast_by}"
    layout = f"{run.parallel.strategy} on {world.world_size} x {device}"
    accumulation = plan.global_batch_size // (plan.micro_batch_size * plan.world_size)
    batch = f"{plan.micro_batch_size} x {plan.world_size} ranks x {accumulation} micro-batches"
    held_out = "0 held out"
    if run.validation is not None:
        held_out = f"{run.validation.plan.length:,} held out"
    if run.config.eval.every == "off":
        held_out = "none evaluated (eval.every=off)"
    world.say(f"run    {run.folder}, {first_step_of(run)}")
    world.say(f"model  {parameters}, {layout}, {precision}")
    world.say(f"batch  {plan.global_batch_size} samples = {batch}")
    world.say(f"data   {plan.length:,} samples to train on, {held_out}")
    from dist_amp.telemetry.tensorboard_view import watch_line

    world.say(watch_line(run.folder, hasattr(run.task, "tokens")))


def first_step_of(run: Run) -> str:
    """Where a run starts, in words."""
    source = run.resumed_from
    if source is None:
        return "from step 0: it holds no checkpoint"
    text = f"resumed from step {run.step}"
    if not source.resolve().is_relative_to(run.folder.resolve()):
        return f"{text} ({source})"
    asked = run.config.run.resume
    if asked not in ("auto", "never", str(source)):
        text += f"; it has continued since it began from run.resume={asked}"
    return text


# --- the end


def close_run(run: Run, stop: AgreedStop, stopped_by: str) -> int:
    """Write the summary, and a sample of a completed run; return the exit status.

    Errors: NumericsError for a run in which no step was applied: it is not done, whatever its
    steps.
    """
    if stopped_by == "preempted":
        return _close_preempted(run, stop.requested_by or "a signal to another rank")
    if not run.schedule.applied_steps:
        amp = "precision.dtype=bf16 or --use_amp false, " if run.precision.name == "fp16" else ""
        raise NumericsError(
            f"none of the {run.step} steps was applied: the gradients of each were inf or nan, and "
            f"the model is as it was at the start; use {amp}a lower optim.lr, or more steps if the "
            "loss scale was still falling, or check the task's loss and data"
        )
    early = ""
    if stop.by_task and run.step < run.config.train.steps:
        early = next(filter(None, run.world.gather_texts(stop.ended_by)))
        run.world.say(
            f"ended after step {run.step} of {run.config.train.steps}: the task's {early}"
        )
    if hasattr(run.task, "sample"):
        from dist_amp.supervise.sampling import show_sample

        show_sample(run)
    if run.world.is_main:
        summary = write_summary(run.folder, run, stopped_by, 0, early)
        print(closing_table(summary, run.folder), flush=True)
    return 0


def _close_preempted(run: Run, cause: str) -> int:
    """75 says that the run may be restarted: without a checkpoint each time from the beginning."""
    status = 1
    then = "checkpoint.every=off, so nothing was saved"
    if run.config.checkpoint.every != "off":
        status = SAVED_AND_STOPPED
        then = f"go on with --run.dir {run.folder}"
    if run.world.is_main:
        write_summary(run.folder, run, "preempted", status, cause)
    run.world.say(f"stopped after step {run.step} by {cause}; {then}")
    return status


def is_completed(folder: Path) -> bool:
    """Whether the run's summary says so; a run that was killed after its last checkpoint has none
    yet.
    """
    return _completed(folder) is not None


def ended_early(folder: Path, step: int) -> str:
    """Why the task ended the run after `step` steps, before its last one; "" if it did not."""
    summary = _completed(folder) or {}
    return str(summary.get("cause", "")) if summary.get("steps") == step else ""


def _completed(folder: Path) -> dict[str, Any] | None:
    """The summary of a completed run; None for any other."""
    try:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        return summary if summary["stopped_by"] == "completed" else None
    except (OSError, ValueError, LookupError):
        return None


def write_summary(
    folder: Path, run: Run | None, stopped_by: str, exit_code: int, cause: str
) -> dict[str, Any]:
    """Write RUN/summary.json from the metrics of the last log step, so that no other rank is
    needed; return it.
    """
    summary: dict[str, Any] = {"stopped_by": stopped_by, "exit_code": exit_code, "cause": cause}
    if run is not None:
        summary |= summary_of(run, failed=stopped_by == "failed")
    write_durably(folder / "summary.json", json.dumps(plain_json(summary), indent=2) + "\n")
    return summary


def summary_of(run: Run, failed: bool) -> dict[str, Any]:
    """The run's part of summary.json. failed: ask the device for nothing, it may not answer."""
    metrics = run.metrics
    ranks = [rank_entry(run, rank, tags) for rank, tags in enumerate(metrics.rank_table())]
    summary = {
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
    for entries in metrics.summaries:
        summary |= entries(failed)
    if ranks and all("mfu" in rank for rank in ranks):
        summary["mfu"] = sum(rank["mfu"] for rank in ranks) / len(ranks)
    logged = metrics.last_logged
    if logged:
        skipped = logged["amp/skipped_steps"]
        applied = logged["step"] - skipped
        if not failed:
            applied, skipped, _ = run.schedule.counters.tolist()
        summary |= {
            "applied_steps": int(applied),
            "skipped_steps": int(skipped),
            "final_loss": logged["train/loss"],
            "loss_scale": logged["amp/loss_scale"],
        }
    return summary


def rank_entry(run: Run, rank: int, tags: dict[str, float]) -> dict[str, Any]:
    """One rank's entry of summary.json."""
    entry = {
        "rank": rank,
        "host": "",
        "peak_memory_bytes": int(tags["memory/peak_bytes"]),
        "items_per_second": tags["throughput/items_per_second"],
        "tokens_per_second": tags.get("throughput/tokens_per_second", 0.0),
    }
    if rank < len(run.metrics.hosts):  # before a resume there may have been more ranks
        entry["host"] = run.metrics.hosts[rank]
    if "throughput/mfu" in tags:
        entry["mfu"] = tags["throughput/mfu"]
    return entry


def closing_table(summary: Mapping[str, Any], folder: Path) -> str:
    """Each rank's throughput and memory, the result, and the run's folder."""
    shows_tokens = any(rank["tokens_per_second"] for rank in summary["ranks"])
    header = f"{'rank':>4}  {'host':<20} {'peak memory':>12} {'items/s':>10}"
    if shows_tokens:
        header += f" {'tokens/s':>12}"
    if "mfu" in summary:
        header += f"{'mfu':>11}"
    rows = [header]
    for rank in summary["ranks"]:
        row = f"{rank['rank']:>4}  {rank['host']:<20} "
        row += f"{rank['peak_memory_bytes'] / 2**20:>8,.0f} MiB {rank['items_per_second']:>10,.1f}"
        if shows_tokens:
            row += f" {rank['tokens_per_second']:>12,.0f}"
        if "mfu" in summary:
            row += f" {100 * rank['mfu']:>8.3g} %"
        rows.append(row)
    result = f"{summary['steps']} steps"
    # Missing if a resumed run only had to evaluate, and its metrics.jsonl is lost.
    if "final_loss" in summary:
        result += f" ({summary['applied_steps']} applied, {summary['skipped_steps']} skipped)"
        result += f", loss {float(summary['final_loss']):.4f}"
    for name, value in summary["evaluation"].items():
        result += f", held-out {name} {value:.4f}"
    if "goodput" in summary:
        applied = timedelta(seconds=round(summary["spent_seconds"]["applied_steps"]))
        wall = timedelta(seconds=round(summary["wall_seconds"]))
        share = f"{100 * summary['goodput']:.0f} %"
        rows.append(f"goodput {share}: {applied} of {wall} in applied steps")
    return "\n".join([*rows, f"done: {result}", f"all of it is in {folder}"])
