"""What `doctor` checks with several ranks: that they have the same code, exchange data, and that
none is slow.
"""

import json
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch
import torch.distributed as dist

from dist_amp.clock import wait_for_device
from dist_amp.commands.doctor_machine import Check, fail, guarded, ok, some_of, warn
from dist_amp.config.load import load_config, to_toml
from dist_amp.errors import ConfigError
from dist_amp.supervise.preflight import check_ranks_agree
from dist_amp.world import World

SLOW = 1.2  # times the median of all ranks: the factor at which a run names a slow rank, too

# Times the median of such links; assumed: other traffic alone makes one somewhat slower.
SLOW_LINK = 2.0

# A matrix product's size and an all-reduce's bytes: some milliseconds each, measured on two cores
# and assumed on a GPU.
MATRIX = {"cpu": 768, "cuda": 8192}
BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
REPEATS = 30  # of which the fastest counts: other processes only make one slower


def gathered(checks: Sequence[Check], world: World) -> list[Check]:
    """The checks of all machines, in order: what is ok is said once, anything else with the hosts
    that it is said of.

    checks: of this machine, on its first rank.
    """
    mine = [asdict(check) for check in checks]
    texts = [json.loads(text) for text in world.gather_texts(json.dumps([platform.node(), mine]))]
    return merged([(host, [Check(**each) for each in found]) for host, found in texts if found])


def merged(machines: Sequence[tuple[str, Sequence[Check]]]) -> list[Check]:
    """machines: [(host, its checks)]."""
    by_name: dict[tuple[str, int], list[tuple[str, Check]]] = {}
    for host, checks in machines:
        times: Counter[str] = Counter()
        for check in checks:
            by_name.setdefault((check.name, times[check.name]), []).append((host, check))
            times[check.name] += 1
    result = []
    for pairs in by_name.values():
        good = [check for _, check in pairs if check.status == "ok"]
        if len(set(good)) > 1:
            others = "1 more machine" if len(good) == 2 else f"{len(good) - 1} more machines"
            result.append(replace(good[0], found=f"{good[0].found}; ok on {others}"))
        else:
            result += good[:1]
        bad: dict[Check, list[str]] = {}
        for host, check in pairs:
            if check.status != "ok":
                bad.setdefault(check, []).append(host)
        for check, hosts in bad.items():
            shown = ""
            if len(hosts) < len(machines):
                more = f" and {len(hosts) - 3} more" if len(hosts) > 3 else ""
                shown = ", ".join(hosts[:3]) + more
            result.append(replace(check, hosts=shown))
    return result


def ranks_checks(world: World) -> list[Check]:
    """Every rank calls it, and gets the same."""
    made = []
    for name, check in CHECKS.items():
        made += guarded(name, partial(check, world))
    return made


def same_code(world: World) -> list[Check]:
    config = load_config([], environ={})
    try:
        check_ranks_agree(config.task.target, to_toml(config), world)
    except ConfigError as error:
        return [fail("same code", str(error))]
    return [ok("same code", f"{world.world_size} ranks have the same code and versions")]


def all_reduce(world: World) -> list[Check]:
    """Bus bandwidth of a large all-reduce, as NCCL's tests define it; the time of a small one."""
    size = BYTES[world.device.type]
    large = torch.ones(size // 4, device=world.device)
    small = torch.ones(2, device=world.device)
    seconds = max(of_ranks(world, fastest(world, lambda: dist.all_reduce(large))))
    latency = max(of_ranks(world, fastest(world, lambda: dist.all_reduce(small))))
    bandwidth = 2 * (world.world_size - 1) / world.world_size * size / seconds
    text = (
        f"{bandwidth / 1e9:.2f} GB/s bus bandwidth with {size / 2**20:.0f} MiB; "
        f"{latency * 1e6:.0f} us with 8 bytes"
    )
    return [ok("all-reduce", text)]


def links(world: World) -> list[Check]:
    """Each rank sends to the next one, all at once: an all-reduce is as slow as its slowest link,
    and names none.
    """
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
    return judge_links(of_ranks(world, rate), world.gather_texts(platform.node()))


def judge_links(rates: Sequence[float], hosts: Sequence[str]) -> list[Check]:
    """rates: GB/s from the rank before to each rank. A link is compared with those of its kind: in
    or between hosts.
    """
    slow = []
    texts = []
    for crosses, kind in ((False, "in a machine"), (True, "between machines")):
        ranks = [rank for rank in range(len(rates)) if (hosts[rank] != hosts[rank - 1]) == crosses]
        if not ranks:
            continue
        median = statistics.median(rates[rank] for rank in ranks)
        texts.append(f"{median:.3g} GB/s {kind}")
        slow += [(median / rates[rank], rank) for rank in ranks if rates[rank] * SLOW_LINK < median]
    text = f"{', '.join(texts)} from each rank to the next (medians)"
    if not slow:
        return [ok("links", text)]
    named = [
        f"rank {(rank - 1) % len(rates)} on {hosts[rank - 1]} to rank {rank} on {hosts[rank]} is "
        f"{factor:.1f}x slower"
        for factor, rank in sorted(slow, reverse=True)
    ]
    fix = "check that host's network, and other traffic"
    return [warn("links", f"{text}: {some_of(named)}", fix)]


def matmul(world: World) -> list[Check]:
    """Each rank's rate in a matrix product, all at once; those that are slow are named with their
    hosts.
    """
    size = MATRIX[world.device.type]
    dtype = torch.float32
    if world.device.type == "cuda" and torch.cuda.is_bf16_supported():
        dtype = torch.bfloat16
    matrix = torch.ones(size, size, device=world.device, dtype=dtype)
    rate = 2 * size**3 / fastest(world, lambda: torch.mm(matrix, matrix)) / 1e12
    hosts = world.gather_texts(platform.node())
    return judge_rates(of_ranks(world, rate), hosts, str(dtype).removeprefix("torch."))


def judge_rates(rates: Sequence[float], hosts: Sequence[str], dtype: str) -> list[Check]:
    """rates: TFLOP/s by rank."""
    median = statistics.median(rates)
    unit, name = (1.0, "TFLOP/s") if median >= 1 else (1e-3, "GFLOP/s")
    shown = [f"{rate / unit:.3g}" for rate in (median, min(rates), max(rates))]
    text = f"{shown[0]} {name} in {dtype} per rank (median; {shown[1]} to {shown[2]})"
    slow = sorted((rate, rank) for rank, rate in enumerate(rates) if rate * SLOW < median)
    if not slow:
        return [ok("matmul", text)]
    named = [f"rank {rank} on {hosts[rank]} is {median / rate:.1f}x slower" for rate, rank in slow]
    fix = (
        "look there for other processes, throttled clocks, fewer cores or a GPU that is used "
        "otherwise"
    )
    return [warn("matmul", f"{text}: {some_of(named)}", fix)]


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


CHECKS = {"same code": same_code, "all-reduce": all_reduce, "links": links, "matmul": matmul}
