"""The report of `python -m dist_amp.bench amp`: Markdown, JSON, pictures and a TensorBoard folder."""

import math
from pathlib import Path

import numpy as np

from dist_amp.bench import report as reports
from dist_amp.bench.amp.experiments import TRAIN
from dist_amp.bench.amp.measure import EAGER, FP32, RECIPES, USUAL
from dist_amp.bench.amp.verdict import rows_of, saving
from dist_amp.bench.machine import machine_line
from dist_amp.bench.report import Bar, Report, bullets, digits, interval, median, median_interval, si, table
from dist_amp.telemetry.writers import TensorBoardWriter

REDUCED_BANNER = "**Reduced models on a CPU: the times are meaningless. The loss curves are real.**"
HOW = """\
Everything is measured on the main job's `train_step`; "baseline" is the loop that users write, for comparison. Each
precision learns from the same weights on the same samples; then all take turns, {rounds} rounds in a random order, from
an idle device to an idle device. Speed: relative to float32's of the same round, median and 95 % interval (with fewer
than 6 rounds, their range). Loss: mean of the last tenth of the steps. Inference: forward and loss in evaluation mode;
its loss is with float32's weights. Peak: memory of a step with weights, gradients and moments. Drift: the
distance of the loss curve from float32's, as a share of its fall. Its tolerance: ten roundings of the precision, or one
of the loss, or twice the drift between two float32 runs whose initial weights differ in the last place. What limits a
step is estimated from counted operations, bytes and FLOPs, at this device's rates."""
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
        HOW.format(rounds=report["rounds"]),
        bullets([f"{name}: {recipe.about}" for name, recipe in RECIPES.items()]),
        *map(chapter, report["experiments"]),
        dtypes_text(report["dtypes"]) if report["dtypes"] else "",
        bullets([f"left out, no time: {name}" for name in report["left_out"]]),
    )


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
                loss, parity = np.mean(curve[-max(1, len(curve) // 10) :]), result["parity"][name]
                drifted = f"{100 * parity['drift']:.2g} % ({100 * parity['tolerance']:.2g} %)"
                drifted += "" if parity["verdict"] == "within" else f" {parity['verdict'].upper()}"
            rows.append(
                {
                    "mode": group["mode"],
                    "blocks": group["form"],
                    "batch": str(group["micro_batch_size"]),
                    "precision": name,
                    "ms/step": digits(1000 * median(row["seconds"])) if row.get("seconds") else "",
                    "speed over fp32": interval(row["speedup"]) if row.get("speedup") and is_other else "",
                    "peak MiB": digits(row["peak_bytes"] / 2**20) if "peak_bytes" in row else "",
                    "saved": f"{round(100 * saved)} %" if is_other and not math.isnan(saved) else "",
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


def time_bar(rows: Report, name: str) -> Bar | None:
    if not (row := rows.get(name, {})).get("speedup"):
        return None
    height, high, low = (1 / ratio for ratio in median_interval(row["speedup"]))
    return Bar(height, f"{digits(1000 * median(row['seconds']))} ms", low, high)


def memory_bar(rows: Report, name: str) -> Bar | None:
    height = 1 - saving(rows.get(name, {}), rows)
    return None if math.isnan(height) else Bar(height, f"{digits(rows[name]['peak_bytes'] / 2**20)} MiB")


def draw(result: Report, path: Path, reduced: bool) -> None:
    """Bars of time and memory, and loss curves. Errors: ImportError without matplotlib."""
    places = list(dict.fromkeys((group["mode"], group["form"]) for group in result["groups"]))
    groups = [rows_of(result, *place) for place in places]
    colours = {name: colour for name, colour in COLOURS.items() if any(name in rows for rows in groups)}
    title = (
        f"{result['name']}: {result['steps']} steps of {result['micro_batch_size']} x {result['accumulation']} samples"
    )
    title += f"\n{REDUCED_BANNER.strip('*')}" if reduced else ""
    with reports.figure(path, title, (16.0, 5.0), 1, 3, width_ratios=(3, 3, 2)) as (figure, [(times, memory, losses)]):
        for axes, what, bar in ((times, "time", time_bar), (memory, "peak memory", memory_bar)):
            bars = [{name: made for name in colours if (made := bar(rows, name))} for rows in groups]
            reports.draw_bars(axes, bars, colours)
            axes.set_ylabel(f"{what} relative to float32")
            axes.set_xticks(range(len(places)), ["\n".join(place) for place in places])
            highest = max((bar.get_height() for bar in axes.patches), default=1.0)
            axes.set_ylim(0, 1.45 * max(highest, 1.0))  # wider intervals are cut off
            axes.axhline(1, color="black", lw=0.5)
        for name, curve in result["curves"].items():
            style = "-" if name in USUAL else "--"
            losses.plot(range(1, len(curve) + 1), curve, lw=1.5, alpha=0.8, color=COLOURS[name], ls=style)
        values = [loss for curve in result["curves"].values() for loss in curve]
        if values and min(values) > 0 and max(values) > 10 * min(values):
            losses.set_yscale("log")
        losses.set(xlabel="step", ylabel="loss")
        reports.draw_legend(figure, colours)
