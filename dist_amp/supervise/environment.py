"""RUN/environment.json: command, versions, hosts, git state and variables of each start.

Docs: docs/metrics.md
"""

import importlib.metadata
import importlib.util
import inspect
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dist_amp
from dist_amp.config.text import command_line
from dist_amp.errors import masked
from dist_amp.files import present, write_durably
from dist_amp.run import Run

# What results may depend on.
PACKAGES = ("numpy", "datasets", "tensorboard", "transformers", "peft", "torchao")

# In a diff: texts with names like DB_PASS and MY_KEY, and tokens of known forms under any name.
SECRETS_IN_CODE = re.compile(
    r"((?i:\w*(?:pass|key|token|secret|cred|auth)\w*['\"]?\s*[:=]\s*['\"])|"
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|xox[abp]-|AKIA|ASIA))[^'\"\s]+"
)

DIFF_LETTERS = 100_000  # kept of a diff; more is data rather than code

GIT_SECONDS = 5.0  # assumed: a status takes far less, but a network disk may hang

# Families of which no name holds a secret; of others only these names.
FAMILIES = re.compile(
    "(CUDA|NVIDIA|HIP|HSA|ROCR|NCCL|GLOO|PYTORCH|TORCH|TORCHINDUCTOR|TRITON|OMP|MKL|KMP|PET)_"
)
NAMES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "DIST_AMP_LAUNCHER"),
    *("HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE"),
    *("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_PARTITION", "SLURM_NTASKS"),
    *("SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE", "SLURM_RESTART_COUNT"),
    *("DIST_AMP_PYTHON", "LD_PRELOAD", "MALLOC_CONF", "PYTHONHASHSEED"),
)


def report_environment(run: Run) -> None:
    """Write RUN/environment.json and TensorBoard's text on rank 0; every rank calls it."""
    ranks = run.world.gather(this_rank(run.world.device))
    if not run.world.is_main:
        return
    text = json.dumps(environment(run, ranks), indent=2)
    path = run.folder / "environment.json"
    try:
        write_durably(path, text + "\n")
    except OSError as error:
        run.world.warn(
            f"{path} can't be written ({error.strerror}); TensorBoard's text `start/environment` "
            "has the same"
        )
    run.metrics.write_text("start/environment", text, run.step)


def environment(run: Run, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The environment of rank 0, and that of each host's ranks as `this_rank` describes it."""
    hosts: dict[str, dict[str, Any]] = {}  # ranks that see the same share an entry
    for rank, seen in enumerate(ranks):
        entry = hosts.setdefault(json.dumps(seen), seen | {"ranks": ""})
        entry["ranks"] = f"{entry['ranks']}, {rank}".removeprefix(", ")
    source = source_of(run.task)
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "first_step": run.step + 1,
        "command": command_line(sys.orig_argv),
        "versions": versions(),
        "hosts": list(hosts.values()),
        "git": git_state(code_folder(source)),
        "task": source,
        "variables": variables(os.environ),
    }


def this_rank(device: torch.device) -> dict[str, str]:
    """Facts that may differ between hosts; all ranks of a host have the same."""
    name = f"CPU, {os.cpu_count()} cores"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "host": platform.node(),
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Versions of dist_amp, Python, torch, CUDA and some packages; collect_env takes seconds."""
    python = platform.python_version()
    rows = {"dist_amp": dist_amp.__version__, "python": python, "torch": torch.__version__}
    if torch.cuda.is_available():
        rows |= {"cuda": str(torch.version.cuda), "hip": str(torch.version.hip)}
        rows["cudnn"] = str(torch.backends.cudnn.version())
        if dist.is_nccl_available():
            rows["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        if present("distributed.machine"):
            from dist_amp.distributed.machine import driver_branch

            rows["driver"] = str(driver_branch())
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            rows[package] = importlib.metadata.version(package)
    return rows


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of torch, NCCL, Slurm or a run, without passwords."""
    names = [name for name in environ if FAMILIES.match(name) or name in NAMES]
    return {name: masked(environ[name]) for name in sorted(names)}


def source_of(task: object) -> dict[str, str]:
    """The file of the task's class, and its hash; empty for one that a notebook defines."""
    with suppress(TypeError, OSError):
        path = Path(inspect.getfile(type(task))).resolve()
        return {"file": str(path), "hash": importlib.util.source_hash(path.read_bytes()).hex()}
    return {}


def edited_since(folder: Path, task: object) -> str:
    """The warning that the task's source file has changed since the run was started; or ""."""
    now = source_of(task)
    with suppress(Exception):  # there is none, or it is damaged
        before = json.loads((folder / "environment.json").read_bytes())["task"]
        if now["hash"] != before["hash"]:
            return f"{now['file']} was edited since {folder} was started"
    return ""


def code_folder(source: Mapping[str, str]) -> Path:
    """The folder of the task's source; the current one for a notebook's or an installed task."""
    package = Path(dist_amp.__file__).resolve().parent
    folder = Path(source.get("file", package / "task")).parent
    is_users = not folder.is_relative_to(package) and "site-packages" not in folder.parts
    return folder if is_users else Path.cwd()


def git_state(folder: Path) -> dict[str, Any]:
    """{commit, branch, changed files, new Python files, diff}; empty without git or a commit."""
    quiet = {"stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL, "errors": "replace"}
    git = partial(subprocess.check_output, cwd=folder, timeout=GIT_SECONDS, **quiet)
    # Without locks, so that a commit at this moment succeeds.
    status = ["git", "--no-optional-locks", "status", "--porcelain", "--branch"]
    try:
        commit = git(["git", "rev-parse", "HEAD"]).strip()
        branch, *lines = git(status).splitlines()
    except (OSError, subprocess.SubprocessError):
        return {}
    diff = ""
    with suppress(OSError, subprocess.SubprocessError):  # a large one takes long
        text = git([*status[:2], "diff", "--no-color", "--no-ext-diff", "HEAD"])
        diff = SECRETS_IN_CODE.sub(r"\1***", masked(text))
    files = [line[3:] for line in lines if line[:2] != "??" or line.endswith(".py")]
    return {
        "folder": str(folder),
        "commit": commit,
        "branch": branch[3:].partition("...")[0],
        "dirty": bool(files),
        "changed_files": files[:50],
        "diff": diff[:DIFF_LETTERS],
        "diff_is_cut": len(diff) > DIFF_LETTERS,
    }
