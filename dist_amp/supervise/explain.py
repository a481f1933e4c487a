"""Errors of torch, the loader, memory and disk as one line with the cause and the fix.

Docs: docs/debugging.md
"""

import errno
import re
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dist_amp
from dist_amp.config.memory import (
    UNITS,
    capacity_of,
    moments_per_parameter,
    size_text,
    tensor_bytes,
)
from dist_amp.errors import (
    ConfigError,
    DataError,
    Failure,
    first_line,
    in_one_line,
    outside_packages,
)
from dist_amp.loading.loader import samples_text
from dist_amp.precision import Precision
from dist_amp.run import Run
from dist_amp.settings import Config
from dist_amp.supervise.lifecycle import Job
from dist_amp.telemetry.metrics import memory_use
from dist_amp.world import World, local

# The CPU's messages for an index beyond an embedding, a class beyond a loss or beyond one_hot.
_OUT_OF_RANGE = re.compile(
    r"index out of range in self|Target -?\d+ is out of bounds|Class values must be"
)

_WORKER_DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) ([^.]*)")

# Of a CPU's libraries without a kernel for a dtype.
_NO_KERNEL = re.compile("could not create a primitive|not implemented for '(BFloat16|Half)'")

_SHARDS = re.compile("mixed torch.Tensor and DTensor|FSDP does not support deepcopy")

# The messages besides torch.OutOfMemoryError's: the CPU's, and those of libraries on a GPU.
_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)

_REQUESTED = re.compile(r"(?:[Tt]ried to|Unable to) allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)")


def explain_error(error: BaseException, job: Job) -> BaseException:
    """A Failure for an error whose cause is known; any other unchanged, as in all of these."""
    error = explain_data(error, job.world.rank, job.run)
    error = explain_memory(error, job.config, job.world, job.run)
    if job.run is not None:
        error = explain_half(error, job.run.precision, job.world.rank)
        error = explain_double_backward(error, job.world.rank)
        if job.run.parallel.sharded:
            error = explain_copies(error)
    if job.folder is not None:
        error = explain_disk(error, job.folder)
    return error


def explain_disk(error: BaseException, folder: Path) -> BaseException:
    if not isinstance(error, OSError):
        return error
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return error
    path = error.filename or folder
    return Failure(
        f"{path} can't be written ({error.strerror}); free some space, and resume with --run.dir "
        f"{folder}"
    )


def explain_data(error: BaseException, rank: int, run: Run | None = None) -> BaseException:
    """A DataError for a dead loader worker, or what is wrong in the run's current batch."""
    for reported in (error.__context__, error):  # the first of two has the signal
        if died := _WORKER_DIED.match(str(reported)):
            how = died[2].replace("is killed", "was killed").strip()
            advice = "it may have run out of memory: lower data.workers, or check the kernel's log"
            if "exit code" in how:
                advice = "the dataset's or the task's code ended it; data.workers=0 shows where"
            if how.endswith(f"exit code {errno.EMFILE}"):
                advice = "it had too many open files, one per tensor that waits: collate fewer and "
                advice += "larger tensors, raise the limit (ulimit -n), or use data.workers=0"
            return DataError(f"rank {rank}: loader worker (pid {died[1]}) {how}; {advice}")
    batch, named = current_batch(run)
    places = [place.name for place in traceback.extract_tb(error.__traceback__)]
    if run is not None and run.data.last_step and "weights_of" in places:
        batch = run.data.last_step[0][0]  # any of them: they have the same keys
    if _OUT_OF_RANGE.match(str(error)) and named:
        return DataError(
            f"rank {rank}: a token id or label is out of range in {named}: {first_line(error)}; "
            "fix the data, or give the model that many embeddings or classes"
        )
    is_key = isinstance(error, KeyError) and error.args
    if is_key and isinstance(batch, Mapping) and error.args[0] not in batch:
        return DataError(
            f"rank {rank}: the task looks for {error.args[0]!r} in a batch that has "
            f"{', '.join(map(str, batch))} ({in_one_line(error)}); rename it there or in the "
            "dataset, or make such a batch in collate(samples)"
        )
    # Raised some kernels later, so the micro-batch is not known.
    if "device-side assert" in str(error):
        return DataError(
            f"rank {rank}: the GPU stopped at a device-side assert, typically a token id or label "
            "out of range; the same run with --run.device cpu names the samples"
        )
    return error


def current_batch(run: Run | None) -> tuple[Any, str]:
    """(the micro-batch in use, the name of its samples), where they are known."""
    if run is None:
        return None, ""
    for split in filter(None, (run.data, run.validation)):
        for batch, samples in split.last_step:
            if batch is run.current_batch:
                return batch, f"{samples_text(samples)} of the {split.split} split"
    return None, ""


def explain_copies(error: BaseException) -> BaseException:
    """A DataError where a callback of the task mixes FSDP2's shards with a copy of the model."""
    if isinstance(error, DataError) and _SHARDS.search(str(error.__cause__)):
        text = str(error).removesuffix("; fix it")
        return DataError(
            f"{text}; FSDP2's parameters are shards, which neither can be copied by deepcopy nor "
            "go with whole tensors, such as those of an AveragedModel: use optim.ema for an "
            "average of the weights, parameter.full_tensor() on every rank, or "
            "parallel.strategy=ddp"
        )
    return error


def explain_double_backward(error: BaseException, rank: int) -> BaseException:
    """A ConfigError where compiled blocks are differentiated twice."""
    if "does not currently support double backward" in str(error):
        return ConfigError(
            f"rank {rank}: the loss differentiates twice (create_graph), as a gradient penalty "
            "does, and compiled blocks can't; use compile.blocks=false"
        )
    return error


def explain_half(error: BaseException, precision: Precision, rank: int) -> BaseException:
    """A ConfigError where a CPU's library has no kernel for the run's half precision."""
    is_half = precision.name != "fp32" and precision.device.type == "cpu"
    if is_half and isinstance(error, RuntimeError) and _NO_KERNEL.search(str(error)):
        return ConfigError(
            f"rank {rank}: this CPU can't compute the model in {precision.name} "
            f"({in_one_line(error)}); use --use_amp false"
        )
    return error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error or a cause is a lack of memory: compilers wrap the errors that they get."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if _OUT_OF_MEMORY.search(str(error)):
            return True
        error = error.__cause__
    return False


def explain_memory(
    error: BaseException, config: Config, world: World, run: Run | None
) -> BaseException:
    """A Failure with what the model takes and what takes less, if memory ran out on this rank."""
    if not is_out_of_memory(error):
        return error
    try:
        capacity, unused = capacity_of(world)
        peak = size_text(memory_use(world.device)[0])
        takes = _model_text(error, config, world, run)
    except RuntimeError:  # the device does not answer any more
        return error
    requested = 0
    used = f"used {peak}"
    if match := _REQUESTED.search(str(error)):
        requested = int(float(match[1]) * UNITS[match[2]])
        used = f"asked for {size_text(requested)} more than the {peak} in use"
    when = "before the first step"
    if run is not None:
        when = f"in step {run.step + 1}"
        if run.validation and "validation" in current_batch(run)[1]:
            when = f"in the evaluation after step {run.step}"
    when += _users_line(error)
    kind = "GPU memory" if world.device.type == "cuda" else "memory"
    settings = []
    if unused > requested > 0:
        settings.append(
            "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment "
            f"({size_text(unused)} are reserved but fragmented)"
        )
    settings += _smaller_settings(error, config, world, run)
    return Failure(
        f"rank {world.rank} ran out of {kind} {when}: {used}, of {size_text(capacity)} available; "
        f"{takes}; use {', or '.join(settings)}"
    )


def _users_line(error: BaseException) -> str:
    """Such as " (my_task.py, line 12)"; "" where neither the task nor its model was called."""
    ours = str(Path(dist_amp.__file__).parent)
    theirs = [each for each in outside_packages(error) if not each.filename.startswith(ours)]
    if not theirs:
        return ""
    return f" ({Path(theirs[-1].filename).name}, line {theirs[-1].lineno})"


def _model_text(error: BaseException, config: Config, world: World, run: Run | None) -> str:
    """What the model takes: measured on this rank's device, or as it would in float32."""
    if run is not None:

        def on_device(tensors: Iterable[Any]) -> int:
            shards = [local(tensor) for tensor in tensors if isinstance(tensor, Tensor)]
            return tensor_bytes(shard for shard in shards if shard.device == world.device)

        trained = run.parallel.parameters
        # Of sharded parameters the shards, which the optimizer holds while a block is gathered.
        frozen = [p for p in run.parallel.module.parameters() if not p.requires_grad]
        parameters = on_device([*trained, *frozen, *run.parallel.module.buffers()])
        gradients = on_device(trained)
        states = run.optimizer.state.values()
        moments = on_device(value for state in states for value in state.values())
        if not states:  # the first update makes them
            moments = moments_per_parameter(config.optim) * gradients
        count = ""
    else:
        module = getattr(error, "module", None)  # as build_run notes it
        if module is None:
            return "there was no model yet"
        share = world.world_size if _is_sharded(error, config) else 1
        total = sum(p.numel() for p in module.parameters())
        parameters = 4 * total // share
        gradients = 4 * sum(p.numel() for p in module.parameters() if p.requires_grad) // share
        moments = moments_per_parameter(config.optim) * gradients
        count = f"{total:,} "
    return (
        f"{count}parameters take {size_text(parameters)}, gradients {size_text(gradients)}, "
        f"optimizer state {size_text(moments)}"
    )


def _is_sharded(error: BaseException, config: Config) -> bool:
    """Whether the model that was being laid out is, or is to be, sharded."""
    module: Any = getattr(error, "module", None)
    parameters = module.parameters() if module is not None else ()
    has_shards = any(hasattr(parameter, "device_mesh") for parameter in parameters)
    return has_shards or config.parallel.strategy in ("fsdp", "hsdp")


def _smaller_settings(
    error: BaseException, config: Config, world: World, run: Run | None
) -> list[str]:
    """The settings that take less memory, the least costly first."""
    settings = []
    is_sharded = _is_sharded(error, config)
    if run is not None:
        is_sharded = run.parallel.sharded
        size = run.data.plan.micro_batch_size
        if size > 1:
            settings.append(
                f"a train.micro_batch_size below {size} (with more train.accumulation_steps)"
            )
        if config.parallel.activation_checkpointing != "full":
            settings.append("parallel.activation_checkpointing=selective or full")
    if is_sharded and world.device.type == "cuda" and not config.parallel.cpu_offload:
        settings.append("parallel.cpu_offload=true")
    if not is_sharded and world.world_size > 1:
        settings.append("parallel.strategy=fsdp")
    if is_sharded:
        return [*settings, "more ranks"]
    return [*settings, "a smaller model"]
