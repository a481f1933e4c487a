"""The GPUs that `plan` knows, with their memory size and their peak bandwidths."""

from dataclasses import dataclass

import torch

from dist_amp.errors import ConfigError
from dist_amp.telemetry.mfu import known_peak

# The fraction of each peak that large models reach in eager mode; assumed.
ARITHMETIC_SHARE, MEMORY_SHARE, LINK_SHARE = 0.6, 0.8, 0.8

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Device:
    """A GPU model. Bandwidths are the datasheets' peaks: GB/s per GPU, for links one way."""

    model: str  # as torch names it
    mebibytes: int  # of memory, as nvidia-smi shows it
    memory_bandwidth: float
    machine_bandwidth: float  # to other GPUs of its machine
    network_bandwidth: float  # to GPUs of other machines, with the usual network cards; assumed
    tf32: bool = False

    def flop_per_second(self, dtype: torch.dtype) -> float:
        """The rate that a large model reaches in this dtype, not the peak."""
        name = DTYPES.get(dtype, "fp32")
        peak = known_peak(self.model, name)
        if name == "fp32" and self.tf32:
            peak = known_peak(self.model, "tf32") or peak  # AMD's GPUs have none
        if not peak:
            raise ConfigError(
                f"plan knows no float32 rate of {self.model}; use --precision.tf32 true, or "
                "another --device"
            )
        return ARITHMETIC_SHARE * peak


DEVICES = {
    "a100-40gb": Device("A100-SXM4-40GB", 40960, 1555, 300, 25),
    "a100-80gb": Device("A100-SXM4-80GB", 81920, 2039, 300, 25),
    "h100-80gb": Device("H100 80GB HBM3", 81559, 3350, 450, 50),
    "h200": Device("H200", 143771, 4800, 450, 50),
    "b200": Device("B200", 183359, 8000, 900, 50),
    "l4": Device("L4", 23034, 300, 32, 3.1),
    "l40s": Device("L40S", 46068, 864, 32, 12.5),
    "a10g": Device("A10G", 23028, 600, 32, 3.1),
    "rtx-4090": Device("RTX 4090", 24564, 1008, 32, 3.1),
    "mi300x": Device("MI300X", 196592, 5300, 448, 50),
}
