"""What test_explain.py tests, with other features."""

import pytest
import torch
from tiny import Tiny, make_run

from dist_amp.config.memory import size_text
from dist_amp.supervise import explain
from dist_amp.supervise.explain import explain_memory
from dist_amp.world import World

GIB = 2**30


@pytest.mark.parametrize(
    ("ranks", "words", "expected"),
    [
        (
            1,
            [],
            "a train.micro_batch_size below 4 (with more train.accumulation_steps), or "
            "parallel.activation_checkpointing=selective or full, or a smaller model",
        ),
        (
            8,
            ["--parallel.activation_checkpointing", "full", "--train.micro_batch_size", 1],
            "parallel.strategy=fsdp, or a smaller model",
        ),
    ],
)
def test_the_line_has_the_request_what_the_model_takes_and_the_settings_that_take_less(
    monkeypatch, ranks, words, expected
):
    monkeypatch.setattr(explain, "capacity_of", lambda world: (79 * GIB, 9 * GIB))
    monkeypatch.setattr(explain, "memory_use", lambda device: (78 * GIB,))
    run = make_run(World(), Tiny(), "--train.micro_batch_size", 4, *words)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    world = World(min(3, ranks - 1), 0, ranks, ranks, torch.device("cuda", 0))
    size = size_text(0)
    assert str(explain_memory(error, run.config, world, run)) == (
        f"rank {world.rank} ran out of GPU memory in step 1: asked for 2.00 GiB more than the "
        f"78.00 GiB in use, of 79.00 GiB available; parameters take {size}, gradients {size}, "
        f"optimizer state {size}; use PYTORCH_ALLOC_CONF=expandable_segments:True in the "
        f"environment (9.00 GiB are reserved but fragmented), or {expected}"
    )
