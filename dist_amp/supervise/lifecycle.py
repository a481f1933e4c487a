"""How a run starts and ends: whether it has steps left, its files, and RUN/summary.json."""

import json
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dist_amp.checkpoint.format import (
    CONFIG,
    all_checkpoints,
    config_at,
    quarantine_after,
    step_of,
)
from dist_amp.config.text import to_toml
from dist_amp.data import Batches
from dist_amp.errors import NumericsError
from dist_amp.files import plain_json, present, write_durably
from dist_amp.loading.plan import shuffled_order
from dist_amp.run import Run
from dist_amp.settings import Config
from dist_amp.supervise.banner import closing_table, print_banner, print_next_command
from dist_amp.supervise.preflight import check_run
from dist_amp.telemetry.startup import Startup
from dist_amp.telemetry.step_report import Tags
from dist_amp.world import World

FEWEST_EVALUATED = 16  # micro-batches per rank: fewer would be too noisy a loss


@dataclass
class Job:
    """What is known of a run so far, to explain how it ended. status: of a reported failure."""

    config: Config
    world: World
    folder: Path | None = None
    run: Run | None = None
    store: dist.Store | None = None  # type: ignore[name-defined]
    status: int | None = None
    raises: bool = False  # the error, for its caller to show
    startup: Startup = field(default_factory=Startup)
    at_end: Callable[[], object] = nullcontext  # called once this process has left its groups

    @property
    def steps_taken(self) -> int:
        """-1 before there is a run."""
        return self.run.step if self.run is not None else -1

    def close(self) -> None:
        if self.run is not None:
            self.run.data.close()
            self.run.metrics.close()


class Stop:
    """Whether the run ends before its last step: never, unless a subclass decides it."""

    agreed = False  # the same on all ranks, after the same step
    by_task = False  # what all agreed on is the wish of the task, not a signal's
    ended_by = ""  # which callback asked, on the ranks where one did
    every_poll = False  # it may ask after any step
    requested_by = ""  # the signal's name, on the ranks that got one
    notice: tuple[float, str] | None = None  # of an eviction: its end by time.monotonic, in words

    def end(self, wish: str) -> None:
        """End the run as completed; wish: who asked, or "" for nobody."""
        self.ended_by = self.ended_by or wish

    def ask_at_every_step(self) -> None:
        self.every_poll = True

    def announce(self, end: float, cause: str) -> None:
        """An eviction, which another thread knows of."""
        self.notice = (end, cause)

    def name_cause(self, cause: str) -> None:
        """What all ranks know as the cause of a stop by a signal or notice."""
        self.requested_by = cause

    def poll(self, now: bool = False) -> bool:
        """Called by all ranks after each step and between batches of an evaluation."""
        return self.agreed


def is_finished(run: Run) -> bool:
    """Whether the run has no steps left, or its task ended it; says so."""
    steps = run.config.train.steps
    summary = saved_summary(run.folder)
    finished = ""
    completed = summary.get("stopped_by") == "completed"
    if completed and summary.get("cause") and summary.get("steps") == run.step:
        finished = (
            f"it ended after {run.step} of train.steps={steps}, because the task's "
            f"{summary['cause']}; to continue, start a new run with --run.resume {run.folder} "
            "--run.dir NEW"
        )
    # Without checkpoints of its own, it was to start from another run's, which has no steps left.
    elif run.step >= steps and (completed or not all_checkpoints(run.folder)):
        finished = f"it took {run.step} of train.steps={steps}; raise train.steps to continue"
    finished = run.world.from_main(finished)
    if finished:
        run.world.say(f"{run.folder} is finished: {finished}")
    return bool(finished)


def open_run(run: Run) -> None:
    metrics = run.metrics
    print_banner(run)
    if run.validation is not None and run.config.eval.batches == "auto":
        bound_evaluation(run, run.validation)
    check_run(run)
    if run.world.is_main:
        run.folder.mkdir(parents=True, exist_ok=True)
        for path in quarantine_after(run.folder, run.step):
            run.world.warn(
                f"{path} was refused: it is kept under this name, and its steps are taken again"
            )
        if (run.folder / CONFIG).exists():
            keep_earlier_config(run)
        (run.folder / CONFIG).write_text(to_toml(run.config))
    metrics.open(run.folder, run.step, to_toml(run.config))
    if present("supervise.environment"):
        from dist_amp.supervise.environment import report_environment

        report_environment(run)


def keep_earlier_config(run: Run) -> None:
    """Rename the config of the steps so far, if it was another."""
    before = config_at(run.folder, run.step)
    if run.step and before.read_text() != to_toml(run.config):
        before.replace(run.folder / f"config_until_step_{run.step:08d}.toml")
    for path in run.folder.glob("config_until_step_*.toml"):
        if step_of(path) > run.step:  # of steps that are taken again
            path.unlink()


def bound_evaluation(run: Run, validation: Batches) -> None:
    """Resolve eval.batches=auto, so that evaluations take a tenth of the time; says so.

    A forward takes a third of a micro-batch's time (assumed). The samples are chosen at random,
    once, since datasets may be sorted by class.
    """
    config = run.config
    plan = validation.plan
    per_step = run.data.plan.global_batch_size / plan.global_batch_size  # micro-batches
    steps = min(float(config.eval.every), config.train.steps)
    batches = max(FEWEST_EVALUATED, int(0.1 * 3 * steps * per_step))
    samples = batches * plan.global_batch_size
    if samples >= plan.length:
        return
    run.config = replace(config, eval=replace(config.eval, batches=batches))
    if not hasattr(validation.fetch.dataset, "shuffled"):  # which would read Parquet at random
        validation.plan = replace(plan, order=shuffled_order(plan.length))
    run.world.say(
        f"eval   takes {samples:,} of the {plan.length:,} held-out samples, the same each time, "
        "and about a tenth of the run's time; --eval.batches all takes all samples"
    )


def close_run(run: Run, stop: Stop) -> int:
    """Write summary and sample; return the status. Errors: NumericsError if the end was skipped."""
    in_a_row = int(run.schedule.skips_in_a_row)
    if in_a_row > 1 or not run.schedule.applied_steps:
        amp = "precision.dtype=bf16 or --use_amp false, " if run.precision.name == "fp16" else ""
        raise NumericsError(
            f"the last {in_a_row} of {run.step} steps were skipped: their gradients were inf or "
            f"nan; use {amp}a lower optim.lr, or more steps if the loss scale was still falling, "
            "or check the task's loss and data"
        )
    early = ""
    if stop.by_task and run.step < run.config.train.steps:
        early = next(filter(None, run.world.gather(stop.ended_by)))
        run.world.say(
            f"ended after step {run.step} of {run.config.train.steps}: the task's {early}"
        )
    if hasattr(run.task, "sample") and present("supervise.sampling"):
        from dist_amp.supervise.sampling import show_sample

        show_sample(run)
    if run.world.is_main:
        summary = write_summary(run.folder, run, "completed", 0, early)
        print(closing_table(summary, run.folder), flush=True)
        print_next_command(run)
    return 0


def saved_summary(folder: Path) -> dict[str, Any]:
    """How the run ended last; empty where that is unknown."""
    with suppress(Exception):  # of many types, for a damaged one
        summary = {**json.loads((folder / "summary.json").read_text())}
        if isinstance(summary.get("steps", 0), int):
            return summary
    return {}


def write_summary(
    folder: Path, run: Run | None, stopped_by: str, exit_code: int, cause: str
) -> dict[str, Any]:
    """Write and return RUN/summary.json, by the last log step's metrics: it needs no other rank."""
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
    summary |= run.observers.tell("summary", failed)
    if ranks and all("mfu" in rank for rank in ranks):
        summary["mfu"] = sum(rank["mfu"] for rank in ranks) / len(ranks)
    if logged := metrics.last_logged:
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


def rank_entry(run: Run, rank: int, tags: Tags) -> dict[str, Any]:
    entry = {
        "rank": rank,
        # Before a resume there may have been more ranks.
        "host": dict(enumerate(run.metrics.hosts)).get(rank, ""),
        "peak_memory_bytes": int(tags["memory/peak_bytes"]),
        "items_per_second": tags["throughput/items_per_second"],
        "local_seconds": tags.get("time/local_seconds", 0.0),
        "tokens_per_second": tags.get("throughput/tokens_per_second", 0.0),
    }
    if "throughput/mfu" in tags:
        entry["mfu"] = tags["throughput/mfu"]
    return entry
