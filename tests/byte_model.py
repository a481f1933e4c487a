"""A small language model of random bytes, and settings that change how its blocks compute."""

import pytest
import torch
import torch._dynamo
from tiny import Rows, make_run

from dist_amp.settings import DataConfig
from dist_amp.tasks.causal_lm import CausalLM

FP32, BF16 = ["--use_amp", "false"], ["--precision.dtype", "bf16"]
# Traces and cuts graphs as inductor does, and runs them with torch's own kernels: seconds, not
# minutes.
COMPILED = ["--compile.blocks", "true", "--compile.mode", "aot_eager"]
FULL = ["--parallel.activation_checkpointing", "full"]
SELECTIVE = ["--parallel.activation_checkpointing", "selective"]
EVERY_SECOND = ["--parallel.activation_checkpointing", "2"]


@pytest.fixture(autouse=True)
def nothing_compiled_yet():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield


class Bytes(CausalLM):
    def __init__(self, loss_chunk="off", layers=3, tied=True):
        shape = {"context": 16, "width": 16, "layers": layers, "heads": 2, "vocabulary": 256}
        super().__init__(DataConfig(), **shape, tied=tied, loss_chunk=loss_chunk)

    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, 256, (64, self.context + 1), generator=generator)
        return Rows(input_ids=tokens, labels=tokens)


def bytes_run(world, task, *words):
    return make_run(
        world, task, "--train.micro_batch_size", 4, "--train.accumulation_steps", 2, *words
    )
