"""The report of `python -m dist_amp.bench amp`: Markdown, JSON, pictures and a TensorBoard folder."""

import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from dist_amp.bench import report as reports
from dist_amp.bench.amp import parity
from dist_amp.bench.amp.experiments import MODES, TRAIN
from dist_amp.bench.amp.measure import EAGER, FP32, RECIPES
from dist_amp.bench.amp.verdict import ranking, rows_of, saving
from dist_amp.bench.machine import machine_line
from dist_amp.bench.report import Bar, Report, bullets, interval, median, median_interval, si, size, table
from dist_amp.telemetry.writers import TensorBoardWriter

REDUCED_BANNER = "**Reduced models on a CPU: the times are meaningless. The loss curves are real.**"
METHOD = """\
Everything is measured on the main job's `train_step`; "baseline" is the loop that users write, for comparison. Each
precision learns from the same weights on the same samples; then all take turns, {rounds} rounds in a random order, from
an idle device to an idle device. Speedup: float32's time over the precision's in the same round, so above 1 is faster;
median and 95 % interval (with fewer than 6 rounds, their range). Loss: mean of the last tenth of the steps. Inference:
forward and loss in evaluation mode, its loss with float32's weights. Peak: memory of a step with weights, gradients and
moments. What limits a step is estimated from counted operations, bytes and FLOPs, at this device's rates."""
ABOUT_DTYPES = """\
What autocast does to two float32 tensors of (1024, 1), and what the modules of a task compute in; of your own with
--task.target."""
PALETTE = (reports.GREY, reports.SKY_BLUE, reports.BLUE, reports.ORANGE, reports.VERMILION, reports.PURPLE)
COLOURS = dict(zip(RECIPES, PALETTE, strict=True))


def markdown(report: Report) -> str:
    """The whole report."""
    reached, machine = report["ceilings"], report["machine"]
    rates = [f"{name} {si(rate, 'FLOP/s')}" for name, rate in reached["flops"].items()]
    rates += [f"copies {si(reached['bytes_per_second'], 'B/s')}", f"an operation {si(reached['launch_seconds'], 's')}"]
    facts = [machine_line(report), f"reached: {', '.join(rates)}"]
    if machine["load"][0] > machine["cores"] / 2:
        facts.append(f"busy at the start: a load of {machine['load'][0]:.1f} on {machine['cores']} cores")
    return reports.document(
        "# What mixed precision buys",
        REDUCED_BANNER if report["reduced"] else "",
        f"`{report['command']}`, {report['started']}, {report['seconds']:.0f} s",
        bullets(facts),
        verdict_table(report),
        *map(chapter, report["experiments"]),
        dtypes_text(report["dtypes"]) if report["dtypes"] else "",
        "## Appendix: how it was measured",
        METHOD.format(rounds=report["rounds"]),
        (parity.__doc__ or "").strip(),
        bullets([f"{name}: {recipe.about}" for name, recipe in RECIPES.items()]),
    )


def verdict_table(report: Report) -> str:
    """What to use for each experiment, in training and inference; and what was left out."""
    rows = []
    for result in report["experiments"]:
        measured = [mode for mode in MODES if "groups" in result and rows_of(result, mode)]
        rows += [{"experiment": f"{result['name']}, {mode}", **verdict_row(result, mode)} for mode in measured]
        rows += [] if measured else [{"experiment": result["name"], "use": result.get("note", "not measured")}]
    rows += [{"experiment": name, "use": "left out, no time"} for name in report["left_out"]]
    head = dict.fromkeys(("experiment", "use", "speedup", "memory saved", "loss agrees"), "")
    return table([head | row for row in rows], left=2)


def verdict_row(result: Report, mode: str) -> dict[str, str]:
    """The precision to use, its gain over float32, and whether it learns the same; of float32, the next best."""
    rows, learned = rows_of(result, mode), result["parity"]
    name, *others = ranking(result, mode) or [""]
    if not name:
        return {"use": "none: float32 diverges, or was not measured"}
    row = {"use": name, "speedup": "1", "memory saved": "0 %", "loss agrees": "reference"}
    if name != FP32:
        row |= {"speedup": interval(rows[name]["speedup"]), "memory saved": percent(saving(rows[name], rows))}
        row["loss agrees"] = f"yes, {distance(learned[name])}" if name in learned else "yes"
    elif others:
        row["speedup"] = f"1 ({others[0]}: {interval(rows[others[0]]['speedup'])})"
    wrong = [f"{other} {one['verdict']}" for other, one in learned.items() if one["verdict"] in ("drifts", "diverges")]
    return row | {"loss agrees": "; ".join([row["loss agrees"], *wrong])}


def percent(share: float) -> str:
    return "" if math.isnan(share) else f"{round(100 * share)} %"


def distance(row: Report) -> str:
    """How far a loss curve is from float32's, and how far it may be."""
    return f"{100 * row['drift']:.2g} % ({100 * row['tolerance']:.2g} %)"


def dtypes_text(dtypes: Report) -> str:
    """What autocast does with two operations, and what the modules of a task compute in."""
    modules = f"`{dtypes['target']}`:\n\n```\n{dtypes['text']}\n```"
    return reports.document("## dtypes", ABOUT_DTYPES, table(dtypes["rows"], left=3), modules).rstrip()


def chapter(result: Report) -> str:
    """One experiment."""
    parts = [f"## {result['name']}", result["about"], result.get("note", "")]
    if "groups" in result:
        parts += [
            f"{result['parameters']:,} parameters, {result['steps']} steps of {result['micro_batch_size']} "
            f"x {result['accumulation']} samples; `python -m dist_amp.train {result['arguments']}`",
            bullets(result["verdict"]),
            table_of(result),
        ]
    picture = result.get("picture", "")
    shown = f"![{result['name']}]({Path(picture).name})" if picture.endswith(".png") else picture
    return reports.document(*parts, shown).rstrip()


def table_of(result: Report) -> str:
    """Every number of an experiment."""
    rows = []
    for group in result["groups"]:
        place = (group["mode"], group["form"], group["micro_batch_size"])
        learned = place == (TRAIN, EAGER, result["micro_batch_size"])  # loss and drift once per precision
        for name, row in group["rows"].items():
            saved, is_other = saving(row, group["rows"]), name != FP32
            curve, drifted, loss = result["curves"].get(name) if learned else None, "", row.get("loss")
            if curve:
                loss, agreed = np.mean(curve[-max(1, len(curve) // 10) :]), result["parity"][name]
                drifted = distance(agreed) + ("" if agreed["verdict"] == "within" else f" {agreed['verdict'].upper()}")
            rows.append(
                {
                    "mode": group["mode"],
                    "blocks": group["form"],
                    "batch": str(group["micro_batch_size"]),
                    "precision": name,
                    "time/step": si(median(row["seconds"]), "s") if row.get("seconds") else "",
                    "speedup": interval(row["speedup"]) if row.get("speedup") and is_other else "",
                    "peak memory": size(row["peak_bytes"]) if "peak_bytes" in row else "",
                    "memory saved": percent(saved) if is_other else "",
                    "loss": "" if loss is None else f"{loss:.4g}",
                    "drift (tolerance)": drifted if is_other else "",
                    "note": row.get("note", ""),
                }
            )
    return table(rows, left=4)


def save(report: Report, folder: Path) -> None:
    """amp.json and amp.md."""
    reports.save(report, markdown(report), folder, "amp")


def illustrate(result: Report, out: Path, reduced: bool) -> str:
    """Write the picture and the TensorBoard folder; returns the picture's path, or why there is none."""
    write_tensorboard(result, out / "tensorboard" / result["name"])
    return reports.picture(lambda path: draw(result, path, reduced), out / f"amp_{result['name']}.png")


def write_tensorboard(result: Report, folder: Path) -> None:
    """The loss curves as one TensorBoard run per precision, so that they share a chart; and the report."""
    name = result["name"]
    for stale in folder.rglob("events.out.tfevents.*"):  # of an earlier report
        stale.unlink()
    for precision, curve in result["curves"].items():
        board = TensorBoardWriter(folder / precision, 1)
        for step, loss in enumerate(curve, start=1):
            board.write_scalars({f"loss/{name}": loss}, step)
        board.close()
    board = TensorBoardWriter(folder, 0)
    board.write(lambda writer: writer.add_text(name, chapter(result)))
    board.close()


def bars_of(row: Report, rows: Report) -> tuple[Bar, Bar]:
    """The speedup and the memory saved of a precision."""
    speed, memory, saved = Bar(label=textwrap.shorten(row.get("note", ""), 28)), Bar(), saving(row, rows)
    if row.get("speedup"):
        middle, low, high = median_interval(row["speedup"])
        speed = Bar(middle, f"{middle:.2f}   {si(median(row['seconds']), 's')}", low, high)
    if not math.isnan(saved):
        memory = Bar(100 * saved, f"{percent(saved)}   {size(row['peak_bytes'])}")
    return speed, memory


def draw(result: Report, path: Path, reduced: bool) -> None:
    """Speedup and memory saved as bars, and the loss curves. Errors: ImportError without matplotlib."""
    groups = {}
    for mode, form in dict.fromkeys((group["mode"], group["form"]) for group in result["groups"]):
        rows = rows_of(result, mode, form)
        groups[f"{mode}, {form}"] = {name: bars_of(rows[name], rows) for name in COLOURS if name in rows}
    title = f"{result['name']}: {result['steps']} steps of {result['micro_batch_size']} x {result['accumulation']} "
    title += f"samples\n{REDUCED_BANNER.strip('*')}" if reduced else "samples"
    inches = (16.0, max(4.5, 1.6 + 0.21 * sum(len(rows) + 2 for rows in groups.values())))
    with reports.figure(path, title, inches, 1, 3) as (_, [(speeds, memory, losses)]):
        reports.draw_bars((speeds, memory), groups, COLOURS)
        speeds.set_xlabel("speedup over float32 (further right is better)")
        speeds.axvline(1, color="black", lw=0.5)
        memory.set_xlabel("memory saved, % of float32's (further right is better)")
        draw_losses(losses, result["curves"])


def draw_losses(axes: Any, curves: Report) -> None:
    """float32's curve wide and pale; the others' dashes lie in each other's gaps, so that equal curves all show."""
    others = [name for name in curves if name != FP32]
    for name, curve in curves.items():
        style: Any = {"lw": 5, "alpha": 0.5}
        if name != FP32:
            style = {"lw": 1.8, "ls": (3 * others.index(name), (3, 3 * max(len(others) - 1, 1)))}
        axes.plot(range(1, len(curve) + 1), curve, color=COLOURS[name], label=name, **style)
    values = [loss for curve in curves.values() for loss in curve]
    if values and min(values) > 0 and max(values) > 10 * min(values):
        axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="loss")
    if curves:
        axes.legend(frameon=False, handlelength=4)
