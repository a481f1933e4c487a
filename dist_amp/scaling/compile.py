"""Compile the blocks of a model before it is placed on the ranks.

torch.compile replaces only a block's `forward`: names stay, and hooks (FSDP's too) stay outside the
compiled code. Where a block is not one graph, torch compiles its parts and logs why
(TORCH_LOGS=graph_breaks,recompiles); with compile.blocks=auto, such a block runs as written. A
deepcopy of the model would run the original's blocks.

Docs: docs/recipes.md
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dist_amp.config.auto import accumulation_steps
from dist_amp.errors import ConfigError, first_line
from dist_amp.scaling.blocks import blocks_of
from dist_amp.settings import CompileConfig, Config
from dist_amp.world import World

CUDA_GRAPHS = ("reduce-overhead", "max-autotune")

# Values of compile.mode that are backends of torch.compile.
GENERATE_NO_CODE = ("eager", "aot_eager")

# Modules of its errors.
OF_THE_COMPILER = ("torch._dynamo", "torch._inductor", "torch.fx")


def pick_compile(
    config: Config, strategy: str, task: Any, module: nn.Module, world: World
) -> CompileConfig:
    """The settings of [compile], where blocks=auto is false if nothing is to be compiled.

    Errors: ConfigError for CUDA graphs of what changes its addresses or is overwritten.
    """
    picked = config.compile
    if picked.blocks == "auto":
        if world.device.type == "cpu":  # which gains little from it
            return replace(picked, blocks=False)
        if reason := reason_not_to_compile(config, task, module):
            world.say(f"compile.blocks=auto: nothing is compiled, because {reason}")
            return replace(picked, blocks=False)
    if picked.blocks is False or picked.mode not in CUDA_GRAPHS:
        return picked
    problem = ""
    if strategy in ("fsdp", "hsdp"):
        problem = f"which need fixed addresses, and {strategy} gathers parameters anew each time"
    elif accumulation_steps(config.train, world.world_size) > 1 and world.device.type == "cuda":
        problem = "whose gradients the next of several micro-batches overwrites"
    if problem:
        raise ConfigError(
            f"compile.mode={picked.mode} replays CUDA graphs, {problem}; use default or "
            "max-autotune-no-cudagraphs"
        )
    return picked


def reason_not_to_compile(config: Config, task: Any, module: nn.Module) -> str:
    """Why compile.blocks=auto compiles nothing on a GPU; "" if it does."""
    if config.parallel.bit_exact:
        return "parallel.bit_exact=true, and what another machine compiles may round otherwise"
    if config.debug.detect_anomaly:
        return "debug.detect_anomaly=true names operations, not compiled code"
    if not blocks_of(task, module):
        return "the model has no blocks"
    return ""


def compile_blocks(
    config: CompileConfig, module: nn.Module, blocks: Sequence[nn.Module], world: World
) -> None:
    """Compile the blocks, or the whole model if it has none, each at its first call."""
    import torch._dynamo.config as dynamo

    what = f"{len(blocks)} blocks" if blocks else "the whole model, which has no blocks,"
    world.say(f"compile.blocks: {what} will be compiled in the first step and evaluation")
    # DDP overlaps already, with a graph per block; its graph splitter fails on recomputed blocks.
    dynamo.optimize_ddp = False  # type: ignore[assignment]
    parts = list(blocks) or [module]
    # The limit counts by the source of a forward, which blocks of one class share, whatever their
    # sizes; and code of an earlier run in this process counts too.
    torch.compiler.reset()
    kinds = len({str(part) for part in parts})
    torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, 8 * kinds)
    # The next step overwrites the results of CUDA graphs, and losses are kept for a while.
    if config.mode not in CUDA_GRAPHS:
        parts += [part for part in module.modules() if getattr(part, "computes_loss", False)]
    options: dict[str, Any] = {"mode": config.mode}
    if config.mode in GENERATE_NO_CODE:
        options = {"backend": config.mode}
    options["dynamic"] = config.blocks == "dynamic"
    as_written: set[type] = set()
    for part in dict.fromkeys(parts):
        if config.blocks == "auto":
            part.forward = compiled_if_one_graph(part, options, as_written, world)
        else:
            part.forward = torch.compile(part.forward, **options)


def compiled_if_one_graph(
    block: nn.Module, options: dict[str, Any], as_written: set[type], world: World
) -> Callable[..., Any]:
    """The block's forward, compiled as one graph, or as written where its class is.

    After a compiler's error the class is added to `as_written`. A forward in several graphs, such
    as that of a mixture of experts, would be compiled for many shapes.
    """
    forward = block.forward
    compiled = torch.compile(forward, fullgraph=True, **options)
    kind = type(block)

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kind not in as_written:
            try:
                return compiled(*args, **kwargs)
            except Exception as error:
                if not type(error).__module__.startswith(OF_THE_COMPILER):
                    raise
                as_written.add(kind)  # nothing of the block has run
                text = f"compile.blocks=auto runs {kind.__name__} as written: {first_line(error)}"
                world.warn(text)
        return forward(*args, **kwargs)

    return call


def keep_code(folder: Path, config: CompileConfig, world: World) -> None:
    """Keep compiled code beside the runs, for resumes elsewhere, unless the user set a folder."""
    if config.blocks == "auto" and world.device.type == "cpu":
        return  # nothing is compiled, and torch would make the folder all the same
    cache = folder.absolute().parent / "compile_cache"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))


def stance(name: str) -> AbstractContextManager[Any]:
    """A context for compiled blocks. force_eager: they run as written, and hooks inside them are
    called; eager_on_recompile: nothing more is compiled, so a new shape, say, runs as written.
    """
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance(name)
    return nullcontext()  # nothing was compiled, and the compiler's import takes seconds
