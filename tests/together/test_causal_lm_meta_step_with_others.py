"""A whole step on the meta device, whose tensors have no values: a read by the host raises."""

from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
from byte_model import BF16, FP32, Bytes
from tiny import make_run

from dist_amp.step import train_step
from dist_amp.world import World

FP16 = ["--precision.dtype", "fp16"]
META = torch.device("meta")
# Kernels that torch has for CPUs and GPUs alone. What they compute does not matter here.
FUSED = ("_fused_adamw_", "_fused_adamw_.tensor_lr", "_fused_sgd_", "_fused_sgd_.tensor_lr")


@contextmanager
def meta_kernels():
    """Inside, the meta device has the fused optimizers, and an autocast that does nothing."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    for name in FUSED:
        library.impl(name, lambda *args, **kwargs: None, allow_override=True)  # torch 2.11 has some
    try:
        with (
            patch("torch.autocast", lambda *args, **kwargs: nullcontext()),
            patch("torch.is_autocast_enabled", lambda device: False),
            patch("torch.optim.optimizer._get_fused_kernels_supported_devices", lambda: ["meta"]),
            patch("dist_amp.config.validate.check_precision", lambda *args: None),
            patch("dist_amp.precision.check_precision", lambda *args: None),
        ):
            yield
    finally:
        library._destroy()


# Each pair of two values once.
@pytest.mark.parametrize(
    ("optimizer", "clips"),
    [
        ("adamw", ("norm", "value", "off")),
        ("sgd", ("value", "off", "norm")),
        ("muon", ("off", "norm", "value")),
    ],
)
def test_a_step_reads_nothing_from_the_device(optimizer, clips):
    tokens = torch.zeros(4, 17, dtype=torch.int64, device=META)
    batch = {"input_ids": tokens, "labels": tokens, "counted": 64, "tokens": 68}
    common = ["--optim.name", optimizer, "--optim.ema", 0.99, "--train.accumulation_steps", 2]
    for precision, clip in zip((FP32, BF16, FP16), clips, strict=True):
        words = [*common, *precision, "--train.clip_by", clip, "--compile.blocks", "false"]
        with meta_kernels():
            run = make_run(World(device=META), Bytes(loss_chunk=40, layers=1), *words)
            if optimizer == "muon":
                for group in run.optimizer.param_groups:
                    group["fused"] = True  # on meta it is not, for dist_amp.plan
            for _ in range(2):
                report = train_step(run, [batch, batch])
                run.metrics.record(report)
        assert report.norm.device == META
