"""python -m dist_amp.diff RUN_A RUN_B: what differs between two runs, and where they diverge.

It reads the runs' folders: settings, environment and data; then, of the steps that both have
logged, the first in which a metric differs, and by how much. Steps of one layout, and those with
parallel.bit_exact, are compared bit by bit; others within the rounding of another order of sums.
With metrics.fingerprint in both it lists the modules whose parameters or gradients differ first.
--deep takes the steps of both again in this process, recorded, from where they are known to be
equal: the parameters and samples of a step, then what each module returns, the losses, each
operation of the backward, and the gradients that arrive at the parameters.

Exit status: 0 the numbers agree, whatever the settings, 1 they differ, 64 bad arguments, 65 not a
run's folder, a damaged one, or no logged step in common.

Docs: docs/debugging.md
"""

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dist_amp.checkpoint.format import config_at, read_manifest
from dist_amp.commands.replay import run_at
from dist_amp.diagnostics.trace import (
    Event,
    call_of,
    clean_name,
    first_difference,
    hash_of,
    hash_samples,
)
from dist_amp.distributed.process import random_state, set_random_state
from dist_amp.errors import CheckpointRejected, ConfigError, DataError, columns, some_of
from dist_amp.precision import TOLERANCE
from dist_amp.record import Record
from dist_amp.supervise.command_line import Parser, command

# What differs between any two runs; their layout is compared by the hosts' ranks.
NOT_VARIABLES = (
    *("MASTER_", "TORCHELASTIC_", "PET_", "SLURM_", "DIST_AMP_", "RANK", "WORLD_SIZE", "LOCAL_"),
    *("GROUP_", "ROLE_", "GLOO_", "TORCH_NCCL_", "TORCH_ELASTIC_", "TORCH_DISABLE_SHARE_"),
    "TORCH_FR_",
)
NOT_ENVIRONMENT = (
    *("started", "first_step", "command", "git.changed_files", "git.diff", "task.file"),
    *(f"variables.{name}" for name in NOT_VARIABLES),
)
# Settings by which ranks share the work: sums are taken in another order.
LAYOUT = ("parallel.", "train.micro_batch_size", "train.accumulation_steps", "train.global_batch")
METRICS = ("train/", "eval/", "amp/")  # tags that the computation alone decides
# Metrics of all ranks, which can be compared between layouts; evaluations may take other samples.
ROUNDED = ("train/loss", "train/grad_norm")
COUNTED = ("train/lr", "train/epoch", "train/samples_seen", "train/tokens_seen", "amp/")
OF_INTERVAL = ("train/loss", "train/clipped_share", "amp/skipped_in_interval")
SHOWN = 8  # metrics and modules


@command()
def main(argv: Sequence[str]) -> int:
    parser = Parser("python -m dist_amp.diff", __doc__)
    parser.add_argument("run_a", type=Path, metavar="RUN_A", help="its folder")
    parser.add_argument("run_b", type=Path, metavar="RUN_B", help="its folder")
    text = "take both runs' steps again on this process; report the first operation that differs"
    parser.add_argument("--deep", action="store_true", help=text)
    options = parser.parse_args(argv)
    if options.run_a.resolve() == options.run_b.resolve():
        raise ConfigError(f"{options.run_a} and {options.run_b} are the same folder; give two runs")
    a, b = Record(options.run_a), Record(options.run_b)
    settings = differences(a.settings, b.settings, ("run.dir",))
    metrics = compare_metrics(a, b)
    hashes = {} if metrics["tolerance"] else compare_fingerprints(a, b)
    print("\n".join(text_of(a, b, settings, metrics, hashes)), flush=True)
    parts = [part for part in (metrics, hashes) if "step" in part]
    if options.deep and parts:
        first = min(parts, key=lambda part: part["step"])
        print(compare_inside((a.folder, b.folder), first["equal_until"], first["step"]))
    elif options.deep:
        print(f"not replayed: nothing differs through step {metrics['equal_until']}")
    return int(bool(parts))


# ---- what the folders say


def compare_metrics(a: Record, b: Record) -> dict[str, Any]:
    """{"steps": how many both logged, "equal_until": step, "tolerance": the largest that a step was
    compared with}; if any differ also {"step": the first, "metrics": {tag: [in A, in B]}, "ranks":
    those whose own losses differ, if not all}. Errors: DataError without a common step.
    """
    common = sorted(a.steps.keys() & b.steps.keys())
    if not common:
        logged = []
        for run in (a, b):
            steps = f"{min(run.steps)} to {max(run.steps)}" if run.steps else "no complete line"
            logged.append(f"{run.folder} logged {steps}")
        raise DataError(
            f"no logged step in common: {', '.join(logged)}; run both with one metrics.log_every"
        )
    pairs = [(a.settings_at(step), b.settings_at(step)) for step in common]
    ranks = [{len(row["ranks"]) for row in run.rows if "ranks" in row} for run in (a, b)]
    compared: tuple[str, ...] = METRICS
    tolerance = 0.0
    if ranks[0] != ranks[1] or any(layout(x) != layout(y) for x, y in pairs):
        compared = (*ROUNDED, *COUNTED)
        settings = [each for pair in pairs for each in pair]
        if not all(each.get("parallel.bit_exact") for each in settings):
            tolerance = rounding(settings)
    key = "metrics.log_every"
    left_out = () if all(x.get(key) == y.get(key) for x, y in pairs) else OF_INTERVAL
    report = {"steps": len(common), "equal_until": 0, "tolerance": tolerance}
    for step in common:
        row_a, row_b = a.steps[step], b.steps[step]
        differing = {}
        for tag, value in row_a.items():
            if tag in row_b and tag.startswith(compared) and tag not in left_out:
                error = relative_difference(value, row_b[tag])
                if error > (tolerance if tag in ROUNDED else 0.0):
                    differing[tag] = [value, row_b[tag]]
        if differing:
            ranks_of_step = zip(row_a.get("ranks", ()), row_b.get("ranks", ()), strict=False)
            losses = [[rank.get("train/loss_sum") for rank in pair] for pair in ranks_of_step]
            own = [rank for rank, (x, y) in enumerate(losses) if x != y]
            if ranks[0] != ranks[1] or len(own) == len(losses):
                own = []
            return report | {"step": step, "metrics": differing, "ranks": own}
        report["equal_until"] = step
    return report


def layout(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key.startswith(LAYOUT)}


def rounding(settings: Sequence[Mapping[str, Any]]) -> float:
    """Largest relative difference of losses and norms between two layouts with these settings."""
    used = [each["precision.dtype"] for each in settings if each["precision.use_amp"]]
    return max(TOLERANCE[dtype] for dtype in ("fp32", *used))


def relative_difference(a: Any, b: Any) -> float:
    """inf for what can't be subtracted, such as nan, which is text in these files."""
    numbers = isinstance(a, int | float) and isinstance(b, int | float)
    if not numbers or a == b:
        return 0.0 if a == b else math.inf
    return abs(a - b) / max(abs(a), abs(b))


def compare_fingerprints(a: Record, b: Record) -> dict[str, Any]:
    """{"modules": how many both have, "equal_until": step}; empty without a common step. If hashes
    differ also {"step", "parameters": modules, "gradients": modules, "because": in words}.
    """
    hashes = []
    for run in (a, b):
        rows = (row.get("fingerprints", {}) for row in run.rows)
        hashes.append({int(step): value for row in rows for step, value in row.items()})
    report: dict[str, Any] = {}
    for step in sorted(hashes[0].keys() & hashes[1].keys()):
        hashes_a, hashes_b = hashes[0][step], hashes[1][step]
        modules = [name for name in hashes_a["parameters"] if name in hashes_b["parameters"]]
        differing: dict[str, list[str]] = {"parameters": [], "gradients": []}
        for kind in hashes_a.keys() & hashes_b.keys():
            differing[kind] = [m for m in modules if hashes_a[kind][m] != hashes_b[kind][m]]
        if not any(differing.values()):
            report |= {"equal_until": step, "modules": len(modules)}
            continue
        before = report.setdefault("equal_until", 0)
        if differing["parameters"] and step == 1:
            because = "the runs start with other parameters"
        elif differing["parameters"]:
            because = f"they diverged in step {before} or later; a smaller metrics.fingerprint "
            because += "says more"
        elif len(differing["gradients"]) == len(modules):
            because = "parameters are equal and all gradients differ: it began in the data, the "
            because += "forward or the loss"
        else:  # errors flow from the output to the input
            nearest = differing["gradients"][-1]
            because = f"parameters are equal; {nearest} is the module nearest to the output"
        return report | differing | {"step": step, "modules": len(modules), "because": because}
    return report


def text_of(
    a: Record,
    b: Record,
    settings: Mapping[str, list[Any]],
    metrics: Mapping[str, Any],
    hashes: Mapping[str, Any],
) -> list[str]:
    """The report's lines. metrics, hashes: see compare_metrics and compare_fingerprints."""
    lines = [f"A  {a.folder}", f"B  {b.folder}"]
    environment = differences(a.environment, b.environment, NOT_ENVIRONMENT)
    if code := environment.get("task.hash"):
        text = "the task's source file differs (hashes {} | {}): look there first"
        lines.insert(0, text.format(*code))
    for title, pairs in (("settings that differ:", settings), ("environment:", environment)):
        rows = [["", "", "A", "B"]]
        for key, pair in pairs.items():
            rows.append(["", key, *("unset" if value is None else str(value) for value in pair)])
        lines += [title, *columns(rows, left=4)] if pairs else []
    data = ["no checkpoint", "no checkpoint"]
    for number, run in enumerate((a, b)):
        for path in run.checkpoints:  # the newest valid one comes last
            with suppress(CheckpointRejected):
                manifest = read_manifest(path)
                data[number] = f"{manifest.data_fingerprint}, {manifest.data_length:,} samples"
    if data[0] != data[1]:
        lines.append(f"data: {data[0]} | {data[1]}")
    how, equal = "bit by bit", "equal"
    if metrics["tolerance"]:
        equal = f"within {metrics['tolerance']:g}"
        how = f"as other layouts, whose sums are rounded otherwise: losses and norms {equal}, "
        how += "hashes not at all; dropout differs too, unless both are bit-exact"
    lines.append(f"compared {how}: {metrics['steps']} logged steps")
    if max(a.steps) != max(b.steps):
        lines.append(f"A ends at step {max(a.steps)}, B at step {max(b.steps)}")
    if "step" in metrics:
        lines.append(divergence("metrics", metrics))
        for tag, (value_a, value_b) in list(metrics["metrics"].items())[:SHOWN]:
            error = relative_difference(value_a, value_b)
            lines.append(f"  {tag}: {value_a} | {value_b}, {error:.2g} of the larger")
        if ranks := ", ".join(map(str, metrics["ranks"])):
            lines.append(f"  only the losses of rank {ranks} differ: look at what it reads first")
    else:
        lines.append(f"metrics are {equal} up to step {metrics['equal_until']}")
    if "step" in hashes:
        lines.append(f"{divergence('fingerprints', hashes)}: {hashes['because']}")
        for kind in ("parameters", "gradients"):
            modules = hashes[kind]
            text = f"  {kind} differ in {len(modules)} of {hashes['modules']} modules"
            lines.append(f"{text}: {some_of(modules, SHOWN)}" if modules else text)
    elif hashes and hashes["modules"]:
        lines.append(f"fingerprints are equal up to step {hashes['equal_until']}")
    elif hashes:
        lines.append("fingerprints: the models have no module in common")
    return lines


def differences(
    a: Mapping[str, Any], b: Mapping[str, Any], leave_out: tuple[str, ...]
) -> dict[str, list[Any]]:
    """{key: [its value in A, in B]} where they differ; None: it has none."""
    keys = [key for key in dict.fromkeys([*a, *b]) if not key.startswith(leave_out)]
    return {key: [a.get(key), b.get(key)] for key in keys if a.get(key) != b.get(key)}


def divergence(what: str, part: Mapping[str, Any]) -> str:
    until = f", equal up to step {part['equal_until']}" if part["equal_until"] else ""
    return f"{what} diverge at step {part['step']}{until}"


# ---- --deep


class Replayed:
    """One of the two runs, before a step or at an earlier checkpoint; it has its own generators."""

    def __init__(self, folder: Path, step: int):
        self.replay = run_at(folder, step)
        self.replay.rows = {}  # here it is not compared with what it logged
        self.run = self.replay.run
        self.random = random_state(self.run.world.device)

    def parameters(self) -> list[Event]:
        events = []
        for name, parameter in self.run.parallel.module.named_parameters():
            owner = clean_name(name).rpartition(".")[0]
            events.append(Event("parameter", owner, hash_of([parameter]), name))
        return events

    def call(self, method: Any, *args: Any) -> Any:
        """Call a method that draws from this run's generators."""
        set_random_state(self.random, self.run.world.device)
        result = method(*args)
        self.random = random_state(self.run.world.device)
        return result


def compare_inside(folders: Sequence[Path], equal_until: int, until: int) -> str:
    """Take the steps of both runs again, from where they are known to be equal to `until`.

    Returns where they diverge, in words. Errors: DataError for a run that changed its settings.
    """
    for folder in folders:
        if config_at(folder, equal_until + 1) != config_at(folder, until):
            raise DataError(
                f"--deep replays the steps {equal_until + 1} to {until} with one config, and the "
                f"settings of {folder} changed there; compare without it"
            )
    runs = [Replayed(folder, equal_until + 1) for folder in folders]
    try:
        if edited := "; ".join(run.replay.edited for run in runs if run.replay.edited):
            return f"not replayed: {edited}; put that file back as it was, or look there"
        first = max(run.run.step for run in runs) + 1
        for run in runs:
            while run.run.step + 1 < first:
                run.call(run.replay.step)
        return f"both replayed: {first_divergence(runs, first, until)}"
    finally:
        for run in runs:
            run.run.close()


def first_divergence(runs: Sequence[Replayed], first: int, until: int) -> str:
    for step in range(first, until + 2):
        a, b = [run.parameters() for run in runs]
        if pair := first_difference(a, b):
            where = "the start" if step == first else f"the update of step {step - 1}"
            return f"{where}: the first other parameters are in {pair[0].module}"
        if step > until:
            break
        batches = [run.call(next, run.run.data) for run in runs]
        samples = [hash_samples(each, runs[0].run.world.device) for each in batches]
        if samples[0] != samples[1]:
            return f"step {step}: other samples"
        kinds = ("forward", "op", "backward", "gradient")
        events = []
        for run, micro_batches in zip(runs, batches, strict=True):
            events.append(run.call(run.replay.step, micro_batches, hash_of, kinds)[1])
        a, b = [[event for event in each if event.kind != "op"] for each in events]
        if pair := first_difference(a, b):
            return f"step {step}: {text_of_event(pair[0], *events)}"
    return (
        f"the replays are equal up to step {until}: what differed is not in the steps as one "
        "process takes them, but in one of several ranks, a callback, the layout or the hardware"
    )


def text_of_event(event: Event, a: Sequence[Event], b: Sequence[Event]) -> str:
    """The place of an event. a, b: all events of the step in both runs."""
    module = event.module or "the model"
    if event.kind == "gradient":
        return f"the gradient of the parameters of {module}"
    if event.kind == "backward":
        call = call_of(event, a)
        module = (call.module or "the model") if call else "the loss, or what divides it"
        return f"the backward of {module}, in {event.name}"
    text = "the loss of the model" if event.kind == "loss" else f"the forward of {module}"
    place = ("op", event.module, event.micro_batch)  # operations in this module, or in the task
    operations = []
    for events in (a, b):
        here = [each for each in events if (each.kind, each.module, each.micro_batch) == place]
        operations.append(here)
    if pair := first_difference(operations[0], operations[1]):
        text += f", {pair[0].name}"
    return text


if __name__ == "__main__":
    sys.exit(main())
