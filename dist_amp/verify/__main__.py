"""python -m dist_amp.verify: prove on your task and machine that every way of running computes the
same step.

Each combination of ranks, strategy and precision takes five steps with SGD and with AdamW: of 1, 3
and 4 micro-batches, one of them partial at the end of an epoch, and before them one step that is
infinite on a single rank. The gradients of each step and the final parameters are compared with
plain torch in one process: float32, the whole batch at once.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from typing import get_args

import torch

from dist_amp.config.load import load_config
from dist_amp.config.native_precision import EMULATED, cpu_slowdown
from dist_amp.distributed.process import hide_progress_bars
from dist_amp.errors import ConfigError, first_line, nearest_name
from dist_amp.settings import Config, ParallelConfig, Strategy
from dist_amp.supervise.command_line import Parser, exit_status
from dist_amp.verify.cells import Row, compare_on_ranks
from dist_amp.verify.compare import Verdict
from dist_amp.verify.findings import Finding, inspect_task
from dist_amp.verify.reference import GLOBAL_BATCH, STEPS, Reference
from dist_amp.world import locate

PRECISIONS = ("fp32", "bf16", "fp16")
STRATEGIES = get_args(Strategy)

# Seconds of a row for each second of its bound, which takes the whole batch's gradients three
# times. Assumed from the count: a row takes them some 12 times, six steps with each optimizer. The
# first rows correct it.
ROW_FOR_BOUND = 4.0

HEADER = "ranks  strategy  precision  gradients    bound  parameters    bound     took    left"

EPILOG = """\
All other options are settings of dist_amp.train: --task.target my_file:MyTask, --run.device cpu,
--task.args.width 32, --config FILE.toml ... A small model and short samples are enough: the
comparison does not depend on their size.
Exit status: 0 all pass, 1 something fails, 64 a wrong setting, 65 wrong data."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 if all pass, 1 if something fails."""
    return exit_status(run, argv)


def run(argv: Sequence[str]) -> int:
    options, rest = parse(argv)
    if options.replay:
        from dist_amp.verify.replay import replay_file

        return replay_file(options.replay, rest)
    if options.dtypes:
        from dist_amp.verify.dtypes import dtype_report

        print(dtype_report(load_config(rest)).text)
        return 0
    strategies = chosen("strategies", options.strategies, STRATEGIES)
    precisions = chosen("precisions", options.precisions, PRECISIONS)
    return verify(rest, world_sizes_in(options.world_sizes), strategies, precisions)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(this command's options, the remaining arguments: settings of a run)."""
    parser = Parser("python -m dist_amp.verify", __doc__, EPILOG)
    for name, default, text in (
        ("world_sizes", "1,2,4", "numbers of ranks; default 1,2,4"),
        ("strategies", ",".join(STRATEGIES), "default all; hsdp takes even numbers of ranks"),
        ("precisions", ",".join(PRECISIONS), "default all (fp16 is slow on a CPU)"),
    ):
        parser.add_argument(f"--{name}", default=default, metavar=default, help=text)
    parser.add_argument(
        "--dtypes",
        action="store_true",
        help="only print the dtype in which autocast computes each module",
    )
    parser.add_argument(
        "--replay",
        metavar="FILE",
        help="only replay a micro-batch that was not finite, from RUN/nonfinite/",
    )
    options, rest = parser.parse_known_args(argv)
    for word in rest:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        near = nearest_name(name, vars(options))
        if word.startswith("--") and "." not in name and near:
            raise ConfigError(f"unknown option --{name}; did you mean --{near}?")
    return options, rest


def world_sizes_in(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdigit() and int(word) > 0 for word in words):
        rule = "must be whole numbers above 0, separated by commas: 1,2,4"
        raise ConfigError(f"--world_sizes={text} {rule}")
    return sorted({int(word) for word in words})


def chosen(name: str, text: str, known: Sequence[str]) -> list[str]:
    words = text.split(",")
    if wrong := [word for word in words if word not in known]:
        raise ConfigError(f"--{name}={text}: {wrong[0]!r} is none of {', '.join(known)}")
    return [word for word in known if word in words]


def verify(
    argv: Sequence[str], world_sizes: list[int], strategies: list[str], precisions: list[str]
) -> int:
    """Print findings and table; return 1 if anything in them fails."""
    began = time.perf_counter()
    config = load_config(argv)
    if not sys.stderr.isatty():
        hide_progress_bars()
    global_batch = math.lcm(GLOBAL_BATCH, *(12 * size for size in world_sizes))
    reference = Reference(config, locate(config.run).device, global_batch=global_batch)
    sizes = available_world_sizes(world_sizes, reference.device)
    if not any(rows_of(size, strategies, precisions) for size in sizes):
        raise ConfigError("nothing to compare: single takes --world_sizes 1, the others 2 and more")
    parameters = sum(p.numel() for p in reference.model().parameters())
    device = reference.device.type
    say(f"task     {config.task.target} on {device}, {parameters:,} parameters")
    findings = [*inspect_task(reference), *ignored_settings(config)]
    for finding in findings:
        say(f"{'fail' if finding.fails else 'note'}     {finding.text}")
    if any(finding.fails for finding in findings):
        why = "no way of running can compute this task's step as one process would"
        say(f"failed: {why}; fix the task first")
        return 1
    seconds = {}  # of the last row in each precision; before the first, an estimate
    for precision in precisions:
        started = time.perf_counter()
        if is_supported(reference, precision):
            seconds[precision] = ROW_FOR_BOUND * (time.perf_counter() - started)
    rows = {size: rows_of(size, strategies, list(seconds)) for size in sizes}
    left = [precision for of_size in rows.values() for _, _, precision in of_size]
    total = len(left)
    about = in_words(sum(seconds[precision] for precision in left))
    steps = f"{STEPS} steps of {global_batch} samples with SGD and with AdamW"
    say(f"compare  {total} combinations, each {steps}; about {about}")
    for size, of_size in rows.items():
        if of_size:
            names = [", ".join(dict.fromkeys(str(row[at]) for row in of_size)) for at in (1, 2)]
            say(f"{size:>5} {'ranks' if size > 1 else 'rank '}  {' in '.join(names)}")
    say(f"\n{HEADER}")
    failed = 0
    started = time.perf_counter()
    for size, of_size in rows.items():
        for row, verdicts in compare_on_ranks(size, argv, of_size, reference):
            took = time.perf_counter() - started
            started += took
            seconds[row[2]] = took
            left.remove(row[2])
            say(table_row(row, verdicts, took, sum(seconds[precision] for precision in left)))
            failed += any(verdict.cause for verdict in verdicts)
    say(
        f"\n{'failed' if failed else 'passed'}: {total - failed} of {total} compute the steps of "
        f"one process with the whole batch ({time.perf_counter() - began:.0f} s)"
    )
    return int(failed > 0)


def say(text: str) -> None:
    print(text, flush=True)


def ignored_settings(config: Config) -> list[Finding]:
    """Settings whose rounding would hide errors of the step, and optimizers other than torch's."""
    findings = []
    for name in ("param_dtype", "reduce_dtype", "comm_dtype", "cpu_offload"):
        value = getattr(config.parallel, name)
        default = getattr(ParallelConfig(), name)
        if value != default:
            findings.append((f"parallel.{name}={value}", default))
    if config.optim.name not in ("sgd", "adamw"):
        findings.append((f"optim.name={config.optim.name}", "sgd and adamw"))
    return [Finding(f"{given} is ignored: the comparison uses {used}") for given, used in findings]


def is_supported(reference: Reference, precision: str) -> bool:
    """Whether plain torch can compute the task in this precision; if not, or slowly, notes it."""
    if reference.device.type == "cpu" and precision != "fp32":
        slowdown = cpu_slowdown(precision)
        if slowdown >= EMULATED:
            why = f"this CPU only emulates it ({slowdown:.0f}x slower); see --precisions"
            say(f"note     {precision} takes long: {why}")
    try:
        reference.bound(precision)
    except RuntimeError as error:
        why = first_line(error) or type(error).__name__
        rule = "plain torch can't compute this task in it on this device"
        say(f"note     {precision} is skipped: {rule} ({why})")
        return False
    return True


def available_world_sizes(world_sizes: list[int], device: torch.device) -> list[int]:
    """The world sizes that this machine has GPUs for; all of them on a CPU."""
    gpus = torch.cuda.device_count()
    available = []
    for size in world_sizes:
        if device.type == "cuda" and size > gpus:
            why = f"there are {gpus} GPUs; use --run.device cpu for more"
            say(f"note     {size} ranks are skipped: {why}")
        else:
            available.append(size)
    return available


def rows_of(size: int, strategies: Sequence[str], precisions: Sequence[str]) -> list[Row]:
    """The combinations that exist on `size` ranks; hsdp's two replicas need an even number."""
    exist = ["single"] if size == 1 else ["ddp", "fsdp"]
    if size % 2 == 0:
        exist.append("hsdp")
    return [
        (size, one, precision) for one in strategies if one in exist for precision in precisions
    ]


def table_row(row: Row, verdicts: list[Verdict], seconds: float, seconds_left: float) -> str:
    """A row of the table with the worst of its verdicts; below it the causes of failures."""
    size, strategy, precision = row
    gradients = max(verdicts, key=lambda verdict: verdict.gradient_error)
    updates = max(verdicts, key=lambda verdict: verdict.parameter_error / verdict.parameter_bound)
    numbers = (
        f"{gradients.gradient_error:>9.1e}  {gradients.gradient_bound:>7.0e}  "
        f"{updates.parameter_error:>10.1e}  {updates.parameter_bound:>7.0e}"
    ).replace("nan", "  -")
    left = in_words(seconds_left) if seconds_left else ""
    causes = dict.fromkeys(verdict.cause for verdict in verdicts if verdict.cause)
    text = f"{size:>5}  {strategy:<8}  {precision:<9}  {numbers}  {seconds:>5.1f} s  {left:>6}"
    result = "FAIL" if causes else "pass"
    return "\n".join([f"{text}  {result}", *(f"{'':7}{cause}" for cause in causes)])


def in_words(seconds: float) -> str:
    """A duration that is an estimate: 40 s, 12 min, 1.5 h."""
    if seconds < 100:
        return f"{max(10, round(seconds, -1)):.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


if __name__ == "__main__":
    sys.exit(main())
