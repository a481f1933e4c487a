"""python -m dist_amp.bench pretrained [--ranks 2] [--layers 20] [--dtype bf16]: how weights reach FSDP2's shards.

A Llama of width 1,024 and 32,000 tokens (with 20 layers 322 million parameters) is written to a temporary folder and
loaded in float32 on CPU processes in two ways: straight into the shards, and by from_pretrained on every rank and
sharding after that. Time from the start of the build until the model is ready; and by how much a rank's memory grew at
most, read every 5 ms: its own (RssAnon), and with the pages of the files that are mapped into it (VmRSS).
"""

import re
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dist_amp.bench.harness import at_least, on_ranks
from dist_amp.checkpoint.pretrained import load_pretrained
from dist_amp.commands.command_line import Parser, exit_status
from dist_amp.config.auto import find_blocks
from dist_amp.errors import ConfigError
from dist_amp.parallel import build_parallel
from dist_amp.precision import build_precision
from dist_amp.runtime.meta import build_module, load_parameters
from dist_amp.settings import ParallelConfig, PrecisionConfig
from dist_amp.world import World

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WAYS = {"straight into shards": True, "from_pretrained on each rank": False}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return exit_status(run, argv)


def run(argv: Sequence[str]) -> int:
    parser = Parser("python -m dist_amp.bench pretrained", __doc__)
    parser.add_argument("--ranks", type=at_least(2), default=2, metavar="N", help="default: 2")
    parser.add_argument("--layers", type=at_least(1), default=20, metavar="N", help="default: 20")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the files; default: bf16")
    options = parser.parse_args(argv)
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing; pip install -e '.[hf]' in the clone's folder") from error
    large = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=options.layers, num_attention_heads=16
    )
    small = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    with tempfile.TemporaryDirectory() as folder:
        for name, config in (("large", large), ("small", small)):
            model: Any = LlamaForCausalLM(config)
            model.to(DTYPES[options.dtype])
            model.save_pretrained(f"{folder}/{name}")
            if name == "large":
                count = sum(parameter.numel() for parameter in model.parameters())
            del model
        print(f"{count:,} parameters, {4 * count / 2**20:,.0f} MiB in float32, FSDP2 on {options.ranks} ranks")
        for way, straight in WAYS.items():
            seconds, own, resident = on_ranks(options.ranks, measure, folder, straight)
            print(
                f"  {way}: {seconds:.1f} s, {own / 2**20:,.0f} MiB per rank, {resident / 2**20:,.0f} with mapped files"
            )
    return 0


class Llama:
    """The model of a folder; `straight`: loaded after it is sharded."""

    def __init__(self, folder: str, straight: bool):
        self.folder = folder
        if straight:
            self.load = self.load_shards

    def build_model(self) -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM

        if hasattr(self, "load"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.folder), dtype=torch.float32)
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)

    def load_shards(self, model: nn.Module) -> None:
        load_pretrained(model, self.folder)


def measure(world: World, folder: str, straight: bool) -> list[float]:
    """[seconds, bytes, bytes with mapped files], each the largest of all ranks."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    load(world, f"{folder}/small", straight)  # what a process does once: imports, and the mesh
    world.barrier()
    started = time.perf_counter()
    with growth() as peak:
        load(world, f"{folder}/large", straight)
    rows = world.gather_numbers([time.perf_counter() - started, *peak])
    return [max(column) for column in zip(*rows, strict=True)]


def load(world: World, folder: str, straight: bool) -> None:
    """As build_run does."""
    task: Any = Llama(folder, straight)
    module = build_module(task)
    precision = build_precision(PrecisionConfig(use_amp=False), True, world)
    parallel = build_parallel(ParallelConfig(), "fsdp", module, find_blocks(module), precision, world)
    load_parameters(task, parallel.module, world)


@contextmanager
def growth() -> Iterator[list[float]]:
    """The largest growth of RssAnon and of VmRSS within the block, [2] bytes, known after it."""
    before, peak, done = resident(), [0.0, 0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak[:] = [max(most, now - then) for most, now, then in zip(peak, resident(), before, strict=True)]

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def resident() -> list[float]:
    """RssAnon and VmRSS of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return [1024.0 * int(re.findall(rf"{name}:\s+(\d+) kB", status)[0]) for name in ("RssAnon", "VmRSS")]
