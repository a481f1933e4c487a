"""MFU, model FLOPs utilisation: the share of a device's peak FLOP/s that the model itself uses.

    MFU = items per second x the task's flops_per_item(model) / the device's peak

Recomputation (activation checkpointing) is not counted, so the time it takes lowers MFU.
Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.

Docs: docs/metrics.md
"""

import math
import re
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dist_amp.errors import DataError
from dist_amp.parallel import Parallel
from dist_amp.settings import Config
from dist_amp.task import Task, call_task
from dist_amp.telemetry.observer import Observer
from dist_amp.telemetry.step_report import LogRow
from dist_amp.world import World

# Dense peak TFLOP/s of what torch counts as one device; 0 if the vendor gives no number, or two
# numbers that differ. If a datasheet has only the rate with structured sparsity, twice the dense
# rate, half of it is used, and the comment says so. fp16 accumulates in float32, as torch's matmuls
# do. A pattern must match all of torch.cuda.get_device_name except VENDOR, so laptop GPUs and MIG
# slices don't match; a partitioned MI300X keeps its name and needs metrics.peak_flops. On AMD, fp32
# is the rate of the matrix cores, and torch uses no tf32.
COLUMNS = ("fp32", "tf32", "bf16", "fp16")
PEAKS = (
    ("V100-SXM2-(16|32)GB", 15.7, 0, 0, 125),  # NVIDIA V100 datasheet, V100 SXM2
    ("V100-PCIE-(16|32)GB", 14.0, 0, 0, 112),  # NVIDIA V100 datasheet, V100 PCIe
    ("T4", 8.1, 0, 0, 65),  # NVIDIA T4 datasheet
    ("A100-(SXM4|PCIE)-40GB", 19.5, 156, 312, 312),  # NVIDIA A100 datasheet
    ("A[18]00(-SXM4-80GB| 80GB PCIe)", 19.5, 156, 312, 312),  # NVIDIA A100 and A800 datasheets
    ("A40", 37.4, 74.8, 149.7, 149.7),  # NVIDIA A40 datasheet
    ("A10", 31.2, 62.5, 125, 125),  # NVIDIA A10 datasheet
    ("A10G", 0, 35, 70, 70),  # NVIDIA A10G datasheet, for AWS G5
    ("RTX A6000", 38.7, 77.4, 154.8, 154.8),  # NVIDIA Ampere GA102 whitepaper
    ("RTX 3090", 35.6, 35.6, 71, 71),  # NVIDIA Ampere GA102 whitepaper
    ("RTX 4090", 82.6, 82.6, 165.2, 165.2),  # NVIDIA Ada whitepaper
    ("RTX 6000 Ada Generation", 91.1, 182.1, 364.2, 364.2),  # NVIDIA Ada whitepaper
    ("RTX 5090", 104.8, 104.8, 209.5, 209.5),  # NVIDIA RTX Blackwell whitepaper
    ("RTX PRO 6000 Blackwell Works.*", 126.0, 251.9, 503.8, 503.8),  # NVIDIA RTX PRO whitepaper
    ("L4", 30.3, 60, 121, 121),  # NVIDIA L4 datasheet, half of 120, 242
    ("L40S", 91.6, 183, 362.05, 362.05),  # NVIDIA L40S datasheet
    ("H100 80GB HBM3|H800|H200", 66.9, 494.7, 989.4, 989.4),  # NVIDIA H100 whitepaper, H100 SXM5
    ("H[18]00 PCIe", 51.2, 378, 756, 756),  # NVIDIA H100 whitepaper, H100 PCIe
    ("H[12]00 NVL", 60, 417.5, 835.5, 835.5),  # NVIDIA H100 datasheet, half of 1,671
    ("H20", 44, 74, 148, 148),  # NVIDIA H20 datasheet
    ("GH200 (480GB|120GB|144G HBM3e)", 66.9, 494.7, 989.4, 989.4),  # NVIDIA GH200 datasheet
    ("B200|B300( SXM6 AC)?", 0, 1125, 2250, 2250),  # NVIDIA HGX B200 page, 36,000 / 2 / 8
    ("GB[23]00", 0, 1250, 2500, 2500),  # NVIDIA GB200 NVL72 page, 360,000 / 2 / 72
    ("MI250X", 47.85, 0, 191.5, 191.5),  # AMD Instinct MI250X datasheet, half of it
    ("MI300X( OAM)?", 163.4, 0, 1307.4, 1307.4),  # AMD Instinct MI300X datasheet
    ("MI325X( OAM)?", 163.4, 0, 1307.4, 1307.4),  # AMD Instinct MI325X datasheet
    ("MI350X( OAM)?", 144.2, 0, 2306.9, 2306.9),  # AMD Instinct MI350X datasheet
    ("MI355X( OAM)?", 157.3, 0, 2516.6, 2516.6),  # AMD Instinct MI355X datasheet
)

VENDOR = re.compile(r"\b(NVIDIA|Tesla|GeForce|AMD|Instinct)\b")


def known_peak(device_name: str, dtype: str) -> float:
    """Dense peak FLOP/s of a device in fp32, tf32, bf16 or fp16; 0 if the table lacks it."""
    name = " ".join(VENDOR.sub("", device_name).split())
    for pattern, *tflops in PEAKS:
        if re.fullmatch(pattern, name):
            return tflops[COLUMNS.index(dtype)] * 1e12
    return 0.0


class Mfu(Observer):
    """Adds each rank's throughput/mfu. item_seconds: seconds per item at peak FLOP/s: [ranks]."""

    def __init__(self, item_seconds: np.ndarray):
        self._item_seconds = item_seconds

    def rank_tags(self, row: LogRow) -> dict[str, np.ndarray]:
        return {"throughput/mfu": row.per_second("items") * self._item_seconds}


def find_mfu(world: World, config: Config, task: Task, parallel: Parallel) -> Mfu | None:
    """The run's Mfu; None if it can't be computed. Raises as `flops_per_item`."""
    peak = config.metrics.peak_flops
    if peak == "auto" and world.device.type != "cuda":
        return None
    missing = ""
    if peak == "auto":
        dtype = config.precision.name
        if dtype == "fp32" and config.precision.tf32:
            dtype = "tf32"
        name = torch.cuda.get_device_name(world.device)
        peak = known_peak(name, dtype)
        if not peak:
            missing = f"the peak of {name} in {dtype} is not known; set metrics.peak_flops, in "
            missing += "FLOP/s"
    if not hasattr(task, "flops_per_item"):
        missing = "the task has no flops_per_item(model); dist_amp.telemetry.mfu.count_flops "
        missing += "computes it"
    reasons = [text for text in world.gather(missing) if text]
    if reasons:
        world.say(f"mfu    not shown: {reasons[0]}")
        return None
    with parallel.no_side_effects():  # the task may run its model to count
        flops = flops_per_item(task, parallel.module)
    return Mfu(np.array(world.gather(flops / peak)))


def flops_per_item(task: Any, model: nn.Module) -> float:
    """The task's FLOPs per item. Raises DataError unless they are a finite number above 0."""
    name = "flops_per_item(model)"
    flops: float = call_task(DataError, name, lambda: float(task.flops_per_item(model)))
    if not 0 < flops < math.inf:
        raise DataError(
            f"the task's {name} returned {flops:g}; it must be a finite number above 0: the "
            "floating-point operations of one sample's forward and backward"
        )
    return flops


def count_flops(task: Task, model: nn.Module, batch: Any) -> float:
    """FLOPs of a batch's forward, loss and backward, as torch's FlopCounterMode counts them.

    It counts convolutions and matrix products, including attention's; a multiply-add is two FLOPs.
    Pass a new model without activation checkpointing; for flops_per_item, divide by the samples:

        count_flops(task, task.build_model(), collate([task.build_dataset("train")[0]]))
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        torch.autograd.grad(task.loss_sum(model, batch), parameters, allow_unused=True)
    return float(counter.get_total_flops())
