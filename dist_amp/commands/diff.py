"""python -m dist_amp.diff RUN_A RUN_B: what differs between two runs, and where they diverge.

It reads the runs' folders: settings, environment and data; then, of the steps that both have
logged, the first in which a metric differs, and by how much. Steps of one layout, and those with
parallel.bit_exact, are compared bit by bit; others within the rounding of another order of sums,
where random numbers, such as dropout's, differ by rank and are no fault. With metrics.fingerprint
in both it lists the modules whose parameters or gradients differ first. --deep takes the steps of
both again in this process, recorded, from where they are known to be equal: the parameters and
samples of a step, then what each module returns, the losses, each operation of the backward, and
the gradients that arrive at the parameters.

Exit status: 0 no fault, whatever the settings, 1 the numbers differ, 64 bad arguments, 65 not a
run's folder, a damaged one, or no logged step in common.

Docs: docs/debugging.md
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from dist_amp.checkpoint.format import Reader, config_at, read_into, read_manifest
from dist_amp.commands.replay import run_at
from dist_amp.diagnostics.trace import (
    Event,
    Recorder,
    call_of,
    first_difference,
    hash_of,
    hash_samples,
)
from dist_amp.distributed.process import random_state, set_random_state
from dist_amp.errors import CheckpointRejected, ConfigError, DataError, columns, some_of
from dist_amp.precision import TOLERANCE
from dist_amp.record import Record
from dist_amp.supervise.command_line import Parser, command

# What a run's numbers don't depend on, or what differs between any two runs.
NOT_SETTINGS = ("run.dir",)
NOT_ENVIRONMENT = (
    *("started", "first_step", "command", "git.changed_files", "git.diff"),
    *("variables.MASTER_", "variables.TORCHELASTIC_"),
    *("variables.PET_", "variables.SLURM_", "variables.DIST_AMP_", "variables.TORCH_NCCL_"),
    *("variables.TORCH_ELASTIC_", "variables.TORCH_DISABLE_SHARE_", "variables.TORCH_FR_"),
    # The layout is compared by the hosts' ranks.
    *("variables.RANK", "variables.WORLD_SIZE", "variables.LOCAL_", "variables.GROUP_"),
    *("variables.ROLE_", "variables.GLOO_", "task.file"),
)
# Settings by which ranks share the work: sums are taken in another order.
LAYOUT = ("parallel.", "train.micro_batch_size", "train.accumulation_steps", "train.global_batch")
METRICS = ("train/", "eval/", "amp/")  # tags that the computation alone decides
# Metrics of all ranks, which can be compared between layouts; evaluations may take other samples.
ROUNDED = ("train/loss", "train/grad_norm")
COUNTED = ("train/lr", "train/epoch", "train/samples_seen", "train/tokens_seen", "amp/")
OF_INTERVAL = ("train/loss", "train/clipped_share", "amp/skipped_in_interval")
SHOWN = 8  # metrics and modules; --json has all
SAMPLED = 2**10  # elements of each tensor that are kept to say by how much it differs


@command()
def main(argv: Sequence[str]) -> int:
    parser = Parser("python -m dist_amp.diff", __doc__)
    parser.add_argument("run_a", type=Path, metavar="RUN_A", help="its folder")
    parser.add_argument("run_b", type=Path, metavar="RUN_B", help="its folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    text = "take both runs' steps again on this process; report the first operation that differs"
    parser.add_argument("--deep", action="store_true", help=text)
    options = parser.parse_args(argv)
    folders = (options.run_a, options.run_b)
    if options.run_a.resolve() == options.run_b.resolve():
        raise ConfigError(f"{options.run_a} and {options.run_b} are the same folder; give two runs")
    report = compare(*map(Record, folders))
    parts = [part for part in (report["metrics"], report["fingerprints"]) if "step" in part]
    if options.deep and parts:
        first = min(parts, key=lambda part: part["step"])
        report["deep"] = compare_inside(folders, first["equal_until"], first["step"])
    elif options.deep:
        equal = report["metrics"]["equal_until"]
        report["deep"] = f"not replayed: nothing differs through step {equal}"
    print(json.dumps(report, indent=1) if options.json else text_of(report))
    return int(has_fault(report))


# ---- what the folders say


def compare(a: Record, b: Record) -> dict[str, Any]:
    """The report, as --json prints it. Errors: DataError without a common step."""
    metrics = compare_metrics(a, b)
    data = []
    for run in (a, b):  # the fingerprint and length in the newest valid checkpoint
        data.append("")
        for path in run.checkpoints:
            with suppress(CheckpointRejected):
                manifest = read_manifest(path)
                data[-1] = f"{manifest.data_fingerprint}, {manifest.data_length:,} samples"
    report = {
        "runs": [str(a.folder), str(b.folder)],
        "settings": differences(a.settings, b.settings, NOT_SETTINGS),
        "environment": differences(a.environment, b.environment, NOT_ENVIRONMENT),
        "data": data,
        "tolerance": metrics.pop("tolerance"),
        "last_steps": [max(a.steps), max(b.steps)],
        "metrics": metrics,
        "random": False,
        "fingerprints": {},
    }
    if not report["tolerance"]:
        report["fingerprints"] = compare_fingerprints(a, b)
    elif "step" in metrics and (draws_random_numbers(a) or draws_random_numbers(b)):
        # Losses and norms may differ; schedule and counts may not.
        unrounded = compare_metrics(a, b, ROUNDED)
        report["random"] = "step" not in unrounded
        if "step" in unrounded:
            report["metrics"] = unrounded
    return report


def has_fault(report: Mapping[str, Any]) -> bool:
    """Whether numbers differ that should not."""
    differs = "step" in report["metrics"] or "step" in report["fingerprints"]
    return differs and not report["random"]


def differences(
    a: Mapping[str, Any], b: Mapping[str, Any], leave_out: tuple[str, ...]
) -> dict[str, list[Any]]:
    """{key: [its value in A, in B]} where they differ; None: it has none."""
    keys = [key for key in dict.fromkeys([*a, *b]) if not key.startswith(leave_out)]
    return {key: [a.get(key), b.get(key)] for key in keys if a.get(key) != b.get(key)}


def draws_random_numbers(run: Record) -> bool:
    """Whether its steps draw some, as dropout does: by rank 0's generators in a checkpoint."""
    for path in reversed(run.checkpoints):
        with suppress(CheckpointRejected, CheckpointException, OSError):
            reader = Reader(path)
            unused = torch.Generator().manual_seed(reader.manifest.seed + 1).get_state()
            state = {"ranks.0.random.torch": torch.empty_like(unused)}
            gpu = "ranks.0.random.cuda"  # 8 bytes of seed, 8 that count what was drawn
            if gpu in reader.read_metadata().state_dict_metadata:
                state[gpu] = torch.zeros(16, dtype=torch.uint8)
            read_into(state, reader)
            drawn = state.get(gpu, torch.zeros(16))[8:].any()
            return bool(drawn) or not state["ranks.0.random.torch"].equal(unused)
    return False


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


def compare_metrics(a: Record, b: Record, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """{"steps": how many both logged, "equal_until": step, "tolerance": the largest that a step was
    compared with, as all after it are}; if any differ also {"step": the first, "metrics": {tag: [in
    A, in B]}, "ranks": those whose own losses differ, if not all}.

    Errors: DataError without a step that both have logged.
    """
    for run in (a, b):
        if not run.rows:
            raise DataError(
                f"{run.folder / 'metrics.jsonl'} has no complete line; wait for the step "
                f"metrics.log_every={run.settings.get('metrics.log_every')}, or give another run's "
                "folder"
            )
    common = sorted(a.steps.keys() & b.steps.keys())
    if not common:
        logged = [f"{run.folder} logged {min(run.steps)} to {max(run.steps)}" for run in (a, b)]
        raise DataError(
            f"no logged step in common: {', '.join(logged)}; run both with one metrics.log_every"
        )
    compared: tuple[str, ...] = METRICS
    report: dict[str, Any] = {"steps": len(common), "equal_until": 0, "tolerance": 0.0}
    # The line of an evaluation has no ranks: they are those of a log step before.
    ranks = [next((len(row["ranks"]) for row in run.rows if "ranks" in row), 1) for run in (a, b)]
    for step in common:
        settings = [run.settings_at(step) for run in (a, b)]
        layouts = [
            {key: value for key, value in each.items() if key.startswith(LAYOUT)}
            for each in settings
        ]
        for number, run in enumerate((a, b)):
            ranks[number] = len(run.steps[step].get("ranks", ())) or ranks[number]
        if layouts[0] != layouts[1] or ranks[0] != ranks[1]:
            compared = (*ROUNDED, *COUNTED)
            if not all(each.get("parallel.bit_exact") for each in settings):
                # What was rounded once is not equal later.
                report["tolerance"] = max(report["tolerance"], rounding(settings))
        log_every = [each.get("metrics.log_every") for each in settings]
        left_out = leave_out if log_every[0] == log_every[1] else leave_out + OF_INTERVAL
        differing = {}
        for tag, value in a.steps[step].items():
            if tag in b.steps[step] and tag.startswith(compared) and tag not in left_out:
                pair = [value, b.steps[step][tag]]
                if relative_difference(*pair) > (report["tolerance"] if tag in ROUNDED else 0.0):
                    differing[tag] = pair
        if differing:
            rank_rows = [run.steps[step].get("ranks", ()) for run in (a, b)]
            pairs = enumerate(zip(*rank_rows, strict=False))
            own = [i for i, (x, y) in pairs if x.get("train/loss_sum") != y.get("train/loss_sum")]
            if not len(rank_rows[0]) == len(rank_rows[1]) > len(own):
                own = []
            return report | {"step": step, "metrics": differing, "ranks": own}
        report["equal_until"] = step
    return report


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


# ---- the report as text


def text_of(report: Mapping[str, Any]) -> str:
    lines = ["A  {}".format(report["runs"][0]), "B  {}".format(report["runs"][1])]
    if code := report["environment"].get("task.hash"):
        text = "the task's source file differs (hashes {} | {}): look there first"
        lines.insert(0, text.format(*code))
    lines += table_of("settings that differ:", report["settings"])
    lines += table_of("environment:", report["environment"])
    if report["data"][0] != report["data"][1]:
        lines.append("data: {} | {}".format(*(text or "no checkpoint" for text in report["data"])))
    metrics = report["metrics"]
    how, equal = "bit by bit", "equal"
    if report["tolerance"]:
        equal = f"within {report['tolerance']:g}"
        how = f"as other layouts, whose sums are rounded otherwise: losses and norms {equal}, "
        how += "hashes not at all"
    lines.append(f"compared {how}: {metrics['steps']} logged steps")
    if report["last_steps"][0] != report["last_steps"][1]:
        lines.append("A ends at step {}, B at step {}".format(*report["last_steps"]))
    if "step" in metrics:
        lines.append(divergence("metrics", metrics))
        for tag, pair in list(metrics["metrics"].items())[:SHOWN]:
            error = relative_difference(*pair)
            lines.append(f"  {tag}: {pair[0]} | {pair[1]}, {error:.2g} of the larger")
        if ranks := ", ".join(map(str, metrics["ranks"])):
            lines.append(f"  only the losses of rank {ranks} differ: look at what it reads first")
        if report["random"]:
            lines.append(
                "  no fault is reported: the steps draw random numbers, such as dropout's, which "
                "differ by rank in a run that is not bit-exact"
            )
    else:
        lines.append(f"metrics are {equal} up to step {metrics['equal_until']}")
    hashes = report["fingerprints"]
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
    return "\n".join([*lines, *filter(None, [report.get("deep")])])


def divergence(what: str, part: Mapping[str, Any]) -> str:
    until = f", equal up to step {part['equal_until']}" if part["equal_until"] else ""
    return f"{what} diverge at step {part['step']}{until}"


def table_of(title: str, pairs: Mapping[str, Sequence[Any]]) -> list[str]:
    """A title, and rows of a key and its values in A and B; nothing without rows."""
    if not pairs:
        return []
    rows = [["", "", "A", "B"]]
    for key, pair in pairs.items():
        rows.append(["", key, *("unset" if value is None else str(value) for value in pair)])
    return [title, *columns(rows, left=4)]


# ---- --deep


class Value(NamedTuple):
    """A hash of an event's tensors, and some elements of each."""

    bits: int  # a hash
    samples: list[Tensor]


def value_of(tensors: Sequence[Tensor]) -> Value:
    strided = [tensor for tensor in tensors if tensor.layout == torch.strided]
    samples = [tensor.flatten()[:: -(-tensor.numel() // SAMPLED) or 1] for tensor in strided]
    return Value(hash_of(strided), [sample.clone() for sample in samples])


def other_bits(a: Value, b: Value) -> float:
    return float(a.bits != b.bits)


class Replayed:
    """One of the two runs, before a step or at an earlier checkpoint; it has its own generators."""

    def __init__(self, folder: Path, step: int):
        self.replay = run_at(folder, step)
        self.replay.rows = {}  # here it is not compared with what it logged
        self.run = self.replay.run
        self.random = random_state(self.run.world.device)

    def parameters(self) -> list[Event]:
        with Recorder(None, self.run.parallel.module, value_of, ["parameter"]) as recorder:
            return recorder.events

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
        if pair := first_difference(a, b, other_bits):
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
            events.append(run.call(run.replay.step, micro_batches, value_of, kinds)[1])
        computed = [[event for event in each if event.kind != "op"] for each in events]
        if pair := first_difference(computed[0], computed[1], other_bits):
            return f"step {step}: {text_of_event(*pair, *events)}"
    return (
        f"the replays are equal up to step {until}: what differed is not in the steps as one "
        "process takes them, but in what one of several ranks read, a callback, the layout, the "
        "environment or the hardware"
    )


def text_of_event(event: Event, other: Event, a: Sequence[Event], b: Sequence[Event]) -> str:
    """The places of two events in their steps `a` and `b`, and the size of their difference."""
    module = event.module or "the model"
    if event.kind == "backward":
        call = call_of(event, a)
        module = (call.module or "the model") if call else "the loss, or what divides it"
    text = {
        "backward": f"the backward of {module}, in {event.name}",
        "loss": "the loss of the model",
        "gradient": f"the gradient of the parameters of {module}",
        "forward": f"the forward of {module}",
    }[event.kind]
    if event.kind in ("forward", "loss"):
        # The operations in this module, or in the task, without those that return what memory held.
        operations = [
            [
                each
                for each in events
                if (each.kind, each.module, each.micro_batch)
                == ("op", event.module, event.micro_batch)
                and "empty" not in each.name
            ]
            for events in (a, b)
        ]
        for op_a, op_b in zip(*operations, strict=False):
            if op_a.name != op_b.name:
                text += f", {op_a.name} in A, {op_b.name} in B"
                break
            if other_bits(op_a.values, op_b.values):
                text += f", {op_a.name}"
                break
    error = largest = 0.0
    for x, y in zip(event.values.samples, other.values.samples, strict=False):
        if x.shape == y.shape and x.numel():
            error = max(error, float((x.double() - y.double()).abs().max()))
            largest = max(largest, float(x.double().abs().max()))
    if error:
        text += f"; differs by {error:.2g}, elements up to {largest:.2g}"
    return text


if __name__ == "__main__":
    sys.exit(main())
