"""Core as test_step.py tests it, with several features."""

import pytest
from ranks import on_ranks
from test_step import DTYPES
from tiny import (
    Tiny,
    log_row,
    make_run,
    take_steps,
)

from benchmarks.harness import HostReads
from dist_amp.step import train_step
from dist_amp.world import World


def host_reads(world, words):
    """(reads in an ordinary step, reads in logging)."""
    words = ["--train.accumulation_steps", 2, "--train.micro_batch_size", 2, *words]
    run = make_run(world, Tiny(uneven=True), *words)
    take_steps(run, 2)  # the first step makes buckets and states
    batches = next(run.data)
    with HostReads() as ordinary:
        run.metrics.record(train_step(run, batches))
    with HostReads() as logging:
        log_row(run)
    return ordinary.count, logging.count


@pytest.mark.parametrize(
    ("ranks", "strategy", "dtype", "optimizer"),
    [
        (1, "single", "fp32", "sgd"),
        (2, "ddp", "fp16", "adamw"),
        (2, "fsdp", "bf16", "adamw"),
        (4, "hsdp", "fp16", "sgd"),
    ],
)
def test_a_step_reads_nothing_back_and_a_log_step_reads_once(ranks, strategy, dtype, optimizer):
    words = ["--parallel.strategy", strategy, "--optim.name", optimizer, *DTYPES[dtype]]
    assert on_ranks(ranks, host_reads, words) == [(0, 1)] * ranks


# sgd: torch's AdamW looks at its step counts besides, which on a GPU it does without waiting.
TEXTBOOK = ["--optim.fused", "false", "--optim.name", "sgd"]


@pytest.mark.parametrize(
    ("words", "reads"),
    [(["--train.clip_by", "value"], 0), (["--train.clip_by", "off"], 0), (TEXTBOOK, 2)],
)
def test_clipping_costs_no_read_and_the_textbook_path_the_decision_and_the_rate(words, reads):
    assert host_reads(World(), [*DTYPES["fp16"], *words]) == (reads, 1)
