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
ORDER = (NO_WAIT, "MFU", *(f"dist_amp / {name}" for name in (BASELINE, *PEERS)), "fp16 / bf16", SAME)
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
    about = [
        f"{name}: a GPT of {model['about']} parameters: {model['layers']} layers, {model['width']} wide, "
        f"{model['heads']} heads, context {model['context']}, vocabulary {model['vocabulary']:,}, tied; "
        f"micro-batches of {model['micro_batch_size']}"
        for name, model in report["models"].items()
    ]
    columns = ("precision", "waits", "waits_when_logged", "steps", "applied", "taken")
    heads = ("precision", "what waited", "what waited while logging", "steps of each", "applied", "of")
    free_steps = [
        {head: str(found.get(name, found.get("note", ""))) for name, head in zip(columns, heads, strict=True)}
        for found in report["free_steps"]
    ]
    return reports.document(
        "# One GPU",
        SMOKE_BANNER if report["smoke"] else "",
        f"`{report['command']}`, {report['started']}, {report['seconds']:.0f} s",
        reports.bullets([machine_line(report), *about]),
        f"Micro-batches per step: {report['accumulation']}. Fused AdamW (Fabric in fp16: torch's default, since it "
        f"refuses to clip with the fused one), clipped by norm, loss_chunk {report['loss_chunk']}; fp16 with the loss "
        f"scaler. compiled: every loop's blocks, by {report['backend']}; whole: the baseline's model and loss as one "
        f"graph. Each loop takes {report['warm_up']} warm-up steps, then {report['rounds']} rounds in turns with the "
        "others. Speed: relative to the baseline's of the same round, the median and its 95 % interval. MFU: share of "
        "the device's peak FLOP/s, with attention counted in full. Peak: torch's allocator, the loop's own memory.",
        "## Targets",
        "" if TARGETS_ARE_FOR in device else f"The targets are for an {TARGETS_ARE_FOR}; this is {device}.",
        targets_table(report),
        "## Steps that must not wait for the device",
        table(free_steps, left=3),
        "## Loops",
        table_of(report["cells"]),
        reports.bullets([f"left out, no time: {name}" for name in report["left_out"]]),
    )


def table_of(cells: Sequence[Report]) -> str:
    """Every loop of every cell."""
    rows = []
    for cell in cells:
        for name, row in cell.get("loops", {"all": cell}).items():
            timed, share = bool(row.get("seconds")), mfu(cell, name)
            rows.append(
                {
                    "model": cell["model"],
                    "blocks": cell["mode"],
                    "precision": cell["precision"],
                    "loop": name,
                    "ms/step": f"{1000 * median(row['seconds']):,.1f}" if timed else "",
                    "tokens/s": f"{tokens_per_second(cell, name):,.0f}" if timed else "",
                    "speed over baseline": interval(row["speedup"]) if row.get("speedup") and name != BASELINE else "",
                    "MFU": f"{100 * share:.1f} %" if share else "",
                    "peak GiB": f"{row['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in row else "",
                    "note": row.get("note", ""),
                }
            )
    return table(rows, left=4)


def tokens_per_second(cell: Report, name: str) -> float:
    return float(cell["tokens_per_step"] / median(cell["loops"][name]["seconds"]))


def mfu(cell: Report, name: str) -> float:
    """0 where the speed or the peak is not known."""
    if not cell.get("peak_flops") or not cell["loops"][name].get("seconds"):
        return 0.0
    return tokens_per_second(cell, name) * cell["flops_per_token"] / cell["peak_flops"]


def targets_table(report: Report) -> str:
    """Each target, what was measured, and whether its median meets it."""
    found = sorted(targets(report), key=lambda row: ORDER.index(row[0].split(" >")[0]))
    counts = Counter(row[3] for row in found)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    rows = [dict(zip(("target", "where", "measured", "verdict"), row, strict=True)) for row in found]
    return f"{table(rows, left=4)}\n\n{summary}"


def targets(report: Report) -> Iterator[tuple[str, str, str, str]]:
    """(target, where, measured, verdict) of all targets."""

    def judged(met: bool) -> str:
        return NOT_JUDGED if report["smoke"] else MET if met else MISSED

    for found in report["free_steps"]:
        waits = found.get("waits", found.get("note"))
        yield NO_WAIT, found["precision"], waits, judged(waits == "nothing")
    for cell in report["cells"]:
        where = f"{cell['model']} {cell['mode']} {cell['precision']}"
        if cell["mode"] == "whole":
            continue
        loops = {name: row for name, row in cell.get("loops", {}).items() if row.get("speedup")}
        if OURS not in loops:
            note = cell.get("note") or cell["loops"].get(OURS, {}).get("note") or "no baseline to compare with"
            yield SPEED_TARGET, where, note, NOT_MEASURED
            continue
        for name in (BASELINE, *PEERS):
            target = SPEED_TARGET if name == BASELINE else f"dist_amp / {name} > 1"
            if name not in loops:
                note = f"{name}: {cell['loops'].get(name, {}).get('note', 'not measured')}"
                yield target, where, note, NOT_MEASURED
                continue
            ratios = speed_over(loops[OURS], loops[name])
            met = median(ratios) >= SPEED if name == BASELINE else median(ratios) > 1
            yield target, where, interval(ratios), judged(met)
        if OURS_IN_BF16 in loops:
            ratios = speed_over(loops[OURS], loops[OURS_IN_BF16])
            yield f"fp16 / bf16 >= {FP16_SPEED}", where, interval(ratios), judged(median(ratios) >= FP16_SPEED)
        if cell["mode"] == "compiled" and cell["precision"] == "bf16":
            least, share = report["models"][cell["model"]]["mfu"], mfu(cell, OURS)
            measured = f"{100 * share:.1f} %" if share else "the peak is not known; set --peak_flops"
            yield f"MFU >= {100 * least:.0f} %", where, measured, judged(share >= least) if share else NOT_MEASURED
        difference = abs(loops[OURS]["loss"] / loops[BASELINE]["loss"] - 1)
        yield SAME, where, f"differs by {difference:.1e}", judged(difference <= SAME_LOSS)
    for name in report["left_out"]:
        if " whole " not in name:
            yield SPEED_TARGET, name, "left out: no time", NOT_MEASURED


def speed_over(one: Report, other: Report) -> list[float]:
    """One loop's speed over another's, per round; through the baseline's, if they were not timed together."""
    return [a / b for a, b in zip(one["speedup"], other["speedup"], strict=False)]


def draw(report: Report, path: Path) -> None:
    """Bars of speed, MFU and memory, a group for each cell. Errors: ImportError without matplotlib."""
    from matplotlib.lines import Line2D

    def bars(cell: Report, name: str) -> tuple[Bar, Bar, Bar]:
        """Speed, MFU and memory of a loop; in place of a speed, the reason why there is none."""
        row = cell["loops"][name]
        if row.get("speedup"):
            middle, low, high = reports.median_interval(row["speedup"])
            speed = Bar(middle, f"{middle:.3f}", low, high)
        else:
            speed = Bar(0.0, textwrap.shorten(row.get("note", ""), 28, placeholder=" ..."))
        share, peak = 100 * mfu(cell, name), row.get("peak_bytes", 0) / 2**30
        return speed, Bar(share, f"{share:.1f}" if share else ""), Bar(peak, f"{peak:.3g}" if peak else "")

    cells = [cell for cell in report["cells"] if cell.get("loops")]
    warning = "SMOKE TEST: small models on a CPU, the numbers are meaningless\n" if report["smoke"] else ""
    title = f"{warning}dist_amp, the hand-written baseline and its peers: one {report['machine'].get('gpu', 'CPU')}"
    size = (max(8.0, 1.5 * len(cells) + 1.5), 10.0)
    colours = {name: colour for name, colour in COLOURS.items() if any(name in cell["loops"] for cell in cells)}
    labels = ("speed over the baseline", "MFU, %", "peak memory, GiB")
    with reports.figure(path, title, size, 3, 1, sharex=True) as (figure, panels):
        for place, cell in enumerate(cells):
            if cell["mode"] == "compiled" and cell["precision"] == "bf16":
                target = 100 * report["models"][cell["model"]]["mfu"]
                panels[1, 0].hlines(target, place - 0.46, place + 0.46, colors="black", linestyles="--", lw=1)
        panels[0, 0].axhline(SPEED, color="black", ls="--", lw=1)
        for number, (axes, label) in enumerate(zip(panels[:, 0], labels, strict=True)):
            groups = [{name: bars(cell, name)[number] for name in colours if name in cell["loops"]} for cell in cells]
            reports.draw_bars(axes, groups, colours)
            axes.set(ylabel=label, xlim=(-0.5, max(len(cells), 1) - 0.5))
            axes.margins(y=0.32)  # room for the labels of the bars
            axes.set_ylim(bottom=0)
        panels[2, 0].set_xticks(range(len(cells)), [f"{c['model']}\n{c['mode']}\n{c['precision']}" for c in cells])
        reports.draw_legend(figure, colours, [Line2D([], [], color="black", ls="--", lw=1, label="target")])
