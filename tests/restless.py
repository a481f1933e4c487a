"""The task that chaos.py breaks: random numbers in every forward, a row that overflows, and ways to
die on demand.

The environment says how: DIE_AT=point:step:rank kills that rank's process at that point of that
step's checkpoint, in torchrun's first attempt alone; HANG_AT, RAISE_AT=step:rank hang or raise in
the loss; WARM_UP, EVALUATION are seconds.
"""

import os
import signal
import time

from tiny import Overflow
from torch import nn

RANK = int(os.environ.get("RANK", "0"))
FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


class Restless(Overflow):
    """Steps of some 20 ms; about one step in an epoch of sixteen is skipped by all, because of a
    row of one rank.
    """

    def __init__(self, seconds: float = 0.005, batch_norm: bool = True):
        super().__init__(bad=(3,), samples=128)
        self.seconds = seconds
        self.norm = (
            nn.BatchNorm1d if batch_norm else nn.LayerNorm
        )  # FSDP's policy refuses batch statistics

    def build_model(self):
        return nn.Sequential(
            nn.Linear(8, 16), self.norm(16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1)
        )

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
            demand("RAISE_AT", raise_it)
            demand("HANG_AT", lambda: time.sleep(3600))
            count[0] += 1
        else:
            time.sleep(float(os.environ.get("EVALUATION", "0")) / 16)
        return super().loss_sum(model, batch)


count = [0]  # micro-batches of this process


def demand(name, act):
    if FIRST and os.environ.get(name) == f"{count[0]}:{RANK}":
        act()


def raise_it():
    raise RuntimeError("a sample that nobody expected")


def die_at(point, step):
    """Make this process kill itself at a point of writing the checkpoint of `step`."""
    import shutil

    from dist_amp.checkpoint import saver as checkpoint

    def dying(module, name, after=False, calls=1, when=lambda *args: True):
        real, seen = getattr(module, name), []

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

    import torch.distributed.checkpoint.filesystem as dcp

    writer = dcp.FileSystemWriter
    points = {
        "before it is taken": (
            checkpoint,
            "take_snapshot",
            {"when": lambda run, **_: run.step == step},
        ),
        "before the first byte": (checkpoint, "write", {"when": of_the_step}),
        "before this rank's shard": (writer, "write_data", {"when": of_the_step}),
        "after this rank's shard": (writer, "write_data", {"when": of_the_step, "after": True}),
        "before the metadata": (writer, "finish", {"when": of_the_step}),
        "before the hashes": (checkpoint, "hash_files", {"calls": step // STEPS_BETWEEN}),
        "before the manifest": (checkpoint, "publish", {"when": of_the_step}),
        "before the rename": (os, "rename", {"when": whole_folder}),
        "after the rename": (os, "rename", {"when": whole_folder, "after": True}),
        "while an old one is removed": (
            shutil,
            "rmtree",
            {"when": lambda path, *_, **__: "/step_" in str(path)},
        ),
    }
    if point == "in the midst of a shard":
        # Between the two writes of one tensor of this step's shard.
        real = dcp._write_item

        def half(transforms, stream, *args, **kwargs):
            result = real(transforms, stream, *args, **kwargs)
            if f"{step:08d}" in stream.name:
                stream.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        dcp._write_item = half
        return
    module, name, options = points[point]
    dying(module, name, **options)


STEPS_BETWEEN = 10
POINTS = [
    "before it is taken", "before the first byte", "before this rank's shard", "in the midst of a shard",
    "after this rank's shard", "before the metadata", "before the hashes", "before the manifest", "before the rename",
    "after the rename", "while an old one is removed",
]  # fmt: skip
MAIN_ONLY = {"before the metadata", "before the manifest", "before the rename", "after the rename",
             "while an old one is removed"}  # fmt: skip

if FIRST and "DIE_AT" in os.environ:
    _point, _step, _rank = os.environ["DIE_AT"].split(":")
    if int(_rank) == RANK:
        die_at(_point, int(_step))
