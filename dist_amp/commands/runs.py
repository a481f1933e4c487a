"""python -m dist_amp.runs [DIR]: list the runs in a folder (runs/), the oldest first.

state: running (a process of this machine has locked the run's folder); done, preempted or failed,
with the cause (from the run's summary); killed (the last steps are in no summary). best: the lowest
held-out loss. settings: those that differ between the runs; for a single run, those that differ
from the defaults. Arguments of a task are compared only between runs of that task.

Exit status: 0 done, 64 bad arguments, 65 no run in the folder.

Docs: docs/metrics.md
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dist_amp.config.load import load_config
from dist_amp.config.text import flat, to_toml
from dist_amp.distributed.process import warn
from dist_amp.errors import DataError, columns
from dist_amp.files import plain_json
from dist_amp.record import Record
from dist_amp.supervise.command_line import Parser, command

NOT_COMPARED = ("run.dir", "run.resume", "task.target")
COLUMNS = ("run", "started", "task", "state", "ranks", "step", "loss", "best", "goodput")


@command()
def main(argv: Sequence[str]) -> None:
    parser = Parser("python -m dist_amp.runs", __doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), metavar="DIR")
    parser.add_argument("--sort", choices=COLUMNS, default="started", help="the column to sort by")
    parser.add_argument("--json", action="store_true", help="print JSON, with null for nan")
    options = parser.parse_args(argv)
    rows = rows_of(records_in(options.folder))
    # Runs without a value have nan, which is not equal to itself; they come last.
    rows.sort(key=lambda row: (row[options.sort] != row[options.sort], row[options.sort]))
    if options.json:
        for row in rows:
            row |= {name: None for name, value in row.items() if value != value}
        print(json.dumps(plain_json(rows), indent=2))
        return
    cells = [[*COLUMNS, "settings"]]
    for row in rows:
        settings = " ".join(f"{key}={value}" for key, value in row["settings"].items())
        shown = {
            **row,
            "state": f"{row['state']}: {row['cause']}" if row["cause"] else row["state"],
            "step": f"{row['step']:,}/{row['steps']:,}",
            "loss": number(row["loss"], ".4f"),
            "best": number(row["best"], ".4f"),
            "goodput": number(row["goodput"], ".0%"),
        }
        cells.append([*(str(shown[name]) for name in COLUMNS), settings])
    print("\n".join(columns(cells, left=len(cells[0]))))


def number(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else ""


def records_in(folder: Path) -> list[Record]:
    """The runs in a folder, or the folder's own run. Raises DataError if there is none."""
    folders = [folder]
    if not (folder / "config.toml").exists():  # a run's folder may hold an export, which has one
        folders = sorted(path.parent for path in folder.glob("*/config.toml"))
    records = []
    for path in folders:
        record = Record(path)
        try:
            if "task.target" in record.settings:
                records.append(record)
        except DataError as error:
            if path == folder:
                raise
            warn(str(error))
    if not records:
        raise DataError(f"{folder} holds no run; give the folder that contains your runs")
    return records


def rows_of(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Each run's values of COLUMNS, its "cause", "steps" to train and differing "settings". A
    missing number is nan or 0. loss: the last that was logged. best: the lowest held-out loss.
    """
    defaults = flat(to_toml(load_config([], environ={})))
    all_runs = [record.settings for record in records] if len(records) > 1 else [defaults]
    rows = []
    for record in records:
        target = record.settings["task.target"]
        same_task = [settings for settings in all_runs if settings["task.target"] == target]
        differing = {}
        for key, value in record.settings.items():
            compared = same_task if key.startswith("task.args.") else all_runs
            differs = any(settings.get(key, defaults.get(key)) != value for settings in compared)
            if differs and key not in NOT_COMPARED:
                differing[key] = value
        rows.append(row_of(record, differing))
    return rows


def row_of(record: Record, differing: dict[str, Any]) -> dict[str, Any]:
    summary = record.summary
    logged: dict[str, Any] = {}
    best = math.inf
    for row in record.rows:
        if "train/loss" in row:
            logged = row
        if (loss := finite_or_nan(row.get("eval/loss"))) < best:
            best = loss
    step = max(logged.get("step", 0), summary.get("steps", 0))
    state = str(summary.get("stopped_by", "killed")).replace("completed", "done")
    cause = str(summary.get("cause", ""))
    goodput = finite_or_nan(summary.get("goodput"))
    if record.is_running:
        state, cause = "running", ""
    elif step > summary.get("steps", step):  # the run was restarted after this summary
        state, cause = "killed", ""
    elif not record.started and not summary:
        state = "not started"
    if state in ("running", "killed"):
        goodput = finite_or_nan(logged.get("perf/goodput_pct")) / 100
    return {
        "run": record.folder.name,
        "started": record.started,
        "task": str(record.settings["task.target"]).rpartition(":")[2],
        "state": state,
        "cause": cause,
        "ranks": summary.get("world_size", len(logged.get("ranks", ()))),
        "step": step,
        "steps": record.settings.get("train.steps", 0),
        "loss": finite_or_nan(logged.get("train/loss", summary.get("final_loss"))),
        "best": finite_or_nan(best),
        "goodput": goodput,
        "settings": differing,
    }


def finite_or_nan(value: Any) -> float:
    """The value if it is a finite number, else nan: in these files nan and inf are text."""
    if isinstance(value, int | float) and math.isfinite(value):
        return value
    return math.nan


if __name__ == "__main__":
    sys.exit(main())
