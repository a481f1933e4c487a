"""Compile the blocks of a model before it is placed on the ranks.

Only a block's `forward` is compiled, so that parameter names stay the same and the block's hooks
(FSDP's too) run outside the compiled code. A block with graph breaks is compiled in pieces, and
torch logs why (TORCH_LOGS=graph_breaks,recompiles); with compile.blocks=auto, it runs uncompiled. A
deepcopy of a compiled model would run the original's blocks.

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

# Values of compile.mode that choose one of torch.compile's debugging backends.
GENERATE_NO_CODE = ("eager", "aot_eager")

# Exceptions whose classes are defined in these modules come from the compiler.
COMPILER_MODULES = ("torch._dynamo", "torch._inductor", "torch.fx")


def pick_compile(
    config: Config, strategy: str, task: Any, module: nn.Module, world: World
) -> CompileConfig:
    """The [compile] settings, with blocks=auto replaced by false if nothing should be compiled.

    Raises ConfigError for CUDA graphs with sharding or, on a GPU, with several micro-batches.
    """
    picked = config.compile
    if picked.blocks == "auto":
        if world.device.type == "cpu":  # a CPU gains little from compilation
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
        problem = "which overwrite a micro-batch's gradients in the next one"
    if problem:
        raise ConfigError(
            f"compile.mode={picked.mode} replays CUDA graphs, {problem}; use default or "
            "max-autotune-no-cudagraphs"
        )
    return picked


def reason_not_to_compile(config: Config, task: Any, module: nn.Module) -> str:
    """Why compile.blocks=auto should compile nothing on a GPU; "" if it should compile."""
    if config.parallel.bit_exact:
        return "parallel.bit_exact=true, and code compiled on another machine may round differently"
    if config.debug.detect_anomaly:
        return "debug.detect_anomaly=true can't report an operation inside compiled code"
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
    # With one graph per block, DDP's all-reduces already overlap with backward. Dynamo's splitting
    # of a graph for DDP is not needed, and fails on checkpointed blocks.
    dynamo.optimize_ddp = False  # type: ignore[assignment]
    parts = list(blocks) or [module]
    # torch limits the compilations of one code object, which all blocks of a class share. Allow 8
    # for each kind of block, and forget those of an earlier run in this process.
    torch.compiler.reset()
    kinds = len({str(part) for part in parts})
    torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, 8 * kinds)
    # Also compile heads that compute the loss. Not as CUDA graphs: losses are kept for some steps,
    # and a graph's next replay would overwrite them.
    if config.mode not in CUDA_GRAPHS:
        parts += [part for part in module.modules() if getattr(part, "computes_loss", False)]
    options: dict[str, Any] = {"mode": config.mode}
    if config.mode in GENERATE_NO_CODE:
        options = {"backend": config.mode}
    options["dynamic"] = config.blocks == "dynamic"
    uncompiled: set[type] = set()
    for part in dict.fromkeys(parts):
        if config.blocks == "auto":
            part.forward = compiled_if_one_graph(part, options, uncompiled, world)
        else:
            part.forward = torch.compile(part.forward, **options)


def compiled_if_one_graph(
    block: nn.Module, options: dict[str, Any], uncompiled: set[type], world: World
) -> Callable[..., Any]:
    """The block's forward, compiled as one graph, or unchanged if that failed for its class.

    If the compiler raises an error, the block's class is added to `uncompiled`. Several graphs per
    block, as in a mixture of experts, would be compiled again for many shapes.
    """
    forward = block.forward
    compiled = torch.compile(forward, fullgraph=True, **options)
    kind = type(block)

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kind not in uncompiled:
            try:
                return compiled(*args, **kwargs)
            except Exception as error:
                if not type(error).__module__.startswith(COMPILER_MODULES):
                    raise
                uncompiled.add(kind)  # no part of the block has run yet, so it can run below
                text = f"compile.blocks=auto runs {kind.__name__} uncompiled: {first_line(error)}"
                world.warn(text)
        return forward(*args, **kwargs)

    return call


def keep_code(folder: Path, config: CompileConfig, world: World) -> None:
    """Cache compiled code next to the runs, for resumes elsewhere, unless the user set a folder."""
    if config.blocks == "auto" and world.device.type == "cpu":
        return  # nothing is compiled, but torch would create the folder anyway
    cache = folder.absolute().parent / "compile_cache"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))


def stance(name: str) -> AbstractContextManager[Any]:
    """Context that sets how compiled blocks run. force_eager: uncompiled, so that hooks inside them
    are called; eager_on_recompile: nothing more is compiled, and new shapes run uncompiled.
    """
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance(name)
    return nullcontext()  # nothing is compiled, and importing the compiler takes seconds
