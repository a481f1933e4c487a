"""python -m dist_amp.doctor: check whether this machine is ready to train. It prints a line per
check: ok, warn or fail, and the fix.

Started alone, it checks versions, GPUs and driver, precision, host name, shared memory and folders.
Started on several ranks, as training would be, it also checks whether the ranks find each other,
how fast they exchange data and multiply matrices, and which of them are slow:

    torchrun --standalone --local-addr 127.0.0.1 --nproc_per_node=8 -m dist_amp.doctor

Rank 0 prints all checks of its machine, and the problems of the others. It takes a few seconds.
Exit status: 0 ready, or 1 if a check fails; warnings don't count.

Docs: docs/launching.md
"""

import os
import platform
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from dist_amp.config.memory import host_memory
from dist_amp.distributed import machine
from dist_amp.distributed.process import cpu_cores, in_time
from dist_amp.errors import first_line, some_of
from dist_amp.settings import RunConfig
from dist_amp.supervise.command_line import Parser, command
from dist_amp.world import World, start

GIB = 2**30
JOIN_SECONDS = 60.0  # how long a rank may take to start; assumed

# Less than these give a warning; assumed. Docker's default of 64 MiB of shared memory is too little
# even for the first loader workers ("Bus error").
LOW_SHARED_MEMORY = 1 * GIB
LOW_DISK = 5 * GIB
RESOLVE_SECONDS = 5.0

# A rank or a link slower than the median by more than this factor is reported. Runs report slow
# ranks at the same factor. Links have a higher one, as other traffic slows them too (assumed).
SLOW_MATMUL, SLOW_LINK = 1.2, 2.0

# The matrix product's size and the all-reduce's bytes. Each takes some milliseconds: measured on
# two CPU cores, assumed on a GPU.
MATRIX = {"cpu": 768, "cuda": 8192}
BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
REPEATS = 30  # the fastest one counts, because other processes can only slow a repeat down


class Check(NamedTuple):
    """A line of the report. status: ok, warn or fail. text: what was found, and the fix."""

    status: str
    name: str
    text: str


ok = partial(Check, "ok")
warn = partial(Check, "warn")
fail = partial(Check, "fail")


@command()
def main(argv: Sequence[str]) -> int:
    parser = Parser("python -m dist_amp.doctor", __doc__)
    devices = ("auto", "cpu", "cuda")
    parser.add_argument("--device", default="auto", choices=devices, help="device of the ranks")
    options = parser.parse_args(argv)
    is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"  # of this machine's ranks
    machine_checks = (packages, gpus, precision, hostname, shared_memory, folders)
    checks = results_of(machine_checks) if is_first_here else []
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return show(checks)
    is_reporter = os.environ.get("RANK") == "0"
    try:
        with start(RunConfig(device=options.device, timeout_seconds=JOIN_SECONDS)) as world:
            for host, found in world.gather((platform.node(), checks))[1:]:
                bad = [check for check in found if check.status != "ok"]
                checks += [check._replace(name=f"{check.name} ({host})") for check in bad]
            checks += results_of((all_reduce, links, matmul), world)
    except Exception as error:
        is_reporter = is_first_here  # rank 0 may be missing
        checks.append(fail("ranks", f"they can't work together: {first_line(error)}"))
    return show(checks) if is_reporter else 0


def show(checks: Sequence[Check]) -> int:
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.status:<4}  {check.name:<{width}}  {check.text}")
    numbers = Counter(check.status for check in checks)
    ready = "fix what failed before you train" if numbers["fail"] else "ready to train"
    summary = ", ".join(f"{numbers[status]} {status}" for status in ("ok", "warn", "fail"))
    print(f"\n{summary}: {ready}", flush=True)
    return 1 if numbers["fail"] else 0


# ---- the checks


def results_of(checks: Iterable[Callable[..., Iterable[Check]]], *args: World) -> list[Check]:
    """The results of the checks, called with `args`; a check that raises gives a warning."""
    found: list[Check] = []
    for check in checks:
        try:
            found += check(*args)
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            found.append(warn(check.__name__, f"can't be checked ({reason})"))
    return found


# ---- on a machine


def packages() -> Iterator[Check]:
    memory = f"{host_memory() / GIB:.0f} GiB of memory, {cpu_cores()} cores"
    yield ok("python", f"{platform.python_version()}; {memory}")
    for requirement in map(Requirement, requires("dist_amp") or []):
        name = requirement.name
        if requirement.marker is not None and "extra" in str(requirement.marker):
            continue
        try:
            found = version(name)
        except PackageNotFoundError:
            yield fail(name, f"not installed; pip install '{requirement}'")
            continue
        if requirement.specifier.contains(found.partition("+")[0], prereleases=True):
            yield ok(name, found)
        else:
            yield fail(name, f"{found}; pip install '{requirement}'")


def kinds_of_gpus() -> dict[str, list[int]]:
    """{GPU name: indices of this machine's GPUs of that name}."""
    kinds: dict[str, list[int]] = {}
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        kinds.setdefault(torch.cuda.get_device_name(number), []).append(number)
    return kinds


def run_kernel(device: torch.device) -> None:
    torch.ones(1, device=device).item()


def gpus() -> Iterator[Check]:
    kinds = kinds_of_gpus()
    if not kinds:
        reason = machine.reason_unused()
        yield fail("gpu", reason) if reason else ok("gpu", "none: ranks run on the CPU")
        return
    for name, numbers in kinds.items():
        try:
            run_kernel(torch.device("cuda", numbers[0]))
        except RuntimeError as error:  # such as a build of torch without kernels for this GPU
            yield fail("gpu", f"{name}: {first_line(error)}")
            continue
        properties = torch.cuda.get_device_properties(numbers[0])
        yield ok("gpu", f"{len(numbers)} x {name}, {properties.total_memory / GIB:.0f} GiB")
    if torch.version.cuda:
        driver = machine.driver_branch() or "unknown"
        yield ok("driver", f"{driver}; torch is built for CUDA {torch.version.cuda}")
    if dist.is_nccl_available():
        yield ok("nccl", ".".join(map(str, torch.cuda.nccl.version())))
    else:
        yield fail("nccl", "missing in this build of torch; install one from pytorch.org")


def precision() -> Iterator[Check]:
    """bf16 on each kind of GPU, or on the CPU: native or emulated."""
    gpus = [torch.device("cuda", numbers[0]) for numbers in kinds_of_gpus().values()]
    for device in gpus or [torch.device("cpu")]:
        warning = machine.check_dtype("bf16", device)
        native = f"bf16 is native on {machine.name_of(device)}"
        yield warn("precision", warning) if warning else ok("precision", native)


def hostname() -> Iterator[Check]:
    """torchrun --standalone hangs silently if the host's name does not resolve."""
    name = socket.gethostname()
    try:
        address = in_time(RESOLVE_SECONDS, lambda: socket.getaddrinfo(name, None)[0][4][0])
        yield ok("hostname", f"{name} is {address}")
    except OSError as error:
        reason = error.strerror or f"no answer within {RESOLVE_SECONDS:g} s"
        yield warn(
            "hostname",
            f"{name} does not resolve ({reason}), and torchrun may hang; add `127.0.0.1 {name}` to "
            "/etc/hosts, or give torchrun --local-addr 127.0.0.1 on one machine",
        )


def shared_memory(path: Path = Path("/dev/shm")) -> Iterator[Check]:
    """Loader workers pass batches through /dev/shm; NCCL and gloo use it within a machine."""
    total, _, free = shutil.disk_usage(path)
    found = f"{free / GIB:.2f} of {total / GIB:.2f} GiB free"
    if free < LOW_SHARED_MEMORY:
        fix = "use docker run --shm-size=16g, shm_size in Compose, emptyDir.medium: Memory in "
        found += f": loader workers may die with `Bus error`; {fix}Kubernetes"
        yield warn("/dev/shm", found)
    else:
        yield ok("/dev/shm", found)


def folders() -> Iterator[Check]:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    for name, folder, setting in (
        ("runs folder", Path("runs"), "--run.dir"),
        ("data cache", home.expanduser(), "HF_HOME"),
        ("temporary", Path(tempfile.gettempdir()), "TMPDIR"),
    ):
        path = folder.absolute()
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        fix = f"; choose another with {setting}"
        try:
            with tempfile.TemporaryFile(dir=existing):
                free = shutil.disk_usage(existing).free
        except OSError as error:
            yield fail(name, f"{path} can't be written ({error.strerror}){fix}")
            continue
        found = f"{path} is writable, {free / GIB:.1f} GiB free"
        if free < LOW_DISK:
            yield warn(name, f"{found}: little for checkpoints and data{fix}")
        else:
            yield ok(name, found)


# ---- with several ranks


def all_reduce(world: World) -> Iterator[Check]:
    """Bus bandwidth of a large all-reduce, as nccl-tests defines it; latency of a small one."""
    size = BYTES[world.device.type]
    large = torch.ones(size // 4, device=world.device)
    small = torch.ones(2, device=world.device)
    seconds = max(world.gather(fastest(world, lambda: dist.all_reduce(large))))
    latency = max(world.gather(fastest(world, lambda: dist.all_reduce(small))))
    bandwidth = 2 * (world.world_size - 1) / world.world_size * size / seconds
    found = f"{bandwidth / 1e9:.2f} GB/s bus bandwidth with {size / 2**20:.0f} MiB"
    yield ok("all-reduce", f"{found}; {latency * 1e6:.0f} us with 8 bytes")


def links(world: World) -> Iterator[Check]:
    """All ranks send to the next one at once: an all-reduce is as slow as its slowest link."""
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
    kinds: dict[str, dict[str, float]] = {}
    ranks = world.gather((platform.node(), rate))
    for rank, (host, rate) in enumerate(ranks):
        sender = (rank - 1) % len(ranks)
        kind = "links in a machine" if host == ranks[sender][0] else "links between machines"
        link = f"rank {sender} on {ranks[sender][0]} to rank {rank} on {host}"
        kinds.setdefault(kind, {})[link] = rate
    for kind, rates in kinds.items():
        yield compare(kind, rates, "GB/s from each rank to the next", SLOW_LINK)


def matmul(world: World) -> Iterator[Check]:
    size = MATRIX[world.device.type]
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    matrix = torch.ones(size, size, device=world.device, dtype=dtype)
    rate = 2 * size**3 / fastest(world, lambda: torch.mm(matrix, matrix)) / 1e12
    ranks = dict(world.gather((f"rank {world.rank} on {platform.node()}", rate)))
    unit = f"TFLOP/s in {str(dtype).removeprefix('torch.')} per rank"
    yield compare("matmul", ranks, unit, SLOW_MATMUL)


def compare(name: str, rates: Mapping[str, float], unit: str, factor: float) -> Check:
    """ok, or a warning that lists the ranks or links well below the median, slowest first."""
    median = statistics.median(rates.values())
    found = f"{median:.3g} {unit} (median; {min(rates.values()):.3g} to {max(rates.values()):.3g})"
    slow = sorted((rate, place) for place, rate in rates.items() if rate * factor < median)
    if not slow:
        return ok(name, found)
    texts = [f"{place} is {median / rate:.1f}x slower" for rate, place in slow]
    fix = "look there for other processes or traffic, throttled clocks or fewer cores"
    return warn(name, f"{found}: {some_of(texts, 4)}; {fix}")


def fastest(world: World, work: Callable[[], object]) -> float:
    """Seconds that the fastest of REPEATS takes this rank; all ranks work at the same time."""
    seconds = []
    for _ in range(1 + REPEATS):  # the first is a warm-up: it opens connections, chooses kernels
        world.barrier()
        machine.wait_for_device(world.device)
        began = time.perf_counter()
        work()
        machine.wait_for_device(world.device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


if __name__ == "__main__":
    sys.exit(main())
