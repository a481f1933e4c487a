"""Accelerate's and Lightning Fabric's loops, as their documentation writes them (extra `bench`).

Options for speed are on: gradients as bucket views, no broadcast of buffers, no check that the norm
is finite.
"""

import logging
from collections.abc import Sequence
from typing import Any

from benchmarks.loops import Loop, Setup
from dist_amp.config.auto import accumulation_steps
from dist_amp.step import mark_last

DDP_OPTIONS = {"gradient_as_bucket_view": True, "broadcast_buffers": False}


def accelerate(setup: Setup) -> Loop:
    """Source: huggingface.co/docs/accelerate, "Performing gradient accumulation"."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedDataParallelKwargs, GradScalerKwargs

    AcceleratorState._reset_state(reset_partial_state=True)  # else the first precision stays
    GradientState._reset_state()
    module = setup.new_model()
    limit = setup.config.train.max_grad_norm
    scaler = GradScalerKwargs(init_scale=setup.config.precision.scaler.init_scale)
    mixed_precision = setup.precision.replace("fp32", "no")
    accelerator = Accelerator(
        cpu=setup.world.device.type == "cpu",
        mixed_precision=mixed_precision,
        gradient_accumulation_steps=accumulation_steps(setup.config.train, setup.world.world_size),
        kwargs_handlers=[DistributedDataParallelKwargs(**DDP_OPTIONS), scaler],
    )
    adamw = setup.optimizer(module)
    set_rate = setup.schedule()
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
    """Source: lightning.ai/docs/fabric, "Efficient gradient accumulation"."""
    import lightning_fabric

    lightning: Any = lightning_fabric  # its annotations are stricter than its documentation
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it logs its precision
    module = setup.new_model()
    limit = setup.config.train.max_grad_norm
    ranks = setup.world.world_size
    strategy: Any = "auto"
    if setup.strategy == "ddp":
        strategy = lightning.strategies.DDPStrategy(**DDP_OPTIONS)
    precision: Any = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[setup.precision]
    lab = lightning.Fabric(
        accelerator=setup.world.device.type, devices=ranks, strategy=strategy, precision=precision
    )
    lab.launch()
    model = lab.setup_module(module)
    adamw = setup.optimizer(module)
    set_rate = setup.schedule()
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
