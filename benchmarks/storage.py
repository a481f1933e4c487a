r"""How long a save blocks training if run.dir is on object storage, compared with a local disk.

DIST_AMP_CACHE=/disk torchrun --nproc_per_node=2 -m benchmarks.storage \
    --run.dir s3://bucket/new --task.args.width 1024 --task.args.layers 8 --task.args.context 16 \
    --train.micro_batch_size 1

Three kinds of saves take turns, each in the background and in the foreground: to a local folder, to
the address, and to the address while the previous checkpoint is being uploaded. Target: at the
address, training waits at most 1.1 times as long. Also prints how long a step takes alone and
during an upload, which needs processor time for hashes.
"""

import math
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.harness import on_a_run, step_seconds
from dist_amp.checkpoint.format import all_checkpoints
from dist_amp.errors import ConfigError
from dist_amp.run import Run
from dist_amp.storage.mirror import mirror_run
from dist_amp.storage.store import Store
from dist_amp.supervise.lifecycle import Job

ROUNDS = 10  # after a first one that allocates memory and is not counted
KINDS = ("background", "foreground")
LOCAL = "local"
STORE = "at the address"
UPLOADING = "at the address during an upload"


@on_a_run
def main(run: Run) -> None:
    if "://" not in run.config.run.dir:
        raise ConfigError(
            f"run.dir={run.config.run.dir} is not an address; give s3://bucket/new_run"
        )
    job = Job(run.config, run.world, folder=run.folder)
    mirror_run(run.config.run, job)
    measure(run)
    job.at_end()


def measure(run: Run) -> None:
    saver = run.saver  # one for all saves, as in training
    store = Store(run.config.run.dir)
    mirror = run.folder
    local = mirror.with_name(f"{mirror.name}-local")
    waits: dict[tuple[str, str], list[float]] = defaultdict(list)
    steps: dict[str, list[float]] = defaultdict(list)
    still_uploading = 0
    for number in range(ROUNDS + 1):
        for kind in KINDS:
            checkpoint = replace(run.config.checkpoint, async_save=kind == "background")
            run.config = replace(run.config, checkpoint=checkpoint)
            order = [LOCAL, STORE, UPLOADING] if number % 2 else [STORE, UPLOADING, LOCAL]
            for place in order:
                run.folder = local if place == LOCAL else mirror
                if place == UPLOADING:
                    # For 2 s at most: a small checkpoint may have been uploaded already.
                    wait_until(run, lambda: is_uploading(store, mirror), 2.0)
                steps[place].append(step_seconds(run))
                run.world.barrier()
                started = time.perf_counter()
                saver.save(wait=False)
                waits[kind, place].append(time.perf_counter() - started)
                if place == UPLOADING:
                    still_uploading += is_uploading(store, mirror)
                saver.finish()
                run.world.barrier()
                if place == UPLOADING:
                    wait_until(run, lambda: not is_uploading(store, mirror))
            if run.world.is_main:
                for folder in (mirror, local):
                    shutil.rmtree(folder / "checkpoints")
            run.world.barrier()
    report(run, waits, steps, still_uploading)


def is_uploading(store: Store, folder: Path) -> bool:
    """Whether a checkpoint of the local folder is not yet complete at the address."""
    names = store.sizes("checkpoints")
    local = all_checkpoints(folder)
    return any(f"checkpoints/{path.name}/manifest.json" not in names for path in local)


def report(
    run: Run,
    waits: dict[tuple[str, str], list[float]],
    steps: dict[str, list[float]],
    still_uploading: int,
) -> None:
    say = run.world.say
    for kind in KINDS:
        base = median(waits[kind, LOCAL][1:])
        for place in (LOCAL, STORE, UPLOADING):
            _, *seconds = waits[kind, place]
            spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
            say(
                f"{kind} {place}: training waits {median(seconds):.3f} s ({spread}), "
                f"{median(seconds) / base:.2f} x local"
            )
    for place, seconds in steps.items():
        say(f"a step before a save {place} takes {median(seconds[2:]):.3f} s")
    say(f"{still_uploading} of {2 * (ROUNDS + 1)} uploads lasted until training continued")


def wait_until(run: Run, condition: Callable[[], bool], seconds: float = math.inf) -> None:
    """Wait on rank 0 until the condition holds or the seconds are over; other ranks wait for it."""
    deadline = time.monotonic() + seconds
    while run.world.is_main and not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    run.world.wait_long()


if __name__ == "__main__":
    sys.exit(main())
