"""How long a checkpoint holds training up: in the background against waiting for it; target: a ratio of 0.2.

torchrun --nproc_per_node=2 -m dist_amp.bench.checkpoint --task.args.width 1024 --task.args.layers 8
"""

import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from dist_amp.bench.harness import on_a_run
from dist_amp.checkpoint.format import all_checkpoints, read_manifest
from dist_amp.checkpoint.saver import Saver
from dist_amp.errors import Failure
from dist_amp.run import Run
from dist_amp.step import train_step

ROUNDS = 5  # of one save of each kind, after one of each that is not counted


def main(argv: Sequence[str] | None = None) -> int:
    """The command: saves the config's run again and again, and removes what it has written."""
    return on_a_run(tell, argv)


def tell(run: Run) -> None:
    if all_checkpoints(run.folder):
        raise Failure(f"run.dir={run.folder} holds checkpoints, and this clears it; give another folder")
    stalls, waits, size = measure(run)
    stall, wait = statistics.median(stalls), statistics.median(waits)
    run.world.say(
        f"{size / 2**30:.2f} GiB, {run.parallel.strategy} on {run.world.world_size} x {run.world.device.type}: it "
        f"holds training up {stall:.3f} s ({min(stalls):.3f} to {max(stalls):.3f}) for one in the background, "
        f"{wait:.3f} s ({min(waits):.3f} to {max(waits):.3f}) for another: ratio {stall / wait:.2f}"
    )


def measure(run: Run) -> tuple[list[float], list[float], int]:
    """(seconds that training waits for each save in the background, and for each that it waits for, bytes of one)."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    size = 0
    for number in range(2 * (ROUNDS + 1)):
        in_background = number % 2 == 0
        run.config = replace(run.config, checkpoint=replace(run.config.checkpoint, async_save=in_background))
        train_step(run, next(run.data))
        run.step += 1
        run.world.wait_for_device()
        run.world.barrier()
        with Saver(run) as saver:
            began = time.perf_counter()
            saver.save(wait=False)
            took = time.perf_counter() - began
        if number >= 2:
            seconds[in_background].append(took)
        if not (written := all_checkpoints(run.folder)):
            raise Failure(f"no checkpoint could be written to run.dir={run.folder}; free some space")
        newest = written[-1]
        size = sum(entry["bytes"] for entry in read_manifest(newest).files.values())
        run.world.barrier()
        if run.world.is_main:
            shutil.rmtree(run.folder / "checkpoints")
        run.world.barrier()
    return seconds[True], seconds[False], size


if __name__ == "__main__":
    sys.exit(main())
