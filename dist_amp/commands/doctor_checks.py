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
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from dist_amp.clock import wait_for_device
from dist_amp.config.load import load_config
from dist_amp.config.native_precision import CAPABILITY, EMULATED, cpu_slowdown, support
from dist_amp.config.text import to_toml
from dist_amp.diagnostics.consistency import check_ranks_agree
from dist_amp.distributed.gpu_checks import (
    OLDEST_DRIVER,
    check_architecture,
    driver_branch,
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


def machine_checks(ranks: int) -> list[Check]:
    """ranks: how many are to run together."""
    return made(
        {
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
            "open files": partial(open_files, ranks),
            "folders": folders,
        }
    )


def judged(name: str, text: str, problem: str, fix: str) -> Check:
    """A warning if there is a problem, whose words follow the text."""
    if problem:
        return warn(name, f"{text}: {problem}", fix)
    return ok(name, text)


# --- versions


def packages() -> Iterator[Check]:
    texts = requires("dist_amp") or []
    for requirement in [Requirement(text) for text in texts if "extra ==" not in text]:
        found = installed(requirement.name)
        fix = f"pip install '{requirement}'"
        if not found:
            yield fail(requirement.name, "not installed", fix)
        elif requirement.specifier.contains(found.partition("+")[0], prereleases=True):
            yield ok(requirement.name, found)
        else:
            needs = f"{found}; the project needs {requirement.specifier}"
            yield fail(requirement.name, needs, fix)


def installed(name: str) -> str:
    """The version of a package; "" if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def pins() -> Iterator[Check]:
    try:
        file = shipped_folder() / "launch/constraints.txt"
        tested = file.read_text()
    except (ConfigError, OSError):
        yield ok("pins", "none: the package is installed without its launch/constraints.txt")
        return
    others = []
    for name, pinned in re.findall(r"^([\w.-]+)==(\S+)", tested, re.MULTILINE):
        found = installed(name).partition("+")[0]
        if found not in ("", pinned):
            others.append(f"{name} {found} ({pinned})")
    if others:
        yield warn("pins", f"not as tested: {some_of(others, 4)}", f"pip install -c {file}")
    else:
        yield ok("pins", "all packages are as launch/constraints.txt has them")


# --- devices


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
        if reason := why_unused():
            yield fail("gpu", reason)
        else:
            yield ok("gpu", "none: ranks run on the CPU")
        return
    for name, numbers in kinds.items():
        try:
            check_architecture(torch.device("cuda", numbers[0]))
        except ConfigError as error:
            yield fail("gpu", str(error))
            continue
        properties = torch.cuda.get_device_properties(numbers[0])
        size = f"{properties.total_memory / GIB:.0f} GiB"
        architecture = f"sm_{properties.major}{properties.minor}"
        yield ok("gpu", f"{len(numbers)} x {name}, {size}, {architecture}")
    if torch.version.cuda:
        driver = driver_branch()
        oldest = OLDEST_DRIVER.get(int(torch.version.cuda.split(".")[0]), 0)
        build = f"torch is built for CUDA {torch.version.cuda}, which needs {oldest} or newer"
        status = "ok" if driver >= oldest else "warn"
        yield Check(status, "driver", f"{driver or 'unknown'}; {build}")


def communication() -> Iterator[Check]:
    if not torch.cuda.is_available():
        yield ok("nccl", "not needed without a GPU")
    elif not dist.is_nccl_available():
        yield fail("nccl", "missing in this build of torch", "install one from pytorch.org")
    else:
        yield ok("nccl", ".".join(map(str, torch.cuda.nccl.version())))


def precisions() -> Iterator[Check]:
    """bf16 and fp16 on the CPU and each kind of GPU: native, emulated or none."""
    kinds = kinds_of_gpus()
    for name, numbers in kinds.items():
        capability = torch.cuda.get_device_capability(numbers[0])
        words = {dtype: support(dtype, capability) for dtype in CAPABILITY}
        text = f"{', '.join(f'{dtype} {word}' for dtype, word in words.items())} on {name}"
        if words["bf16"] == "native":
            yield ok("precision", text)
        else:
            yield warn("precision", text, "use --precision.dtype fp16")
    slow = {dtype: cpu_slowdown(dtype) for dtype in CAPABILITY}
    on_cpu = []
    for dtype, times in slow.items():
        word = "native"
        if times >= EMULATED:
            word = f"emulated ({times:.0f}x slower)"
        on_cpu.append(f"{dtype} {word}")
    text = f"{', '.join(on_cpu)} on the CPU"
    if kinds or slow["bf16"] < EMULATED:
        yield ok("precision", text)
    else:
        yield warn("precision", text, "train with --use_amp false on this CPU")


# --- network


def hostname() -> Iterator[Check]:
    """torchrun --standalone hangs without a word where the host's name does not resolve."""
    name = socket.gethostname()
    try:
        address = in_time(RESOLVE_SECONDS, lambda: socket.getaddrinfo(name, None)[0][4][0])
        yield ok("hostname", f"{name} is {address}")
    except (OSError, TimeoutError) as error:
        why = getattr(error, "strerror", None) or f"no answer within {RESOLVE_SECONDS:g} s"
        fix = f"add `127.0.0.1 {name}` to /etc/hosts, or give torchrun --local-addr 127.0.0.1"
        text = f"{name} does not resolve ({why}), and torchrun may hang"
        yield warn("hostname", text, f"{fix} on one machine")


def ports() -> Iterator[Check]:
    """Whether a store can listen at MASTER_PORT, if it is set."""
    port = os.environ.get("MASTER_PORT", "")
    if not port:
        yield ok("ports", "MASTER_PORT is not set: the launcher chooses one")
    elif "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("RANK", "0") != "0":
        yield ok("ports", f"MASTER_PORT={port} is the launcher's")
    elif not port.isdigit() or not 0 < int(port) < 2**16:
        yield fail("ports", f"MASTER_PORT={port!r} is no port", "set it to 1 to 65535, or unset it")
    else:
        try:
            socket.create_server(("", int(port))).close()
            yield ok("ports", f"MASTER_PORT={port} is free")
        except OSError as error:
            text = f"MASTER_PORT={port} can't be used ({error.strerror})"
            yield fail("ports", text, "choose another")


# --- limits and folders


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
    problem = ""
    if free < LITTLE_SHARED_MEMORY:
        problem = "loader workers may die with `Bus error`"
    fix = "docker run --shm-size=16g, shm_size in Compose"
    fix += ", an emptyDir with medium: Memory in Kubernetes"
    text = f"{free / GIB:.2f} of {total / GIB:.2f} GiB free"
    yield judged("/dev/shm", text, problem, fix)


def open_files(ranks: int) -> Iterator[Check]:
    """How many ranks the hard limit suffices for: `raise_open_files` raises the soft one itself."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        yield ok("open files", "no limit")
        return
    enough_for = max((hard - OTHER_FILES) // 3 + 1, 1)
    text = f"{hard:,} per process: enough for {enough_for:,} ranks"
    if enough_for >= ranks:
        yield ok("open files", text)
    else:
        needed = 3 * (ranks - 1) + OTHER_FILES
        fix = f"ulimit -Hn {needed} before the launch, LimitNOFILE= of the service"
        yield fail("open files", text, f"{fix}, docker run --ulimit nofile={needed}")


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
        problem = ""
        if free < LITTLE_DISK:
            problem = "little for checkpoints and data"
        yield judged(name, f"{path} is writable, {free / GIB:.1f} GiB free", problem, fix)


# --- with several ranks


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
    text = f"{bandwidth / 1e9:.2f} GB/s bus bandwidth with {size / 2**20:.0f} MiB"
    yield ok("all-reduce", f"{text}; {latency * 1e6:.0f} us with 8 bytes")


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
    yield judge_links(world.gather(rate), world.gather(platform.node()))


def judge_links(rates: Sequence[float], hosts: Sequence[str]) -> Check:
    """rates: GB/s from the rank before to each rank. A link is compared with those of its kind."""
    slow = []
    texts = []
    for crosses, kind in ((False, "in a machine"), (True, "between machines")):
        links = {}
        for rank, rate in enumerate(rates):
            if (hosts[rank] != hosts[rank - 1]) == crosses:
                before = (rank - 1) % len(rates)
                links[f"rank {before} on {hosts[before]} to rank {rank} on {hosts[rank]}"] = rate
        if links:
            texts.append(f"{statistics.median(links.values()):.3g} GB/s {kind}")
            slow += slow_ones(links, SLOW_LINK)
    text = f"{', '.join(texts)} from each rank to the next (medians)"
    return judged("links", text, some_of(slow, 4), "check that host's network, and other traffic")


def slow_ones(rates: Mapping[str, float], factor: float) -> list[str]:
    """Those that are slower than the median by more than the factor, the slowest first."""
    median = statistics.median(rates.values())
    slow = [name for name, rate in rates.items() if rate * factor < median]
    slow.sort(key=rates.__getitem__)
    return [f"{name} is {median / rates[name]:.1f}x slower" for name in slow]


def matmul(world: World) -> Iterator[Check]:
    size = MATRIX[world.device.type]
    dtype = torch.float32
    if world.device.type == "cuda" and torch.cuda.is_bf16_supported():
        dtype = torch.bfloat16
    matrix = torch.ones(size, size, device=world.device, dtype=dtype)
    rate = 2 * size**3 / fastest(world, lambda: torch.mm(matrix, matrix)) / 1e12
    hosts = world.gather(platform.node())
    yield judge_rates(world.gather(rate), hosts, str(dtype).removeprefix("torch."))


def judge_rates(rates: Sequence[float], hosts: Sequence[str], dtype: str) -> Check:
    """rates: TFLOP/s by rank; those that are slow are named with their hosts."""
    spread = f"median; {min(rates):.3g} to {max(rates):.3g}"
    text = f"{statistics.median(rates):.3g} TFLOP/s in {dtype} per rank ({spread})"
    ranks = {f"rank {rank} on {hosts[rank]}": rate for rank, rate in enumerate(rates)}
    fix = "look there for other processes, throttled clocks, fewer cores or a GPU in other use"
    return judged("matmul", text, some_of(slow_ones(ranks, SLOW), 4), fix)


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
