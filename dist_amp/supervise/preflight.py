"""Checks before the first step: launch settings, a usable and unused folder, enough disk space."""

import inspect
import math
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path

from torch import Tensor
from torch.utils._pytree import tree_leaves

from dist_amp.checkpoint.format import MANIFEST, all_checkpoints
from dist_amp.config.memory import size_text, tensor_bytes
from dist_amp.config.task_class import INJECTED
from dist_amp.distributed.process import LAUNCHER, attempt, environment_number
from dist_amp.errors import ConfigError, Failure
from dist_amp.files import InUse, appears, only_process
from dist_amp.run import Run
from dist_amp.settings import Config, DataConfig
from dist_amp.world import World

# Besides checkpoint.keep checkpoints, the folder holds the best one and the one being written.
EXTRA_CHECKPOINTS = 2

LOCK_SECONDS = 10.0  # a run that was just killed may take this long to release its folder

# Keys of the data section that the loader reads; the other keys are for a task's build_dataset.
LOADER_KEYS = ("sources", "group_by_length", "on_bad_sample", "workers", "shuffle", "drop_last")


def check_launch() -> None:
    """Check how torchrun was started. Raises ConfigError; Failure if it or a machine is gone."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ConfigError(
            f"torchrun --max-restarts={restarts} would restart into a store that holds addresses "
            "of dead workers, and hang; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its "
            "environment, and use --standalone or --rdzv-backend=c10d"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        try:
            os.kill(environment_number(LAUNCHER, os.getpid()), 0)  # 0: only checks that it exists
        except ProcessLookupError:
            raise Failure(
                f"the launcher (process {os.environ[LAUNCHER]}) is gone; start it again"
            ) from None
    machines = environment_number("GROUP_WORLD_SIZE", 1)
    nnodes = os.environ.get("DIST_AMP_NNODES", "1")  # set by `dist_amp launch`
    if LAUNCHER in os.environ and machines < int(nnodes.partition(":")[0]):
        raise Failure(
            f"torchrun has lost all but {machines} of --nnodes={nnodes} machines "
            "while they joined; synchronise their clocks, and start again"
        )


def make_folder(folder: Path, config: Config, world: World) -> None:
    """Create the run's folder, or check that the run may use it. Raises Failure, ConfigError."""
    if world.is_main:
        if config.run.resume == "never" and all_checkpoints(folder) and not attempt():
            raise ConfigError(
                f"run.dir={folder} holds a run already; choose another, or use run.resume=auto"
            )
        if (folder / MANIFEST).exists():
            raise ConfigError(
                f"run.dir={folder} is a checkpoint; name a run's folder, and give this one as "
                "run.resume"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".lock").touch()  # fails on a read-only disk
        except OSError as error:
            reason = f"can't be written ({error.strerror}); choose another with --run.dir"
            raise Failure(f"run.dir={folder} {reason}") from error
    world.barrier()
    is_missing = config.checkpoint.every != "off" and not appears(folder)
    where = f"run.dir={folder} does not exist on {platform.node()}"
    missing = Failure(f"{where}: put it on a disk that all ranks share")
    world.raise_first(missing if is_missing else None)


@contextmanager
def only_live_run(folder: Path, world: World) -> Iterator[None]:
    """Lock the run's folder for a with-block. Raises Failure with the process that holds it."""
    with ExitStack() as locks:
        problem: Failure | None = None
        if world.is_main:
            try:
                locks.enter_context(only_process(folder / ".lock", LOCK_SECONDS))
            except InUse as error:
                problem = Failure(
                    f"run.dir={folder} is in use by a live run ({error}); stop that one, or "
                    "choose another"
                )
            except OSError as error:  # the disk does not support locks
                world.warn(
                    f"run.dir={folder} can't be locked ({error.strerror}): don't start a second "
                    "run in it"
                )
        world.raise_first(problem)
        yield


def check_free_space(run: Run) -> None:
    """Raises Failure if this run's checkpoints will not fit on the disk."""
    if run.config.checkpoint.every == "off":
        return
    # The model, and AdamW's two moments, which do not exist before the first step.
    states = [run.parallel.module.state_dict(), 2 * run.parallel.parameters]
    size = tensor_bytes(leaf for leaf in tree_leaves(states) if isinstance(leaf, Tensor))
    limit = run.config.checkpoint.keep + EXTRA_CHECKPOINTS
    existing = len(all_checkpoints(run.folder))
    remaining = math.ceil((run.config.train.steps - run.step) / run.config.checkpoint.every)
    needed = size * min(max(limit - existing, 1), remaining)
    problem: Failure | None = None  # rank 0 decides: on a network disk ranks may see other sizes
    if run.world.is_main and needed > (free := shutil.disk_usage(run.folder).free):
        problem = Failure(
            f"run.dir={run.folder} has {size_text(free)} free, and its checkpoints need "
            f"{size_text(needed)} ({limit} of {size_text(size)} at most, {existing} exist); free "
            "some, or lower checkpoint.keep"
        )
    run.world.raise_first(problem)


def warn_about_unread_settings(run: Run) -> None:
    """Warn of data settings without effect, if the task's constructor does not take `data`."""
    if INJECTED in inspect.signature(type(run.task)).parameters:
        return
    data = run.config.data
    changed = [item.name for item in fields(DataConfig) if getattr(data, item.name) != item.default]
    unread = [f"data.{name}={getattr(data, name)}" for name in changed if name not in LOADER_KEYS]
    unread += [f"data.sources.{name}" for name in data.sources]
    if unread:
        run.world.warn(
            f"{', '.join(unread)}: nothing reads this, because {type(run.task).__name__}'s "
            "constructor has no parameter `data`; add one and use it in build_dataset "
            "(docs/data.md), or remove the setting"
        )
