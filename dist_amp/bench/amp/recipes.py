"""The precisions that are compared, as settings of the main job; and what of them the main job has no setting for."""

from dataclasses import dataclass

import torch

from dist_amp.run import Run
from dist_amp.settings import Config


@dataclass(frozen=True)
class Recipe:
    """One precision. roundoff: of what products are rounded to, relative; half of a last place."""

    words: tuple[str, ...]
    roundoff: float
    about: str
    scaler: bool | None = None  # None: as in the main job, in fp16 alone


def settings(dtype: str, tf32: str = "false") -> tuple[str, ...]:
    """Everything that a config of one's own may have set otherwise."""
    amp = ("false",) if dtype == "fp32" else ("true", "--precision.dtype", dtype)
    return ("--precision.cast_by", "auto", "--precision.tf32", tf32, "--use_amp", *amp)


FP32 = "fp32"
RECIPES = {
    FP32: Recipe(settings("fp32"), 2**-24, "float32, tf32 off"),
    "tf32": Recipe(settings("fp32", tf32="true"), 2**-11, "float32, its products rounded to TF32"),
    "bf16": Recipe(settings("bf16"), 2**-8, "autocast to bfloat16"),
    "fp16": Recipe(settings("fp16"), 2**-11, "autocast to float16, with the loss scaler"),
    "fp16_unscaled": Recipe(settings("fp16"), 2**-11, "autocast to float16 alone", scaler=False),
    "fp32_scaled": Recipe(settings("fp32"), 2**-24, "float32, with the loss scaler", scaler=True),
}
USUAL = (FP32, "tf32", "bf16", "fp16")  # in every form and mode
TO_TRAIN = (*USUAL, "fp16_unscaled")  # and `Experiment.precisions`
BY_HAND = {f"{name} by hand": name for name in (FP32, "bf16", "fp16")}  # the loop that users write


def lacks(name: str, device: torch.device) -> str:
    """Why a device can't compute so; "" where it can."""
    if name != "tf32":
        return ""
    if device.type != "cuda":
        return "for GPUs alone"
    if not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 0):
        return "not known to GPUs before Ampere"
    return ""


def differs_by_hand(config: Config) -> str:
    """What the loop by hand has not, so that it can't be compared; "" where it takes the same step."""
    differences = {
        "parallel.activation_checkpointing": config.parallel.activation_checkpointing != "none",
        "train.clip_by=value": config.train.clip_by == "value",
        "optim.fused=false": not config.optim.fused,
    }
    return next((name for name, there in differences.items() if there), "")


def set_scaler(run: Run, recipe: Recipe) -> None:
    """Take the loss scaler away, or give one to float32: the main job has neither, since neither is of use."""
    if recipe.scaler is None:
        return
    run.scaler.scales = recipe.scaler
    run.scaler.scale_tensor.fill_(run.config.precision.scaler.init_scale if recipe.scaler else 1.0)
