"""The share of training time that the consistency checks take, at the config's intervals; target: below 0.5 %.

torchrun --nproc_per_node=2 -m dist_amp.bench.tripwires --config configs/demo.toml --train.steps 400
"""

import sys
import time
from collections.abc import Sequence
from functools import partial

from dist_amp.bench.harness import on_a_run, timed
from dist_amp.diagnostics.consistency import Consistency
from dist_amp.run import Run
from dist_amp.step import train_step


def main(argv: Sequence[str] | None = None) -> int:
    """The command: takes the config's steps without evaluations or checkpoints, and writes nothing."""
    return on_a_run(measure, argv)


def measure(run: Run) -> None:
    """Print the seconds of this rank in the checks, and in all."""
    tripwires, spent, started = Consistency(run), 0.0, time.perf_counter()
    for micro_batches in run.data:
        report = train_step(run, micro_batches)
        run.metrics.record(report)
        spent += timed(run.world, partial(tripwires.after_step, report, micro_batches))
        if run.step % run.config.metrics.log_every == 0:
            row = run.metrics.log(run.step, run.schedule, run.scaler, run.data)
            spent += timed(run.world, partial(tripwires.on_log, row))
        if run.step == run.config.train.steps:
            break
    total = time.perf_counter() - started
    run.world.say(
        f"{run.config.train.steps} steps, {run.parallel.strategy} on {run.world.world_size} x "
        f"{run.world.device.type}: tripwires took {spent:.3f} s of {total:.1f} s, {100 * spent / total:.2f} %"
    )


if __name__ == "__main__":
    sys.exit(main())
