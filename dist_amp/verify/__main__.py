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
from collections import Counter
from collections.abc import Sequence
from typing import get_args

import torch

from dist_amp.config.load import load_config
from dist_amp.config.validate import warn_once
from dist_amp.distributed.machine import check_dtype
from dist_amp.distributed.process import hide_progress_bars
from dist_amp.errors import ConfigError, first_line
from dist_amp.settings import Config, ParallelConfig, Strategy
from dist_amp.supervise.command_line import Parser, command
from dist_amp.verify.cells import Row, compare_on_ranks
from dist_amp.verify.compare import Verdict
from dist_amp.verify.findings import inspect_task
from dist_amp.verify.reference import GLOBAL_BATCH, STEPS, Reference
from dist_amp.world import World, locate

PRECISIONS = ("fp32", "bf16", "fp16")
STRATEGIES = get_args(Strategy)

HEADER = "ranks  strategy  precision  gradients    bound  parameters    bound     took"

EPILOG = """\
All other options are settings of dist_amp.train: --task.target my_file:MyTask, --run.device cpu,
--task.args.width 32, --config FILE.toml ... A small model and short samples are enough: the
comparison does not depend on their size.
Exit status: 0 nothing fails, 1 something fails, 64 a wrong setting, 65 wrong data."""


@command()
def main(argv: Sequence[str]) -> int:
    options, rest = parse(argv)
    config = load_config(rest)
    if config.compile.blocks == "auto":  # compiled code is compared if it is asked for
        rest = [*rest, "--compile.blocks", "false"]
        config = load_config(rest)
    if options.dtypes:
        from dist_amp.verify.dtypes import dtype_report

        print(dtype_report(config))
        return 0
    # A rank that is killed leaves semaphores, of which multiprocessing would warn at the end. Its
    # process for them has these options from its start, which may be in the task.
    sys.warnoptions.append("ignore:resource_tracker")
    device = locate(config.run).device
    rows = rows_of(options, device)
    if options.bit_exact:
        from dist_amp.verify.bit_exact import verify_bits

        return verify_bits(rest, rows)
    if not rows:
        raise ConfigError("nothing to compare: single takes --world_sizes 1, the others 2 and more")
    return verify(rest, rows, device)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns (this command's options, the settings of a run). Errors: ConfigError."""
    parser = Parser("python -m dist_amp.verify", __doc__, EPILOG)
    lists = {"strategies": STRATEGIES, "precisions": PRECISIONS}
    parser.add_argument("--world_sizes", default="1,2,4", help="numbers of ranks; default 1,2,4")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="default: all")
    parser.add_argument(
        "--precisions", default=",".join(PRECISIONS), help="default: all; fp16 is slow on a CPU"
    )
    parser.add_argument(
        "--dtypes",
        action="store_true",
        help="only print the dtype in which autocast computes each module",
    )
    parser.add_argument(
        "--bit_exact",
        action="store_true",
        help="compare all ways of running bit for bit, each with parallel.bit_exact=true",
    )
    options, rest = parser.parse_known_args(argv)
    words = options.world_sizes.split(",")
    if not all(word.isdigit() and int(word) > 0 for word in words):
        rule = "must be whole numbers above 0, separated by commas: 1,2,4"
        raise ConfigError(f"--world_sizes={options.world_sizes} {rule}")
    options.world_sizes = sorted({int(word) for word in words})
    for name, known in lists.items():
        words = getattr(options, name).split(",")
        for word in words:
            if word not in known:
                raise ConfigError(f"--{name}: {word!r} is none of {', '.join(known)}")
        setattr(options, name, [word for word in known if word in words])
    return options, rest


def rows_of(options: argparse.Namespace, device: torch.device) -> list[Row]:
    """The rows that have a GPU for each rank; hsdp's two replicas need an even number of ranks."""
    gpus = torch.cuda.device_count()
    rows: list[Row] = []
    for size in options.world_sizes:
        if device.type == "cuda" and size > gpus:
            say(f"note     {size} ranks are skipped: there are {gpus} GPUs")
            continue
        exist = ["single"] if size == 1 else ["ddp", "fsdp"]
        if size % 2 == 0:
            exist.append("hsdp")
        for strategy in options.strategies:
            if strategy in exist:
                rows += [(size, strategy, precision) for precision in options.precisions]
    return rows


def verify(argv: Sequence[str], rows: list[Row], device: torch.device) -> int:
    """Print findings and table; return 1 if anything in them fails, or nothing passes."""
    began = time.perf_counter()
    config = load_config(argv)
    if not sys.stderr.isatty():
        hide_progress_bars()
    global_batch = math.lcm(GLOBAL_BATCH, *(12 * size for size, _, _ in rows))
    reference = Reference(config, device, global_batch=global_batch)
    parameters = sum(p.numel() for p in reference.model().parameters())
    say(f"task     {config.task.target} on {device.type}, {parameters:,} parameters")
    findings = inspect_task(reference)
    for finding in findings:
        say(f"{'fail' if finding.fails else 'note'}     {finding.text}")
    if ignored := ignored_settings(config):
        say(f"note     ignored: {', '.join(ignored)}; the comparison uses sgd, adamw and float32")
    if any(finding.fails for finding in findings):
        reason = "no way of running can compute this task's step as one process would"
        say(f"failed: {reason}; fix the task first")
        return 1
    precisions = dict.fromkeys(precision for _, _, precision in rows)
    supported = [precision for precision in precisions if is_supported(reference, precision)]
    rows = [row for row in rows if row[2] in supported]
    steps = f"{STEPS} steps of {global_batch} samples with SGD and with AdamW"
    say(f"compare  {len(rows)} combinations, each {steps}\n\n{HEADER}")
    rows_by_cause: dict[str, list[str]] = {}
    results: Counter[str] = Counter()
    started = time.perf_counter()
    for row, verdicts in compare_on_ranks(argv, rows, reference):
        now = time.perf_counter()
        result = "pass"
        if any(verdict.refused for verdict in verdicts):
            result = "refused"
        elif any(verdict.cause for verdict in verdicts):
            result = "FAIL"
        results[result] += 1
        say(f"{table_row(row, verdicts, now - started)}  {result}")
        started = now
        for cause in dict.fromkeys(verdict.cause for verdict in verdicts if verdict.cause):
            rows_by_cause.setdefault(cause, []).append(" ".join(map(str, row)))
    for cause, names in rows_by_cause.items():
        say(f"\n{', '.join(names)}:\n    {cause}")
    failed = results["FAIL"] > 0 or not results["pass"]
    refused = ""
    if results["refused"]:
        refused = f", {results['refused']} refused, as in training"
    say(
        f"\n{'failed' if failed else 'passed'}: {results['pass']} of {len(rows)} compute the steps "
        f"of one process with the whole batch{refused} ({time.perf_counter() - began:.0f} s)"
    )
    return int(failed)


def say(text: str) -> None:
    print(text, flush=True)


def ignored_settings(config: Config) -> list[str]:
    """Settings whose rounding would hide errors of the step, and optimizers other than torch's."""
    default = ParallelConfig()
    ignored = []
    for name in ("param_dtype", "reduce_dtype", "comm_dtype", "cpu_offload"):
        value = getattr(config.parallel, name)
        if value != getattr(default, name):
            ignored.append(f"parallel.{name}={value}")
    if config.optim.name not in ("sgd", "adamw"):
        ignored.append(f"optim.name={config.optim.name}")
    return ignored


def is_supported(reference: Reference, precision: str) -> bool:
    """Whether plain torch can compute the task in this precision; if not, or slowly, says so."""
    on_cpu = reference.device.type == "cpu" and precision != "fp32"
    if on_cpu and (warning := check_dtype(precision, reference.device)):
        warn_once(World(), warning)
    try:
        reference.bound(precision)
    except RuntimeError as error:
        cause = first_line(error) or type(error).__name__
        rule = "plain torch can't compute this task in it on this device"
        say(f"note     {precision} is skipped: {rule} ({cause})")
        return False
    return True


def table_row(row: Row, verdicts: list[Verdict], seconds: float) -> str:
    """A row of the table, without its result: the worst of its verdicts."""
    size, strategy, precision = row
    gradients = max(verdicts, key=lambda verdict: verdict.gradient_error)
    updates = max(verdicts, key=lambda verdict: verdict.parameter_error / verdict.parameter_bound)
    numbers = (
        f"{gradients.gradient_error:>9.1e}  {gradients.gradient_bound:>7.0e}  "
        f"{updates.parameter_error:>10.1e}  {updates.parameter_bound:>7.0e}"
    ).replace("nan", "  -")
    return f"{size:>5}  {strategy:<8}  {precision:<9}  {numbers}  {seconds:>5.1f} s"


if __name__ == "__main__":
    sys.exit(main())
