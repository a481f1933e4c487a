"""What a user brings: a plain class with four methods, found by `--task.target my_file:MyTask`.

No base class and no registry: `Task` only writes the methods down. Optional methods, looked up by name:

    collate(samples)        list of samples -> batch; default: PyTorch's default collate
    blocks(model)           list of modules: the units that FSDP shards and gathers; default: see config/auto.py
    tokens(batch)           int: how many tokens a batch holds, for tokens per second
    flops_per_item(model)   number: the floating-point operations of one sample's forward and backward, for MFU; a
                            multiply-add is two, recomputation none; telemetry.mfu.count_flops counts them
    metrics(model, batch)   dict of scalar sums for evaluation, each divided by the total weight as the loss is;
                            with a "loss" among them, loss_sum is not called a second time
    sample(model)           what the trained model makes: a text, or an image as a tensor [C, H, W] in 0..1

A constructor parameter called `data` gets the `[data]` section; every other one is set by `--task.args.NAME VALUE`.
"""

from typing import Any, Protocol

from torch import Tensor, nn


class Task(Protocol):
    """What the loop asks of a user's class. A batch is whatever collating samples gives, moved to the device."""

    def build_model(self) -> nn.Module:
        """The model, on the CPU, in float32; random numbers may be drawn, the seed is set and equal on all ranks."""

    def build_dataset(self, split: str) -> Any:
        """The samples of "train" or "validation", with len() and []; None where there is no validation."""

    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss, summed over what `weight` counts: a float32 scalar with a gradient, on the model's device.

        It leaves the parameters as they are: autocast casts each once per step, for all micro-batches.
        """

    def weight(self, batch: Any) -> float | Tensor:
        """What the loss is divided by, over all ranks and micro-batches: a number, or a scalar tensor of the device."""
