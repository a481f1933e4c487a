"""python -m dist_amp.replay RUN --step N [SETTINGS]: take a run's steps again, and look into one.

On one process, from the newest valid checkpoint before step N, or from the start. Each logged loss,
norm and learning rate is compared with RUN/metrics.jsonl: bit for bit where the run had
parallel.bit_exact or one process, else within a tolerance. Of step N it shows each micro-batch's
samples and loss, each layer's largest output, its share of zeros and what is not finite, its
gradient's norm, and what the loss scaler and the clip did. RUN is not changed.

Exit status: 0 all as logged, 1 something differs, 64 bad arguments, 65 no run, checkpoint or data.
"""

import bdb
import json
import math
import pdb  # noqa: T100 (what --pdb is for)
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from dist_amp.checkpoint.format import CONFIG, all_checkpoints, read_manifest
from dist_amp.checkpoint.resume import newest_valid
from dist_amp.checkpoint.state import load
from dist_amp.config.auto import batch_statistics
from dist_amp.config.load import flat, load_saved, to_toml
from dist_amp.data import Indexed
from dist_amp.diagnostics.nonfinite import class_name, clean_name, unpadded
from dist_amp.diagnostics.nonfinite_replay import find_in_micro_batches
from dist_amp.errors import CheckpointRejected, ConfigError, DataError
from dist_amp.run import ScriptRun, build_run
from dist_amp.settings import Config
from dist_amp.step import train_step
from dist_amp.supervise.callbacks import Callbacks
from dist_amp.supervise.command_line import Parser, columns, exit_status
from dist_amp.supervise.stop import AgreedStop
from dist_amp.telemetry.step_report import StepReport
from dist_amp.telemetry.writers import read_jsonl
from dist_amp.world import locate

COMPARED = ("train/loss", "train/grad_norm", "train/lr", "amp/loss_scale", "amp/skipped_steps")
# Relative difference of losses and norms that other sums explain, and that grows with each step.
# Measured with the demo in float32: 7e-5 after 100 steps at 1 and 2 ranks; the others are assumed.
TOLERANCE = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.05}
# Settings that may be given: they do not change what is computed.
ALLOWED = ("run.device", "data.path", "data.workers", "debug.", "metrics.", "train.global_batch")
SHOWN_TEXT = 200  # characters of a sample
SHOWN_SAMPLES = 4  # of a micro-batch


@dataclass
class Replay:
    """A run again, before the step that is taken next. rows: what it logged, by step."""

    run: ScriptRun
    rows: dict[int, dict[str, Any]]
    tolerance: float  # 0: the same bits
    reason: str  # of the tolerance
    start: str
    callbacks: Callbacks
    differences: list[str] = field(default_factory=list)
    compared: int = 0  # steps
    draws: bool = False  # the model draws random numbers
    ranks_drew: bool = False  # several ranks did, each other ones

    def step(self, micro_batches: Sequence[Any] | None = None) -> StepReport:
        """Take the next step, and compare it if it was logged."""
        if micro_batches is None:
            micro_batches = next(self.run.data)
        before = torch.get_rng_state()
        report = train_step(self.run, micro_batches)
        self.draws |= not torch.equal(before, torch.get_rng_state())
        self.run.metrics.record(report)
        self.callbacks.after_step(report, micro_batches)
        if self.run.step in self.rows:
            self._compare(self.rows[self.run.step])
        return report

    def _compare(self, logged: Mapping[str, Any]) -> None:
        run = self.run
        self.compared += 1
        run.metrics.begin(run.step, run.schedule, run.scaler, run.data)
        row = run.metrics.read()
        assert row is not None
        now = row.global_tags()
        text = []
        for name in COMPARED:
            if name not in logged:
                continue
            before = float(logged[name])
            error = abs(now[name] - before) / max(abs(before), 1e-30)
            if now[name] != before and not (math.isnan(before) and math.isnan(now[name])):
                change = f"{name} {before:.9g}, now {now[name]:.9g} ({error:.1e}"
                if error <= self.tolerance:
                    text.append(f"{change}, within {self.tolerance:g})")
                    continue
                text.append(f"{change})")
                self.differences.append(f"step {run.step}: {text[-1]}")
        same = "; ".join(text) or "the same bits"
        print(f"step {run.step:>6}  loss {now['train/loss']:.6f}  {same}", flush=True)


def run_at(
    folder: Path,
    step: int,
    argv: Sequence[str] = (),
) -> Replay:
    """A run's state before one of its steps, as near as a checkpoint comes to it, on this process.

    argv: settings that override the run's. Errors: ConfigError, DataError.
    """
    rows = logged_rows(folder)
    last = max(rows, default=0)
    config = config_of(folder, argv)
    checkpoints = all_checkpoints(folder)
    last = max([last, *(step_of(path) for path in checkpoints)])
    if not last:
        raise DataError(f"{folder} has logged no step and saved none; give another run's folder")
    if not 1 <= step <= last:
        raise ConfigError(f"--step {step}: {folder} has taken the steps 1 to {last}; choose one")
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
    config_here = on_one_process(config, folder, checkpoints)
    run = build_run(config_here, world, resumes=checkpoint is not None)
    ranks = ranks_of(folder, checkpoints)
    start = "its start"
    if checkpoint is not None:
        load(run, checkpoint)
        start = checkpoint.name
    reason = "it was bit-exact"
    tolerance = 0.0
    if not config.parallel.bit_exact:
        reason = "it had one process"
        if config.compile.blocks:
            tolerance = TOLERANCE[run.precision.name]
            reason = "its blocks were compiled, and round otherwise than the ones here"
        if ranks != 1:
            tolerance = TOLERANCE[run.precision.name]
            reason = f"{ranks} ranks added in another order and drew other random numbers"
            if config.precision.cast_by == "policy":
                reason += ", FSDP2's policy rounded where autocast does not"
            if batch_statistics(run.parallel.module):
                reason += ", and batch norm saw other batches"
    callbacks = Callbacks(run, AgreedStop(world))
    replay = Replay(run, rows, tolerance, reason, start, callbacks)
    replay.ranks_drew = ranks != 1 and not config.parallel.bit_exact
    return replay


def config_of(folder: Path, argv: Sequence[str]) -> Config:
    """The run's config with argv's settings. Errors: ConfigError for one that changes a step."""
    config = load_saved(folder / CONFIG, argv)
    given = flat(to_toml(config))
    saved = flat(to_toml(load_saved(folder / CONFIG, [])))
    for key, value in given.items():
        if value != saved.get(key) and not key.startswith(ALLOWED):
            raise ConfigError(
                f"{key}={value} on the command line: the run had {saved.get(key)}, and would take "
                "other steps; leave it out, or start a run of its own"
            )
    return config


def on_one_process(
    config: Config,
    folder: Path,
    checkpoints: Sequence[Path],
) -> Config:
    """The config of the same steps on one process, without what a replay needs not."""
    batch = config.train.global_batch_size
    if batch == "auto":
        accumulation = config.train.accumulation_steps
        micro_batches = 1 if accumulation == "auto" else accumulation
        batch = config.train.micro_batch_size * micro_batches * ranks_of(folder, checkpoints)
    cast_by = config.precision.cast_by
    if cast_by == "policy":
        cast_by = "auto"
    return replace(
        config,
        train=replace(config.train, global_batch_size=batch, accumulation_steps="auto"),
        parallel=replace(config.parallel, strategy="single", cpu_offload=False),
        precision=replace(config.precision, cast_by=cast_by),
        # A compiled block does not call the hooks inside it.
        compile=replace(config.compile, blocks=False),
        data=replace(config.data, workers=0 if config.parallel.bit_exact else config.data.workers),
        eval=replace(config.eval, every="off"),
    )


def ranks_of(folder: Path, checkpoints: Sequence[Path]) -> int:
    """How many ranks the run had. Errors: DataError if nothing says so."""
    for checkpoint in reversed(checkpoints):
        with suppress(CheckpointRejected):
            return read_manifest(checkpoint).world_size
    try:
        return int(json.loads((folder / "summary.json").read_text())["world_size"])
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{folder} has no checkpoint and no summary, so its number of ranks is unknown; give "
            "--train.global_batch_size"
        ) from error


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def logged_rows(folder: Path) -> dict[int, dict[str, Any]]:
    """Lines of metrics.jsonl with a loss, by step. Errors: DataError if the folder is no run's."""
    if not (folder / CONFIG).is_file():
        raise DataError(f"{folder} is not a run's folder: it has no {CONFIG}; give one that has")
    path = folder / "metrics.jsonl"
    rows = read_jsonl(path) if path.is_file() else []
    return {row["step"]: row for row in rows if "train/loss" in row}


# ---- one step


@dataclass
class Layer:
    """What a module did in a step: over its outputs, and its own parameters' gradients."""

    kind: str
    largest: float = 0.0
    zeros: int = 0
    nonfinite: int = 0
    elements: int = 0
    square: float = 0.0  # of the gradient's norm

    def row(self, name: str) -> list[str]:
        zeros = 100 * self.zeros / max(1, self.elements)
        norm = f"{math.sqrt(self.square):.3e}" if self.square == self.square else "nan"
        return [name, self.kind, f"{self.largest:.3e}", f"{zeros:.1f}", f"{self.nonfinite}", norm]


@contextmanager
def watched(run: ScriptRun, layers: dict[str, Layer]) -> Iterator[None]:
    """Inside, a step's outputs and gradients are measured into `layers`, by the module's name."""
    handles = []
    for name, module in run.parallel.module.named_modules():
        if next(module.parameters(recurse=False), None) is not None or name == "":
            layer = layers[clean_name(name) or "the model"] = Layer(class_name(module))
            handles.append(module.register_forward_hook(partial(measure_output, layer)))
    norm_of = run.parallel.global_grad_norm

    def measured_norm() -> Tensor:
        norm = norm_of()  # which fills in missing gradients
        for name, parameter in run.parallel.module.named_parameters():
            layer = layers.get(clean_name(name).rpartition(".")[0], layers["the model"])
            if parameter.grad is not None:
                scaled = parameter.grad.double() / run.scaler.get_scale()
                layer.square += float(scaled.square().sum())
        return norm

    run.parallel.global_grad_norm = measured_norm  # type: ignore[method-assign]
    try:
        yield
    finally:
        run.parallel.global_grad_norm = norm_of  # type: ignore[method-assign]
        for handle in handles:
            handle.remove()


def measure_output(
    layer: Layer,
    module: nn.Module,
    inputs: Any,
    output: Any,
) -> None:
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel():
            values = tensor.detach().float()
            finite = values[values.isfinite()]
            layer.nonfinite += values.numel() - finite.numel()
            layer.zeros += int((finite == 0).sum())
            layer.elements += values.numel()
            if finite.numel():
                layer.largest = max(layer.largest, float(finite.abs().max()))


def show_step(replay: Replay, options: Any) -> None:
    """Take the step that comes next, and print what it did."""
    run = replay.run
    position = run.data.position
    micro_batches = next(run.data)
    indexed = run.data.last_step
    layers: dict[str, Layer] = {}
    scale = run.scaler.get_scale()
    with watched(run, layers):
        if options.pdb:
            stop_before_backward(run, indexed)
        report = (
            profiled_step(replay, micro_batches) if options.profile else replay.step(micro_batches)
        )
    print(f"\nstep {run.step}, at sample {position:,}")
    for number, (batch, samples) in enumerate(indexed):
        loss = float(report.losses[number])
        weight = float(torch.as_tensor(run.task.weight(unpadded(batch))))
        shown = ", ".join(map(str, samples[:16])) + (", ..." if len(samples) > 16 else "")
        print(f"  micro-batch {number}: loss {loss:.6g}, weight {weight:g}, samples {shown}")
        for text in shown_samples(run.task, unpadded(batch)):
            print(f"    {text}")
        if options.pictures:
            write_pictures(unpadded(batch), f"replay_step_{run.step}_micro_batch_{number}.png")
    norm = float(report.norm)
    applied = bool(report.applied)
    clip = run.clip
    factor = min(1.0, clip.limit / (norm + 1e-6)) if clip.by == "norm" else 1.0
    print(
        f"  gradient norm {norm:.6g}, clipped by {clip.by} (factor {factor:.4g}), loss scale "
        f"{scale:g}, {'applied' if applied else 'skipped: the norm is not finite'}"
    )
    header = ["layer", "class", "largest", "zeros %", "not finite", "gradient"]
    table = columns([header, *(layer.row(name) for name, layer in layers.items())], left=2)
    print("\n".join(f"  {line}" for line in table))
    if not applied:
        with run.parallel.no_side_effects():
            fault, _ = find_in_micro_batches(run, run.step, indexed)
        finite = (
            "computed again at a loss scale of 1, every micro-batch is finite: the cause is the "
        )
        finite += "scale, or a random number that was drawn"
        print(f"  {fault or finite}")


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


def write_pictures(batch: Any, name: str) -> None:
    """Write the first images [samples, 1 or 3, H, W] of a batch side by side, scaled to 0..255."""
    for images in tree_leaves(batch):
        if isinstance(images, Tensor) and images.ndim == 4 and images.shape[1] in (1, 3):
            row = torch.cat([*images[:SHOWN_SAMPLES].float().cpu()], dim=2)
            row = (row - row.min()) / (row.max() - row.min()).clamp(min=1e-9)
            pixels = (255 * row).byte().expand(3, -1, -1).permute(1, 2, 0)
            Image.fromarray(pixels.numpy()).save(name)
            print(f"    {Path(name).resolve()}")
            return
    print("    no picture: no tensor of the batch is [samples, 1 or 3 channels, height, width]")


def stop_before_backward(run: ScriptRun, indexed: Indexed) -> None:
    """Stop in pdb at each micro-batch's backward, with run, batch and loss at hand."""
    scale = run.scaler.scale
    batches = iter(indexed)

    def stop(loss: Tensor) -> Any:
        batch, samples = next(batches)  # noqa: RUF059 (for the user, with `run` and `loss`)
        print("before a backward: see batch, samples, loss and run; c goes to the next one, q ends")
        pdb.set_trace()  # noqa: T100
        return scale(loss)

    run.scaler.scale = stop  # type: ignore[method-assign, assignment]


def profiled_step(replay: Replay, micro_batches: Sequence[Any]) -> StepReport:
    """The step under torch.profiler: its trace in this folder, its longest operations printed."""
    activities = [ProfilerActivity.CPU]
    if replay.run.world.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        report = replay.step(micro_batches)
    path = Path(f"replay_step_{replay.run.step}.json")
    profiler.export_chrome_trace(str(path))
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=10))
    print(f"trace   {path.resolve()}; open it in ui.perfetto.dev")
    return report


def main(argv: Sequence[str] | None = None) -> int:
    return exit_status(run_command, argv)


def run_command(argv: Sequence[str]) -> int:
    parser = Parser("python -m dist_amp.replay", __doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("--step", type=int, required=True, help="the step to show, from 1 on")
    parser.add_argument("--profile", action="store_true", help="trace the step")
    parser.add_argument("--pictures", action="store_true", help="write its images here, as PNG")
    parser.add_argument("--pdb", action="store_true", help="stop before each of its backwards")
    options, settings = parser.parse_known_args(argv)
    replay = run_at(options.run, options.step, settings)
    ahead = options.step - replay.run.step
    print(f"replay {options.run} from {replay.start}: {ahead} steps on one process")
    rule = "the same bits"
    if replay.tolerance:
        rule = f"values within {replay.tolerance:g} of what was logged"
    print(f"expect {rule}, since {replay.reason}", flush=True)
    try:
        while replay.run.step < options.step - 1:
            replay.step()
        show_step(replay, options)
    except bdb.BdbQuit:  # q in the debugger
        return 0
    finally:
        replay.run.close()
    if not replay.compared:
        print("\nnothing was compared: the run logged none of these steps")
        return 0
    if replay.differences and replay.draws and replay.ranks_drew:
        print("\nnot as logged: the model draws random numbers, and the ranks drew other ones")
        return 0
    if replay.differences:
        print(f"\ndiffers from what was logged, first at {replay.differences[0]}")
        return 1
    print("\nall as logged")
    return 0


if __name__ == "__main__":
    sys.exit(main())
