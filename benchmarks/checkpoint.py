r"""How long a save blocks training, if it is written in the background and in the foreground.

torchrun --nproc_per_node=2 -m benchmarks.checkpoint --task.args.width 1024 --task.args.layers 8 \
    --task.args.context 16 --train.micro_batch_size 1

Target: a ratio of background to foreground of 0.08. Also prints how long a step takes, alone and
while a save is being written. The state should be large (here 1.13 GiB), because both kinds of save
begin with the same few collectives. Add --parallel.strategy fsdp for shards.
"""

import shutil
import sys
import time
from dataclasses import replace
from statistics import median

from benchmarks.harness import on_a_run, step_seconds
from dist_amp.checkpoint.format import all_checkpoints, read_manifest
from dist_amp.errors import Failure
from dist_amp.run import Run

ROUNDS = 5  # saves of each kind, after a first one that allocates memory and is not counted


@on_a_run
def main(run: Run) -> None:
    world = run.world
    if all_checkpoints(run.folder):
        raise Failure(
            f"run.dir={run.folder} has checkpoints, which would be deleted; give another folder"
        )
    saver = run.saver  # one for all saves, as in training
    size = 0
    waits: dict[str, list[float]] = {"background": [], "foreground": []}
    steps_alone = []
    steps_while_writing = []
    for kind in list(waits) * (ROUNDS + 1):
        checkpoint = replace(run.config.checkpoint, async_save=kind == "background")
        run.config = replace(run.config, checkpoint=checkpoint)
        steps_alone.append(step_seconds(run))
        world.barrier()
        started = time.perf_counter()
        saver.save(wait=False)
        waits[kind].append(time.perf_counter() - started)
        if (write := run.saver.pending) is not None:
            steps_while_writing.append(step_seconds(run))
            write.wait()
        written = all_checkpoints(run.folder)
        if not written:
            raise Failure(f"no checkpoint was written to run.dir={run.folder}; free some space")
        size = sum(entry["bytes"] for entry in read_manifest(written[-1]).files.values())
        world.barrier()
        if world.is_main:
            shutil.rmtree(run.folder / "checkpoints")
        world.barrier()
    parts = []
    for kind, (_, *seconds) in waits.items():
        spread = f"({min(seconds):.3f} to {max(seconds):.3f})"
        parts.append(f"{median(seconds):.3f} s {spread} in the {kind}")
    ratio = median(waits["background"][1:]) / median(waits["foreground"][1:])
    world.say(
        f"{size / 2**30:.2f} GiB, {run.parallel.strategy} on {world.world_size} x "
        f"{world.device.type}: training waits for a save {' and '.join(parts)}: ratio "
        f"{ratio:.3f}; a step takes {median(steps_alone):.3f} s, and "
        f"{median(steps_while_writing[1:]):.3f} s while a save is written"
    )


if __name__ == "__main__":
    sys.exit(main())
