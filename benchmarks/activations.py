"""What activation checkpointing saves and costs: bytes kept for backward and FLOPs of a step.

python -m benchmarks activations --task.args.width 768 --task.args.heads 12 --task.args.context 512

One process and one micro-batch of the config's task, in its precision; nothing is timed. On a CPU
attention is one kernel, as on a GPU, so the bytes hold there too, apart from what the kernels save
for themselves.
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


# The CPU's attention, which torch's counter leaves out. Arguments: shapes.
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    FORWARD: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
    ),
}


def storages(values: Any) -> list[Any]:
    """Those of all tensors in a nested structure."""
    return [t.untyped_storage() for t in tree_leaves(values) if isinstance(t, Tensor)]


class Kept(TorchDispatchMode):
    """Counts the bytes of all tensors made in it that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {storage.data_ptr() for storage in storages((args, kwargs))}
        out = function(*args, **(kwargs or {}))
        for storage in storages(out):
            if storage.data_ptr() not in given:
                self._storages[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return out

    def live_bytes(self) -> int:
        for pointer in [key for key, (one, _) in self._storages.items() if one.expired()]:
            del self._storages[pointer]
        return sum(size for _, size in self._storages.values())


def kept_and_flops(run: Run) -> tuple[int, int]:
    """(bytes that the forward of a micro-batch keeps for its backward, FLOPs of both)."""
    batch = next(run.data)[0]
    flops = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
    with flops:
        with Kept() as kept, run.precision.autocast():
            loss = loss_of(run.task, run.model, batch, run.world.device)
            size = kept.live_bytes()
        loss.backward()
    return size, flops.get_total_flops()


def measure(run: Run) -> None:
    """Print a line for each setting."""
    parallel = run.config.parallel
    rows = []
    for setting in SETTINGS:
        config = replace(run.config, parallel=replace(parallel, activation_checkpointing=setting))
        one = build_run(config, run.world, run.task)
        rows.append((setting, *kept_and_flops(one)))
        one.data.close()
    _, most, least = rows[0]
    for setting, size, flops in rows:
        run.world.say(
            f"{setting!s:<9}  keeps {size / 2**20:8.1f} MiB ({size / most:4.0%}), computes "
            f"{flops / 1e9:8.2f} GFLOP ({flops / least:4.0%})"
        )


main = on_a_run(measure)


if __name__ == "__main__":
    sys.exit(main())
