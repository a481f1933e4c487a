"""A run: everything that training needs, assembled from one config; for the main job, scripts and notebooks alike."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dist_amp.checkpoint.compatibility import check_config
from dist_amp.checkpoint.resume import to_resume
from dist_amp.checkpoint.state import load
from dist_amp.config.load import defaults_of, to_toml
from dist_amp.config.task_class import build_task
from dist_amp.config.validate import accumulation_steps, check_parallel
from dist_amp.data import Batches, build_batches, build_split, build_validation
from dist_amp.errors import error_context
from dist_amp.fast.compile import check_compile, prepare_blocks
from dist_amp.optim import Clip, Optimizer
from dist_amp.parallel import Parallel, build_parallel, find_blocks, pick_strategy
from dist_amp.precision import Precision, build_precision
from dist_amp.runtime.process import set_determinism
from dist_amp.runtime.random_state import seed_all
from dist_amp.runtime.run_folder import run_folder
from dist_amp.settings import Config, TrainConfig
from dist_amp.task import Task
from dist_amp.telemetry.metrics import Metrics
from dist_amp.world import World, locate


@dataclass
class Run:
    """All that a step, an evaluation or a checkpoint needs; `step` counts the steps taken."""

    config: Config
    world: World
    folder: Path
    task: Task
    precision: Precision
    parallel: Parallel
    optimizer: Optimizer
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

    world: from `runtime.start`; without one, the process group that is there already, or this process alone.
    task: an object in place of `task.target`.
    """
    world = locate(config.run) if world is None else world
    set_determinism(config.run.deterministic)
    micro_batches = accumulation_steps(config.train, world.world_size)
    folder = run_folder(config.run, world)
    resume = to_resume(config.run.resume, folder, world)
    if resume is not None:
        samples = config.train.micro_batch_size * micro_batches * world.world_size
        check_config(resume, to_toml(config), samples, world, defaults_of(config))
    task = build_task(config.task, config.data) if task is None else task

    seed_all(config.run.seed)  # the same initial weights everywhere
    module = task.build_model()
    if not any(part.training for part in module.modules()):
        module.train()  # as a pretrained model comes: wholly in evaluation mode
    strategy = pick_strategy(config.parallel, module, world)
    check_parallel(config.parallel, strategy, config.precision, world)
    check_compile(config.compile, strategy, micro_batches, world)
    precision = build_precision(config.precision, strategy in ("fsdp", "hsdp"), world)
    blocks = list(task.blocks(module) if hasattr(task, "blocks") else find_blocks(module))
    prepare_blocks(config.compile, config.parallel.activation_checkpointing, module, blocks, world)
    facts = {"parameters": sum(p.numel() for p in module.parameters()), "strategy": strategy}
    with error_context(**facts):
        parallel = build_parallel(config.parallel, strategy, module, blocks, precision, world)
        clip, steps = _clip(config.train), config.train.steps
        optimizer = Optimizer(config.optim, clip, parallel.model, steps, parallel.state_device)
    data = build_batches(
        config.data,
        task,
        build_split(task, "train", world),
        config.train.micro_batch_size,
        micro_batches,
        config.run.seed,
        world,
    )
    held_out = build_split(task, "validation", world) if config.eval.every != "off" else None
    validation = build_validation(config.data, task, held_out, config.train.micro_batch_size, world)

    torch.autograd.set_detect_anomaly(config.debug.detect_anomaly)
    seed_all(config.run.seed + 1 + world.rank)  # other dropout on every rank
    metrics = Metrics(config.metrics, world)
    run = Run(config, world, folder, task, precision, parallel, optimizer, data, validation, metrics)
    if resume is not None:
        with error_context(**facts):
            load(run, resume)
        run.resumed_from_step, run.resumed_from = run.step, resume
    return run


def _clip(config: TrainConfig) -> Clip:
    return Clip(config.clip_by, config.max_grad_value if config.clip_by == "value" else config.max_grad_norm)
