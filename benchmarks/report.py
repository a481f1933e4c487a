"""What reports share: facts about the machine, statistics, Markdown tables and JSON files."""

import json
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

BASELINE = "baseline loop"
OURS = "dist_amp"
PEERS = ("Accelerate", "Fabric")
MISSING = "not installed"
Report = Mapping[str, Any]


def about(device: torch.device, *packages: str) -> dict[str, Any]:
    """{"machine": facts on the host and the device, "versions": Python's, torch's, packages'}."""
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    machine: dict[str, Any] = {"cpu": ", ".join(set(names)), "cores": os.cpu_count()}
    machine["load"] = os.getloadavg()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine["gpu"] = properties.name
        machine["cuda"] = torch.version.cuda or f"HIP {torch.version.hip}"
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in packages:
        versions[name] = MISSING
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {"machine": machine, "versions": versions}


def machine_line(report: Report) -> str:
    """A report's GPU, host, load and installed versions, from `about`, in one line."""
    machine = report["machine"]
    facts = [f"{machine['cpu']}, {machine['cores']} cores, load {machine['load'][0]:.1f}"]
    if "gpu" in machine:
        facts.insert(0, f"{machine['gpu']}, CUDA {machine['cuda']}")
    for name, number in report["versions"].items():
        if number != MISSING:
            facts.append(f"{name} {number}")
    return ", ".join(facts)


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high): the sample's median, and a 95 % interval for the population's.

    The population's median is below the k-th smallest of n values with the probability of fewer
    than k heads in n tosses. With fewer than 6 values, the interval is their range. Source: David &
    Nagaraja 2003, "Order Statistics", section 7.1.
    """
    ordered = np.sort(values)
    n = len(values)
    heads = np.cumsum([math.comb(n, k) / 2**n for k in range(n)])  # probability of k heads or fewer
    k = max(int(np.count_nonzero(heads <= 0.025)) - 1, 0)
    return float(np.median(ordered)), float(ordered[k]), float(ordered[n - 1 - k])


def median(values: Sequence[float]) -> float:
    return float(np.median(values))


def interval(values: Sequence[float]) -> str:
    """The median and its 95 % interval: "0.987 [0.981, 0.993]"."""
    return "{:.3f} [{:.3f}, {:.3f}]".format(*median_interval(values))


def digits(value: float) -> str:
    """Three significant digits, or all before the decimal point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def table(rows: Sequence[Mapping[str, str]], left: int) -> str:
    """A Markdown table; its first `left` columns and the last are left-aligned."""
    from tabulate import tabulate

    if not rows:
        return ""
    head = list(dict.fromkeys(name for row in rows for name in row))
    align = ["left"] * left + ["right"] * (len(head) - left - 1) + ["left"]
    cells = [[row.get(name, "") for name in head] for row in rows]
    return tabulate(cells, head, "pipe", disable_numparse=True, colalign=align[: len(head)])


def document(*parts: str) -> str:
    """The parts that are not empty, as paragraphs."""
    return "\n\n".join(filter(None, parts)) + "\n"


def save(report: Report, text: str, folder: Path, name: str) -> None:
    """Write the report to NAME.json and the text to NAME.md, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {f"{name}.json": json.dumps(report, indent=1) + "\n", f"{name}.md": text}
    for file, content in contents.items():
        new = folder / f"{file}.new"
        new.write_text(content)
        os.replace(new, folder / file)
