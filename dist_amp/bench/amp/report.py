"""The report of `python -m dist_amp.bench amp`: Markdown, JSON, pictures and a TensorBoard folder."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dist_amp.bench import report as reports
from dist_amp.bench.amp.experiments import TRAIN, Experiment
from dist_amp.bench.amp.measure import EAGER, FP32, RECIPES, USUAL
from dist_amp.bench.amp.parity import fall, tolerance, windows
from dist_amp.bench.amp.verdict import per_second, rows_of, saving, sizes_of, speedup, targets
from dist_amp.bench.machine import machine_line
from dist_amp.bench.report import TARGETS_ARE_FOR, Bar, Report, digits, interval, median, median_interval, si, table
from dist_amp.telemetry.writers import TensorBoardWriter

REDUCED_BANNER = "**Reduced models on a CPU: the times are meaningless. The loss curves are real.**"
LEGEND = (
    "ms/step: median of the rounds. speed over fp32: median of the rounds' ratios, with its 95 % interval.\n"
    "loss: mean of the last tenth of the steps; in inference, with float32's weights."
)
HOW = """\
Everything is measured on `train_step`, the main job's own; "baseline" is the loop that users write, for comparison.
Each precision learns from the same weights on the same samples; then all take turns, {rounds} rounds in a new random
order each, on micro-batches that are on the device already, from an idle device to an idle device. Speed over fp32:
relative to float32's of the same round, median and 95 % interval (with fewer than 6 rounds, their range). Loss: mean of
the last tenth of the steps. Inference: forward and loss in evaluation mode, without a graph; its loss is with float32's
weights. Peak: memory of one step with weights, and in training with gradients and moments; without the batch and the
libraries' workspaces. Drift: the distance of the loss curve from float32's, as a share of its fall, and its tolerance:
ten roundings of the precision, or one of the loss, or twice the drift between two float32 runs whose initial weights
differ in the last place. What limits a step is an estimate from counted operations, bytes and FLOPs, at the rates that
this device reached."""
PALETTE = (reports.GREY, reports.SKY_BLUE, reports.BLUE, reports.ORANGE, reports.VERMILION, reports.PURPLE)
COLOURS = dict(zip(RECIPES, PALETTE, strict=True))
PUBLISHED: dict[str, Any] = {"color": "black", "marker": "D", "ls": "", "mfc": "none", "zorder": 5}


def save(report: Report, experiments: Sequence[Experiment], folder: Path) -> None:
    """amp.json and amp.md."""
    reports.save(report, markdown(report, experiments), folder, "amp")


def markdown(report: Report, experiments: Sequence[Experiment]) -> str:
    """The whole report."""
    by_name, reached = {experiment.name: experiment for experiment in experiments}, report["ceilings"]
    rates = [f"{name} {si(rate, 'FLOP/s')}" for name, rate in reached["flops"].items()]
    rates += [f"copies {si(reached['bytes_per_second'], 'B/s')}", f"an operation {si(reached['launch_seconds'], 's')}"]
    dtypes = []
    if report["dtypes"]:
        dtypes = ["## dtypes", report["dtypes"]["about"], table(report["dtypes"]["rows"], left=3)]
        dtypes += [f"`{one['target']}`:\n\n```\n{one['text']}\n```" for one in report["dtypes"]["operations"]]
    return reports.document(
        "# What mixed precision buys",
        REDUCED_BANNER if report["reduced"] else "",
        f"`{report['command']}`, {report['started']}, {report['seconds']:.0f} s",
        reports.bullets([machine_line(report), f"reached: {', '.join(rates)}"]),
        busy_machine(report),
        HOW.format(rounds=report["rounds"]),
        reports.bullets([f"{name}: {recipe.about}" for name, recipe in RECIPES.items()]),
        *(part for result in report["experiments"] for part in chapter(result, by_name[result["name"]], report)),
        *dtypes,
        reports.bullets([f"left out, no time: {name}" for name in report["left_out"]]),
    )


def busy_machine(report: Report) -> str:
    """A warning if other processes were running at the start."""
    load, cores = report["machine"].get("load", [0.0])[0], report["machine"]["cores"]
    return f"The machine was busy at the start: a load of {load:.1f} on {cores} cores." if load > cores / 2 else ""


def chapter(result: Report, experiment: Experiment, report: Report) -> list[str]:
    """One experiment."""
    parts = [f"## {result['name']}", experiment.about, result.get("note", "")]
    if not any(group["rows"] for group in result.get("groups", ())):
        return parts
    parts += [
        f"{result['model'].get('parameters', 0):,} parameters, {result['steps']} steps of {result['micro_batch_size']} "
        f"x {result['accumulation']} samples; `python -m dist_amp.train {experiment.arguments}`",
        remarks(result),
        table_of(result),
    ]
    if experiment.published:
        parts.append(f"Published by others, and measured here:\n\n{published_table(result, experiment)}")
    if experiment.targets:
        device = report["machine"].get("gpu", "a CPU")
        where = "" if TARGETS_ARE_FOR in device else f" of an {TARGETS_ARE_FOR}; this is {device}"
        parts.append(f"Expected{where}:\n\n{targets_table(result, experiment)}")
    return parts + [
        f"![{result['name']}]({Path(f).name})" if f.endswith(".png") else f for f in result.get("files", ())
    ]


def remarks(result: Report) -> str:
    """The verdict, and what was left out."""
    left_out = [f"left out: {what}" for what in result.get("left_out", ())]
    return reports.bullets([*result.get("verdict", ()), *left_out])


def terminal(result: Report) -> str:
    """One experiment's table and verdict."""
    rows = table_of(result) if "groups" in result else ""
    return reports.document(f"\n{result['name']}", result.get("note", ""), rows, remarks(result)).rstrip()


def table_of(result: Report) -> str:
    """Every number of an experiment."""
    rows = []
    for group in result["groups"]:
        # Loss and drift of training once per precision.
        learned = (group["mode"], group["form"], group["micro_batch_size"]) == (
            TRAIN,
            EAGER,
            result["micro_batch_size"],
        )
        for name, row in group["rows"].items():
            saved, curve = saving(row, group["rows"]), result["curves"].get(name, []) if learned else []
            parity, loss = result["parity"].get(name) if curve else None, row.get("loss", math.nan)
            loss = final_loss(curve) if curve else loss
            rows.append(
                {
                    "mode": group["mode"],
                    "blocks": group["form"],
                    "batch": str(group["micro_batch_size"]),
                    "precision": name,
                    "ms/step": digits(1000 * median(row["seconds"])) if row.get("seconds") else "",
                    "speed over fp32": interval(row["speedup"]) if row.get("speedup") and name != FP32 else "",
                    "peak MiB": digits(row["peak_bytes"] / 2**20) if "peak_bytes" in row else "",
                    "saved": f"{round(100 * saved)} %" if name != FP32 and not math.isnan(saved) else "",
                    "loss": f"{loss:.4g}" if curve or "loss" in row else "",
                    "drift (tolerance)": drift_text(parity) if parity and name != FP32 else "",
                    "note": row.get("note", ""),
                }
            )
    return table(rows, left=4)


def drift_text(parity: Report) -> str:
    if parity["verdict"] in ("diverges", "nothing to compare"):
        return str(parity["verdict"])
    mark = {"within": "", "drifts": " DRIFTS", "too noisy": " too noisy"}[parity["verdict"]]
    return f"{100 * parity['drift']:.2g} % ({100 * parity['tolerance']:.2g} %){mark}"


def final_loss(curve: Sequence[float]) -> float:
    """The mean of the last tenth of the steps."""
    return float(np.mean(curve[-max(1, len(curve) // 10) :]))


def published_table(result: Report, experiment: Experiment) -> str:
    """What the tutorials report for their devices, next to the same number of steps here."""
    base = {one.mode: one for one in experiment.published if one.precision == FP32}
    rows = []
    for one in experiment.published:
        row = rows_of(result, one.mode).get(one.precision, {})
        curve = result["curves"].get(one.precision, []) if one.mode == TRAIN else []
        seconds, ratio = result["steps"] * median(row.get("seconds") or [math.nan]), speedup(row)
        rows.append(
            {
                "": f"{one.mode} {one.precision}",
                "seconds": f"{one.seconds:g}",
                "here, s": "" if math.isnan(seconds) else f"{seconds:.3g}",
                "speed over fp32": f"{base[one.mode].seconds / one.seconds:.2f}",
                "here": "" if math.isnan(ratio) else f"{ratio:.2f}",
                "peak MB": f"{one.peak_mb:g}" if one.peak_mb else "",
                "here, MB": f"{row['peak_bytes'] / 1e6:,.4g}" if "peak_bytes" in row else "",
                "loss": f"{one.loss:g}" if one.loss else "",
                "loss here": f"{final_loss(curve):.3g}" if curve else "",
            }
        )
    return table(rows, left=1)


def targets_table(result: Report, experiment: Experiment) -> str:
    rows = []
    for target, reached, saved in targets(result, experiment):
        for what, least, value in (("speed", target.speed, reached), ("memory saved", target.saving, saved)):
            if least:
                met = "not measured" if math.isnan(value) else "met" if value >= least else "missed"
                name = f"{target.mode}: {what} of {target.precision} over {target.over}"
                rows.append({"target": name, "": f">= {least:.2f}", "here": f"{value:.2f}", "verdict": met})
    return table(rows, left=1)


# --- pictures


def illustrate(
    result: Report, experiment: Experiment, drawn: Mapping[str, Tensor], out: Path, reduced: bool
) -> list[str]:
    """Write pictures and the TensorBoard folder; returns the pictures' paths, or why there are none."""
    name, files = result["name"], list[str]()
    out.mkdir(parents=True, exist_ok=True)
    if any(row.get("seconds") for group in result.get("groups", ()) for row in group["rows"].values()):
        files = [reports.picture(lambda path: draw(result, experiment, path, reduced), out / f"amp_{name}.png")]
        if drawn:
            files.append(reports.picture(lambda path: draw_samples(drawn, path), out / f"amp_{name}_drawn.png"))
    write_tensorboard(result, out / "tensorboard" / name, [Path(file) for file in files if Path(file).is_file()])
    return list(dict.fromkeys(files))


def write_tensorboard(result: Report, folder: Path, files: Sequence[Path]) -> None:
    """The loss curves as one TensorBoard run per precision, so that they share a chart; the report and the pictures."""
    name = result["name"]
    for stale in folder.rglob("events.out.tfevents.*"):  # of an earlier report
        stale.unlink()
    for precision, curve in result.get("curves", {}).items():
        board = TensorBoardWriter(folder / precision, 1)
        for step, loss in enumerate(curve, start=1):
            board.write_scalars({f"loss/{name}": loss}, step)
        board.close()

    def write(writer: Any) -> None:
        writer.add_text(name, terminal(result).strip())
        for file in files:
            from matplotlib.image import imread

            writer.add_image(f"pictures/{file.stem}", imread(file)[..., :3], dataformats="HWC")

    board = TensorBoardWriter(folder, 0)
    board.write(write)
    board.close()


def draw(result: Report, experiment: Experiment, path: Path, reduced: bool) -> None:
    """Bars of time and memory, loss curves, and speeds by batch size. Errors: ImportError without matplotlib."""
    from matplotlib.lines import Line2D

    def time_bar(rows: Report, name: str) -> Bar | None:
        if not (row := rows.get(name, {})).get("speedup"):
            return None
        middle, high, low = (1 / ratio for ratio in median_interval(row["speedup"]))
        return Bar(middle, f"{digits(1000 * median(row['seconds']))} ms", low, high)

    def memory_bar(rows: Report, name: str) -> Bar | None:
        height = 1 - saving(rows.get(name, {}), rows)
        return None if math.isnan(height) else Bar(height, f"{digits(rows[name]['peak_bytes'] / 2**20)} MiB")

    places = list(dict.fromkeys((group["mode"], group["form"]) for group in result["groups"]))
    groups = [rows_of(result, *place) for place in places]
    colours = {name: colour for name, colour in COLOURS.items() if any(name in rows for rows in groups)}
    by_size = sizes_of(result)
    columns = 3 if len(by_size) > 1 else 2
    warning = "REDUCED MODELS on a CPU: the times are meaningless\n" if reduced else ""
    samples = result["micro_batch_size"] * result["accumulation"]
    title = f"{warning}{result['name']}: {result['steps']} steps of {samples} samples"
    size, widths = (4 + 4.5 * columns, 9.0), (3, 2, 2)[:columns]
    with reports.figure(path, title, size, 2, columns, width_ratios=widths) as (figure, panels):
        for axes, label, bar, field in (
            (panels[0][0], "time relative to float32", time_bar, "seconds"),
            (panels[1][0], "peak memory relative to float32", memory_bar, "peak_mb"),
        ):
            bars = [{name: made for name in colours if (made := bar(rows, name))} for rows in groups]
            xs = reports.draw_bars(axes, bars, colours)
            for one in experiment.published:  # relative to their own float32: devices differ
                base = [getattr(p, field) for p in experiment.published if (p.mode, p.precision) == (one.mode, FP32)]
                x = xs.get((places.index((one.mode, EAGER)), one.precision)) if (one.mode, EAGER) in places else None
                if one.precision != FP32 and x is not None and getattr(one, field):
                    axes.plot(x, getattr(one, field) / base[0], **PUBLISHED)
            axes.set_ylabel(label)
            axes.set_xticks(range(len(places)), ["\n".join(place) for place in places])
            highest = max((bar.get_height() for bar in axes.patches), default=1.0)
            axes.set_ylim(0, 1.45 * max(highest, 1.0))  # wider intervals are cut off
            axes.axhline(1, color="black", lw=0.5)
        draw_curves(panels[0][1], panels[1][1], result)
        if columns == 3:
            panels[1][2].set_axis_off()
            draw_sizes(panels[0][2], by_size)
        published = [Line2D([], [], **PUBLISHED, label="published, relative to its own float32")]
        reports.draw_legend(figure, colours, published if experiment.published else [])


def draw_curves(losses: Any, distances: Any, result: Report) -> None:
    """Loss curves; and their distance from float32's, window by window, with the tolerances."""
    reference, has_reference = result["curves"].get(FP32, []), fall(result["curves"].get(FP32, [])) > 0
    for name, curve in result["curves"].items():
        style = {"color": COLOURS[name], "ls": "-" if name in USUAL else "--"}
        losses.plot(range(1, len(curve) + 1), curve, lw=1.5, alpha=0.8, **style)
        if has_reference and name != FP32 and np.isfinite(curve).all() and len(curve):
            apart = 100 * np.abs(windows(curve) - windows(reference[: len(curve)])) / fall(reference)
            distances.plot(np.linspace(0, len(curve), len(apart) + 1)[1:], apart, marker=".", **style)
            limit = 100 * tolerance(name, reference, result["again"])
            distances.axhline(limit, color=COLOURS[name], lw=0.7, ls=":")
    values = [loss for curve in result["curves"].values() for loss in curve]
    if values and min(values) > 0 and max(values) > 10 * min(values):
        losses.set_yscale("log")
    losses.xaxis.get_major_locator().set_params(integer=True)
    losses.set(xlabel="step", ylabel="loss")
    if not has_reference:
        distances.set_axis_off()
    distances.set_yscale("symlog", linthresh=0.01)
    distances.set(xlabel="step", ylabel="% of float32's fall away from it; dotted: tolerance")
    distances.set_ylim(bottom=0)


def draw_sizes(axes: Any, groups: Sequence[Any]) -> None:
    """Samples per second by micro-batch size, in training."""
    for name in USUAL:
        places = [place for place, group in enumerate(groups) if group["rows"].get(name, {}).get("seconds")]
        axes.plot(places, [per_second(groups[place], name) for place in places], color=COLOURS[name], marker="o")
    axes.set_xticks(range(len(groups)), [str(group["micro_batch_size"]) for group in groups])
    axes.set(xlabel="micro-batch size", ylabel="samples per second, training")
    axes.set_ylim(bottom=0)


def draw_samples(drawn: Mapping[str, Tensor], path: Path) -> None:
    """What the models should draw, and what they draw: pictures of [C, H, 2 W] with the target in the left half."""
    first = next(iter(drawn.values()))
    half = first.shape[2] // 2
    shown = {"target": first[:, :, :half]} | {name: image[:, :, half:] for name, image in drawn.items()}
    with reports.figure(path, "", (3.2 * len(shown), 3.5), 1, len(shown)) as (_, panels):
        for axes, (name, image) in zip(panels[0], shown.items(), strict=True):
            axes.imshow(image.mean(dim=0).float().cpu().numpy(), cmap="gray", vmin=0, vmax=1)
            axes.set_title(name)
            axes.set_axis_off()
