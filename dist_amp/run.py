"""A run: everything that training needs, assembled from one config; for the main job, scripts and notebooks."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dist_amp.checkpoint.compatibility import check_config
from dist_amp.checkpoint.frozen import FrozenBase
from dist_amp.checkpoint.resume import checkpoint_to_resume
from dist_amp.checkpoint.state import load
from dist_amp.config.auto import pick_blocks, pick_cast, pick_strategy, units_of
from dist_amp.config.load import defaults_of, load_config, to_toml
from dist_amp.config.task_class import build_split, build_task, check_model, find_task
from dist_amp.config.validate import accumulation_steps, check_parallel
from dist_amp.data import Batches, build_batches, build_validation
from dist_amp.errors import error_context
from dist_amp.fast.compile import check_compile, prepare_blocks
from dist_amp.optim import Schedule, build_optimizer
from dist_amp.optimizers.ema import Ema
from dist_amp.parallel import LossNormalizer, Parallel, build_parallel
from dist_amp.precision import Clip, Precision, Scaler, build_precision
from dist_amp.runtime.initial_weights import build_on_ranks
from dist_amp.runtime.meta import load_parameters
from dist_amp.runtime.parameter_dtype import to_float32
from dist_amp.runtime.process import set_determinism
from dist_amp.runtime.random_state import seed_all
from dist_amp.runtime.run_folder import run_folder
from dist_amp.settings import Config, Strategy
from dist_amp.task import Task
from dist_amp.telemetry.metrics import Metrics
from dist_amp.world import World, locate

__all__ = ["Run", "build_run", "load_config"]


@dataclass
class Run:
    """Everything that one run needs; `step` counts the steps taken, applied or skipped."""

    config: Config
    world: World
    folder: Path
    task: Task
    precision: Precision
    parallel: Parallel
    frozen: FrozenBase
    normalizer: LossNormalizer
    scaler: Scaler
    clip: Clip
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    data: Batches
    validation: Batches | None
    metrics: Metrics
    step: int = 0
    resumed_from_step: int | None = None
    resumed_from: Path | None = None

    @property
    def config_text(self) -> str:
        return to_toml(self.config)

    @property
    def model(self) -> nn.Module:
        """The model to call: wrapped or sharded."""
        return self.parallel.model


def build_run(config: Config, world: World | None = None, task: Task | None = None) -> Run:
    """Assemble a run, resumed if there is something to resume; it writes nothing to disk.

    world: from `world.start`; without one, the process group that exists already, or this process alone.
    task: an object in place of `task.target`.
    """
    world = locate(config.run) if world is None else world
    set_determinism(config.run.deterministic)
    torch.autograd.set_detect_anomaly(config.debug.detect_anomaly)
    micro_batches = accumulation_steps(config.train, world.world_size)
    folder = run_folder(config.run, world)
    checkpoint = checkpoint_to_resume(config.run.resume, folder, world)
    if checkpoint is not None:
        samples = config.train.micro_batch_size * micro_batches * world.world_size
        own_schedule = hasattr(task or find_task(config.task.target), "schedule")
        check_config(checkpoint, to_toml(config), samples, world, defaults_of(config), own_schedule)
    task = build_task(config.task, config.data) if task is None else task

    seed_all(config.run.seed)  # the same initial weights everywhere
    precision, parallel = build_model(config, task, world, checkpoint is not None)
    load_parameters(task, parallel.module, world, resumes=checkpoint is not None)
    seed_all(config.run.seed)  # ranks that did not draw the weights are equal to rank 0 again
    scaler = Scaler(config.precision.scaler, precision.name == "fp16", world.device, parallel.state_device)
    with model_context(parallel.module, parallel.strategy):
        optimizer = build_optimizer(parallel.module, config.optim, task, world.say)
        parallel.ema = Ema(parallel.module, config.optim.ema) if config.optim.ema != "off" else None
    schedule = Schedule(config.optim, optimizer, config.train.steps, parallel.state_device, task)
    data, validation = build_data(config, task, micro_batches, world)

    seed_all(config.run.seed + 1 + world.rank)  # other dropout on every rank
    clip = Clip(config.train.clip_by, config.train.clip_limit)
    normalizer, metrics = LossNormalizer(world, parallel.carrier), Metrics(config.metrics, world, clip)
    run = Run(
        config, world, folder, task, precision, parallel, FrozenBase(parallel), normalizer, scaler, clip, optimizer,
        schedule, data, validation, metrics,
    )  # fmt: skip
    if checkpoint is not None:
        with model_context(parallel.module, parallel.strategy):
            load(run, checkpoint)
        run.resumed_from_step, run.resumed_from = run.step, checkpoint
    return run


def model_context(module: nn.Module, strategy: Strategy) -> AbstractContextManager[None]:
    """What an error in this block has to do with: where memory runs out, it says how much the model will take."""
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    parameters = sum(p.numel() for p in module.parameters())
    return error_context(parameters=parameters, trained=trained, strategy=strategy)


def build_model(config: Config, task: Task, world: World, resumes: bool) -> tuple[Precision, Parallel]:
    """The task's model in its precision, laid out over the ranks. resumes: a checkpoint is loaded next."""
    module = build_on_ranks(task, config.parallel.strategy, world, resumes)
    if converted := to_float32(module, frozen_too=not config.precision.use_amp):
        world.say(converted)
    strategy = pick_strategy(config.parallel, module, world)
    check_model(module, strategy)
    cast = pick_cast(config.precision, strategy, module, world)
    check_parallel(config.parallel, strategy, cast, world)
    check_compile(config.compile, strategy, accumulation_steps(config.train, world.world_size), world)
    precision = build_precision(cast, strategy in ("fsdp", "hsdp"), world)
    blocks = pick_blocks(config, strategy, task, module, world)
    prepare_blocks(config.compile, config.parallel.activation_checkpointing, module, blocks, world, task)
    units = units_of(task, module, blocks)
    with model_context(module, strategy):
        return precision, build_parallel(config.parallel, strategy, module, units, precision, world)


def build_data(config: Config, task: Task, micro_batches: int, world: World) -> tuple[Batches, Batches | None]:
    """(training batches, validation batches or None)."""
    size = config.train.micro_batch_size
    data = build_batches(
        config.data, task, build_split(task, "train", world), size, micro_batches, config.run.seed, world
    )
    held_out = build_split(task, "validation", world) if config.eval.every != "off" else None
    return data, build_validation(config.data, task, held_out, size, world)
