"""Checks before the first step: equal ranks, one live run per folder, a usable folder, enough disk, safe restarts.

To delete: this file and its lines in train.py.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from dist_amp.checkpoint.compatibility import flat
from dist_amp.checkpoint.format import MANIFEST, all_checkpoints
from dist_amp.config.task_class import find_task
from dist_amp.errors import ConfigError, Failure
from dist_amp.run import Run
from dist_amp.runtime.environment import environment_number
from dist_amp.runtime.files import appears
from dist_amp.runtime.process import LAUNCHER, attempt, die_with_parent
from dist_amp.settings import Config
from dist_amp.world import World

# Settings that each machine may have its own values of. The others in compatibility.FREE_TO_CHANGE decide which ranks
# wait for which, or how much data there is.
PER_MACHINE = ("data.path", "data.workers")

BESIDES_KEPT = 2  # checkpoints besides the newest ones: the best one, and the one that is being written

LOCK_SECONDS = 10.0  # how long a run that was just killed may take to release its folder


def die_with_torchrun() -> None:
    """Get SIGTERM when torchrun is killed, so that a rank saves and stops instead of running on without it.

    Errors: Failure if `dist_amp launch` was killed before this.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGTERM)
        try:
            os.kill(environment_number(LAUNCHER, os.getpid()), 0)  # 0: only looks whether there is such a process
        except ProcessLookupError:
            raise Failure(f"the launcher (process {os.environ[LAUNCHER]}) is gone; start it again") from None


def check_restarts() -> None:
    """Errors: ConfigError if torchrun would restart with a store that still holds the addresses of dead workers.

    Measured with torch 2.13: without the variable 1 restart of 10 succeeded, with it 10 of 10.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ConfigError(
            f"torchrun --max-restarts={restarts} would restart into a store that holds addresses of dead workers, and "
            "hang; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in torchrun's environment"
        )


def check_ranks_agree(target: str, config_text: str, world: World) -> None:
    """Errors: ConfigError if ranks have different code, versions or settings; it lists each difference with its hosts.

    target: the task's class; config_text: the config as TOML. Ranks exchange a hash first, and the details only if it
    differs. Of the code, the package's files and the task's own file are compared, not what the task imports.
    """
    if world.world_size == 1:
        return
    settings = flat(config_text)
    settings |= {key: "given" for key in PER_MACHINE if settings[key] != "off"}
    mine = code_hashes(target) | versions() | settings
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    if len(set(world.gather_texts(digest))) == 1:
        return
    ranks = [json.loads(text) for text in world.gather_texts(json.dumps([platform.node(), mine]))]
    names = dict.fromkeys(name for _, has in ranks for name in has)  # in their order: code, versions, settings
    found = [text for name in names if (text := _difference(name, ranks))]
    more = f"; and {len(found) - 8} more" if len(found) > 8 else ""
    raise ConfigError(
        f"the ranks differ: {'; '.join(found[:8])}{more}; start all of them with the same code, versions and "
        "settings (environment, config files)"
    )


def _difference(name: str, ranks: list[tuple[str, dict[str, Any]]]) -> str:
    """Each value with the first rank that has it and its host; "" if all ranks have the same value."""
    owners: dict[str, list[int]] = {}
    for rank, (_, has) in enumerate(ranks):
        owners.setdefault(str(has.get(name, "absent")), []).append(rank)
    values = [
        f"{value} on rank {own[0]} ({ranks[own[0]][0]})" + (f" and {len(own) - 1} more" if len(own) > 1 else "")
        for value, own in owners.items()
    ]
    return f"{name} is {', '.join(values[:4])}" if len(values) > 1 else ""


def code_hashes(target: str) -> dict[str, str]:
    """A hash of each file of the package, except hidden ones (of editors and notebooks), and of the task's file."""
    package = Path(__file__).parent.parent
    paths = {path.relative_to(package): path for path in sorted(package.rglob("*.py"))}
    files = {f"dist_amp/{name.as_posix()}": path for name, path in paths.items() if "/." not in f"/{name.as_posix()}"}
    task = Path(getattr(sys.modules[find_task(target).__module__], "__file__", None) or __file__)
    if not task.is_relative_to(package):
        files[task.name] = task
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:8] for name, path in files.items()}


def versions() -> dict[str, str]:
    """The versions that affect results and the order of data; of Python without the patch level, which does not."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"python": python, "torch": torch.__version__, "datasets": version("datasets")}


@contextmanager
def only_live_run(folder: Path, world: World) -> Iterator[None]:
    """Lock the run's folder for the length of the block. Errors: Failure that names the process that holds it.

    A POSIX lock: the kernel releases a dead process's, and loader workers do not inherit it.
    """
    with (folder / ".lock").open("a+") if world.is_main else nullcontext() as file:
        problem = world.from_main(_lock(file, folder, world) if file is not None else "")
        if problem:
            raise Failure(problem)
        if file is not None:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}")
            file.flush()
        yield


def _lock(file: TextIO, folder: Path, world: World) -> str:
    """Lock the file; return what prevents it, or ""."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return ""
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):  # a disk without locks
                world.warn(f"run.dir={folder} can't be locked ({error.strerror}): start no second run in it")
                return ""
        if time.monotonic() > deadline:
            holder = (folder / ".lock").read_text().strip() or "another process"
            return f"run.dir={folder} is in use by a live run ({holder}); stop that one, or choose another"
        time.sleep(0.2)


def check_free_space(run: Run) -> None:
    """Errors: Failure if the checkpoints of this run will not fit on the disk."""
    if run.config.checkpoint.every == "off":
        return
    state = (value for values in run.optimizer.state.values() for value in values.values())
    averages = run.parallel.ema.averages.values() if run.parallel.ema else ()
    values = (*run.parallel.module.state_dict().values(), *state, *averages)
    tensors = [t for t in values if isinstance(t, Tensor)]
    size = sum(t.numel() * t.element_size() for t in tensors)
    most = run.config.checkpoint.keep + BESIDES_KEPT
    existing = len(all_checkpoints(run.folder))
    to_come = math.ceil((run.config.train.steps - run.step) / run.config.checkpoint.every)
    needed, problem = size * min(max(most - existing, 1), to_come), ""
    if run.world.is_main and needed > (free := shutil.disk_usage(run.folder).free):
        problem = (
            f"run.dir={run.folder} has {free / 2**30:.2f} GiB free, and its checkpoints need {needed / 2**30:.2f} GiB "
            f"({most} of {size / 2**30:.2f} GiB at most, {existing} exist); free some, or lower checkpoint.keep"
        )
    if problem := run.world.from_main(problem):
        raise Failure(problem)


def make_folder(folder: Path, config: Config, world: World) -> None:
    """Make the run's folder, or check that it can be used.

    Errors: Failure if it can't be written, or is missing on a rank's machine; ConfigError if it is a checkpoint, or
    holds a run that is not to be resumed.
    """
    if world.is_main:
        if config.run.resume == "never" and all_checkpoints(folder) and not attempt():
            raise ConfigError(f"run.dir={folder} holds a run already; choose another, or use run.resume=auto")
        try:
            if (folder / MANIFEST).exists():
                raise ConfigError(
                    f"run.dir={folder} is a checkpoint; name a run's folder, and give this one as run.resume"
                )
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".writable").touch()
            (folder / ".writable").unlink()
        except OSError as error:
            raise Failure(
                f"run.dir={folder} can't be written ({error.strerror}); choose another with --run.dir"
            ) from error
    world.barrier()
    missing = world.gather_texts("" if config.checkpoint.every == "off" or appears(folder) else platform.node())
    if host := next(filter(None, missing), ""):
        raise Failure(f"run.dir={folder} is not there on {host}: put it on a disk that all ranks share")
