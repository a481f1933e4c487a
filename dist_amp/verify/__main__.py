"""python -m dist_amp.verify: check, with your task on this machine, that every number of ranks,
strategy and precision computes the same steps.

Each combination takes five steps with SGD and five with AdamW. Steps have 1, 3 or 4 micro-batches;
one is the partial step at the end of an epoch. Before them, a step with an infinite loss on one
rank must be skipped. Each step's gradients and update are compared with those of plain torch in
one process, in float32, with the whole batch at once.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import get_args

import torch

from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError, first_line
from dist_amp.settings import Strategy
from dist_amp.supervise.command_line import Parser, command
from dist_amp.verify.cells import Row, compare_row, print_table, say
from dist_amp.verify.compare import Verdict
from dist_amp.verify.findings import WrongTask, inspect_task
from dist_amp.verify.reference import GLOBAL_BATCH, STEPS, Reference
from dist_amp.world import locate

PRECISIONS = ("fp32", "bf16", "fp16")
STRATEGIES = get_args(Strategy)

HEADING = "gradients    bound  parameters    bound"
CLAIM = "compute the steps of one process with the whole batch"

EPILOG = """\
All other options are settings of dist_amp.train: --task.target my_file:MyTask, --run.device cpu,
--task.args.width 32, --config FILE.toml ... A small model and short samples are enough: the
comparison does not depend on their size. It uses torch's SGD and AdamW with float32 parameters,
reductions and communication, regardless of optim.name and parallel.*_dtype.
Exit status: 0 passed, 1 failed, 64 a wrong setting, 65 wrong data."""


@command()
def main(argv: Sequence[str]) -> int:
    options, rest = parse(argv)
    config = load_config(rest)
    if config.compile.blocks == "auto":  # compile only if the user asks for it
        rest = [*rest, "--compile.blocks", "false"]
        config = load_config(rest)
    if options.dtypes:
        from dist_amp.verify.dtypes import dtype_report

        print(dtype_report(config))
        return 0
    device = locate(config.run).device
    rows = rows_of(options, device)
    if not rows:
        raise ConfigError("nothing to compare: single needs --world_sizes 1, other strategies more")
    if options.bit_exact:
        from dist_amp.verify.bit_exact import verify_bits

        return verify_bits(rest, rows)
    return verify(rest, rows, device)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns (this command's options, the arguments that are settings of dist_amp.train)."""
    parser = Parser("python -m dist_amp.verify", __doc__, EPILOG)
    add = parser.add_argument
    text = "numbers of ranks; default 1,2,4"
    add("--world_sizes", type=numbers_of_ranks, default="1,2,4", help=text)
    add("--strategies", default=",".join(STRATEGIES), help="default: all")
    add("--precisions", default=",".join(PRECISIONS), help="default: all; fp16 is slow on a CPU")
    text = "only print the dtype in which autocast computes each module"
    add("--dtypes", action="store_true", help=text)
    text = "compare all combinations bit for bit, with parallel.bit_exact=true"
    add("--bit_exact", action="store_true", help=text)
    options, rest = parser.parse_known_args(argv)
    for name, known in (("strategies", STRATEGIES), ("precisions", PRECISIONS)):
        words = getattr(options, name).split(",")
        if unknown := set(words) - set(known):
            raise ConfigError(f"--{name}: {unknown.pop()!r} is not one of {', '.join(known)}")
        setattr(options, name, [word for word in known if word in words])
    return options, rest


def numbers_of_ranks(text: str) -> list[int]:
    numbers = sorted({int(word) for word in text.split(",")})
    if numbers[0] < 1:
        raise ValueError
    return numbers


def rows_of(options: argparse.Namespace, device: torch.device) -> list[Row]:
    """The table's rows. Each rank needs its own GPU, if on GPUs; hsdp an even number of ranks."""
    gpus = torch.cuda.device_count()
    rows: list[Row] = []
    for size in options.world_sizes:
        if device.type == "cuda" and size > gpus:
            say(f"note     {size} ranks are skipped: there are {gpus} GPUs")
            continue
        possible = ["single"] if size == 1 else ["ddp", "fsdp"]
        if size % 2 == 0:
            possible.append("hsdp")
        for strategy in options.strategies:
            if strategy in possible:
                rows += [(size, strategy, precision) for precision in options.precisions]
    return rows


def verify(argv: Sequence[str], rows: list[Row], device: torch.device) -> int:
    """Print findings and table. Returns 1 if anything fails or nothing passes, otherwise 0."""
    config = load_config(argv)
    # A multiple of 12 per rank, so that 1, 3 or 4 micro-batches are equally large.
    global_batch = math.lcm(GLOBAL_BATCH, *(12 * size for size, _, _ in rows))
    reference = Reference(config, device, global_batch=global_batch)
    parameters = sum(p.numel() for p in reference.model().parameters())
    say(f"task     {config.task.target} on {device.type}, {parameters:,} parameters")
    try:
        for note in inspect_task(reference):
            say(f"note     {note}")
    except WrongTask as error:
        say(f"fail     {error}")
        reason = "no combination can compute this task's steps as one process would"
        say(f"failed: {reason}; fix the task first")
        return 1
    supported = []
    for precision in dict.fromkeys(precision for _, _, precision in rows):
        try:
            reference.bound(precision)
            supported.append(precision)
        except RuntimeError as error:
            cause = first_line(error) or type(error).__name__
            rule = "plain torch can't compute this task in it on this device"
            say(f"note     {precision} is skipped: {rule} ({cause})")
    rows = [row for row in rows if row[2] in supported]
    steps = f"{STEPS} steps of {global_batch} samples with torch's SGD and with its AdamW"
    say(f"compare  {len(rows)} combinations, each {steps}\n")
    run_row = partial(compare_row, reference.measured(supported))
    return print_table(argv, rows, run_row, judge, HEADING, CLAIM)


def judge(row: Row, verdicts: list[Verdict]) -> tuple[str, str, str]:
    """Returns ("pass" or "FAIL", the cause, the largest errors with their bounds)."""
    cause = next((verdict.cause for verdict in verdicts if verdict.cause), "")
    gradients = max(verdicts, key=lambda verdict: verdict.gradient_error)
    updates = max(verdicts, key=lambda verdict: verdict.parameter_error / verdict.parameter_bound)
    numbers = (
        f"{gradients.gradient_error:>9.1e}  {gradients.gradient_bound:>7.0e}  "
        f"{updates.parameter_error:>10.1e}  {updates.parameter_bound:>7.0e}"
    )
    return "FAIL" if cause else "pass", cause, numbers.replace("nan", "  -")


if __name__ == "__main__":
    sys.exit(main())
