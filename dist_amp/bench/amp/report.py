"""What `python -m dist_amp.bench amp` found, as a table, as JSON and as Markdown."""

import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from dist_amp.bench.amp.experiment import TRAIN, Experiment
from dist_amp.bench.amp.measure import EAGER
from dist_amp.bench.amp.recipes import RECIPES
from dist_amp.bench.amp.verdict import digits, rows_of, saving, si, speed, targets
from dist_amp.bench.harness import median_interval
from dist_amp.bench.report import Report, interval, machine_line, rows_of_markdown
from dist_amp.bench.report import save as save_report

LEGEND = (
    "ms/step: the median of the rounds; of fp32: the median of their ratios to float32's, with its 95 % interval;\n"
    "loss: the mean of the last tenth of the steps, in inference with float32's weights"
)
REDUCED_BANNER = "**Reduced form, on a CPU: the timings mean nothing. The loss curves are real.**"
TARGETS_ARE_FOR = "H200"
MIB = 2**20


def save(report: Report, experiments: Sequence[Experiment], folder: Path) -> None:
    """amp.json and amp.md."""
    save_report(report, markdown(report, experiments), folder, "amp")


def markdown(report: Report, experiments: Sequence[Experiment]) -> str:
    """The whole report."""
    precisions = "\n".join(f"- {name}: {recipe.about}" for name, recipe in RECIPES.items())
    parts = [
        "# What mixed precision buys",
        REDUCED_BANNER if report["reduced"] else "",
        f"`{report['command']}`, {report['began']}, {report['seconds']:.0f} s",
        f"- {machine_line(report)}\n- reached: {ceilings_line(report)}",
        busy_machine(report),
        HOW.format(rounds=report["rounds"]),
        precisions,
    ]
    by_name = {experiment.name: experiment for experiment in experiments}
    for told in report["experiments"]:
        parts += chapter(told, by_name[told["name"]], report)
    parts += dtypes_chapter(report["dtypes"])
    parts += ["\n".join(f"- left out, no time: {name}" for name in report["left_out"])]
    return "\n\n".join(part for part in parts if part) + "\n"


HOW = """\
Every figure is of `train_step`, the main job's own; "by hand" is the loop that users write, for comparison. Each
precision learns from the same weights on the same samples; then all take turns, {rounds} rounds in an order drawn anew,
on micro-batches that lie on the device, between two waits for it. of fp32: the speed over float32's of the same round,
median and 95 % interval (of fewer than 6 rounds their range). loss: the mean of the last tenth of the steps. Inference
is forward and loss in evaluation mode, without a graph; its loss is of float32's weights. Peak: of one step; in
training with weights, gradients and moments, in inference with weights; without the batch, and without what libraries
keep for themselves. Drift: the distance of the loss curve to float32's, as a share of its fall, and the band that it is
to stay in: ten roundings of the precision, or one of the loss, or twice what float32 drifts from itself when its
weights begin a last place aside. What bounds a step is an estimate: operations, bytes and FLOPs as counted, at the
rates that this device reached."""


def ceilings_line(report: Report) -> str:
    reached = report["ceilings"]
    rates = ", ".join(f"{name} {si(rate, 'FLOP/s')}" for name, rate in reached["flops"].items())
    copies, launch = si(reached["bytes_per_second"], "B/s"), si(reached["launch_seconds"], "s")
    return f"{rates}, copies {copies}, one more operation {launch}"


def busy_machine(report: Report) -> str:
    """What to know of the machine before believing a time; "" where there is nothing."""
    load, cores = report["machine"].get("load", [0.0])[0], report["machine"]["cores"]
    return f"The machine was busy when it began: a load of {load:.1f} on {cores} cores." if load > cores / 2 else ""


def chapter(told: Report, experiment: Experiment, report: Report) -> Iterator[str]:
    """One experiment."""
    yield f"## {told['name']}"
    yield experiment.about.strip()
    if "cant" in told:
        yield told["cant"]
    if not has_rows(told):
        return
    yield (
        f"{told['model'].get('parameters', 0):,} parameters, {told['steps']} steps of {told['micro_batch_size']} x "
        f"{told['accumulation']} samples; `python -m dist_amp.train {shlex.join(experiment.words)}`"
    )
    yield "\n".join(f"- {line}" for line in remarks(told))
    yield table(told)
    if experiment.published:
        yield published_table(told, experiment)
    if experiment.targets:
        device = report["machine"].get("gpu", "a CPU")
        where = "" if TARGETS_ARE_FOR in device else f" (expected of an {TARGETS_ARE_FOR}; this is {device})"
        yield f"Expected{where}:\n\n{targets_table(told, experiment)}"
    for file in told.get("files", ()):
        yield f"![{told['name']}]({Path(file).name})" if file.endswith(".png") else file


def has_rows(told: Report) -> bool:
    return any(group["rows"] for group in told.get("groups", ()))


def table(told: Report) -> str:
    """Every figure of an experiment."""
    head = ["mode", "blocks", "batch", "precision", "ms/step", "of fp32", "peak MiB", "saved", "loss", "drift (band)"]
    rows = []
    for group in told["groups"]:
        for name, row in group["rows"].items():
            where = [group["mode"], group["form"], str(group["micro_batch_size"]), name]
            # Who learned: each precision once.
            own = (group["mode"], group["form"], group["micro_batch_size"]) == (TRAIN, EAGER, told["micro_batch_size"])
            last = learned(told, name) if own else [f"{row['loss']:.4g}" if "loss" in row else "", ""]
            rows.append([*where, *figures(row, group["rows"]), *last, row.get("cant", "")])
    return rows_of_markdown([*head, "note"], rows, left=4)


def figures(row: Report, rows: Report) -> list[str]:
    """ms/step, speed, peak, saving."""
    milliseconds = digits(1000 * median_interval(row["seconds"])[0]) if row.get("seconds") else ""
    ratio = interval(row["of_fp32"]) if row.get("of_fp32") and row is not rows.get("fp32") else ""
    peak = mebibytes(row["peak_bytes"]) if "peak_bytes" in row else ""
    saved = saving(row, rows)
    is_other = not math.isnan(saved) and row is not rows.get("fp32")
    return [milliseconds, ratio, peak, f"{round(100 * saved)} %" if is_other else ""]


def mebibytes(size: int) -> str:
    """The number alone, to three digits at least."""
    return digits(size / MIB)


def learned(told: Report, name: str) -> list[str]:
    """Final loss, and drift with its band."""
    if name not in told["curves"]:
        return ["", ""]
    parity = told["parity"].get(name)
    return [f"{final_loss(told['curves'][name]):.4g}", drift_text(parity) if parity and name != "fp32" else ""]


def drift_text(parity: Report) -> str:
    if parity["verdict"] in ("diverges", "nothing to compare"):
        return str(parity["verdict"])
    mark = {"within": "", "drifts": " DRIFTS", "too noisy": " too noisy"}[parity["verdict"]]
    return f"{100 * parity['drift']:.2g} % ({100 * parity['band']:.2g} %){mark}"


def final_loss(curve: Sequence[float]) -> float:
    """The mean of the last tenth of the steps."""
    last = curve[-max(1, len(curve) // 10) :]
    return sum(last) / len(last)


def published_table(told: Report, experiment: Experiment) -> str:
    """What the tutorials print, of their devices, beside what came out here for as many steps."""
    head = ["published", "seconds", "here", "of fp32", "here", "peak MB", "here, MB", "loss", "here"]
    base = {one.mode: one for one in experiment.published if one.precision == "fp32"}
    rows = []
    for one in experiment.published:
        here = rows_of(told, one.mode)
        row = here.get(one.precision, {})
        seconds = f"{told['steps'] * median_interval(row['seconds'])[0]:.3g}" if row.get("seconds") else ""
        ratio = speed(row)
        curve = told["curves"].get(one.precision, []) if one.mode == TRAIN else []
        final = final_loss(curve) if curve else math.nan
        rows.append(
            [
                f"{one.mode} {one.precision}",
                f"{one.seconds:g}",
                seconds,
                f"{base[one.mode].seconds / one.seconds:.2f}",
                "" if math.isnan(ratio) else f"{ratio:.2f}",
                f"{one.peak_mb:g}" if one.peak_mb else "",
                f"{row['peak_bytes'] / 1e6:,.4g}" if "peak_bytes" in row else "",
                f"{one.loss:g}" if one.loss else "",
                "" if math.isnan(final) else f"{final:.3g}",
            ]
        )
    return rows_of_markdown(head, rows, left=1)


def targets_table(told: Report, experiment: Experiment) -> str:
    rows = []
    for target, reached, saved in targets(told, experiment):
        for what, least, value in (("speed", target.speed, reached), ("saved", target.saving, saved)):
            if not least:
                continue
            met = "open" if math.isnan(value) else "met" if value >= least else "missed"
            name = f"{target.mode}: {what} of {target.precision} over {target.over}"
            rows.append([name, f">= {least:.2f}", f"{value:.2f}", met])
    return rows_of_markdown(["expected", "", "here", ""], rows, left=1)


def dtypes_chapter(told: Report) -> Iterator[str]:
    if not told:
        return
    yield "## dtypes"
    yield told["about"].strip()
    if told["rows"]:
        head = list(told["rows"][0])
        yield rows_of_markdown(head, [[row[name] for name in head] for row in told["rows"]], left=len(head))
    for one in told["operations"]:
        yield f"`{one['target']}`:"
        yield f"```\n{one['text']}\n```"


def remarks(told: Report) -> list[str]:
    """The verdict, and what there is no verdict of."""
    return [*told.get("verdict", ()), *(f"left out: {what}" for what in told.get("left_out", ()))]


def terminal(told: Report) -> str:
    """One experiment's table and verdict; Markdown too."""
    sentences = "\n".join(f"- {line}" for line in remarks(told))
    parts = ["", told["name"], told.get("cant", ""), table(told) if has_rows(told) else "", sentences]
    return "\n\n".join([parts[0], *filter(None, parts[1:])])
