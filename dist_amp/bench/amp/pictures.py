"""An experiment's pictures, as PNG and in TensorBoard: times and memory, loss curves, batch sizes, what models draw."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dist_amp.bench.amp.experiment import Experiment, Published
from dist_amp.bench.amp.measure import EAGER
from dist_amp.bench.amp.parity import band, fall, windows
from dist_amp.bench.amp.recipes import FP32, USUAL
from dist_amp.bench.amp.report import mebibytes, terminal
from dist_amp.bench.amp.verdict import digits, is_eager_training, per_second, rows_of, saving
from dist_amp.bench.harness import median_interval
from dist_amp.bench.report import OKABE_ITO, Report, picture
from dist_amp.telemetry.writers import TensorBoardWriter

COLOURS = {
    FP32: OKABE_ITO["grey"],
    "tf32": OKABE_ITO["sky blue"],
    "bf16": OKABE_ITO["blue"],
    "fp16": OKABE_ITO["orange"],
    "fp16_unscaled": OKABE_ITO["vermilion"],
    "fp32_scaled": OKABE_ITO["purple"],
}
PUBLISHED: dict[str, Any] = {"color": "black", "marker": "D", "ls": "", "mfc": "none", "zorder": 5}
WARNING = "REDUCED FORM on a CPU: the timings mean nothing\n"


def illustrate(
    told: Report, experiment: Experiment, drawn: Mapping[str, Tensor], out: Path, reduced: bool
) -> list[str]:
    """Write all of it; returns the pictures' paths, or why there are none."""
    name, files = told["name"], []
    out.mkdir(parents=True, exist_ok=True)
    if any(row.get("seconds") for group in told.get("groups", ()) for row in group["rows"].values()):
        plots = {f"amp_{name}.png": lambda report, path: draw(report, experiment, path, reduced)}
        if drawn:
            plots[f"amp_{name}_drawn.png"] = lambda report, path: draw_drawn(drawn, path)
        files = list(dict.fromkeys(picture(plot, told, out / file) for file, plot in plots.items()))
    write_board(told, out, [Path(file) for file in files if Path(file).is_file()])
    return files


def write_board(told: Report, out: Path, files: Sequence[Path]) -> None:
    """The loss curves, a run of TensorBoard for each precision, so that they lie over one another; report, pictures."""
    name = told["name"]
    for stale in (out / "tensorboard" / name).rglob("events.out.tfevents.*"):  # an earlier report's
        stale.unlink()
    for precision, curve in told.get("curves", {}).items():
        board = TensorBoardWriter(out / "tensorboard" / name / precision, 1)
        for step, loss in enumerate(curve, start=1):
            board.write_scalars({f"loss/{name}": loss}, step)
        board.close()
    board = TensorBoardWriter(out / "tensorboard" / name, 0)  # in place of what an earlier report left

    def show(writer: Any) -> None:
        writer.add_text(name, terminal(told).strip())
        for file in files:
            writer.add_image(f"pictures/{file.stem}", read_png(file), dataformats="HWC")

    board.write(show)
    board.close()


def read_png(path: Path) -> Tensor:
    """[H, W, 3] in 0..1."""
    from matplotlib.image import imread

    return torch.from_numpy(imread(path)[..., :3].copy())


def draw(told: Report, experiment: Experiment, path: Path, reduced: bool) -> None:
    """Bars of time and memory, curves of loss, and speeds by batch size. Errors: ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    places = [(mode, form) for mode, form in dict.fromkeys((g["mode"], g["form"]) for g in told["groups"])]
    names = [name for name in COLOURS if any(name in rows_of(told, *place) for place in places)]
    by_size = sizes_of(told)
    columns = 3 if len(by_size) > 1 else 2
    figure = Figure(figsize=(4 + 4.5 * columns, 9), layout="constrained")
    FigureCanvasAgg(figure)
    warning = WARNING if reduced else ""
    samples = told["micro_batch_size"] * told["accumulation"]
    figure.suptitle(f"{warning}{told['name']}: {told['steps']} steps of {samples} samples")
    (times, curves, *sizes), (memory, apart, *nothing) = figure.subplots(2, columns, width_ratios=(3, 2, 2)[:columns])
    for place, (mode, form) in enumerate(places):
        printed = {one.precision: one for one in experiment.published if one.mode == mode and form == EAGER}
        bars(times, memory, place, rows_of(told, mode, form), names, printed)
    for axes, label in ((times, "time, of float32's"), (memory, "peak memory, of float32's")):
        axes.set_ylabel(label)
        axes.set_xticks(range(len(places)), [f"{mode}\n{form}" for mode, form in places])
        highest = max((bar.get_height() for bar in axes.patches), default=1.0)
        axes.set_ylim(0, 1.45 * max(highest, 1.0))  # an interval that is wider is cut
        axes.axhline(1, color="black", lw=0.5)
    draw_curves(curves, told)
    draw_apart(apart, told)
    for axes in sizes:
        draw_sizes(axes, by_size)
    for axes in nothing:
        axes.set_axis_off()
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    handles: list[Any] = [Patch(color=COLOURS[name], label=name) for name in names]
    if experiment.published:
        handles.append(Line2D([], [], **PUBLISHED, label="published, of its own float32"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=110)


def bars(
    times: Any,
    memory: Any,
    place: int,
    rows: Mapping[str, Any],
    names: Sequence[str],
    printed: Mapping[str, Published],
) -> None:
    """A group of bars, a precision each: heights of float32's, figures above them.

    printed: what the tutorial prints of the same, drawn as a share of its own float32: devices differ.
    """
    there = [name for name in names if name in rows]
    width = 0.86 / len(names)
    for number, name in enumerate(there):
        row, at = rows[name], place + (number - (len(there) - 1) / 2) * width
        if row.get("of_fp32"):
            middle, low, high = (1 / ratio for ratio in median_interval(row["of_fp32"]))
            text = f"{digits(1000 * median_interval(row['seconds'])[0])} ms"
            bar(times, at, width, middle, text, name, (middle - high, low - middle))
        if not math.isnan(saved := saving(row, rows)):
            bar(memory, at, width, 1 - saved, f"{mebibytes(row['peak_bytes'])} MiB", name, (0, 0))
        if name in printed and name != FP32:
            times.plot(at, printed[name].seconds / printed[FP32].seconds, **PUBLISHED)
            if printed[name].peak_mb:
                memory.plot(at, printed[name].peak_mb / printed[FP32].peak_mb, **PUBLISHED)


def bar(axes: Any, at: float, width: float, height: float, text: str, name: str, sides: tuple[float, float]) -> None:
    """One bar, with its figure above it and the interval on either side of its height."""
    axes.bar(at, height, width * 0.94, color=COLOURS[name])
    if any(sides):
        axes.errorbar(at, height, [[max(side, 0)] for side in sides], color="black", lw=1)
    top = height + max(sides[1], 0)
    style = {"textcoords": "offset points", "ha": "center", "va": "bottom", "rotation": 90, "fontsize": 7}
    axes.annotate(text, (at, min(top, 1.2 * height)), (0, 4), **style)


def draw_curves(axes: Any, told: Report) -> None:
    for name, curve in told["curves"].items():
        style = "-" if name in USUAL else "--"
        axes.plot(range(1, len(curve) + 1), curve, color=COLOURS[name], lw=1.5, alpha=0.8, ls=style)
    losses = [loss for curve in told["curves"].values() for loss in curve]
    if losses and min(losses) > 0 and max(losses) > 10 * min(losses):
        axes.set_yscale("log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")


def draw_apart(axes: Any, told: Report) -> None:
    """The distance of each curve to float32's, window by window, with the bands that they are to stay in."""
    reference = told["curves"].get(FP32, [])
    if not fall(reference) > 0:
        axes.set_axis_off()
        return
    for name, curve in told["curves"].items():
        if name == FP32 or not all(map(math.isfinite, curve)):
            continue
        pairs = zip(windows(curve), windows(reference), strict=True)
        distances = [100 * abs(own - other) / fall(reference) for own, other in pairs]
        steps = [(number + 1) * len(curve) / len(distances) for number in range(len(distances))]
        axes.plot(steps, distances, color=COLOURS[name], marker=".", ls="-" if name in USUAL else "--")
        axes.axhline(100 * band(name, reference, told["again"]), color=COLOURS[name], lw=0.7, ls=":")
    axes.set_yscale("symlog", linthresh=0.01)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel("% of float32's fall away from it; dotted: band")


def sizes_of(told: Report) -> list[Any]:
    """The groups of training in every micro-batch size, the smallest first."""
    return sorted(filter(is_eager_training, told["groups"]), key=lambda group: group["micro_batch_size"])


def draw_sizes(axes: Any, groups: Sequence[Any]) -> None:
    """Samples per second by micro-batch size, in training."""
    for name in USUAL:
        points = [
            (place, per_second(group, name))
            for place, group in enumerate(groups)
            if group["rows"].get(name, {}).get("seconds")
        ]
        if points:
            axes.plot(*zip(*points, strict=True), color=COLOURS[name], marker="o")
    axes.set_xticks(range(len(groups)), [str(group["micro_batch_size"]) for group in groups])
    axes.set_xlabel("micro-batch size")
    axes.set_ylabel("samples per second, training")
    axes.set_ylim(bottom=0)


def draw_drawn(drawn: Mapping[str, Tensor], path: Path) -> None:
    """What the models should look like, and do: pictures of [C, H, 2 W], the target in their left halves."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    first = next(iter(drawn.values()))
    half = first.shape[2] // 2
    shown = {"target": first[:, :, :half]} | {name: image[:, :, half:] for name, image in drawn.items()}
    figure = Figure(figsize=(3.2 * len(shown), 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, image) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True):
        axes.imshow(image.mean(dim=0).float().cpu().numpy(), cmap="gray", vmin=0, vmax=1)
        axes.set_title(name)
        axes.set_axis_off()
    figure.savefig(path, dpi=110)
