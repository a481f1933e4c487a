"""RUN/environment.json: command, versions, hosts, git state and variables of the latest start.

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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dist_amp
from dist_amp.config.text import command_line
from dist_amp.errors import masked
from dist_amp.files import write_durably
from dist_amp.run import Run

# Packages whose versions are recorded, because results may depend on them.
PACKAGES = ("numpy", "datasets", "tensorboard", "transformers", "peft", "torchao")

# The environment variables to record: none of them holds a secret.
VARIABLES = re.compile(
    r"(CUDA|NVIDIA|HIP|HSA|ROCR|NCCL|GLOO|PYTORCH|TORCH|TORCHINDUCTOR|TRITON|OMP|MKL|KMP|PET)_\w+|"
    r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_(RUN_ID|RESTART_COUNT)|"
    r"HF_(HOME|ENDPOINT|HUB_OFFLINE|DATASETS_CACHE|DATASETS_OFFLINE)|LD_PRELOAD|PYTHONHASHSEED|"
    r"SLURM_(JOB_ID|JOB_NODELIST|NTASKS|CPUS_PER_TASK|RESTART_COUNT)|DIST_AMP_(LAUNCHER|PYTHON)"
)

GIT_SECONDS = 5.0  # timeout. Assumed: git describe takes far less, but a network disk may hang


def report_environment(run: Run) -> None:
    """Write RUN/environment.json and its text to TensorBoard, on rank 0; every rank calls it."""
    ranks = run.world.gather(this_rank(run.world.device))
    if not run.world.is_main:
        return
    text = json.dumps(environment(run, ranks), indent=2)
    write_durably(run.folder / "environment.json", text + "\n")
    run.metrics.write_text("start/environment", text, run.step)


def environment(run: Run, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of environment.json. ranks: the result of `this_rank` on each rank."""
    hosts: dict[str, dict[str, Any]] = {}  # ranks with equal facts share an entry
    for rank, facts in enumerate(ranks):
        entry = hosts.setdefault(json.dumps(facts), facts | {"ranks": ""})
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
    """Facts that may differ between hosts, but are equal on all ranks of a host."""
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
    """Versions of dist_amp, Python, torch, CUDA and PACKAGES; torch's collect_env would be slow."""
    python = platform.python_version()
    rows = {"dist_amp": dist_amp.__version__, "python": python, "torch": torch.__version__}
    if torch.cuda.is_available():
        rows |= {"cuda": str(torch.version.cuda), "hip": str(torch.version.hip)}
        rows["cudnn"] = str(torch.backends.cudnn.version())
        if dist.is_nccl_available():
            rows["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            rows[package] = importlib.metadata.version(package)
    return rows


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    names = sorted(filter(VARIABLES.fullmatch, environ))
    return {name: masked(environ[name]) for name in names}


def source_of(task: object) -> dict[str, str]:
    """The file of the task's class, and the file's hash; {} for a class defined in a notebook."""
    with suppress(TypeError, OSError):
        path = Path(inspect.getfile(type(task))).resolve()
        return {"file": str(path), "hash": importlib.util.source_hash(path.read_bytes()).hex()}
    return {}


def edited_since(folder: Path, task: object) -> str:
    """A warning if the task's source file has changed since the run was last started; else ""."""
    now = source_of(task)
    with suppress(Exception):  # environment.json is missing or damaged
        before = json.loads((folder / "environment.json").read_bytes())["task"]
        if now["hash"] != before["hash"]:
            return f"{now['file']} was edited since {folder} was started"
    return ""


def code_folder(source: Mapping[str, str]) -> Path:
    """The folder of the task's source; for a notebook's or an installed task the current folder."""
    package = Path(dist_amp.__file__).resolve().parent
    folder = Path(source.get("file", package / "task")).parent
    is_user_code = not folder.is_relative_to(package) and "site-packages" not in folder.parts
    return folder if is_user_code else Path.cwd()


def git_state(folder: Path) -> dict[str, Any]:
    """{commit, dirty: whether a tracked file has changed since}; {} without git or a commit."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40"]
    command.append("--exclude=*")  # print the hash, even if the commit has a tag
    try:
        text = subprocess.check_output(
            command, cwd=folder, timeout=GIT_SECONDS, stderr=subprocess.DEVNULL, text=True
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": text.removesuffix("-dirty"), "dirty": text.endswith("-dirty")}
