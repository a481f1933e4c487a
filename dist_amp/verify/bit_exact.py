"""python -m dist_amp.verify --bit_exact: the same bits of each way of running, on your own task.

Of the first steps of an epoch and its last ones, losses, module outputs, gradients and parameters
are compared by hash with those of the first combination in the same precision.
"""

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from dist_amp.bit_exact import check_ranks
from dist_amp.config.load import load_config
from dist_amp.data import Padding
from dist_amp.diagnostics import trace
from dist_amp.diagnostics.trace import class_name, clean_name
from dist_amp.errors import ConfigError
from dist_amp.loading.nested import tensors
from dist_amp.run import Run, build_run
from dist_amp.settings import Config
from dist_amp.step import train_step
from dist_amp.verify.cells import Row, full, rows_on_ranks
from dist_amp.world import World

# Of a step: {"output 3": a module's of micro-batch 3, ...}, in the order of the computation.
Hashes = dict[str, str]

HINT = """
dist_amp seeds the global generators of random, numpy and torch before each micro-batch. What draws
from a generator of its own (torch.Generator, numpy.random.default_rng()), from the system or in a
thread, or depends on earlier calls, differs."""


def verify_bits(argv: Sequence[str], rows: list[Row]) -> int:
    """Print each row's hash and what differs first; return 1 if any row differs, or none of a
    precision can be compared. Errors: ConfigError before anything starts.
    """
    began = time.perf_counter()
    check_command(argv, rows)
    expected: dict[str, list[Hashes]] = {}  # by precision
    results: Counter[str] = Counter()
    uncompared = {precision for _, _, precision in rows}
    print("ranks  strategy  precision  bits              result", flush=True)
    largest = max(size for size, _, _ in rows)
    for (size, strategy, precision), result in rows_on_ranks(argv, rows, partial(prepare, largest)):
        bits = "-"
        text = str(result)
        if isinstance(result, list):
            text = json.dumps(result)
            bits = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
            if precision in expected:
                uncompared.discard(precision)
            text = first_difference(expected.setdefault(precision, result), result)
        elif not text.startswith("refused: "):
            text = f"FAIL: {text}"
        results[text.partition(":")[0]] += 1
        print(f"{size:>5}  {strategy:<8}  {precision:<9}  {bits:<16}  {text}", flush=True)
    if results["FAIL"]:
        print(HINT)
    result = "passed"
    if results["FAIL"] or uncompared:
        result = "failed"
    counts = f"{results['same']} of {len(rows)} have the same bits in their precision"
    if results["refused"]:
        counts += f", {results['refused']} refused, as in training"
    if uncompared:
        counts += f"; nothing was compared in {', '.join(sorted(uncompared))}"
    print(f"\n{result}: {counts} ({time.perf_counter() - began:.0f} s)")
    return int(result == "failed")


def check_command(argv: Sequence[str], rows: list[Row]) -> None:
    """Errors: ConfigError for rows or settings with which nothing can be compared."""
    for size, _, _ in rows:
        check_ranks(size, "--world_sizes with --bit_exact")
    if len({(size, strategy) for size, strategy, _ in rows}) < 2:
        raise ConfigError(
            "--bit_exact has nothing to compare: it needs two ways of running; use --world_sizes "
            "1,2 with all --strategies"
        )
    # A file, such as a run's config.toml, may say false.
    if not load_config(["--parallel.bit_exact", "true", *argv]).parallel.bit_exact:
        raise ConfigError(
            "--bit_exact compares runs with parallel.bit_exact=true; remove --parallel.bit_exact "
            "false"
        )


def prepare(
    largest: int,
    world: World,
    config: Config,
) -> Callable[[Row], list[Hashes]]:
    """On each rank: what takes a row's steps. largest: the highest number of ranks."""
    batch = config.train.global_batch_size
    if batch == "auto":
        batch = 2 * largest * config.train.micro_batch_size
    config = replace(
        config,
        run=replace(config.run, dir="unused", resume="never"),
        train=replace(config.train, steps=4, global_batch_size=batch, accumulation_steps="auto"),
        eval=replace(config.eval, every="off"),
        checkpoint=replace(config.checkpoint, every="off"),
    )
    return partial(hashes_of_row, world, config)


def hashes_of_row(
    world: World,
    config: Config,
    row: Row,
) -> list[Hashes]:
    """Each step's hashes, on every rank."""
    strategy: Any = row[1]
    precision = row[2]
    kind: dict[str, Any] = {"use_amp": precision != "fp32"}
    if precision != "fp32":
        kind["dtype"] = precision
    parallel: Any = replace(config.parallel, strategy=strategy, bit_exact=True)
    config = replace(config, parallel=parallel, precision=replace(config.precision, **kind))
    run = build_run(config, world)
    size = run.data.plan.global_batch_size
    last = math.ceil(run.data.plan.length / size)
    steps = {0, 1, max(0, last - 2), last - 1}  # an epoch's last one may be partial
    hashes = [hashes_of_step(run, step * size) for step in sorted(steps)]
    run.close()
    return hashes


def hashes_of_step(run: Run, position: int) -> Hashes:
    """Take the step that begins at this sample; return its hashes, the same on every rank."""
    micro_batches = [batch for batch, _ in run.data.at(position)]
    outputs: list[Hashes] = []  # of each of this rank's micro-batches
    gradients: Hashes = {}
    gradient_sync = run.parallel.gradient_sync
    named = dict(run.parallel.module.named_parameters())

    def in_order(is_last: bool) -> AbstractContextManager[Any]:
        outputs.append({})
        return gradient_sync(is_last)

    def at_update(*_: Any) -> None:
        """From the last parameter to the first: the order of the backward."""
        for name, parameter in reversed(named.items()):
            if parameter.grad is not None:
                gradients[f"the gradient of {clean_name(name)}"] = hash_tensor(parameter.grad)

    with ExitStack() as hooks:
        hooks.enter_context(run.optimizer.register_step_pre_hook(at_update))
        for name, module in run.parallel.module.named_modules():
            what = f"{clean_name(name) or 'the model'} ({class_name(module)})"
            at_output = partial(hash_output, outputs, what)
            hooks.enter_context(module.register_forward_hook(at_output))
        hooks.enter_context(patch.object(run.parallel, "gradient_sync", in_order))
        report = train_step(run, micro_batches)
    for number, batch in enumerate(micro_batches):
        outputs[number]["the loss"] = hash_tensor(report.losses[number])
        if isinstance(batch, Padding):
            outputs[number] = {}
    ranks = run.world.gather(outputs)
    step: Hashes = {}
    for number, of_ranks in enumerate(zip(*ranks, strict=True)):
        for rank, hashes in enumerate(of_ranks):
            where = f"of micro-batch {number * run.world.world_size + rank}"
            step |= {f"{what} {where}": one for what, one in hashes.items()}
    step |= gradients
    step["the gradient norm"] = hash_tensor(report.norm)
    for name, parameter in named.items():
        step[f"the updated parameter {clean_name(name)}"] = hash_tensor(parameter)
    return step


def hash_output(
    hashes: list[Hashes],
    what: str,
    module: nn.Module,
    _: Any,
    output: Any,
) -> None:
    of_call = hashes[-1]
    call = f"the output of {what}"
    if call in of_call:
        call = f"{call}, call {len(of_call)},"
    of_call[call] = " ".join(map(hash_tensor, tensors(output)))


def hash_tensor(tensor: Tensor) -> str:
    """Of the whole tensor; a collective if it is sharded."""
    return str(trace.hash_tensor(full(tensor)).item())


def first_difference(expected: Sequence[Hashes], hashes: Sequence[Hashes]) -> str:
    """What differs first, in words, or "same". Micro-batches of padding are left out."""
    for step, (theirs, ours) in enumerate(zip(expected, hashes, strict=True), start=1):
        for what, one in theirs.items():
            if ours.get(what) != one:
                return f"FAIL: {what} differs first, in step {step}"
    return "same"
