"""The lines that rank 0 prints at the start of a run, and the table at its end."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dist_amp.config.task_class import GIVEN
from dist_amp.errors import columns
from dist_amp.files import present, run_dir
from dist_amp.run import Run


def print_banner(run: Run) -> None:
    world = run.world
    plan = run.data.plan
    total = sum(p.numel() for p in run.parallel.module.parameters())
    trained = sum(p.numel() for p in run.parallel.parameters)
    start = "starting from scratch"
    if run.resumed_from is not None:
        start = f"resumed from step {run.step}"
        if not run.resumed_from.resolve().is_relative_to(run.folder.resolve()):
            start += f" ({run.resumed_from})"
    world.say(f"run    {run_dir(run.folder)}, {start}")
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
    board = "dist_amp board" if present("commands.board") else "tensorboard --logdir"
    world.say(f"watch  {board} {run.folder}")


def closing_table(summary: Mapping[str, Any], folder: Path) -> str:
    rows = [["rank", "host", "peak memory", "local s/step", "items/s"]]
    shows_tokens = any(rank["tokens_per_second"] for rank in summary["ranks"])
    rows[0] += ["tokens/s"] if shows_tokens else []
    rows[0] += ["mfu"] if "mfu" in summary else []
    for rank in summary["ranks"]:
        memory = f"{rank['peak_memory_bytes'] / 2**20:,.0f} MiB"
        row = [f"{rank['rank']}", rank["host"], memory, f"{rank['local_seconds']:.3g}"]
        row.append(f"{rank['items_per_second']:,.1f}")
        row += [f"{rank['tokens_per_second']:,.0f}"] if shows_tokens else []
        row += [f"{100 * rank['mfu']:.3g} %"] if "mfu" in summary else []
        rows.append(row)
    result = f"{summary['steps']} steps"
    # Absent if a resumed run only had to evaluate, and its metrics.jsonl was lost.
    if "final_loss" in summary:
        result += f" ({summary['applied_steps']} applied, {summary['skipped_steps']} skipped)"
    if math.isfinite(loss := float(summary.get("final_loss", math.nan))):
        result += f", loss {loss:.4f}"
    for name, value in summary["evaluation"].items():
        result += f", held-out {name} {value:.4f}"
    lines = [*columns(rows, left=2), f"done: {result}", f"all of it is in {run_dir(folder)}"]
    return "\n".join(lines)


def print_next_command(run: Run) -> None:
    """Print the command that exports the trained model, if it can build the run's task."""
    is_named = not run.config.task.target.startswith(GIVEN)
    if is_named and present("commands.export"):
        run.world.say(f"next: dist_amp export {run_dir(run.folder)} --out model")
