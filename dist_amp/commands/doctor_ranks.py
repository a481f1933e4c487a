"""What `doctor` checks with several ranks: a line each, even if it fails."""

import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch
import torch.distributed as dist

from dist_amp.clock import wait_for_device
from dist_amp.commands.doctor_checks import Check, fail, made, ok, some_of, warn
from dist_amp.config.load import load_config, to_toml
from dist_amp.errors import ConfigError
from dist_amp.supervise.preflight import check_ranks_agree
from dist_amp.world import World

SLOW = 1.2  # below the median: the factor at which a run names a slow rank, too
SLOW_LINK = 2.0  # assumed: other traffic alone makes a link somewhat slower

# A matrix product's size and an all-reduce's bytes: some milliseconds each, measured on two cores
# and assumed on a GPU.
MATRIX = {"cpu": 768, "cuda": 8192}
BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
REPEATS = 30  # of which the fastest counts: other processes only make one slower


def merged(checks: Sequence[Check], world: World) -> list[Check]:
    """The checks of all machines; each rank gives those of its machine, or none."""
    mine = [asdict(check) for check in checks]
    texts = [json.loads(text) for text in world.gather_texts(json.dumps([platform.node(), mine]))]
    return merge([(host, [Check(**each) for each in found]) for host, found in texts if found])


def merge(machines: Sequence[tuple[str, Sequence[Check]]]) -> list[Check]:
    """What is ok as one machine says it; then anything else, with the hosts that it is said of.

    machines: [(host, its checks)].
    """
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
        good.append(check if everywhere else replace(check, hosts=some_of(hosts)))
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
    seconds = max(of_ranks(world, fastest(world, lambda: dist.all_reduce(large))))
    latency = max(of_ranks(world, fastest(world, lambda: dist.all_reduce(small))))
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
    yield judge_links(of_ranks(world, rate), world.gather_texts(platform.node()))


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
    if not slow:
        return ok("links", text)
    fix = "check that host's network, and other traffic"
    return warn("links", f"{text}: {some_of(slow)}", fix)


def slow_ones(rates: Mapping[str, float], factor: float) -> list[str]:
    """Those that are slower than the median by more than the factor, the slowest first."""
    median = statistics.median(rates.values())
    slow = [name for name, rate in rates.items() if rate * factor < median]
    slow.sort(key=rates.__getitem__)
    return [f"{name} is {median / rates[name]:.1f}x slower" for name in slow]


def matmul(world: World) -> Iterator[Check]:
    """Each rank's rate in a matrix product, all at once."""
    size = MATRIX[world.device.type]
    dtype = torch.float32
    if world.device.type == "cuda" and torch.cuda.is_bf16_supported():
        dtype = torch.bfloat16
    matrix = torch.ones(size, size, device=world.device, dtype=dtype)
    rate = 2 * size**3 / fastest(world, lambda: torch.mm(matrix, matrix)) / 1e12
    hosts = world.gather_texts(platform.node())
    yield judge_rates(of_ranks(world, rate), hosts, str(dtype).removeprefix("torch."))


def judge_rates(rates: Sequence[float], hosts: Sequence[str], dtype: str) -> Check:
    """rates: TFLOP/s by rank; those that are slow are named with their hosts."""
    spread = f"median; {min(rates):.3g} to {max(rates):.3g}"
    text = f"{statistics.median(rates):.3g} TFLOP/s in {dtype} per rank ({spread})"
    ranks = {f"rank {rank} on {hosts[rank]}": rate for rank, rate in enumerate(rates)}
    slow = slow_ones(ranks, SLOW)
    if not slow:
        return ok("matmul", text)
    fix = "look there for other processes, throttled clocks, fewer cores or a GPU in other use"
    return warn("matmul", f"{text}: {some_of(slow)}", fix)


def of_ranks(world: World, value: float) -> list[float]:
    return [row[0] for row in world.gather_numbers([value])]


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
