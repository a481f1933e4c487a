"""python -m dist_amp.runs [DIR]: a table of the runs in a folder, in the order of their starts.

State: running, if a process of this machine has locked the run's folder; done, preempted or failed
with its cause, by the run's summary; killed, if it logged steps that no summary has. best is the
lowest held-out loss. settings are those in which the runs differ, of a single run those that differ
from the defaults; a task's arguments are compared among its runs.

Exit status: 0, 64 bad arguments, 65 no run in the folder.

Docs: docs/run_folder.md
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dist_amp.config.load import load_config
from dist_amp.config.text import flat, read_flat, to_toml
from dist_amp.distributed.process import warn
from dist_amp.errors import DataError, first_line
from dist_amp.files import Row, parse_row, plain_json
from dist_amp.record import Record, damage
from dist_amp.supervise.command_line import Parser, columns, command

NOT_COMPARED = ("run.dir", "run.resume", "task.target")
LETTERS = 60  # of a state with its cause in the table; --json has all


@dataclass
class RunRow:
    """What a run's folder says; nan and 0 for what it does not."""

    run: str
    started: str
    task: str
    state: str
    cause: str
    ranks: int
    step: int
    steps: int  # to train
    loss: float  # the last that was logged
    best: float
    goodput: float
    settings: dict[str, Any]


@command()
def main(argv: Sequence[str]) -> None:
    parser = Parser("python -m dist_amp.runs", __doc__)
    names = [name for name in RunRow.__dataclass_fields__ if name != "settings"]
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), metavar="DIR")
    parser.add_argument("--sort", choices=names, default="started", help="the column to sort by")
    parser.add_argument(
        "--json", action="store_true", help="print JSON, with full causes and null for nan"
    )
    options = parser.parse_args(argv)
    rows = rows_of(options.folder)
    rows.sort(key=lambda row: sort_key(getattr(row, options.sort)))
    if options.json:
        print(json.dumps(plain_json([without_nan(asdict(row)) for row in rows]), indent=2))
        return
    print("\n".join(table(rows)))


def without_nan(entries: dict[str, Any]) -> dict[str, Any]:
    """None, JSON's null, in place of nan."""
    missing = [name for name, value in entries.items() if value != value]
    return entries | dict.fromkeys(missing)


def sort_key(value: Any) -> tuple[bool, Any]:
    """nan, the value of a run without one, comes last."""
    return value != value, value


def rows_of(folder: Path) -> list[RunRow]:
    """The runs in a folder, or the run that it is. Errors: DataError if there are none."""
    configs = [folder / "config.toml"]
    if not configs[0].exists():  # in a run's own folder an export may have another
        configs = sorted(folder.glob("*/config.toml"))
    readable = {}
    for path in configs:
        try:
            settings = read_flat(path)
        except DataError as error:
            warn(str(error))
            continue
        if "task.target" in settings:
            readable[path.parent] = settings
    if not readable:
        raise DataError(f"{folder} holds no run; give the folder in which run.dir names are")
    defaults = flat(to_toml(load_config([], environ={})))
    rows = []
    for path, settings in readable.items():
        target = settings["task.target"]
        of_task = [other for other in readable.values() if other["task.target"] == target]
        differing = {}
        for key, value in settings.items():
            is_argument = key.startswith("task.args.")
            compared = of_task if is_argument else [*readable.values()]
            if len(readable) == 1 and (not is_argument or target == defaults["task.target"]):
                compared = [defaults]
            differs = any(other.get(key, defaults.get(key)) != value for other in compared)
            if differs and key not in NOT_COMPARED:
                differing[key] = value
        rows.append(row_of(path, settings, differing))
    return rows


def row_of(folder: Path, settings: Mapping[str, Any], differing: dict[str, Any]) -> RunRow:
    record = Record(folder)
    summary = record.summary
    state = str(summary.get("stopped_by", "killed")).replace("completed", "done")
    cause = str(summary.get("cause", ""))
    logged: dict[str, Any] = {}
    best = math.inf
    try:
        logged, best, damaged = skim(folder / "metrics.jsonl")
        if damaged and not cause:
            cause = damage(damaged)
    except OSError as error:
        cause = f"metrics.jsonl can't be read: {first_line(error)}"
    goodput = 100 * finite(summary.get("goodput"))
    step = max(logged.get("step", 0), summary.get("steps", 0))
    if step > summary.get("steps", step):
        state, cause = "killed", ""
    if record.is_running:
        state, cause = "running", ""
    elif not record.started and not summary:
        state = "not started"
    if state in ("running", "killed"):
        goodput = finite(logged.get("perf/goodput_pct"))
    return RunRow(
        run=folder.name,
        started=record.started,
        task=str(settings["task.target"]).rpartition(":")[2],
        state=state,
        cause=cause,
        ranks=summary.get("world_size", len(logged.get("ranks", ()))),
        step=step,
        steps=settings.get("train.steps", 0),
        loss=finite(logged.get("train/loss", summary.get("final_loss"))),
        best=finite(best),
        goodput=goodput / 100,
        settings=differing,
    )


def finite(value: Any) -> float:
    """nan for what is no finite number, such as "nan" in these files."""
    if isinstance(value, int | float) and math.isfinite(value):
        return value
    return math.nan


def skim(path: Path) -> tuple[Row, float, list[int]]:
    """The last log step of metrics.jsonl, the lowest held-out loss, and which lines are damaged.

    The file may be large: of the log steps, only the last line is parsed.
    """
    last = b""
    best = math.inf
    last_number = 0
    damaged = []
    with suppress(FileNotFoundError), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            if b'"eval/loss"' not in line:
                last, last_number = line, number
            elif row := parse_row(line):
                best = min(best, finite(row.get("eval/loss")))
            else:
                damaged.append(number)
    logged = parse_row(last) or {}
    if last and not logged:
        damaged.append(last_number)
    return logged, best, damaged


def table(rows: Sequence[RunRow]) -> list[str]:
    head = ["run", "started", "task", "state", "ranks", "step", "loss", "best", "goodput"]
    lines = columns([head, *(as_text(row) for row in rows)], left=4)
    width = max(map(len, lines))
    settings = ["settings"]
    for row in rows:
        settings.append(" ".join(f"{key}={value}" for key, value in row.settings.items()))
    return [f"{line:<{width}}  {text}".rstrip() for line, text in zip(lines, settings, strict=True)]


def as_text(row: RunRow) -> list[str]:
    state = row.state
    if row.cause:
        state = f"{state}: {row.cause}"
    if len(state) > LETTERS:
        state = f"{state[: LETTERS - 3]}..."
    return [
        row.run,
        row.started,
        row.task,
        state,
        str(row.ranks),
        f"{row.step:,}/{row.steps:,}",
        number(row.loss, ".4f"),
        number(row.best, ".4f"),
        number(row.goodput, ".0%"),
    ]


def number(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else ""


if __name__ == "__main__":
    sys.exit(main())
