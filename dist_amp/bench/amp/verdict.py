"""What the figures of an experiment say: which precision to use, what holds the device up, and what falls short."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dist_amp.bench.amp.experiment import INFERENCE, TRAIN, Experiment, Target
from dist_amp.bench.amp.measure import COMPILED, EAGER
from dist_amp.bench.amp.parity import band, drift, judged
from dist_amp.bench.amp.roofline import BOUNDS, Ceilings
from dist_amp.bench.amp.ways import BY_HAND, FP32, USUAL
from dist_amp.bench.harness import median_interval
from dist_amp.bench.report import Report, interval

# What is worth changing the precision for: assumed.
WORTHWHILE_SPEED, WORTHWHILE_SAVING = 1.05, 0.1
ALIGNMENT = 8  # elements of 2 bytes. Source: NVIDIA, Matrix Multiplication Background User's Guide, section 3
NO_SCALER = 0.97  # bf16 is taken at so much of fp16's speed: it has no scale to watch


def rows_of(told: Report, mode: str, form: str = EAGER) -> Mapping[str, Any]:
    """The figures of one mode and form, with the task's own micro-batches."""
    for group in told["groups"]:
        if (group["mode"], group["form"], group["micro_batch_size"]) == (mode, form, told["micro_batch_size"]):
            return dict(group["rows"])
    return {}


def speed(row: Report) -> float:
    """Float32's time over this one's; nan where it was not measured."""
    return median_interval(row["of_fp32"])[0] if row.get("of_fp32") else math.nan


def is_worthwhile(row: Report, rows: Mapping[str, Any]) -> bool:
    """Whether it is faster than float32, beyond what is noise, or smaller and perhaps no slower."""
    middle, low, high = median_interval(row["of_fp32"])
    return (middle >= WORTHWHILE_SPEED and low > 1) or (saving(row, rows) >= WORTHWHILE_SAVING and high >= 1)


def saving(row: Report, rows: Mapping[str, Any]) -> float:
    """The share of float32's peak memory that is not needed; nan where it was not measured."""
    if "peak_bytes" not in row or "peak_bytes" not in rows.get(FP32, {}):
        return math.nan
    return float(1 - row["peak_bytes"] / rows[FP32]["peak_bytes"])


def add_parity(told: dict[str, Any]) -> None:
    """Each curve's drift, the band, and how it stands to it."""
    reference = told["curves"].get(FP32, [])
    told["parity"] = {
        name: {"drift": drift(curve, reference), "band": band(name), "verdict": judged(name, curve, reference)}
        for name, curve in told["curves"].items()
        if reference
    }


def best(told: Report, mode: str) -> str:
    """The precision to use."""
    rows = rows_of(told, mode)
    learn_alike = [name for name in USUAL if told["parity"].get(name, {}).get("verdict") not in ("drifts", "diverges")]
    measured = [name for name in learn_alike if rows.get(name, {}).get("of_fp32") and name != FP32]
    worthwhile = [name for name in measured if is_worthwhile(rows[name], rows)]
    if not worthwhile:
        return FP32
    fastest = max(worthwhile, key=lambda name: speed(rows[name]))
    if "bf16" in worthwhile and speed(rows["bf16"]) >= NO_SCALER * speed(rows[fastest]):
        return "bf16"
    return fastest


def verdict(told: Report, experiment: Experiment, ceilings: Ceilings) -> list[str]:
    """Sentences, the most important first."""
    lines = []
    for mode in (TRAIN, INFERENCE):
        rows = rows_of(told, mode)
        if rows.get(FP32, {}).get("seconds"):
            lines += [recommendation(told, mode), *reasons(told, mode, ceilings)]
        elif others := [name for name, row in rows.items() if row.get("seconds")]:
            why = rows.get(FP32, {}).get("cant", "no figures")
            lines.append(f"{mode}: fp32 is not there to compare with ({why}); these are: {', '.join(others)}.")
    lines += [*called_out(told), *about_scaler(told), *about_alignment(told)]
    return [*lines, *about_loop(told), *shortfalls(told, experiment)]


def recommendation(told: Report, mode: str) -> str:
    name, rows = best(told, mode), rows_of(told, mode)
    if name == FP32:
        text = f"{mode}: fp32. No other precision is {WORTHWHILE_SPEED:g} times as fast, or smaller and no slower."
    else:
        saved = saving(rows[name], rows)
        memory = "" if math.isnan(saved) else f" and {100 * abs(saved):.0f} % {'less' if saved >= 0 else 'more'} memory"
        text = f"{mode}: {name}. {speed(rows[name]):.2f} times the speed of fp32{memory}."
    compiled = rows_of(told, mode, COMPILED).get(name, {})
    if compiled.get("seconds"):
        gain = median_interval(rows[name]["seconds"])[0] / median_interval(compiled["seconds"])[0]
        helps = "makes it" if gain >= WORTHWHILE_SPEED else "does not help:"
        text += f" Compiling {helps} {gain:.2f} times as fast."
    return text


def reasons(told: Report, mode: str, ceilings: Ceilings) -> Iterator[str]:
    """What the step is bound by in float32 and in the precision to use, from what was counted."""
    work = told["work"].get(mode, {})
    for name in dict.fromkeys([FP32, best(told, mode) if best(told, mode) != FP32 else "bf16"]):
        if name not in work:
            continue
        counted, seconds = work[name], ceilings.seconds(work[name])
        bound = ceilings.bound(counted)
        rows = rows_of(told, mode)
        share = ""
        if rows.get(name, {}).get("seconds"):
            taken = median_interval(rows[name]["seconds"])[0]
            share = f" That explains {100 * seconds[bound] / taken:.0f} % of the {si(taken, 's')} it takes."
        flops, traffic = si(sum(counted["flops"].values()), "FLOP"), si(counted["bytes"], "B")
        yield (
            f"{name} is {BOUNDS[bound]}: {flops} are {si(seconds['products'], 's')} of products, "
            f"{traffic} {si(seconds['traffic'], 's')} of traffic, "
            f"{counted['operations']} operations {si(seconds['launches'], 's')} of launching.{share}"
        )


def called_out(told: Report) -> Iterator[str]:
    """The precisions that do not learn what float32 does."""
    for name, row in told["parity"].items():
        if row["verdict"] == "drifts":
            yield (
                f"{name} DRIFTS: its loss curve is {100 * row['drift']:.1f} % of float32's fall away from it; the band "
                f"is {100 * row['band']:.1f} %."
            )
        if row["verdict"] == "diverges":
            yield f"{name} DIVERGES: its loss is not finite."
    if any(row["verdict"] == "nothing to learn" for row in told["parity"].values()):
        yield "The loss of float32 does not fall, so that there is no curve to compare with: take more steps."


def about_scaler(told: Report) -> Iterator[str]:
    rows = rows_of(told, TRAIN)
    cost = over(rows, "fp16", "fp16_unscaled")
    if cost:
        skipped = rows["fp16"].get("skipped_steps", 0)
        yield (
            f"fp16 runs at {interval(cost)} of its speed without the loss scaler, which skipped {skipped} "
            f"step{'' if skipped == 1 else 's'} to find its scale."
        )


def about_alignment(told: Report) -> Iterator[str]:
    """What a micro-batch size costs that is no multiple of 8, of which tensor cores take their operands."""
    groups = {
        group["micro_batch_size"]: group["rows"]
        for group in told["groups"]
        if (group["mode"], group["form"]) == (TRAIN, EAGER)
    }
    even = [size for size in groups if size % ALIGNMENT == 0]
    for size in sorted(groups.keys() - even) if even else ():
        near = min(even, key=lambda other: abs(other - size))
        pairs = {name: (groups[size].get(name, {}), groups[near].get(name, {})) for name in USUAL}
        rates = [
            f"{size / near * median_interval(b['seconds'])[0] / median_interval(a['seconds'])[0]:.2f} in {name}"
            for name, (a, b) in pairs.items()
            if a.get("seconds") and b.get("seconds")
        ]
        if rates:
            yield f"Micro-batches of {size} give so many times the samples per second of {near}: {', '.join(rates)}."


def about_loop(told: Report) -> Iterator[str]:
    """What train_step costs against the loop by hand."""
    rows = rows_of(told, TRAIN)
    parts = [f"{interval(over(rows, way, name))} in {way}" for name, way in BY_HAND.items() if over(rows, way, name)]
    if parts:
        yield f"Speed of train_step over the loop by hand: {', '.join(parts)}."


def over(rows: Mapping[str, Any], name: str, other: str) -> Sequence[float]:
    """One's speed over the other's, round by round."""
    pair = [rows.get(one, {}).get("of_fp32", []) for one in (name, other)]
    return [mine / theirs for mine, theirs in zip(*pair, strict=False)]


def targets(told: Report, experiment: Experiment) -> Iterator[tuple[Target, float, float]]:
    """(target, speed, saving) of what was expected; nan where it was not measured."""
    for target in experiment.targets:
        rows = rows_of(told, target.mode)
        ratios = over(rows, target.way, target.over)
        yield target, median_interval(ratios)[0] if ratios else math.nan, saving(rows.get(target.way, {}), rows)


def shortfalls(told: Report, experiment: Experiment) -> Iterator[str]:
    """Where less came out than was expected, whether the loop or the device is the cause: by the loop by hand."""
    rows = rows_of(told, TRAIN)
    for target, reached, saved in targets(told, experiment):
        if reached < target.speed:
            by_hand = over(rows, f"{target.way} by hand", f"{target.over} by hand") if target.mode == TRAIN else []
            cause = ""
            if by_hand:
                theirs = median_interval(by_hand)[0]
                cause = "the device is the cause" if theirs < target.speed else "train_step is the cause"
                cause = f"; the loop by hand reaches {theirs:.2f}: {cause}"
            yield f"{target.mode} {target.way}: {reached:.2f} of the {target.speed:.2f} that were expected{cause}."
        if target.saving and saved < target.saving:
            expected = f"{100 * target.saving:.0f} % expected"
            yield f"{target.mode} {target.way}: {100 * saved:.0f} % of memory saved, {expected}."


def si(value: float, unit: str) -> str:
    """0.0031 s -> "3.1 ms"; three digits."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}"
    power = max(-3, min(4, math.floor(math.log10(abs(value)) / 3)))
    prefix = ("n", "µ", "m", "", "k", "M", "G", "T")[power + 3]
    return f"{value / 1000**power:.3g} {prefix}{unit}"
