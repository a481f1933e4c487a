"""Pictures of `benchmarks amp`, by matplotlib: times and memory as bars, loss curves, drawings."""

from collections.abc import Mapping, Sequence
from math import ceil, isfinite
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.report import Report, digits, median

# Colours that colour-blind people can tell apart. Source: Okabe & Ito 2008, "Color Universal
# Design".
COLOURS = {
    "fp32": "#999999",
    "tf32": "#56b4e9",
    "bf16": "#0072b2",
    "fp16": "#e69f00",
    "fp16_unscaled": "#d55e00",
    "fp32_scaled": "#cc79a7",
}
TIME, MEMORY = "#0072b2", "#e69f00"


def draw(result: Report, title: str, drawn: Mapping[str, Tensor], folder: Path) -> list[str]:
    """Write an experiment's pictures; returns their names. Raises ImportError without matplotlib.

    drawn: by precision, the target and the model's drawing side by side [H, 2 W] in 0..1.
    """
    from matplotlib.figure import Figure

    modes = result["modes"]
    panels = len(modes) + 1
    columns = min(panels, 3)
    rows = ceil(panels / columns)
    figure = Figure(figsize=(5.2 * columns, 4 * rows + 0.6), layout="constrained")
    figure.suptitle(title)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for place, mode in zip(axes, modes, strict=False):
        draw_bars(place, mode, modes[mode])
    draw_losses(axes[len(modes)], result["curves"])
    for unused in axes[panels:]:
        unused.remove()
    pictures = {f"amp_{result['name']}.png": figure}
    if drawn:
        pictures[f"amp_{result['name']}_drawings.png"] = draw_drawings(drawn)
    for name, picture in pictures.items():
        picture.savefig(folder / name, dpi=110)
    return list(pictures)


def draw_bars(left: Any, mode: str, rows: Report) -> None:
    """Bars for each precision: its time on the left axis, its peak memory on the right one."""
    rows = {name: row for name, row in rows.items() if row.get("seconds")}
    times = [1000 * median(row["seconds"]) for row in rows.values()]
    peaks = [row["peak_bytes"] / 1e6 for row in rows.values()]
    unit = "MB"
    if max(peaks, default=1) < 0.1:
        peaks = [1000 * peak for peak in peaks]
        unit = "kB"
    sides = (
        (left, "time, ms/step", TIME, times, -0.21),
        (left.twinx(), f"peak memory, {unit}", MEMORY, peaks, 0.21),
    )
    for axes, label, colour, values, shift in sides:
        bars = axes.bar([n + shift for n in range(len(rows))], values, 0.4, color=colour)
        axes.bar_label(bars, [digits(value) for value in values], padding=2, fontsize=7)
        axes.set_ylabel(label, color=colour)
        axes.tick_params(axis="y", colors=colour)
        axes.margins(y=0.12)
    left.set_xticks(range(len(rows)), [name.replace("_", "\n") for name in rows])
    left.set_title(mode)


def draw_losses(axes: Any, curves: Mapping[str, Sequence[float]]) -> None:
    """float32's curve is wide and pale; the others are dashed, each in the gaps of the others."""
    gaps = max(len(curves) - 2, 1)
    for number, (name, curve) in enumerate(curves.items()):
        style: dict[str, Any] = {"lw": 5, "alpha": 0.5}
        if number:
            style = {"lw": 1.8, "ls": (3 * number, (3, 3 * gaps))}
        axes.plot(range(1, len(curve) + 1), curve, color=COLOURS[name], label=name, **style)
    values = [loss for curve in curves.values() for loss in curve if isfinite(loss)]
    if values and min(values) > 0 and max(values) > 10 * min(values):
        axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="training loss", title="loss")
    axes.legend(frameon=False, handlelength=4)


def draw_drawings(drawn: Mapping[str, Tensor]) -> Any:
    from matplotlib.figure import Figure

    first = next(iter(drawn.values()))
    width = first.shape[1] // 2
    parts = {"target": first[:, :width]}
    parts |= {f"{name} result": picture[:, width:] for name, picture in drawn.items()}
    figure = Figure(figsize=(2.6 * len(parts) + 0.8, 3.1), layout="constrained")
    places = figure.subplots(1, len(parts), squeeze=False)[0]
    for axes, (name, part) in zip(places, parts.items(), strict=True):
        shown = axes.imshow(part.numpy(), cmap="viridis", vmin=0, vmax=1)
        axes.set(title=name, xticks=[], yticks=[])
    figure.colorbar(shown, ax=list(places), label="level", shrink=0.8)
    return figure
