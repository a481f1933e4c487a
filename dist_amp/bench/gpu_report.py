"""The report of `python -m dist_amp.bench gpu`: JSON, Markdown with a verdict for each target, and a picture."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from dist_amp.bench import report as reports
from dist_amp.bench.machine import machine_line
from dist_amp.bench.report import BASELINE, OURS, PEERS, TARGETS_ARE_FOR, Bar, Report, interval, median, table

OURS_IN_BF16, WHOLE = "dist_amp, bf16", "baseline, one graph"  # next to BASELINE, OURS and PEERS
SPEED, FP16_SPEED = 0.99, 0.97  # relative to the baseline; to bf16
# How far a loss may be from the baseline's after the same ten steps, relative to it. In a small model on a CPU one step
# fewer makes 7e-3, and another order of the same operations 6e-6; a GPU sums in an order of its own.
SAME_LOSS = 2e-3
MET, MISSED, NOT_MEASURED, NOT_JUDGED = VERDICTS = ("met", "missed", "not measured", "not judged (smoke)")
NO_WAIT, SAME = "no step waits for the device", f"loss equal to the baseline's within {SAME_LOSS:g}"
SPEED_TARGET = f"dist_amp / {BASELINE} >= {SPEED}"
LOOPS = (BASELINE, OURS, OURS_IN_BF16, *PEERS, WHOLE)
PALETTE = (reports.GREY, reports.BLUE, reports.SKY_BLUE, reports.ORANGE, reports.GREEN, reports.PURPLE)
COLOURS = dict(zip(LOOPS, PALETTE, strict=True))
SMOKE_BANNER = "**Smoke test: small models on a CPU. The speeds and memory below are meaningless.**"


def save(report: Report, folder: Path) -> None:
    """gpu.json and gpu.md."""
    reports.save(report, markdown(report), folder, "gpu")


def finish(report: Report, folder: Path) -> str:
    """Write everything, with the picture; returns the closing lines for the console."""
    save(report, folder)
    drawn = reports.picture(lambda path: draw(report, path), folder / "gpu.png")
    banner = f"\n{SMOKE_BANNER.strip('*')}\n\n" if report["smoke"] else ""
    return f"{banner}{targets_table(report)}\n\n{folder}/gpu.json, {folder}/gpu.md, {drawn}"


def markdown(report: Report) -> str:
    """The whole report."""
    device = report["machine"].get("gpu", "CPU")
    sizes = ("about", "layers", "width", "heads", "context", "vocabulary", "micro_batch_size")
    models = [{"GPT": name, **{size: str(model[size]) for size in sizes}} for name, model in report["models"].items()]
    return reports.document(
        "# One GPU",
        SMOKE_BANNER if report["smoke"] else "",
        f"`{report['command']}`, {report['started']}, {report['seconds']:.0f} s",
        machine_line(report),
        table(models, left=2),
        f"Each loop takes {report['warm_up']} warm-up steps, then {report['rounds']} rounds in turns with the others: "
        "fused AdamW (in fp16 Fabric refuses to clip with it, and has torch's default), clipped by norm, compiled by "
        f"{report['backend']}. Speed: over the baseline's of the same round, the median and its 95 % interval. MFU: "
        "share of the device's peak FLOP/s, with attention counted in full. Peak: the loop's own memory.",
        "## Targets",
        "" if TARGETS_ARE_FOR in device else f"The targets are for an {TARGETS_ARE_FOR}; this is {device}.",
        targets_table(report),
        "## Loops",
        table_of(report["cells"]),
        reports.bullets([f"left out, no time: {name}" for name in report["left_out"]]),
    )


def table_of(cells: Sequence[Report]) -> str:
    """Every loop of every cell."""
    rows = []
    for cell in cells:
        for name, row in cell.get("loops", {"all": cell}).items():
            line = {"model": cell["model"], "blocks": cell["mode"], "precision": cell["precision"], "loop": name}
            speed, share, peak = tokens_per_second(cell, row), mfu(cell, row), row.get("peak_bytes", 0)
            line["ms/step"] = f"{1000 * median(row['seconds']):,.1f}" if speed else ""
            line["tokens/s"] = f"{speed:,.0f}" if speed else ""
            line["speed over baseline"] = interval(row["speedup"]) if row.get("speedup") and name != BASELINE else ""
            line["MFU"] = f"{100 * share:.1f} %" if share else ""
            line["peak GiB"] = f"{peak / 2**30:.2f}" if peak else ""
            rows.append({**line, "note": row.get("note", "")})
    return table(rows, left=4)


def tokens_per_second(cell: Report, row: Report) -> float:
    """Of a loop of the cell; 0 where it was not timed."""
    return float(cell["tokens_per_step"] / median(row["seconds"])) if row.get("seconds") else 0.0


def mfu(cell: Report, row: Report) -> float:
    """Of a loop of the cell; 0 where the speed or the peak is not known."""
    peak = cell.get("peak_flops")
    return tokens_per_second(cell, row) * cell["flops_per_token"] / peak if peak else 0.0


def targets_table(report: Report) -> str:
    """Each target, what was measured, and whether its median meets it."""
    found = sorted(targets(report), key=lambda row: row[0])
    counts = Counter(row[3] for row in found)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    rows = [dict(zip(("target", "where", "measured", "verdict"), row, strict=True)) for row in found]
    return f"{table(rows, left=4)}\n\n{summary}"


def targets(report: Report) -> Iterator[tuple[str, str, str, str]]:
    """(target, where, measured, verdict) of all targets."""

    def judged(met: bool) -> str:
        return NOT_JUDGED if report["smoke"] else MET if met else MISSED

    for found in report["free_steps"]:
        for name, where in (("waits", ""), ("waits_when_logged", ", logged")):
            waits = found.get(name) or found.get("note", "")
            yield NO_WAIT, f"{found['precision']}{where}", waits, judged(waits == "nothing")
    for cell in (cell for cell in report["cells"] if cell["mode"] != "whole"):
        where, loops = f"{cell['model']} {cell['mode']} {cell['precision']}", cell.get("loops", {})
        ours = loops.get(OURS, {})
        if not ours.get("speedup"):
            note = cell.get("note") or ours.get("note") or "no baseline to compare with"
            yield SPEED_TARGET, where, note, NOT_MEASURED
            continue
        targets = {BASELINE: (SPEED_TARGET, SPEED), OURS_IN_BF16: (f"fp16 / bf16 >= {FP16_SPEED}", FP16_SPEED)}
        targets |= {peer: (f"dist_amp / {peer} > 1", 1) for peer in PEERS}
        for name, (target, least) in targets.items():
            other = loops.get(name, {})
            if other.get("speedup"):
                ratios = [a / b for a, b in zip(ours["speedup"], other["speedup"], strict=False)]
                is_met = median(ratios) > least if name in PEERS else median(ratios) >= least
                yield target, where, interval(ratios), judged(is_met)
            elif other or name in PEERS:
                yield target, where, f"{name}: {other.get('note', 'not measured')}", NOT_MEASURED
        if cell["mode"] == "compiled" and cell["precision"] == "bf16":
            least, share = report["models"][cell["model"]]["mfu"], mfu(cell, ours)
            measured = f"{100 * share:.1f} %" if share else "telemetry/mfu.py does not know this GPU's peak"
            yield f"MFU >= {100 * least:.0f} %", where, measured, judged(share >= least) if share else NOT_MEASURED
        difference = abs(ours["loss"] / loops[BASELINE]["loss"] - 1)
        yield SAME, where, f"differs by {difference:.1e}", judged(difference <= SAME_LOSS)
    for name in report["left_out"]:
        if " whole " not in name:
            yield SPEED_TARGET, name, "left out: no time", NOT_MEASURED


def draw(report: Report, path: Path) -> None:
    """Bars of speed, MFU and memory, a group for each cell. Errors: ImportError without matplotlib."""

    def bars(cell: Report, name: str) -> tuple[Bar, Bar, Bar]:
        """Speed, MFU and memory of a loop; in place of a speed, the reason why there is none."""
        row = cell["loops"][name]
        middle, low, high = reports.median_interval(row.get("speedup") or [0.0])
        note = textwrap.shorten(row.get("note", ""), 28, placeholder=" ...")
        share, peak = 100 * mfu(cell, row), row.get("peak_bytes", 0)
        speed = Bar(middle, f"{middle:.3f}" if middle else note, low, high)
        return speed, Bar(share, f"{share:.1f}" if share else ""), Bar(peak / 2**30, reports.size(peak) if peak else "")

    cells = [cell for cell in report["cells"] if cell.get("loops")]
    groups = {
        f"{cell['model']}, {cell['mode']}, {cell['precision']}": {
            name: bars(cell, name) for name in COLOURS if name in cell["loops"]
        }
        for cell in cells
    }
    warning = "SMOKE TEST: small models on a CPU, the numbers are meaningless\n" if report["smoke"] else ""
    title = f"{warning}dist_amp, the hand-written baseline and its peers: one {report['machine'].get('gpu', 'CPU')}"
    size = (16.0, 1.6 + 0.21 * sum(len(rows) + 2 for rows in groups.values()))
    with reports.figure(path, title, size, 1, 3) as (_, [panels]):
        reports.draw_bars(panels, groups, COLOURS)
        panels[0].axvline(SPEED, color="black", ls="--", lw=1)
        labels = (f"speedup over the baseline (target, dashed: {SPEED})", "MFU, %", "peak memory, GiB")
        for axes, label in zip(panels, labels, strict=True):
            axes.set_xlabel(label)
