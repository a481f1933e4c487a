"""Accelerate's and Lightning Fabric's loops, as in their documentation; the extra `bench` installs both.

Their options for speed are on: gradients as bucket views, no broadcast of buffers, no check that the norm is finite.
"""

import logging
from collections.abc import Sequence
from typing import Any

from dist_amp.bench.loops import Loop, Setup, shard
from dist_amp.config.validate import accumulation_steps
from dist_amp.step import mark_last

DDP_OPTIONS = {"gradient_as_bucket_view": True, "broadcast_buffers": False}


def accelerate(setup: Setup) -> Loop:
    """Source: huggingface.co/docs/accelerate, "Performing gradient accumulation" and "FSDP1 vs FSDP2"."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin, GradScalerKwargs

    AcceleratorState._reset_state(reset_partial_state=True)  # it keeps one precision per process
    GradientState._reset_state()
    module, limit = setup.new_model(), setup.config.train.max_grad_norm
    plugin, scaler = None, GradScalerKwargs(init_scale=setup.config.precision.scaler.init_scale)
    if setup.strategy == "fsdp":
        classes = sorted({type(block).__name__ for block in setup.blocks(module)})
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=classes,
            reshard_after_forward=True,
        )
    accelerator = Accelerator(
        cpu=setup.world.device.type == "cpu",
        mixed_precision="no" if setup.precision == "fp32" else setup.precision,
        gradient_accumulation_steps=accumulation_steps(setup.config.train, setup.world.world_size),
        fsdp_plugin=plugin,
        kwargs_handlers=[DistributedDataParallelKwargs(**DDP_OPTIONS), scaler],
    )
    adamw, set_rate = setup.optimizer(module), setup.schedule()
    model, optimizer = accelerator.prepare(module, adamw)

    def step(micro_batches: Sequence[Any]) -> None:
        set_rate(adamw)
        for batch in micro_batches:
            with accelerator.accumulate(model):
                accelerator.backward(setup.task.loss_sum(model, batch, "mean"))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), limit)
                optimizer.step()
                optimizer.zero_grad()

    return Loop(accelerator.unwrap_model(model), step)


def fabric(setup: Setup) -> Loop:
    """Source: lightning.ai/docs/fabric, "Efficient gradient accumulation" and "Model parallelism: FSDP2"."""
    import lightning_fabric

    lightning: Any = lightning_fabric  # its annotations are stricter than its documentation
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it logs what it casts to
    module, limit, ranks = setup.new_model(), setup.config.train.max_grad_norm, setup.world.world_size
    strategy: Any = "auto"
    if setup.strategy == "ddp":
        strategy = lightning.strategies.DDPStrategy(**DDP_OPTIONS)
    elif setup.strategy == "fsdp":
        sharded = lambda module, mesh: shard(module, setup, mesh["data_parallel"])  # noqa: E731
        strategy = lightning.strategies.ModelParallelStrategy(sharded, data_parallel_size=ranks, tensor_parallel_size=1)
    precisions = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
    # FSDP2's own policy casts to bf16, as in the other loops; autocast on top would only cost time.
    precision = precisions["fp32" if (setup.strategy, setup.precision) == ("fsdp", "bf16") else setup.precision]
    lab = lightning.Fabric(accelerator=setup.world.device.type, devices=ranks, strategy=strategy, precision=precision)
    lab.launch()
    model = lab.setup_module(module)
    adamw, set_rate = setup.optimizer(module), setup.schedule()  # the parameters may be sharded now
    optimizer = lab.setup_optimizers(adamw)

    def step(micro_batches: Sequence[Any]) -> None:
        set_rate(adamw)
        for is_last, batch in mark_last(micro_batches):
            with lab.no_backward_sync(model, enabled=not is_last):
                lab.backward(setup.task.loss_sum(model, batch, "mean") / len(micro_batches))
        lab.clip_gradients(model, optimizer, max_norm=limit, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()

    return Loop(module, step)
