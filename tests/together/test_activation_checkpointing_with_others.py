"""What test_activation_checkpointing.py tests, with other features."""

import pytest
from byte_model import (
    BF16,
    EVERY_SECOND,
    FP32,
    FULL,
    SELECTIVE,
    Bytes,
    bytes_run,
    nothing_compiled_yet,  # noqa: F401
)
from ranks import on_ranks
from test_activation_checkpointing import ConvNet, assert_equal
from tiny import make_run, take_steps

from benchmarks.activations import kept_and_flops
from dist_amp.verify.cells import capture
from dist_amp.world import World


def gradients_and_buffers(world, task, words):
    """Of two steps: unscaled gradients on rank 0, then the buffers."""
    run = make_run(
        world, task, "--train.micro_batch_size", 4, "--train.accumulation_steps", 2, *words
    )
    states = capture(run)
    take_steps(run, 2)
    gradients = [value for state in states for value in state.gradients.values()]
    return [*gradients, *(buffer.clone() for buffer in run.parallel.module.buffers())]


@pytest.mark.parametrize("setting", [FULL, SELECTIVE], ids=["full", "selective"])
def test_batch_norm_gathers_its_statistics_once_and_gradients_are_those_of_none(setting):
    words = ["--parallel.strategy", "ddp", *FP32]
    plain = on_ranks(2, gradients_and_buffers, ConvNet(), words)[0]
    mine = on_ranks(2, gradients_and_buffers, ConvNet(), [*words, *setting])[0]
    assert_equal(mine, plain)  # the same operations on the same numbers


def test_selective_lies_between_full_and_none_in_memory_and_recomputes_hardly_any_arithmetic():
    none, half, selective, full = (
        kept_and_flops(bytes_run(World(), Bytes(layers=4), *BF16, *words))
        for words in ([], EVERY_SECOND, SELECTIVE, FULL)
    )
    assert full[0] < selective[0] < 0.75 * none[0]
    assert full[0] < half[0] < none[0]
    assert none[1] == selective[1] < half[1] < full[1]
