"""python -m dist_amp.verify: prove on your task and machine that every way of running computes the same step.

Each combination of ranks, strategy and precision takes five steps with SGD and with AdamW, of 1, 3 and 4 micro-batches
and a partial window at an epoch's end, after one step that is infinite on one rank alone; the gradients of every step
and the parameters at the end are compared with plain torch in one process, float32, the whole batch at once.
"""

import argparse
import logging
import math
import multiprocessing
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from queue import Empty
from typing import Any, get_args

import torch

from dist_amp.commands.command_line import Parser, exit_status
from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError, Failure, nearest_name
from dist_amp.settings import Config, ParallelConfig, Strategy
from dist_amp.verify.compare import Cell, Verdict, examine
from dist_amp.verify.findings import Finding, find
from dist_amp.verify.reference import GLOBAL_BATCH, STEPS, Exam
from dist_amp.world import World, locate, start

PRECISIONS = ("fp32", "bf16", "fp16")

HEADER = (
    f"{'ranks':>5}  {'strategy':<8}  {'precision':<9}  {'gradients':>9}  {'bound':>7}  {'parameters':>10}  {'bound':>7}"
)

Row = tuple[int, str, str]

EPILOG = """\
Everything else is a setting of the run, as of dist_amp.train: --task.target my_file:MyTask, --task.args.width 32,
--config FILE.toml, --run.device cpu ... A small model and short samples are enough: what is compared does not depend
on size. Exit status: 0 all pass, 1 something does not, 64 a setting, 65 the data."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 all pass, 1 something does not, 64 and 65 as the main job's."""
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
    """(this command's options, what is left: the settings of a run)."""
    parser = Parser("python -m dist_amp.verify", __doc__, EPILOG)
    add = parser.add_argument
    add("--world_sizes", default=[1, 2, 4], type=_world_sizes, metavar="1,2,4", help="how many ranks; default 1,2,4")
    add("--strategies", default=list(get_args(Strategy)), type=_some_of("strategies", get_args(Strategy)),
        metavar="ddp,fsdp", help="which of single, ddp, fsdp, hsdp (even numbers of ranks); default all")  # fmt: skip
    add("--precisions", default=list(PRECISIONS), type=_some_of("precisions", PRECISIONS), metavar="fp32,bf16",
        help="which of fp32, bf16, fp16; default all (fp16 is slow on a CPU)")  # fmt: skip
    add("--dtypes", action="store_true", help="print in which dtype each module computes under autocast, and end")
    add("--replay", metavar="FILE", help="replay a micro-batch that was not finite, kept in RUN/nonfinite/, and end")
    options, rest = parser.parse_known_args(argv)
    own = [option.removeprefix("--") for action in parser._actions for option in action.option_strings]
    for word in rest:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word.startswith("--") and "." not in name and (near := nearest_name(name, own)):
            raise ConfigError(f"unknown option --{name}; did you mean --{near}?")
    return options, rest


def _world_sizes(text: str) -> list[int]:
    sizes = [int(word) if word.isdigit() else 0 for word in text.split(",")]
    if min(sizes) < 1:
        raise ConfigError(f"--world_sizes={text} must be whole numbers above 0 with commas between: 1,2,4")
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
    exam = Exam(config, locate(config.run).device, global_batch=math.lcm(GLOBAL_BATCH, *(12 * n for n in world_sizes)))
    sizes = affordable(world_sizes, exam.device)
    if not any(rows_of(size, strategies, precisions) for size in sizes):
        raise ConfigError("nothing to compare: single takes --world_sizes 1, the others 2 and more")
    parameters = sum(p.numel() for p in exam.model().parameters())
    print(f"task     {config.task.target} on {exam.device.type}, {parameters:,} parameters", flush=True)
    findings = [*find(exam), *left_out(config)]
    for finding in findings:
        print(f"{'fail' if finding.fails else 'note'}     {finding.text}")
    if any(finding.fails for finding in findings):
        print("failed: no way of running can compute this task's step as one process would; mend the task first")
        return 1
    precisions = [precision for precision in precisions if able(exam, precision)]
    rows = {size: rows_of(size, strategies, precisions) for size in sizes}
    total, failed = sum(map(len, rows.values())), 0
    batch = f"steps of {exam.global_batch} samples"
    print(f"compare  {total} combinations, each {STEPS} {batch} by SGD and by AdamW\n\n{HEADER}", flush=True)
    for size in rows:
        for row, verdicts in on_ranks(size, argv, rows[size], exam):
            print(line(row, verdicts), flush=True)
            failed += any(verdict.cause for verdict in verdicts)
    outcome = f"{total - failed} of {total} compute the steps of one process with the whole batch"
    print(f"\n{'failed' if failed else 'passed'}: {outcome} ({time.perf_counter() - began:.0f} s)")
    return int(failed > 0)


def left_out(config: Config) -> list[Finding]:
    """What the config says that would hide the step's own errors behind a format's."""
    default, user = ParallelConfig(), config.parallel
    names = ("param_dtype", "reduce_dtype", "comm_dtype", "cpu_offload")
    return [
        Finding(f"parallel.{name}={getattr(user, name)} is left out: what is compared keeps the default")
        for name in names
        if getattr(user, name) != getattr(default, name)
    ]


def able(exam: Exam, precision: str) -> bool:
    """Whether plain torch can run the task in this format on this device; says so if it can't."""
    try:
        exam.bound(precision)
    except RuntimeError as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        print(f"note     {precision} left out: plain torch can't run this task in it on this device ({why})")
        return False
    return True


def affordable(world_sizes: list[int], device: torch.device) -> list[int]:
    """The world sizes that this machine has GPUs for; all of them on a CPU."""
    if device.type != "cuda":
        return world_sizes
    gpus = torch.cuda.device_count()
    for size in world_sizes:
        if size > gpus:
            print(f"note     {size} ranks left out: there are {gpus} GPUs; --run.device cpu runs them on the CPU")
    return [size for size in world_sizes if size <= gpus]


def rows_of(size: int, strategies: Sequence[str], precisions: Sequence[str]) -> list[Row]:
    """The combinations that there are on `size` ranks; hsdp's two replicas need an even number."""
    there = [name for name in strategies if (name == "single") == (size == 1) and (name != "hsdp" or size % 2 == 0)]
    return [(size, strategy, precision) for strategy in there for precision in precisions]


def line(row: Row, verdicts: list[Verdict]) -> str:
    """One row of the table: the worst of its verdicts, and what is wrong under it."""
    gradients = max(verdicts, key=lambda verdict: verdict.gradient_error)
    parameters = max(verdicts, key=lambda verdict: verdict.parameter_error / verdict.parameter_bound)
    causes = dict.fromkeys(verdict.cause for verdict in verdicts if verdict.cause)
    figures = (
        f"{gradients.gradient_error:>9.1e}  {gradients.gradient_bound:>7.0e}",
        f"{parameters.parameter_error:>10.1e}  {parameters.parameter_bound:>7.0e}",
    )
    text = "  ".join([f"{row[0]:>5}", f"{row[1]:<8}", f"{row[2]:<9}", *figures, "FAIL" if causes else "pass"])
    return "\n".join([text.replace("nan", "  -"), *(f"{'':7}{cause}" for cause in causes)])


def on_ranks(size: int, argv: Sequence[str], rows: list[Row], exam: Exam) -> Iterator[tuple[Row, list[Verdict]]]:
    """Examine the rows on `size` new processes; yields each as it is done, and what stops them in place of the rest."""
    spawn = multiprocessing.get_context("spawn")
    results: Queue[list[Verdict] | str] = spawn.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    measured = exam.shared({precision for _, _, precision in rows})
    shared = (list(argv), rows, exam.task.quiet, measured, results)
    ranks = [spawn.Process(target=_rank, args=(rank, size, port, *shared)) for rank in range(size if rows else 0)]
    for process in ranks:
        process.start()
    try:
        for number, row in enumerate(rows):
            told = _next(results, ranks)
            if isinstance(told, str):
                yield row, [Verdict(cause=told)]
                yield from ((left, [Verdict(cause="not run: a rank failed before")]) for left in rows[number + 1 :])
                break
            yield row, told
        else:
            for process in ranks:
                process.join()
    finally:
        for process in ranks:
            process.kill()


def _next(results: "Queue[list[Verdict] | str]", ranks: Sequence[BaseProcess]) -> list[Verdict] | str:
    """The next verdicts, or the last words of the first rank to fail."""
    while True:
        try:
            return results.get(timeout=0.5)
        except Empty:
            for rank, process in enumerate(ranks):
                if process.exitcode not in (None, 0):
                    return f"rank {rank} ended with exit status {process.exitcode} and without a word"


def _rank(rank: int, size: int, port: int, argv: list[str], rows: list[Row], quiet: frozenset[str],
          shared: dict[str, Any], results: "Queue[list[Verdict] | str]") -> None:  # fmt: skip
    """One process of a world: examine the rows with the others; rank 0 sends the verdicts."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in places.items()}}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    try:
        config = load_config(argv)
        with start(config.run) as world, warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="torch")  # a row passes or fails by its figures alone
            logging.getLogger("dist_amp").setLevel(logging.ERROR)  # the data were told of before the table
            exam = Exam(config, world.device, quiet=quiet, shared=shared)
            for _, strategy, precision in rows:
                verdicts = [verdict_of(world, exam, strategy, precision, name) for name in ("sgd", "adamw")]
                if world.is_main:
                    results.put(verdicts)
    except Exception as error:
        results.put(f"rank {rank}: {type(error).__name__}: {error}")
        raise


def verdict_of(world: World, exam: Exam, strategy: Any, precision: Any, optimizer: Any) -> Verdict:
    """Examine one cell, clipped, stepped and reduced as the user's config says."""
    train, optim, parallel = exam.config.train, exam.config.optim, exam.config.parallel
    cell = Cell(
        strategy, precision, optimizer, train.clip_by, optim.fused, accumulate_reduce=parallel.accumulate_reduce
    )
    try:
        return examine(world, exam, cell)
    except Failure as error:  # raised on every rank alike
        return Verdict(cause=str(error))


if __name__ == "__main__":
    sys.exit(main())
