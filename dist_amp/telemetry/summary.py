"""What a run reports at its start and end: the banner, RUN/summary.json and the closing table."""

import json
from pathlib import Path
from typing import Any

import torch

from dist_amp.run import Run
from dist_amp.runtime.files import write_durably
from dist_amp.telemetry.console import duration
from dist_amp.telemetry.tensorboard_view import watch_line
from dist_amp.telemetry.writers import plain_json


def print_banner(run: Run) -> None:
    """Print what is about to run."""
    world, plan, precision = run.world, run.data.plan, run.precision
    parameters = sum(p.numel() for p in run.parallel.module.parameters())
    trained = sum(p.numel() for p in run.parallel.parameters)
    of_which = f" ({trained:,} trained)" if trained < parameters else ""
    accumulation = plan.global_batch_size // (plan.micro_batch_size * plan.world_size)
    where = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    cast = f" cast by {precision.cast_by}" if precision.cast_by != "nothing" else ""
    start, source = ", from step 0: it holds no checkpoint", run.resumed_from
    if source is not None:
        own = source.resolve().is_relative_to(run.folder.resolve())
        start = f", resumed from step {run.step}" + ("" if own else f" ({source})")
        if own and run.config.run.resume not in ("auto", "never", str(source)):
            start += f"; it has gone on since it began from run.resume={run.config.run.resume}"
    held_out = f"{run.validation.plan.length if run.validation else 0:,} held out"
    if run.config.eval.every == "off":
        held_out = "none evaluated (eval.every=off)"
    world.say(
        f"run    {run.folder}{start}\n"
        f"model  {parameters:,} parameters{of_which}, {run.parallel.strategy} on {world.world_size} x {where}, "
        f"{precision.name}{cast}\n"
        f"batch  {plan.global_batch_size} samples = {plan.micro_batch_size} x {plan.world_size} ranks x "
        f"{accumulation} micro-batches\n"
        f"data   {plan.length:,} samples to train on, {held_out}\n"
        f"{watch_line(run.folder, hasattr(run.task, 'tokens'))}"
    )


def is_completed(folder: Path) -> bool:
    """Whether the run's summary says so; a run that was killed after its last checkpoint has none yet."""
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


def write_summary(folder: Path, run: Run | None, stopped_by: str, exit_code: int, cause: str) -> dict[str, Any]:
    """Write RUN/summary.json from the metrics of the last log step, so that no other rank is needed; return it."""
    summary: dict[str, Any] = {"stopped_by": stopped_by, "exit_code": exit_code, "cause": cause}
    if run is not None:
        logged, ranks = run.metrics.last_logged, run.metrics.rank_table()
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
            **run.metrics.goodput_summary(stopped_by == "failed"),
        }
        if ranks and all("mfu" in rank for rank in ranks):
            summary["mfu"] = sum(rank["mfu"] for rank in ranks) / len(ranks)
        if logged:
            applied, skipped = logged["step"] - logged["amp/skipped_steps"], logged["amp/skipped_steps"]
            if stopped_by != "failed":  # else of the last log step: the device may not answer any more
                applied, skipped, _ = run.schedule.counters.tolist()
            summary |= {
                "applied_steps": int(applied),
                "skipped_steps": int(skipped),
                "final_loss": logged["train/loss"],
                "loss_scale": logged["amp/loss_scale"],
            }
    write_durably(folder / "summary.json", json.dumps(plain_json(summary), indent=2) + "\n")
    return summary


def closing_table(summary: dict[str, Any], folder: Path) -> str:
    """Each rank's throughput and memory, the result, and the run's folder."""
    rows = [f"{'rank':>4}  {'host':<20} {'peak memory':>12} {'items/s':>10}"]
    for rank in summary["ranks"]:
        rows.append(
            f"{rank['rank']:>4}  {rank['host']:<20} {rank['peak_memory_bytes'] / 2**20:>8,.0f} MiB "
            f"{rank['items_per_second']:>10,.1f}"
        )
    if any(rank["tokens_per_second"] for rank in summary["ranks"]):
        tokens = [f" {'tokens/s':>12}", *(f" {rank['tokens_per_second']:>12,.0f}" for rank in summary["ranks"])]
        rows = [row + column for row, column in zip(rows, tokens, strict=True)]
    if "mfu" in summary:
        mfu = [f"{'mfu':>11}", *(f" {100 * rank['mfu']:>8.3g} %" for rank in summary["ranks"])]
        rows = [row + column for row, column in zip(rows, mfu, strict=True)]
    result = f"{summary['steps']} steps"
    if "final_loss" in summary:  # missing if a resumed run only had to evaluate and its metrics.jsonl is lost
        result += f" ({summary['applied_steps']} applied, {summary['skipped_steps']} skipped)"
        result += f", loss {float(summary['final_loss']):.4f}"
    result += "".join(f", held-out {name} {value:.4f}" for name, value in summary["evaluation"].items())
    rows.append(
        f"goodput {100 * summary['goodput']:.0f} %: {duration(summary['spent_seconds']['applied_steps'])} of "
        f"{duration(summary['wall_seconds'])} in applied steps"
    )
    return "\n".join([*rows, f"done: {result}", f"all of it is in {folder}"])
