"""A run: everything that training needs, assembled from one config; for the main job, scripts and notebooks alike."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
import torch
from torch import nn

from dist_amp import config as settings
from dist_amp.blocks import CompileConfig, check_compile, prepare_blocks
from dist_amp.checkpoint import CheckpointConfig, load
from dist_amp.config import Range
from dist_amp.data import Batches, DataConfig, build_batches, build_split, build_validation
from dist_amp.metrics import Metrics, MetricsConfig
from dist_amp.optim import Clip, OptimConfig, Optimizer
from dist_amp.parallel import (
    Parallel,
    ParallelConfig,
    build_parallel,
    check_parallel,
    find_blocks,
    pick_strategy,
)
from dist_amp.precision import Precision, PrecisionConfig, build_precision
from dist_amp.resume import check_config, to_resume
from dist_amp.runtime import RunConfig, World, locate, run_folder, seed_all, set_determinism
from dist_amp.step import Count, EvalConfig, TrainConfig, accumulation_steps
from dist_amp.task import Task, TaskConfig, args_dataclass, build_task, find_task

ALIASES = {"use_amp": "precision.use_amp"}


@dataclass(frozen=True)
class DebugConfig:
    check_every: Count | Literal["off"] = 100
    """Steps between looks at whether the ranks still hold the same model and read different data; see checks.py."""
    detect_anomaly: bool = False
    """Stop at the operation whose backward makes a nan, with its forward's stack; several times slower."""
    nonfinite: Literal["log", "step", "off"] = "log"
    """When to replay a skipped step and name its first module with an inf or nan. log: at log steps; step:
    after every step, with the parameters exactly as they were, for a host read each; off."""
    numerics: bool = False
    """At log steps, measure the gradients that become zero in fp16 (two more micro-batches) and the updates lost to
    rounding (a copy of the parameters), per group of parameters."""
    profile: Count | Literal["off"] = "off"
    """How many steps torch.profiler records, once this process has warmed up: a trace and a table; see profiling.py."""
    memory_snapshot: bool = False
    """On GPUs, keep the history of allocations, and write it after the profiled steps and when memory runs out."""
    ranks: tuple[Annotated[int, Range(low=0)], ...] | Literal["all"] = "all"
    """The ranks that profile and write memory snapshots, as 0 3; or all."""

    def chosen(self, rank: int) -> bool:
        """Whether this is one of `ranks`."""
        return self.ranks == "all" or rank in self.ranks


@dataclass(frozen=True)
class Config:
    """One run. Each section is defined in the file that it configures."""

    run: RunConfig = field(default_factory=RunConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)


def schema(target: str) -> type[Config]:
    """Config, with the constructor arguments of the task that `target` names as the fields of task.args."""
    return _schema(target, args_dataclass(find_task(target)))


@cache  # so that two configs of one task are of one type, and compare
def _schema(target: str, args: type) -> type[Config]:
    about_task = [("target", str, field(default=target)), ("args", args, field(default_factory=args))]
    task = make_dataclass("TaskConfig", about_task, bases=(TaskConfig,), frozen=True)
    doc = {"__doc__": Config.__doc__}
    section = ("task", task, field(default_factory=task))
    return make_dataclass("Config", [section], bases=(Config,), frozen=True, namespace=doc)


def load_config(argv: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Config:
    """The config of a command line, with its `--config` files and the environment under it.

    Errors: ConfigError for what is unknown, mistyped or out of range, and for a task that can't be found.
    """
    given = settings.collect(argv, environ, ALIASES)
    return settings.build(schema(_target(given)), given)


def show_help(argv: Sequence[str], prog: str, description: str) -> str:
    """The text of --help, with the arguments of the task that `argv` names."""
    words = [word for word in argv if word not in ("-h", "--help")]
    return settings.show_help(schema(_target(settings.collect(words, aliases=ALIASES))), prog, description)


def _target(given: settings.Settings) -> str:
    words = given["task.target"].words if "task.target" in given else (TaskConfig.target,)
    return words[0] if words else ""


def defaults_of(config: Config) -> str:
    """The same task's config with nothing set, as TOML; "" where the task has arguments that must be."""
    try:
        return to_toml(type(config)())
    except TypeError:
        return ""


def to_toml(config: Config) -> str:
    """The config as TOML that `--config` reads back."""

    def plain(value: Any) -> Any:
        if is_dataclass(value):
            inside = {item.name: plain(getattr(value, item.name)) for item in fields(value)}
            return {name: part for name, part in inside.items() if part is not None}  # TOML has no null
        if isinstance(value, tuple | list):
            return [plain(part) for part in value]
        return str(value) if isinstance(value, Path) else value

    return tomli_w.dumps(plain(config))


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
    parallel = build_parallel(config.parallel, strategy, module, blocks, precision, world)
    optimizer = Optimizer(config.optim, _clip(config.train), parallel.model, config.train.steps, parallel.state_device)
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
        load(run, resume)
        run.resumed_from_step, run.resumed_from = run.step, resume
    return run


def _clip(config: TrainConfig) -> Clip:
    return Clip(config.clip_by, config.max_grad_value if config.clip_by == "value" else config.max_grad_norm)
