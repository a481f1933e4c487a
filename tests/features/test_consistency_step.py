"""Core as test_step.py tests it, with consistency."""

import math

from ranks import on_ranks
from test_step import DTYPES
from tiny import (
    Tiny,
    log,
    make_run,
    take_steps,
)

from dist_amp.diagnostics.consistency import Consistency
from dist_amp.errors import NumericsError
from dist_amp.world import local


def one_rank_corrupts_its_gradient_after_the_reduction(world, strategy):
    """(whether the step was applied, the scale after it, the consistency check's message)."""
    words = ["--parallel.strategy", strategy, "--train.micro_batch_size", 2, *DTYPES["fp16"]]
    run = make_run(world, Tiny(), *words)
    checks = Consistency(run)
    global_grad_norm = run.parallel.global_grad_norm

    def corrupted():
        if world.rank == 1:
            local(run.parallel.parameters[0].grad)[0] = math.inf
        return global_grad_norm()

    run.parallel.global_grad_norm = corrupted
    report = take_steps(run, 1)[0]
    run.metrics.record(report)
    message = ""
    try:
        checks.on_log(log(run))
    except NumericsError as error:
        message = str(error)
    return report.applied.item(), run.scaler.get_scale(), message


def test_inf_on_one_rank_after_the_reduction_skips_under_fsdp_and_is_named_under_ddp():
    results = on_ranks(2, one_rank_corrupts_its_gradient_after_the_reduction, "fsdp")
    assert results == [(False, 32768.0, "")] * 2
    results = on_ranks(2, one_rank_corrupts_its_gradient_after_the_reduction, "ddp")
    assert [applied for applied, *_ in results] == [True, False], "DDP's norm is not summed"
    assert all("on rank 1" in message and "on rank 0" in message for *_, message in results)
