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

from dist_amp.config.native_precision import CAPABILITY, EMULATED, cpu_slowdown
from dist_amp.distributed.gpu_checks import (
    HIDDEN,
    OLDEST_DRIVER,
    check_architecture,
    driver_branch,
    why_unused,
)
from dist_amp.distributed.process import in_time
from dist_amp.distributed.rendezvous import OTHER_FILES
from dist_amp.errors import ConfigError, first_line

# Of a checkout: the project's files; an installed package has none.
ROOT = Path(__file__).parent.parent.parent
GIB = 2**30

# Docker's default of 64 MiB fails with the first loader workers ("Bus error"); the rest is assumed.
LITTLE_SHARED_MEMORY = 1 * GIB
LITTLE_DISK = 5 * GIB
FEW_RANKS = 64
RESOLVE_SECONDS = 5.0

FP8_FROM = (8, 9)  # CUDA compute capability. Source: NVIDIA, Ada and Hopper tuning guides


@dataclass(frozen=True)
class Check:
    """name: what was checked; found: what there is; fix: what to do about it; hosts: where, "" for
    everywhere.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    fix: str = ""
    hosts: str = ""

    @property
    def title(self) -> str:
        return f"{self.name} ({self.hosts})" if self.hosts else self.name


def ok(name: str, found: str) -> Check:
    return Check(name, "ok", found)


def warn(name: str, found: str, fix: str = "") -> Check:
    return Check(name, "warn", found, fix)


def fail(name: str, found: str, fix: str = "") -> Check:
    return Check(name, "fail", found, fix)


def guarded(name: str, check: Callable[[], Sequence[Check]]) -> list[Check]:
    """The checks that it makes; if it fails itself, a warning that says how."""
    try:
        return list(check())
    except Exception as error:
        return [warn(name, f"can't be checked ({type(error).__name__}: {first_line(error)})")]


def machine_checks(ranks: int) -> list[Check]:
    """ranks: how many are to run together."""
    checks: dict[str, Callable[[], Sequence[Check]]] = {
        "python": lambda: [ok("python", platform.python_version())],
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
    made = []
    for name, check in checks.items():
        made += guarded(name, check)
    return made


# --- versions


def packages() -> list[Check]:
    """The packages that the project needs, with the releases that it asks for."""
    checks = []
    for requirement in requirements():
        fix = f"pip install '{requirement}'"
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            checks.append(fail(requirement.name, "not installed", fix))
            continue
        if requirement.specifier.contains(installed.partition("+")[0], prereleases=True):
            checks.append(ok(requirement.name, installed))
        else:
            needs = f"{installed}; the project needs {requirement.specifier}"
            checks.append(fail(requirement.name, needs, fix))
    return checks


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
        return [ok("pins", "none: the package is installed without its launch/constraints.txt")]
    others = []
    same = 0
    for name, pinned in re.findall(r"^([\w.-]+)==(\S+)", file.read_text(), re.MULTILINE):
        try:
            installed = version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
        if installed == pinned:
            same += 1
        else:
            others.append(f"{name} {installed} ({pinned})")
    if not others:
        return [ok("pins", f"{same} packages as launch/constraints.txt has them")]
    listed = some_of(others)
    return [warn("pins", f"not as tested: {listed}", "pip install -c launch/constraints.txt")]


def some_of(texts: Sequence[str]) -> str:
    """The first four, and how many more there are."""
    more = f" and {len(texts) - 4} more" if len(texts) > 4 else ""
    return ", ".join(texts[:4]) + more


# --- devices


def gpus() -> list[Check]:
    """The GPUs, and whether driver and build of torch go together."""
    if not torch.cuda.is_available():
        if reason := why_unused():
            return [fail("gpu", reason)]
        names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
        hiding = [name for name in names if os.environ.get(name) in HIDDEN]
        hidden = f", as {hiding[0]} hides them" if hiding else ""
        return [ok("gpu", f"none{hidden}: ranks run on the CPU")]
    checks = []
    names_of = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    for name in dict.fromkeys(names_of):
        number = names_of.index(name)
        properties = torch.cuda.get_device_properties(number)
        try:
            check_architecture(torch.device("cuda", number))
        except ConfigError as error:
            checks.append(fail("gpu", str(error)))
            continue
        size = f"{properties.total_memory / GIB:.0f} GiB"
        architecture = f"sm_{properties.major}{properties.minor}"
        checks.append(ok("gpu", f"{names_of.count(name)} x {name}, {size}, {architecture}"))
    if torch.version.cuda:
        driver = driver_branch()
        oldest = OLDEST_DRIVER.get(int(torch.version.cuda.split(".")[0]), 0)
        text = (
            f"{driver or 'unknown'}; torch is built for CUDA {torch.version.cuda}, which needs "
            f"{oldest} or newer"
        )
        verdict = ok if driver >= oldest else warn
        checks.append(verdict("driver", text))
    return checks


def communication() -> list[Check]:
    """The libraries by which the ranks exchange data."""
    checks = []
    missing = ("missing in this build of torch", "install one from pytorch.org")
    if not dist.is_available() or not dist.is_gloo_available():
        checks.append(fail("gloo", *missing))
    if not torch.cuda.is_available():
        checks.append(ok("nccl", "not needed without a GPU"))
    elif not dist.is_nccl_available():
        checks.append(fail("nccl", *missing))
    else:
        checks.append(ok("nccl", ".".join(map(str, torch.cuda.nccl.version()))))
    return checks


def precisions() -> list[Check]:
    """bf16, fp16 and fp8 on the CPU and each kind of GPU: native, emulated or not there."""
    checks = []
    kinds = {}
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            name = torch.cuda.get_device_name(number)
            kinds[name] = torch.cuda.get_device_capability(number)
    for name, capability in kinds.items():
        words = {dtype: _on_gpu(dtype, capability) for dtype in CAPABILITY}
        words["fp8"] = "native" if capability >= FP8_FROM or torch.version.hip else "none"
        text = f"{', '.join(f'{dtype} {word}' for dtype, word in words.items())} on {name}"
        if words["bf16"] == "native":
            checks.append(ok("precision", text))
        else:
            checks.append(warn("precision", text, "use --precision.dtype fp16"))
    on_cpu = []
    slow = {dtype: cpu_slowdown(dtype) for dtype in CAPABILITY}
    for dtype, times in slow.items():
        word = "native" if times < EMULATED else f"emulated ({times:.0f}x slower)"
        on_cpu.append(f"{dtype} {word}")
    text = f"{', '.join(on_cpu)}, fp8 none on the CPU"
    if kinds or slow["bf16"] < EMULATED:
        checks.append(ok("precision", text))
    else:
        checks.append(warn("precision", text, "train with --use_amp false on this CPU"))
    return checks


def _on_gpu(dtype: str, capability: tuple[int, int]) -> str:
    native, works = CAPABILITY[dtype]
    if capability >= native or torch.version.hip:
        return "native"
    return "emulated" if capability >= works else "none"


# --- network


def hostname() -> list[Check]:
    """torchrun --standalone hangs without a word where the host's name does not resolve."""
    name = socket.gethostname()
    try:
        address = in_time(RESOLVE_SECONDS, lambda: socket.getaddrinfo(name, None)[0][4][0])
    except (OSError, TimeoutError) as error:
        why = getattr(error, "strerror", None) or f"no answer within {RESOLVE_SECONDS:g} s"
        fix = (
            f"add `127.0.0.1 {name}` to /etc/hosts, or give torchrun --local-addr 127.0.0.1 on one "
            "machine"
        )
        return [warn("hostname", f"{name} does not resolve ({why}), and torchrun may hang", fix)]
    return [ok("hostname", f"{name} is {address}")]


def ports() -> list[Check]:
    """Whether a store can listen: at a free port, and at MASTER_PORT if it is set."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = f"127.0.0.1:{server.getsockname()[1]} can be listened at"
    port = os.environ.get("MASTER_PORT", "")
    if not port:
        return [ok("ports", free)]
    if "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("RANK", "0") != "0":
        return [ok("ports", f"{free}; MASTER_PORT={port} is the launcher's")]
    if not port.isdigit() or not 0 < int(port) < 2**16:
        fix = "set it to 1 to 65535, or unset it"
        return [fail("ports", f"MASTER_PORT={port!r} is no port", fix)]
    try:
        with socket.create_server(("", int(port))):
            return [ok("ports", f"{free}; so can MASTER_PORT={port}")]
    except OSError as error:
        text = f"MASTER_PORT={port} can't be listened at ({error.strerror})"
        return [fail("ports", text, "choose another")]


# --- limits


def memory() -> list[Check]:
    """Cores and memory that this process may use."""
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 / GIB for line in lines}
    available = sizes["MemAvailable"]
    total = sizes["MemTotal"]
    return [ok("memory", f"{available:.0f} of {total:.0f} GiB available; {cores} cores")]


def shared_memory(path: Path = Path("/dev/shm")) -> list[Check]:
    """Loader workers pass batches through it, and NCCL and gloo use it on one machine."""
    if not path.is_dir():
        if sys.platform == "linux":
            return [fail("/dev/shm", "not there", "mount a tmpfs at it")]
        return [ok("/dev/shm", "not there")]
    total, _, free = shutil.disk_usage(path)
    text = f"{free / GIB:.2f} of {total / GIB:.2f} GiB free"
    if free >= LITTLE_SHARED_MEMORY:
        return [ok("/dev/shm", text)]
    fix = (
        "docker run --shm-size=16g, shm_size in Compose, an emptyDir with medium: Memory in "
        "Kubernetes"
    )
    return [warn("/dev/shm", f"{text}: loader workers may die with `Bus error`", fix)]


def open_files(ranks: int) -> list[Check]:
    """How many ranks the limit of open files suffices for: see `raise_open_files`, which raises the
    soft one itself.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        return [ok("open files", "no limit")]
    enough_for = max((hard - OTHER_FILES) // 3 + 1, 1)
    text = f"{hard:,} per process: enough for {enough_for:,} ranks"
    if enough_for >= max(ranks, FEW_RANKS):
        return [ok("open files", text)]
    needed = 3 * (max(ranks, FEW_RANKS) - 1) + OTHER_FILES
    fix = (
        f"ulimit -Hn {needed} before the launch, LimitNOFILE= of the service, docker run --ulimit "
        f"nofile={needed}"
    )
    if enough_for < ranks:
        return [fail("open files", text, fix)]
    return [warn("open files", text, fix)]


# --- folders


def folders() -> list[Check]:
    """Where runs, datasets and temporary files go: they must be writable, with some space."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    datasets = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets")
    return [
        _folder("runs folder", Path("runs").absolute(), "--run.dir"),
        _folder("data cache", datasets.absolute(), "HF_HOME"),
        _folder("temporary", Path(tempfile.gettempdir()).absolute(), "TMPDIR"),
    ]


def _folder(name: str, path: Path, setting: str) -> Check:
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    fix = f"choose another by {setting}"
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        return fail(name, f"{path} can't be written ({error.strerror})", fix)
    text = f"{path} is writable, {free / GIB:.1f} GiB free"
    if free < LITTLE_DISK:
        return warn(name, f"{text}, which is little for checkpoints and data", fix)
    return ok(name, text)
