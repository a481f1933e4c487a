"""The share of training time that the consistency checks take, at the config's intervals.

torchrun --nproc_per_node=2 -m benchmarks.tripwires --config configs/demo.toml --train.steps 400

Target: below 0.5 %.
"""

import sys
import time
from functools import partial

from benchmarks.harness import on_a_run, timed
from dist_amp.diagnostics.consistency import Consistency
from dist_amp.run import Run
from dist_amp.step import train_step


@on_a_run
def main(run: Run) -> None:
    tripwires = Consistency(run)
    spent = 0.0
    started = time.perf_counter()
    for micro_batches in run.data:
        report = train_step(run, micro_batches)
        run.metrics.after_step(report)
        if run.step % run.config.metrics.log_every == 0:
            run.metrics.begin(run.step, run.schedule, run.scaler, run.data)
            row = run.metrics.read()
            spent += timed(run.world, partial(tripwires.on_log, row))
        if run.step == run.config.train.steps:
            break
    total = time.perf_counter() - started
    run.world.say(
        f"{run.config.train.steps} steps, {run.parallel.strategy} on {run.world.world_size} x "
        f"{run.world.device.type}: tripwires took {spent:.3f} s of {total:.1f} s, "
        f"{spent / total:.2%}"
    )


if __name__ == "__main__":
    sys.exit(main())
