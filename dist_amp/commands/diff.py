"""python -m dist_amp.diff RUN_A RUN_B: show how two runs differ, and where they diverge.

It compares the settings, environment and data in the runs' folders, and finds the first step logged
by both in which a metric differs. Runs with the same ranks and layout are compared bit by bit, and
so are bit-exact runs (parallel.bit_exact); all others within rounding, because they sum in another
order. If both set metrics.fingerprint, it also lists the modules whose parameters or gradients
differ first. --deep replays both runs in this process from the last point at which they are known
to be equal, and reports the first difference: in the parameters or samples of a step, then in the
outputs of modules, the losses, the operations of the backward, or the parameters' gradients.

Exit status: 0 the numbers agree, whatever the settings, 1 they differ, 64 bad arguments, 65 not a
run's folder, a damaged folder, or no logged step in common.

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

# Prefixes of variables that differ between any two runs. The list of hosts shows the layout.
IGNORED_VARIABLES = (
    *("MASTER_", "TORCHELASTIC_", "PET_", "SLURM_", "DIST_AMP_", "RANK", "WORLD_SIZE", "LOCAL_"),
    *("GROUP_", "ROLE_", "GLOO_", "TORCH_NCCL_", "TORCH_ELASTIC_", "TORCH_DISABLE_SHARE_"),
    "TORCH_FR_",
)
IGNORED_ENVIRONMENT = (
    *("started", "first_step", "command", "git.changed_files", "git.diff", "task.file"),
    *(f"variables.{name}" for name in IGNORED_VARIABLES),
)
# Settings that decide how ranks share the work, and with it the order of sums.
LAYOUT = ("parallel.", "train.micro_batch_size", "train.accumulation_steps", "train.global_batch")
METRICS = ("train/", "eval/", "amp/")  # tags of the computation, not of its speed or memory
# Runs of different layouts are compared only in ROUNDED (sums over ranks), within rounding, and in
# COUNTED, exactly. Evaluations are not compared, because they may take other samples.
ROUNDED = ("train/loss", "train/grad_norm")
COUNTED = ("train/lr", "train/epoch", "train/samples_seen", "train/tokens_seen", "amp/")
# Sums over a log interval: compared only if both runs have the same metrics.log_every.
INTERVAL_METRICS = ("train/loss", "train/clipped_share", "amp/skipped_in_interval")
SHOWN = 8  # metrics or modules at most


@command()
def main(argv: Sequence[str]) -> int:
    parser = Parser("python -m dist_amp.diff", __doc__)
    parser.add_argument("run_a", type=Path, metavar="RUN_A", help="a run's folder")
    parser.add_argument("run_b", type=Path, metavar="RUN_B", help="another run's folder")
    text = "replay both runs' steps in this process; report the first operation that differs"
    parser.add_argument("--deep", action="store_true", help=text)
    options = parser.parse_args(argv)
    if options.run_a.resolve() == options.run_b.resolve():
        raise ConfigError(f"{options.run_a} and {options.run_b} are the same folder; give two runs")
    a, b = Record(options.run_a), Record(options.run_b)
    settings = differences(a.settings, b.settings, ("run.dir",))
    metrics = compare_metrics(a, b)
    hashes = {} if metrics["tolerance"] else compare_fingerprints(a, b)
    print("\n".join(text_of(a, b, settings, metrics, hashes)), flush=True)
    differing = [report for report in (metrics, hashes) if "step" in report]
    if options.deep and differing:
        first = min(differing, key=lambda report: report["step"])
        print(compare_replays((a.folder, b.folder), first["equal_until"], first["step"]))
    elif options.deep:
        print(f"not replayed: nothing differs up to step {metrics['equal_until']}")
    return int(bool(differing))


# ---- compare the folders


def compare_metrics(a: Record, b: Record) -> dict[str, Any]:
    """{"steps": how many both logged, "equal_until": step, "tolerance": relative, 0: bit by bit};
    if metrics differ also {"step": the first one, "metrics": {tag: [in A, in B]}, "ranks": those
    whose losses differ, if not all do}. Raises DataError without a common step.
    """
    common = sorted(a.steps.keys() & b.steps.keys())
    if not common:
        logged = []
        for run in (a, b):
            steps = f"{min(run.steps)} to {max(run.steps)}" if run.steps else "no complete line"
            logged.append(f"{run.folder} logged {steps}")
        raise DataError(
            f"no logged step in common: {', '.join(logged)}; use the same metrics.log_every in both"
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
    left_out = () if all(x.get(key) == y.get(key) for x, y in pairs) else INTERVAL_METRICS
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
            differing_ranks = [rank for rank, (x, y) in enumerate(losses) if x != y]
            if ranks[0] != ranks[1] or len(differing_ranks) == len(losses):
                differing_ranks = []
            return report | {"step": step, "metrics": differing, "ranks": differing_ranks}
        report["equal_until"] = step
    return report


def layout(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key.startswith(LAYOUT)}


def rounding(settings: Sequence[Mapping[str, Any]]) -> float:
    """The relative difference that rounding may cause in losses and norms of two layouts."""
    used = [each["precision.dtype"] for each in settings if each["precision.use_amp"]]
    return max(TOLERANCE[dtype] for dtype in ("fp32", *used))


def relative_difference(a: Any, b: Any) -> float:
    """|a - b| over the larger; inf if they differ and one is not a number (nan, inf are text)."""
    numbers = isinstance(a, int | float) and isinstance(b, int | float)
    if not numbers or a == b:
        return 0.0 if a == b else math.inf
    return abs(a - b) / max(abs(a), abs(b))


def compare_fingerprints(a: Record, b: Record) -> dict[str, Any]:
    """{"modules": how many both have, "equal_until": step}; empty without a common step. If hashes
    differ also {"step", "parameters": modules, "gradients": modules, "because": what it means}.
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
            because = "the runs start with different parameters"
        elif differing["parameters"]:
            because = f"they diverged in step {before} or later; a smaller metrics.fingerprint "
            because += "narrows it down"
        elif len(differing["gradients"]) == len(modules):
            because = "parameters are equal and all gradients differ: the cause is in the data, "
            because += "the forward or the loss"
        else:  # the backward spreads an error from the output to the input
            nearest = differing["gradients"][-1]
            because = f"parameters are equal; in backward order {nearest} is the first to differ"
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
    environment = differences(a.environment, b.environment, IGNORED_ENVIRONMENT)
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
        for path in run.checkpoints:  # the last valid one, the newest, counts
            with suppress(CheckpointRejected):
                manifest = read_manifest(path)
                data[number] = f"{manifest.data_fingerprint}, {manifest.data_length:,} samples"
    if data[0] != data[1]:
        lines.append(f"data: {data[0]} | {data[1]}")
    how, equal = "bit by bit", "equal"
    if metrics["tolerance"]:
        equal = f"within {metrics['tolerance']:g}"
        how = f"across layouts, which round sums differently: losses and norms {equal}, "
        how += "hashes not compared; dropout differs too, unless both are bit-exact"
    lines.append(f"compared {how}: {metrics['steps']} logged steps")
    if max(a.steps) != max(b.steps):
        lines.append(f"A ends at step {max(a.steps)}, B at step {max(b.steps)}")
    if "step" in metrics:
        lines.append(divergence("metrics", metrics))
        for tag, (value_a, value_b) in list(metrics["metrics"].items())[:SHOWN]:
            error = relative_difference(value_a, value_b)
            lines.append(f"  {tag}: {value_a} | {value_b}, {error:.2g} of the larger")
        if ranks := ", ".join(map(str, metrics["ranks"])):
            lines.append(f"  only the losses of rank {ranks} differ: check its data first")
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
    """{key: [value in A, value in B]} where they differ; None: A or B does not have the key."""
    keys = [key for key in dict.fromkeys([*a, *b]) if not key.startswith(leave_out)]
    return {key: [a.get(key), b.get(key)] for key in keys if a.get(key) != b.get(key)}


def divergence(what: str, part: Mapping[str, Any]) -> str:
    until = f", equal up to step {part['equal_until']}" if part["equal_until"] else ""
    return f"{what} diverge at step {part['step']}{until}"


# ---- --deep


class Replayed:
    """One of the two runs, at its newest checkpoint before a step, with its own random state."""

    def __init__(self, folder: Path, step: int):
        self.replay = run_at(folder, step)
        self.replay.rows = {}  # no comparison with the logged metrics
        self.run = self.replay.run
        self.random = random_state(self.run.world.device)

    def parameters(self) -> list[Event]:
        events = []
        for name, parameter in self.run.parallel.module.named_parameters():
            owner = clean_name(name).rpartition(".")[0]
            events.append(Event("parameter", owner, hash_of([parameter]), name))
        return events

    def call(self, method: Any, *args: Any) -> Any:
        """Call a method with this run's random state: both runs share the generators."""
        set_random_state(self.random, self.run.world.device)
        result = method(*args)
        self.random = random_state(self.run.world.device)
        return result


def compare_replays(folders: Sequence[Path], equal_until: int, until: int) -> str:
    """Replay both runs from the step after `equal_until` through step `until`.

    Returns where they diverge, in words. Raises DataError if settings changed in between.
    """
    for folder in folders:
        if config_at(folder, equal_until + 1) != config_at(folder, until):
            raise DataError(
                f"--deep replays the steps {equal_until + 1} to {until} with one config, but the "
                f"settings of {folder} changed between them; compare without --deep"
            )
    runs = [Replayed(folder, equal_until + 1) for folder in folders]
    try:
        if edited := "; ".join(run.replay.edited for run in runs if run.replay.edited):
            return f"not replayed: {edited}; restore that file, or look for the cause in the edit"
        first = max(run.run.step for run in runs) + 1
        for run in runs:
            while run.run.step + 1 < first:
                run.call(run.replay.step)
        return f"both replayed: {first_divergence(runs, first, until)}"
    finally:
        for run in runs:
            run.run.close()


def first_divergence(runs: Sequence[Replayed], first: int, until: int) -> str:
    for step in range(first, until + 2):  # one more, for the parameters after step `until`
        a, b = [run.parameters() for run in runs]
        if pair := first_difference(a, b):
            where = "the start" if step == first else f"the update of step {step - 1}"
            return f"{where}: parameters differ first in {pair[0].module}"
        if step > until:
            break
        batches = [run.call(next, run.run.data) for run in runs]
        samples = [hash_samples(each, runs[0].run.world.device) for each in batches]
        if samples[0] != samples[1]:
            return f"step {step}: the samples differ"
        kinds = ("forward", "op", "backward", "gradient")
        events = []
        for run, micro_batches in zip(runs, batches, strict=True):
            events.append(run.call(run.replay.step, micro_batches, hash_of, kinds)[1])
        a, b = [[event for event in each if event.kind != "op"] for each in events]
        if pair := first_difference(a, b):
            return f"step {step}: {text_of_event(pair[0], *events)}"
    return (
        f"the replays are equal up to step {until}: the cause is not in what one process computes, "
        "but in the other ranks, a callback, the layout or the hardware"
    )


def text_of_event(event: Event, a: Sequence[Event], b: Sequence[Event]) -> str:
    """Where the differing event happened. a, b: all events of the step in both runs."""
    module = event.module or "the model"
    if event.kind == "gradient":
        return f"the gradient of the parameters of {module}"
    if event.kind == "backward":
        call = call_of(event, a)
        module = (call.module or "the model") if call else "the task's loss_sum"
        return f"the backward of {module}, in {event.name}"
    text = "the loss of the model" if event.kind == "loss" else f"the forward of {module}"
    # The first differing operation of this module, or of the task's own code in loss_sum.
    place = ("op", event.module, event.micro_batch)
    operations = [each for each in a if (each.kind, each.module, each.micro_batch) == place]
    if pair := first_difference(operations, b):
        text += f", {pair[0].name}"
    return text


if __name__ == "__main__":
    sys.exit(main())
