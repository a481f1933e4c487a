"""python -m benchmarks amp [EXPERIMENT ...]: what mixed precision buys on this device: time, memory
and loss in every precision.

sinusoid   1 x 1 convolutions that draw a picture of 512 x 512: memory traffic
gpt        a GPT of 124 M parameters: mostly matrix products

Without a name it runs both. To measure your task, give the main job's settings:

    python -m benchmarks amp --task.target my_file:MyTask --train.micro_batch_size 32

Each experiment runs in float32, TF32, bfloat16 and float16, with and without the loss scaler, by
the main job's train_step in one process, in training and inference. amp.md and amp.json say which
precision to use, the speedup, the memory saved, and whether the loss curves agree.
"""

import itertools
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, redirect_stdout
from functools import cache, partial
from io import StringIO
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from benchmarks import harness, report
from benchmarks.harness import Bench, timed_block
from benchmarks.loops import UNDISTURBED, Loop
from benchmarks.report import Report, interval, median, median_interval
from dist_amp.config.load import load_config
from dist_amp.config.memory import size_text
from dist_amp.config.task_class import build_task
from dist_amp.distributed.process import seed_all, set_tf32
from dist_amp.errors import ConfigError, Failure
from dist_amp.run import Run, build_run
from dist_amp.settings import RunConfig
from dist_amp.step import train_step
from dist_amp.supervise.command_line import Parser
from dist_amp.telemetry.metrics import memory_use
from dist_amp.world import start

FP32 = "fp32"
TRAIN, INFERENCE = MODES = ("train", "inference")
BLOCK_SECONDS = 0.2  # of steps between two clock readings
STEPS_OF_DATA = 4  # kept on the device and used again and again
MOST_SKIPS = 20  # in a row; a scale of 2^16 is below 1 by then
NO_SCALER = 0.97  # bf16 is preferred at this share of fp16's speed, since it needs no loss scale
ROUNDINGS = 10
NOISE = 2  # times float32's drift from itself
SMOKE_BANNER = "**Small models on a CPU: the times are meaningless. The loss curves are real.**"
METHOD = """\
Each precision learns from the same weights on the same samples, then takes turns with float32.
Speedup: float32's time over the precision's in the same round, median and 95 % interval. Loss: mean
of the last tenth of the steps; in inference with the initial weights. Drift: largest distance
between the loss curve and float32's over ten windows, as a share of how far float32's falls; the
tolerance is ten roundings of the precision, or twice the drift of another float32 run whose weights
are moved by one unit in the last place, since training amplifies such differences."""


class Experiment(NamedTuple):
    name: str
    arguments: str  # of the main job
    smaller: str = ""  # added to them by --smoke


EXPERIMENTS = {
    "sinusoid": Experiment(
        "sinusoid",
        "--task.target dist_amp.tasks.sinusoid:Sinusoid --task.args.size 512 --task.args.crop 512 "
        "--task.args.crops 1 --train.steps 512 --train.micro_batch_size 1 --train.clip_by off "
        "--optim.lr 0.001 --optim.weight_decay 0 --optim.schedule constant",
        "--task.args.size 32 --task.args.crop 32 --task.args.width 64 --task.args.frequencies 1 "
        "0.5 --train.steps 200 --optim.lr 0.002",
    ),
    "gpt": Experiment(
        "gpt",
        "--task.args.context 1024 --task.args.width 768 --task.args.layers 12 --task.args.heads 12 "
        "--task.args.vocabulary 50304 --train.steps 50 --train.micro_batch_size 8 --optim.lr 6e-4 "
        "--optim.warmup_steps 10 --optim.schedule constant",
        "--task.args.context 32 --task.args.width 32 --task.args.layers 2 --task.args.heads 2 "
        "--task.args.vocabulary 256 --train.micro_batch_size 4 --train.steps 30 --optim.lr 4e-3",
    ),
}


class Recipe(NamedTuple):
    """One precision: settings, and the relative error of a rounded product."""

    words: str
    roundoff: float


RECIPES = {
    FP32: Recipe("--precision.tf32 false --use_amp false", 2**-24),
    "tf32": Recipe("--precision.tf32 true --use_amp false", 2**-11),
    "bf16": Recipe("--precision.tf32 false --use_amp true --precision.dtype bf16", 2**-8),
    "fp16": Recipe("--precision.tf32 false --use_amp true --precision.dtype fp16", 2**-11),
    "fp16_unscaled": Recipe("--precision.tf32 false --use_amp true --precision.dtype fp16", 2**-11),
}


# --- measuring


def measure(bench: Bench, experiment: Experiment, result: dict[str, Any]) -> None:
    """Fill `result`. Errors: Failure in the settings, the task or the data."""
    device = bench.world.device
    words = [*shlex.split(experiment.arguments), *UNDISTURBED, "--precision.cast_by", "auto"]
    if bench.options.smoke:
        words += experiment.smaller.split()
    words += ["--parallel.strategy", "single", "--run.device", device.type]
    config = load_config(words, bench.options.environ)
    task: Any = build_task(config)
    task.build_dataset = cache(task.build_dataset)  # for all precisions

    def build(name: str) -> Run:
        recipe = RECIPES[name].words.split()
        run = build_run(load_config([*words, *recipe], bench.options.environ), bench.world, task)
        if name == "fp16_unscaled":  # the main job has no such setting, since it would be useless
            run.scaler.scales = False
            run.scaler.scale_tensor.fill_(1.0)
        return run

    run = build(FP32)
    result["parameters"] = sum(p.numel() for p in run.parallel.module.parameters())
    with closing(run.data):
        data = list(itertools.islice(run.data, STEPS_OF_DATA))
    names = [name for name in RECIPES if name in (FP32, *bench.options.precisions)]
    has_tf32 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if not has_tf32 and "tf32" in names:
        names.remove("tf32")
        result["left_out"].append("tf32, which this device does not support")
    for name in names:
        result["curves"][name] = loss_curve(build(name))
        harness.release(device)
    again = build(FP32)
    with torch.no_grad():
        for parameter in again.parallel.parameters:
            parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, math.inf)))
    result["again"] = loss_curve(again)
    for mode in bench.options.modes:

        def enter(name: str, mode: str = mode) -> tuple[Loop, dict[str, Any]]:
            held = memory_use(device)[1]
            run = build(name)
            set_mode = partial(prepare, run.parallel.module, mode, name == "tf32")
            loop = Loop(run.parallel.module, partial(STEPS[mode], run), set_mode)
            timed_block(bench.world, loop, data, len(data))
            row: dict[str, Any] = {}
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                timed_block(bench.world, loop, data, len(data))
                row["peak_bytes"] = torch.cuda.max_memory_allocated(device) - held
            if mode == INFERENCE:
                row["loss"] = float(infer(run, data[0]))
            return loop, row

        result["modes"][mode] = harness.compare(bench, FP32, names, enter, data)


def prepare(module: nn.Module, mode: str, tf32: bool) -> None:
    set_tf32(tf32)
    module.train(mode == TRAIN)


def infer(run: Run, micro_batches: Sequence[Any]) -> Tensor:
    """The mean loss, as in an evaluation: without a graph for backward."""
    total = torch.zeros((), device=run.world.device)
    weight = torch.zeros((), device=run.world.device)
    for batch in micro_batches:
        with torch.no_grad(), run.precision.autocast():
            total += run.task.loss_sum(run.model, batch)
            weight += run.task.weight(batch)
    return total / weight


STEPS: Mapping[str, Callable[..., Any]] = {TRAIN: train_step, INFERENCE: infer}


def loss_curve(run: Run) -> list[float]:
    """The loss of each step of the main job.

    A skipped step is repeated on the same samples, so that curves are compared update by update.
    Each attempt draws the same random numbers in every precision.
    """
    set_tf32(run.config.precision.tf32)
    curve = []
    with closing(run.data):
        for number in range(run.config.train.steps):
            micro_batches = next(run.data)
            for _ in range(MOST_SKIPS if run.scaler.scales else 1):
                seed_all(run.config.run.seed + number)
                done = train_step(run, tree_map(lambda part: part, micro_batches))
                if bool(done.applied):
                    break
            curve.append(float(done.loss_sum / done.weight))
    return curve


# --- what it means


Curve = Sequence[float]  # the loss of each step


def drift_of(curve: Curve, reference: Curve) -> float:
    """Of means over ten windows: 1 if nothing is learned; nan if the reference learns nothing."""
    windows = min(10, len(curve))
    found, expected = (
        np.array([part.mean() for part in np.array_split(np.asarray(each), windows)])
        for each in (curve, reference)
    )
    learned = expected[0] - expected.min()
    if not learned > 0:
        return math.nan
    return float(np.abs(found - expected).max() / learned)


def parity(name: str, curve: Curve, reference: Curve, again: Curve = ()) -> dict[str, Any]:
    """How far a loss curve is from float32's, the tolerance, and the verdict.

    again: float32's curve from weights that are moved by one unit in the last place.
    """
    drift = drift_of(curve, reference)
    tolerance = ROUNDINGS * max(RECIPES[name].roundoff, RECIPES["tf32"].roundoff)
    if again:
        tolerance = max(tolerance, NOISE * drift_of(again, reference))
    verdict = "within"
    if not np.isfinite(curve).all():
        verdict = "diverges"
    elif math.isnan(drift):
        verdict = "nothing to compare"
    elif drift > tolerance:
        verdict = "drifts"
    return {"drift": drift, "tolerance": tolerance, "verdict": verdict}


def best(result: Report, mode: str) -> str:
    """The fastest precision that learns what float32 learns; bf16 if fp16 is hardly faster."""
    speeds = {}
    for name, row in result["modes"][mode].items():
        learned = result["parity"].get(name, {}).get("verdict") == "within"
        if name != "fp16_unscaled" and learned and row.get("speedup"):
            middle, low, _ = median_interval(row["speedup"])
            if low > 1:
                speeds[name] = middle
    fastest = max(speeds, key=speeds.__getitem__, default=FP32)
    if speeds.get("bf16", 0) >= NO_SCALER * speeds.get(fastest, math.inf):
        return "bf16"
    return fastest


def judge(result: dict[str, Any]) -> None:
    """Add `parity`, each loss curve against float32's, and the `verdict` in sentences."""
    curves = result["curves"]
    result["parity"] = {}
    for name, curve in curves.items():
        result["parity"][name] = parity(name, curve, curves[FP32], result.get("again", ()))
    lines = [f"{mode}: use {best(result, mode)}" for mode in result["modes"]]
    for name, row in result["parity"].items():
        if row["verdict"] != "within":
            lines.append(f"{name} {row['verdict']}: {distance(row)}")
    result["verdict"] = lines + [f"left out: {what}" for what in result["left_out"]]


# --- the report


def distance(row: Report) -> str:
    """How far a loss curve is from float32's, and how far it may be."""
    return f"{100 * row['drift']:.2g} % ({100 * row['tolerance']:.2g} %)"


def chapter(result: Report) -> str:
    """One experiment."""
    return report.document(
        f"## {result['name']}",
        result.get("note", ""),
        f"{result.get('parameters', 0):,} parameters; `dist_amp train {result['arguments']}`",
        "\n".join(f"- {line}" for line in result.get("verdict", ())),
        table_of(result),
    ).rstrip()


def table_of(result: Report) -> str:
    """Every number of an experiment."""
    lines = []
    for mode, rows in result["modes"].items():
        for name, row in rows.items():
            line = {"mode": mode, "precision": name}
            if row.get("seconds"):
                line["ms/step"] = f"{1000 * median(row['seconds']):,.3g}"
                line["speedup"] = interval(row["speedup"])
            if "peak_bytes" in row and "peak_bytes" in rows[FP32]:
                saved = 1 - row["peak_bytes"] / rows[FP32]["peak_bytes"]
                line["peak memory"] = size_text(row["peak_bytes"])
                line["memory saved"] = f"{100 * saved:.0f} %"
            curve = result["curves"].get(name)
            if mode == TRAIN and curve:
                line["loss"] = f"{np.mean(curve[-max(1, len(curve) // 10) :]):.4g}"
                line["drift (tolerance)"] = distance(result["parity"][name])
            elif "loss" in row:
                line["loss"] = f"{row['loss']:.4g}"
            lines.append({**line, "note": row.get("note", "")})
    return report.table(lines, left=2)


def markdown(found: Report) -> str:
    return report.document(
        "# What mixed precision buys",
        SMOKE_BANNER if found["smoke"] else "",
        f"`{found['command']}`, {found['started']}",
        report.machine_line(found),
        *map(chapter, found["experiments"]),
        "## Method",
        METHOD,
    )


# --- the command


def parse(words: Sequence[str]) -> Any:
    """The options; all other arguments are the main job's, for the user's task."""
    parser = Parser("python -m benchmarks amp", __doc__)
    harness.add_choices(parser, precisions=list(RECIPES), modes=MODES)
    harness.add_common(parser, "runs/amp")
    options, others = parser.parse_known_args(words)
    harness.with_defaults(options, words)
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), others))
    settings = others[len(names) :]
    for name in set(names).difference(EXPERIMENTS):
        raise ConfigError(f"there is no experiment {name!r}; use {' or '.join(EXPERIMENTS)}")
    if settings and names:
        raise ConfigError(
            f"{' '.join(settings[:2])} is no option, and {names[0]} has its own settings; leave "
            "out one of the two"
        )
    options.environ = {}
    options.experiments = [EXPERIMENTS[name] for name in names or EXPERIMENTS]
    if settings:
        options.environ = os.environ
        target = load_config(settings).task.target
        name = target.rpartition(":")[2]
        options.experiments = [Experiment(name, shlex.join(settings))]
    return options


@harness.command
def main(words: Sequence[str]) -> int:
    """Run the chosen experiments; returns 1 if one of them failed. Errors: Failure."""
    options = parse(words)
    harness.single_process("amp")
    device = "cpu" if options.smoke else "auto"
    harness.quiet_process(options.smoke)
    with start(RunConfig(device=device)) as world:
        bench = Bench("amp", world, options, BLOCK_SECONDS)
        results = bench.report["experiments"] = []
        for experiment in options.experiments:
            results.append(run_one(bench, experiment))
            world.say(f"\n{chapter(results[-1])}")
            report.save(bench.report, markdown(bench.report), options.out, "amp")
        world.say(f"\n{options.out}/amp.md, {options.out}/amp.json")
        return int(any("note" in result for result in results))


def run_one(bench: Bench, experiment: Experiment) -> dict[str, Any]:
    """Measure and judge one experiment."""
    result: dict[str, Any] = experiment._asdict() | {"left_out": [], "modes": {}, "curves": {}}
    try:
        with redirect_stdout(StringIO()):  # each run introduces itself
            measure(bench, experiment, result)
            judge(result)
    except Failure as error:  # in the settings, the task or the data: the same for all precisions
        raise type(error)(f"{experiment.name}: {error}") from error
    except Exception as error:
        result["note"] = harness.note_of(error)
        result["curves"] = {}
    harness.release(bench.world.device)
    return result


if __name__ == "__main__":
    sys.exit(main())
