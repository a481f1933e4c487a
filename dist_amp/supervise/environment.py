"""Where a run started: versions, hosts, the commit of the user's code, and the variables that
matter; no secrets.
"""

import importlib.metadata
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
from dist_amp.distributed.gpu_checks import driver_branch
from dist_amp.files import write_durably
from dist_amp.run import Run

# What results may depend on.
PACKAGES = ("numpy", "datasets", "tensorboard", "transformers", "peft", "torchao")

GIT_SECONDS = 5.0  # assumed: a status takes far less, but a network disk may hang

VARIABLES = re.compile(  # by the beginnings of their names
    r"(CUDA|NVIDIA|NCCL|RCCL|HIP|HSA|ROCR|TORCH|PYTORCH|TORCHINDUCTOR|TORCHELASTIC|TRITON|GLOO|OMP|"
    r"MKL|KMP|DIST_AMP|HF|SLURM|LOCAL|GROUP|ROLE|MASTER|RANK|WORLD|PET|MALLOC|LD_PRELOAD|"
    r"PYTHONHASHSEED)(_|$)"
)
SECRET = re.compile(
    r"TOKEN|SECRET|PASS|PASSWD|CREDENTIAL|AUTH|COOKIE|PRIVATE|(^|_)KEY|KEY($|_)|JWT", re.IGNORECASE
)


def report_environment(run: Run) -> None:
    """Write RUN/environment.json and TensorBoard's text `environment`, on rank 0; every rank calls
    it.
    """
    hosts = run.world.gather_texts(json.dumps(this_rank(run.world.device)))
    if not run.world.is_main:
        return
    text = json.dumps(environment(run, [json.loads(host) for host in hosts]), indent=2)
    path = run.folder / "environment.json"
    try:
        write_durably(path, text + "\n")
    except OSError as error:
        run.world.warn(
            f"{path} can't be written ({error.strerror}); TensorBoard's text `environment` has the "
            "same"
        )
    run.metrics.write_first(
        lambda writer: writer.add_text("environment", f"```json\n{text}\n```", run.step)
    )


def environment(run: Run, ranks: list[dict[str, str]]) -> dict[str, Any]:
    """What rank 0 sees, and each host's row of what its ranks see."""
    hosts: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for rank, row in enumerate(ranks):
        hosts.setdefault(tuple(row.items()), []).append(rank)
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "first_step": run.step + 1,
        "versions": versions(),
        "hosts": [dict(row) | {"ranks": in_ranges(members)} for row, members in hosts.items()],
        "git": git_state(code_folder(run.task)),
        "variables": variables(os.environ),
    }


def this_rank(device: torch.device) -> dict[str, str]:
    """What may differ between ranks; those of a host have the same."""
    name = f"CPU, {os.cpu_count()} cores"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "host": platform.node(),
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """The versions of dist_amp, Python, torch and what torch was built for, and of some installed
    packages.

    torch.utils.collect_env has them too, but takes seconds at the start of each run, for pip,
    compilers and lscpu.
    """
    python = sys.version.split()[0]
    rows = {"dist_amp": dist_amp.__version__, "python": python, "torch": torch.__version__}
    if torch.version.cuda or torch.version.hip:
        rows["cuda"] = str(torch.version.cuda)
        rows["hip"] = str(torch.version.hip)
        rows["driver"] = str(driver_branch())
        if dist.is_nccl_available() and torch.cuda.is_available():
            rows["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
            rows["cudnn"] = str(torch.backends.cudnn.version())
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            rows[package] = importlib.metadata.version(package)
    return rows


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that change what torch, NCCL, Slurm or a run do; none whose name says that it
    holds a secret.

    Of an address with a user and a password, `user:password@` is left out.
    """
    names = sorted(name for name in environ if VARIABLES.match(name) and not SECRET.search(name))
    return {name: re.sub(r"//[^/@\s]+@", "//***@", environ[name]) for name in names}


def code_folder(task: object) -> Path:
    """The folder of the task's source; the current one for a task of this package, a notebook or an
    installed one.
    """
    try:
        folder = Path(inspect.getfile(type(task))).resolve().parent
    except (TypeError, OSError):  # defined in a notebook
        return Path.cwd()
    ours = Path(dist_amp.__file__).resolve().parent
    return Path.cwd() if folder.is_relative_to(ours) or "site-packages" in folder.parts else folder


def git_state(folder: Path) -> dict[str, Any]:
    """{commit, branch, changed files} of the repository that a folder is in; empty without git or a
    repository.

    Of files that git does not track, the Python files in the folder itself count as changed.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if not commit or changed is None:
        return {}
    files = [line[3:] for line in changed.splitlines()]
    untracked = _git(folder, "ls-files", "--others", "--exclude-standard", "--", ":(glob)*.py")
    files += (untracked or "").splitlines()
    return {
        "folder": str(folder),
        "commit": commit.strip(),
        "branch": (_git(folder, "rev-parse", "--abbrev-ref", "HEAD") or "").strip(),
        "dirty": bool(files),
        "changed_files": files[:50],
    }


def _git(folder: Path, *words: str) -> str | None:
    """What a git command prints; None if it fails. It takes no lock, so that a commit at this
    moment succeeds.
    """
    quiet = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_SECONDS,
            stdin=subprocess.DEVNULL,
            env=os.environ | quiet,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def in_ranges(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    texts = []
    for first, *others in ranges:
        text = str(first)
        if others:
            text += f"-{others[-1]}"
        texts.append(text)
    return ", ".join(texts)
