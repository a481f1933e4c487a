"""What a user brings: a plain class with four methods, found by `--task.target my_file:MyTask`.

No base class and no registry: `Task` only writes the methods down. Optional methods, looked up by name:

    collate(samples)        list of samples -> batch; default: PyTorch's default collate
    augment(sample, rng)    sample -> training sample; rng: a torch.Generator, the only source of randomness, seeded by
                            run.seed, epoch and sample, so that world size and workers change nothing
    blocks(model)           list of modules: the units that FSDP shards and gathers; default: see config/auto.py
    units(model)            more such units, such as an untied embedding and head; each forward calls each once
    tokens(batch)           int: how many tokens a batch holds, for tokens per second
    flops_per_item(model)   number: the floating-point operations of one sample's forward and backward, for MFU; a
                            multiply-add is two, recomputation none; telemetry.mfu.count_flops counts them
    metrics(model, batch)   dict of scalar sums for evaluation, each divided by the total weight as the loss is, or of
                            pairs (sum, weight) with weights of their own; the model comes without DDP's wrapper; with
                            a "loss" among them, loss_sum is not called again
    load(model)             fills the parameters, sharded or whole, from files: build_model's are on the meta device
    export(model, folder)   writes what `export --format hf` leaves; default: model.save_pretrained(folder)
    sample(model)           what the trained model makes: a text, or an image as a tensor [C, H, W] in 0..1
    groups(model)           list of dicts: "params" (names, patterns as of fnmatch, or parameters of `model`, which is
                            sharded already), and "name", "lr_scale" (times optim.lr), "weight_decay" if they differ
    optimizer(groups, lr)   a torch optimizer made of the groups, whose rates are then set in every step
    schedule(step)          what optim.lr is multiplied by after so many applied steps, warm-up included
    on_step(run, report), on_evaluation(run, values), train_metrics(run, report)
                            called by the main job: see supervise/callbacks.py

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

        Call `model(...)` once, and only that: over several ranks the model is wrapped or sharded, so its submodules and
        other methods belong into its forward. Leave the parameters as they are: autocast casts each once per step.
        """

    def weight(self, batch: Any) -> float | Tensor:
        """What the loss is divided by, over all ranks and micro-batches: a number, or a scalar tensor of the device."""
