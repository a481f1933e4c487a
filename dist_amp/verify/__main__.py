"""python -m dist_amp.verify: check on your task and machine that every way of running computes the same step.

Each combination of ranks, strategy and precision takes five steps with SGD and with AdamW: of 1, 3 and 4 micro-batches,
one of them partial at the end of an epoch, and before them one step that is infinite on a single rank. The gradients of
each step and the final parameters are compared with plain torch in one process: float32, the whole batch at once.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from typing import Any, get_args

import torch

from dist_amp.commands.command_line import Parser, exit_status
from dist_amp.config.load import load_config
from dist_amp.config.suggest import nearest_name
from dist_amp.errors import ConfigError
from dist_amp.runtime.native_precision import EMULATED, cpu_slowdown
from dist_amp.settings import Config, ParallelConfig, Strategy
from dist_amp.sources.load import hide_progress_bars
from dist_amp.verify.compare import Verdict
from dist_amp.verify.findings import Finding, inspect_task
from dist_amp.verify.pace import Pace, in_words, plan
from dist_amp.verify.ranks import Row, compare_on_ranks
from dist_amp.verify.reference import GLOBAL_BATCH, STEPS, Reference
from dist_amp.world import locate

PRECISIONS = ("fp32", "bf16", "fp16")

HEADER = (
    f"{'ranks':>5}  {'strategy':<8}  {'precision':<9}  {'gradients':>9}  {'bound':>7}  {'parameters':>10}  "
    f"{'bound':>7}  {'took':>7}  {'left':>6}"
)

EPILOG = """\
All other options are settings of dist_amp.train: --task.target my_file:MyTask, --task.args.width 32, --run.device cpu,
--config FILE.toml ... A small model and short samples are enough: the comparison does not depend on their size.
Exit status: 0 all pass, 1 something fails, 64 a wrong setting, 65 wrong data."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 all pass, 1 something fails, 64 and 65 as dist_amp.train's."""
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
    return verify(rest, options.world_sizes, options.strategies, options.precisions)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(this command's options, the remaining arguments: settings of a run)."""
    parser, strategies = Parser("python -m dist_amp.verify", __doc__, EPILOG), get_args(Strategy)
    add = parser.add_argument
    add("--world_sizes", default=[1, 2, 4], type=_world_sizes, metavar="1,2,4", help="how many ranks; default 1,2,4")
    add("--strategies", default=list(strategies), type=_some_of("strategies", strategies), metavar="ddp,fsdp",
        help="which of single, ddp, fsdp, hsdp (even numbers of ranks); default all")  # fmt: skip
    add("--precisions", default=list(PRECISIONS), type=_some_of("precisions", PRECISIONS), metavar="fp32,bf16",
        help="which of fp32, bf16, fp16; default all (fp16 is slow on a CPU)")  # fmt: skip
    add("--dtypes", action="store_true", help="only print in which dtype autocast computes each module")
    add("--replay", metavar="FILE", help="only replay a micro-batch that was not finite, from RUN/nonfinite/")
    options, rest = parser.parse_known_args(argv)
    for word in rest:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word.startswith("--") and "." not in name and (near := nearest_name(name, vars(options))):
            raise ConfigError(f"unknown option --{name}; did you mean --{near}?")
    return options, rest


def _world_sizes(text: str) -> list[int]:
    sizes = [int(word) if word.isdigit() else 0 for word in text.split(",")]
    if min(sizes) < 1:
        raise ConfigError(f"--world_sizes={text} must be whole numbers above 0, separated by commas: 1,2,4")
    return sorted(set(sizes))


def _some_of(name: str, known: Sequence[str]) -> Any:
    def read(text: str) -> list[str]:
        words = text.split(",")
        if wrong := [word for word in words if word not in known]:
            raise ConfigError(f"--{name}={text}: {wrong[0]!r} is none of {', '.join(known)}")
        return [word for word in known if word in words]

    return read


def verify(argv: Sequence[str], world_sizes: list[int], strategies: list[str], precisions: list[str]) -> int:
    """Print findings and table; return 1 if anything in them fails."""
    began, config = time.perf_counter(), load_config(argv)
    if not sys.stderr.isatty():
        hide_progress_bars()
    global_batch = math.lcm(GLOBAL_BATCH, *(12 * n for n in world_sizes))
    reference = Reference(config, locate(config.run).device, global_batch=global_batch)
    sizes = available_world_sizes(world_sizes, reference.device)
    if not any(rows_of(size, strategies, precisions) for size in sizes):
        raise ConfigError("nothing to compare: single takes --world_sizes 1, the others 2 and more")
    parameters = sum(p.numel() for p in reference.model().parameters())
    print(f"task     {config.task.target} on {reference.device.type}, {parameters:,} parameters", flush=True)
    findings = [*inspect_task(reference), *ignored_settings(config)]
    for finding in findings:
        print(f"{'fail' if finding.fails else 'note'}     {finding.text}")
    if any(finding.fails for finding in findings):
        print("failed: no way of running can compute this task's step as one process would; fix the task first")
        return 1
    bound_seconds = {}
    for precision in precisions:
        started = time.perf_counter()
        if is_supported(reference, precision):
            bound_seconds[precision] = time.perf_counter() - started
    rows = {size: rows_of(size, strategies, list(bound_seconds)) for size in sizes}
    every = [row for of_size in rows.values() for row in of_size]
    total, failed, pace = len(every), 0, Pace(every, bound_seconds)
    steps = f"{STEPS} steps of {reference.global_batch} samples"
    print(f"compare  {total} combinations, each {steps} with SGD and with AdamW; about {in_words(pace.seconds_left)}")
    print("\n".join([*plan(every), "", HEADER]), flush=True)
    for size in rows:
        for row, verdicts in compare_on_ranks(size, argv, rows[size], reference):
            print(table_row(row, verdicts, pace.took(row), pace.seconds_left), flush=True)
            failed += any(verdict.cause for verdict in verdicts)
    outcome = f"{total - failed} of {total} compute the steps of one process with the whole batch"
    print(f"\n{'failed' if failed else 'passed'}: {outcome} ({time.perf_counter() - began:.0f} s)")
    return int(failed > 0)


def ignored_settings(config: Config) -> list[Finding]:
    """Settings whose rounding would hide errors of the step, and optimizers other than plain torch's."""
    default, user = ParallelConfig(), config.parallel
    names = ("param_dtype", "reduce_dtype", "comm_dtype", "cpu_offload")
    ignored = {f"parallel.{name}": (getattr(user, name), getattr(default, name)) for name in names}
    if config.optim.name not in ("sgd", "adamw"):
        ignored["optim.name"] = (config.optim.name, "sgd and adamw")
    return [
        Finding(f"{key}={value} is ignored: the comparison uses {used}")
        for key, (value, used) in ignored.items()
        if value != used
    ]


def is_supported(reference: Reference, precision: str) -> bool:
    """Whether plain torch can compute the task in this precision on this device; prints a note if not, or slowly."""
    if reference.device.type == "cpu" and precision != "fp32" and (slowdown := cpu_slowdown(precision)) >= EMULATED:
        print(f"note     {precision} takes long: this CPU only emulates it ({slowdown:.0f}x slower); see --precisions")
    try:
        reference.bound(precision)
    except RuntimeError as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        print(f"note     {precision} is skipped: plain torch can't compute this task in it on this device ({why})")
        return False
    return True


def available_world_sizes(world_sizes: list[int], device: torch.device) -> list[int]:
    """The world sizes that this machine has GPUs for; all of them on a CPU."""
    gpus = torch.cuda.device_count()
    skipped = [size for size in world_sizes if device.type == "cuda" and size > gpus]
    for size in skipped:
        print(f"note     {size} ranks are skipped: there are {gpus} GPUs; use --run.device cpu for more")
    return [size for size in world_sizes if size not in skipped]


def rows_of(size: int, strategies: Sequence[str], precisions: Sequence[str]) -> list[Row]:
    """The combinations that exist on `size` ranks; hsdp's two replicas need an even number."""
    exist = [name for name in strategies if (name == "single") == (size == 1) and (name != "hsdp" or size % 2 == 0)]
    return [(size, strategy, precision) for strategy in exist for precision in precisions]


def table_row(row: Row, verdicts: list[Verdict], seconds: float, seconds_left: float) -> str:
    """One row of the table with the worst of its verdicts and its time, and the causes of failures below it."""
    gradients = max(verdicts, key=lambda verdict: verdict.gradient_error)
    parameters = max(verdicts, key=lambda verdict: verdict.parameter_error / verdict.parameter_bound)
    causes = dict.fromkeys(verdict.cause for verdict in verdicts if verdict.cause)
    numbers = (
        f"{gradients.gradient_error:>9.1e}  {gradients.gradient_bound:>7.0e}  "
        f"{parameters.parameter_error:>10.1e}  {parameters.parameter_bound:>7.0e}"
    ).replace("nan", "  -")
    left = in_words(seconds_left) if seconds_left else ""
    result = "FAIL" if causes else "pass"
    text = f"{row[0]:>5}  {row[1]:<8}  {row[2]:<9}  {numbers}  {seconds:>5.1f} s  {left:>6}  {result}"
    return "\n".join([text, *(f"{'':7}{cause}" for cause in causes)])


if __name__ == "__main__":
    sys.exit(main())
