"""python -m dist_amp.replay RUN --step N [SETTINGS]: take a run's steps again, and look into one.

On one process, from the newest valid checkpoint before step N, or from the start. Each logged loss,
norm and learning rate is compared with RUN/metrics.jsonl: bit for bit where the run had
parallel.bit_exact or one process, else within a tolerance. Of step N it shows each micro-batch's
samples and loss, each layer's largest output, its share of zeros and what is not finite, its
gradient's norm, and what the loss scaler and the clip did. RUN is not changed.

Exit status: 0 nothing differs from what was logged, 1 something does, 64 bad arguments, 65 no run,
checkpoint or data.

Docs: docs/debugging.md
"""

import bdb
import math
import pdb  # noqa: T100 (what --pdb is for)
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils._pytree import tree_leaves

from dist_amp.checkpoint.format import config_at, read_manifest, step_of
from dist_amp.checkpoint.resume import newest_valid
from dist_amp.checkpoint.state import load
from dist_amp.config.auto import SHARDED, accumulation_steps, batch_statistics, pick_cast
from dist_amp.config.load import collect, load_saved
from dist_amp.config.text import flat, to_toml
from dist_amp.data import Indexed, Padding
from dist_amp.diagnostics.nonfinite_replay import NonFinite, find_in_micro_batches
from dist_amp.diagnostics.trace import Event, class_name, clean_name, recorded
from dist_amp.distributed.process import random_state, set_random_state
from dist_amp.errors import CheckpointRejected, ConfigError, DataError
from dist_amp.files import read_rows
from dist_amp.precision import TOLERANCE
from dist_amp.record import Record
from dist_amp.run import ScriptRun, build_run
from dist_amp.settings import CompileConfig, Config
from dist_amp.step import train_step
from dist_amp.supervise.callbacks import Callbacks
from dist_amp.supervise.command_line import Parser, columns, command
from dist_amp.supervise.environment import edited_since
from dist_amp.supervise.stop import AgreedStop
from dist_amp.telemetry.step_report import StepReport
from dist_amp.world import World, locate

COMPARED = ("train/loss", "train/grad_norm", "train/lr", "amp/loss_scale", "amp/skipped_steps")
# Settings by which a step computes the same; what data they name is checked by its fingerprint.
FREE = (
    *("run.dir", "run.device", "run.resume", "task.target", "parallel.strategy", "compile."),
    *("data.name", "data.path", "data.workers", "eval.", "checkpoint.", "metrics.", "debug."),
)
SHOWN_TEXT = 200  # characters of a sample
SHOWN_SAMPLES = 4  # of a micro-batch


@dataclass
class Replay:
    """A run that takes its steps again. rows: what it logged, by step."""

    folder: Path
    run: ScriptRun
    rows: dict[int, dict[str, Any]]
    tolerance: float  # 0: the same bits
    expected: str  # how far it should agree with the log, and why, in words
    start: str
    callbacks: Callbacks
    edited: str  # a text if the task's source file was edited since; or ""
    compared: int = 0  # logged steps
    differences: list[str] = field(default_factory=list)
    random: bool = False  # whether its steps draw random numbers that the run did not

    def step(self, micro_batches: Sequence[Any] | None = None) -> StepReport:
        """Take the next step, and compare it if it was logged."""
        run = self.run
        before = random_state(run.world.device)
        if micro_batches is None:
            micro_batches = next(run.data)
        report = train_step(run, micro_batches)
        run.metrics.record(report)
        self.callbacks.after_step(report, micro_batches)
        if self.tolerance:
            after = random_state(run.world.device)
            del after["python_gauss"]  # a nan
            self.random |= any(not after[name].equal(before[name]) for name in after)
        if run.step in self.rows:
            self._compare(self.rows[run.step])
        return report

    def _compare(self, logged: Mapping[str, Any]) -> None:
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
                if not error <= self.tolerance and not self.random:
                    self.differences.append(f"step {run.step}: {text[-1]}")
        same = "; ".join(text) or "the same bits"
        if self.tolerance and not self.random and not self.differences:
            same = f"within {self.tolerance:g}: {same}"
        if text or self.compared < 5 or self.compared % 100 == 0:
            print(f"step {run.step:>6}  loss {now['train/loss']:.6f}  {same}", flush=True)

    def outcome(self) -> str:
        if self.differences and self.edited:
            return f"{self.edited}: so it differs from what was logged, {self.differences[0]}"
        if self.differences:
            return f"differs from what was logged, first at {self.differences[0]}"
        if not self.compared:
            return "nothing was compared: settings differ, or metrics.jsonl has none of these steps"
        if self.random:
            return (
                "losses and norms are not judged: steps draw random numbers, which differ by rank "
                "in a run that is not bit-exact, by device, and in compiled code"
            )
        if self.tolerance:
            return f"all within {self.tolerance:g} of what was logged"
        return "all as logged"


def run_at(folder: Path, step: int, argv: Sequence[str] = ()) -> Replay:
    """The run on this process, at its newest checkpoint before a step.

    argv: settings that override the run's. Errors: ConfigError, DataError.
    """
    record = Record(folder)
    saved = record.settings_at(step)
    rows = {row["step"]: row for row in record.rows if "train/loss" in row}
    checkpoints = record.checkpoints
    last = max([0, *rows, *map(step_of, checkpoints)])
    if not last:
        raise DataError(f"{folder} has logged no step and saved none; give another run's folder")
    if not 1 <= step <= last:
        raise ConfigError(f"--step {step}: {folder} has taken the steps 1 to {last}; choose one")
    config = load_saved(config_at(folder, step), argv)
    world = locate(config.run)
    if world.world_size > 1:
        raise ConfigError("a replay takes one process; start it without torchrun")
    checkpoint = newest_valid([path for path in checkpoints if step_of(path) < step], world)
    if checkpoint is None and config.run.resume not in ("auto", "never"):
        first = min(map(step_of, checkpoints), default=last) + 1
        raise DataError(
            f"--step {step}: {folder} started from {config.run.resume}, and has no checkpoint "
            f"before this step; choose a step from {first} on, or replay that run"
        )
    before = 0 if checkpoint is None else step_of(checkpoint)
    changed_at = config_at(folder, before + 1)
    if changed_at != config_at(folder, step):
        raise DataError(
            f"--step {step}: the settings changed after step {step_of(changed_at)}, and the newest "
            f"checkpoint before this step is of step {before}; choose an earlier step"
        )
    nearest = min(rows, key=lambda logged: abs(logged - step), default=0)
    ranks, strategy, device = layout_at(step, checkpoints, rows.get(nearest, {}), world)
    single = on_one_process(config, ranks)
    run = build_run(single, world, resumes=checkpoint is not None)
    if checkpoint is not None:
        load(run, checkpoint)
    exact = config.parallel.bit_exact
    why = []
    if ranks != 1 and not exact:
        why.append(f"{ranks} ranks added in another order")
        if batch_statistics(run.parallel.module):
            why.append("batch norm saw other batches")
    compiled = config.compile.blocks
    if compiled and (compiled != "auto" or device == "cuda"):
        why.append("the run was compiled, and its replay is not")
    cast = pick_cast(config.precision, strategy, run.parallel.module, world)
    if strategy in SHARDED and cast.use_amp and cast.cast_by != "autocast" and not exact:
        why.append("FSDP2's policy rounded otherwise than autocast does")
    if device != world.device.type:
        why.append(f"it ran on {device}, not on {world.device.type}")
    tolerance = TOLERANCE[run.precision.name] if why else 0.0
    expected = f"values within {tolerance:g} of what was logged, since {', and '.join(why)}"
    if not why:
        reason = "it was bit-exact" if exact else "it had one process"
        expected = f"the same bits, since {reason}"
    if changed := changed_settings(config, saved, argv):
        rows = {}
        expected = f"other values than were logged, since you changed {', '.join(changed)}"
    start = "its start" if checkpoint is None else checkpoint.name
    callbacks = Callbacks(run, AgreedStop(world))
    edited = edited_since(folder, run.task)
    return Replay(folder, run, rows, tolerance, expected, start, callbacks, edited)


def changed_settings(config: Config, saved: Mapping[str, Any], argv: Sequence[str]) -> list[str]:
    """The settings that change what a step computes, with their values, and those of the run."""
    now = flat(to_toml(config))
    return [
        f"{key}={now[key]} (it had {saved.get(key, 'none')})"
        for key in sorted({*saved, *collect(argv)} & now.keys())
        if now[key] != saved.get(key) and not key.startswith(FREE)
    ]


def on_one_process(config: Config, ranks: int) -> Config:
    """The config of the same steps on one process, without what a replay does not need."""
    batch = config.train.global_batch_size
    if batch == "auto":
        batch = config.train.micro_batch_size * accumulation_steps(config.train, 1) * ranks
    cast_by = config.precision.cast_by
    if cast_by == "policy":
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


def layout_at(
    step: int, checkpoints: Sequence[Path], logged: Mapping[str, Any], world: World
) -> tuple[int, Any, str]:
    """(ranks, strategy, type of device) of a step, as far as known. logged: a line near it."""
    later = [path for path in checkpoints if step_of(path) >= step]
    for path in (*later, *reversed(checkpoints)):
        try:
            manifest = read_manifest(path)
        except CheckpointRejected as error:
            world.warn(f"{path}: {error}; another checkpoint says on how many ranks the run was")
            continue
        return manifest.world_size, manifest.strategy, manifest.device
    return len(logged.get("ranks", "1")), "unknown", world.device.type


# ---- one step


class Layer(NamedTuple):
    """What the outputs of a module's call held, or a gradient."""

    largest: float
    zeros: int
    nonfinite: int
    elements: int
    square: float  # the sum of squares


def layer_of(values: Sequence[Tensor]) -> Layer:
    floats = [value.flatten().float() for value in values if value.is_floating_point()]
    flat = torch.cat(floats) if floats else torch.empty(0)
    finite = flat[flat.isfinite()]
    return Layer(
        largest=float(finite.abs().max()) if finite.numel() else 0.0,
        zeros=int((finite == 0).sum()),
        nonfinite=flat.numel() - finite.numel(),
        elements=flat.numel(),
        square=float(flat.double().square().sum()),
    )


def layers_table(module: nn.Module, events: Sequence[Event], norm: float) -> list[str]:
    """A line for each module with parameters or without parts, and for the model.

    norm: that of the model's gradients, by which the scaling and clipping of what the optimizer
    got is undone; nan where it can't be.
    """
    calls: dict[str, list[Layer]] = defaultdict(list)
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
        largest = max((layer.largest for layer in outputs), default=0.0)
        elements = max(1, sum(layer.elements for layer in outputs))
        zeros = 100 * sum(layer.zeros for layer in outputs) / elements
        nonfinite = sum(layer.nonfinite for layer in outputs)
        gradient = factor * math.sqrt(squares[name]) if name else factor * total
        numbers = [f"{largest:.3e}", f"{zeros:.1f}", f"{nonfinite}", f"{gradient:.3e}"]
        rows.append([name or "the model", class_name(part), *numbers])
    return [f"  {line}" for line in columns(rows, left=2)]


def show_step(replay: Replay, options: Any) -> None:
    """Take the step that comes next, and print what it did."""
    run = replay.run
    position = run.data.position
    micro_batches = next(run.data)
    indexed = run.data.last_step
    random = random_state(run.world.device)
    scale = run.scaler.get_scale()
    task = run.task
    if options.pdb:
        run.task = Stopping(run, indexed)  # type: ignore[assignment]
    with recorded(run, layer_of, ("forward", "update")) as events:
        if options.profile:
            report = profiled_step(replay, micro_batches)
        else:
            report = replay.step(micro_batches)
    run.task = task
    print(f"\nstep {run.step}, after {position:,} samples")
    for number, (batch, samples) in enumerate(indexed):
        content = batch.batch if isinstance(batch, Padding) else batch
        loss = float(report.losses[number])
        weight = float(torch.as_tensor(task.weight(content)))
        shown = ", ".join(map(str, samples[:16])) + (", ..." if len(samples) > 16 else "")
        print(f"  micro-batch {number}: loss {loss:.6g}, weight {weight:g}, samples {shown}")
        for text in shown_samples(task, content):
            print(f"    {text}")
        if options.pictures:
            name = f"replay_step_{run.step}_micro_batch_{number}.png"
            print(f"    {write_pictures(content, name)}")
    norm = float(report.norm)
    applied = bool(report.applied)
    clip = run.clip
    factor = min(1.0, clip.limit / (norm + 1e-6)) if clip.by == "norm" else 1.0
    unclipped = math.nan if clip.by == "value" else norm
    print(
        f"  gradient norm {norm:.6g}, clipped by {clip.by} (factor {factor:.4g}), loss scale "
        f"{scale:g}, {'applied' if applied else 'skipped: the norm is not finite'}"
    )
    print("\n".join(layers_table(run.parallel.module, events, unclipped)))
    if not applied:
        with run.parallel.no_side_effects():
            set_random_state(random, run.world.device)
            fault = find_in_micro_batches(run, run.step, indexed, task)
        print(f"  {fault or 'every micro-batch is finite at a loss scale of 1: the norm is not'}")
    else:
        for report_of_run in read_rows(replay.folder / "nonfinite/reports.jsonl")[0]:
            if report_of_run["step"] == run.step:
                print(
                    "  the run skipped this step, and the replay did not reproduce it: all is "
                    f"finite; there it was {NonFinite.from_dict(report_of_run)}"
                )


def shown_samples(task: Any, batch: Any) -> list[str]:
    """The first samples of a batch as text, if the task has a tokenizer; else its tensors."""
    decode = getattr(getattr(task, "tokenizer", None), "decode", None)
    for key in ("input_ids", "tokens"):
        if decode is not None and isinstance(batch, Mapping) and key in batch:
            rows = batch[key][:SHOWN_SAMPLES].tolist()
            return [repr(decode([i for i in row if i >= 0]))[:SHOWN_TEXT] for row in rows]
    texts = []
    for tensor in tree_leaves(batch):
        if isinstance(tensor, Tensor) and tensor.numel():
            span = f"{tensor.min().item():.4g} to {tensor.max().item():.4g}"
            texts.append(f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, {span}")
    return texts


def write_pictures(batch: Any, name: str) -> str:
    """Write the first images [samples, 1 or 3, H, W] of a batch side by side, scaled to 0..255.

    Returns where, or why not.
    """
    for images in tree_leaves(batch):
        if isinstance(images, Tensor) and images.ndim == 4 and images.shape[1] in (1, 3):
            row = torch.cat([*images[:SHOWN_SAMPLES].float().cpu()], dim=2)
            row = (row - row.min()) / (row.max() - row.min()).clamp(min=1e-9)
            pixels = (255 * row).byte().expand(3, -1, -1).permute(1, 2, 0)
            Image.fromarray(pixels.numpy()).save(name)
            return str(Path(name).resolve())
    return "no picture: the batch has no tensor of the shape [samples, 1 or 3, height, width]"


class Stopping:
    """A task that stops in pdb before each backward, with run, batch, samples and loss at hand."""

    def __init__(self, run: ScriptRun, indexed: Indexed):
        self.task = run.task
        self._run = run
        self._samples = iter([samples for _, samples in indexed])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        run = self._run
        samples = next(self._samples)
        loss = self.task.loss_sum(model, batch)
        print(
            f"step {run.step + 1}, before the backward of samples {samples}; `batch` is what the "
            "task gets, `loss` what backward starts from (not yet divided by the step's weight, "
            "nor scaled), `run.parallel.module` the model; c continues, q ends",
            flush=True,
        )
        pdb.set_trace()  # noqa: T100
        return loss


def profiled_step(replay: Replay, micro_batches: Sequence[Any]) -> StepReport:
    """The step under torch.profiler: its trace in this folder, its longest operations printed."""
    with profile() as profiler:
        report = replay.step(micro_batches)
    path = Path(f"replay_step_{replay.run.step}.json")
    profiler.export_chrome_trace(str(path))
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=10))
    print(f"trace   {path.resolve()}; open it in ui.perfetto.dev")
    return report


@command()
def main(argv: Sequence[str]) -> int:
    parser = Parser("python -m dist_amp.replay", __doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("--step", type=int, required=True, help="the step to show, from 1 on")
    parser.add_argument("--profile", action="store_true", help="trace the step")
    parser.add_argument("--pictures", action="store_true", help="write its images here, as PNG")
    parser.add_argument("--pdb", action="store_true", help="stop before each of its backwards")
    options, settings = parser.parse_known_args(argv)
    replay = run_at(options.run, options.step, settings)
    if replay.edited:
        print(f"{replay.edited}: these are the steps of another code")
    ahead = options.step - replay.run.step
    print(f"replay {options.run} from {replay.start}: {ahead} steps on one process")
    print(f"expect {replay.expected}", flush=True)
    try:
        while replay.run.step < options.step - 1:
            replay.step()
        show_step(replay, options)
    except bdb.BdbQuit:
        print(f"ended before step {replay.run.step + 1} was taken")
        return 0
    finally:
        replay.run.close()
    print(f"\n{replay.outcome()}")
    return bool(replay.differences)


if __name__ == "__main__":
    sys.exit(main())
