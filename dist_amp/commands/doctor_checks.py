"""What `doctor` checks, on each machine and with several ranks: a line each, even if it fails."""

import os
import platform
import re
import resource
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from dist_amp.clock import wait_for_device
from dist_amp.config.load import load_config
from dist_amp.config.text import to_toml
from dist_amp.diagnostics.consistency import check_ranks_agree
from dist_amp.distributed.machine import (
    CAPABILITY,
    EMULATED,
    check_kernels,
    cpu_slowdown,
    driver_branch,
    support,
    why_unused,
)
from dist_amp.distributed.process import cpu_cores, in_time
from dist_amp.distributed.rendezvous import OTHER_FILES
from dist_amp.errors import ConfigError, first_line, some_of
from dist_amp.files import shipped_folder
from dist_amp.world import World

GIB = 2**30

# Docker's default of 64 MiB fails with the first loader workers ("Bus error"); the rest is assumed.
LITTLE_SHARED_MEMORY = 1 * GIB
LITTLE_DISK = 5 * GIB
RESOLVE_SECONDS = 5.0

SLOW = 1.2  # below the median: the factor at which a run names a slow rank, too
SLOW_LINK = 2.0  # assumed: other traffic alone makes a link somewhat slower

# A matrix product's size and an all-reduce's bytes: some milliseconds each, measured on two cores
# and assumed on a GPU.
MATRIX = {"cpu": 768, "cuda": 8192}
BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
REPEATS = 30  # of which the fastest counts: other processes only make one slower


@dataclass(frozen=True)
class Check:
    """status: ok, warn or fail; name: what was checked; found: what there is; fix: what to do about
    it; hosts: where, "" for everywhere.
    """

    status: str
    name: str
    found: str
    fix: str = ""
    hosts: str = ""

    @property
    def title(self) -> str:
        return f"{self.name} ({self.hosts})" if self.hosts else self.name


ok = partial(Check, "ok")
warn = partial(Check, "warn")
fail = partial(Check, "fail")


def judged(name: str, found: str, problem: str, fix: str) -> Check:
    """A warning if there is a problem, whose words follow what was found."""
    return warn(name, f"{found}: {problem}", fix) if problem else ok(name, found)


def machine_checks(ranks: int) -> list[Check]:
    """ranks: how many are to run together."""
    return made(
        {
            "python": lambda: [ok("python", platform.python_version())],
            "packages": packages,
            "gpu": gpus,
            "precision": precisions,
            "hostname": hostname,
            "memory": memory,
            "/dev/shm": shared_memory,
            "open files": partial(open_files, ranks),
            "folders": folders,
        }
    )


def made(checks: Mapping[str, Callable[[], Iterable[Check]]]) -> list[Check]:
    """What the checks find; a warning that says how for one that fails itself."""
    found: list[Check] = []
    for name, check in checks.items():
        try:
            found += check()
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            found.append(warn(name, f"can't be checked ({why})"))
    return found


# ---- versions


def packages() -> Iterator[Check]:
    """What the project needs, and which releases it was tested with, if that file is here."""
    pins = ""
    with suppress(ConfigError, OSError):
        pins = (shipped_folder() / "launch/constraints.txt").read_text()
    tested = dict(re.findall(r"^([\w.-]+)==(\S+)", pins, re.MULTILINE))
    for requirement in map(Requirement, requires("dist_amp") or []):
        name = requirement.name
        if requirement.marker is not None and "extra" in str(requirement.marker):
            continue
        found = installed(name)
        release = found.partition("+")[0]
        if not found:
            yield fail(name, "not installed", f"pip install '{requirement}'")
        elif not requirement.specifier.contains(release, prereleases=True):
            needed = f"{found}; the project needs {requirement.specifier}"
            yield fail(name, needed, f"pip install '{requirement}'")
        elif tested.get(name, release) == release:
            yield ok(name, found)
        else:
            yield warn(
                name, f"{found}; tested with {tested[name]}", f"pip install {name}=={tested[name]}"
            )


def installed(name: str) -> str:
    """The version of a package; "" if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


# ---- devices


def kinds_of_gpus() -> dict[str, list[int]]:
    """{name: the numbers of these GPUs}."""
    kinds: dict[str, list[int]] = {}
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            kinds.setdefault(torch.cuda.get_device_name(number), []).append(number)
    return kinds


def gpus() -> Iterator[Check]:
    kinds = kinds_of_gpus()
    if not kinds:
        reason = why_unused()
        yield fail("gpu", reason) if reason else ok("gpu", "none: ranks run on the CPU")
        return
    for name, numbers in kinds.items():
        try:
            check_kernels(torch.device("cuda", numbers[0]))
        except ConfigError as error:
            yield fail("gpu", str(error))
            continue
        properties = torch.cuda.get_device_properties(numbers[0])
        size = f"{properties.total_memory / GIB:.0f} GiB"
        architecture = f"sm_{properties.major}{properties.minor}"
        yield ok("gpu", f"{len(numbers)} x {name}, {size}, {architecture}")
    if torch.version.cuda:
        driver = driver_branch() or "unknown"
        yield ok("driver", f"{driver}; torch is built for CUDA {torch.version.cuda}")
    if dist.is_nccl_available():
        yield ok("nccl", ".".join(map(str, torch.cuda.nccl.version())))
    else:
        yield fail("nccl", "missing in this build of torch", "install one from pytorch.org")


def precisions() -> Iterator[Check]:
    """bf16 and fp16 on each kind of GPU and the CPU: native, emulated or none."""
    kinds = kinds_of_gpus()
    for name, numbers in kinds.items():
        capability = torch.cuda.get_device_capability(numbers[0])
        words = {dtype: support(dtype, capability) for dtype in CAPABILITY}
        found = f"{', '.join(f'{dtype} {word}' for dtype, word in words.items())} on {name}"
        is_native = words["bf16"] == "native"
        fix = "use --precision.dtype fp16"
        yield ok("precision", found) if is_native else warn("precision", found, fix)
    words = {}
    for dtype in CAPABILITY:
        times = cpu_slowdown(dtype)
        words[dtype] = "native" if times < EMULATED else f"emulated ({times:.0f}x slower)"
    found = f"{', '.join(f'{dtype} {word}' for dtype, word in words.items())} on the CPU"
    if kinds or words["bf16"] == "native":
        yield ok("precision", found)
    else:
        yield warn("precision", found, "train with --use_amp false on this CPU")


# ---- network


def hostname() -> Iterator[Check]:
    """torchrun --standalone hangs without a word where the host's name does not resolve."""
    name = socket.gethostname()
    try:
        address = in_time(RESOLVE_SECONDS, lambda: socket.getaddrinfo(name, None)[0][4][0])
        yield ok("hostname", f"{name} is {address}")
    except (OSError, TimeoutError) as error:
        why = getattr(error, "strerror", None) or f"no answer within {RESOLVE_SECONDS:g} s"
        fix = f"add `127.0.0.1 {name}` to /etc/hosts, or give torchrun --local-addr 127.0.0.1"
        found = f"{name} does not resolve ({why}), and torchrun may hang"
        yield warn("hostname", found, f"{fix} on one machine")


# ---- limits and folders


def memory() -> Iterator[Check]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 / GIB for line in lines}
    available = f"{sizes['MemAvailable']:.0f} of {sizes['MemTotal']:.0f} GiB available"
    yield ok("memory", f"{available}; {cpu_cores()} cores")


def shared_memory(path: Path = Path("/dev/shm")) -> Iterator[Check]:
    """Loader workers pass batches through it, and NCCL and gloo use it on one machine."""
    if not path.is_dir():
        yield fail("/dev/shm", "missing", "mount a tmpfs at it")
        return
    total, _, free = shutil.disk_usage(path)
    is_little = free < LITTLE_SHARED_MEMORY
    yield judged(
        "/dev/shm",
        f"{free / GIB:.2f} of {total / GIB:.2f} GiB free",
        "loader workers may die with `Bus error`" if is_little else "",
        "docker run --shm-size=16g, shm_size in Compose, an emptyDir with medium: Memory in "
        "Kubernetes",
    )


def open_files(ranks: int) -> Iterator[Check]:
    """How many ranks the hard limit suffices for: `raise_open_files` raises the soft one itself."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        yield ok("open files", "no limit")
        return
    enough_for = max((hard - OTHER_FILES) // 3 + 1, 1)
    found = f"{hard:,} per process: enough for {enough_for:,} ranks"
    if enough_for >= ranks:
        yield ok("open files", found)
    else:
        needed = 3 * (ranks - 1) + OTHER_FILES
        fix = f"ulimit -Hn {needed} before the launch, LimitNOFILE= of the service"
        yield fail("open files", found, f"{fix}, docker run --ulimit nofile={needed}")


def folders() -> Iterator[Check]:
    """Where runs, datasets and temporary files go: they must be writable, with some space."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    datasets = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets")
    for name, folder, setting in (
        ("runs folder", Path("runs"), "--run.dir"),
        ("data cache", datasets, "HF_HOME"),
        ("temporary", Path(tempfile.gettempdir()), "TMPDIR"),
    ):
        path = folder.absolute()
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        fix = f"choose another by {setting}"
        try:
            with tempfile.TemporaryFile(dir=existing):
                free = shutil.disk_usage(existing).free
        except OSError as error:
            yield fail(name, f"{path} can't be written ({error.strerror})", fix)
            continue
        problem = "little for checkpoints and data" if free < LITTLE_DISK else ""
        yield judged(name, f"{path} is writable, {free / GIB:.1f} GiB free", problem, fix)


# ---- with several ranks


def merge(machines: Sequence[tuple[str, Sequence[Check]]]) -> list[Check]:
    """What is ok as one of the machines, (host, checks), says it; anything else, with its hosts."""
    good = []
    says: dict[str, str] = {}
    bad: dict[Check, list[str]] = {}
    for host, checks in machines:
        for check in checks:
            if check.status != "ok":
                bad.setdefault(check, []).append(host)
            elif says.setdefault(check.name, host) == host:
                good.append(check)
    for check, hosts in bad.items():
        everywhere = len(hosts) == len(machines)
        good.append(check if everywhere else replace(check, hosts=some_of(hosts, 4)))
    return good


def ranks_checks(world: World) -> list[Check]:
    """Every rank calls it, and gets the same."""
    checks = {"same code": same_code, "all-reduce": all_reduce, "links": links, "matmul": matmul}
    return made({name: partial(check, world) for name, check in checks.items()})


def same_code(world: World) -> Iterator[Check]:
    config = load_config([], environ={})
    try:
        check_ranks_agree(config.task.target, to_toml(config), world)
        yield ok("same code", f"{world.world_size} ranks have the same code and versions")
    except ConfigError as error:
        yield fail("same code", str(error))


def all_reduce(world: World) -> Iterator[Check]:
    """Bus bandwidth of a large all-reduce, as NCCL's tests define it; the time of a small one."""
    size = BYTES[world.device.type]
    large = torch.ones(size // 4, device=world.device)
    small = torch.ones(2, device=world.device)
    seconds = max(world.gather(fastest(world, lambda: dist.all_reduce(large))))
    latency = max(world.gather(fastest(world, lambda: dist.all_reduce(small))))
    bandwidth = 2 * (world.world_size - 1) / world.world_size * size / seconds
    found = f"{bandwidth / 1e9:.2f} GB/s bus bandwidth with {size / 2**20:.0f} MiB"
    yield ok("all-reduce", f"{found}; {latency * 1e6:.0f} us with 8 bytes")


def links(world: World) -> Iterator[Check]:
    """Each rank sends to the next, all at once: an all-reduce is as slow as its slowest link."""
    out = torch.ones(BYTES[world.device.type] // 4, device=world.device)
    into = torch.empty_like(out)
    before = (world.rank - 1) % world.world_size
    after = (world.rank + 1) % world.world_size

    def exchange() -> None:
        sending = dist.P2POp(dist.isend, out, after)
        receiving = dist.P2POp(dist.irecv, into, before)
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()

    rate = out.nbytes / fastest(world, exchange) / 1e9
    yield from compare_links(world.gather(rate), world.gather(platform.node()))


def compare_links(rates: Sequence[float], hosts: Sequence[str]) -> Iterator[Check]:
    """rates: GB/s from the rank before to each rank. A link is compared with those of its kind."""
    kinds: dict[str, dict[str, float]] = {}
    for rank, rate in enumerate(rates):
        before = (rank - 1) % len(rates)
        crosses = hosts[rank] != hosts[before]
        kind = "links between machines" if crosses else "links in a machine"
        link = f"rank {before} on {hosts[before]} to rank {rank} on {hosts[rank]}"
        kinds.setdefault(kind, {})[link] = rate
    for kind, of_kind in kinds.items():
        fix = "check that host's network, and other traffic"
        yield compare(kind, of_kind, "GB/s from each rank to the next", SLOW_LINK, fix)


def matmul(world: World) -> Iterator[Check]:
    size = MATRIX[world.device.type]
    dtype = torch.float32
    if world.device.type == "cuda" and torch.cuda.is_bf16_supported():
        dtype = torch.bfloat16
    matrix = torch.ones(size, size, device=world.device, dtype=dtype)
    rate = 2 * size**3 / fastest(world, lambda: torch.mm(matrix, matrix)) / 1e12
    ranks = dict(world.gather((f"rank {world.rank} on {platform.node()}", rate)))
    unit = f"TFLOP/s in {str(dtype).removeprefix('torch.')} per rank"
    fix = "look there for other processes, throttled clocks, fewer cores or a GPU in other use"
    yield compare("matmul", ranks, unit, SLOW, fix)


def compare(name: str, rates: Mapping[str, float], unit: str, factor: float, fix: str) -> Check:
    """Names what is slower than the median by more than the factor, the slowest first."""
    median = statistics.median(rates.values())
    slow = sorted((rate, place) for place, rate in rates.items() if rate * factor < median)
    named = [f"{place} is {median / rate:.1f}x slower" for rate, place in slow]
    spread = f"median; {min(rates.values()):.3g} to {max(rates.values()):.3g}"
    return judged(name, f"{median:.3g} {unit} ({spread})", some_of(named, 4), fix)


def fastest(world: World, work: Callable[[], object]) -> float:
    """Seconds of the fastest of some repeats, all ranks at once."""
    seconds = []
    for _ in range(1 + REPEATS):  # the first makes connections and chooses kernels
        world.barrier()
        wait_for_device(world.device)
        began = time.perf_counter()
        work()
        wait_for_device(world.device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
