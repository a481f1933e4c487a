"""What the reports of the benches share: files that are whole or as they were, tables, the machine, colours."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dist_amp.bench.harness import median_interval
from dist_amp.bench.machine import MISSING
from dist_amp.errors import in_one_line
from dist_amp.telemetry.writers import plain_json

# The names of loops, in every table.
BARE, OURS = "bare", "dist_amp"
PEERS = ("Accelerate", "Fabric")
# Okabe & Ito's colours, which the colour-blind tell apart, with grey in place of black. Source: jfly.uni-koeln.de/color
OKABE_ITO = {
    "grey": "#999999",
    "orange": "#E69F00",
    "sky blue": "#56B4E9",
    "green": "#009E73",
    "yellow": "#F0E442",
    "blue": "#0072B2",
    "vermilion": "#D55E00",
    "purple": "#CC79A7",
}
Report = Mapping[str, Any]


def save(report: Report, text: str, folder: Path, name: str, suffix: str = "md") -> None:
    """NAME.json, and the text as NAME.md, each whole or as it was: the run may be killed at any time."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in (
        (f"{name}.json", json.dumps(plain_json(report), indent=1) + "\n"),
        (f"{name}.{suffix}", text),
    ):
        (folder / f"{file}.new").write_text(content)
        os.replace(folder / f"{file}.new", folder / file)


def picture(draw: Callable[[Report, Path], None], report: Report, path: Path) -> str:
    """Draw the report's picture; returns its path, or why there is none: the figures are there all the same."""
    try:
        draw(report, path)
        return str(path)
    except ImportError:
        return "no picture, since matplotlib is not installed: pip install 'dist_amp[bench]'"
    except Exception as error:
        return f"no picture: {in_one_line(error)}"


def machine_line(report: Report) -> str:
    """The GPU and its limits, the host, and the versions of what is installed; of a report with `machine.about`."""
    machine, smi = report["machine"], report["machine"].get("nvidia_smi", {})
    facts = [machine.get("gpu", ""), f"CUDA {machine['cuda']}" if "cuda" in machine else ""]
    facts += [f"{name} {value}" for name, value in smi.items()]
    facts += [f"{machine['cpu']}, {machine['cores']} cores"]
    facts += [f"{name} {number}" for name, number in report["versions"].items() if number != MISSING]
    return ", ".join(fact for fact in facts if fact)


def rows_of_markdown(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A table whose first `left` columns are aligned to the left, the others to the right; readable as plain text."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [
            text.ljust(w) if i < left else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "| " + " | ".join(cells) + " |"

    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(head), "| " + " | ".join(rule) + " |", *map(line, rows)])


def interval(values: Sequence[float]) -> str:
    """The sample's median and its 95 % interval, as in "0.987 [0.981, 0.993]"."""
    middle, low, high = median_interval(values)
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"
