"""The share of the time that the tripwires take, at the intervals that the config says; target: below 0.5 %.

torchrun --nproc_per_node=2 -m dist_amp.bench.tripwires --config configs/demo.toml --train.steps 400
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from dist_amp.bench.harness import on_a_run
from dist_amp.diagnostics.consistency import Consistency
from dist_amp.run import Run
from dist_amp.step import train_step


def main(argv: Sequence[str] | None = None) -> int:
    """The command: takes the config's steps, without evaluation or checkpoints, and writes nothing."""
    return on_a_run(tell, argv)


def tell(run: Run) -> None:
    seconds, whole = measure(run)
    run.world.say(
        f"{run.config.train.steps} steps, {run.parallel.strategy} on {run.world.world_size} x "
        f"{run.world.device.type}: tripwires took {seconds:.3f} s of {whole:.1f} s, {100 * seconds / whole:.2f} %"
    )


def measure(run: Run) -> tuple[float, float]:
    """(seconds in the tripwires, seconds in all), of this rank."""
    wait, spent = run.world.wait_for_device, 0.0

    def timed(look: Callable[..., None], *at: Any) -> float:
        wait()  # what was queued before is not theirs
        began = time.perf_counter()
        look(*at)
        wait()
        return time.perf_counter() - began

    tripwires = Consistency(run)
    began = time.perf_counter()
    for micro_batches in run.data:
        report = train_step(run, micro_batches)
        run.metrics.record(report)
        run.step += 1
        spent += timed(tripwires.after_step, report, micro_batches)
        if run.step % run.config.metrics.log_every == 0:
            row = run.metrics.log(run.step, run.schedule, run.scaler, run.data)
            spent += timed(tripwires.on_log, row)
        if run.step == run.config.train.steps:
            break
    return spent, time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
