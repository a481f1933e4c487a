"""The user's part: a plain class with four methods, found by `--task.target my_file:MyTask`.

No base class and no registry: `Task` only writes the methods down. Optional methods, by name:

    collate(samples)        list of samples -> batch; default: PyTorch's default collate
    augment(sample, rng)    sample -> training sample; rng: a torch.Generator, the only source of
                            randomness, seeded by run.seed, epoch and sample, so that world size
                            and workers change nothing
    blocks(model)           list of modules: the units that FSDP shards and gathers; default: see
                            scaling/blocks.py
    units(model)            more such units, such as an untied embedding and head; each forward
                            calls each once
    couples_samples         True if the loss compares a micro-batch's samples, gathered over ranks
    tokens(batch)           int: how many tokens a batch holds, for tokens per second
    flops_per_item(model)   number: floating-point operations of one sample's forward and backward,
                            for MFU; a multiply-add is two, recomputation none;
                            telemetry.mfu.count_flops counts them
    metrics(model, batch)   dict of scalar sums for evaluation, each divided by the total weight as
                            the loss is, or of pairs (sum, weight); the model comes without DDP's
                            wrapper; with a "loss" among them, loss_sum is not called again
    load(model)             fills the parameters, sharded or whole, from files: build_model's are on
                            the meta device
    export(model, folder)   writes what `export --format hf` exports; default:
                            model.save_pretrained(folder)
    sample(model)           a sample from the trained model: a text, or an image [C, H, W] in 0..1
    groups(model)           list of dicts: "params" (names, fnmatch patterns, or parameters of
                            `model`, which is sharded already), and "name", "lr_scale" (times
                            optim.lr), "weight_decay" if they differ
    optimizer(groups, lr)   a torch optimizer of these groups; its learning rates are set each step
    schedule(step)          the factor of optim.lr after `step` applied steps, warm-up included;
                            read once, so of nothing but `step`; see also Schedule.factor
    state_dict(), load_state_dict(state)
                            what the task keeps beside the model, such as a queue or a teacher:
                            each rank's is saved with the checkpoint
    unsaved                 names of attributes that each step sets anew, which need no saving
    best_metric             whose best checkpoint is kept: "max:accuracy", "min:error"; or the loss
    on_step(run, report), on_evaluation(run, values), train_metrics(run, report)
                            called by the main job: see supervise/callbacks.py
    observers(run)          objects that watch the run: see telemetry/observer.py

A constructor parameter called `data` gets the `[data]` section; every other one is set by
`--task.args.NAME VALUE`.
"""

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from dist_amp.config.validate import check_dataset, check_model
from dist_amp.distributed.process import hide_progress_bars
from dist_amp.errors import Failure, in_one_line
from dist_amp.world import World

PLAIN = (str, bytes, int, float, bool, type(None))
# What a checkpoint has of an optimizer, what the scaler sets for its step, and Muon's plan of it.
SAVED_OF_OPTIMIZER = ("state", "param_groups", "grad_scale", "found_inf", "_exchanges")


class Task(Protocol):
    """The methods that the loop calls. A batch is collated samples, moved to the device."""

    def build_model(self) -> nn.Module:
        """The model, on the CPU, in float32; the random seed is set and equal on all ranks."""

    def build_dataset(self, split: str) -> Any:
        """The samples of "train" or "validation", with len() and []; None for no validation."""

    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss, summed over what `weight` counts: a float32 scalar on the model's device.

        Call `model(...)` once, and only that: over several ranks the model is wrapped or sharded.
        Leave the parameters as they are: autocast casts each once per step.
        """

    def weight(self, batch: Any) -> float | Tensor:
        """The loss is divided by its sum over all ranks and micro-batches. A number or a scalar."""


def call_task(
    kind: type[Failure], name: str, method: Callable[..., Any], *args: Any, when: str = ""
) -> Any:
    """Call the task's method. Errors: `kind`, in one line that names the file and line."""
    try:
        return method(*args)
    except Failure:
        raise
    except Exception as error:
        raise kind(f"the task's {name} failed{when}: {in_one_line(error)}; fix it") from error


def as_scalar(value: float | Tensor, device: torch.device) -> Tensor:
    """A number, or a scalar tensor, as a scalar tensor on the device."""
    if isinstance(value, Tensor):
        return value.to(device)
    return torch.full((), float(value), device=device)


def built_model(task: Task) -> nn.Module:
    """The task's model, in its own modes. Errors: DataError for one that can't be trained."""
    module = task.build_model()
    check_model(module)
    return module


def build_split(task: Task, split: Literal["train", "validation"], world: World) -> Any:
    """The task's dataset of a split; each node's first rank goes first, and fills the caches."""
    if not (world.is_main and sys.stderr.isatty()):
        hide_progress_bars()
    if world.local_rank != 0:
        world.wait_long()
    dataset = task.build_dataset(split)
    if world.local_rank == 0:
        world.wait_long()
    check_dataset(dataset, split)
    return dataset


def attributes_of(owner: Any, module: nn.Module) -> dict[str, list[Any]]:
    """{attribute: the tensors, numbers, texts and states of generators in it}, without the model's.

    Objects of classes of the owner's file are looked into. Of an optimizer, what a checkpoint has
    is left out.
    """
    attributes = dict(vars(owner))
    elsewhere = [*module.parameters(), *module.buffers()]
    if isinstance(owner, Optimizer):
        elsewhere += tree_leaves(list(owner.state.values()))
        for name in SAVED_OF_OPTIMIZER:
            attributes.pop(name, None)
    known = {id(tensor) for tensor in elsewhere if isinstance(tensor, Tensor)}
    return {
        name: [leaf for leaf in leaves_of(value, type(owner)) if id(leaf) not in known]
        for name, value in attributes.items()
    }


def leaves_of(value: Any, owner: type) -> Iterator[Any]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, (Tensor, *PLAIN)):
            yield leaf
        elif isinstance(leaf, nn.Module):
            yield from leaf.parameters()
            yield from leaf.buffers()
        elif isinstance(leaf, Optimizer):
            yield from tree_leaves(list(leaf.state.values()))
        elif hasattr(leaf, "__array_interface__") and hasattr(leaf, "dtype"):
            if leaf.dtype.kind in "biufc":
                yield torch.as_tensor(leaf)
        elif isinstance(leaf, torch.Generator):
            yield leaf.get_state()
        elif hasattr(leaf, "bit_generator"):  # of NumPy
            yield str(leaf.bit_generator.state)
        elif isinstance(leaf, random.Random):
            yield str(leaf.getstate())
        elif type(leaf).__module__ == owner.__module__ and hasattr(leaf, "__dict__"):
            yield from leaves_of(vars(leaf), owner)
