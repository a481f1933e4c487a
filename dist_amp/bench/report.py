"""How the benches report: statistics, tables in Markdown, JSON files, and pictures."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dist_amp.errors import ConfigError, in_one_line
from dist_amp.telemetry.writers import plain_json

try:
    from tabulate import tabulate
except ImportError:
    raise ConfigError(
        "the benches need tabulate for their tables; pip install -e '.[bench]' in the clone's folder"
    ) from None

# Names of loops, in every table.
BASELINE, OURS = "baseline loop", "dist_amp"
PEERS = ("Accelerate", "Fabric")
TARGETS_ARE_FOR = "H200"
# Okabe & Ito's palette for colour-blind readers, with grey in place of black. Source: jfly.uni-koeln.de/color
GREY, ORANGE, SKY_BLUE, GREEN = "#999999", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
Report = Mapping[str, Any]


class Bar(NamedTuple):
    """A bar with its label; low < high: the ends of its interval."""

    length: float = 0.0
    label: str = ""
    low: float = 0.0
    high: float = 0.0


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high): the sample's median, and an interval with the population's in 95 % of cases or more.

    The population's median is below the k-th smallest of n values with the probability of fewer than k heads in n
    tosses. Below 6 values it is the sample's range. Source: David & Nagaraja 2003, "Order Statistics", section 7.1.
    """
    ordered, n = np.sort(values), len(values)
    heads = np.cumsum([math.comb(n, k) / 2**n for k in range(n)])  # probability of k heads or fewer
    k = max(int(np.count_nonzero(heads <= 0.025)) - 1, 0)
    return float(np.median(ordered)), float(ordered[k]), float(ordered[n - 1 - k])


def median(values: Sequence[float]) -> float:
    return float(np.median(values))


def interval(values: Sequence[float]) -> str:
    """The median and its 95 % interval: "0.987 [0.981, 0.993]"."""
    return "{:.3f} [{:.3f}, {:.3f}]".format(*median_interval(values))


def digits(value: float) -> str:
    """Three significant digits, or all before the decimal point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def si(value: float, unit: str) -> str:
    """With an SI prefix: 0.0031, "s" -> "3.1 ms"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}"
    power = max(-3, min(5, math.floor(math.log10(abs(value)) / 3)))
    prefix = ("n", "µ", "m", "", "k", "M", "G", "T", "P")[power + 3]
    return f"{digits(value / 1000**power)} {prefix}{unit}"


def size(count: float) -> str:
    """Bytes in B, KiB, MiB or GiB: "1.19 MiB"."""
    power = next((power for power in (3, 2, 1) if abs(count) >= 1024**power), 0)
    return f"{digits(count / 1024**power)} {('B', 'KiB', 'MiB', 'GiB')[power]}"


# --- text


def table(rows: Sequence[Mapping[str, str]], left: int) -> str:
    """A Markdown table with one dict per row; its first `left` columns are left-aligned, and the last one too."""
    head = list(dict.fromkeys(name for row in rows for name in row))
    align = ["left" if number < left or number == len(head) - 1 else "right" for number in range(len(head))]
    cells = [[row.get(name, "") for name in head] for row in rows]
    return tabulate(cells, head, "pipe", disable_numparse=True, colalign=align) if rows else ""


def document(*parts: str) -> str:
    """The parts that are not empty, as paragraphs."""
    return "\n\n".join(filter(None, parts)) + "\n"


def bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def save(report: Report, text: str, folder: Path, name: str) -> None:
    """Write the report as JSON to NAME.json and the text to NAME.md, or to `name` if it has a suffix."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (name if "." in name else f"{name}.md")
    for file, content in ((path.with_suffix(".json"), json.dumps(plain_json(report), indent=1) + "\n"), (path, text)):
        new = file.with_name(f"{file.name}.new")
        new.write_text(content)
        os.replace(new, file)  # the process may be killed at any time


# --- pictures, with matplotlib where it is installed


def picture(draw: Callable[[Path], None], path: Path) -> str:
    """Draw a picture; returns its path, or why there is none: the numbers are in the report anyway."""
    try:
        draw(path)
        return str(path)
    except ImportError:
        return "no picture, since matplotlib is not installed: pip install -e '.[bench]' in the clone's folder"
    except Exception as error:
        return f"no picture: {in_one_line(error)}"


@contextmanager
def figure(path: Path, title: str, size: tuple[float, float], rows: int, columns: int, **options: Any) -> Iterator[Any]:
    """(figure, panels [rows][columns]), saved as PNG at the end. Errors: ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    yield figure, figure.subplots(rows, columns, squeeze=False, **options)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def draw_bars(panels: Sequence[Any], groups: Mapping[str, Mapping[str, Any]], colours: Mapping[str, str]) -> None:
    """Horizontal bars in groups with headings: one for each panel, its label to the right, clear of all bars."""
    at, names = 0, {}
    for heading, rows in groups.items():
        for axes in panels:
            axes.text(0, at, heading, weight="bold", va="center", transform=axes.get_yaxis_transform())
        for name, bars in rows.items():
            names[at := at + 1] = name
            for axes, (length, label, low, high) in zip(panels, bars, strict=True):
                axes.barh(at, length, 0.8, color=colours[name])
                axes.hlines([at] * (low < high), low, high, color="black", lw=1)
                axes.text(1.01, at, label, fontsize=8, va="center", transform=axes.get_yaxis_transform())
        at += 2
    for axes in panels:
        axes.set_ylim(at - 1, -0.8)
        axes.set_yticks(list(names), names.values())
        if (longest := max((bar.get_width() for bar in axes.patches), default=0)) > 0:
            axes.set_xlim(right=min(axes.get_xlim()[1], 2 * longest))  # wider intervals are cut off
