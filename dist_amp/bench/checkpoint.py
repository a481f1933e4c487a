r"""How long a checkpoint blocks training, saved in the background or in the foreground; target: a ratio of 0.08.

torchrun --nproc_per_node=2 -m dist_amp.bench.checkpoint --task.args.width 1024 --task.args.layers 8 \
    --task.args.context 16 --train.micro_batch_size 1

It also says what a step takes alone, and while a save is written. The state should be large (here 1.13 GiB), because
both kinds of save begin with the same few collectives. Add --parallel.strategy fsdp for shards.
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
from dist_amp.runtime.clock import wait_for_device
from dist_amp.step import train_step

ROUNDS = 5  # of one save of each kind, after one of each that is not counted: it makes the memory and the plan


def main(argv: Sequence[str] | None = None) -> int:
    """The command: saves the config's run several times, and removes what it wrote."""
    return on_a_run(measure, argv)


def measure(run: Run) -> None:
    """Print how long training waits for a save of each kind, and what a step takes meanwhile."""
    world, size = run.world, 0
    steps: dict[bool, list[float]] = {False: [], True: []}  # by whether a save is being written
    seconds: dict[bool, list[float]] = {True: [], False: []}  # by whether it is saved in the background
    if all_checkpoints(run.folder):
        raise Failure(f"run.dir={run.folder} has checkpoints, which this bench would delete; give another folder")
    saver = Saver(run)  # as in training, one for all saves
    for in_background in [True, False] * (ROUNDS + 1):
        run.config = replace(run.config, checkpoint=replace(run.config.checkpoint, async_save=in_background))
        steps[False].append(_step_seconds(run))
        world.barrier()
        started = time.perf_counter()
        saver.save(wait=False)
        seconds[in_background].append(time.perf_counter() - started)
        if (write := run.metrics.save) is not None:
            steps[True].append(_step_seconds(run))
            write.result()  # however slow the disk is: leaving the saver's context would wait for a while only
        if not (written := all_checkpoints(run.folder)):
            raise Failure(f"no checkpoint could be written to run.dir={run.folder}; free some space")
        size = sum(entry["bytes"] for entry in read_manifest(written[-1]).files.values())
        world.barrier()
        if world.is_main:
            shutil.rmtree(run.folder / "checkpoints")
        world.barrier()
    (_, *stalls), (_, *waits) = seconds.values()
    ways = {"background": stalls, "foreground": waits}
    parts = [f"{median(own):.3f} s ({min(own):.3f} to {max(own):.3f}) in the {way}" for way, own in ways.items()]
    world.say(
        f"{size / 2**30:.2f} GiB, {run.parallel.strategy} on {world.world_size} x {world.device.type}: training waits "
        f"for a save {' and '.join(parts)}: ratio {median(stalls) / median(waits):.3f}; a step takes "
        f"{median(steps[False]):.3f} s, and {median(steps[True][1:]):.3f} s while a save is written"
    )


def _step_seconds(run: Run) -> float:
    started = time.perf_counter()
    train_step(run, next(run.data))
    wait_for_device(run.world.device)
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
