"""Turns known errors of torch, the loader, memory and disk into one line with the cause and a fix.

Docs: docs/debugging.md
"""

import errno
import re
from collections.abc import Mapping
from typing import Any

import torch

from dist_amp.config.memory import UNITS, capacity_of, size_text, tensor_bytes
from dist_amp.errors import ConfigError, DataError, Failure, first_line, in_one_line
from dist_amp.loading.loader import samples_text
from dist_amp.run import Run
from dist_amp.supervise.lifecycle import Job
from dist_amp.telemetry.metrics import memory_use
from dist_amp.world import local

# {pattern that the error's text contains: (type of the Failure, cause and fix)}
KNOWN: dict[str, tuple[type[Failure], str]] = {
    # CUDA raises this some kernels later, so the micro-batch is not known.
    "device-side assert": (
        DataError,
        "the GPU stopped at a device-side assert, typically a token id or label out of range; the "
        "same run with --run.device cpu names the samples",
    ),
    "could not create a primitive|not implemented for '(BFloat16|Half)'": (
        ConfigError,
        "this device can't compute the model in half precision; use --use_amp false",
    ),
    "does not currently support double backward|storage of size 0": (
        ConfigError,
        "the loss differentiates twice (create_graph), as a gradient penalty does, which neither "
        "compiled blocks nor FSDP2's gathered parameters allow; use compile.blocks=false, and "
        "parallel.strategy=ddp in place of fsdp",
    ),
    "mixed torch.Tensor and DTensor|FSDP does not support deepcopy": (
        DataError,
        "FSDP2's parameters are shards, which can neither be copied by deepcopy nor combined with "
        "whole tensors, such as a penalty's or an AveragedModel's; use optim.weight_decay, "
        "optim.ema for an average of the weights, parameter.full_tensor() on every rank, or "
        "parallel.strategy=ddp",
    ),
    "uniform gradient dtype": (
        DataError,
        "a parameter, such as an idle expert's, had a gradient in only some of the step's "
        "micro-batches, which FSDP2's policy can't accumulate; use "
        "parallel.accumulate_reduce=every, or precision.cast_by=autocast",
    ),
}
# Explained only under FSDP2's mixed precision policy: elsewhere these errors have other causes.
TWO_DTYPES = re.compile(
    "have the same dtype|expected scalar type|Input type .* and (weight|bias) type"
)

# Messages on a CPU about an index out of range in an embedding, a loss or one_hot.
OUT_OF_RANGE = re.compile(
    r"index out of range in self|Target -?\d+ is out of bounds|Class values must be"
)
WORKER_DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) ([^.]*)")

# Messages of out of memory without a torch.OutOfMemoryError: on a CPU, and by libraries on a GPU.
OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)
REQUESTED = re.compile(r"(?:[Tt]ried to|Unable to) allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)")


def explain_error(error: BaseException, job: Job) -> BaseException:
    """A Failure for an error whose cause is known; other errors unchanged."""
    rank = job.world.rank
    if is_out_of_memory(error):
        return out_of_memory(error, job)
    no_space = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    if isinstance(error, OSError) and error.errno in no_space and job.folder is not None:
        return Failure(
            f"{error.filename or job.folder} can't be written ({error.strerror}); free some "
            f"space, and resume with --run.dir {job.folder}"
        )
    for reported in (error.__context__, error):  # of two chained errors, the first has the signal
        if died := WORKER_DIED.match(str(reported)):
            ending = died[2].replace("is killed", "was killed").strip()
            advice = "it may have run out of memory: lower data.workers, or check the kernel's log"
            if "exit code" in ending:
                advice = "the dataset's or the task's code ended it; data.workers=0 shows where"
            return DataError(f"rank {rank}: loader worker (pid {died[1]}) {ending}; {advice}")
    batch, samples = current_batch(job.run)
    if samples and OUT_OF_RANGE.match(str(error)):
        return DataError(
            f"rank {rank}: a token id or label is out of range in {samples}: {first_line(error)}; "
            "fix the data, or give the model that many embeddings or classes"
        )
    is_key_error = isinstance(error, KeyError) and error.args
    if is_key_error and isinstance(batch, Mapping) and error.args[0] not in batch:
        return DataError(
            f"rank {rank}: the task looks for {error.args[0]!r} in a batch that has "
            f"{', '.join(map(str, batch))} ({in_one_line(error)}); rename it there or in the "
            "dataset, or make such a batch in collate(samples)"
        )
    by_policy = job.run is not None and job.run.precision.cast_by == "policy"
    if by_policy and TWO_DTYPES.search(str(error)):
        return DataError(
            f"rank {rank}: FSDP2's policy casts parameters and inputs, but not buffers "
            f"({in_one_line(error)}); use precision.cast_by=autocast"
        )
    for text, (kind, explanation) in KNOWN.items():
        if re.search(text, str(error)):
            return kind(f"rank {rank}: {explanation} ({in_one_line(error)})")
    return error


def current_batch(run: Run | None) -> tuple[Any, str]:
    """Returns (micro-batch in use, text with its samples and split), or (None, "") if unknown."""
    if run is None:
        return None, ""
    for split in filter(None, (run.data, run.validation)):
        for batch, samples in split.last_step:
            if batch is run.current_batch:
                return batch, f"{samples_text(samples)} of the {split.split} split"
    return None, ""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error or one of its causes is an out-of-memory error: compilers wrap errors."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if OUT_OF_MEMORY.search(str(error)):
            return True
        error = error.__cause__
    return False


def out_of_memory(error: BaseException, job: Job) -> Failure:
    """A Failure that says how much memory the model takes, and which settings need less."""
    config, world, run = job.config, job.world, job.run
    capacity, unused = capacity_of(world)
    requested, used = 0, size_text(memory_use(world.device)[0])
    request = f"used {used}"
    if match := REQUESTED.search(str(error)):
        requested = int(float(match[1]) * UNITS[match[2]])
        request = f"asked for {size_text(requested)} more than the {used} in use"
    when = "before the first step"
    if run is not None:
        when = f"in step {run.step + 1}"
        if "validation" in current_batch(run)[1]:
            when = f"in the evaluation after step {run.step}"

    # What this rank holds: its shards of the parameters; all parameters if nothing is sharded yet.
    module = run.parallel.module if run is not None else getattr(error, "module", None)
    usage = "there was no model yet"
    if module is not None:
        parameters = tensor_bytes(local(p) for p in module.parameters())
        gradients = tensor_bytes(local(p) for p in module.parameters() if p.requires_grad)
        moments_per_parameter = {"sgd": int(config.optim.momentum > 0), "muon": 1}
        moments = moments_per_parameter.get(config.optim.name, 2) * gradients
        usage = f"parameters take {size_text(parameters)}, gradients {size_text(gradients)}, "
        usage += f"optimizer state {size_text(moments)}"

    settings = []
    if unused > requested > 0:
        settings.append(
            "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment "
            f"({size_text(unused)} are reserved but fragmented)"
        )
    if run is not None and (size := run.data.plan.micro_batch_size) > 1:
        settings.append(
            f"a train.micro_batch_size below {size} (with more train.accumulation_steps)"
        )
    if run is not None and config.parallel.activation_checkpointing != "full":
        settings.append("parallel.activation_checkpointing=selective or full")
    is_sharded = run is not None and run.parallel.sharded
    if is_sharded and world.device.type == "cuda" and not config.parallel.cpu_offload:
        settings.append("parallel.cpu_offload=true")
    if not is_sharded and world.world_size > 1:
        settings.append("parallel.strategy=fsdp")
    settings.append("more ranks" if is_sharded else "a smaller model")
    kind = "GPU memory" if world.device.type == "cuda" else "memory"
    return Failure(
        f"rank {world.rank} ran out of {kind} {when}: {request}, of {size_text(capacity)} "
        f"available; {usage}; use {', or '.join(settings)}"
    )
