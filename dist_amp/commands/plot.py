"""python -m dist_amp.plot RUN ...: plot a metric of one or several runs in one chart.

It writes plot.png, or --out, whose extension sets the format: png, svg, pdf ... Metrics have their
TensorBoard names, such as train/loss, the default. Values that are not finite are left out.
Exit status: 0, 64 bad arguments or no matplotlib, 65 not a run's folder, or no run has the metric.

Docs: docs/metrics.md
"""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dist_amp.errors import ConfigError, DataError
from dist_amp.record import Record
from dist_amp.supervise.command_line import Parser, command

Series = tuple[list[int], list[float]]  # steps, values


@command()
def main(argv: Sequence[str]) -> None:
    parser = Parser("python -m dist_amp.plot", __doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    add("--metric", default="train/loss", help="such as eval/loss; default train/loss")
    add("--out", type=Path, default=Path("plot.png"), metavar="FILE", help="default plot.png")
    options = parser.parse_args(argv)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes: Any = figure.subplots()
    for folder in options.runs:
        rows = Record(folder).rows
        steps, values = finite_series(rows, options.metric)
        if steps:
            axes.plot(steps, values, label=folder, marker="." if len(steps) == 1 else "")
            continue
        names = sorted({name for row in rows for name in row if "/" in name})
        problem = f"--metric {options.metric}: {folder} has no finite value of it; it has "
        problem += ", ".join(names) or "logged nothing"
        print(f"warning: {problem}", file=sys.stderr)
    if not axes.lines:
        raise DataError(problem)
    axes.set(xlabel="step", ylabel=options.metric)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(options.out, dpi=150)
    print(options.out)


def finite_series(rows: Sequence[Mapping[str, Any]], metric: str) -> Series:
    """The steps and values of a metric in the rows of metrics.jsonl, without nan and inf."""
    steps, values = [], []
    for row in rows:
        value = row.get(metric)  # nan and inf are text there
        if isinstance(value, int | float) and math.isfinite(value):
            steps.append(row["step"])
            values.append(value)
    return steps, values


if __name__ == "__main__":
    sys.exit(main())
