"""What is done to each block of a model before it is laid out over ranks: recomputed in backward, and compiled.

A block is one of the modules of `task.blocks(model)`: a transformer's layers, say. Both replace its `forward` and
nothing else: parameters and modules keep their names, and hooks (FSDP's among them) stay outside of what is compiled.
The new `forward` is the block's own: a deepcopy of the model would run the original's, so copy a state_dict instead.
"""

import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_in_any_mode_without_ignore_compile_internals

from dist_amp.errors import ConfigError, first_line, nearest_name
from dist_amp.runtime.recompute import Forward, _chosen, recomputed
from dist_amp.settings import Checkpointing, CompileConfig
from dist_amp.world import World

CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


def check_compile(config: CompileConfig, strategy: str, micro_batches: int, world: World) -> None:
    """Refuse, before anything is built, what can't compile here; each line says what would."""
    if not config.blocks:
        if config != CompileConfig():
            world.warn("the settings of [compile] have no effect: compile.blocks=false compiles nothing")
        return
    backends = torch._dynamo.list_backends(exclude_tags=())
    if config.backend not in backends:
        near = nearest_name(config.backend, backends)
        mend = f"did you mean {near}?" if near else f"use one of {', '.join(torch._dynamo.list_backends())}"
        raise ConfigError(f"compile.backend={config.backend} is not known to torch {torch.__version__}; {mend}")
    if config.backend != "inductor":
        if config.mode != "default":
            raise ConfigError(
                f"compile.mode={config.mode} is inductor's, and compile.backend={config.backend} has none; use default"
            )
        return
    if missing := _missing_compiler(world.device):
        raise ConfigError(
            f"compile.backend=inductor needs {missing}; install one, or use compile.backend=aot_eager (no faster than "
            "without) or compile.blocks=false"
        )
    if config.mode in CUDA_GRAPHS and strategy in ("fsdp", "hsdp"):
        raise ConfigError(
            f"compile.mode={config.mode} replays CUDA graphs, which need parameters that stay where they are, and "
            f"{strategy} gathers them anew each time; use default or max-autotune-no-cudagraphs"
        )
    if config.mode in CUDA_GRAPHS and micro_batches > 1 and world.device.type == "cuda":
        raise ConfigError(
            f"compile.mode={config.mode} replays CUDA graphs, whose gradients the next micro-batch overwrites, "
            f"and there are {micro_batches} in a step; use accumulation_steps=1, or max-autotune-no-cudagraphs"
        )
    if config.mode == "reduce-overhead" and world.device.type == "cpu":
        world.warn("compile.mode=reduce-overhead has no effect on a CPU: it is about CUDA graphs")


def _missing_compiler(device: torch.device) -> str:
    """What inductor would need to generate code for `device` and does not find; "" if it is all there."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "a C++ compiler on a CPU (g++, or the one that CXX names)"
        return ""
    from torch.utils._triton import has_triton

    return "" if has_triton() else f"Triton on {torch.cuda.get_device_name(device)}"


def prepare_blocks(
    config: CompileConfig, checkpointing: Checkpointing, module: nn.Module, blocks: Iterable[nn.Module], world: World
) -> None:
    """Recompute and compile the blocks as the settings say. Call it before `build_parallel`: FSDP's hooks go around.

    Errors: ConfigError where there are fewer blocks than are asked for; a block is compiled at its first call, which
    raises one too where compile.fullgraph=true and it is not one graph.
    """
    blocks = list(dict.fromkeys(blocks))  # one that a model uses twice is wrapped once
    if checkpointing != "none":
        for block in _chosen(checkpointing, blocks):
            block.forward = recomputed(block.forward)
    if config.blocks:
        what = f"{len(blocks)} blocks" if blocks else "the whole model, which has no blocks,"
        world.say(f"compile.blocks=true: {config.backend} compiles {what} in the first step and the first evaluation")
        compile_each(config, module, blocks or [module], world)


def compile_each(config: CompileConfig, module: nn.Module, blocks: Sequence[nn.Module], world: World) -> None:
    """Compile each block's forward at its first call; blocks that are alike share the code."""
    # Each block is a graph of its own already, so DDP's buckets leave as they fill; its splitter refuses recomputation.
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.reset()  # what an earlier run of this process compiled counts against the limit
    # Torch counts by the forward's source, which blocks of one class share, whatever their sizes.
    kinds = len({str(block) for block in blocks})
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 8 * kinds)
    compiler, names = Compiler(config, world), {id(part): name for name, part in module.named_modules()}
    for block in blocks:
        block.forward = compiler.wrap(block.forward, names[id(block)] or "the model")


class Compiler:
    """Compiles forwards at their first calls: each to one graph, until one of them can't be."""

    def __init__(self, config: CompileConfig, world: World):
        self._config = config
        self._world = world
        self._whole = config.fullgraph is not False  # of all: what is one graph stays one when it need not be

    def wrap(self, forward: Forward, name: str) -> Forward:
        """The forward, compiled. Errors: ConfigError at a call, where it can't be as the settings say."""
        from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException, TorchRuntimeError
        from torch._dynamo.exc import FailOnRecompileLimitHit as TooManyShapes

        config = self._config
        options: Any = {"backend": config.backend, "mode": config.mode, "dynamic": config.dynamic}
        whole, in_parts = (torch.compile(forward, fullgraph=one, **options) for one in (True, False))

        @wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            if (
                is_in_any_mode_without_ignore_compile_internals()
            ):  # a FLOP counter, say, which sees no compiled operation
                return forward(*args, **kwargs)
            try:
                return (whole if self._whole else in_parts)(*args, **kwargs)
            except BackendCompilerFailed as error:
                raise ConfigError(
                    f"compile.backend={config.backend} can't compile {name}: {first_line(error.inner_exception)}; use "
                    "another, or compile.blocks=false"
                ) from error
            except TorchRuntimeError:  # the block's own mistake, such as shapes that do not fit
                raise
            except (TorchDynamoException, TooManyShapes) as error:  # raised before any of the block has run
                self._give_up_one_graph(error, name)
            return call(*args, **kwargs)

        return call

    def _give_up_one_graph(self, error: Exception, name: str) -> None:
        if not self._whole:
            raise error
        why = _what_broke(error, name)
        if self._config.fullgraph is True:
            raise ConfigError(f"compile.fullgraph=true: {why}; mend that, or use compile.fullgraph=auto") from error
        self._world.warn(f"{why}; from now on blocks are compiled in parts (compile.fullgraph=auto)")
        self._whole = False


def _what_broke(error: Exception, name: str) -> str:
    """Why a block is not one graph, and which line of it."""
    stack = getattr(error, "real_stack", None)
    if stack is None:  # a FailOnRecompileLimitHit, which says nothing of it
        limit = torch._dynamo.config.recompile_limit
        return f"{name} met more than {limit} shapes, or values that it depends on: try compile.dynamic=true"
    place = f" at {Path(stack[-1].filename).name}, line {stack[-1].lineno}: `{stack[-1].line}`" if stack else ""
    return f"{name} is not one graph: {first_line(error)}{place}"


def uncompiled() -> AbstractContextManager[Any]:
    """A context in which compiled blocks run as they are written, so that hooks in them are called."""
    return _stance("force_eager")


def as_compiled_so_far() -> AbstractContextManager[Any]:
    """A context in which nothing more is compiled: what would need it, as a shape not met before, runs as written."""
    return _stance("eager_on_recompile")


def _stance(name: str) -> AbstractContextManager[Any]:
    compiles = "torch._dynamo" in sys.modules  # else there is nothing to hold, and importing it takes seconds
    return torch.compiler.set_stance(name) if compiles else nullcontext()
