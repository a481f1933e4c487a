"""The loops that are compared: the hand-written baseline and dist_amp's; Accelerate's and Fabric's are in peers.py.

All of them take the same step: micro-batches that are on the device already, the mean loss, the norm of all gradients
clipped, fused AdamW with the same two parameter groups, the same schedule, gradients set to None.
"""

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dist_amp.config.auto import blocks_of
from dist_amp.config.load import load_config
from dist_amp.optim import learning_rate, parameter_groups
from dist_amp.precision import DTYPES
from dist_amp.run import Run, build_run
from dist_amp.runtime.random_state import seed_all
from dist_amp.settings import Config
from dist_amp.step import mark_last, train_step
from dist_amp.tasks.causal_lm import CausalLM
from dist_amp.world import World

SAMPLES = 1024
Step = Callable[[Sequence[Any]], object]
# A bench needs no run folder, evaluation or checkpoint.
UNDISTURBED = ["--run.dir", "unused", "--run.resume", "never", "--eval.every", "off", "--checkpoint.every", "off"]


def config_of(device: str, precision: str, micro_batch_size: int, accumulation: int, words: str = "") -> Config:
    """The main job's config, with these `words` of its command line."""
    words += f" --run.device {device} --train.steps 20000 --optim.warmup_steps 10"
    words += f" --train.micro_batch_size {micro_batch_size} --train.accumulation_steps {accumulation} "
    words += "--use_amp false" if precision == "fp32" else f"--precision.dtype {precision}"
    return load_config([*words.split(), *UNDISTURBED], environ={})


class TwoLayers:
    """Two linear layers of 64, where a step is nearly all overhead. Batch: x, y [B, 64] float32."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def build_dataset(self, split: str) -> Any:
        x = torch.randn(SAMPLES, 64, generator=torch.Generator().manual_seed(0))
        return [{"x": row, "y": row.flip(0)} for row in x]

    def loss_sum(self, model: nn.Module, batch: dict[str, Tensor], reduction: str = "sum") -> Tensor:
        return F.mse_loss(model(batch["x"]).float(), batch["y"], reduction=reduction)

    def weight(self, batch: dict[str, Tensor]) -> float:
        return batch["y"].numel()


class RandomBytes(CausalLM):
    """A GPT on random bytes: the text does not change the time. Batch: input_ids, labels [B, context + 1] int64."""

    def build_dataset(self, split: str) -> Any:
        size = (SAMPLES, self.context + 1)
        rows = torch.randint(0, 256, size, generator=torch.Generator().manual_seed(0))
        return [{"input_ids": row, "labels": row} for row in rows]

    def loss_sum(self, model: nn.Module, batch: dict[str, Tensor], reduction: str = "sum") -> Tensor:
        total = super().loss_sum(model, batch)
        return total if reduction == "sum" else total / self.weight(batch)


class RandomTokens(RandomBytes):
    """A GPT on random tokens of its whole vocabulary, built on the device. Batch: as RandomBytes."""

    def __init__(self, device: torch.device, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.device = device

    def build_model(self) -> nn.Module:
        with self.device:  # a CPU takes ten seconds to draw a billion random weights
            return super().build_model()

    def batches(self, steps: int, accumulation: int, size: int) -> list[list[dict[str, Tensor]]]:
        """Micro-batches of `size` samples for so many steps, on the device; the same on every call."""
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (steps, accumulation, size, self.context + 1)
        tokens = torch.randint(self.shape[0], shape, device=self.device, generator=generator)
        facts: dict[str, Any] = {"tokens": size * shape[-1], "counted": size * self.context}
        return [[{"input_ids": one, "labels": one, **facts} for one in step] for step in tokens]


@dataclass(frozen=True)
class Setup:
    """What every loop is built from."""

    config: Config
    world: World
    task: Any  # loss_sum(model, batch, "mean") is the mean loss
    fused: bool = True  # AdamW; False: torch's default, one operation for many tensors

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
        for block in self.blocks(module) if self.config.compile.blocks else ():
            block.compile(backend=self.config.compile.backend, dynamic=self.config.compile.dynamic)
        return module

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        return blocks_of(self.task, module)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optim, fused = self.config.optim, self.fused or None
        groups = parameter_groups(model, optim)
        if optim.name == "sgd":
            return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, fused=fused)
        return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=fused)

    def schedule(self) -> Callable[[torch.optim.Optimizer], None]:
        """set_rate(optimizer): sets the next step's learning rate; call it once per step."""
        optim, total, steps = self.config.optim, self.config.train.steps, itertools.count()

        def set_rate(optimizer: torch.optim.Optimizer) -> None:
            rate = learning_rate(optim, min(next(steps), total), total)
            for group in optimizer.param_groups:
                group["lr"] = rate

        return set_rate


@dataclass(frozen=True)
class Loop:
    """What is timed: step(micro_batches) takes one optimizer step of `module`, after prepare(), which is not timed."""

    module: nn.Module
    step: Step
    prepare: Callable[[], object] = lambda: None
    backward: Step = lambda micro_batches: None  # the two halves of the baseline's step
    update: Callable[[], object] = lambda: None


def shard(module: nn.Module, setup: Setup, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 as in its tutorial: each block is a unit, and the last one is not resharded after forward."""
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[setup.precision], reduce_dtype=torch.float32)
    blocks = setup.blocks(module)
    for number, block in enumerate(blocks):
        fully_shard(block, mesh=mesh, reshard_after_forward=number < len(blocks) - 1, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=replace(policy, output_dtype=torch.float32))
    return module


def baseline(setup: Setup) -> Loop:
    """The loop that an expert writes for one precision and strategy; it logs nothing."""
    world, train = setup.world, setup.config.train
    module = model = setup.new_model()
    if setup.strategy == "ddp":
        model = DistributedDataParallel(module, gradient_as_bucket_view=True, broadcast_buffers=False)
    elif setup.strategy == "fsdp":
        model = shard(module, setup, world.mesh((world.world_size,), ("shard",)))
    optimizer, set_rate = setup.optimizer(model), setup.schedule()
    casts = setup.precision != "fp32" and setup.strategy != "fsdp"
    autocast = torch.autocast(world.device.type, dtype=DTYPES[setup.precision]) if casts else nullcontext()
    scale = setup.config.precision.scaler.init_scale
    scaler = torch.amp.GradScaler(world.device.type, init_scale=scale) if setup.precision == "fp16" else None

    def backward(micro_batches: Sequence[Any]) -> None:
        for is_last, batch in mark_last(micro_batches):
            if setup.strategy == "fsdp":
                model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            with model.no_sync() if setup.strategy == "ddp" and not is_last else nullcontext():  # type: ignore[operator]
                with autocast:
                    loss = setup.task.loss_sum(model, batch, "mean") / len(micro_batches)
                (scaler.scale(loss) if scaler else loss).backward()

    def update() -> None:
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

    def step(micro_batches: Sequence[Any]) -> None:
        backward(micro_batches)
        update()

    return Loop(module, step, backward=backward, update=update)


def dist_amp(setup: Setup) -> Loop:
    """train_step."""
    run = build_run(setup.config, setup.world, setup.task)
    return Loop(run.parallel.module, lambda micro_batches: train_step(run, micro_batches))


def dist_amp_with_telemetry(setup: Setup, folder: Path) -> Loop:
    """train_step and all metrics: TensorBoard, metrics.jsonl, and the console line, which is discarded."""
    run = build_run(setup.config, setup.world, setup.task)
    run.metrics.open(folder, 0, run.config_text)
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115 (open as long as the loop)
    samples, log_every = setup.config.train.micro_batch_size, setup.config.metrics.log_every

    def step(micro_batches: Sequence[Any]) -> None:
        report = train_step(run, micro_batches)
        run.metrics.record(report)
        run.data.items += samples * len(micro_batches)  # its own data loader is not used here
        if (row := run.metrics.read()) is not None:  # one step after they were started, as in the main job
            with redirect_stdout(nowhere):
                run.metrics.write(row, run.config.train.steps)
        if run.step % log_every == 0:
            run.metrics.begin(run.step, run.schedule, run.scaler, run.data)

    return Loop(run.parallel.module, step)


# --- the optimizer update alone: unscale, clip, and step or skip, always with the gradients of `micro_batches`


def update_alone(setup: Setup, micro_batches: Sequence[Any], is_ours: bool = False) -> Loop:
    """The update of the baseline loop, or of train_step with the same gradients."""
    loop = baseline(setup)
    loop.backward(micro_batches)
    gradients = [parameter.grad for parameter in loop.module.parameters()]
    run = build_run(setup.config, setup.world, setup.task) if is_ours else None
    module = loop.module if run is None else run.parallel.module

    def set_gradients() -> None:
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone() if gradient is not None else None

    return Loop(module, lambda _: loop.update() if run is None else update(run), set_gradients)


def update(run: Run) -> None:
    """What train_step does after the last backward."""
    one = torch.ones((), device=run.world.device)
    run.normalizer.begin(one)
    if run.parallel.carrier is not None:
        run.parallel.carrier.grad = one.clone()
    norm = run.parallel.global_grad_norm(run.normalizer, run.scaler)
    run.scaler.unscale_and_clip(run.optimizer, norm, run.normalizer.correction, run.clip)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.schedule.step(run.scaler.applied)
    run.optimizer.zero_grad(set_to_none=True)
