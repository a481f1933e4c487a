"""python -m dist_amp.diff RUN_A RUN_B: what differs between two runs, and where they part.

It reads the runs' folders: settings, environment and data; then, of the steps that both have
logged, the first in which a metric differs, and by how much. Steps of one layout, and those with
parallel.bit_exact, are compared bit by bit; others within the rounding of another order of sums,
where random numbers, such as dropout's, differ by rank and are no fault. With metrics.fingerprint
in both it names the modules whose parameters or gradients differ first. --deep takes the steps of
both again in this process, recorded, from where they are known to be equal: the parameters and
samples of a step, then what each module returns, the losses, each operation of the backward, and
the gradients that arrive at the parameters.

Exit status: 0 no fault, whatever the settings, 1 the numbers differ, 64 bad arguments, 65 not a
run's folder, a damaged one, or no logged step in common.

Docs: docs/debugging.md
"""

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from dist_amp.checkpoint.format import Reader, config_at, read_into, read_manifest
from dist_amp.commands.replay import run_at
from dist_amp.config.text import read_flat
from dist_amp.diagnostics.trace import (
    Event,
    call_of,
    first_difference,
    hash_of,
    hash_samples,
    recorded,
)
from dist_amp.distributed.process import random_state, set_random_state
from dist_amp.errors import CheckpointRejected, ConfigError, DataError
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
SAMPLED = 2**10  # elements of each tensor that are kept to say how far it is off


# ---- what the folders say


def differences(
    a: Mapping[str, Any], b: Mapping[str, Any], leave_out: tuple[str, ...] = ()
) -> dict[str, list[Any]]:
    """{key: [its value in A, in B]} where they differ; None: it has none."""
    keys = [key for key in dict.fromkeys([*a, *b]) if not f"{key}".startswith(leave_out)]
    return {key: [a.get(key), b.get(key)] for key in keys if a.get(key) != b.get(key)}


def data_of(run: Record) -> str:
    """The data's fingerprint and length, of the newest valid checkpoint."""
    for path in reversed(run.checkpoints):
        with suppress(CheckpointRejected):
            manifest = read_manifest(path)
            return f"{manifest.data_fingerprint}, {manifest.data_length:,} samples"
    return ""


def draws_random_numbers(run: Record) -> bool:
    """Whether its steps draw some, as dropout does: by rank 0's generators in a checkpoint."""
    for path in reversed(run.checkpoints):
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
    both = (a.settings_at(step), b.settings_at(step))
    exact = all(settings.get("parallel.bit_exact") for settings in both)
    if exact or layout_of(a, step) == layout_of(b, step):
        return 0.0
    used = [settings["precision.dtype"] for settings in both if settings["precision.use_amp"]]
    return max(TOLERANCE[dtype] for dtype in ("fp32", *used))


def relative_difference(a: Any, b: Any) -> float:
    """inf for what can't be subtracted, such as nan, which is text in these files."""
    numbers = isinstance(a, int | float) and isinstance(b, int | float)
    if not numbers or a == b:
        return 0.0 if a == b else math.inf
    return abs(a - b) / max(abs(a), abs(b))


def compare_metrics(a: Record, b: Record, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """{"equal_until": step, "step": step, "metrics": {tag: [in A, in B]}, "ranks": [rank]}; the
    last three if any differ.

    Also "tolerance": the largest that a step was compared with, as all after it are; and "exact":
    the last step before it. Errors: DataError without a step that both have logged.
    """
    for run in (a, b):
        every = run.settings.get("metrics.log_every")
        if not run.rows:
            raise DataError(
                f"{run.folder / 'metrics.jsonl'} has no complete line; wait for the step "
                f"metrics.log_every={every}, or give another run's folder"
            )
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
        intervals = [run.settings_at(step).get("metrics.log_every") for run in (a, b)]
        left_out = leave_out if intervals[0] == intervals[1] else leave_out + OF_INTERVAL
        differing = {}
        for tag, value in a.steps[step].items():
            if tag in b.steps[step] and tag.startswith(compared) and tag not in left_out:
                pair = [value, b.steps[step][tag]]
                allowed = tolerance if tag in ROUNDED else 0.0
                if relative_difference(*pair) > allowed:
                    differing[tag] = pair
        if differing:
            # The ranks alone whose own losses differ; none if all do, or in other layouts.
            losses = [
                [rank.get("train/loss_sum") for rank in run.steps[step].get("ranks", ())]
                for run in (a, b)
            ]
            pairs = enumerate(zip(*losses, strict=False))
            ranks = [rank for rank, pair in pairs if pair[0] != pair[1]]
            if not len(losses[0]) == len(losses[1]) > len(ranks):
                ranks = []
            return report | {"step": step, "metrics": differing, "ranks": ranks}
        report["equal_until"] = step
    return report


def fingerprints_of(run: Record) -> dict[int, dict[str, dict[str, str]]]:
    """By step; see telemetry's fingerprint."""
    found = {}
    for row in run.rows:
        for step, hashes in row.get("fingerprints", {}).items():
            found[int(step)] = hashes
    return found


def compare_fingerprints(a: Record, b: Record) -> dict[str, Any]:
    """The first step whose hashes differ: {"equal_until", "step", "parameters", "gradients"}.

    The last two list modules, in the model's order; "modules": how many both have. "cause": the
    module to look at, if one stands out, and "because". Empty if not both have a common step.
    """
    report: dict[str, Any] = {}
    hashes_a, hashes_b = fingerprints_of(a), fingerprints_of(b)
    for step in sorted(hashes_a.keys() & hashes_b.keys()):
        of_a, of_b = hashes_a[step], hashes_b[step]
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
    metrics = compare_metrics(a, b)
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
        report["fingerprints"] = compare_fingerprints(a, b)
    elif "step" in metrics and (draws_random_numbers(a) or draws_random_numbers(b)):
        unrounded = compare_metrics(a, b, ROUNDED)
        report["random"] = "step" not in unrounded
        if "step" in unrounded:
            report["metrics"] = unrounded
    return report


def parted(report: Mapping[str, Any]) -> bool:
    """Whether numbers differ that should not."""
    if report["random"]:
        return False
    return "step" in report["metrics"] or "step" in report["fingerprints"]


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
    hashes = report["fingerprints"]
    if hashes and not hashes["modules"]:
        lines.append("fingerprints: the models have no module in common")
    elif hashes and "step" not in hashes:
        lines.append(f"fingerprints are equal up to step {hashes['equal_until']}")
    elif hashes:
        lines.append(f"{parting('fingerprints', hashes)}: {hashes['because']}")
        for kind in ("parameters", "gradients"):
            modules = hashes[kind]
            text = f"  {kind} differ in {len(modules)} of {hashes['modules']} modules"
            if modules:
                text += f": {', '.join(modules[:SHOWN])}{', ...' * (len(modules) > SHOWN)}"
            lines.append(text)
    return "\n".join([*lines, *filter(None, [report.get("deep")])])


def parting(what: str, part: Mapping[str, Any]) -> str:
    until = f", equal up to step {part['equal_until']}" if part["equal_until"] else ""
    return f"{what} part at step {part['step']}{until}"


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


# ---- --deep


class Value(NamedTuple):
    """What is kept of an event's tensors."""

    bits: int  # a hash
    samples: list[Tensor]


def value_of(tensors: Sequence[Tensor]) -> Value:
    strided = [tensor for tensor in tensors if tensor.layout == torch.strided]
    samples = [tensor.flatten()[:: -(-tensor.numel() // SAMPLED) or 1] for tensor in strided]
    return Value(hash_of(strided), [sample.clone() for sample in samples])


def other_bits(a: Value, b: Value) -> float:
    return float(a.bits != b.bits)


class Replayed:
    """One of the runs, with random generators of its own."""

    def __init__(self, folder: Path, step: int):
        """The run before its step `step`, or at an earlier checkpoint."""
        # Of two versions of one module each is imported from its own file.
        module = str(read_flat(config_at(folder, step)).get("task.target")).partition(":")[0]
        if module.endswith(".py"):
            make_room_for(Path(module))
        self.replay = run_at(folder, step)
        self.replay.rows = {}  # here it is not compared with what it logged
        self.run = self.replay.run
        self._random = random_state(self.run.world.device)

    def parameters(self) -> list[Event]:
        with recorded(self.run, value_of, ["parameter"]) as events:
            return events

    @contextmanager
    def own_random_numbers(self) -> Iterator[None]:
        set_random_state(self._random, self.run.world.device)
        yield
        self._random = random_state(self.run.world.device)

    def skip_step(self) -> None:
        with self.own_random_numbers():
            self.replay.step()

    def batches(self) -> list[Any]:
        with self.own_random_numbers():
            return next(self.run.data)

    def take_step(self, micro_batches: Sequence[Any]) -> list[Event]:
        kinds = ("forward", "op", "backward", "gradient")
        with self.own_random_numbers(), recorded(self.run, value_of, kinds) as events:
            self.replay.step(micro_batches)
        return events


def make_room_for(path: Path) -> None:
    """Forget a module of this name from another file, and what was imported from its folder."""
    file = getattr(sys.modules.get(path.stem), "__file__", None)
    if file and Path(file).resolve() != path.resolve():
        folder = Path(file).resolve().parent
        sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != folder]
        for name, module in list(sys.modules.items()):
            if Path(getattr(module, "__file__", None) or "").resolve().parent == folder:
                del sys.modules[name]


def compare_inside(folders: Sequence[Path], equal_until: int, until: int) -> str:
    """Take the steps of both runs again, from where they are known to be equal to `until`.

    Returns where they part, in words. Errors: DataError for a run that changed its settings there.
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
        first = max(replayed.run.step for replayed in runs) + 1
        for replayed in runs:
            while replayed.run.step + 1 < first:
                replayed.skip_step()
        return f"both replayed: {first_of_steps(runs, first, until)}"
    finally:
        for replayed in runs:
            replayed.run.close()


def first_of_steps(runs: Sequence[Replayed], first: int, until: int) -> str:
    for step in range(first, until + 2):
        a, b = [run.parameters() for run in runs]
        if pair := first_difference(a, b, other_bits):
            where = (
                f"the start of step {step}" if step == first else f"the update of step {step - 1}"
            )
            return f"{where}: the first other parameters are in {pair[0].module}"
        if step > until:
            break
        batches = [run.batches() for run in runs]
        samples = [hash_samples(each, runs[0].run.world.device) for each in batches]
        if samples[0] != samples[1]:
            return f"step {step}: other samples"
        events = [run.take_step(each) for run, each in zip(runs, batches, strict=True)]
        if text := first_part(*events):
            return f"step {step}: {text}"
    return (
        f"the replays are equal up to step {until}: what differed is not in the steps as one "
        "process takes them, but in what one of several ranks read, a callback, the layout, the "
        "environment or the hardware"
    )


def first_part(a: Sequence[Event], b: Sequence[Event]) -> str:
    """Where one step's values part, in words; "" if they are equal."""
    computed_a, computed_b = [[e for e in each if e.kind != "op"] for each in (a, b)]
    pair = first_difference(computed_a, computed_b, other_bits)
    if pair is None:
        return ""
    event, other = pair
    if event.kind == "backward":
        call = call_of(event, a)
        owner = call.module or "the model" if call else "the loss, or what divides it"
        text = f"the backward of {owner}, in {event.name}"
    elif event.kind == "loss":
        text = "the loss of the model"
    elif event.kind == "gradient":
        text = f"the gradient of the parameters of {event.module or 'the model'}"
    else:
        text = f"the forward of {event.module or 'the model'}"
    if event.kind in ("forward", "loss"):
        text += first_operation(*(operations_of(event, each) for each in (a, b)))
    apart = largest = 0.0
    for x, y in zip(event.values.samples, other.values.samples, strict=False):
        if x.shape == y.shape and x.numel():
            apart = max(apart, float((x.double() - y.double()).abs().max()))
            largest = max(largest, float(x.double().abs().max()))
    if apart:
        text += f"; differs by {apart:.2g}, elements up to {largest:.2g}"
    return text


def operations_of(event: Event, events: Iterable[Event]) -> list[Event]:
    """In a module, or the task, of this micro-batch; without those that return what memory held."""
    place = (event.module, event.micro_batch)
    found = [e for e in events if e.kind == "op" and (e.module, e.micro_batch) == place]
    return [operation for operation in found if "empty" not in operation.name]


def first_operation(a: Sequence[Event], b: Sequence[Event]) -> str:
    for of_a, of_b in zip(a, b, strict=False):
        if of_a.name != of_b.name:
            return f", {of_a.name} in A, {of_b.name} in B"
        if other_bits(of_a.values, of_b.values):
            return f", {of_a.name}"
    return ""


@command()
def main(argv: Sequence[str]) -> int:
    parser = Parser("python -m dist_amp.diff", __doc__)
    parser.add_argument("run_a", type=Path, metavar="RUN_A", help="its folder")
    parser.add_argument("run_b", type=Path, metavar="RUN_B", help="its folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    deep = (
        "take both runs' steps again on this process, and name the module and operation that "
        "differ first"
    )
    parser.add_argument("--deep", action="store_true", help=deep)
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
    return int(parted(report))


if __name__ == "__main__":
    sys.exit(main())
