"""Small tasks for the tests: quick on one core, exact enough to compare to a millionth."""

import time
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn


class Rows:
    """A map-style dataset of dicts of tensors."""

    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.columns.items()}


class EndsItsReader(Rows):
    """What another process can't unpickle."""

    def __setstate__(self, state):
        raise ValueError("no such thing here")


class Tiny:
    """Fit a smooth function. Batch: x [B, 8], y [B], counts [B]: ones, unless `uneven`."""

    rows = Rows

    def __init__(self, samples: int = 64, uneven: bool = False, depth: int = 2, seed: int = 0):
        self.samples = samples
        self.uneven = uneven
        self.depth = depth
        self.seed = seed

    def build_model(self):
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(self.depth)]
        return nn.Sequential(*layers, nn.Linear(8, 1))

    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(self.seed + (split == "train"))
        x = torch.randn(self.samples, 8, generator=generator)
        counts = torch.ones(self.samples)
        if self.uneven:  # what a mask does: samples that count for 0 to 3
            counts = torch.randint(0, 4, (self.samples,), generator=generator).float()
        return self.rows(x=x, y=x.sum(1).sin(), counts=counts)

    def loss_sum(self, model, batch):
        error = F.mse_loss(model(batch["x"]).float().squeeze(-1), batch["y"], reduction="none")
        return (error * batch["counts"]).sum()

    def weight(self, batch):
        return batch["counts"].sum()


class Changed(Tiny):
    """Tiny with its model, or its columns of the training set, changed in place."""

    def __init__(self, model=None, columns=None):
        super().__init__()
        self.change_model = model
        self.change_columns = columns

    def build_model(self):
        model = super().build_model()
        if self.change_model is not None:
            self.change_model(model)
        return model

    def build_dataset(self, split):
        rows = super().build_dataset(split)
        if self.change_columns is not None:
            self.change_columns(rows.columns)
        return rows


def variant(**parts):
    """Tiny with other methods or attributes: variant(build_model=make_model)."""
    task = Tiny()
    vars(task).update(parts)
    return task


class WithNoise(Tiny):
    """Keeps its [data] section, and adds noise as a sample is read and as a batch is made."""

    def __init__(self, data):
        super().__init__(samples=24)
        self.data = data

    def augment(self, sample, rng):
        return {**sample, "x": sample["x"] + torch.rand(8, generator=rng)}

    def collate(self, samples):
        batch = torch.utils.data.default_collate(samples)
        return {**batch, "x": batch["x"] + torch.rand(len(samples), 8)}


class Overflow(Tiny):
    """Infinite gradients from the rows `bad` of the training set, whose x is inf."""

    def __init__(self, bad: tuple[int, ...] = (0,), samples: int = 64):
        super().__init__(samples=samples)
        self.bad = bad

    def build_dataset(self, split):
        rows = super().build_dataset(split)
        rows.columns["x"][list(self.bad)] = float("inf")
        return rows


class AlwaysNan(Tiny):
    def loss_sum(self, model, batch):
        return super().loss_sum(model, batch) * float("nan")


class LaterNan(Tiny):
    """From the second micro-batch on."""

    calls = 0

    def loss_sum(self, model, batch):
        self.calls += 1
        return super().loss_sum(model, batch) * (float("nan") if self.calls > 1 else 1.0)


class VectorLoss(Tiny):
    def loss_sum(self, model, batch):
        return model(batch["x"]).squeeze(-1)


class LacksWeight(Tiny):
    weight = None


class NeedsName(Tiny):
    def __init__(self, name: str, width: int = 8):
        super().__init__()


class Slow(Tiny):
    """A step that takes a while, for signals to land in."""

    def loss_sum(self, model, batch):
        time.sleep(0.02)
        return super().loss_sum(model, batch)


@contextmanager
def watched(observer):
    """A block that an observer watches, and which it is closed after."""
    try:
        yield observer
    except BaseException as error:
        observer.close(error)
        raise
    observer.close()


def average_of(run):
    """The tensors of optim.ema, by name; none without it."""
    return next((each.tensors for each in run.observers if hasattr(each, "tensors")), {})


def save(run):
    """Write a checkpoint of the current state and return its path; every rank calls it."""
    from dist_amp.checkpoint.format import checkpoint_folder

    run.saver.save(wait=True)
    return checkpoint_folder(run.folder, run.step)


def seal_again(checkpoint):
    """Make a checkpoint's manifest match its files as they are now, as an attacker would."""
    from dataclasses import replace

    from dist_amp.checkpoint.format import MANIFEST, hash_files, read_manifest

    files = hash_files(path for path in checkpoint.iterdir() if path.name != MANIFEST)
    manifest = replace(read_manifest(checkpoint), files=files)
    (checkpoint / MANIFEST).write_text(manifest.to_text())


def make_run(world, task, *words):
    """A run with settings as on the command line: make_run(world, Tiny(), "--train.steps", 3)."""
    from dist_amp.checkpoint.resume import checkpoint_to_resume
    from dist_amp.checkpoint.state import load
    from dist_amp.config.load import load_config
    from dist_amp.run import build_run, run_folder
    from dist_amp.world import locate

    quiet = "--checkpoint.every off --eval.every off --run.dir unused --run.resume never".split()
    # On every machine: auto is float32 on a CPU that only emulates it.
    quiet += ["--precision.dtype", "bf16"]
    config = load_config([*quiet, *map(str, words)], environ={})
    world = world or locate(config.run)
    checkpoint = checkpoint_to_resume(config, run_folder(config.run, world), world, task)
    run = build_run(config, world, task, resumes=checkpoint is not None)
    if checkpoint is not None:
        load(run, checkpoint)
    return run


def take_steps(run, steps):
    from dist_amp.step import train_step

    return [train_step(run, next(run.data)) for _ in range(steps)]


def log_row(run):
    """The interval's figures of all ranks, read at once."""
    run.metrics.begin(run.step, run.schedule, run.scaler, run.data)
    return run.metrics.read()


def log(run):
    """Read the interval's figures and write them, as the main job does at a log step."""
    row = log_row(run)
    run.metrics.write(row)
    return row


def whole(tensor):
    """A parameter's full value as an ordinary tensor; every rank calls it."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def parameters_of(run):
    """{name: full value}, by the names that the unwrapped module gives."""
    return {name: whole(p) for name, p in run.parallel.module.named_parameters()}


def moments_of(run):
    """Every tensor of the optimizer's state, in the order of the parameters."""
    state = run.optimizer.state
    return [whole(value) for p in run.parallel.parameters for value in state[p].values()]


def state_of(run):
    """All that a step changes, on this rank; not the process's generators."""
    buffers = [buffer.clone() for buffer in run.parallel.module.buffers()]
    tensors = [*parameters_of(run).values(), *buffers, *moments_of(run)]
    return [*tensors, run.schedule.counters.clone(), run.scaler.scale_tensor.clone()]
