"""What a run prints at its start and end: a banner and a closing table."""

import importlib.metadata
import importlib.util
import math
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from dist_amp.config.task_class import GIVEN
from dist_amp.files import present, run_dir
from dist_amp.run import Run


def print_banner(run: Run) -> None:
    world = run.world
    plan = run.data.plan
    total = sum(p.numel() for p in run.parallel.module.parameters())
    trained = sum(p.numel() for p in run.parallel.parameters)
    first = "from step 0: it holds no checkpoint"
    if run.resumed_from is not None:
        first = resumed_text(run, run.resumed_from)
    world.say(f"run    {run_dir(run.folder)}, {first}")
    model = f"{total:,} parameters"
    if trained < total:
        model += f" ({trained:,} trained)"
    device = "CPU" if world.device.type == "cpu" else torch.cuda.get_device_name(world.device)
    model += f", {run.parallel.strategy} on {world.world_size} x {device}, {run.precision.name}"
    if run.precision.cast_by != "nothing":
        model += f" cast by {run.precision.cast_by}"
    world.say(f"model  {model}")
    accumulation = plan.global_batch_size // (plan.micro_batch_size * plan.world_size)
    batch = f"{plan.micro_batch_size} x {plan.world_size} ranks x {accumulation} micro-batches"
    world.say(f"batch  {plan.global_batch_size} samples = {batch}")
    held_out = "none evaluated (eval.every=off)"
    if run.config.eval.every != "off":
        held_out = f"{run.validation.plan.length if run.validation else 0:,} held out"
    world.say(f"data   {plan.length:,} samples to train on, {held_out}")
    watch = "dist_amp board" if present("commands.board") else "tensorboard --logdir"
    world.say(f"watch  {watch} {run.folder}")


def resumed_text(run: Run, source: Path) -> str:
    text = f"resumed from step {run.step}"
    if not source.resolve().is_relative_to(run.folder.resolve()):
        return f"{text} ({source})"
    asked = run.config.run.resume
    if asked not in ("auto", "never", str(source)):
        text += f"; it has continued since it began from run.resume={asked}"
    return text


def closing_table(summary: Mapping[str, Any], folder: Path) -> str:
    shows_tokens = any(rank["tokens_per_second"] for rank in summary["ranks"])
    header = f"{'rank':>4}  {'host':<20} {'peak memory':>12} {'local s/step':>13} {'items/s':>10}"
    if shows_tokens:
        header += f" {'tokens/s':>12}"
    if "mfu" in summary:
        header += f"{'mfu':>11}"
    rows = [header]
    for rank in summary["ranks"]:
        row = f"{rank['rank']:>4}  {rank['host']:<20} "
        row += f"{rank['peak_memory_bytes'] / 2**20:>8,.0f} MiB {rank['local_seconds']:>13.3g}"
        row += f" {rank['items_per_second']:>10,.1f}"
        if shows_tokens:
            row += f" {rank['tokens_per_second']:>12,.0f}"
        if "mfu" in summary:
            row += f" {100 * rank['mfu']:>8.3g} %"
        rows.append(row)
    result = f"{summary['steps']} steps"
    # Missing if a resumed run only had to evaluate, and its metrics.jsonl is lost.
    if "final_loss" in summary:
        result += f" ({summary['applied_steps']} applied, {summary['skipped_steps']} skipped)"
    if math.isfinite(loss := float(summary.get("final_loss", math.nan))):
        result += f", loss {loss:.4f}"
    for name, value in summary["evaluation"].items():
        result += f", held-out {name} {value:.4f}"
    if "start_seconds" in summary:
        seconds = summary["start_seconds"]
        longest = sorted(seconds, key=lambda phase: -seconds[phase])
        parts = ", ".join(f"{phase} {seconds[phase]:.1f}" for phase in longest[:4])
        parts = parts.replace("_", " ")
        rows.append(f"start {sum(seconds.values()):.1f} s to the first step: {parts}, ...")
    # Of a shorter run it only says how long a start takes.
    if "goodput" in summary and summary["wall_seconds"] > 60:
        applied = timedelta(seconds=round(summary["spent_seconds"]["applied_steps"]))
        wall = timedelta(seconds=round(summary["wall_seconds"]))
        share = f"{100 * summary['goodput']:.0f} %"
        rest = {k: v for k, v in summary["spent_seconds"].items() if k != "applied_steps"}
        most = "mostly " + max(rest, key=lambda kind: rest[kind]).replace("_", " ")
        most = most.replace("elsewhere", "starting, ending and pauses")
        rows.append(f"goodput {share}: {applied} of {wall} in applied steps; the rest: {most}")
    return "\n".join([*rows, f"done: {result}", f"all of it is in {run_dir(folder)}"])


def print_next_command(run: Run) -> None:
    """What exports the trained model, if the config names its task."""
    is_named = not run.config.task.target.startswith(GIVEN)
    if is_named and importlib.util.find_spec("dist_amp.export"):
        model = run.parallel.module
        for_transformers = hasattr(run.task, "export") or hasattr(model, "save_pretrained")
        form = " --format hf" if for_transformers else ""
        run.world.say(f"next: dist_amp export {run_dir(run.folder)} --out model{form}")
