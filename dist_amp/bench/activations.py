"""What activation checkpointing saves and costs: bytes kept for backward, and FLOPs of a step, for each setting.

python -m dist_amp.bench activations --task.args.width 768 --task.args.heads 12 --task.args.context 512

One process and one micro-batch of the config's task, in its precision; nothing is timed. On a CPU attention is one
kernel, as on a GPU, so the bytes hold there too, apart from what the kernels save for themselves.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from dist_amp.bench.harness import on_a_run
from dist_amp.run import Run, build_run
from dist_amp.settings import Checkpointing
from dist_amp.step import loss_of

SETTINGS: tuple[Checkpointing, ...] = ("none", "selective", 2, "full")


def attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Of the CPU's kernel, which torch's counter leaves out. Arguments: shapes."""
    return sdpa_flop_count(query, key, value)


def attention_backward_flops(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


class Kept(TorchDispatchMode):
    """Counts the bytes of all tensors made in it that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (place := tensor.untyped_storage().data_ptr()) not in given:
                storage = tensor.untyped_storage()
                self._storages[place] = StorageWeakRef(storage), storage.nbytes()
        return out

    def live_bytes(self) -> int:
        return sum(size for storage, size in self._storages.values() if not storage.expired())


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
            f"{setting!s:<9}  keeps {size / 2**20:8.1f} MiB ({size / most:4.0%}), computes {flops / 1e9:8.2f} GFLOP "
            f"({flops / least:4.0%})"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """The command: writes nothing."""
    return on_a_run(measure, ["--checkpoint.every", "off", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
