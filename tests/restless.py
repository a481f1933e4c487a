"""The task that chaos.py breaks: random numbers in every forward, a row that overflows.

The environment says how: DIE_AT=point:step:rank kills that rank's process at that point of that
step's checkpoint, in torchrun's first attempt alone; WARM_UP, EVALUATION are seconds.
"""

import itertools
import json
import os
import shutil
import signal
import time

import torch.distributed.checkpoint.filesystem as dcp
from tiny import Overflow
from torch import nn

from dist_amp.checkpoint import background, saver

STEPS_BETWEEN = 10
MAIN_ONLY = ["before the metadata", "before the manifest", "before the rename"]
MAIN_ONLY += ["after the rename", "while an old one is removed"]
POINTS = ["before it is taken", "before the first byte", "before this rank's shard"]
POINTS += ["in the midst of a shard", "after this rank's shard", "before the hashes", *MAIN_ONLY]


class Restless(Overflow):
    """Steps of some 20 ms; one step of an epoch's sixteen is skipped, for a row of one rank."""

    def __init__(self, seconds: float = 0.005, batch_norm: bool = True):
        super().__init__(bad=(3,), samples=128)
        self.seconds = seconds
        # FSDP's policy refuses batch statistics.
        self.norm = nn.BatchNorm1d if batch_norm else nn.LayerNorm

    def build_model(self):
        layers = [nn.Linear(8, 16), self.norm(16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1)]
        return nn.Sequential(*layers)

    def build_dataset(self, split):
        if split == "train":
            print("warming up", flush=True)
            time.sleep(float(os.environ.get("WARM_UP", "0")))
        rows = super().build_dataset(split)
        if split == "validation":
            rows.columns["x"][3] = 0.0
        return rows

    def loss_sum(self, model, batch):
        time.sleep(self.seconds)
        if not model.training:
            time.sleep(float(os.environ.get("EVALUATION", "0")) / 16)
        return super().loss_sum(model, batch)


class Recording(Restless):
    """Writes each rank's steps to a file; each lasts `pause` seconds more, until `hurry` exists."""

    def __init__(self, pause: float = 0.3, batch_norm: bool = False):
        super().__init__(0.0, batch_norm)
        self.bad = ()
        self.pause = pause

    def on_step(self, run, report):
        if not os.path.exists("hurry"):
            time.sleep(self.pause)
        # The port is another one in each start of the ranks, and the same for all of them.
        line = {"time": time.time(), "step": run.step, "ranks": run.world.world_size}
        line["attempt"] = os.environ.get("MASTER_PORT", "")
        with (run.folder / f"steps-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def die_at(point, step):
    """Make this process kill itself at a point of writing the checkpoint of `step`."""
    number = f"{step:08d}"
    saves = itertools.count(1)

    def of_step(first, *_, **__):
        return number in str(getattr(first, "path", getattr(first, "folder", first)))

    def within_shard(transforms, stream, *_, **__):
        stream.flush()
        return number in stream.name

    def of_folder(path, *_):  # torch renames its metadata within
        return str(path).endswith(f"{number}.writing")

    points = {
        "before it is taken": (saver, "take_snapshot", lambda run, **_: run.step == step),
        "before the first byte": (background.Save, "_write", of_step),
        "before this rank's shard": (dcp.FileSystemWriter, "write_data", of_step),
        "in the midst of a shard": (dcp, "_write_item", within_shard),
        "after this rank's shard": (dcp.FileSystemWriter, "write_data", of_step),
        "before the metadata": (dcp.FileSystemWriter, "finish", of_step),
        "before the hashes": (
            background,
            "hash_files",
            lambda *_: next(saves) == step // STEPS_BETWEEN,
        ),
        "before the manifest": (background, "publish", of_step),
        "before the rename": (os, "rename", of_folder),
        "after the rename": (os, "rename", of_folder),
        "while an old one is removed": (
            shutil,
            "rmtree",
            lambda path, *_, **__: "/step_" in str(path),
        ),
    }
    module, name, is_reached = points[point]
    real = getattr(module, name)
    is_after = point.startswith(("after", "in the midst"))

    def dying(*args, **options):
        result = real(*args, **options) if is_after else None
        if is_reached(*args, **options):
            os.kill(os.getpid(), signal.SIGKILL)
        return result if is_after else real(*args, **options)

    setattr(module, name, dying)


if "DIE_AT" in os.environ and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
    point, step, rank = os.environ["DIE_AT"].split(":")
    if rank == os.environ["RANK"]:
        die_at(point, int(step))
