"""GPUs that a plan can be made for: their memory, and how fast they compute, read and send."""

import re
from dataclasses import dataclass

import torch

from dist_amp.errors import ConfigError, nearest_name
from dist_amp.telemetry.mfu import known_peak

# Shares of the peaks that large models reach in eager mode; assumed.
COMPUTES, READS, SENDS = 0.6, 0.8, 0.8

# MiB as nvidia-smi shows them; GB/s: of the memory; to each GPU of the machine, one way; between
# machines, for each GPU, by the usual network cards (assumed). Source of the rates: datasheets.
TABLE = """
                MiB   memory  machine  network  name
a100-40gb     40960     1555      300       25  A100-SXM4-40GB
a100-80gb     81920     2039      300       25  A100-SXM4-80GB
h100-80gb     81559     3350      450       50  H100 80GB HBM3
h200         143771     4800      450       50  H200
b200         183359     8000      900       50  B200
l4            23034      300       32      3.1  L4
l40s          46068      864       32     12.5  L40S
a10g          23028      600       32      3.1  A10G
rtx-4090      24564     1008       32      3.1  RTX 4090
mi300x       196592     5300      448       50  MI300X
"""
ROWS = re.findall(r"^([\w-]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)  (\S.*)$", TABLE, re.M)
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Device:
    """One GPU. Rates are those that are assumed to be reached."""

    name: str
    memory: int  # bytes
    bytes_per_second: float
    machine: float  # bytes per second to other GPUs of its machine
    network: float  # and to those of others
    model: str
    tf32: bool = False

    def flop_per_second(self, dtype: torch.dtype) -> float:
        name = DTYPES.get(dtype, "fp32")
        if name == "fp32" and self.tf32:
            name = "tf32"
        return COMPUTES * known_peak(self.model, name)


def find_device(name: str, tf32: bool) -> Device:
    """The device of this name. Errors: ConfigError for one that is not in the table."""
    for known, mib, memory, machine, network, model in ROWS:
        if known == name.lower():
            return Device(
                known,
                int(mib) * 2**20,
                READS * float(memory) * 1e9,
                SENDS * float(machine) * 1e9,
                SENDS * float(network) * 1e9,
                model,
                tf32,
            )
    names = [row[0] for row in ROWS]
    near = next((known for known in names if known.startswith(name.lower())), "")
    near = near or nearest_name(name.lower(), names)
    hint = f"; did you mean {near}?" if near else ""
    raise ConfigError(
        f"--device={name} is not in the table{hint}; use one of {', '.join(names)}, or "
        "--device_memory_GiB"
    )
