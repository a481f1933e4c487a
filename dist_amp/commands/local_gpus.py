"""What a launcher asks before torchrun: the number of this machine's GPUs, and how its ranks are
bound to CPUs.

    python -m dist_amp.commands.local_gpus ARGS      prints "8 --numa-binding=node", or "0" with
                                                     run.device=cpu in ARGS

ARGS are those of dist_amp.train. GPUs that torch can't use are refused here, once, and not by each
rank in each restart.
"""

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dist_amp.config.load import collect
from dist_amp.config.parse import Setting
from dist_amp.distributed.gpu_checks import check_gpus_are_used
from dist_amp.supervise.command_line import exit_status


def ask(words: Sequence[str]) -> None:
    """Print the number of GPUs that ranks will use, and torchrun's option where binding works."""
    if "--help" in words:
        print((__doc__ or "").strip())
        return
    gpus = gpus_to_use([word for word in words if word != "-h"])
    mode = binding(int(os.environ.get("NPROC_PER_NODE") or gpus), gpus)
    option = f"--numa-binding={mode}" if mode else ""
    print(gpus, option)


def gpus_to_use(words: Sequence[str]) -> int:
    """How many GPUs ranks with these settings will use. Errors: ConfigError for GPUs that torch
    can't use.
    """
    device = collect(words).get("run.device", Setting(("auto",), "by default")).words[:1]
    if device == ("cpu",):
        return 0
    gpus = torch.cuda.device_count()
    if not gpus and device == ("auto",):
        check_gpus_are_used()
    return gpus


# --- NUMA: torchrun binds ranks by numactl, and only to CPUs that this process may use, which
# Slurm, Kubernetes' CPU manager and containers restrict. Where that leaves none, torchrun
# --numa-binding=node fails, and all ranks with it. Source: torch/numa/binding.py.


def binding(ranks: int, gpus: int) -> str | None:
    """The value of torchrun's --numa-binding; None where ranks are not bound, which is said if
    there are GPUs.
    """
    if not gpus or not has_nodes():
        return None
    if reason := why_unbound(ranks, gpus):
        print(f"numa   ranks are not bound to the CPUs near their GPUs: {reason}", file=sys.stderr)
        return None
    return "node"


def has_nodes(root: Path = Path("/")) -> bool:
    """Whether this machine has more than one NUMA node, so that binding is of use."""
    return len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) > 1


def why_unbound(ranks: int, gpus: int, root: Path = Path("/")) -> str:
    """Why the ranks of this machine can't be bound; "" if they can."""
    if ranks > gpus:
        return f"there are {gpus} GPUs for {ranks} ranks"
    if shutil.which("numactl") is None:
        return "numactl is not installed"
    try:
        wanted = Counter(node_of(gpu, root) for gpu in range(ranks))
        allowed = {node: cpus_of(node, root) & os.sched_getaffinity(0) for node in wanted}
    except (OSError, ValueError) as error:
        return f"/sys does not show the nodes ({error})"
    for node, count in wanted.items():
        if len(allowed[node]) < count:
            return (
                f"{count} ranks have their GPU on node {node}, of whose CPUs this process may use "
                f"{len(allowed[node])}"
            )
    cpu = min(next(iter(allowed.values())))
    command = ["numactl", f"--physcpubind={cpu}", "true"]
    tried = subprocess.run(command, capture_output=True, text=True)
    return f"numactl fails: {tried.stderr.strip()}" if tried.returncode else ""


def node_of(gpu: int, root: Path) -> int:
    """The NUMA node of a GPU; 0 where the kernel does not know, as torchrun takes it. Errors:
    OSError, ValueError.
    """
    device: Any = torch.cuda.get_device_properties(gpu)
    address = f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
    return max(int((root / "sys/bus/pci/devices" / address / "numa_node").read_text()), 0)


def cpus_of(node: int, root: Path) -> set[int]:
    """The CPUs of a node, from a list such as 0-15,32-47. Errors: OSError, ValueError."""
    text = (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip()
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


if __name__ == "__main__":
    sys.exit(exit_status(ask, None))
