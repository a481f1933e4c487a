"""What `doctor` checks on each machine; every check is a line, also one that can't be made."""

import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from dist_amp.errors import ConfigError, first_line
from dist_amp.runtime.machine import HIDDEN, OLDEST_DRIVER, check_architecture, driver_branch, why_unused
from dist_amp.runtime.native_precision import CAPABILITY, EMULATED, cpu_slowdown
from dist_amp.runtime.process import OTHER_FILES
from dist_amp.runtime.rendezvous import in_time

ROOT = Path(__file__).parent.parent.parent  # of a checkout: the project's files; an installed package has none
GIB = 2**30

# Docker's default of 64 MiB fails with the first loader workers ("Bus error"); the rest is assumed.
LITTLE_SHARED_MEMORY, LITTLE_DISK, FEW_RANKS = 1 * GIB, 5 * GIB, 64
RESOLVE_SECONDS = 5.0

FP8_FROM = (8, 9)  # CUDA compute capability. Source: NVIDIA, Ada and Hopper tuning guides


@dataclass(frozen=True)
class Check:
    """name: what was checked; found: what there is; fix: what to do about it; hosts: where, "" for everywhere."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    fix: str = ""
    hosts: str = ""

    @property
    def title(self) -> str:
        return f"{self.name} ({self.hosts})" if self.hosts else self.name


def guarded(name: str, check: Callable[[], Sequence[Check]]) -> list[Check]:
    """The checks that it makes; if it fails itself, a warning that says how."""
    try:
        return list(check())
    except Exception as error:
        return [Check(name, "warn", f"can't be checked ({type(error).__name__}: {first_line(error)})")]


def machine_checks(ranks: int) -> list[Check]:
    """ranks: how many are to run together."""
    checks: dict[str, Callable[[], Sequence[Check]]] = {
        "python": python,
        "packages": packages,
        "pins": pins,
        "gpu": gpus,
        "nccl": communication,
        "precision": precisions,
        "hostname": hostname,
        "ports": ports,
        "memory": memory,
        "/dev/shm": shared_memory,
        "open files": lambda: open_files(ranks),
        "folders": folders,
    }
    return [found for name, check in checks.items() for found in guarded(name, check)]


# --- versions


def python() -> list[Check]:
    return [Check("python", "ok", platform.python_version())]


def packages() -> list[Check]:
    """The packages that the project needs, with the releases that it asks for."""
    found = []
    for requirement in requirements():
        name = requirement.name
        try:
            has = version(name)
        except PackageNotFoundError:
            found.append(Check(name, "fail", "not installed", f"pip install '{requirement}'"))
            continue
        good = requirement.specifier.contains(has.partition("+")[0], prereleases=True)
        needs = f"{has}; the project needs {requirement.specifier}"
        fix = f"pip install '{requirement}'"
        found.append(Check(name, "ok", has) if good else Check(name, "fail", needs, fix))
    return found


def requirements() -> list[Requirement]:
    """From the checkout's pyproject.toml, or the installed package; without the extras."""
    if (ROOT / "pyproject.toml").exists():
        texts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    else:
        texts = [text for text in requires("dist_amp") or () if "extra ==" not in text]
    return [Requirement(text) for text in texts]


def pins() -> list[Check]:
    """Whether the installed packages are the releases that the project was tested with."""
    file = ROOT / "launch" / "constraints.txt"
    if not file.exists():
        return [Check("pins", "ok", "none: the package is installed without its launch/constraints.txt")]
    pinned = re.findall(r"^([\w.-]+)==(\S+)", file.read_text(), re.MULTILINE)
    others, same = [], 0
    for name, wanted in pinned:
        try:
            has = version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
        same += has == wanted
        others += [f"{name} {has} ({wanted})"] * (has != wanted)
    if not others:
        return [Check("pins", "ok", f"{same} packages as launch/constraints.txt has them")]
    listed = ", ".join(others[:4]) + f" and {len(others) - 4} more" * (len(others) > 4)
    return [Check("pins", "warn", f"not as tested: {listed}", "pip install -c launch/constraints.txt")]


# --- devices


def gpus() -> list[Check]:
    """The GPUs, and whether driver and build of torch go together."""
    if not torch.cuda.is_available():
        if reason := why_unused():
            return [Check("gpu", "fail", reason)]
        hidden = next((n for n in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if os.environ.get(n) in HIDDEN), "")
        return [Check("gpu", "ok", f"none{f', as {hidden} hides them' if hidden else ''}: ranks run on the CPU")]
    found = []
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    for number, name in enumerate(names):
        if number and name == names[0]:
            continue
        properties = torch.cuda.get_device_properties(number)
        architecture = f"sm_{properties.major}{properties.minor}"
        what = f"{names.count(name)} x {name}, {properties.total_memory / GIB:.0f} GiB, {architecture}"
        try:
            check_architecture(torch.device("cuda", number))
            found.append(Check("gpu", "ok", what))
        except ConfigError as error:
            found.append(Check("gpu", "fail", str(error)))
    if torch.version.cuda:
        driver, oldest = driver_branch(), OLDEST_DRIVER.get(int(torch.version.cuda.split(".")[0]), 0)
        text = f"{driver or 'unknown'}; torch is built for CUDA {torch.version.cuda}, which needs {oldest} or newer"
        found.append(Check("driver", "ok" if driver >= oldest else "warn", text))
    return found


def communication() -> list[Check]:
    """The libraries by which the ranks exchange data."""
    found = []
    if not dist.is_available() or not dist.is_gloo_available():
        found.append(Check("gloo", "fail", "missing in this build of torch", "install one from pytorch.org"))
    if not torch.cuda.is_available():
        return [*found, Check("nccl", "ok", "not needed without a GPU")]
    if not dist.is_nccl_available():
        return [*found, Check("nccl", "fail", "missing in this build of torch", "install one from pytorch.org")]
    return [*found, Check("nccl", "ok", ".".join(map(str, torch.cuda.nccl.version())))]


def precisions() -> list[Check]:
    """bf16, fp16 and fp8 on the CPU and each kind of GPU: native, emulated or not there."""
    found = []
    numbers = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    kinds = {torch.cuda.get_device_name(number): torch.cuda.get_device_capability(number) for number in numbers}
    for name, capability in kinds.items():
        words = {dtype: _on_gpu(dtype, capability) for dtype in CAPABILITY}
        words["fp8"] = "native" if capability >= FP8_FROM or torch.version.hip else "none"
        text = f"{', '.join(f'{dtype} {word}' for dtype, word in words.items())} on {name}"
        found.append(
            Check("precision", "ok", text)
            if words["bf16"] == "native"
            else Check("precision", "warn", text, "use --precision.dtype fp16")
        )
    slow = {dtype: cpu_slowdown(dtype) for dtype in CAPABILITY}
    on_cpu = [f"{d} native" if times < EMULATED else f"{d} emulated ({times:.0f}x slower)" for d, times in slow.items()]
    text = f"{', '.join(on_cpu)}, fp8 none on the CPU"
    if kinds or slow["bf16"] < EMULATED:
        return [*found, Check("precision", "ok", text)]
    return [Check("precision", "warn", text, "train with --use_amp false on this CPU")]


def _on_gpu(dtype: str, capability: tuple[int, int]) -> str:
    native, works = CAPABILITY[dtype]
    return "native" if capability >= native or torch.version.hip else "emulated" if capability >= works else "none"


# --- network


def hostname() -> list[Check]:
    """torchrun --standalone hangs without a word where the host's name does not resolve."""
    name = socket.gethostname()
    try:
        address = in_time(RESOLVE_SECONDS, lambda: socket.getaddrinfo(name, None)[0][4][0])
    except (OSError, TimeoutError) as error:
        why = getattr(error, "strerror", None) or f"no answer within {RESOLVE_SECONDS:g} s"
        fix = f"add `127.0.0.1 {name}` to /etc/hosts, or give torchrun --local-addr 127.0.0.1 on one machine"
        return [Check("hostname", "warn", f"{name} does not resolve ({why}), and torchrun may hang", fix)]
    return [Check("hostname", "ok", f"{name} is {address}")]


def ports() -> list[Check]:
    """Whether a store can listen: at a free port, and at MASTER_PORT if it is set."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = f"127.0.0.1:{server.getsockname()[1]} can be listened at"
    text = os.environ.get("MASTER_PORT", "")
    if not text:
        return [Check("ports", "ok", free)]
    if "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("RANK", "0") != "0":
        return [Check("ports", "ok", f"{free}; MASTER_PORT={text} is the launcher's")]
    if not text.isdigit() or not 0 < int(text) < 2**16:
        return [Check("ports", "fail", f"MASTER_PORT={text!r} is no port", "set it to 1 to 65535, or unset it")]
    try:
        with socket.create_server(("", int(text))):
            return [Check("ports", "ok", f"{free}; so can MASTER_PORT={text}")]
    except OSError as error:
        return [Check("ports", "fail", f"MASTER_PORT={text} can't be listened at ({error.strerror})", "choose another")]


# --- limits


def memory() -> list[Check]:
    """Cores and memory that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    free, total = sizes["MemAvailable"] / GIB, sizes["MemTotal"] / GIB
    return [Check("memory", "ok", f"{free:.0f} of {total:.0f} GiB available; {cores} cores")]


def shared_memory(path: Path = Path("/dev/shm")) -> list[Check]:
    """Loader workers pass batches through it, and NCCL and gloo use it on one machine."""
    if not path.is_dir():
        status: Literal["ok", "fail"] = "fail" if sys.platform == "linux" else "ok"
        return [Check("/dev/shm", status, "not there", "mount a tmpfs at it" if status == "fail" else "")]
    total, _, free = shutil.disk_usage(path)
    text = f"{free / GIB:.2f} of {total / GIB:.2f} GiB free"
    if free < LITTLE_SHARED_MEMORY:
        fix = "docker run --shm-size=16g, shm_size in Compose, an emptyDir with medium: Memory in Kubernetes"
        return [Check("/dev/shm", "warn", f"{text}: loader workers may die with `Bus error`", fix)]
    return [Check("/dev/shm", "ok", text)]


def open_files(ranks: int) -> list[Check]:
    """How many ranks the limit of open files suffices for: see `raise_open_files`, which raises the soft one itself."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        return [Check("open files", "ok", "no limit")]
    enough = max((hard - OTHER_FILES) // 3 + 1, 1)
    text = f"{hard:,} per process: enough for {enough:,} ranks"
    needed = 3 * (max(ranks, FEW_RANKS) - 1) + OTHER_FILES
    fix = f"ulimit -Hn {needed} before the launch, LimitNOFILE= of the service, docker run --ulimit nofile={needed}"
    if enough >= max(ranks, FEW_RANKS):
        return [Check("open files", "ok", text)]
    return [Check("open files", "fail" if enough < ranks else "warn", text, fix)]


# --- folders


def folders() -> list[Check]:
    """Where runs, datasets and temporary files go: they must be writable, with some space."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(home) / "datasets")
    places = {
        "runs folder": (Path("runs"), "--run.dir"),
        "data cache": (cache, "HF_HOME"),
        "temporary": (Path(tempfile.gettempdir()), "TMPDIR"),
    }
    return [_folder(name, path.absolute(), setting) for name, (path, setting) in places.items()]


def _folder(name: str, path: Path, setting: str) -> Check:
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        return Check(name, "fail", f"{path} can't be written ({error.strerror})", f"choose another by {setting}")
    text = f"{path} is writable, {free / GIB:.1f} GiB free"
    if free < LITTLE_DISK:
        return Check(name, "warn", f"{text}, which is little for checkpoints and data", f"choose another by {setting}")
    return Check(name, "ok", text)
