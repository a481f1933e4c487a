"""GPUs that a plan can be made for: their memory, and how fast they compute, read and send."""

from dataclasses import dataclass

import torch

from dist_amp.errors import ConfigError
from dist_amp.telemetry.mfu import known_peak

# Shares of the peaks that large models reach in eager mode; assumed.
COMPUTES, READS, SENDS = 0.6, 0.8, 0.8

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Device:
    """One GPU. GB/s are the peaks in datasheets, one way and for each GPU."""

    name: str
    mebibytes: int  # as nvidia-smi shows them
    memory: float  # GB/s
    machine: float  # GB/s to other GPUs of its machine
    network: float  # GB/s to those of other machines, by the usual network cards; assumed
    model: str
    tf32: bool = False

    @property
    def bytes_per_second(self) -> float:
        return READS * self.memory * 1e9

    def flop_per_second(self, dtype: torch.dtype) -> float:
        name = DTYPES.get(dtype, "fp32")
        if name == "fp32" and self.tf32:
            name = "tf32"
        return COMPUTES * known_peak(self.model, name)


DEVICES = (
    Device("a100-40gb", 40960, 1555, 300, 25, "A100-SXM4-40GB"),
    Device("a100-80gb", 81920, 2039, 300, 25, "A100-SXM4-80GB"),
    Device("h100-80gb", 81559, 3350, 450, 50, "H100 80GB HBM3"),
    Device("h200", 143771, 4800, 450, 50, "H200"),
    Device("b200", 183359, 8000, 900, 50, "B200"),
    Device("l4", 23034, 300, 32, 3.1, "L4"),
    Device("l40s", 46068, 864, 32, 12.5, "L40S"),
    Device("a10g", 23028, 600, 32, 3.1, "A10G"),
    Device("rtx-4090", 24564, 1008, 32, 3.1, "RTX 4090"),
    Device("mi300x", 196592, 5300, 448, 50, "MI300X"),
)


def find_device(name: str) -> Device:
    """The device of this name. Errors: ConfigError for one that is not in the table."""
    names = [device.name for device in DEVICES]
    if name.lower() in names:
        return DEVICES[names.index(name.lower())]
    raise ConfigError(
        f"--device={name} is not in the table; use one of {', '.join(names)}, or "
        "--device_memory_GiB"
    )
