"""Whether torchrun can bind each rank to the CPUs of the NUMA node that its GPU is on.

It binds by numactl, and only to CPUs that this process may use: Slurm, Kubernetes' CPU manager and containers restrict
them. Where that leaves none, torchrun --numa-binding=node fails, and all ranks with it. Source: torch/numa/binding.py.
"""

import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import torch


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
                f"{count} ranks have their GPU on node {node}, of whose CPUs this process may use {len(allowed[node])}"
            )
    one = min(next(iter(allowed.values())))
    tried = subprocess.run(["numactl", f"--physcpubind={one}", "true"], capture_output=True, text=True)
    return f"numactl fails: {tried.stderr.strip()}" if tried.returncode else ""


def node_of(gpu: int, root: Path = Path("/")) -> int:
    """The NUMA node of a GPU; 0 where the kernel does not know, as torchrun takes it. Errors: OSError, ValueError."""
    device: Any = torch.cuda.get_device_properties(gpu)
    address = f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
    return max(int((root / "sys/bus/pci/devices" / address / "numa_node").read_text()), 0)


def cpus_of(node: int, root: Path = Path("/")) -> set[int]:
    """The CPUs of a node, from a list such as 0-15,32-47. Errors: OSError, ValueError."""
    found: set[int] = set()
    for part in filter(None, (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
