"""What the numbers of an experiment mean: the precision to use, what limits the device, and missed targets."""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from dist_amp.bench.amp.experiments import INFERENCE, MODES, TRAIN, Experiment
from dist_amp.bench.amp.measure import BASELINES, EAGER, FP32, USUAL
from dist_amp.bench.amp.parity import NOISE, fall, parity, tolerance
from dist_amp.bench.amp.roofline import BOUNDS, Ceilings
from dist_amp.bench.report import TARGETS_ARE_FOR, Report, interval, median, median_interval, si

# What is worth changing the precision for: assumed.
WORTHWHILE_SPEED, WORTHWHILE_SAVING = 1.05, 0.1
EXPLAINS = 50  # percent of a step's time that a limit must account for: assumed
NO_SCALER = 0.97  # bf16 is preferred at this share of fp16's speed, since it needs no loss scale


def rows_of(result: Report, mode: str, form: str = EAGER) -> Mapping[str, Any]:
    """The rows of one mode and form, with the task's own micro-batches."""
    for group in result["groups"]:
        if (group["mode"], group["form"], group["micro_batch_size"]) == (mode, form, result["micro_batch_size"]):
            return dict(group["rows"])
    return {}


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


def objection(result: Report, mode: str, name: str) -> str:
    """Why a precision must not be used, however fast it is; "" if nothing is wrong with it."""
    rows = rows_of(result, mode)
    row, base = rows[name], rows.get(FP32, {})
    if (learned := result["parity"].get(name, {}).get("verdict")) in ("drifts", "diverges"):
        return str(learned)
    if mode == INFERENCE and "loss" in row and "loss" in base:
        # Near zero no precision has the last digits right: there the loss's fall is the scale.
        scale = max(abs(base["loss"]), fall(result["curves"].get(FP32, [])))
        if not abs(row["loss"] - base["loss"]) <= tolerance(name) * scale:
            return f"its loss is {row['loss']:.4g}, float32's is {base['loss']:.4g} with the same weights"
    return "" if row.get("speedup") else str(row.get("note", "not measured"))


def ranking(result: Report, mode: str) -> list[str]:
    """The precision to use, then the others that learn the same, the fastest first; [] if none can be recommended."""
    rows, name = rows_of(result, mode), best(result, mode)
    is_diverging = result["parity"].get(FP32, {}).get("verdict") == "diverges"
    if not rows.get(FP32, {}).get("seconds") or (name == FP32 and is_diverging):
        return []
    fit = [other for other in USUAL if other in rows and other != name and not objection(result, mode, other)]
    return [name, *sorted(fit, key=lambda other: -median(rows[other]["speedup"]))]


def best(result: Report, mode: str) -> str:
    """The precision to use."""
    rows = rows_of(result, mode)
    fit = [name for name in USUAL if name in rows and name != FP32 and not objection(result, mode, name)]
    speeds = {name: median(rows[name]["speedup"]) for name in fit if is_worthwhile(rows[name], rows)}
    fastest = max(speeds, key=speeds.__getitem__, default=FP32)
    return "bf16" if "bf16" in speeds and speeds["bf16"] >= NO_SCALER * speeds[fastest] else fastest


def verdict(result: dict[str, Any], experiment: Experiment, ceilings: Ceilings) -> list[str]:
    """Sentences, the most important first. Adds `parity`: how each loss curve compares with float32's."""
    curves = result["curves"]
    compare = partial(parity, reference=curves.get(FP32, []), again=result["again"])
    result["parity"] = {name: compare(name, curve) for name, curve in curves.items()}
    lines = []
    for mode in MODES:
        if rows_of(result, mode):
            lines += [recommendation(result, mode), *limits(result, mode, ceilings)]
    lines += [*learning(result), *costs(rows_of(result, TRAIN)), *expectations(result, experiment)]
    return lines + [f"left out: {what}" for what in result["left_out"]]


def recommendation(result: Report, mode: str) -> str:
    """The precision to use, and why the others are not an option."""
    rows, name = rows_of(result, mode), best(result, mode)
    if not rows.get(FP32, {}).get("seconds"):
        return f"{mode}: there is no fp32 to compare with ({rows.get(FP32, {}).get('note', 'not measured')})."
    if name != FP32:
        saved = f"{100 * saving(rows[name], rows):.0f} % of the memory saved"
        text = f"use {name}. {interval(rows[name]['speedup'])} times the speed of fp32, {saved}"
    elif not ranking(result, mode):
        text = "no precision can be recommended, since float32 itself diverges"
    else:
        text = f"use fp32. No other that was measured is {WORTHWHILE_SPEED:g} times as fast, or smaller and not slower"
    others = (other for other in USUAL if other in rows and other != FP32)
    excluded = "; ".join(f"{other}: {why}" for other in others if (why := objection(result, mode, other)))
    return f"{mode}: {text}{f' (excluded: {excluded})' if excluded else ''}."


def limits(result: Report, mode: str, ceilings: Ceilings) -> Iterator[str]:
    """What limits a step in float32 and in the precision to use, estimated from counted work."""
    work, rows, used = result["work"].get(mode, {}), rows_of(result, mode), best(result, mode)
    for name in (FP32, used if used != FP32 else "bf16"):
        if name not in work or not rows.get(name, {}).get("seconds"):
            continue
        counted, taken = work[name], median(rows[name]["seconds"])
        least = ceilings.seconds(counted)
        bound = max(least, key=least.__getitem__)
        share = 100 * least[bound] / taken
        products, traffic, launches = (si(seconds, "s") for seconds in least.values())
        yield (
            f"{name} is {BOUNDS[bound] if share >= EXPLAINS else 'far from all three limits'}: "
            f"{si(sum(counted['flops'].values()), 'FLOP')} of matrix products take at least {products}, "
            f"{si(counted['bytes'], 'B')} of memory traffic {traffic}, launching {counted['operations']} operations "
            f"{launches}. The longest of these explains {share:.0f} % of the measured {si(taken, 's')}."
        )


def learning(result: Report) -> Iterator[str]:
    """The precisions that do not learn what float32 does."""
    for name, row in result["parity"].items():
        apart, limit = 100 * row["drift"], 100 * row["tolerance"]
        sentences = {
            "drifts": f"{name} DRIFTS: its loss is {apart:.1f} % of float32's fall away, with {limit:.1f} % tolerated.",
            "diverges": f"{name} DIVERGES: its loss is not finite.",
            "too noisy": f"{name} can't be judged: two float32 runs are {limit / NOISE:.0f} % apart. Take more steps.",
            "nothing to compare": f"{name} can't be judged, since float32's loss does not fall: take more steps.",
        }
        if row["verdict"] in sentences:
            yield sentences[row["verdict"]]
    if short := [f"{name} {len(curve)}" for name, curve in result["curves"].items() if len(curve) < result["steps"]]:
        yield f"There was time for only a part of the {result['steps']} training steps: {', '.join(short)}."


def costs(rows: Mapping[str, Any]) -> Iterator[str]:
    """What the loss scaler and train_step itself cost."""
    if ratios := over(rows, "fp16", "fp16_unscaled"):
        skipped = rows["fp16"].get("skipped_steps", 0)
        yield f"fp16 runs at {interval(ratios)} of its speed without the loss scaler, which skipped {skipped} steps."
    pairs = [(precision, over(rows, precision, name)) for name, precision in BASELINES.items()]
    if parts := [f"{interval(ratios)} in {precision}" for precision, ratios in pairs if ratios]:
        yield f"Speed of train_step relative to the baseline loop: {', '.join(parts)}."


def expectations(result: Report, experiment: Experiment) -> Iterator[str]:
    """Which targets are met; of a missed one the baseline loop shows whether train_step or the device is the cause."""
    for mode, precision, speed, saved, base in experiment.targets:
        rows, what = rows_of(result, mode), f"Expected of an {TARGETS_ARE_FOR}, {mode} {precision}:"
        reached = median(over(rows, precision, base) or [math.nan])
        theirs = median(over(rows, f"{precision} baseline", f"{base} baseline") or [math.nan])
        checks = [(speed, f"times the speed of {base}", reached)]
        checks += [(saved, "of the memory saved", saving(rows.get(precision, {}), rows))] if saved else []
        for least, unit, value in checks:
            met = "not measured" if math.isnan(value) else f"here {value:.2f}, {'met' if value >= least else 'MISSED'}"
            yield f"{what} {least:.2f} {unit}; {met}."
        if reached < speed and not math.isnan(theirs):
            whose = "the device" if theirs < speed else "train_step"
            yield f"The baseline loop reaches {theirs:.2f}: {whose} is the cause."
