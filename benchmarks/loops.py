"""The training loops to compare: a hand-written baseline and dist_amp's. peers.py has the others.

All take the same step: micro-batches that are already on the device, the mean loss, gradients
clipped by their global norm, fused AdamW with the same two parameter groups and schedule.
"""

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dist_amp.config.load import load_config
from dist_amp.config.text import to_toml
from dist_amp.data import build_batches
from dist_amp.distributed.process import seed_all
from dist_amp.optim import learning_rate, parameter_groups
from dist_amp.precision import DTYPES
from dist_amp.run import build_run
from dist_amp.scaling.blocks import blocks_of
from dist_amp.settings import Config
from dist_amp.step import mark_last, train_step
from dist_amp.task import build_split
from dist_amp.tasks.causal_lm import CausalLM
from dist_amp.telemetry.console import Console
from dist_amp.world import World

SAMPLES = 1024
Step = Callable[[Sequence[Any]], object]
# A benchmark needs no run folder, evaluation or checkpoint.
UNDISTURBED = "--run.dir unused --run.resume never --eval.every off --checkpoint.every off".split()
PRECISION_WORDS = {
    "fp32": "--use_amp false",
    "bf16": "--precision.dtype bf16",
    "fp16": "--precision.dtype fp16",
}


def config_of(
    device: str, precision: str, micro_batch_size: int, accumulation: int, words: str = ""
) -> Config:
    """The main job's config, with `words` added to its command line. Nothing is compiled unless
    they say so: compile.blocks=auto would not mean the same for all loops.
    """
    words = f"--compile.blocks false {words} --run.device {device} --train.steps 20000"
    words += f" --optim.warmup_steps 10 --train.micro_batch_size {micro_batch_size}"
    words += f" --train.accumulation_steps {accumulation} {PRECISION_WORDS[precision]}"
    return load_config([*words.split(), *UNDISTURBED], environ={})


class TwoLayers:
    """Two linear layers of 64, where a step is nearly all overhead. Batch: x, y [B, 64] float32."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def build_dataset(self, split: str) -> Any:
        x = torch.randn(SAMPLES, 64, generator=torch.Generator().manual_seed(0))
        return [{"x": row, "y": row.flip(0)} for row in x]

    def loss_sum(
        self, model: nn.Module, batch: dict[str, Tensor], reduction: str = "sum"
    ) -> Tensor:
        return F.mse_loss(model(batch["x"]).float(), batch["y"], reduction=reduction)

    def weight(self, batch: dict[str, Tensor]) -> float:
        return batch["y"].numel()


class RandomBytes(CausalLM):
    """A GPT on random bytes. Batch: input_ids, labels [B, context + 1] int64."""

    def build_dataset(self, split: str) -> Any:
        size = (SAMPLES, self.context + 1)
        rows = torch.randint(0, 256, size, generator=torch.Generator().manual_seed(0))
        return [{"input_ids": row, "labels": row} for row in rows]

    def loss_sum(
        self, model: nn.Module, batch: dict[str, Tensor], reduction: str = "sum"
    ) -> Tensor:
        total = super().loss_sum(model, batch)
        if reduction == "mean":
            return total / self.weight(batch)
        return total


class RandomTokens(RandomBytes):
    """RandomBytes with tokens of the whole vocabulary, and a model that is built on the device."""

    def __init__(self, device: torch.device, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.device = device

    def build_model(self) -> nn.Module:
        with self.device:  # a CPU takes ten seconds to draw a billion random weights
            return super().build_model()

    def batches(self, steps: int, accumulation: int, size: int) -> list[list[dict[str, Tensor]]]:
        """Micro-batches of `size` samples on the device; the same on every call."""
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (steps, accumulation, size, self.context + 1)
        tokens = torch.randint(self.vocabulary, shape, device=self.device, generator=generator)
        counts: dict[str, Any] = {"tokens": size * shape[-1], "counted": size * self.context}
        return [[{"input_ids": ids, "labels": ids, **counts} for ids in step] for step in tokens]


@dataclass(frozen=True)
class Setup:
    config: Config
    world: World
    task: Any  # loss_sum(model, batch, "mean") is the mean loss
    fused: bool = True  # AdamW; False: torch's default (foreach)

    @property
    def precision(self) -> str:
        return self.config.precision.name

    @property
    def strategy(self) -> str:
        return self.config.parallel.strategy

    def new_model(self) -> nn.Module:
        """The same initial weights every time; compiled block by block if the config says so."""
        seed_all(self.config.run.seed)
        module = self.task.build_model().to(self.world.device)
        options = self.config.compile
        if options.blocks:
            backend = options.mode.replace("default", "inductor")
            for block in self.blocks(module):
                block.compile(backend=backend, dynamic=options.blocks == "dynamic")
        return module

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        return blocks_of(self.task, module)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optim = self.config.optim
        fused = self.fused or None
        groups = parameter_groups(model, optim)
        if optim.name == "sgd":
            return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, fused=fused)
        return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=fused)

    def schedule(self) -> Callable[[torch.optim.Optimizer], None]:
        """set_rate(optimizer): sets the next step's learning rate; call it once per step."""
        optim = self.config.optim
        total = self.config.train.steps
        steps = itertools.count()

        def set_rate(optimizer: torch.optim.Optimizer) -> None:
            rate = learning_rate(optim, min(next(steps), total), total)
            for group in optimizer.param_groups:
                group["lr"] = rate

        return set_rate


@dataclass(frozen=True)
class Loop:
    """step(micro_batches) takes one optimizer step and is timed; prepare() before it is not."""

    module: nn.Module
    step: Step
    prepare: Callable[[], object] = lambda: None


def steps_of_data(setup: Setup) -> list[Any]:
    """The micro-batches of eight steps, the same for every loop."""
    dataset = build_split(setup.task, "train", setup.world)
    batches = build_batches(setup.config, setup.task, dataset, setup.world)
    return list(itertools.islice(batches, 8))


def baseline(setup: Setup) -> Loop:
    """The loop that an expert would write for one precision and strategy; it logs nothing."""
    world = setup.world
    train = setup.config.train
    module = model = setup.new_model()
    if setup.strategy == "ddp":
        model = DistributedDataParallel(
            module, gradient_as_bucket_view=True, broadcast_buffers=False
        )
    if setup.strategy == "fsdp":
        policy = MixedPrecisionPolicy(DTYPES[setup.precision], torch.float32)
        for part in (*setup.blocks(module), module):
            model = fully_shard(part, mp_policy=policy)
    optimizer = setup.optimizer(model)
    set_rate = setup.schedule()
    autocast: AbstractContextManager[Any] = nullcontext()
    if setup.precision != "fp32" and setup.strategy != "fsdp":
        autocast = torch.autocast(world.device.type, dtype=DTYPES[setup.precision])
    scaler = None
    if setup.precision == "fp16":
        scale = setup.config.precision.scaler.init_scale
        scaler = torch.amp.GradScaler(world.device.type, init_scale=scale)

    def step(micro_batches: Sequence[Any]) -> None:
        for is_last, batch in mark_last(micro_batches):
            sync: AbstractContextManager[Any] = nullcontext()
            if setup.strategy == "ddp" and not is_last:
                sync = model.no_sync()  # type: ignore[operator]
            if setup.strategy == "fsdp":
                model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            with sync:
                with autocast:
                    loss = setup.task.loss_sum(model, batch, "mean") / len(micro_batches)
                if scaler:
                    loss = scaler.scale(loss)
                loss.backward()
        set_rate(optimizer)
        if scaler:
            scaler.unscale_(optimizer)
        if train.clip_by == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Loop(module, step)


def dist_amp(setup: Setup) -> Loop:
    run = build_run(setup.config, setup.world, setup.task)
    return Loop(run.parallel.module, lambda micro_batches: train_step(run, micro_batches))


def dist_amp_with_telemetry(setup: Setup, folder: Path) -> Loop:
    """train_step and all metrics: TensorBoard, metrics.jsonl, console lines (discarded)."""
    run = build_run(setup.config, setup.world, setup.task)
    run.metrics.open(folder, 0, to_toml(run.config))
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115 (open as long as the loop)
    console = Console(run.metrics, 0, setup.config.train.steps, 1.0)
    samples = setup.config.train.micro_batch_size
    log_every = setup.config.metrics.log_every

    def step(micro_batches: Sequence[Any]) -> None:
        report = train_step(run, micro_batches)
        run.metrics.after_step(report)
        run.data.items += samples * len(micro_batches)  # the run's own data loader is not used
        row = run.metrics.read()  # one step after `begin` has started the copy, as in the main job
        if row is not None:
            run.metrics.write(row)
            with redirect_stdout(nowhere):
                console.on_log(row)
        if run.step % log_every == 0:
            run.metrics.begin(run.step, run.schedule, run.scaler, run.data)

    return Loop(run.parallel.module, step)
