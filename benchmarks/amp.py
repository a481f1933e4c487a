"""python -m benchmarks amp [EXPERIMENT ...]: what mixed precision gains on this device. Measures
time, memory and loss in every precision.

mlp        three linear layers of 4096 (examples/mlp.py): matrix products; also by batch size, and
           in float32 with the loss scaler
sinusoid   1 x 1 convolutions that draw a picture (examples/sinusoid.py): memory traffic
cnn        two convolutions on 3 x 32 x 32 (examples/cnn.py): small operations
linear     10 numbers to 1 (examples/linear.py): nothing but overhead
gpt        a GPT of 124 M parameters: mostly matrix products
dtypes     the dtypes of a product and of a sum under autocast, and of each module of a task

Without a name, all experiments run. To measure your task, or to see its dtypes, give the settings
of its training run:

    python -m benchmarks amp --task.target my_file:MyTask --train.micro_batch_size 32
    python -m benchmarks amp dtypes --task.target my_file:MyTask

Each experiment runs in float32, TF32, bfloat16, and float16 with and without the loss scaler, in
one process, in training and inference. amp.md and amp.json say which precision to use, how much
time and memory it saves, and whether its loss curve agrees with float32's, next to published
figures. Pictures show times, memory and curves. Without a GPU, the sizes are those of --reduced.
"""

import itertools
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext, redirect_stdout
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from benchmarks import harness, pictures, report
from benchmarks.bit_exact import Made
from benchmarks.harness import Bench, timed_block
from benchmarks.loops import UNDISTURBED, Loop
from benchmarks.report import Report, digits, interval, median, median_interval
from dist_amp.config.load import load_config
from dist_amp.config.task_class import build_task
from dist_amp.distributed.process import seed_all, set_tf32
from dist_amp.errors import ConfigError, Failure
from dist_amp.run import Run, build_run
from dist_amp.settings import RunConfig
from dist_amp.step import train_step
from dist_amp.supervise.command_line import Parser
from dist_amp.telemetry.metrics import memory_use
from dist_amp.verify.dtypes import dtype_report
from dist_amp.world import start

FP32 = "fp32"
TRAIN, INFERENCE = MODES = ("train", "inference")
CLONE = Path(__file__).parents[1]
BLOCK_SECONDS = 0.2  # how long steps run between two clock readings
STEPS_OF_DATA = 4  # kept on the device and used again and again
MOST_SKIPS = 20  # in a row; a scale of 2^16 is below 1 by then
NO_SCALER = 0.97  # bf16 is preferred from this share of fp16's speed on: it needs no loss scale
ROUNDINGS = 10  # tolerance for a curve's drift, in roundings of the precision
NOISE = 2  # or in drifts of a float32 run with slightly moved weights
SMOKE_BANNER = "**Small models on a CPU: the times are meaningless. The loss curves are real.**"
NO_PICTURES = "No pictures: matplotlib is missing; pip install -e '.[bench]' in the clone's folder."
METHOD = """\
Each precision trains from the same weights on the same samples, then is timed in turns with
float32. Speedup: float32's time over the precision's in the same round, median and 95 % interval.
Time: the experiment's number of steps times the median step. Peak: the most memory that torch's
allocator gave to weights, gradients, moments and a step; on a CPU, the most bytes of tensors alive
at once. Loss: mean of the last tenth of the steps; in inference, with the initial weights. Drift:
largest distance between the loss curve and float32's over ten windows, as a share of how far
float32's falls. The tolerance is ten roundings of the precision, or twice the drift of a second
float32 run whose weights start one unit in the last place higher, since training amplifies such
differences. Published: by the named authors, on their device, at full size."""

Drawn = dict[str, Tensor]  # by precision: the target and the drawing side by side, [H, 2 W]
Figures = Mapping[str, float]  # seconds, megabytes, loss: those that are known


class Experiment(NamedTuple):
    name: str
    arguments: str  # the main job's command line, with paths from the clone's folder
    smaller: str = ""  # added to it by --smoke
    batches: Sequence[int] = ()  # micro-batch sizes to compare in training
    more: Sequence[str] = ()  # precisions besides USUAL
    source: str = ""  # who published the figures below
    published: Mapping[str, Mapping[str, Figures]] = {}  # by mode and precision


PLAIN = "--optim.weight_decay 0 --optim.schedule constant"
SGD = f"--train.clip_by off --optim.name sgd --optim.lr 0.1 --optim.momentum 0 {PLAIN}"
ALL = (
    Experiment(
        "mlp",
        "--task.target examples/mlp.py:MLP --train.micro_batch_size 512 --train.steps 150 " + SGD,
        "--task.args.width 64 --train.steps 50",
        batches=(128, 256, 512, 513),  # tensor cores want multiples of 8
        more=("fp32_scaled",),
        source="PyTorch's recipe of automatic mixed precision, which names no GPU",
        published={
            TRAIN: {
                FP32: {"seconds": 5.621},
                "fp16_unscaled": {"seconds": 2.462},
                "fp16": {"seconds": 3.550},
            }
        },
    ),
    Experiment(
        "sinusoid",
        "--task.target examples/sinusoid.py:Sinusoid --task.args.size 512 --task.args.crop 512 "
        "--task.args.crops 1 --train.steps 512 --train.micro_batch_size 1 --train.clip_by off "
        f"--optim.lr 0.001 {PLAIN}",
        "--task.args.size 32 --task.args.crop 32 --task.args.width 64 --task.args.frequencies 1 "
        "0.5 --train.steps 200 --optim.lr 0.002",
        source="AMD's ROCm blog, on an AMD GPU, with batch norm in place of layer norm",
        published={
            TRAIN: {
                FP32: {"seconds": 13.98, "megabytes": 2061, "loss": 0.0100},
                "fp16": {"seconds": 7.50, "megabytes": 1035, "loss": 0.0083},
            },
            INFERENCE: {
                FP32: {"seconds": 4.24, "megabytes": 3338},
                "fp16": {"seconds": 2.87, "megabytes": 1676},
            },
        },
    ),
    Experiment(
        "cnn",
        "--task.target examples/cnn.py:CNN --train.micro_batch_size 64 --train.steps 100 "
        f"--train.clip_by off --optim.lr 0.001 --optim.betas 0.9 0.999 {PLAIN}",
        "--task.args.samples 320 --train.micro_batch_size 8 --train.steps 40 --optim.lr 0.0003",
        source="a tutorial, as illustrative",
        published={
            TRAIN: {
                FP32: {"seconds": 15.8, "megabytes": 2150},
                "fp16": {"seconds": 7.5, "megabytes": 1350},
            }
        },
    ),
    Experiment(
        "linear",
        "--task.target examples/linear.py:Linear --train.micro_batch_size 4 --train.steps 15 "
        + SGD,
    ),
    Experiment(
        "gpt",
        "--task.args.context 1024 --task.args.width 768 --task.args.layers 12 --task.args.heads 12 "
        "--task.args.vocabulary 50304 --train.steps 50 --train.micro_batch_size 8 --optim.lr 6e-4 "
        "--optim.warmup_steps 10 --optim.schedule constant",
        "--task.args.context 32 --task.args.width 32 --task.args.layers 2 --task.args.heads 2 "
        "--task.args.vocabulary 256 --train.micro_batch_size 4 --train.steps 30 --optim.lr 4e-3",
    ),
)
EXPERIMENTS = {experiment.name: experiment for experiment in ALL}


class Recipe(NamedTuple):
    words: str  # settings of the main job
    roundoff: float  # relative error of a rounded product
    scales: bool = False  # whether the loss is scaled; the main job does that in fp16 alone


FULL = "--precision.tf32 false --use_amp false"
HALF = "--precision.tf32 false --use_amp true --precision.dtype"
RECIPES = {
    FP32: Recipe(FULL, 2**-24),
    "tf32": Recipe("--precision.tf32 true --use_amp false", 2**-11),
    "bf16": Recipe(f"{HALF} bf16", 2**-8),
    "fp16": Recipe(f"{HALF} fp16", 2**-11, scales=True),
    "fp16_unscaled": Recipe(f"{HALF} fp16", 2**-11),
    "fp32_scaled": Recipe(FULL, 2**-24, scales=True),
}
USUAL = (FP32, "tf32", "bf16", "fp16", "fp16_unscaled")


# --- measuring


def words_of(bench: Bench, experiment: Experiment) -> list[str]:
    """The main job's command line, for one process on this device."""
    words = shlex.split(experiment.arguments)
    if experiment in ALL:  # its task must be found from any folder
        words = [str(CLONE / word) if word.startswith("examples/") else word for word in words]
    words += [*UNDISTURBED, "--precision.cast_by", "auto"]
    if bench.options.smoke:
        words += experiment.smaller.split()
    return [*words, "--parallel.strategy", "single", "--run.device", bench.world.device.type]


def measure(bench: Bench, experiment: Experiment, result: dict[str, Any], drawn: Drawn) -> None:
    """Fill `result` and `drawn`. Raises Failure in the settings, the task or the data."""
    device = bench.world.device
    words = words_of(bench, experiment)
    config = load_config(words, bench.options.environ)
    task: Any = build_task(config)
    task.build_dataset = cache(task.build_dataset)  # for all precisions

    def build(name: str, *more: str) -> Run:
        recipe = RECIPES[name]
        settings = load_config([*words, *recipe.words.split(), *more], bench.options.environ)
        run = build_run(settings, bench.world, task)
        if run.scaler.scales != recipe.scales:
            run.scaler.scales = recipe.scales
            scale = settings.precision.scaler.init_scale if recipe.scales else 1.0
            run.scaler.scale_tensor.fill_(scale)
        return run

    run = build(FP32)
    result["steps"] = config.train.steps
    result["parameters"] = sum(p.numel() for p in run.parallel.module.parameters())
    run.data.close()
    names = [name for name in RECIPES if name in (*USUAL, *experiment.more)]
    names = [name for name in names if name in (FP32, *bench.options.precisions)]
    absent = {}  # rows for the precisions that can't be measured
    if not (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)):
        absent["tf32"] = {"note": "n/a: this device has no TF32"}
    for name in names:
        if name in absent:
            continue
        try:
            run = build(name)
            result["curves"][name] = loss_curve(run)
        except Exception as error:
            if name == FP32:
                raise
            absent[name] = {"note": harness.note_of(error)}
            continue
        if experiment.name == "sinusoid":
            with torch.no_grad(), run.precision.autocast():
                drawn[name] = task.sample(run.parallel.module)[0]
        del run
        harness.release(device)
    again = build(FP32)
    with torch.no_grad():
        for parameter in again.parallel.parameters:
            parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, math.inf)))
    result["again"] = loss_curve(again)
    size = config.train.micro_batch_size
    places = [(mode, mode, size) for mode in bench.options.modes]
    if TRAIN in bench.options.modes:
        places += [(f"{TRAIN}, batch {size}", TRAIN, size) for size in experiment.batches]
    for place, mode, size in places:
        with closing(build(FP32, "--train.micro_batch_size", str(size)).data) as batches:
            data = list(itertools.islice(batches, STEPS_OF_DATA))

        def enter(name: str, mode: str = mode, data: Any = data) -> tuple[Loop, dict[str, Any]]:
            held = memory_use(device)[1]
            row: dict[str, Any] = {}
            with Made() if device.type == "cpu" else nullcontext() as made:
                run = build(name)
                set_mode = partial(prepare, run.parallel.module, mode, name == "tf32")
                loop = Loop(run.parallel.module, partial(STEPS[mode], run), set_mode)
                timed_block(bench.world, loop, data, len(data))
            if made is None:
                torch.cuda.reset_peak_memory_stats(device)
                timed_block(bench.world, loop, data, len(data))
                row["peak_bytes"] = torch.cuda.max_memory_allocated(device) - held
            else:
                row["peak_bytes"] = made.most
            if mode == INFERENCE:
                row["loss"] = float(infer(run, data[0]))
            return loop, row

        # What a scaler costs in float32 is measured in training only, and at one batch size.
        measured = [name for name in result["curves"] if place == TRAIN or name in USUAL]
        rows = absent | harness.compare(bench, FP32, measured, enter, data)
        result["modes"][place] = {name: rows[name] for name in names if name in rows}


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


# --- conclusions


Curve = Sequence[float]  # the loss of each step


def drift_of(curve: Curve, reference: Curve) -> float:
    """Largest distance of the curves' means over ten windows, as a share of the reference's fall.

    1 if the curve stays at its start; nan if the reference does not fall.
    """
    windows = min(10, len(curve))
    means, expected = (
        np.array([part.mean() for part in np.array_split(np.asarray(losses), windows)])
        for losses in (curve, reference)
    )
    fall = expected[0] - expected.min()
    if not fall > 0:
        return math.nan
    return float(np.abs(means - expected).max() / fall)


def parity(name: str, curve: Curve, reference: Curve, again: Curve = ()) -> dict[str, Any]:
    """A loss curve's drift from float32's, the tolerance, and the verdict.

    again: float32's curve with initial weights that are one unit in the last place higher.
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
    """The fastest precision that trains like float32; bf16 if fp16 is hardly faster."""
    speeds = {}
    for name, row in result["modes"][mode].items():
        agrees = result["parity"].get(name, {}).get("verdict") == "within"
        if not name.endswith("scaled") and agrees and row.get("speedup"):
            middle, low, _ = median_interval(row["speedup"])
            if low > 1:
                speeds[name] = middle
    fastest = max(speeds, key=speeds.__getitem__, default=FP32)
    if speeds.get("bf16", 0) >= NO_SCALER * speeds.get(fastest, math.inf):
        return "bf16"
    return fastest


def judge(result: dict[str, Any]) -> None:
    """Add `parity`, each loss curve compared with float32's, and `verdict`, a list of lines."""
    curves = result["curves"]
    result["parity"] = {}
    for name, curve in curves.items():
        result["parity"][name] = parity(name, curve, curves[FP32], result.get("again", ()))
    lines = [f"{mode}: use {best(result, mode)}" for mode in result["modes"]]
    for name, row in result["parity"].items():
        if row["verdict"] != "within":
            lines.append(f"{name} {row['verdict']}: {distance(row)}")
    result["verdict"] = lines


# --- the report


def distance(row: Report) -> str:
    """A curve's drift, and its tolerance in parentheses."""
    return f"{100 * row['drift']:.2g} % ({100 * row['tolerance']:.2g} %)"


def chapter(result: Report) -> str:
    return report.document(
        f"## {result['name']}",
        result.get("note", ""),
        f"{result.get('parameters', 0):,} parameters, {result.get('steps', 0)} steps; "
        f"`dist_amp train {result['arguments']}`",
        "\n".join(f"- {line}" for line in result.get("verdict", ())),
        table_of(result),
        f"Published figures: {result['source']}." if result.get("source") else "",
        *(f"![{name.removesuffix('.png')}]({name})" for name in result.get("pictures", ())),
    ).rstrip()


def table_of(result: Report) -> str:
    lines = []
    for mode, rows in result["modes"].items():
        for name, row in rows.items():
            published = result.get("published", {}).get(mode, {}).get(name, {})
            line = {"mode": mode, "precision": name}
            if row.get("seconds"):
                seconds = median(row["seconds"])
                line["ms/step"] = f"{1000 * seconds:,.3g}"
                line["speedup"] = interval(row["speedup"])
                line["time, s"] = f"{result['steps'] * seconds:.3g}"
            line["published, s"] = figure(published, "seconds")
            if "peak_bytes" in row and "peak_bytes" in rows[FP32]:
                saved = 1 - row["peak_bytes"] / rows[FP32]["peak_bytes"]
                line["peak, MB"] = digits(row["peak_bytes"] / 1e6)
                line["published, MB"] = figure(published, "megabytes")
                line["memory saved"] = f"{100 * saved:.0f} %"
            curve = result["curves"].get(name)
            if mode == TRAIN and curve:
                line["loss"] = f"{np.mean(curve[-max(1, len(curve) // 10) :]):.4g}"
                line["published loss"] = figure(published, "loss")
                line["drift (tolerance)"] = distance(result["parity"][name])
            elif "loss" in row:
                line["loss"] = f"{row['loss']:.4g}"
            lines.append({**line, "note": row.get("note", "")})
    shown = [head for line in lines for head, cell in line.items() if cell]
    return report.table([{k: v for k, v in line.items() if k in shown} for line in lines], left=2)


def figure(published: Figures, name: str) -> str:
    return f"{published[name]:,}" if name in published else ""


def dtypes_chapter(dtypes: Report) -> str:
    return report.document(
        "## dtypes",
        "The dtype of the result for float32 tensors x and y of (1024, 1):",
        report.table(dtypes["operations"], left=len(dtypes["operations"][0])),
        f"`{dtypes['target']}`, module by module:",
        f"```\n{dtypes['text']}\n```",
    ).rstrip()


def markdown(found: Report) -> str:
    return report.document(
        "# What mixed precision gains",
        SMOKE_BANNER if found["smoke"] and found["experiments"] else "",
        f"`{found['command']}`, {found['started']}",
        report.machine_line(found),
        found.get("no_pictures", ""),
        *map(chapter, found["experiments"]),
        dtypes_chapter(found["dtypes"]) if "dtypes" in found else "",
        f"## Method\n\n{METHOD}" if found["experiments"] else "",
    )


# --- the command


def parse(words: Sequence[str]) -> Any:
    """The options; arguments that are not the benchmark's are settings for the user's task."""
    parser = Parser("python -m benchmarks amp", __doc__)
    harness.add_choices(parser, precisions=list(RECIPES), modes=MODES)
    harness.add_common(parser, "runs/amp")
    options, others = parser.parse_known_args(words)
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), others))
    settings = others[len(names) :]
    for name in names:
        if name not in (*EXPERIMENTS, "dtypes"):
            known = f"{', '.join(EXPERIMENTS)} or dtypes"
            raise ConfigError(f"there is no experiment {name!r}; use {known}")
    if settings and (shipped := [name for name in names if name != "dtypes"]):
        raise ConfigError(
            f"{' '.join(settings[:2])} is not an option, and {shipped[0]} has its own settings; "
            "leave out one of the two"
        )
    if not (settings or options.smoke or torch.cuda.is_available()):
        options.smoke = True
        print("no GPU was found: the experiments run at their reduced sizes, on the CPU")
    harness.with_defaults(options, words)
    options.environ = {}
    options.dtypes = "dtypes" in names or not names
    options.experiments = [EXPERIMENTS[name] for name in names or EXPERIMENTS if name != "dtypes"]
    options.task = EXPERIMENTS["gpt"]  # the task whose dtypes are shown
    if settings:
        options.environ = os.environ
        target = load_config(settings).task.target
        options.task = Experiment(target.rpartition(":")[2], shlex.join(settings))
        options.experiments = [] if names else [options.task]
    return options


@harness.command
def main(words: Sequence[str]) -> int:
    """Run the chosen experiments; returns 1 if any failed. Raises Failure."""
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
        if options.dtypes:
            bench.report["dtypes"] = dtypes_of(bench, options.task)
            world.say(f"\n{dtypes_chapter(bench.report['dtypes'])}")
            report.save(bench.report, markdown(bench.report), options.out, "amp")
        if "no_pictures" in bench.report:
            world.say(f"\n{NO_PICTURES}")
        world.say(f"\n{options.out}/amp.md, {options.out}/amp.json")
        return int(any("note" in result for result in results))


def run_one(bench: Bench, experiment: Experiment) -> dict[str, Any]:
    result: dict[str, Any] = experiment._asdict() | {"modes": {}, "curves": {}}
    drawn: Drawn = {}
    try:
        with redirect_stdout(StringIO()):  # each run prints its settings
            measure(bench, experiment, result, drawn)
            judge(result)
    except Failure as error:  # of the settings, task or data, which all precisions have in common
        raise type(error)(f"{experiment.name}: {error}") from error
    except Exception as error:
        result["note"] = harness.note_of(error)
        result["curves"] = {}
    else:
        title = f"{experiment.name}: {result['parameters']:,} parameters, {result['steps']} steps"
        if bench.options.smoke:
            title += ", reduced: the times are meaningless"
        try:
            result["pictures"] = pictures.draw(result, title, drawn, bench.options.out)
        except ImportError:
            bench.report["no_pictures"] = NO_PICTURES
    harness.release(bench.world.device)
    return result


def dtypes_of(bench: Bench, experiment: Experiment) -> dict[str, Any]:
    device = bench.world.device
    x = torch.rand(1024, 1, device=device)
    y = torch.rand(1024, 1, device=device)
    rows = []
    for name, compute in (("x @ y.T", lambda: x @ y.T), ("x + y", lambda: x + y)):
        row = {"operation": name, "without autocast": str(compute().dtype)}
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast(device.type, dtype=dtype):
                row[f"autocast to {dtype}"] = str(compute().dtype)
        rows.append(row)
    config = load_config(words_of(bench, experiment), bench.options.environ)
    with redirect_stdout(StringIO()):
        text = dtype_report(config, bench.world)
    return {"operations": rows, "target": config.task.target, "text": text}


if __name__ == "__main__":
    sys.exit(main())
