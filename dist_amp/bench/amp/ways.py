"""The precisions that are compared, as settings of the main job; and what of them the main job has no setting for."""

from dataclasses import dataclass

import torch

from dist_amp.run import Run


@dataclass(frozen=True)
class Way:
    """One precision. roundoff: of what products are rounded to, relative; half of a last place."""

    words: tuple[str, ...]
    roundoff: float
    about: str
    scaler: bool | None = None  # None: as in the main job, in fp16 alone


def precision(dtype: str, tf32: str = "false") -> tuple[str, ...]:
    """Everything that a config of one's own may have set otherwise."""
    amp = ("false",) if dtype == "fp32" else ("true", "--precision.dtype", dtype)
    return ("--precision.cast_by", "auto", "--precision.tf32", tf32, "--use_amp", *amp)


FP32 = "fp32"
WAYS = {
    FP32: Way(precision("fp32"), 2**-24, "float32, tf32 off"),
    "tf32": Way(precision("fp32", tf32="true"), 2**-11, "float32, its products rounded to TF32"),
    "bf16": Way(precision("bf16"), 2**-8, "autocast to bfloat16"),
    "fp16": Way(precision("fp16"), 2**-11, "autocast to float16, with the loss scaler"),
    "fp16_unscaled": Way(precision("fp16"), 2**-11, "autocast to float16 alone", scaler=False),
    "fp32_scaled": Way(precision("fp32"), 2**-24, "float32, with the loss scaler", scaler=True),
}
USUAL = (FP32, "tf32", "bf16", "fp16")  # in every form and mode
BY_HAND = {f"{name} by hand": name for name in (FP32, "bf16", "fp16")}  # the loop that users write
TO_TRAIN = (*USUAL, "fp16_unscaled")  # and `Experiment.ways`


def cant(name: str, device: torch.device) -> str:
    """Why a device can't go this way; "" where it can."""
    if name != "tf32":
        return ""
    if device.type != "cuda":
        return "for GPUs alone"
    if not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 0):
        return "not known to GPUs before Ampere"
    return ""


def set_scaler(run: Run, way: Way) -> None:
    """Take the loss scaler away, or give one to float32: the main job has neither, since neither is of use."""
    if way.scaler is None:
        return
    run.precision.scales = way.scaler
    run.precision.scale.fill_(run.config.precision.scaler.init_scale if way.scaler else 1.0)
