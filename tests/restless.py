"""The task that chaos.py breaks: random numbers in every forward, a row that overflows.

The environment says how: DIE_AT=point:step:rank kills that rank's process at that point of that
step's checkpoint, in torchrun's first attempt alone; HANG_AT, RAISE_AT=step:rank hang or raise in
the loss; WARM_UP, EVALUATION are seconds.
"""

import json
import os
import shutil
import signal
import time

import torch
import torch.distributed.checkpoint.filesystem as dcp
from tiny import Overflow
from torch import nn

from dist_amp.checkpoint import saver

RANK = int(os.environ.get("RANK", "0"))
FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


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
        if model.training:
            if is_asked("RAISE_AT"):
                raise RuntimeError("a sample that nobody expected")
            if is_asked("HANG_AT"):
                time.sleep(3600)
            count[0] += 1
        else:
            time.sleep(float(os.environ.get("EVALUATION", "0")) / 16)
        return super().loss_sum(model, batch)


class Recording(Restless):
    """Appends the samples of each rank and step to a file. Steps last `pause` seconds more, until
    the file `hurry` is there.
    """

    def __init__(self, pause: float = 0.3, batch_norm: bool = False):
        super().__init__(0.0, batch_norm)
        self.bad = ()
        self.pause = pause
        self.taken = []

    def build_dataset(self, split):
        rows = super().build_dataset(split)
        rows.columns["number"] = torch.arange(len(rows))
        return rows

    def loss_sum(self, model, batch):
        if model.training:
            self.taken += batch["number"].tolist()
        return super().loss_sum(model, batch)

    def on_step(self, run, report):
        if not os.path.exists("hurry"):
            time.sleep(self.pause)
        # The port is another one in each start of the ranks, and the same for all of them.
        attempt = os.environ.get("MASTER_PORT", "")
        line = {"time": time.time(), "step": run.step, "ranks": run.world.world_size}
        line |= {"attempt": attempt, "samples": self.taken}
        with (run.folder / f"samples-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.taken = []


count = [0]  # micro-batches of this process


def is_asked(name):
    return FIRST and os.environ.get(name) == f"{count[0]}:{RANK}"


def die_at(point, step):
    """Make this process kill itself at a point of writing the checkpoint of `step`."""

    def dying(module, name, after=False, calls=1, when=lambda *args: True):
        real = getattr(module, name)
        seen = []

        def wrapper(*args, **kwargs):
            result = real(*args, **kwargs) if after else None
            if when(*args, **kwargs):
                seen.append(1)
                if len(seen) == calls:
                    os.kill(os.getpid(), signal.SIGKILL)
            return result if after else real(*args, **kwargs)

        setattr(module, name, wrapper)

    def of_the_step(first, *rest, **more):
        return f"{step:08d}" in str(getattr(first, "path", getattr(first, "folder", first)))

    def whole_folder(path, *rest):  # torch renames its metadata within
        return str(path).endswith(f"{step:08d}.writing")

    def of_this_run(run, **more):
        return run.step == step

    def of_a_checkpoint(path, *rest, **more):
        return "/step_" in str(path)

    def half(transforms, stream, *args, **kwargs):
        """Between the two writes of one tensor of this step's shard."""
        result = write_item(transforms, stream, *args, **kwargs)
        if f"{step:08d}" in stream.name:
            stream.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    writer = dcp.FileSystemWriter
    write_item = dcp._write_item
    saves = step // STEPS_BETWEEN
    at_step = {"when": of_the_step}
    points = {
        "before it is taken": (saver, "take_snapshot", {"when": of_this_run}),
        "before the first byte": (saver, "write", at_step),
        "before this rank's shard": (writer, "write_data", at_step),
        "after this rank's shard": (writer, "write_data", at_step | {"after": True}),
        "before the metadata": (writer, "finish", at_step),
        "before the hashes": (saver, "hash_files", {"calls": saves}),
        "before the manifest": (saver, "publish", at_step),
        "before the rename": (os, "rename", {"when": whole_folder}),
        "after the rename": (os, "rename", {"when": whole_folder, "after": True}),
        "while an old one is removed": (shutil, "rmtree", {"when": of_a_checkpoint}),
    }
    if point == "in the midst of a shard":
        dcp._write_item = half
        return
    module, name, options = points[point]
    dying(module, name, **options)


STEPS_BETWEEN = 10
ANY_RANK = ["before it is taken", "before the first byte", "before this rank's shard"]
ANY_RANK += ["in the midst of a shard", "after this rank's shard", "before the hashes"]
MAIN_ONLY = ["before the metadata", "before the manifest", "before the rename"]
MAIN_ONLY += ["after the rename", "while an old one is removed"]
POINTS = ANY_RANK + MAIN_ONLY

if FIRST and "DIE_AT" in os.environ:
    _point, _step, _rank = os.environ["DIE_AT"].split(":")
    if int(_rank) == RANK:
        die_at(_point, int(_step))
