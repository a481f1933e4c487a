"""How long a checkpoint blocks training, saved in the background or in the foreground; target: a ratio of 0.2.

torchrun --nproc_per_node=2 -m dist_amp.bench.checkpoint --task.args.width 1024 --task.args.layers 8
"""

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from dist_amp.bench.harness import on_a_run
from dist_amp.checkpoint.format import all_checkpoints, read_manifest
from dist_amp.checkpoint.saver import Saver
from dist_amp.errors import Failure
from dist_amp.run import Run
from dist_amp.step import train_step

ROUNDS = 5  # of one save of each kind, after one of each that is not counted


def main(argv: Sequence[str] | None = None) -> int:
    """The command: saves the config's run several times, and removes what it wrote."""
    return on_a_run(measure, argv)


def measure(run: Run) -> None:
    """Print how long training waits for a save of each kind."""
    if all_checkpoints(run.folder):
        raise Failure(f"run.dir={run.folder} has checkpoints, which this bench would delete; give another folder")
    seconds: dict[bool, list[float]] = {True: [], False: []}  # by whether it is saved in the background
    size = 0
    for number in range(2 * (ROUNDS + 1)):
        in_background = number % 2 == 0
        run.config = replace(run.config, checkpoint=replace(run.config.checkpoint, async_save=in_background))
        train_step(run, next(run.data))
        run.step += 1
        run.world.wait_for_device()
        run.world.barrier()
        with Saver(run) as saver:
            started = time.perf_counter()
            saver.save(wait=False)
            seconds[in_background].append(time.perf_counter() - started)
        if not (written := all_checkpoints(run.folder)):
            raise Failure(f"no checkpoint could be written to run.dir={run.folder}; free some space")
        size = sum(entry["bytes"] for entry in read_manifest(written[-1]).files.values())
        run.world.barrier()
        if run.world.is_main:
            shutil.rmtree(run.folder / "checkpoints")
        run.world.barrier()
    (_, *stalls), (_, *waits) = seconds[True], seconds[False]
    run.world.say(
        f"{size / 2**30:.2f} GiB, {run.parallel.strategy} on {run.world.world_size} x {run.world.device.type}: "
        f"training waits {median(stalls):.3f} s ({min(stalls):.3f} to {max(stalls):.3f}) for a save in the background, "
        f"{median(waits):.3f} s ({min(waits):.3f} to {max(waits):.3f}) in the foreground: ratio "
        f"{median(stalls) / median(waits):.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
