"""What `python -m dist_amp.bench gpu` found, as JSON, as Markdown with a verdict for each target, and as a picture."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dist_amp.bench.harness import median_interval
from dist_amp.bench.report import (
    BARE,
    OKABE_ITO,
    OURS,
    PEERS,
    Report,
    interval,
    machine_line,
    picture,
    rows_of_markdown,
)
from dist_amp.bench.report import save as save_report

OURS_IN_BF16, WHOLE = "dist_amp, bf16", "bare, whole"  # BARE, OURS and PEERS beside
SPEED, FP16_SPEED = 0.99, 0.97  # of the bare loop; of bf16
# How far a loss may be from the bare loop's after the same ten steps, as a share of it. In a reduced model on a CPU a
# step fewer makes 7e-3 of it, and another order of the same operations 6e-6; a GPU adds in an order of its own.
SAME_LOSS = 2e-3
TARGETS_ARE_FOR = "H200"
VERDICTS = ("met", "missed", "open", "means nothing")
NO_WAIT, SAME = "no step waits for the device", f"the bare loop's loss, within {SAME_LOSS:g}"
ORDER = (NO_WAIT, "MFU", *(f"dist_amp / {name}" for name in (BARE, *PEERS)), "fp16 / bf16", SAME)
COLOURS = {
    BARE: OKABE_ITO["grey"],
    OURS: OKABE_ITO["blue"],
    OURS_IN_BF16: OKABE_ITO["sky blue"],
    PEERS[0]: OKABE_ITO["orange"],
    PEERS[1]: OKABE_ITO["green"],
    WHOLE: OKABE_ITO["purple"],
}


def save(report: Report, folder: Path) -> None:
    """gpu.json and gpu.md."""
    save_report(report, markdown(report), folder, "gpu")


def finish(report: Report, folder: Path) -> str:
    """The picture too; returns the closing words."""
    save(report, folder)
    drawn = picture(draw, report, folder / "gpu.png")
    heading = "\n".join(["", SMOKE_BANNER, ""]) if report["smoke"] else ""
    return f"{heading}{targets_table(report)}\n\n{folder}/gpu.json, {folder}/gpu.md, {drawn}"


SMOKE_BANNER = "**Smoke form: reduced models on a CPU. No figure below means anything.**"


def markdown(report: Report) -> str:
    """The whole report."""
    device, models = report["machine"].get("gpu", "CPU"), report["models"]
    about = [
        f"{name}: a GPT of {model['about']} parameters: {model['layers']} layers, {model['width']} wide, "
        f"{model['heads']} heads, context {model['context']}, vocabulary {model['vocabulary']:,}, tied; "
        f"micro-batches of {model['micro_batch_size']}"
        for name, model in models.items()
    ]
    parts = [
        "# One GPU",
        SMOKE_BANNER if report["smoke"] else "",
        f"`{report['command']}`, {report['began']}, {report['seconds']:.0f} s",
        "\n".join([f"- {line}" for line in [machine_line(report), *about]]),
        f"Micro-batches in a step: {report['accumulation']}. Fused AdamW (Fabric in fp16: torch's choice, since it "
        f"refuses to clip with the fused one), clipped by norm, loss_chunk {report['loss_chunk']}; fp16 with the loss "
        f"scaler. compiled: every loop's blocks, by {report['backend']}; "
        f"whole: the bare loop's model and loss as one graph. Each loop takes {report['warm_up']} steps to warm up, "
        f"then {report['rounds']} rounds in turns with the others; of bare: its speed over the bare loop's of the same "
        "round, the median and its 95 % interval. MFU: the share of the device's peak, attention counted whole. Peak: "
        "of torch's allocator, the loop's own.",
        "## Targets",
        "" if TARGETS_ARE_FOR in device else f"They are for an {TARGETS_ARE_FOR}; this is {device}.",
        targets_table(report),
        "## Steps that wait for nothing",
        free_steps_table(report),
        "## Loops",
        table(report["cells"]),
        "\n".join(f"- left out, no time: {name}" for name in report["left_out"]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(cells: Sequence[Report]) -> str:
    """Every loop of every cell."""
    head = ["model", "blocks", "precision", "loop", "ms/step", "tokens/s", "of bare", "MFU", "peak GiB", "note"]
    rows = []
    for cell in cells:
        where = [cell["model"], cell["mode"], cell["precision"]]
        if "cant" in cell:
            rows.append([*where, "all", *[""] * 5, cell["cant"]])
        for name, row in cell.get("loops", {}).items():
            peak = f"{row['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in row else ""
            if not row.get("seconds"):
                rows.append([*where, name, *[""] * 4, peak, row.get("cant", "")])
                continue
            of_bare = "" if name == BARE or not row.get("of_bare") else interval(row["of_bare"])
            share = mfu(cell, name)
            figures = [f"{1000 * seconds_of(row):,.1f}", f"{tokens_per_second(cell, name):,.0f}", of_bare]
            figures += [f"{100 * share:.1f} %" if share else "", peak, row.get("cant", "")]
            rows.append([*where, name, *figures])
    return rows_of_markdown(head, rows, left=4)


def seconds_of(row: Report) -> float:
    return median_interval(row["seconds"])[0]


def tokens_per_second(cell: Report, name: str) -> float:
    return float(cell["tokens_per_step"] / seconds_of(cell["loops"][name]))


def mfu(cell: Report, name: str) -> float:
    """0 where the peak is not known."""
    if not cell["peak_flops"]:
        return 0.0
    return tokens_per_second(cell, name) * cell["flops_per_token"] / cell["peak_flops"]


def free_steps_table(report: Report) -> str:
    rows = []
    for told in report["free_steps"]:
        figures = [str(told[name]) if name in told else "" for name in ("steps", "applied", "taken")]
        waits = [str(told.get(name, told.get("cant", ""))) for name in ("waits", "waits_when_logged")]
        rows.append([told["precision"], *waits, *figures])
    head = ["precision", "what waited", "what waited when figures were logged", "steps of each", "applied", "of"]
    return rows_of_markdown(head, rows, left=3)


def targets_table(report: Report) -> str:
    """Each target, what was measured, and whether it is met: by the median."""
    rows = sorted(targets(report), key=lambda row: ORDER.index(row[0].split(" >")[0]))
    counts = Counter(row[3] for row in rows)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    return f"{rows_of_markdown(['target', 'where', 'measured', 'verdict'], rows, left=4)}\n\n{summary}"


def targets(report: Report) -> Iterator[tuple[str, str, str, str]]:
    """(target, where, measured, verdict) of all that was looked for."""
    for told in report["free_steps"]:
        waits = told.get("waits", told.get("cant"))
        yield NO_WAIT, told["precision"], waits, judged(waits == "nothing", report)
    for cell in report["cells"]:
        where = f"{cell['model']} {cell['mode']} {cell['precision']}"
        if cell["mode"] == "whole":
            continue
        loops = {name: row for name, row in cell.get("loops", {}).items() if row.get("of_bare")}
        if OURS not in loops:
            why = cell.get("cant") or cell["loops"].get(OURS, {}).get("cant") or "no bare loop to compare with"
            yield f"dist_amp / bare >= {SPEED}", where, why, VERDICTS[2]
            continue
        for name, least in ((BARE, SPEED), *((peer, 1.0) for peer in PEERS)):
            target = f"dist_amp / {name} {'>=' if name == BARE else '>'} {least:g}"
            if name not in loops:
                yield target, where, f"{name}: {cell['loops'].get(name, {}).get('cant', 'not measured')}", VERDICTS[2]
                continue
            ratios = paired(loops[OURS], loops[name])
            middle = median_interval(ratios)[0]
            met = middle >= least if name == BARE else middle > least
            yield target, where, interval(ratios), judged(met, report)
        if OURS_IN_BF16 in loops:
            ratios = paired(loops[OURS], loops[OURS_IN_BF16])
            met = median_interval(ratios)[0] >= FP16_SPEED
            yield f"fp16 / bf16 >= {FP16_SPEED}", where, interval(ratios), judged(met, report)
        if cell["mode"] == "compiled" and cell["precision"] == "bf16":
            least, share = report["models"][cell["model"]]["mfu"], mfu(cell, OURS)
            verdict = judged(share >= least, report) if share else VERDICTS[2]
            measured = f"{100 * share:.1f} %" if share else "the peak is not known: set --peak_flops"
            yield f"MFU >= {100 * least:.0f} %", where, measured, verdict
        apart = abs(loops[OURS]["loss"] / loops[BARE]["loss"] - 1)
        yield SAME, where, f"{apart:.1e} apart", judged(apart <= SAME_LOSS, report)
    for name in report["left_out"]:
        if " whole " not in name:
            yield f"dist_amp / bare >= {SPEED}", name, "left out: no time", VERDICTS[2]


def paired(one: Report, other: Report) -> list[float]:
    """One's speed over the other's, round by round; by way of the bare loop's, if they were not there together."""
    return [a / b for a, b in zip(one["of_bare"], other["of_bare"], strict=False)]


def judged(met: bool, report: Report) -> str:
    if report["smoke"]:
        return VERDICTS[3]
    return VERDICTS[0] if met else VERDICTS[1]


def draw(report: Report, path: Path) -> None:
    """Bars of speed, MFU and memory, a group for each cell. Errors: ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    cells = [cell for cell in report["cells"] if cell.get("loops")]
    names = [name for name in COLOURS if any(name in cell["loops"] for cell in cells)]
    figure = Figure(figsize=(max(8.0, 1.5 * len(cells) + 1.5), 10), layout="constrained")
    FigureCanvasAgg(figure)
    warning = "SMOKE FORM: reduced models on a CPU, no figure means anything\n" if report["smoke"] else ""
    device = report["machine"].get("gpu", "CPU")
    figure.suptitle(f"{warning}dist_amp against the loop written by hand, and its peers: one {device}")
    panels = speed, share, memory = figure.subplots(3, 1, sharex=True)
    for place, cell in enumerate(cells):
        draw_cell(panels, place, cell, [name for name in names if name in cell["loops"]])
        if cell["mode"] == "compiled" and cell["precision"] == "bf16":
            least = 100 * report["models"][cell["model"]]["mfu"]
            share.hlines(least, place - 0.46, place + 0.46, colors="black", linestyles="--", lw=1)
    speed.axhline(SPEED, color="black", ls="--", lw=1)
    speed.set_ylabel("speed, of the bare loop's")
    share.set_ylabel("MFU, %")
    memory.set_ylabel("peak memory, GiB")
    for axes in panels:
        axes.margins(y=0.32)  # room for the figures on the bars
        axes.set_ylim(bottom=0)
        axes.set_xlim(-0.5, max(len(cells), 1) - 0.5)
        axes.spines[["top", "right"]].set_visible(False)
    memory.set_xticks(range(len(cells)), [f"{cell['model']}\n{cell['mode']}\n{cell['precision']}" for cell in cells])
    handles: list[Any] = [Patch(color=COLOURS[name], label=name) for name in names]
    handles.append(Line2D([], [], color="black", ls="--", lw=1, label="target"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=120)


def draw_cell(panels: Sequence[Any], place: int, cell: Report, names: Sequence[str]) -> None:
    """The bars of a cell's loops, side by side; what has no speed has its reason there."""
    speed, share, memory = panels
    width = 0.86 / max(len(names), 4)
    for number, name in enumerate(names):
        row, at = cell["loops"][name], place + (number - (len(names) - 1) / 2) * width
        if row.get("of_bare"):
            middle, low, high = median_interval(row["of_bare"])
            bar(speed, at, width, middle, f"{middle:.3f}", name, (middle - low, high - middle))
        else:
            why = row.get("cant", "").removeprefix("can't: ").split(";")[0]
            bar(speed, at, width, 0, textwrap.shorten(why, 28, placeholder=" ..."), name)
        if row.get("seconds") and cell["peak_flops"]:
            bar(share, at, width, 100 * mfu(cell, name), f"{100 * mfu(cell, name):.1f}", name)
        if "peak_bytes" in row:
            peak = row["peak_bytes"] / 2**30
            bar(memory, at, width, peak, f"{peak:.{1 if peak >= 1 else 2}f}", name)


def bar(
    axes: Any, at: float, width: float, height: float, text: str, name: str, either_side: tuple[float, float] = (0, 0)
) -> None:
    """One bar, with its figure above it and the interval `either_side` of its height."""
    axes.bar(at, height, width * 0.94, color=COLOURS[name])
    if any(either_side):
        axes.errorbar(at, height, [[side] for side in either_side], color="black", lw=1)
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}  # over the line of a target
    style = {"textcoords": "offset points", "ha": "center", "va": "bottom", "rotation": 90, "fontsize": 8}
    axes.annotate(text, (at, height + either_side[1]), (0, 3), bbox=white, **style)
