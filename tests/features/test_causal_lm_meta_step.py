"""A whole step on the meta device, whose tensors have no values: a read by the host raises."""

from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
from tiny import make_run

from dist_amp.settings import DataConfig
from dist_amp.step import train_step
from dist_amp.tasks.causal_lm import CausalLM
from dist_amp.world import World

META = torch.device("meta")
# Kernels that torch has for CPUs and GPUs alone. What they compute does not matter here.
FUSED = ("_fused_adamw_", "_fused_adamw_.tensor_lr", "_fused_sgd_", "_fused_sgd_.tensor_lr")


class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.zeros(129, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens.clone()}


class Text(CausalLM):
    """The shipped GPT, whose data is zeros."""

    def __init__(self, **options):
        super().__init__(DataConfig(), layers=2, **options)

    def build_dataset(self, split):
        return Rows()


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


def test_a_read_in_the_step_is_found():
    class Reads(Text):
        def loss_sum(self, model, batch):
            loss = super().loss_sum(model, batch)
            assert loss.item() >= 0
            return loss

    with meta_kernels():
        run = make_run(World(device=META), Reads(), "--use_amp", "false")
        with pytest.raises(RuntimeError, match="cannot be called on meta tensors"):
            train_step(run, [batch_on_meta()])
