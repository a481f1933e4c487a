"""python -m dist_amp.plot RUN ...: draw a metric of one or several runs on one chart.

The metrics are those of metrics.jsonl, under their names in TensorBoard; values that are not finite
are left out. The ending of --out decides the picture's format: png, svg or pdf.
Exit status: 0, 64 bad arguments or no matplotlib, 65 not a run's folder, or none has the metric.

Docs: docs/metrics.md
"""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dist_amp.distributed.process import warn
from dist_amp.errors import ConfigError, DataError, Failure, nearest_name
from dist_amp.record import Record
from dist_amp.supervise.command_line import Parser, command

Series = tuple[list[int], list[float]]  # steps, values
PICTURES = (".png", ".svg", ".pdf")


@command()
def main(argv: Sequence[str]) -> None:
    parser = Parser("python -m dist_amp.plot", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--metric", default="train/loss", help="such as eval/loss (train/loss)")
    parser.add_argument(
        "--out", type=Path, default=Path("plot.png"), metavar="FILE", help="(plot.png)"
    )
    options = parser.parse_args(argv)
    if options.out.suffix not in PICTURES:
        raise ConfigError(f"--out {options.out}: use the ending {', '.join(PICTURES)}")
    curves = {}
    problems = []
    for folder in dict.fromkeys(options.runs):
        try:
            curves[str(folder)] = series_of(folder, options.metric)
        except DataError as error:
            problems.append(error)
    if not curves:
        raise problems[0]
    for problem in problems:
        warn(f"{problem}; left out")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes: Any = figure.subplots()
    for name, (steps, values) in curves.items():
        axes.plot(steps, values, label=name, marker="." if len(steps) == 1 else "")
    axes.set(xlabel="step", ylabel=options.metric)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(options.out, dpi=150)
    except OSError as error:
        raise Failure(f"--out {options.out} can't be written: {error.strerror}") from error
    print(options.out)


def series_of(folder: Path, metric: str) -> Series:
    """Errors: DataError for a folder without metrics, or without this one."""
    rows = Record(folder).rows
    if not rows:
        raise DataError(f"{folder} has logged nothing; give the folder of a run that has")
    series = finite_series(rows, metric)
    if not series[0]:
        names = sorted({name for row in rows for name in row if "/" in name})
        hint = f"it has {', '.join(names)}"
        if metric in names:
            hint = "all are nan or inf"
        elif near := nearest_name(metric, names):
            hint = f"did you mean {near}?"
        raise DataError(f"--metric {metric}: {folder} has no finite value of it; {hint}")
    return series


def finite_series(rows: Sequence[Mapping[str, Any]], metric: str) -> Series:
    """A metric of the lines of metrics.jsonl, without nan and inf."""
    steps, values = [], []
    for row in rows:
        value = row.get(metric)  # nan and inf are text there
        if isinstance(value, int | float) and math.isfinite(value):
            steps.append(row["step"])
            values.append(value)
    return steps, values


if __name__ == "__main__":
    sys.exit(main())
