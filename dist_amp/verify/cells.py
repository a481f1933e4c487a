"""Takes the steps that `verify` compares, with a run built as the main job builds it.

A row of the table is a combination of ranks, strategy and precision, and runs in new processes on
this machine; a cell is a row with one optimizer. All ranks take the cell's steps. Rank 0 captures
the parameters and gradients, and compares them with the reference.

This is not in __main__.py, because spawned processes can't import functions from there.
"""

import logging
import os
import pickle
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, spawn

from dist_amp.config.load import load_config
from dist_amp.diagnostics import consistency
from dist_amp.errors import ConfigError, DataError, in_one_line
from dist_amp.run import Run, build_run
from dist_amp.settings import (
    CheckpointConfig,
    Config,
    DebugConfig,
    EvalConfig,
    ParallelConfig,
    ScalerConfig,
    TrainConfig,
)
from dist_amp.step import train_step
from dist_amp.verify.compare import Cell, Comparison, Verdict, compare
from dist_amp.verify.reference import STEPS, Reference, State, counted, gradient_of
from dist_amp.world import World, local, start

Row = tuple[int, str, str]  # (ranks, strategy, precision)
Step = Callable[[Run, list[Any]], Any]


def check_cell(world: World, reference: Reference, cell: Cell, step: Step = train_step) -> Verdict:
    """Take the cell's steps on every rank; rank 0 compares them. step: replaces train_step."""
    reference.task.length = reference.epoch_length  # so that an epoch ends within the steps
    run = build_run(config_of(reference, cell, world), world, reference.task)
    consistency.check_inputs_equal(run)
    consistency.check_state_equal(run)
    micro_batches, _ = micro_batches_at(run, max(cell.accumulation), 0)
    about = f"a step that is not finite on rank {world.world_size - 1} must be skipped, but"
    fault = fault_of_skip(run, reference, micro_batches, step)
    if cause := fault_of_ranks(world, about, fault):
        return Verdict(cause=cause)
    captured = capture(run)
    buffers = []
    reductions = []
    position = 0
    for accumulation in cell.accumulation:
        micro_batches, position = micro_batches_at(run, accumulation, position)
        # Gradients also depend on buffers, and on frozen parameters if forward changes a state.
        untrained = consistency.compared_buffers(run, with_batch_statistics=True)
        if reference.by_micro_batch:
            parameters = run.parallel.module.named_parameters()
            untrained |= {name: p for name, p in parameters if not p.requires_grad}
        buffers.append({name: full(tensor) for name, tensor in untrained.items()})
        with counted(is_reduction) as flags:
            step(run, micro_batches)
        reductions.append(sum(flags))
    fault = fault_of_counts(run, applied=STEPS, skips_in_a_row=0)
    count_fault = fault_of_ranks(world, "after a skipped and five applied steps,", fault)
    mismatch = consistency.find_mismatch(run)
    reduction_fault = ""
    couples = getattr(reference.task, "couples_samples", False)  # then the loss may reduce, too
    if run.config.parallel.accumulate_reduce == "last" and len(set(reductions)) > 1 and not couples:
        reduction_fault = (
            f"steps of {cell.accumulation} micro-batches reduce over ranks {reductions} times, not "
            "equally often; only the last may reduce gradients: earlier ones need no_sync around "
            "their forward and backward"
        )
    end = {name: full(p) for name, p in trained(run).items()}
    verdict = Verdict()
    try:
        if world.is_main:
            comparison = Comparison(reference, cell, world.world_size, captured, buffers, end)
            verdict = compare(comparison)
    finally:
        world.wait_long()  # for rank 0, which computes the reference alone
    # Wrong gradients can lead to skipped steps, so they come before a wrong count.
    return replace(verdict, cause=verdict.cause or count_fault or mismatch or reduction_fault)


def config_of(reference: Reference, cell: Cell, world: World) -> Config:
    """The user's config with the cell's settings; in fp16, the loss scale grows every two steps."""
    user = reference.config
    scaled = reference.hyperparameters
    use_amp = cell.precision != "fp32"
    dtype: Any = cell.precision if use_amp else "auto"
    has_policy = use_amp and cell.strategy in ("fsdp", "hsdp")
    scaler = ScalerConfig()
    if cell.precision == "fp16":
        scaler = ScalerConfig(init_scale=reference.init_scale, growth_interval=2)
    return replace(
        user,
        run=replace(user.run, dir="unused", resume="never"),
        data=replace(user.data, workers=0, shuffle=True, drop_last=False),
        precision=replace(
            user.precision,
            use_amp=use_amp,
            dtype=dtype,
            cast_by=user.precision.cast_by if has_policy else "auto",
            tf32=False,
            scaler=scaler,
        ),
        parallel=ParallelConfig(
            cell.strategy,
            user.parallel.replicas,
            accumulate_reduce="every" if user.parallel.accumulate_reduce == "every" else "last",
            activation_checkpointing=user.parallel.activation_checkpointing,
        ),
        train=TrainConfig(
            steps=STEPS,
            micro_batch_size=reference.global_batch // world.world_size,
            clip_by=user.train.clip_by,
            max_grad_norm=scaled.max_grad_norm,
            max_grad_value=scaled.max_grad_value,
        ),
        optim=reference.optim_config(cell.optimizer),
        eval=EvalConfig(every="off"),
        checkpoint=CheckpointConfig(every="off"),
        debug=DebugConfig(),  # anomaly detection would raise in the step that must be skipped
    )


def capture(run: Run) -> list[State]:
    """Returns a list to which each step adds the optimizer's input, as full tensors, on rank 0."""
    captured: list[State] = []
    unscale_and_clip = run.scaler.unscale_and_clip

    def record(optimizer: Any, norm: Tensor, clip: Any) -> Tensor:
        gradients = {}
        parameters = {}
        for name, p in trained(run).items():
            gradients[name] = full(gradient_of(p)).float() / run.scaler.scale_tensor
            parameters[name] = full(p)
        if run.world.is_main:
            captured.append(State(parameters, gradients))
        return unscale_and_clip(optimizer, norm, clip)

    run.scaler.unscale_and_clip = record  # type: ignore[method-assign, assignment]
    return captured


def trained(run: Run) -> dict[str, Tensor]:
    return {name: p for name, p in run.parallel.module.named_parameters() if p.requires_grad}


def full(tensor: Tensor) -> Tensor:
    """A copy of the full tensor; a collective if the tensor is sharded."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def micro_batches_at(run: Run, accumulation: int, position: int) -> tuple[list[Any], int]:
    """This rank's micro-batches of the step at `position`, and the position after it."""
    size = run.data.plan.global_batch_size // (run.world.world_size * accumulation)
    plan = replace(run.data.plan, micro_batch_size=size)
    position, shards = next(plan.steps(position))
    return [batch for batch, _ in run.data.fetched(shards)], position


def is_reduction(function: Any, out: Any) -> bool:
    name = str(function)
    return "c10d" in name and ("reduce_scatter" in name or "allreduce" in name)


def fault_of_skip(run: Run, reference: Reference, micro_batches: list[Any], step: Step) -> str:
    """Take a step whose loss is infinite on the last rank only. Returns what it changed, or ""."""

    def state() -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {"the learning rate": run.schedule.lr}
        for name, parameter in trained(run).items():
            tensors[name] = parameter
            for kind, moment in run.optimizer.state.get(parameter, {}).items():
                tensors[f"{kind} of {name}"] = moment
        return {name: local(tensor).detach().clone() for name, tensor in tensors.items()}

    before = state()
    reference.task.infinite_loss = run.world.rank == run.world.world_size - 1
    report = step(run, micro_batches)
    reference.task.infinite_loss = False
    if report.applied:
        return "it was applied; one norm over all ranks must decide for all"
    after = state()
    for name, tensor in before.items():
        if not torch.equal(tensor, after[name]):
            return f"it changed {name}; a skipped step must change nothing"
    return fault_of_counts(run, applied=0, skips_in_a_row=1)


def fault_of_counts(run: Run, applied: int, skips_in_a_row: int) -> str:
    """What is wrong in this rank's counters or loss scale after one skipped and `applied` steps."""
    counters = run.schedule.counters.tolist()
    if counters != [applied, 1, skips_in_a_row]:
        count = f"it counted as {counters[0]} applied, {counters[1]} skipped"
        return f"{count}; the schedule must follow applied steps only"
    scaler = run.config.precision.scaler
    growths = applied // scaler.growth_interval
    scale = scaler.init_scale * scaler.backoff_factor * scaler.growth_factor**growths
    if run.scaler.scales and run.scaler.get_scale() != scale:
        left = f"it left the loss scale at {run.scaler.get_scale():g}, not {scale:g}"
        return f"{left}; update() must run once per step"
    return ""


def fault_of_ranks(world: World, about: str, fault: str) -> str:
    """The fault of the first rank that has one, or ""; every rank calls it."""
    for rank, text in enumerate(world.gather(fault)):
        if text:
            return f"{about} on rank {rank} {text}"
    return ""


# ---- the processes of the ranks ----


def compare_row(
    measured: Mapping[str, Any], world: World, config: Config, row: Any
) -> list[Verdict]:
    """The verdicts of a row's cells, one for each optimizer. Every rank calls it."""
    reference = Reference(config, world.device, None, measured)
    _, strategy, precision = row
    cells = [Cell(strategy, precision, "sgd"), Cell(strategy, precision, "adamw")]
    return [check_cell(world, reference, cell) for cell in cells]


def print_table(
    argv: Sequence[str],
    rows: Sequence[Row],
    run_row: Callable[[World, Config, Row], Any],
    judge: Callable[[Row, Any], tuple[str, str, str]],
    heading: str,
    claim: str,
) -> int:
    """Print a line per row, then each cause. Returns 1 if a row fails or none passes, otherwise 0.

    judge(row, run_row's result on rank 0) returns ("pass", "FAIL" or "first", cause, figures).
    """
    say(f"ranks  strategy  precision  {heading}     took")
    rows_by_cause: dict[str, list[str]] = {}
    words: Counter[str] = Counter()
    table_start = row_start = time.perf_counter()
    for row, result in results_on_ranks(argv, rows, run_row):
        if isinstance(result, str):
            word, _, cause = result.partition(": ")
            figures = "-"
        else:
            word, cause, figures = judge(row, result)
        words[word] += 1
        now = time.perf_counter()
        size, strategy, precision = row
        place = f"{size:>5}  {strategy:<8}  {precision:<9}"
        say(f"{place}  {figures:>{len(heading)}}  {now - row_start:>5.1f} s  {word}")
        row_start = now
        if cause:
            rows_by_cause.setdefault(cause, []).append(f"{size} {strategy} {precision}")
    for cause, names in rows_by_cause.items():
        say(f"\n{', '.join(names)}:\n    {cause}")
    failed = words["FAIL"] > 0 or not words["pass"]
    refused = f", {words['refused']} refused, as in training" if words["refused"] else ""
    result = "failed" if failed else "passed"
    took = time.perf_counter() - table_start
    say(f"\n{result}: {words['pass']} of {len(rows)} {claim}{refused} ({took:.0f} s)")
    return int(failed)


def say(text: str) -> None:
    print(text, flush=True)


def results_on_ranks(
    argv: Sequence[str], rows: Sequence[Row], run_row: Callable[[World, Config, Row], Any]
) -> Iterator[tuple[Row, Any]]:
    """Run each row with a new process per rank. Yields (row, run_row's result on rank 0), or after
    an error (row, text): "refused: ..." for settings that training also rejects, or "FAIL: ...".
    """
    # spawn would log a line for each process that it ends.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    for row in rows:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with TemporaryDirectory() as folder:
            path = Path(folder, "result")
            result = ""
            try:
                spawn(run_rank, (port, list(argv), row, run_row, path), nprocs=row[0])
            except ProcessException as error:
                result = f"FAIL: {error}"  # such as "process 1 terminated with signal SIGKILL"
            if path.exists():
                result = pickle.loads(path.read_bytes())
        yield row, result


def run_rank(
    rank: int,
    port: int,
    argv: list[str],
    row: Row,
    run_row: Callable[[World, Config, Row], Any],
    path: Path,
) -> None:
    """One rank's process. Writes run_row's result on rank 0, or the first error of any rank.

    It prints nothing, because the command has printed notes and warnings once for all rows.
    """
    size = row[0]
    os.environ |= {"WORLD_SIZE": f"{size}", "LOCAL_WORLD_SIZE": f"{size}"}
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    with ExitStack() as contexts:
        nothing = contexts.enter_context(open(os.devnull, "w"))
        contexts.enter_context(redirect_stdout(nothing))
        contexts.enter_context(redirect_stderr(nothing))
        try:
            config = load_config(argv)
            world = contexts.enter_context(start(config.run))
            result = run_row(world, config, row)
            if world.is_main:
                write_first(path, result)
        except Exception as error:
            text = f"FAIL: rank {rank}: {in_one_line(error)}"
            if isinstance(error, ConfigError | DataError):
                text = f"refused: {error}"
            write_first(path, text)  # before other ranks fail, because this rank leaves the group
            sys.exit(1)


def write_first(path: Path, result: Any) -> None:
    with suppress(FileExistsError), open(path, "xb") as file:
        pickle.dump(result, file)
