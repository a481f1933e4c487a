"""MFU, model FLOPs utilisation: the share of a device's peak FLOP/s that goes into the model's own arithmetic.

    MFU = items per second x the task's flops_per_item(model) / the device's peak

Recomputation (activation checkpointing) does not count, so it lowers MFU by the time it takes. Source: Chowdhery et al.
2022, arXiv:2204.02311, appendix B. To delete: this file, metrics.peak_flops and its line in train.py.
"""

import math
import re
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dist_amp.checkpoint.state import no_side_effects
from dist_amp.errors import DataError
from dist_amp.run import Run
from dist_amp.runtime.task_calls import call_task
from dist_amp.task import Task

# Dense TFLOP/s of one device, as torch counts devices; 0 if the vendor gives no number, or two that differ. If a
# datasheet has only the rate with structured sparsity, which is twice the dense one, the source says so. fp16 is with
# float32 accumulation, as in torch's matmuls. A pattern matches the whole of torch.cuda.get_device_name without the
# vendor's words, so that laptop GPUs, MIG slices and other variants don't match; a partitioned MI300X keeps its name
# and needs metrics.peak_flops.
PEAKS = (
    # name, a pattern                        fp32   tf32    bf16    fp16  source
    (r"V100-SXM2-(16|32)GB",                 15.7,     0,      0,    125, "NVIDIA V100 datasheet, V100 SXM2"),
    (r"V100-PCIE-(16|32)GB",                 14.0,     0,      0,    112, "NVIDIA V100 datasheet, V100 PCIe"),
    (r"V100S-PCIE-32GB",                     16.4,     0,      0,    130, "NVIDIA V100 datasheet, V100S PCIe"),
    (r"T4",                                   8.1,     0,      0,     65, "NVIDIA T4 datasheet"),
    (r"A100-(SXM4|PCIE)-40GB",               19.5,   156,    312,    312, "NVIDIA A100 datasheet"),
    (r"A100-SXM4-80GB|A100 80GB PCIe",       19.5,   156,    312,    312, "NVIDIA A100 datasheet"),
    (r"A800-SXM4-80GB|A800 80GB PCIe",       19.5,   156,    312,    312, "NVIDIA A800 datasheet: as the A100"),
    (r"A30",                                 10.3,    82,    165,    165, "NVIDIA A30 datasheet"),
    (r"A40",                                 37.4,  74.8,  149.7,  149.7, "NVIDIA A40 datasheet"),
    (r"A10",                                 31.2,  62.5,    125,    125, "NVIDIA A10 datasheet"),
    (r"A10G",                                   0,    35,     70,     70, "NVIDIA A10G datasheet, for AWS G5"),
    (r"Quadro RTX 6000",                     16.3,     0,      0,  130.5, "NVIDIA Turing whitepaper"),
    (r"RTX A6000",                           38.7,  77.4,  154.8,  154.8, "NVIDIA Ampere GA102 whitepaper"),
    (r"RTX 3090",                            35.6,  35.6,     71,     71, "NVIDIA Ampere GA102 whitepaper"),
    (r"RTX 4090",                            82.6,  82.6,  165.2,  165.2, "NVIDIA Ada whitepaper"),
    (r"RTX 6000 Ada Generation",             91.1, 182.1,  364.2,  364.2, "NVIDIA Ada whitepaper"),
    (r"RTX 5090",                           104.8, 104.8,  209.5,  209.5, "NVIDIA RTX Blackwell whitepaper"),
    (r"RTX PRO 6000 Blackwell Works.*",     126.0, 251.9,  503.8,  503.8, "NVIDIA RTX Blackwell PRO whitepaper"),
    (r"L4",                                  30.3,    60,    121,    121, "NVIDIA L4 datasheet, half of 120, 242"),
    (r"L40",                                 90.5,  90.5, 181.05, 181.05, "NVIDIA L40 datasheet"),
    (r"L40S",                                91.6,   183, 362.05, 362.05, "NVIDIA L40S datasheet"),
    (r"H100 80GB HBM3",                      66.9, 494.7,  989.4,  989.4, "NVIDIA H100 whitepaper, H100 SXM5"),
    (r"H100 PCIe",                           51.2,   378,    756,    756, "NVIDIA H100 whitepaper, H100 PCIe"),
    (r"H100 NVL",                              60, 417.5,  835.5,  835.5, "NVIDIA H100 datasheet, half of 835, 1,671"),
    (r"H800",                                66.9, 494.7,  989.4,  989.4, "NVIDIA H800 datasheet: as the H100 SXM5"),
    (r"H800 PCIe",                           51.2,   378,    756,    756, "NVIDIA H800 datasheet: as the H100 PCIe"),
    (r"H20",                                   44,    74,    148,    148, "NVIDIA H20 datasheet"),
    (r"H200",                                66.9, 494.7,  989.4,  989.4, "NVIDIA H200 datasheet: as the H100 SXM5"),
    (r"H200 NVL",                              60, 417.5,  835.5,  835.5, "NVIDIA H200 datasheet, half of 835, 1,671"),
    (r"GH200 (480GB|120GB|144G HBM3e)",      66.9, 494.7,  989.4,  989.4, "NVIDIA GH200 datasheet: as the H100 SXM5"),
    (r"B100",                                   0,   875,   1750,   1750, "NVIDIA HGX B100 page, 28,000 / 2 / 8"),
    (r"B200",                                   0,  1125,   2250,   2250, "NVIDIA HGX B200 page, 36,000 / 2 / 8"),
    (r"GB200",                                  0,  1250,   2500,   2500, "NVIDIA GB200 NVL72 page, 360,000 / 2 / 72"),
    (r"B300( SXM6 AC)?",                        0,  1125,   2250,   2250, "NVIDIA HGX B300 page, 36,000 / 2 / 8"),
    (r"GB300",                                  0,  1250,   2500,   2500, "NVIDIA GB300 NVL72 page, 360,000 / 2 / 72"),
    # AMD: float32 on the matrix cores; no tf32, which torch does not use there by default. Each GCD is a device.
    (r"MI210",                               45.3,     0,  181.0,  181.0, "AMD Instinct MI210 datasheet"),
    (r"MI250X",                             47.85,     0,  191.5,  191.5, "AMD Instinct MI250X datasheet, half of it"),
    (r"MI300A",                             122.6,     0,  980.6,  980.6, "AMD Instinct MI300A datasheet"),
    (r"MI300X( OAM)?",                      163.4,     0, 1307.4, 1307.4, "AMD Instinct MI300X datasheet"),
    (r"MI325X( OAM)?",                      163.4,     0, 1307.4, 1307.4, "AMD Instinct MI325X datasheet"),
    (r"MI350X( OAM)?",                      144.2,     0, 2306.9, 2306.9, "AMD Instinct MI350X datasheet"),
    (r"MI355X( OAM)?",                      157.3,     0, 2516.6, 2516.6, "AMD Instinct MI355X datasheet"),
)  # fmt: skip

COLUMNS = ("fp32", "tf32", "bf16", "fp16")

VENDOR = re.compile(r"\b(NVIDIA|Tesla|GeForce|AMD|Instinct)\b")


def known_peak(device_name: str, dtype: str) -> float:
    """Dense FLOP/s of a device in fp32, tf32, bf16 or fp16; 0 if the table does not have it."""
    name = " ".join(VENDOR.sub("", device_name).split())
    for pattern, *tflops, _ in PEAKS:
        if re.fullmatch(str(pattern), name):
            return float(tflops[COLUMNS.index(dtype)]) * 1e12
    return 0.0


def item_seconds_at_peak(run: Run) -> float:
    """Seconds for one item's arithmetic at the peak of this rank's device; 0 if MFU can't be computed.

    Says once what is missing, on GPUs and if metrics.peak_flops is set. Every rank calls it; their devices may differ.
    Errors: DataError if the task's flops_per_item is not a number of operations.
    """
    peak, device = run.config.metrics.peak_flops, run.world.device
    if peak == "auto" and device.type != "cuda":
        return 0.0
    missing = []
    if peak == "auto":
        precision = run.config.precision
        dtype = "tf32" if precision.name == "fp32" and precision.tf32 else precision.name
        name = torch.cuda.get_device_name(device)
        peak = known_peak(name, dtype)
        if not peak:
            missing.append(f"the peak of {name} in {dtype} is not known; set metrics.peak_flops, in FLOP/s")
    with no_side_effects(run):  # a task may count by running its model
        flops = flops_per_item(run.task, run.parallel.module)
    if not flops:
        missing.append("the task has no flops_per_item(model); dist_amp.telemetry.mfu.count_flops computes it")
    if missing:
        run.world.say("mfu    not shown: " + "; and ".join(missing))
        return 0.0
    return flops / peak


def flops_per_item(task: Task, model: nn.Module) -> float:
    """The task's count for one item's forward and backward; 0 if it has none.

    Errors: DataError if its method fails, or returns anything but a finite number above 0.
    """
    method = getattr(task, "flops_per_item", None)
    if method is None:
        return 0.0
    flops = call_task(DataError, "flops_per_item(model)", method, model)
    # What isn't a number is shown by its type alone: a tensor's text has many lines.
    if not isinstance(flops, Real) or not 0 < float(flops) < math.inf:
        what = f"{float(flops):g}" if isinstance(flops, Real) else type(flops).__name__
        raise DataError(
            f"the task's flops_per_item(model) returned {what}; it must be a finite number above 0: the floating-point "
            "operations of one sample's forward and backward"
        )
    return float(flops)


def count_flops(task: Task, model: nn.Module, batch: Any) -> float:
    """Floating-point operations of forward, loss and backward of a batch, as torch.utils.flop_counter counts them.

    Counts matrix products and convolutions; a multiply-add is two. Elementwise operations, lookups and custom kernels
    are not counted. Attention runs as plain matrix products here, because fused kernels are counted differently, and
    on the CPU not at all. Pass a fresh model without activation checkpointing, and divide by the number of samples:

        count_flops(task, task.build_model(), collate([task.build_dataset("train")[0]]))

    With the model built under `torch.device("meta")` and the batch there too, it takes no memory and no time.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        torch.autograd.grad(task.loss_sum(model, batch), parameters, allow_unused=True)
    return float(counter.get_total_flops())
