"""What test_nonfinite_replay.py tests, with other features."""

from tiny import Tiny, log, make_run

from benchmarks.harness import HostReads
from dist_amp.diagnostics.nonfinite_replay import NonfiniteReplay
from dist_amp.step import train_step
from dist_amp.world import World


def test_a_log_step_without_skips_still_costs_one_read():
    run = make_run(World(), Tiny())
    observer = NonfiniteReplay(run)
    batches = next(run.data)
    with HostReads() as ordinary:
        report = train_step(run, batches)
        run.metrics.record(report)
        observer.after_step(report, batches)
    with HostReads() as logging:
        observer.on_log(log(run))
    assert (ordinary.count, logging.count) == (0, 1)
