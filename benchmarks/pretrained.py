"""Time and memory per rank to load pretrained weights into FSDP2's shards.

python -m benchmarks pretrained [--ranks 2] [--layers 20]

A Llama of width 1,024 with 32,000 tokens (322 million parameters with 20 layers) is written to a
temporary folder in bfloat16, and loaded in float32 on CPU processes in two ways: straight into the
shards, and by from_pretrained on every rank before sharding. Memory is how much a rank's peak
resident memory grows, including pages of mapped files.
"""

import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import at_least, command, on_ranks
from dist_amp.parallel import build_parallel
from dist_amp.precision import build_precision
from dist_amp.scaling.blocks import find_blocks
from dist_amp.scaling.meta import build_module, load_parameters
from dist_amp.settings import ParallelConfig, PrecisionConfig
from dist_amp.supervise.command_line import Parser
from dist_amp.tasks.pretrained import load_pretrained
from dist_amp.world import World


@command
def main(words: Sequence[str]) -> None:
    parser = Parser("python -m benchmarks pretrained", __doc__)
    parser.add_argument("--ranks", type=at_least(2), default=2, metavar="N", help="default: 2")
    parser.add_argument("--layers", type=at_least(1), default=20, metavar="N", help="default: 20")
    options = parser.parse_args(words)
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"small": (8, 1), "large": (1024, options.layers)}
    with tempfile.TemporaryDirectory() as folder:
        for name, (width, layers) in sizes.items():
            config = LlamaConfig(
                hidden_size=width,
                intermediate_size=11 * width // 4,
                num_hidden_layers=layers,
                num_attention_heads=max(1, width // 64),
            )
            model: Any = LlamaForCausalLM(config).bfloat16()
            model.save_pretrained(f"{folder}/{name}")
            count = model.num_parameters()
            del model
        print(f"{count:,} parameters, {4 * count / 2**20:,.0f} MiB in float32, FSDP2")
        for task in (IntoShards, OnEachRank):
            seconds, size = on_ranks(options.ranks, measure, folder, task)
            print(f"  {task.__doc__}: {seconds:.1f} s, {size / 2**20:,.0f} MiB per rank")


class OnEachRank:
    """from_pretrained on each rank"""

    def __init__(self, folder: str):
        self.folder = folder

    def build_model(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)


class IntoShards(OnEachRank):
    """straight into shards"""

    def build_model(self) -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(self.folder)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    def load(self, model: nn.Module) -> None:
        load_pretrained(model, self.folder)


def measure(world: World, folder: str, task: Any) -> list[float]:
    """[seconds, bytes], each of the rank with the most."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    load(world, task(f"{folder}/small"))  # imports, and the mesh, which a process makes only once
    world.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak. Source: proc(5)
    started = time.perf_counter()
    before = peak_bytes()
    load(world, task(f"{folder}/large"))
    rows = world.gather([time.perf_counter() - started, peak_bytes() - before])
    return [max(column) for column in zip(*rows, strict=True)]


def peak_bytes() -> int:
    """This process's peak resident memory, including pages of mapped files."""
    (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(kib)


def load(world: World, task: Any) -> None:
    module = build_module(task)
    precision = build_precision(PrecisionConfig(use_amp=False), True, world)
    blocks = find_blocks(module)
    parallel = build_parallel(ParallelConfig(), "fsdp", module, blocks, precision, world)
    load_parameters(task, parallel.module, world)


if __name__ == "__main__":
    sys.exit(main())
