"""Guards: what keeps a run from ending badly: nodes that are alike, one live run per folder, no orphans, enough disk.

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
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dist_amp.checkpoint.compatibility import flat
from dist_amp.checkpoint.format import MANIFEST, all_checkpoints
from dist_amp.config.task_class import find_task
from dist_amp.errors import ConfigError, Failure
from dist_amp.run import Run
from dist_amp.runtime.files import appears
from dist_amp.runtime.process import attempt, die_with_parent
from dist_amp.settings import Config
from dist_amp.world import World

# What each machine may have its own of, out of resume's FREE_TO_CHANGE; the others there say who waits for whom, or
# how much data there is.
OWN_TO_A_MACHINE = ("data.path", "data.workers")

LOCK_SECONDS = 10.0  # a run that was just killed may take so long to be gone


def die_with_torchrun() -> None:
    """Be stopped by SIGTERM when torchrun is killed: so a rank saves and leaves, and none runs on unwatched."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGTERM)


def check_restarts() -> None:
    """Errors: ConfigError where torchrun would restart with a store that still holds dead workers' addresses.

    Measured with torch 2.13: without the variable 1 restart of 10 succeeded, with it 10 of 10.
    """
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    ):
        raise ConfigError(
            f"torchrun --max-restarts={os.environ['TORCHELASTIC_MAX_RESTARTS']} would restart into a store that holds "
            "addresses of dead workers, and hang; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in torchrun's environment"
        )


def check_ranks_alike(target: str, config_text: str, world: World) -> None:
    """Errors: ConfigError where ranks were started with other code, versions or settings, with what each node has.

    target: the task's class; config_text: the config as TOML. A digest travels first, the rest only where the digests
    differ. Of the code, the package's files and the task's own are compared, not what else the task imports.
    """
    if world.world_size == 1:
        return
    settings = flat(config_text)
    settings |= {key: "given" for key in OWN_TO_A_MACHINE if settings[key] != "off"}
    mine = {"host": platform.node(), "has": code_of(target) | versions() | settings}
    text = json.dumps(mine["has"], sort_keys=True)
    if len(set(world.gather_texts(hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return
    ranks = [json.loads(told) for told in world.gather_texts(json.dumps(mine))]
    names = list(dict.fromkeys(name for rank in ranks for name in rank["has"]))  # as they came: code, versions, keys
    told = [text for name in names if (text := _difference(name, ranks))]
    more = f"; and {len(told) - 8} more" if len(told) > 8 else ""
    raise ConfigError(
        f"the ranks are not alike: {'; '.join(told[:8])}{more}; start all of them with the same code, versions and "
        "settings (environment, config files)"
    )


def _difference(name: str, ranks: list[dict[str, Any]]) -> str:
    """Each value with the ranks that have it, told by the first one and its host; "" where all have the same."""
    owners: dict[str, list[int]] = {}
    for number, rank in enumerate(ranks):
        owners.setdefault(str(rank["has"].get(name, "absent")), []).append(number)
    if len(owners) == 1:
        return ""
    whose = {
        value: f"rank {own[0]} ({ranks[own[0]]['host']})" + (f" and {len(own) - 1} more" if len(own) > 1 else "")
        for value, own in owners.items()
    }
    return f"{name} is " + ", ".join(f"{value} on {who}" for value, who in list(whose.items())[:4])


def code_of(target: str) -> dict[str, str]:
    """A hash of each file of the package, hidden ones (an editor's, a notebook's) left out, and of the task's."""
    package = Path(__file__).parent.parent
    paths = {path.relative_to(package): path for path in sorted(package.rglob("*.py"))}
    files = {f"dist_amp/{name.as_posix()}": path for name, path in paths.items() if "/." not in f"/{name.as_posix()}"}
    task = Path(getattr(sys.modules[find_task(target).__module__], "__file__", None) or __file__)
    if not task.is_relative_to(package):
        files[task.name] = task
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:8] for name, path in files.items()}


def versions() -> dict[str, str]:
    """Of what computes, and orders the data; of Python without the patch level, which mends and changes neither."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"python": python, "torch": torch.__version__, "datasets": version("datasets")}


@contextmanager
def only_live_run(folder: Path, world: World) -> Iterator[None]:
    """Hold the run's folder for this run. Errors: Failure naming the process that holds it already.

    A lock of the kernel's, so that a dead run leaves none; of the process, so that loader workers don't inherit it.
    """
    file, trouble = None, ""
    if world.is_main:
        file = (folder / ".lock").open("a+")
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):  # this disk has no locks
                    world.warn(f"run.dir={folder} can't be locked ({error.strerror}): start no second run in it")
                    break
                if time.monotonic() > deadline:
                    holder = (folder / ".lock").read_text().strip() or "another process"
                    trouble = f"run.dir={folder} is in use by a live run ({holder}); stop that one, or choose another"
                    break
                time.sleep(0.2)
    if trouble := world.from_main(trouble):
        raise Failure(trouble)
    if file is not None:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
    try:
        yield
    finally:
        if file is not None:
            file.close()


def check_free_space(run: Run) -> None:
    """Errors: Failure where the checkpoints to come do not fit on the disk."""
    if run.config.checkpoint.every == "off":
        return
    tensors = [*run.parallel.module.state_dict().values(), *tree_leaves(dict(run.optimizer.state))]
    size = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
    most = run.config.checkpoint.keep + 2  # the best one, and the one that is being written
    there = len(all_checkpoints(run.folder))
    to_come = math.ceil((run.config.train.steps - run.step) / run.config.checkpoint.every)
    needed, trouble = size * min(max(most - there, 1), to_come), ""
    if run.world.is_main and needed > (free := shutil.disk_usage(run.folder).free):
        trouble = (
            f"run.dir={run.folder} has {free / 2**30:.2f} GiB free, and its checkpoints need {needed / 2**30:.2f} GiB "
            f"({most} of {size / 2**30:.2f} GiB at most, {there} are there); free some, or lower checkpoint.keep"
        )
    if trouble := run.world.from_main(trouble):
        raise Failure(trouble)


def make_folder(folder: Path, config: Config, world: World) -> None:
    """Errors: Failure where the folder can't be written; ConfigError where it holds a run that is not to be resumed."""
    if world.is_main:
        if config.run.resume == "never" and all_checkpoints(folder) and not attempt():
            raise ConfigError(f"run.dir={folder} holds a run already; choose another, or go on with run.resume=auto")
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
