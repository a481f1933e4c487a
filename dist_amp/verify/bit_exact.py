"""python -m dist_amp.verify --bit_exact: check that all combinations compute the same bits.

In the first two and the last two steps of an epoch, losses, module outputs, gradients and
parameters are compared, by hash, with those of the first combination of the same precision.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dist_amp.data import Padding
from dist_amp.diagnostics.trace import Event, clean_name, first_difference, hash_of, recorded_step
from dist_amp.run import Run, build_run
from dist_amp.settings import Config
from dist_amp.verify.cells import Row, full, print_table
from dist_amp.world import World


def verify_bits(argv: Sequence[str], rows: list[Row]) -> int:
    """Print each row's hash, and its first difference from the first row of its precision."""
    expected: dict[str, list[list[Event]]] = {}  # {precision: events of each step}

    def judge(row: Row, traces: list[list[Event]]) -> tuple[str, str, str]:
        values = [event.values for step in traces for event in step]
        bits = f"{hash_of([torch.tensor([value - 2**63 for value in values])]):016x}"
        if row[2] not in expected:
            expected[row[2]] = traces
            return "first", "", bits
        if fault := first_fault(expected[row[2]], traces):
            return "FAIL", fault, bits
        return "pass", "", bits

    claim = "have the bits of the first in their precision"
    return print_table(argv, rows, trace_of_row, judge, f"{'bits':<16}", claim)


def trace_of_row(world: World, config: Config, row: Row) -> list[list[Event]]:
    """The events of each compared step, the same on every rank."""
    batch = config.train.global_batch_size
    if batch == "auto":  # two micro-batches on each of 8 ranks
        batch = 16 * config.train.micro_batch_size
    strategy: Any = row[1]
    precision: dict[str, Any] = {"use_amp": row[2] != "fp32"}
    if row[2] != "fp32":
        precision["dtype"] = row[2]
    config = replace(
        config,
        run=replace(config.run, dir="unused", resume="never"),
        train=replace(config.train, steps=4, global_batch_size=batch, accumulation_steps="auto"),
        eval=replace(config.eval, every="off"),
        checkpoint=replace(config.checkpoint, every="off"),
        parallel=replace(config.parallel, strategy=strategy, bit_exact=True),
        precision=replace(config.precision, **precision),
    )
    run = build_run(config, world)
    size = run.data.plan.global_batch_size
    last = math.ceil(run.data.plan.length / size)
    steps = {0, 1, max(0, last - 2), last - 1}  # an epoch's last one may be partial
    traces = [trace_of_step(run, step * size) for step in sorted(steps)]
    run.close()
    return traces


def trace_of_step(run: Run, position: int) -> list[Event]:
    """All ranks' events of the step that starts at this sample; the same on every rank."""
    micro_batches = [batch for batch, _ in run.data.at(position)]
    report, events = recorded_step(run, micro_batches, hash_whole, ("forward", "update"))
    own = []
    for event in events:
        event.callers = ()  # not needed by other ranks
        padding = isinstance(micro_batches[event.micro_batch], Padding)
        if event.kind != "update" and not padding:
            event.micro_batch = event.micro_batch * run.world.world_size + run.world.rank
            own.append(event)
    forwards = [event for events in run.world.gather(own) for event in events]
    step = sorted(forwards, key=lambda event: event.micro_batch)
    step += [event for event in events if event.kind == "update"]
    step.append(Event("update", "", hash_whole([report.norm])))
    for name, parameter in run.parallel.module.named_parameters():
        step.append(Event("parameter", "", hash_whole([parameter]), clean_name(name)))
    return step


def hash_whole(values: Sequence[Tensor]) -> int:
    """The hash of full tensors; a collective if a tensor is sharded."""
    return hash_of([full(value) for value in values])


def first_fault(expected: Sequence[Sequence[Event]], traces: Sequence[Sequence[Event]]) -> str:
    """The first difference in words, or ""."""
    for step, (a, b) in enumerate(zip(expected, traces, strict=True), start=1):
        if pair := first_difference(a, b):
            event = pair[0]
            what = {
                "forward": f"the output of {event.module or 'the model'} ({event.module_class})",
                "loss": "the loss",
                "update": f"the gradient {'of ' if event.name else 'norm'}{event.name}",
                "parameter": f"the updated parameter {event.name}",
            }[event.kind]
            if event.kind in ("forward", "loss"):
                what += f" of micro-batch {event.micro_batch}"
            return f"{what} differs first, in step {step}"
    return ""
