"""Activation checkpointing: bytes kept for backward, and FLOPs of a step, for each setting.

python -m benchmarks activations --task.args.width 768 --task.args.heads 12 --task.args.context 512

One process and one micro-batch of the config's task, in its precision; nothing is timed. On a CPU,
attention is one kernel, as it is on a GPU, so the bytes are the same on both, except for what the
kernels save themselves.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from benchmarks.harness import on_a_run
from dist_amp.run import Run, build_run
from dist_amp.step import loss_of

SETTINGS: tuple[Any, ...] = ("none", "selective", 2, "full")


# FLOPs of the CPU's attention kernels, which torch's counter leaves out, from their shapes.
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    FORWARD: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
    ),
}


def storages(values: Any) -> list[Any]:
    return [t.untyped_storage() for t in tree_leaves(values) if isinstance(t, Tensor)]


class Kept(TorchDispatchMode):
    """Context that counts the bytes of the tensors created in it that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        inputs = {storage.data_ptr() for storage in storages((args, kwargs))}
        out = function(*args, **(kwargs or {}))
        for storage in storages(out):
            if storage.data_ptr() not in inputs:  # else a view, or an operation in place
                self._storages[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return out

    def live_bytes(self) -> int:
        for pointer in [key for key, (ref, _) in self._storages.items() if ref.expired()]:
            del self._storages[pointer]
        return sum(size for _, size in self._storages.values())


def kept_and_flops(run: Run) -> tuple[int, int]:
    """(bytes that a micro-batch's forward keeps for backward, FLOPs of forward and backward)."""
    batch = next(run.data)[0]
    flops = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
    with flops:
        with Kept() as kept, run.precision.autocast():
            loss = loss_of(run.task, run.model, batch, run.world.device)
            size = kept.live_bytes()
        loss.backward()
    return size, flops.get_total_flops()


def measure(run: Run) -> None:
    parallel = run.config.parallel
    rows = []
    for setting in SETTINGS:
        config = replace(run.config, parallel=replace(parallel, activation_checkpointing=setting))
        other_run = build_run(config, run.world, run.task)
        rows.append((setting, *kept_and_flops(other_run)))
        other_run.data.close()
    _, most, least = rows[0]  # without checkpointing
    for setting, size, flops in rows:
        run.world.say(
            f"{setting!s:<9}  keeps {size / 2**20:8.1f} MiB ({size / most:4.0%}), computes "
            f"{flops / 1e9:8.2f} GFLOP ({flops / least:4.0%})"
        )


main = on_a_run(measure)


if __name__ == "__main__":
    sys.exit(main())
