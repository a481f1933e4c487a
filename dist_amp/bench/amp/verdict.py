"""What the figures of an experiment say: which precision to use, what holds the device up, and what falls short."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dist_amp.bench.amp.experiment import INFERENCE, TRAIN, Experiment, Target
from dist_amp.bench.amp.measure import COMPILED, EAGER
from dist_amp.bench.amp.parity import NOISE, band, drift, fall, judged
from dist_amp.bench.amp.recipes import BY_HAND, FP32, USUAL
from dist_amp.bench.amp.roofline import BOUNDS, Ceilings
from dist_amp.bench.harness import median_interval
from dist_amp.bench.report import Report, interval

# What is worth changing the precision for: assumed.
WORTHWHILE_SPEED, WORTHWHILE_SAVING = 1.05, 0.1
ALIGNMENT = 8  # elements of 2 bytes. Source: NVIDIA, Matrix Multiplication Background User's Guide, section 3
EXPLAINS = 50  # percent of the time: what a bound has to, to be called one. Assumed.
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
    """Whether it is faster than float32, beyond what is noise, or smaller and no slower but for noise."""
    middle, low, high = median_interval(row["of_fp32"])
    smaller = saving(row, rows) >= WORTHWHILE_SAVING
    return (middle >= WORTHWHILE_SPEED and low > 1) or (smaller and middle >= 2 - WORTHWHILE_SPEED and high >= 1)


def saving(row: Report, rows: Mapping[str, Any]) -> float:
    """The share of float32's peak memory that is not needed; nan where it was not measured."""
    if "peak_bytes" not in row or "peak_bytes" not in rows.get(FP32, {}):
        return math.nan
    return float(1 - row["peak_bytes"] / rows[FP32]["peak_bytes"])


def add_parity(told: dict[str, Any]) -> None:
    """Each curve's drift, the band, and how it stands to it."""
    reference, again = told["curves"].get(FP32, []), told["again"]
    told["parity"] = {
        name: {
            "drift": drift(curve, reference),
            "band": band(name, reference, again),
            "verdict": judged(name, curve, reference, again),
        }
        for name, curve in told["curves"].items()
    }


def unfit(told: Report, mode: str, name: str) -> str:
    """Why a precision is not to be used, however fast it is; "" where nothing speaks against it."""
    rows = rows_of(told, mode)
    row, base = rows.get(name, {}), rows.get(FP32, {})
    if (learned := told["parity"].get(name, {}).get("verdict")) in ("drifts", "diverges"):
        return str(learned)
    if mode == INFERENCE and "loss" in row and "loss" in base:
        # Near zero no precision gets the last digits: what has been learned is the measure then.
        apart, scale = abs(row["loss"] - base["loss"]), max(abs(base["loss"]), fall(told["curves"].get(FP32, [])))
        if not apart <= band(name) * scale:
            return f"its loss is {row['loss']:.4g}, float32's {base['loss']:.4g}"
    if not row.get("of_fp32"):
        return str(row.get("cant", "not measured"))
    return ""


def best(told: Report, mode: str) -> str:
    """The precision to use."""
    rows = rows_of(told, mode)
    fit = [name for name in USUAL if name in rows and name != FP32 and not unfit(told, mode, name)]
    worthwhile = [name for name in fit if is_worthwhile(rows[name], rows)]
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
        elif others := [figures_alone(name, row) for name, row in rows.items() if row.get("seconds")]:
            why = rows.get(FP32, {}).get("cant", "no figures")
            lines.append(f"{mode}: fp32 is not there to compare with ({why}); these are: {', '.join(others)}.")
    lines += [*called_out(told), *about_scaler(told), *about_alignment(told)]
    return [*lines, *about_loop(told), *shortfalls(told, experiment)]


def figures_alone(name: str, row: Report) -> str:
    memory = f", {si(row['peak_bytes'], 'B')}" if "peak_bytes" in row else ""
    return f"{name} ({si(median_interval(row['seconds'])[0], 's')}{memory})"


def recommendation(told: Report, mode: str) -> str:
    name, rows = best(told, mode), rows_of(told, mode)
    if name == FP32:
        others = {other: unfit(told, mode, other) for other in USUAL if other in rows and other != FP32}
        refused = "; ".join(f"{other}: {why}" for other, why in others.items() if why)
        text = f"{mode}: fp32. No other precision is {WORTHWHILE_SPEED:g} times as fast, or smaller and no slower"
        text += f", of those that will do (not {refused})." if refused else "."
        if not others:
            text = f"{mode}: fp32 alone was measured."
        if told["parity"].get(FP32, {}).get("verdict") == "diverges":
            return f"{mode}: none can be recommended, since float32 itself diverges."
    else:
        saved = saving(rows[name], rows)
        memory = "" if math.isnan(saved) else f", {100 * abs(saved):.0f} % {'less' if saved >= 0 else 'more'} memory"
        noise = "" if median_interval(rows[name]["of_fp32"])[1] > 1 else ", which may be noise"
        text = f"{mode}: {name}. {interval(rows[name]['of_fp32'])} times the speed of fp32{noise}{memory}."
    compiled = rows_of(told, mode, COMPILED).get(name, {})
    if compiled.get("seconds"):
        gain = median_interval(rows[name]["seconds"])[0] / median_interval(compiled["seconds"])[0]
        change = f"{gain:.2f} times as fast" if gain >= 1 else f"{1 / gain:.2f} times as slow"
        text += f" Compiling makes it {change} (timed apart)."
    return text


def reasons(told: Report, mode: str, ceilings: Ceilings) -> Iterator[str]:
    """What the step is bound by in float32 and in the precision to use, by an estimate from what was counted."""
    work, rows, used = told["work"].get(mode, {}), rows_of(told, mode), best(told, mode)
    for name in dict.fromkeys([FP32, used if used != FP32 else "bf16"]):
        counted = work.get(name)
        if counted is None or not rows.get(name, {}).get("seconds"):
            continue
        if "cant" in counted:
            yield f"What bounds {name} is not known, since its operations {counted['cant']}."
            continue
        seconds, taken = ceilings.seconds(counted), median_interval(rows[name]["seconds"])[0]
        bound = ceilings.bound(counted)
        share = 100 * seconds[bound] / taken
        is_bound = f"is {BOUNDS[bound]}" if share >= EXPLAINS else "comes near none of the three limits"
        flops, traffic = si(sum(counted["flops"].values()), "FLOP"), si(counted["bytes"], "B")
        yield (
            f"{name} {is_bound}: {flops} are {si(seconds['products'], 's')} of products, "
            f"{traffic} {si(seconds['traffic'], 's')} of traffic, "
            f"{counted['operations']} operations {si(seconds['launches'], 's')} of launching. "
            f"The longest explains {share:.0f} % of the {si(taken, 's')} it takes."
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
        if row["verdict"] == "too noisy":
            noise = 100 * row["band"] / NOISE
            yield f"{name} can't be judged: float32 drifts from itself by {noise:.0f} %. Take more steps."
    if FP32 in told["curves"] and any(row["verdict"] == "nothing to compare" for row in told["parity"].values()):
        yield "The loss of float32 does not fall, so that there is no curve to compare with: take more steps."
    for name in rows_of(told, INFERENCE):
        if "its loss" in (why := unfit(told, INFERENCE, name)):
            yield f"{name} in inference: {why}, from the same weights."
    if short := [f"{name} {len(curve)}" for name, curve in told["curves"].items() if len(curve) < told["steps"]]:
        yield f"There was time to learn for a part of the {told['steps']} steps: {', '.join(short)}."


def about_scaler(told: Report) -> Iterator[str]:
    rows = rows_of(told, TRAIN)
    cost = over(rows, "fp16", "fp16_unscaled")
    if cost and told["parity"].get("fp16", {}).get("verdict") != "diverges":
        skipped = rows["fp16"].get("skipped_steps", 0)
        yield (
            f"fp16 runs at {interval(cost)} of its speed without the loss scaler, which skipped {skipped} "
            f"step{'' if skipped == 1 else 's'} to find its scale."
        )


def about_alignment(told: Report) -> Iterator[str]:
    """What a micro-batch size costs that is no multiple of 8, of which tensor cores take their operands."""
    groups = {group["micro_batch_size"]: group for group in told["groups"] if is_eager_training(group)}
    for size in sorted(size for size in groups if size % ALIGNMENT):
        near = [other for other in groups if other % ALIGNMENT == 0 and abs(other - size) < ALIGNMENT]
        rates = [
            f"{per_second(groups[size], name) / per_second(groups[near[0]], name):.2f} in {name}"
            for name in USUAL
            if near and all(groups[one]["rows"].get(name, {}).get("seconds") for one in (size, near[0]))
        ]
        if rates:
            yield (
                f"Micro-batches of {size} give so many times the samples per second of {near[0]}: {', '.join(rates)} "
                "(timed apart)."
            )


def is_eager_training(group: Report) -> bool:
    return bool(group["mode"] == TRAIN and group["form"] == EAGER)


def per_second(group: Report, name: str) -> float:
    """Samples per second."""
    return float(group["samples_per_step"] / median_interval(group["rows"][name]["seconds"])[0])


def about_loop(told: Report) -> Iterator[str]:
    """What train_step costs against the loop by hand."""
    rows = rows_of(told, TRAIN)
    pairs = [(precision, over(rows, precision, name)) for name, precision in BY_HAND.items()]
    parts = [f"{interval(ratios)} in {precision}" for precision, ratios in pairs if ratios]
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
        ratios = over(rows, target.precision, target.over)
        yield target, median_interval(ratios)[0] if ratios else math.nan, saving(rows.get(target.precision, {}), rows)


def shortfalls(told: Report, experiment: Experiment) -> Iterator[str]:
    """Where less came out than was expected, whether the loop or the device is the cause: by the loop by hand."""
    for target, reached, saved in targets(told, experiment):
        what = f"{target.mode} {target.precision}"
        if reached < target.speed:
            expected = f"{reached:.2f} of the {target.speed:.2f} that were expected"
            yield f"{what}: {expected}{cause(told, target)}."
        if target.saving and saved < target.saving:
            yield f"{what}: {100 * saved:.0f} % of memory saved, {100 * target.saving:.0f} % expected."


def cause(told: Report, target: Target) -> str:
    """Of a speed that was missed; "" where there is no loop by hand to tell."""
    ratios = over(rows_of(told, TRAIN), f"{target.precision} by hand", f"{target.over} by hand")
    if target.mode != TRAIN or not ratios:
        return ""
    theirs = median_interval(ratios)[0]
    whose = "the device" if theirs < target.speed else "train_step"
    return f"; the loop by hand reaches {theirs:.2f}: {whose} is the cause"


def si(value: float, unit: str) -> str:
    """0.0031 s -> "3.1 ms"; three digits."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}"
    power = max(-3, min(5, math.floor(math.log10(abs(value)) / 3)))
    prefix = ("n", "µ", "m", "", "k", "M", "G", "T", "P")[power + 3]
    return f"{digits(value / 1000**power)} {prefix}{unit}"


def digits(value: float) -> str:
    """Three of them, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
