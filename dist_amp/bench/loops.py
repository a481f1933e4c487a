"""The loops that are compared, each as its users write it: by hand, dist_amp's, Accelerate's and Lightning Fabric's.

All of them take the same step: micro-batches that lie ready, the mean loss, the norm of all gradients clipped, fused
AdamW with the same two groups of parameters, the same schedule, gradients set to None.
"""

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dist_amp.config.auto import find_blocks
from dist_amp.config.validate import accumulation_steps
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


class TwoLayers:
    """Two linear layers of 64, where a step is nearly all overhead. Batch: x, y [B, 64] float32."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def build_dataset(self, split: str) -> Any:
        x = torch.randn(SAMPLES, 64, generator=torch.Generator().manual_seed(0))
        return [{"x": row, "y": row.flip(0)} for row in x]

    def loss(self, model: nn.Module, batch: dict[str, Tensor], reduction: str) -> Tensor:
        return F.mse_loss(model(batch["x"]).float(), batch["y"], reduction=reduction)

    def loss_sum(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return self.loss(model, batch, "sum")

    def weight(self, batch: dict[str, Tensor]) -> float:
        return batch["y"].numel()


class RandomBytes(CausalLM):
    """A GPT on bytes that mean nothing: what they are changes no time. Batch: tokens [B, context + 1] uint8."""

    def build_dataset(self, split: str) -> Any:
        size = (SAMPLES, self.context + 1)
        rows = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        return [{"tokens": row} for row in rows]

    def loss(self, model: nn.Module, batch: dict[str, Tensor], reduction: str) -> Tensor:
        tokens = batch["tokens"].long()
        logits = model(tokens[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction=reduction)

    def loss_sum(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return self.loss(model, batch, "sum")


class RandomTokens(RandomBytes):
    """The same on tokens of a whole vocabulary, built where it trains. Batch: tokens [B, context + 1] int64."""

    def __init__(self, device: torch.device, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.device = device

    def build_model(self) -> nn.Module:
        with self.device:  # a billion numbers are drawn at once there; by a CPU in ten seconds
            return super().build_model()

    def batches(self, steps: int, accumulation: int, size: int) -> list[list[dict[str, Tensor]]]:
        """So many steps' micro-batches of `size` samples, on the device, the same every time."""
        shape, generator = (steps, accumulation, size, self.context + 1), torch.Generator(self.device).manual_seed(0)
        tokens = torch.randint(self.shape[0], shape, device=self.device, generator=generator)
        return [[{"tokens": micro_batch} for micro_batch in step] for step in tokens]

    def loss(self, model: nn.Module, batch: dict[str, Tensor], reduction: str) -> Tensor:
        total = CausalLM.loss_sum(self, model, batch)  # which has its own ways to save memory
        return total if reduction == "sum" else total / self.tokens(batch)


@dataclass(frozen=True)
class Setup:
    """What every loop is built from."""

    config: Config
    world: World
    task: Any  # with the mean loss besides, as those of this file have it
    fused: bool = True  # AdamW; else torch's own choice, one operation for many tensors

    @property
    def precision(self) -> str:
        return self.config.precision.name

    @property
    def accumulation(self) -> int:
        return accumulation_steps(self.config.train, self.world.world_size)

    @property
    def strategy(self) -> str:
        return self.config.parallel.strategy

    def fresh_model(self) -> nn.Module:
        """The same weights every time; compiled block by block if the settings say so."""
        seed_all(self.config.run.seed)
        module = self.task.build_model().to(self.world.device)
        for block in self.blocks(module) if self.config.compile.blocks else ():
            block.compile(backend=self.config.compile.backend, dynamic=self.config.compile.dynamic)
        return module

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        return self.task.blocks(module) if hasattr(self.task, "blocks") else find_blocks(module)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        knobs, fused = self.config.optim, self.fused or None
        groups = parameter_groups(model, knobs)
        if knobs.name == "sgd":
            return torch.optim.SGD(groups, lr=knobs.lr, momentum=knobs.momentum, fused=fused)
        return torch.optim.AdamW(groups, lr=knobs.lr, betas=knobs.betas, eps=knobs.eps, fused=fused)

    def schedule(self) -> Callable[[torch.optim.Optimizer], None]:
        """set_rate(optimizer), once before each step."""
        knobs, total, steps = self.config.optim, self.config.train.steps, itertools.count()

        def set_rate(optimizer: torch.optim.Optimizer) -> None:
            rate = learning_rate(knobs, min(next(steps), total), total)
            for group in optimizer.param_groups:
                group["lr"] = rate

        return set_rate


@dataclass(frozen=True)
class Loop:
    """What is timed: step(micro_batches) takes one optimizer step of `module`, after prepare(), which is not timed."""

    module: nn.Module
    step: Step
    prepare: Callable[[], object] = lambda: None
    # The two parts of a step by hand, for where they are timed apart.
    backward: Step | None = None
    update: Callable[[], object] | None = None


def shard(module: nn.Module, setup: Setup, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 as its tutorial has it: each block a unit, the last one kept whole between forward and backward."""
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[setup.precision], reduce_dtype=torch.float32)
    blocks = setup.blocks(module)
    for number, block in enumerate(blocks):
        fully_shard(block, mesh=mesh, reshard_after_forward=number < len(blocks) - 1, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=replace(policy, output_dtype=torch.float32))
    return module


def bare(setup: Setup) -> Loop:
    """What an expert writes by hand, for one precision and strategy; it logs nothing."""
    task, world, train = setup.task, setup.world, setup.config.train
    module = model = setup.fresh_model()
    if setup.strategy == "ddp":
        model = DistributedDataParallel(module, gradient_as_bucket_view=True, broadcast_buffers=False)
    elif setup.strategy == "fsdp":
        model = shard(module, setup, world.mesh((world.world_size,), ("shard",)))
    optimizer, set_rate = setup.optimizer(model), setup.schedule()
    autocast: AbstractContextManager[Any] = nullcontext()
    if setup.precision != "fp32" and setup.strategy != "fsdp":
        autocast = torch.autocast(world.device.type, dtype=DTYPES[setup.precision])
    scaler = None
    if setup.precision == "fp16":
        scaler = torch.amp.GradScaler(world.device.type, init_scale=setup.config.precision.scaler.init_scale)

    def backward(micro_batches: Sequence[Any]) -> None:
        for is_last, batch in mark_last(micro_batches):
            if setup.strategy == "fsdp":
                model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            with model.no_sync() if setup.strategy == "ddp" and not is_last else nullcontext():  # type: ignore[operator]
                with autocast:
                    loss = task.loss(model, batch, "mean") / len(micro_batches)
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

    def step(micro_batches: Sequence[Any]) -> None:
        train_step(run, micro_batches)

    return Loop(run.parallel.module, step)


def dist_amp_with_telemetry(setup: Setup, folder: Path) -> Loop:
    """train_step and all figures: TensorBoard, metrics.jsonl, and the console's line to nowhere."""
    run = build_run(setup.config, setup.world, setup.task)
    run.metrics.open(folder, 0, run.config_text)
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115 (for as long as the loop)
    samples, log_every = setup.config.train.micro_batch_size, setup.config.metrics.log_every

    def step(micro_batches: Sequence[Any]) -> None:
        report = train_step(run, micro_batches)
        run.step += 1
        run.metrics.record(report)
        run.data.items += samples * len(micro_batches)  # which its data would have counted
        if (row := run.metrics.read()) is not None:  # as the main job does, a step later
            with redirect_stdout(nowhere):
                run.metrics.write(row, run.config.train.steps)
        if run.step % log_every == 0:
            run.metrics.begin(run.step, run.schedule, run.scaler, run.data)

    return Loop(run.parallel.module, step)


def update_by_hand(setup: Setup, micro_batches: Sequence[Any]) -> Loop:
    """What the bare loop does once the gradients are there, always those of `micro_batches`: unscale, clip, step."""
    loop = bare(setup)
    assert loop.backward is not None
    assert loop.update is not None
    loop.backward(micro_batches)
    gradients = [parameter.grad for parameter in loop.module.parameters()]
    return _update_alone(loop.module, gradients, loop.update)


def update_of_dist_amp(setup: Setup, micro_batches: Sequence[Any]) -> Loop:
    """What train_step does instead, with the same gradients."""
    by_hand = bare(setup)
    assert by_hand.backward is not None
    by_hand.backward(micro_batches)
    gradients = [parameter.grad for parameter in by_hand.module.parameters()]
    run = build_run(setup.config, setup.world, setup.task)
    return _update_alone(run.parallel.module, gradients, lambda: update(run))


def update(run: Run) -> None:
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


def _update_alone(module: nn.Module, gradients: Sequence[Tensor | None], update: Callable[[], object]) -> Loop:
    def prepare() -> None:
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone() if gradient is not None else None

    return Loop(module, lambda _: update(), prepare)
