"""What `python -m dist_amp.bench overhead` found, as a table, with a verdict on what is promised."""

from dataclasses import dataclass
from typing import Any

from dist_amp.bench.harness import median_interval
from dist_amp.bench.report import BARE, OURS

# The names of loops that are treated apart; BARE, OURS and PEERS beside.
AGAIN, TELEMETRY = "bare again", "dist_amp, full telemetry"
UPDATE, OUR_UPDATE = "update alone, bare", "update alone, dist_amp"
PROMISED = (OURS, TELEMETRY, OUR_UPDATE)
PARITY = {"tiny": 1e-6, "deep": 1e-5, "gpt": 1e-5}  # how far a loop may drift from the bare one, by the workload


@dataclass(frozen=True)
class Cell:
    workload: str
    precision: str
    ranks: int
    strategy: str


def target(cell: Cell, loop: str) -> float | None:
    """What the ratio to the bare loop is to be, at most; None where nothing is promised."""
    if loop == OURS:
        if cell.workload == "tiny" and cell.ranks == 1:
            return {"bf16": 0.95, "fp16": 0.88}.get(cell.precision)
        if cell.workload == "tiny" and cell.strategy == "ddp":
            return 0.98
        if cell.workload == "deep" and cell.ranks == 1:
            return 0.99
    if loop == OUR_UPDATE:
        return 0.5
    if loop == TELEMETRY and cell.workload == "tiny" and cell.ranks == 1 and cell.precision != "fp32":
        return 0.97
    return None


def base(name: str) -> str:
    """The loop that another one is compared with."""
    return UPDATE if name in (UPDATE, OUR_UPDATE) else BARE


HEADER = (
    f"{'workload':<8} {'precision':<9} {'ranks':>5} {'strategy':<8} {'loop':<24} {'us/step':>9}  "
    f"{'ratio [95 % interval]':<21} {'reads':>5} {'collectives':>11} {'parity':>6} {'target':>7}  verdict"
)


def rows_of(cell: Cell, told: dict[str, Any]) -> list[dict[str, Any]]:
    """The table's rows of a cell: figures, or `cant`."""
    rows: list[dict[str, Any]] = []
    for name in told["loops"]:
        if name in told["cant"]:
            rows.append({"loop": name, "cant": told["cant"][name]})
            continue
        seconds = told["seconds"][name]
        # A fastest step would hide the logging step: what has one is compared by whole blocks.
        measure = "block_cpu" if name == TELEMETRY else "step_cpu"
        compared = zip(seconds[measure], told["seconds"][base(name)][measure], strict=True)
        ratio, low, high = median_interval([own / bare for own, bare in compared])
        row = {
            "loop": name,
            "us_per_step": 1e6 * median_interval(seconds[measure])[0],
            "ratio": ratio,
            "interval": [low, high],
            "host_reads": told["host_reads"][name],
            "collectives": told["collectives"].get(name),
            "parity": told["parity"][name],
            "target": target(cell, name),
        }
        rows.append({**row, "verdict": verdict(row, PARITY[cell.workload]) if name in PROMISED else ""})
    return rows


def verdict(row: dict[str, Any], parity: float) -> str:
    """met, or what was missed: the ratio by its median, the drift by `parity`."""
    missed = {
        "ratio": row["target"] is not None and row["ratio"] > row["target"],
        "parity": not row["parity"] <= parity,  # nan is neither
        "host reads": sum(row["host_reads"]) > (row["loop"] == TELEMETRY),
        "collectives": row["collectives"] not in (None, 1),
    }
    names = ", ".join(name for name, is_missed in missed.items() if is_missed)
    return f"missed: {names}" if names else "met"


def line(cell: Cell, row: dict[str, Any]) -> str:
    """A row of the table."""
    where = f"{cell.workload:<8} {cell.precision:<9} {cell.ranks:>5} {cell.strategy:<8} {row['loop']:<24}"
    if "cant" in row:
        return f"{where} {row['cant'][:100]}"
    low, high = row["interval"]
    is_base = base(row["loop"]) == row["loop"]
    interval = "1" if is_base else f"{row['ratio']:.3f} [{low:.3f}, {high:.3f}]"
    reads = " / ".join(str(count) for count in sorted(set(row["host_reads"])))
    meets = "" if row["collectives"] is None else str(row["collectives"])
    parity = "" if is_base else f"{row['parity']:.0e}"
    most = "" if row["target"] is None else f"<= {row['target']:.2f}"
    figures = f"{row['us_per_step']:>9,.0f}  {interval:<21} {reads:>5} {meets:>11} {parity:>6} {most:>7}"
    return f"{where} {figures}  {row['verdict']}".rstrip()
