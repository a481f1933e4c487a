"""`build_run` assembles a run from a config: model, optimizer, data, scaler, metrics, saver.

The train command and scripts use it. A custom loop calls `train_step` and `ScriptRun`'s methods.
"""

import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dist_amp.checkpoint.format import checkpoint_folder
from dist_amp.checkpoint.resume import resume, with_dtype
from dist_amp.checkpoint.saver import Saver
from dist_amp.config.auto import pick_cast, pick_reduction, pick_strategy
from dist_amp.config.load import load_config, with_task
from dist_amp.config.task_class import build_task
from dist_amp.config.validate import check_parallel
from dist_amp.data import Batches, build_batches, build_validation
from dist_amp.distributed.process import (
    random_state,
    seed_all,
    set_determinism,
    set_random_state,
    set_tf32,
)
from dist_amp.errors import ConfigError
from dist_amp.files import present
from dist_amp.optim import Schedule, build_optimizer
from dist_amp.parallel import Parallel, build_parallel
from dist_amp.precision import Clip, Precision, Scaler, build_precision
from dist_amp.settings import Config, RunConfig
from dist_amp.step import Run, evaluate
from dist_amp.task import Task, build_split
from dist_amp.telemetry.metrics import Metrics
from dist_amp.telemetry.observer import Observers
from dist_amp.world import World, locate

__all__ = ["Run", "ScriptRun", "build_run", "load_config"]


class ScriptRun(Run):
    """A run with methods for a custom loop; every rank must call them at the same step."""

    saver: Saver  # `build_run` sets this and set_switches
    _is_fitting = False  # stays True after an error
    set_switches: Callable[[], None]  # sets torch's process-wide flags as this run needs them
    _loop_state: Any = None  # (step, position in the data, random state) after `resume` or a fit

    def resume(self) -> Path | None:
        """Restore the newest valid checkpoint that `run.resume` allows; None if there is none.

        Raises ConfigError after the first step; DataError as for `checkpoint_to_resume`.
        """
        if self.step:
            raise ConfigError(
                f"resume() was called after step {self.step}; call it before the first step, or "
                "build the run again"
            )
        self._check_local("resume()")
        self.data.close()
        path = resume(self)
        if path is not None:
            self.world.say(f"run    resumed from {path}")
        self._keep_loop_state()
        return path

    def _check_local(self, call: str) -> None:
        if "://" in self.config.run.dir:
            raise ConfigError(
                f"{call} does not support run.dir={self.config.run.dir}: only the train command "
                "and fit(run) keep a run on object storage; use one of them, or a local run.dir"
            )

    def _keep_loop_state(self) -> None:
        self._loop_state = (self.step, self.data.position, random_state(self.world.device))

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """The context of `train.fit`. At step 0 it resumes. At later steps it restores the data
        position and random state of the last fit, which a notebook may have changed since.

        Raises ConfigError if an error ended an earlier fit.
        """
        if self._is_fitting:
            raise ConfigError(
                f"fit(run): an error ended this run after step {self.step} or during the next one, "
                "or another thread is training it; build the run again, and fit(run) resumes it"
            )
        self.set_switches()  # another run may have changed them
        self._is_fitting = True
        self.observers.begin(self)
        self.model.train()
        self.data.close()
        if not self.step:
            self.data.position = 0
            seed_all(self.config.run.seed + 1 + self.world.rank)
            resume(self)
        elif self._loop_state is not None and self._loop_state[0] == self.step:
            _, self.data.position, random = self._loop_state
            set_random_state(random, self.world.device)
        # Keep the sums of the unfinished log interval, but not its throughput: the clock restarts.
        interval = self.world.stack(self.metrics.unfinished_sums(self.data))
        self.metrics.resume_unfinished(interval, same_world=True)
        self.data.items = 0
        self.data.tokens = 0
        yield
        self._keep_loop_state()
        self._is_fitting = False

    def evaluate(self) -> dict[str, float]:
        """The validation loss and the task's metrics over `eval.batches`; see `step.evaluate`.

        Calls the task's on_evaluation. A checkpoint of this step will contain the results. Errors:
        ConfigError without validation samples.
        """
        if self.validation is None:
            raise ConfigError(
                f"evaluate() has no validation samples: eval.every is {self.config.eval.every}; it "
                "must be a number of steps, and the task's build_dataset('validation') must return "
                "samples"
            )
        from dist_amp.optimizers.groups import call_on_evaluation

        values = evaluate(self)
        cause = self.metrics.write_evaluation(self.step, values, partial(call_on_evaluation, self))
        if cause:
            self.world.say(f"the task's {cause}; the caller of evaluate() must end the loop")
        return values

    def save(self, wait: bool = True) -> Path:
        """Write a checkpoint of this step into the run's folder; returns its path. Raises Failure.

        wait=False, with checkpoint.async_save: return at once; the next save() or close() waits.
        """
        self._check_local("save()")
        self.saver.save(wait)
        from dist_amp.optimizers.groups import check_formula

        check_formula(self.schedule, self.step)  # the task's schedule(step) must stay the same
        return checkpoint_folder(self.folder, self.step)

    def close(self) -> None:
        """Wait until a pending checkpoint is written; end the loader's workers; close files."""
        self.saver.finish()
        self.data.close()
        self.metrics.close_files()


def build_run(
    config: Config, world: World | None = None, task: Task | None = None, resumes: bool = False
) -> ScriptRun:
    """Assemble a run at step 0, without writing to disk; `ScriptRun.resume` loads a checkpoint.

    world: from `world.start`; default: from `world.locate`. task: an object, used instead of
    `task.target`. resumes: a checkpoint is loaded next, so weights that it fills may be left
    uninitialised.
    """
    world = locate(config.run) if world is None else world
    if task is not None:
        config = with_task(config, task)
    folder = run_folder(config.run, world)
    original = config = with_dtype(config, folder, world)  # replaces precision.dtype=auto
    if config.parallel.bit_exact:
        from dist_amp.bit_exact import exact_config, exact_parallel

        config = exact_config(config, world)
    set_switches(config)
    task = build_task(config) if task is None else task

    seed_all(config.run.seed)  # the same initial weights on all ranks
    module = initial_module(config, task, world, resumes)
    try:
        layout = lay_out(config, task, module, world)
        if hasattr(task, "load"):
            from dist_amp.scaling.meta import load_parameters

            load_parameters(task, module, world, resumes)
    except Exception as error:
        vars(error)["module"] = module  # out of memory: supervise/explain.py reports its size
        raise
    run = assemble(config, world, task, folder, layout)
    run.config = original  # without exact_config's changes: a resume may switch bit_exact off
    with world.clock.phase("data"):
        run.data, run.validation = build_data(config, task, world, folder)
    if run.data.bad_samples is not None:
        run.observers.add(run.data.bad_samples, stays=True)
    seed_all(config.run.seed + 1 + world.rank)  # different dropout on every rank
    if config.parallel.bit_exact:
        run.parallel = exact_parallel(run)
    if any(not p.requires_grad for p in run.parallel.module.parameters()):  # as LoRA's base
        from dist_amp.scaling.frozen import FrozenBase

        run.observers.add(FrozenBase(run.parallel.module, world, run.parallel.replicas), stays=True)
    run.saver = Saver(run)
    if hasattr(task, "state_dict") or hasattr(task, "load_state_dict"):  # TaskState needs both
        from dist_amp.checkpoint.packed import TaskState

        run.observers.add(TaskState(task), stays=True)
    run.set_switches = partial(set_switches, config)
    return run


def set_switches(config: Config) -> None:
    set_determinism(config.run.deterministic)
    set_tf32(config.precision.tf32)
    torch.autograd.set_detect_anomaly(config.debug.detect_anomaly)


def assemble(
    config: Config, world: World, task: Task, folder: Path, layout: tuple[Precision, Parallel]
) -> ScriptRun:
    """A run at step 0 that has no data yet. layout: from `lay_out`."""
    precision, parallel = layout
    seed_all(config.run.seed)  # again, because rank 0 alone may have drawn initial weights
    scaler = Scaler(config.precision.scaler, precision.name == "fp16", parallel.state_device)
    optimizer = build_optimizer(parallel.module, config.optim, task, world.say)
    observers = Observers()
    if config.optim.ema != "off":
        from dist_amp.optimizers.ema import Ema

        observers.add(Ema(parallel.module, config.optim.ema, world.say), stays=True)
    schedule = Schedule(config.optim, optimizer, config.train.steps, parallel.state_device, task)
    train = config.train
    limit = train.max_grad_value if train.clip_by == "value" else train.max_grad_norm
    clip = Clip(train.clip_by, limit)
    metrics = Metrics(world, clip, observers)
    if config.parallel.bit_exact:
        from dist_amp.bit_exact import ExactMetrics

        metrics = ExactMetrics(world, clip, observers)
    return ScriptRun(
        config=config,
        world=world,
        folder=folder,
        task=task,
        precision=precision,
        parallel=parallel,
        scaler=scaler,
        clip=clip,
        optimizer=optimizer,
        schedule=schedule,
        data=None,  # type: ignore[arg-type]  # set by build_run
        validation=None,
        metrics=metrics,
        observers=observers,
    )


def initial_module(config: Config, task: Task, world: World, resumes: bool) -> nn.Module:
    """The task's model in training mode and float32; on the meta device if it is filled later."""
    strategy = config.parallel.strategy
    may_shard = strategy in ("fsdp", "hsdp") or (strategy == "auto" and world.device.type == "cuda")
    from dist_amp.scaling.meta import build_module, build_on_ranks

    if world.world_size > 1 and may_shard and not hasattr(task, "load"):
        module = build_on_ranks(task, world, resumes)
    else:
        module = build_module(task)
    in_eval_mode = [(name, part) for name, part in module.named_modules() if not part.training]
    module.train()
    switched = [name for name, part in in_eval_mode if part.training]
    if switched and switched[0]:  # "" is the root: libraries return models in evaluation mode
        world.say(
            f"module {switched[0]} is put into training mode, as in any training loop; to keep its "
            "batch statistics fixed, or dropout off, override its train() (docs/recipes.md)"
        )
    from dist_amp.scaling.float32 import to_float32

    if message := to_float32(module, frozen_too=not config.precision.use_amp):
        world.say(message)
    return module


def lay_out(
    config: Config, task: Task, module: nn.Module, world: World
) -> tuple[Precision, Parallel]:
    """Compile the module and place it on the ranks; meta parameters get uninitialised memory."""
    strategy = pick_strategy(config.parallel, module, world)
    sharded = strategy in ("fsdp", "hsdp")
    if sharded and world.device.type == "cuda":
        config = replace(config, parallel=pick_reduction(config.parallel, module, world))
    precision_config = pick_cast(config.precision, strategy, module, world)
    check_parallel(config.parallel, strategy, precision_config, module, world)
    precision = build_precision(precision_config, sharded or config.parallel.bit_exact, world)
    if config.precision.dtype == "fp8":
        from dist_amp.scaling.float8 import to_float8

        to_float8(config, task, module, world)
    blocks: list[nn.Module] = []  # the repeated layers
    units: list[nn.Module] = []  # what FSDP2 gathers one by one: the blocks, untied embeddings
    compile_config = replace(config.compile, blocks=False)
    if config.compile.blocks and present("scaling.compile"):
        from dist_amp.scaling.compile import pick_compile

        compile_config = pick_compile(config, strategy, task, module, world)
    recomputes = config.parallel.activation_checkpointing != "none"
    if sharded or config.parallel.bit_exact or compile_config.blocks or recomputes:
        from dist_amp.scaling.blocks import pick_blocks, units_of

        blocks = pick_blocks(strategy, task, module, world)
        units = units_of(task, module, blocks)
    # These two wrap the blocks' forwards; FSDP2 comes later, because its hooks must be outermost.
    if recomputes:
        from dist_amp.scaling.activation_checkpointing import checkpoint_activations

        checkpoint_activations(config.parallel.activation_checkpointing, blocks)
    if compile_config.blocks:
        from dist_amp.scaling.compile import compile_blocks

        compile_blocks(compile_config, module, blocks, world)
    parallel = build_parallel(config.parallel, strategy, module, units, precision, world)
    if sharded and present("scaling.hooks"):
        from dist_amp.scaling.hooks import hook_units

        hook_units(module, units, world)  # times FSDP2's waits, and detects wrong uses
    if config.parallel.bit_exact and not sharded:
        from dist_amp.bit_exact import join_inputs

        join_inputs(units)
    return precision, parallel


def build_data(
    config: Config, task: Task, world: World, folder: Path
) -> tuple[Batches, Batches | None]:
    """Returns (training batches, validation batches or None)."""
    deal = None  # None: loading/plan.py divides a step's samples into micro-batches
    if config.parallel.bit_exact:
        from dist_amp.bit_exact import deal_in_order

        deal = deal_in_order
    bad_samples = None
    if config.data.most_bad_samples:
        from dist_amp.loading.bad_samples import BadSamples

        bad_samples = BadSamples(world, folder, config.data.most_bad_samples)
    dataset = build_split(task, "train", world)
    data = build_batches(config, task, dataset, world, deal, bad_samples)
    if bad_samples is not None:
        bad_samples.follow(data)
    held_out = build_split(task, "validation", world) if config.eval.every != "off" else None
    return data, build_validation(task, held_out, config.data.workers, world, data)


def run_folder(config: RunConfig, world: World) -> Path:
    """The run's folder, the same on every rank; auto: also the same after a restart by torchrun."""
    if not config.dir:
        raise ConfigError("run.dir is empty; give a folder's path, or auto")
    if "://" in config.dir:
        from dist_amp.storage.mirror import local_folder

        return local_folder(config.dir)
    if config.dir != "auto":
        return Path(config.dir)
    name = hashlib.sha256(_launch_id().encode()).hexdigest()[:6]
    existing = sorted(Path("runs").glob(f"*-{name}"))
    new = Path("runs") / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{name}"
    return Path(world.from_main(str(existing[-1] if existing else new)))


def _launch_id() -> str:
    """Identifies a launch, and stays the same over restarts: torchrun's process id and start."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return f"{socket.gethostname()} {os.getpid()} {time.time_ns()}"
    agent = os.getppid()
    started = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]  # proc(5)
    return f"{os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {agent} {started}"
