"""Core as test_strangers.py tests it, with frozen."""

import pytest
import torch
from ranks import on_ranks
from test_strangers import dtypes_after_a_step
from tiny import Tiny


class FrozenBase(Tiny):
    """What LoRA trains: a frozen base in bf16 and a few parameters beside it."""

    def build_model(self):
        model = super().build_model().bfloat16()
        for part in (model[0], model[1]):
            part.requires_grad_(False)
        return model


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_a_frozen_base_keeps_its_bf16_unless_everything_is_computed_in_float32(ranks, strategy):
    words = ["--parallel.strategy", strategy]
    assert (
        on_ranks(ranks, dtypes_after_a_step, FrozenBase(), *words)
        == [{torch.bfloat16, torch.float32}] * ranks
    )
    assert (
        on_ranks(ranks, dtypes_after_a_step, FrozenBase(), *words, "--use_amp", "false")
        == [{torch.float32}] * ranks
    )
