"""python -m dist_amp.report RUN: write a run's report.html, a page that needs no server.

It shows the curves of the main metrics, the settings that differ from the defaults, the ranks, and
the sample. --out names another file.
Exit status: 0 done, 64 bad arguments, 65 not a run's folder, 1 the file can't be written.

Docs: docs/metrics.md
"""

import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dist_amp.commands.plot import Series, finite_series
from dist_amp.commands.runs import number, rows_of
from dist_amp.files import write_durably
from dist_amp.record import Record
from dist_amp.supervise.command_line import Parser, command

CURVES = {  # heading: (metric, divisor)
    "training loss": ("train/loss", 1),
    "held-out loss": ("eval/loss", 1),
    "learning rate": ("train/lr", 1),
    "gradient norm": ("train/grad_norm", 1),
    "loss scale": ("amp/loss_scale", 1),
    "items per second of the slowest rank": ("slowest", 1),
    "peak memory of the fullest rank, MiB": ("fullest", 2**20),
}
WIDTH, HEIGHT = 640, 240  # of a curve's picture, in SVG units
LEFT, BOTTOM = 100, 30  # for the labels of the axes
POINTS = 1000  # per curve at most

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
  body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 80rem; margin: auto; padding: 1rem; }}
  .curves {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); }}
  figure {{ margin: 0 1rem 1rem 0; }}
  svg {{ width: 100%; }}
  svg text {{ font-size: 14px; fill: #555; }}
  .scrolls {{ overflow-x: auto; }}
  td, th {{ padding: 0 1rem 0 0; text-align: left; white-space: nowrap; }}
  pre {{ background: #f4f4f4; padding: 1rem; overflow-x: auto; }}
</style>
<h1>{title}</h1>
<p>{summary}</p>
<div class="curves">
{curves}
</div>
<h2>Settings that differ from the defaults</h2>
{settings}
<h2>Ranks</h2>
{ranks}
{sample}
</html>
"""


@command()
def main(argv: Sequence[str]) -> None:
    parser = Parser("python -m dist_amp.report", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default RUN/report.html")
    options = parser.parse_args(argv)
    path = options.out or options.run / "report.html"
    write_durably(path, report(options.run))
    print(path)


def report(folder: Path) -> str:
    """The page's HTML. Raises DataError if the folder holds no run."""
    record = Record(folder)
    (run,) = rows_of([record])
    rows = [dict(row) for row in record.rows]
    for row in rows:
        if ranks := row.get("ranks"):
            row["slowest"] = min(rank.get("throughput/items_per_second", 0.0) for rank in ranks)
            row["fullest"] = max(rank.get("memory/peak_bytes", 0.0) for rank in ranks)
    pictures = []
    for heading, (metric, divisor) in CURVES.items():
        steps, values = finite_series(rows, metric)
        if steps:
            pictures.append(picture(heading, (steps, [value / divisor for value in values])))
    text = f"{run['state']}, step {run['step']:,} of {run['steps']:,}, world size {run['ranks']}"
    if run["cause"]:
        text += f" ({run['cause']})"
    text += f", started {run['started']}, loss {number(run['loss'], '.4f')}"
    text += f", best held-out loss {number(run['best'], '.4f') or 'none'}"
    ranks = [("rank", "host", "peak memory", "items per second")]
    for rank in record.summary.get("ranks") or ():
        peak = f"{rank['peak_memory_bytes'] / 2**20:,.0f} MiB"
        ranks.append((rank["rank"], rank["host"], peak, f"{rank['items_per_second']:,.1f}"))
    sample = ""
    if (folder / "sample.txt").exists():
        content = (folder / "sample.txt").read_text(encoding="utf-8", errors="replace")
        sample = f"<h2>Sample</h2>\n<pre>{escape(content)}</pre>"
    return PAGE.format(
        title=escape(f"{run['task']}: {run['run']}"),
        summary=escape(text),
        curves="\n".join(pictures) or "<p>Nothing is logged yet.</p>",
        settings=html_table([("setting", "value"), *run["settings"].items()]),
        ranks=html_table(ranks),
        sample=sample,
    )


def html_table(rows: Iterable[Sequence[Any]]) -> str:
    """A table whose first row is the header."""
    lines = []
    cell = "th"
    for row in rows:
        cells = "".join(f"<{cell}>{escape(str(value))}</{cell}>" for value in row)
        lines.append(f"<tr>{cells}</tr>")
        cell = "td"
    return '<div class="scrolls"><table>\n' + "\n".join(lines) + "\n</table></div>"


def picture(heading: str, series: Series) -> str:
    """The curve as SVG, with the first and last step and the extremes of the values."""
    steps, values = series
    low, high = min(values), max(values)
    if low == high:
        low -= 0.5
        high += 0.5
    x_scale = (WIDTH - LEFT) / max(1, steps[-1] - steps[0])
    y_scale = (HEIGHT - BOTTOM) / (high - low)
    pixels = []
    for step, value in zip(steps, values, strict=True):
        pixels.append((LEFT + (step - steps[0]) * x_scale, (high - value) * y_scale + 5))
    every = 1 + len(pixels) // POINTS
    x, y = pixels[-1]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*pixels[:-1:every], pixels[-1]])
    right = f'text-anchor="end" x="{LEFT - 5}"'
    return f"""<figure>
<figcaption>{escape(heading)}: {values[-1]:.4g} at the end</figcaption>
<svg viewBox="0 0 {WIDTH + 5} {HEIGHT}">
<polyline points="{points}" fill="none" stroke="#0b62d0" stroke-width="2"/>
<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#0b62d0"/>
<text {right} y="15">{high:.4g}</text>
<text {right} y="{HEIGHT - BOTTOM + 5}">{low:.4g}</text>
<text x="{LEFT}" y="{HEIGHT - 5}">step {steps[0]:,}</text>
<text text-anchor="end" x="{WIDTH}" y="{HEIGHT - 5}">{steps[-1]:,}</text>
</svg>
</figure>"""


if __name__ == "__main__":
    sys.exit(main())
