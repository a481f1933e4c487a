"""python -m dist_amp.diff RUN_A RUN_B: what differs between two runs, and where they part.

It reads the runs' folders: settings, environment and data; then, of the steps that both have
logged, the first in which a metric differs, and by how much. Steps of one layout, and those with
parallel.bit_exact, are compared bit by bit; others within the rounding of another order of sums,
where random numbers, such as dropout's, differ by rank and are no fault. With metrics.fingerprint
in both it names the modules whose parameters or gradients differ first.

Exit status: 0 no fault, whatever the settings, 1 the numbers differ, 64 bad arguments, 65 not a
run's folder, a damaged one, or no logged step in common.

Docs: docs/debugging.md
"""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from dist_amp.checkpoint.format import (
    Reader,
    all_checkpoints,
    read_into,
    read_manifest,
)
from dist_amp.errors import CheckpointRejected, ConfigError, DataError
from dist_amp.files import present
from dist_amp.precision import TOLERANCE
from dist_amp.record import Record
from dist_amp.supervise.command_line import Parser, columns, command
from dist_amp.telemetry.step_report import MAX_RANK_FOLDERS

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
# Of all ranks, and so comparable between layouts; evaluations may take other samples there.
ROUNDED = ("train/loss", "train/grad_norm")
COUNTED = ("train/lr", "train/epoch", "train/samples_seen", "train/tokens_seen", "amp/")
OF_INTERVAL = ("train/loss", "train/clipped_share", "amp/skipped_in_interval")
SHOWN = 8  # rows of each kind; --json has all


def fingerprints_of(run: Record) -> dict[int, dict[str, dict[str, str]]]:
    """By step; see telemetry's fingerprint."""
    found = {}
    for row in run.rows:
        for step, hashes in row.get("fingerprints", {}).items():
            found[int(step)] = hashes
    return found


def data_of(run: Record) -> str:
    """The data's fingerprint and length, of the newest valid checkpoint."""
    for path in reversed(run.checkpoints):
        with suppress(CheckpointRejected):
            manifest = read_manifest(path)
            return f"{manifest.data_fingerprint}, {manifest.data_length:,} samples"
    return ""


def check_logged(run: Record) -> None:
    """Errors: DataError if the folder is no run, or has logged nothing."""
    every = run.settings.get("metrics.log_every")
    if not run.rows:
        raise DataError(
            f"{run.folder / 'metrics.jsonl'} has no complete line; wait for the step "
            f"metrics.log_every={every}, or give another run's folder"
        )


def differences(
    a: Mapping[str, Any], b: Mapping[str, Any], leave_out: tuple[str, ...] = ()
) -> dict[str, list[Any]]:
    """{key: [its value in A, in B]} where they differ; None: it has none."""
    keys = [key for key in dict.fromkeys([*a, *b]) if not f"{key}".startswith(leave_out)]
    return {key: [a.get(key), b.get(key)] for key in keys if a.get(key) != b.get(key)}


def layout_of(run: Record, step: int) -> dict[str, Any]:
    settings = run.settings_at(step)
    layout = {key: value for key, value in settings.items() if key.startswith(LAYOUT)}
    ranks = len(run.steps[step].get("ranks", ()))
    if ranks in (0, MAX_RANK_FOLDERS):  # an evaluation's line has none, another no more
        keys = [key for key in run.environment if re.fullmatch(r"hosts\..*\.ranks", key)]
        ranks = sum(len(run.environment[key].split(",")) for key in keys)
    return layout | {"ranks": ranks}


def tolerance_of(a: Record, b: Record, step: int) -> float:
    """By how much losses and norms of a step may differ, relatively; 0: in no bit."""
    settings = (a.settings_at(step), b.settings_at(step))
    exact = all(of.get("parallel.bit_exact") for of in settings)
    if exact or layout_of(a, step) == layout_of(b, step):
        return 0.0
    used = [of["precision.dtype"] for of in settings if of["precision.use_amp"]]
    return max(TOLERANCE[dtype] for dtype in ("fp32", *used))


def relative_difference(a: Any, b: Any) -> float:
    """inf for what can't be subtracted, such as nan, which is text in these files."""
    numbers = isinstance(a, int | float) and isinstance(b, int | float)
    if not numbers or a == b:
        return 0.0 if a == b else math.inf
    return abs(a - b) / max(abs(a), abs(b))


def first_difference(
    a: Record,
    b: Record,
    leave_out: tuple[str, ...] = (),
) -> dict[str, Any]:
    """{"equal_until": step, "step": step, "metrics": {tag: [in A, in B]}, "ranks": [rank]}; the
    last three if any.

    Also "tolerance": the largest that a step was compared with, as all after it are; and "exact":
    the last step before it. Errors: DataError without a step that both have logged.
    """
    common = sorted(a.steps.keys() & b.steps.keys())
    if not common:
        logged = [f"{run.folder} logged {min(run.steps)} to {max(run.steps)}" for run in (a, b)]
        raise DataError(
            f"no logged step in common: {', '.join(logged)}; run both with one metrics.log_every"
        )
    compared: tuple[str, ...] = METRICS
    report: dict[str, Any] = {"steps": len(common), "equal_until": 0, "tolerance": 0.0, "exact": 0}
    for step in common:
        # What was rounded once is not equal later.
        tolerance = max(report["tolerance"], tolerance_of(a, b, step))
        report["tolerance"] = tolerance
        if not tolerance:
            report["exact"] = step
        if layout_of(a, step) != layout_of(b, step):
            compared = (*ROUNDED, *COUNTED)
        every = [run.settings_at(step).get("metrics.log_every") for run in (a, b)]
        left_out = leave_out
        if every[0] != every[1]:
            left_out += OF_INTERVAL
        parted = {}
        for tag in a.steps[step]:
            if tag not in b.steps[step] or not tag.startswith(compared) or tag in left_out:
                continue
            pair = [a.steps[step][tag], b.steps[step][tag]]
            allowed = tolerance if tag in ROUNDED else 0.0
            if relative_difference(*pair) > allowed:
                parted[tag] = pair
        if parted:
            report["ranks"] = ranks_apart(a.steps[step], b.steps[step])
            return report | {"step": step, "metrics": parted}
        report["equal_until"] = step
    return report


def ranks_apart(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[int]:
    """The ranks alone whose own losses differ in a logged step; [] for all, or other layouts."""
    losses = [[of.get("train/loss_sum") for of in row.get("ranks", ())] for row in (a, b)]
    apart = [rank for rank, pair in enumerate(zip(*losses, strict=False)) if len({*pair}) > 1]
    return apart if len(losses[0]) == len(losses[1]) > len(apart) else []


def first_fingerprint(a: Record, b: Record) -> dict[str, Any]:
    """The first step whose hashes differ: {"equal_until", "step", "parameters", "gradients"}.

    The last two list modules, in the model's order; "modules": how many both have. "cause": the
    module to look at, if one stands out, and "because". Empty if not both have a common step.
    """
    report: dict[str, Any] = {}
    hashes_a, hashes_b = fingerprints_of(a), fingerprints_of(b)
    for step in sorted(hashes_a.keys() & hashes_b.keys()):
        of_a = hashes_a[step]
        of_b = hashes_b[step]
        both = [module for module in of_a["parameters"] if module in of_b["parameters"]]
        differing = {}
        for kind in of_a.keys() & of_b.keys():
            differing[kind] = [m for m in both if of_a[kind][m] != of_b[kind][m]]
        if any(differing.values()):
            report = {"equal_until": 0, "gradients": [], **report, **differing}
            report |= {"step": step, "modules": len(both)}
            report["because"], report["cause"] = explained(report)
            return report
        report |= {"equal_until": step, "modules": len(both)}
    return report


def explained(report: Mapping[str, Any]) -> tuple[str, str]:
    """(why the hashes differ, the module where it began; "" if that is unknown)."""
    step = report["step"]
    before = report["equal_until"]
    changed = report["parameters"]
    if changed:
        because = f"they parted in step {before} or later; a smaller metrics.fingerprint says more"
        if step == 1:
            because = "the runs start with other parameters"
        elif before == step - 1:
            because = f"gradients of step {before} were equal, its update was not"
        return because, changed[0] if len(changed) == 1 else ""
    # Errors flow from the output to the input.
    nearest = report["gradients"][-1]
    if len(report["gradients"]) == report["modules"]:
        return (
            "parameters are equal and all gradients differ: it began in the data, the forward or "
            f"the loss, or in the backward of {nearest}",
            "",
        )
    return f"parameters are equal; {nearest} is the module nearest to the output", nearest


def compare(a: Record, b: Record) -> dict[str, Any]:
    """The report, as --json prints it. Errors: DataError without a common step."""
    metrics = first_difference(a, b)
    report = {
        "runs": [str(a.folder), str(b.folder)],
        "settings": differences(a.settings, b.settings, NOT_SETTINGS),
        "environment": differences(a.environment, b.environment, NOT_ENVIRONMENT),
        "data": [data_of(a), data_of(b)],
        "tolerance": metrics.pop("tolerance"),
        "exact_until": metrics.pop("exact"),
        "last_steps": [max(a.steps), max(b.steps)],
        "metrics": metrics,
        "random": False,
        "fingerprints": {},
    }
    if not report["tolerance"]:
        report["fingerprints"] = first_fingerprint(a, b)
    elif "step" in metrics and (draws_random_numbers(a) or draws_random_numbers(b)):
        others = first_difference(a, b, ROUNDED)
        report["random"] = "step" not in others
        if "step" in others:
            report["metrics"] = others
    return report


def draws_random_numbers(run: Record) -> bool:
    """Whether its steps draw some, as dropout does: by rank 0's generators in a checkpoint."""
    for path in reversed(all_checkpoints(run.folder)):
        with suppress(CheckpointRejected, CheckpointException, OSError):
            reader = Reader(path)
            of_torch = torch.Generator().manual_seed(reader.manifest.seed + 1).get_state()
            state = {"ranks.0.random.torch": torch.empty_like(of_torch)}
            of_gpu = "ranks.0.random.cuda"  # 8 bytes of seed, 8 that count what was drawn
            if of_gpu in reader.read_metadata().state_dict_metadata:
                state[of_gpu] = torch.zeros(16, dtype=torch.uint8)
            read_into(state, reader)
            drawn = state.get(of_gpu, torch.zeros(16))[8:].any()
            return bool(drawn) or not state["ranks.0.random.torch"].equal(of_torch)
    return False


def parted(report: Mapping[str, Any]) -> bool:
    """Whether numbers differ that should not."""
    if report["random"]:
        return False
    return "step" in report["metrics"] or "step" in report["fingerprints"]


def text_of(report: Mapping[str, Any]) -> str:
    a, b = report["runs"]
    lines = [f"A  {a}", f"B  {b}"]
    if code := report["environment"].get("task.hash"):
        text = "the task's source file differs (hashes {} | {}): look there first"
        lines.insert(0, text.format(*code))
    lines += table_of("settings that differ:", report["settings"])
    lines += table_of("environment:", report["environment"])
    if report["data"][0] != report["data"][1]:
        lines.append("data: {} | {}".format(*(text or "no checkpoint" for text in report["data"])))
    metrics = report["metrics"]
    how = "bit by bit"
    equal = "equal"
    if report["tolerance"]:
        equal = f"within {report['tolerance']:g}"
        how = (
            f"as other layouts, whose sums are rounded otherwise: losses and norms {equal}, hashes "
            "not at all"
        )
        if report["exact_until"]:
            how = f"bit by bit up to step {report['exact_until']}, then {how}"
    lines.append(f"compared {how}: {metrics['steps']} logged steps")
    if report["last_steps"][0] != report["last_steps"][1]:
        lines.append("A ends at step {}, B at step {}".format(*report["last_steps"]))
    if "step" in metrics:
        lines.append(parting("metrics", metrics))
        for tag, (of_a, of_b) in list(metrics["metrics"].items())[:SHOWN]:
            apart = relative_difference(of_a, of_b)
            lines.append(f"  {tag}: {of_a} | {of_b}, {apart:.2g} of the larger")
        if ranks := ", ".join(map(str, metrics["ranks"])):
            lines.append(f"  only the losses of rank {ranks} differ: look at what it reads first")
        if report["random"]:
            lines.append(
                "  no fault is reported: the steps draw random numbers, such as dropout's, which "
                "differ by rank in a run that is not bit-exact"
            )
    else:
        lines.append(f"metrics are {equal} up to step {metrics['equal_until']}")
    lines += lines_of_fingerprints(report["fingerprints"])
    if "deep" in report:
        lines.append(report["deep"])
    return "\n".join(lines)


def parting(what: str, part: Mapping[str, Any]) -> str:
    until = f", equal up to step {part['equal_until']}" if part["equal_until"] else ""
    return f"{what} part at step {part['step']}{until}"


def lines_of_fingerprints(report: Mapping[str, Any]) -> list[str]:
    if not report:
        return []
    if not report["modules"]:
        return ["fingerprints: the models have no module in common"]
    if "step" not in report:
        return [f"fingerprints are equal up to step {report['equal_until']}"]
    lines = [f"{parting('fingerprints', report)}: {report['because']}"]
    for kind in ("parameters", "gradients"):
        modules = report[kind]
        text = f"  {kind} differ in {len(modules)} of {report['modules']} modules"
        if modules:
            text += f": {', '.join(modules[:SHOWN])}{', ...' * (len(modules) > SHOWN)}"
        lines.append(text)
    return lines


def table_of(title: str, pairs: Mapping[str, Sequence[Any]]) -> list[str]:
    """A title, and rows of a key and its values in A and B; nothing without rows."""
    if not pairs:
        return []
    rows = [["", "", "A", "B"]]
    for key, pair in list(pairs.items())[:SHOWN]:
        rows.append(["", key, *("unset" if value is None else str(value) for value in pair)])
    if len(pairs) > SHOWN:
        rows.append(["", f"{len(pairs) - SHOWN} more: see --json", "", ""])
    return [title, *columns(rows, left=4)]


@command()
def main(argv: Sequence[str]) -> int:
    parser = Parser("python -m dist_amp.diff", __doc__)
    for name in ("A", "B"):
        parser.add_argument(
            f"run_{name.lower()}", type=Path, metavar=f"RUN_{name}", help="its folder"
        )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(deep=False)
    if present("commands.diff_deep"):
        parser.add_argument(
            "--deep",
            action="store_true",
            help="take both runs' steps again on this process, and name the module and operation "
            "that differ first",
        )
    options = parser.parse_args(argv)
    if options.run_a.resolve() == options.run_b.resolve():
        raise ConfigError(f"{options.run_a} and {options.run_b} are the same folder; give two runs")
    runs = Record(options.run_a), Record(options.run_b)
    for run in runs:
        check_logged(run)
    report = compare(*runs)
    parts = [part for part in (report["metrics"], report["fingerprints"]) if "step" in part]
    if options.deep and parts and present("commands.diff_deep"):
        from dist_amp.commands.diff_deep import where_they_part

        first = min(parts, key=lambda part: part["step"])
        folders = (options.run_a, options.run_b)
        report["deep"] = where_they_part(folders, first["equal_until"], first["step"])
    elif options.deep:
        equal = report["metrics"]["equal_until"]
        report["deep"] = f"not replayed: nothing differs through step {equal}"
    print(json.dumps(report, indent=1) if options.json else text_of(report))
    return int(parted(report))


if __name__ == "__main__":
    sys.exit(main())
