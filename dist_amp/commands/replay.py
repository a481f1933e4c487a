"""python -m dist_amp.replay RUN --step N [SETTINGS]: repeat a run's steps, and inspect one of them.

It runs in one process, from the newest valid checkpoint before step N, or from the start. Each
logged loss, norm and learning rate is compared with RUN/metrics.jsonl: bit for bit if the run had
parallel.bit_exact or one process, on this kind of device, uncompiled; else within a tolerance.
For step N it shows each micro-batch's samples and loss; each layer's largest output, share of
zeros, number of inf and nan, and gradient norm; and the effect of the loss scaler and of clipping.
RUN is not changed.

Exit status: 0 all as logged, 1 a value differs, 64 bad arguments, 65 no run, checkpoint or data.

Docs: docs/debugging.md
"""

import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dist_amp.checkpoint.format import config_at, read_manifest, step_of
from dist_amp.checkpoint.resume import newest_valid
from dist_amp.checkpoint.state import load
from dist_amp.config.auto import accumulation_steps
from dist_amp.config.load import collect, load_saved
from dist_amp.data import Padding
from dist_amp.diagnostics.nonfinite_replay import find_in_micro_batches
from dist_amp.diagnostics.trace import Event, Summarize, class_name, clean_name, recorded_step
from dist_amp.distributed.process import random_state, set_random_state
from dist_amp.errors import CheckpointRejected, ConfigError, DataError, columns
from dist_amp.precision import TOLERANCE
from dist_amp.record import Record
from dist_amp.run import ScriptRun, build_run
from dist_amp.settings import CompileConfig, Config
from dist_amp.supervise.callbacks import Callbacks
from dist_amp.supervise.command_line import Parser, command
from dist_amp.supervise.environment import edited_since
from dist_amp.supervise.stop import AgreedStop
from dist_amp.telemetry.step_report import StepReport
from dist_amp.world import locate

COMPARED = ("train/loss", "train/grad_norm", "train/lr", "amp/loss_scale", "amp/skipped_steps")
# Settings that don't change what a step computes. A checkpoint's fingerprint checks the data.
WITHOUT_EFFECT = (
    *("run.dir", "run.device", "run.resume", "task.target", "parallel.strategy", "compile."),
    *("data.name", "data.path", "data.workers", "eval.", "checkpoint.", "metrics.", "debug."),
)


@dataclass
class Replay:
    run: ScriptRun
    rows: Mapping[int, Mapping[str, Any]]  # {step: the metrics that were logged}
    tolerance: float  # relative; 0: the same bits
    expected: str  # in words: how closely the values should agree with the log, and why
    start: str  # a checkpoint's name, or "its start"
    callbacks: Callbacks
    edited: str  # a warning if the task's source file was edited since; or ""
    compared: int = 0  # how many logged steps
    differences: list[str] = field(default_factory=list)

    def step(
        self, micro_batches: Any = None, summarize: Summarize = len, kinds: Sequence[str] = ()
    ) -> tuple[StepReport, list[Event]]:
        """Take the next step, and compare it if it was logged. Arguments: see recorded_step."""
        run = self.run
        if micro_batches is None:
            micro_batches = next(run.data)
        report, events = recorded_step(run, micro_batches, summarize, kinds)
        run.metrics.after_step(report)
        self.callbacks.after_step(report, micro_batches)
        if run.step in self.rows:
            self.compare(self.rows[run.step])
        return report, events

    def compare(self, logged: Mapping[str, Any]) -> None:
        """Compare the interval's metrics with a line of metrics.jsonl, and print the step."""
        run = self.run
        run.metrics.begin(run.step, run.schedule, run.scaler, run.data)
        row = run.metrics.read()
        assert row is not None
        now = row.global_tags()
        self.compared += 1
        text = []
        for name in COMPARED:
            before = float(logged.get(name, now[name]))
            error = abs(now[name] - before) / max(abs(before), 1e-30)
            if now[name] != before and not (math.isnan(before) and math.isnan(now[name])):
                text.append(f"{name} {before:.9g}, now {now[name]:.9g} ({error:.1e})")
                if not error <= self.tolerance:
                    self.differences.append(f"step {run.step}: {text[-1]}")
        same = "; ".join(text) or "the same bits"
        print(f"step {run.step:>6}  loss {now['train/loss']:.6f}  {same}", flush=True)

    def outcome(self) -> str:
        if self.differences:
            return f"differs from what was logged, first at {self.differences[0]}"
        if not self.compared:
            return "nothing was compared: settings differ, or metrics.jsonl has none of these steps"
        if not self.tolerance:
            return "all as logged"
        return f"all within {self.tolerance:g} of what was logged"


def run_at(folder: Path, step: int, argv: Sequence[str] = ()) -> Replay:
    """Rebuild the run in this process, at its newest valid checkpoint before `step`, or its start.

    argv: settings that override the run's. Raises ConfigError, DataError.
    """
    record = Record(folder)
    started_from = record.settings_at(step)["run.resume"]
    rows = {number: row for number, row in record.steps.items() if "train/loss" in row}
    checkpoints = record.checkpoints
    last = max([0, *rows, *map(step_of, checkpoints)])
    if not 1 <= step <= last:
        raise ConfigError(f"--step {step}: {folder} took the steps 1 to {last}; choose one of them")
    config = load_saved(config_at(folder, step), argv)
    world = locate(config.run)
    checkpoint = newest_valid([path for path in checkpoints if step_of(path) < step], world)
    if checkpoint is None and started_from not in ("auto", "never"):
        raise DataError(
            f"--step {step}: {folder} started from {started_from}, and has no checkpoint "
            "before this step; choose a step after its first checkpoint, or replay that run"
        )
    before = 0 if checkpoint is None else step_of(checkpoint)
    if config_at(folder, before + 1) != config_at(folder, step):
        raise DataError(
            f"--step {step}: the settings changed since step {before}, the newest checkpoint "
            "before this step; choose an earlier step"
        )
    # Take ranks and device from the first readable checkpoint from this step on, else the last one.
    ranks, device = len(next(iter(rows.values()), {}).get("ranks", "1")), world.device.type
    later = [path for path in checkpoints if step_of(path) >= step]
    for path in (*later, *reversed(checkpoints)):
        with suppress(CheckpointRejected):
            manifest = read_manifest(path)
            ranks, device = manifest.world_size, manifest.device
            break
    run = build_run(on_one_process(config, ranks), world, resumes=checkpoint is not None)
    if checkpoint is not None:
        load(run, checkpoint)
    reasons = []
    if ranks != 1 and not config.parallel.bit_exact:
        reasons.append(f"{ranks} ranks summed in another order, and drew other random numbers")
    if config.compile.blocks and (config.compile.blocks != "auto" or device == "cuda"):
        reasons.append("the run was compiled, but its replay is not")
    if device != world.device.type:
        reasons.append(f"it ran on {device}, not on {world.device.type}")
    tolerance = TOLERANCE[run.precision.name] if reasons else 0.0
    expected = f"values within {tolerance:g} of what was logged, since {', and '.join(reasons)}"
    if not reasons:
        expected = "the same bits, since it was bit-exact or had one process"
    changed = [key for key in collect(argv) if not key.startswith(WITHOUT_EFFECT)]
    if changed:
        rows = {}
        expected = f"different values than were logged, since you set {', '.join(changed)}"
    start = "its start" if checkpoint is None else checkpoint.name
    callbacks = Callbacks(run, AgreedStop(world))
    edited = edited_since(folder, run.task)
    return Replay(run, rows, tolerance, expected, start, callbacks, edited)


def on_one_process(config: Config, ranks: int) -> Config:
    """The config that computes the same steps in one process, not compiled, without evaluation."""
    batch = config.train.global_batch_size
    if batch == "auto":
        batch = config.train.micro_batch_size * accumulation_steps(config.train, 1) * ranks
    cast_by = config.precision.cast_by
    if cast_by == "policy":  # FSDP2's, which one process can't use
        cast_by = "auto"
    return replace(
        config,
        train=replace(config.train, global_batch_size=batch, accumulation_steps="auto"),
        parallel=replace(config.parallel, strategy="single", cpu_offload=False),
        precision=replace(config.precision, cast_by=cast_by),
        compile=CompileConfig(blocks=False),
        data=replace(config.data, workers=0 if config.parallel.bit_exact else config.data.workers),
        eval=replace(config.eval, every="off"),
    )


# ---- one step


class Statistics(NamedTuple):
    """Statistics of a module's outputs in one call, or of a gradient."""

    largest: float
    zeros: int
    nonfinite: int
    elements: int
    square: float  # the sum of squares


def statistics_of(values: Sequence[Tensor]) -> Statistics:
    floats = [value.flatten().float() for value in values if value.is_floating_point()]
    flat = torch.cat(floats) if floats else torch.empty(0)
    finite = flat[flat.isfinite()]
    return Statistics(
        largest=float(finite.abs().max()) if finite.numel() else 0.0,
        zeros=int((finite == 0).sum()),
        nonfinite=flat.numel() - finite.numel(),
        elements=flat.numel(),
        square=float(flat.double().square().sum()),
    )


def layers_table(module: nn.Module, events: Sequence[Event], norm: float) -> list[str]:
    """A line for the model, and for each module with parameters of its own or no submodules.

    norm: of all gradients, unscaled and unclipped. The events have gradients as the optimizer got
    them; they are rescaled to this norm, unless it is nan.
    """
    calls: dict[str, list[Statistics]] = defaultdict(list)
    squares: dict[str, float] = defaultdict(float)
    for event in events:
        if event.kind == "update":
            squares[event.module] += event.values.square
        elif event.kind == "forward":
            calls[event.module].append(event.values)
    total = math.sqrt(sum(squares.values()))
    factor = norm / total if total and math.isfinite(norm / total) else 1.0
    rows = [["layer", "class", "largest", "zeros %", "not finite", "gradient"]]
    for name, part in module.named_modules():
        name = clean_name(name)
        if name and not part._parameters and list(part.children()):
            continue
        outputs = calls[name]
        largest = max((output.largest for output in outputs), default=0.0)
        elements = max(1, sum(output.elements for output in outputs))
        zeros = 100 * sum(output.zeros for output in outputs) / elements
        nonfinite = sum(output.nonfinite for output in outputs)
        gradient = factor * math.sqrt(squares[name]) if name else factor * total
        numbers = [f"{largest:.3e}", f"{zeros:.1f}", f"{nonfinite}", f"{gradient:.3e}"]
        rows.append([name or "the model", class_name(part), *numbers])
    return [f"  {line}" for line in columns(rows, left=2)]


def show_step(replay: Replay) -> None:
    run = replay.run
    position = run.data.position
    micro_batches = next(run.data)
    indexed = run.data.last_step
    random = random_state(run.world.device)
    scale = run.scaler.get_scale()
    report, events = replay.step(micro_batches, statistics_of, ("forward", "update"))
    print(f"\nstep {run.step}, after {position:,} samples")
    for number, (batch, samples) in enumerate(indexed):
        content = batch.batch if isinstance(batch, Padding) else batch
        loss = float(report.losses[number])
        weight = float(torch.as_tensor(run.task.weight(content)))
        shown = ", ".join(map(str, samples[:16])) + (", ..." if len(samples) > 16 else "")
        print(f"  micro-batch {number}: loss {loss:.6g}, weight {weight:g}, samples {shown}")
    norm = float(report.norm)
    applied = bool(report.applied)
    clip = run.clip
    factor = min(1.0, clip.limit / (norm + 1e-6)) if clip.by == "norm" else 1.0
    print(
        f"  gradient norm {norm:.6g}, clipped by {clip.by} (factor {factor:.4g}), loss scale "
        f"{scale:g}, {'applied' if applied else 'skipped: the norm is not finite'}"
    )
    unclipped = math.nan if clip.by == "value" else norm  # no factor undoes clipping by value
    print("\n".join(layers_table(run.parallel.module, events, unclipped)))
    if not applied:
        with run.parallel.no_side_effects():
            set_random_state(random, run.world.device)
            fault = find_in_micro_batches(run, run.step, indexed, run.task)
        print(f"  {fault or 'every micro-batch is finite at a loss scale of 1: the norm is not'}")


@command()
def main(argv: Sequence[str]) -> int:
    parser = Parser("python -m dist_amp.replay", __doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("--step", type=int, required=True, help="the step to show, from 1 on")
    options, settings = parser.parse_known_args(argv)
    replay = run_at(options.run, options.step, settings)
    if replay.edited:
        print(f"{replay.edited}: these steps run other code")
    ahead = options.step - replay.run.step
    print(f"replay {options.run} from {replay.start}: {ahead} steps on one process")
    print(f"expect {replay.expected}", flush=True)
    try:
        while replay.run.step < options.step - 1:
            replay.step()
        show_step(replay)
    finally:
        replay.run.close()
    print(f"\n{replay.outcome()}")
    return bool(replay.differences)


if __name__ == "__main__":
    sys.exit(main())
