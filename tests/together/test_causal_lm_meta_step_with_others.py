"""A whole step on the meta device, whose tensors have no values: a read by the host raises."""

from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
from tiny import Rows, make_run

from dist_amp.settings import DataConfig
from dist_amp.step import train_step
from dist_amp.tasks.causal_lm import CausalLM
from dist_amp.world import World

META = torch.device("meta")
# Kernels that torch has for CPUs and GPUs alone. What they compute does not matter here.
FUSED = ("_fused_adamw_", "_fused_adamw_.tensor_lr", "_fused_sgd_", "_fused_sgd_.tensor_lr")


class Text(CausalLM):
    """The shipped GPT, whose data is zeros."""

    def __init__(self):
        super().__init__(DataConfig(), layers=1, loss_chunk=300)

    def build_dataset(self, split):
        tokens = torch.zeros(64, 129, dtype=torch.int64)
        return Rows(input_ids=tokens, labels=tokens)


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


def batch_on_meta():
    tokens = torch.zeros(4, 129, dtype=torch.int64, device=META)
    return {"input_ids": tokens, "labels": tokens, "counted": 512, "tokens": 516}


@pytest.mark.parametrize(
    ("optimizer", "precision", "clip"),
    [
        # Each pair of two values once.
        ("adamw", "fp32", "norm"),
        ("adamw", "bf16", "value"),
        ("adamw", "fp16", "off"),
        ("sgd", "fp32", "value"),
        ("sgd", "bf16", "off"),
        ("sgd", "fp16", "norm"),
        ("muon", "fp32", "off"),
        ("muon", "bf16", "norm"),
        ("muon", "fp16", "value"),
    ],
)
def test_a_step_reads_nothing_from_the_device(optimizer, precision, clip):
    words = ["--optim.name", optimizer, "--train.clip_by", clip]
    words += ["--optim.ema", 0.99, "--train.accumulation_steps", 2, "--compile.blocks", "false"]
    words += ["--use_amp", "false"] if precision == "fp32" else ["--precision.dtype", precision]
    with meta_kernels():
        run = make_run(World(device=META), Text(), *words)
        if optimizer == "muon":
            for group in run.optimizer.param_groups:
                group["fused"] = True  # on meta it is not, for dist_amp.plan
        for _ in range(2):
            report = train_step(run, [batch_on_meta(), batch_on_meta()])
            run.metrics.record(report)
    assert report.norm.device == META
