"""GPUs that a plan can be made for: their memory, and how fast they compute, read and send."""

from dataclasses import dataclass

import torch

from dist_amp.errors import ConfigError, nearest_name
from dist_amp.telemetry.mfu import known_peak

# Shares of the peaks that large models reach in eager mode; assumed.
COMPUTES, READS, SENDS = 0.6, 0.8, 0.8

# MiB as nvidia-smi shows them; GB/s: of the memory; to each GPU of the machine, one way; between
# machines, for each GPU, by the usual network cards (assumed); torch's name. Source of the rates:
# datasheets.
TABLE = {
    "a100-40gb": (40960, 1555, 300, 25, "A100-SXM4-40GB"),
    "a100-80gb": (81920, 2039, 300, 25, "A100-SXM4-80GB"),
    "h100-80gb": (81559, 3350, 450, 50, "H100 80GB HBM3"),
    "h200": (143771, 4800, 450, 50, "H200"),
    "b200": (183359, 8000, 900, 50, "B200"),
    "l4": (23034, 300, 32, 3.1, "L4"),
    "l40s": (46068, 864, 32, 12.5, "L40S"),
    "a10g": (23028, 600, 32, 3.1, "A10G"),
    "rtx-4090": (24564, 1008, 32, 3.1, "RTX 4090"),
    "mi300x": (196592, 5300, 448, 50, "MI300X"),
}
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
    if name.lower() in TABLE:
        mib, memory, machine, network, model = TABLE[name.lower()]
        return Device(
            name.lower(),
            mib * 2**20,
            READS * memory * 1e9,
            SENDS * machine * 1e9,
            SENDS * network * 1e9,
            model,
            tf32,
        )
    near = next((known for known in TABLE if known.startswith(name.lower())), "")
    near = near or nearest_name(name.lower(), TABLE)
    hint = f"; did you mean {near}?" if near else ""
    raise ConfigError(
        f"--device={name} is not in the table{hint}; use one of {', '.join(TABLE)}, or "
        "--device_memory_GiB"
    )
