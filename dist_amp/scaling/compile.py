"""Compile the blocks of a model before it is placed on the ranks.

Compiling a block replaces only its `forward`: names stay, and hooks (FSDP's too) stay outside the
compiled code. A deepcopy of the model would run the original's blocks.

Docs: docs/recipes.md
"""

import importlib
import importlib.util
import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
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

Forward = Callable[..., Any]

CUDA_GRAPHS = ("reduce-overhead", "max-autotune")

# Values of compile.mode that are backends of torch.compile.
GENERATE_NO_CODE = ("eager", "aot_eager")

# Modules of its errors.
OF_THE_COMPILER = ("torch._dynamo", "torch._inductor", "torch.fx")


def private(path: str, fallback: Any) -> Any:
    """A name that torch does not document, or the fallback if this release lacks it."""
    module, _, name = path.rpartition(".")
    with suppress(ImportError):
        return getattr(importlib.import_module(module), name, fallback)
    return fallback


def pick_compile(
    config: Config, strategy: str, task: Any, module: nn.Module, world: World
) -> CompileConfig:
    """The settings of [compile], where blocks=auto is false if nothing is to be compiled; on a GPU
    it says why. Errors: as for `check_compile`.
    """
    picked = config.compile
    if picked.blocks == "auto":
        reason = _not_compiled(config, task, module, world)
        if reason:
            picked = replace(picked, blocks=False)
            if world.device.type != "cpu":
                world.say(f"compile.blocks=auto: nothing is compiled, because {reason}")
    if picked.blocks:
        micro_batches = accumulation_steps(config.train, world.world_size)
        check_compile(picked, strategy, micro_batches, world)
    elif picked.mode != "default":
        world.warn(
            f"compile.mode={picked.mode} has no effect, since nothing is compiled: set "
            "compile.blocks=true"
        )
    return picked


def _not_compiled(config: Config, task: Any, module: nn.Module, world: World) -> str:
    """Why compile.blocks=auto compiles nothing; "" if it does."""
    if world.device.type == "cpu":
        return "a CPU gains little from it"
    if missing := _missing_compiler(world.device):
        return f"it needs {missing}"
    if config.parallel.bit_exact:
        return "parallel.bit_exact=true, and what another machine compiles may round otherwise"
    if config.debug.detect_anomaly:
        return "debug.detect_anomaly=true names operations, not compiled code"
    if not blocks_of(task, module):
        return "the model has no blocks"
    return ""


def check_compile(config: CompileConfig, strategy: str, micro_batches: int, world: World) -> None:
    """Check that these settings can compile. Errors: ConfigError that says what would."""
    if config.mode in GENERATE_NO_CODE:
        return
    if missing := _missing_compiler(world.device):
        raise ConfigError(
            f"compile.mode={config.mode} needs {missing}; install it, or use "
            "compile.mode=aot_eager (no faster than without) or compile.blocks=false"
        )
    if config.mode in CUDA_GRAPHS and strategy in ("fsdp", "hsdp"):
        raise ConfigError(
            f"compile.mode={config.mode} replays CUDA graphs, which need parameters at fixed "
            f"addresses, and {strategy} gathers them anew each time; use default or "
            "max-autotune-no-cudagraphs"
        )
    if config.mode in CUDA_GRAPHS and micro_batches > 1 and world.device.type == "cuda":
        raise ConfigError(
            f"compile.mode={config.mode} replays CUDA graphs, whose gradients the next micro-batch "
            f"overwrites, and there are {micro_batches} in a step; use accumulation_steps=1, or "
            "max-autotune-no-cudagraphs"
        )
    if config.mode == "reduce-overhead" and world.device.type == "cpu":
        world.warn("compile.mode=reduce-overhead has no effect on a CPU: it is about CUDA graphs")


def _missing_compiler(device: torch.device) -> str:
    """What inductor needs to generate code for `device` and does not find; "" if nothing."""
    if device.type != "cuda":
        if shutil.which(os.environ.get("CXX", "g++")):
            return ""
        return "a C++ compiler on a CPU (g++, or the one that CXX names)"
    if importlib.util.find_spec("triton") is None:
        return f"Triton on {torch.cuda.get_device_name(device)}"
    names = ["gcc", "clang"]
    if os.environ.get("CC"):
        names = [os.environ["CC"]]
    if not any(shutil.which(name) for name in names):
        return f"a C compiler for Triton ({' or '.join(names)}, or the one that CC names)"
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's, without headers
        scheme = "posix_prefix"
    include = sysconfig.get_path("include", scheme)
    if not Path(include, "Python.h").exists():
        return f"{include}/Python.h for Triton (Debian: python3-dev)"
    return ""


def compile_blocks(
    config: CompileConfig, module: nn.Module, blocks: Sequence[nn.Module], world: World
) -> None:
    """Compile the blocks as configured, each at its first call."""
    what = f"{len(blocks)} blocks" if blocks else "the whole model, which has no blocks,"
    world.say(f"compile.blocks: {what} will be compiled in the first step and evaluation")
    # DDP overlaps already, with a graph per block; its graph splitter fails on recomputed blocks.
    dynamo = private("torch._dynamo.config", None)
    if hasattr(dynamo, "optimize_ddp"):
        dynamo.optimize_ddp = False
    # A warning of a limit of selective checkpointing that functionalisation has lifted.
    torch_log = logging.getLogger("torch._higher_order_ops.wrap")
    torch_log.addFilter(lambda record: "context_fn is passed" not in record.getMessage())
    # Code of an earlier run counts towards the limit, which torch counts by the forward's source:
    # blocks of one class share it, whatever their sizes.
    torch.compiler.reset()
    blocks = blocks or [module]
    kinds = len({str(block) for block in blocks})
    torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, 8 * kinds)
    compiler = Compiler(config, world)
    names = {id(part): name for name, part in module.named_modules()}
    for block in blocks:
        block.forward = compiler.wrap(block.forward, names[id(block)] or "the model")
    # CUDA graphs' results are overwritten by the next step, and losses are kept for a while.
    if config.mode in CUDA_GRAPHS:
        return
    for part in module.modules():
        if getattr(part, "computes_loss", False):
            part.forward = compiler.wrap(part.forward, names[id(part)])


class Compiler:
    """Compiles forwards at their first calls.

    With compile.blocks=auto each as one graph, or from the compiler's first error on as written;
    else in parts where it breaks, which torch logs (TORCH_LOGS=graph_breaks,recompiles).
    """

    def __init__(self, config: CompileConfig, world: World):
        self._config = config
        self._world = world
        # A dispatch mode, such as a FLOP counter, sees no operations of compiled code.
        name = "torch.utils._python_dispatch.is_in_any_mode_without_ignore_compile_internals"
        self._is_observed = private(name, lambda: False)
        self._as_written: set[str] = set()
        self._options: Any = {"backend": "inductor", "mode": config.mode}
        if config.mode in GENERATE_NO_CODE:
            self._options = {"backend": config.mode}
        self._options["dynamic"] = config.blocks == "dynamic"
        self._options["fullgraph"] = config.blocks == "auto"

    def wrap(self, forward: Forward, name: str) -> Forward:
        """The forward, compiled. Its calls may raise ConfigError."""
        compiled = torch.compile(forward, **self._options)

        @wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            if name in self._as_written or self._is_observed():
                return forward(*args, **kwargs)
            try:
                return compiled(*args, **kwargs)
            except Exception as error:
                self._leave_as_written(error, name)
            return forward(*args, **kwargs)

        return call

    def _leave_as_written(self, error: Exception, name: str) -> None:
        """After the compiler's error with "auto": nothing of a block has run. Errors: any other."""
        of_the_compiler = type(error).__module__.startswith(OF_THE_COMPILER)
        if self._config.blocks == "auto" and of_the_compiler:
            self._as_written.add(name)
            why = _graph_break(error, name)
            self._world.warn(f"compile.blocks=auto leaves a block as it is: {why}")
            return
        if "BackendCompilerFailed" in [kind.__name__ for kind in type(error).__mro__]:
            cause = getattr(error, "inner_exception", error)
            raise ConfigError(
                f"compile.mode={self._config.mode} can't compile {name}: {first_line(cause)}; use "
                "another, or compile.blocks=false"
            ) from error
        raise error


def keep_code(folder: Path, config: CompileConfig, world: World) -> None:
    """Keep compiled code beside the runs, for resumes elsewhere, unless the user set a folder."""
    if config.blocks == "auto" and world.device.type == "cpu":
        return  # nothing is compiled, and torch would make the folder all the same
    cache = folder.absolute().parent / "compile_cache"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))


def say_cost(world: World) -> None:
    """Say how long this process has compiled, if it has, and torch tells."""
    seconds = 0.0
    if "torch._dynamo" in sys.modules:
        spent = private("torch._dynamo.utils.calculate_time_spent", dict)()
        seconds = spent.get("total_wall_time", 0.0)
    if seconds:
        world.say(
            f"compile.blocks: compiling took {seconds:.1f} s up to the end of the first step; the "
            f"code is kept in {os.environ['TORCHINDUCTOR_CACHE_DIR']}"
        )


def _graph_break(error: Exception, name: str) -> str:
    """Why a block is not one graph, and at which of its lines."""
    stack = getattr(error, "real_stack", None)
    if type(error).__name__ == "FailOnRecompileLimitHit":  # whose message does not say why
        limit = torch.compiler.config.recompile_limit
        return (
            f"{name} got more than {limit} shapes, or values that it depends on: try "
            "compile.blocks=dynamic"
        )
    place = ""
    if stack:
        line = stack[-1]
        place = f" at {Path(line.filename).name}, line {line.lineno}: `{line.line}`"
    return f"{name} is not one graph: {first_line(error)}{place}"


def stance(name: str) -> AbstractContextManager[Any]:
    """A context for compiled blocks. force_eager: they run as written, and hooks inside them are
    called; eager_on_recompile: nothing more is compiled, so a new shape, say, runs as written.
    """
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance(name)
    return nullcontext()  # nothing was compiled, and the compiler's import takes seconds
