"""What the numbers of an experiment mean: the precision to use, what limits the device, and missed targets."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dist_amp.bench.amp.experiments import INFERENCE, MODES, TRAIN, Experiment, Target
from dist_amp.bench.amp.measure import BASELINES, COMPILED, EAGER, FP32, USUAL
from dist_amp.bench.amp.parity import NOISE, drift, fall, judged, tolerance
from dist_amp.bench.amp.roofline import BOUNDS, Ceilings
from dist_amp.bench.report import Report, interval, median, median_interval, si

# What is worth changing the precision for: assumed.
WORTHWHILE_SPEED, WORTHWHILE_SAVING = 1.05, 0.1
ALIGNMENT = 8  # elements of 2 bytes. Source: NVIDIA, Matrix Multiplication Background User's Guide, section 3
EXPLAINS = 50  # percent of a step's time that a limit must account for: assumed
NO_SCALER = 0.97  # bf16 is preferred at this share of fp16's speed, since it needs no loss scale


def rows_of(result: Report, mode: str, form: str = EAGER) -> Mapping[str, Any]:
    """The rows of one mode and form, with the task's own micro-batches."""
    for group in result["groups"]:
        if (group["mode"], group["form"], group["micro_batch_size"]) == (mode, form, result["micro_batch_size"]):
            return dict(group["rows"])
    return {}


def speedup(row: Report) -> float:
    """Over float32; nan where it was not measured."""
    return median(row["speedup"]) if row.get("speedup") else math.nan


def over(rows: Mapping[str, Any], name: str, other: str) -> list[float]:
    """One's speed over another's, round by round."""
    pair = [rows.get(one, {}).get("speedup", []) for one in (name, other)]
    return [mine / theirs for mine, theirs in zip(*pair, strict=False)]


def saving(row: Report, rows: Mapping[str, Any]) -> float:
    """The share of float32's peak memory that is saved; nan where it was not measured."""
    if "peak_bytes" not in row or "peak_bytes" not in rows.get(FP32, {}):
        return math.nan
    return float(1 - row["peak_bytes"] / rows[FP32]["peak_bytes"])


def is_worthwhile(row: Report, rows: Mapping[str, Any]) -> bool:
    """Whether it is faster than float32 beyond noise, or smaller and not slower beyond noise."""
    middle, low, high = median_interval(row["speedup"])
    smaller = saving(row, rows) >= WORTHWHILE_SAVING
    return (middle >= WORTHWHILE_SPEED and low > 1) or (smaller and middle >= 2 - WORTHWHILE_SPEED and high >= 1)


def per_second(group: Report, name: str) -> float:
    """Samples per second."""
    return float(group["samples_per_step"] / median(group["rows"][name]["seconds"]))


def add_parity(result: dict[str, Any]) -> None:
    """Add each curve's drift, its tolerance and the verdict."""
    reference, again = result["curves"].get(FP32, []), result["again"]
    result["parity"] = {
        name: {
            "drift": drift(curve, reference),
            "tolerance": tolerance(name, reference, again),
            "verdict": judged(name, curve, reference, again),
        }
        for name, curve in result["curves"].items()
    }


def objection(result: Report, mode: str, name: str) -> str:
    """Why a precision must not be used, however fast it is; "" if nothing is wrong with it."""
    rows = rows_of(result, mode)
    row, base = rows.get(name, {}), rows.get(FP32, {})
    if (learned := result["parity"].get(name, {}).get("verdict")) in ("drifts", "diverges"):
        return str(learned)
    if mode == INFERENCE and "loss" in row and "loss" in base:
        # Near zero no precision has the last digits right: there the loss's fall is the scale.
        scale = max(abs(base["loss"]), fall(result["curves"].get(FP32, [])))
        if not abs(row["loss"] - base["loss"]) <= tolerance(name) * scale:
            return f"its loss is {row['loss']:.4g}, float32's is {base['loss']:.4g}"
    return "" if row.get("speedup") else str(row.get("note", "not measured"))


def best(result: Report, mode: str) -> str:
    """The precision to use."""
    rows = rows_of(result, mode)
    fit = [name for name in USUAL if name in rows and name != FP32 and not objection(result, mode, name)]
    worthwhile = [name for name in fit if is_worthwhile(rows[name], rows)]
    if not worthwhile:
        return FP32
    fastest = max(worthwhile, key=lambda name: speedup(rows[name]))
    if "bf16" in worthwhile and speedup(rows["bf16"]) >= NO_SCALER * speedup(rows[fastest]):
        return "bf16"
    return fastest


def verdict(result: Report, experiment: Experiment, ceilings: Ceilings) -> list[str]:
    """Sentences, the most important first."""
    lines = []
    for mode in MODES:
        rows = rows_of(result, mode)
        if rows.get(FP32, {}).get("seconds"):
            lines += [recommendation(result, mode), *limits(result, mode, ceilings)]
        elif measured := {name: row for name, row in rows.items() if row.get("seconds")}:
            why, numbers = rows.get(FP32, {}).get("note", "not measured"), []
            for name, row in measured.items():
                memory = f", {si(row['peak_bytes'], 'B')}" if "peak_bytes" in row else ""
                numbers.append(f"{name} ({si(median(row['seconds']), 's')}{memory})")
            lines.append(f"{mode}: there is no fp32 to compare with ({why}); measured: {', '.join(numbers)}.")
    return [*lines, *learning(result), *comparisons(result), *shortfalls(result, experiment)]


def recommendation(result: Report, mode: str) -> str:
    name, rows = best(result, mode), rows_of(result, mode)
    others = {other: objection(result, mode, other) for other in USUAL if other in rows and other != FP32}
    if result["parity"].get(FP32, {}).get("verdict") == "diverges" and name == FP32:
        return f"{mode}: no precision can be recommended, since float32 itself diverges."
    if name != FP32:
        saved, noisy = saving(rows[name], rows), median_interval(rows[name]["speedup"])[1] <= 1
        memory = "" if math.isnan(saved) else f", {100 * abs(saved):.0f} % {'less' if saved >= 0 else 'more'} memory"
        speed = f"{interval(rows[name]['speedup'])} times the speed of fp32{', which may be noise' if noisy else ''}"
        text = f"{mode}: use {name}. {speed}{memory}."
    elif not others:
        text = f"{mode}: use fp32. Nothing else was measured."
    else:
        excluded = "; ".join(f"{other}: {why}" for other, why in others.items() if why)
        text = f"{mode}: use fp32. No other precision is {WORTHWHILE_SPEED:g} times as fast, or smaller and not slower"
        text += f" (excluded: {excluded})." if excluded else "."
    compiled = rows_of(result, mode, COMPILED).get(name, {})
    if compiled.get("seconds"):
        gain = median(rows[name]["seconds"]) / median(compiled["seconds"])
        change = f"{gain:.2f} times as fast" if gain >= 1 else f"{1 / gain:.2f} times slower"
        text += f" Compiling makes it {change} (timed separately)."
    return text


def limits(result: Report, mode: str, ceilings: Ceilings) -> Iterator[str]:
    """What limits a step in float32 and in the precision to use, estimated from counted work."""
    work, rows, used = result["work"].get(mode, {}), rows_of(result, mode), best(result, mode)
    for name in dict.fromkeys([FP32, used if used != FP32 else "bf16"]):
        counted = work.get(name)
        if counted is None or not rows.get(name, {}).get("seconds"):
            continue
        if "note" in counted:
            yield f"What limits {name} is unknown: counting its operations {counted['note']}."
            continue
        seconds, taken = ceilings.seconds(counted), median(rows[name]["seconds"])
        bound = max(seconds, key=seconds.__getitem__)
        share = 100 * seconds[bound] / taken
        is_bound = f"is {BOUNDS[bound]}" if share >= EXPLAINS else "is far from all three limits"
        flops, traffic = si(sum(counted["flops"].values()), "FLOP"), si(counted["bytes"], "B")
        yield (
            f"{name} {is_bound}: {flops} of matrix products take at least {si(seconds['products'], 's')}, "
            f"{traffic} of memory traffic {si(seconds['traffic'], 's')}, "
            f"launching {counted['operations']} operations {si(seconds['launches'], 's')}. "
            f"The longest of these explains {share:.0f} % of the measured {si(taken, 's')}."
        )


def learning(result: Report) -> Iterator[str]:
    """The precisions that do not learn what float32 does."""
    for name, row in result["parity"].items():
        apart, limit = 100 * row["drift"], 100 * row["tolerance"]
        if row["verdict"] == "drifts":
            yield (
                f"{name} DRIFTS: its loss curve is {apart:.1f} % of float32's fall away from float32's; the tolerance "
                f"is {limit:.1f} %."
            )
        if row["verdict"] == "diverges":
            yield f"{name} DIVERGES: its loss is not finite."
        if row["verdict"] == "too noisy":
            yield f"{name} can't be judged: two float32 runs are {limit / NOISE:.0f} % apart. Take more steps."
    if FP32 in result["curves"] and any(row["verdict"] == "nothing to compare" for row in result["parity"].values()):
        yield "The float32 loss does not fall, so there is no curve to compare with: take more steps."
    for name in rows_of(result, INFERENCE):
        if "its loss" in (why := objection(result, INFERENCE, name)):
            yield f"{name} in inference: {why}, with the same weights."
    if short := [f"{name} {len(curve)}" for name, curve in result["curves"].items() if len(curve) < result["steps"]]:
        yield f"There was time for only a part of the {result['steps']} training steps: {', '.join(short)}."


def comparisons(result: Report) -> Iterator[str]:
    """What the loss scaler, unaligned micro-batches and train_step itself cost."""
    rows = rows_of(result, TRAIN)
    cost = over(rows, "fp16", "fp16_unscaled")
    if cost and result["parity"].get("fp16", {}).get("verdict") != "diverges":
        skipped = rows["fp16"].get("skipped_steps", 0)
        steps = f"{skipped} step{'' if skipped == 1 else 's'}"
        yield f"fp16 runs at {interval(cost)} of its speed without the loss scaler, which skipped {steps} at its start."
    groups = {group["micro_batch_size"]: group for group in sizes_of(result)}
    for size in filter(lambda size: size % ALIGNMENT, groups):
        near = [other for other in groups if other % ALIGNMENT == 0 and abs(other - size) < ALIGNMENT]
        rates = [
            f"{per_second(groups[size], name) / per_second(groups[near[0]], name):.2f} in {name}"
            for name in USUAL
            if near and all(groups[one]["rows"].get(name, {}).get("seconds") for one in (size, near[0]))
        ]
        if rates:
            yield (
                f"Samples per second with micro-batches of {size}, relative to {near[0]}: {', '.join(rates)} (timed "
                "separately)."
            )
    pairs = [(precision, over(rows, precision, name)) for name, precision in BASELINES.items()]
    if parts := [f"{interval(ratios)} in {precision}" for precision, ratios in pairs if ratios]:
        yield f"Speed of train_step relative to the baseline loop: {', '.join(parts)}."


def sizes_of(result: Report) -> list[Any]:
    """The groups of eager training, by micro-batch size, the smallest first."""
    groups = [group for group in result["groups"] if (group["mode"], group["form"]) == (TRAIN, EAGER)]
    return sorted(groups, key=lambda group: group["micro_batch_size"])


def targets(result: Report, experiment: Experiment) -> Iterator[tuple[Target, float, float]]:
    """(target, speed, saving); nan where it was not measured."""
    for target in experiment.targets:
        rows = rows_of(result, target.mode)
        ratios = over(rows, target.precision, target.over)
        yield target, float(np.median(ratios or [math.nan])), saving(rows.get(target.precision, {}), rows)


def shortfalls(result: Report, experiment: Experiment) -> Iterator[str]:
    """Missed targets; the baseline loop shows whether train_step or the device is the cause."""
    for target, reached, saved in targets(result, experiment):
        what, cause = f"{target.mode} {target.precision}", ""
        ratios: Sequence[float] = over(
            rows_of(result, TRAIN), f"{target.precision} baseline", f"{target.over} baseline"
        )
        if target.mode == TRAIN and ratios:
            theirs = median(ratios)
            whose = "the device" if theirs < target.speed else "train_step"
            cause = f"; the baseline loop reaches {theirs:.2f}: {whose} is the cause"
        if reached < target.speed:
            yield f"{what}: {reached:.2f} of the expected {target.speed:.2f}{cause}."
        if target.saving and saved < target.saving:
            yield f"{what}: {100 * saved:.0f} % of memory saved, {100 * target.saving:.0f} % expected."
