"""What you write: a plain class with four methods, chosen by `--task.target my_file:MyTask`.

No base class and no registry: `Task` only documents them. Optional methods and attributes:

    collate(samples)        list of samples -> batch; default: PyTorch's default collate
    augment(sample, rng)    sample -> training sample; draw random numbers only from `rng`, a
                            torch.Generator seeded by run.seed, epoch and sample, so that results
                            don't depend on the numbers of ranks and workers
    blocks(model)           list of modules: the layers to shard, compile or recompute one by one;
                            default: see scaling/blocks.py
    units(model)            more modules that FSDP2 gathers one by one, such as an untied embedding
                            and head; the model's forward must call each of them once
    couples_samples         True if the loss compares the samples of all ranks' micro-batches
    tokens(batch)           int: the number of tokens in a batch, for tokens per second
    flops_per_item(model)   number, for MFU: floating-point operations of one sample's forward and
                            backward, with two per multiply-add and none for recomputation;
                            telemetry.mfu.count_flops counts them
    metrics(model, batch)   {name: scalar sum} for evaluation, each divided by the total weight as
                            the loss is, or {name: (sum, weight)}; `model` has no DDP wrapper; if
                            the names include "loss", evaluation does not call loss_sum
    load(model)             fills the parameters, sharded or whole, from pretrained files; a task
                            with `load` gets build_model's parameters on the meta device
    export(model, folder)   writes the files of `export --format hf`; default:
                            model.save_pretrained(folder)
    sample(model)           a sample from the trained model: a text, or an image [C, H, W] in 0..1
    groups(model)           list of dicts: "params" (names, fnmatch patterns, or parameters of
                            `model`, which is already sharded), and optionally "name", "lr_scale"
                            (multiplies optim.lr) and "weight_decay"
    optimizer(groups, lr)   a torch optimizer of these groups; each step sets its learning rates
    schedule(step)          the factor of optim.lr after `step` applied steps, warm-up included;
                            called at the start, so use only `step`; see also Schedule.factor
    state_dict(), load_state_dict(state)
                            the task's state outside the model, such as a queue or a teacher; a
                            checkpoint saves it for each rank
    unsaved                 names of attributes that need no saving, because every step sets them
    best_metric             which checkpoint is best: "max:accuracy" or "min:error"; default: loss
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
# Attributes of optimizers that are saved, set by the scaler for one step, or rebuilt by Muon.
OPTIMIZER_ATTRIBUTES = ("state", "param_groups", "grad_scale", "found_inf", "_exchanges")


class Task(Protocol):
    """The methods that the loop calls. A batch is collated samples, moved to the device."""

    def build_model(self) -> nn.Module:
        """The model, on the CPU, in float32; the random seed is set, the same on all ranks."""

    def build_dataset(self, split: str) -> Any:
        """The samples of "train" or "validation": an object with len() and [], or None."""

    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss, summed over what `weight` counts: a float32 scalar on the model's device.

        Call `model(...)` once, and no submodule: on several ranks the model is wrapped or sharded.
        Don't change its parameters: autocast casts each only once per step.
        """

    def weight(self, batch: Any) -> float | Tensor:
        """A number or scalar tensor; its sum over ranks and micro-batches divides the loss."""


def call_task(
    kind: type[Failure], name: str, method: Callable[..., Any], *args: Any, when: str = ""
) -> Any:
    """Call the task's method. Raises `kind`: one line of text with the error's file and line."""
    try:
        return method(*args)
    except Failure:
        raise
    except Exception as error:
        raise kind(f"the task's {name} failed{when}: {in_one_line(error)}; fix it") from error


def built_model(task: Task) -> nn.Module:
    """The task's model, before model.train(). Raises DataError if it can't be trained."""
    module = task.build_model()
    check_model(module)
    return module


def build_split(task: Task, split: Literal["train", "validation"], world: World) -> Any:
    """The task's dataset of a split. Local rank 0 builds it first, to fill its machine's caches."""
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
    """State of a task or optimizer that a checkpoint may miss: {attribute: its leaves}.

    A leaf is a tensor, number, text or generator state. Leaves out the model's tensors and an
    optimizer's saved state. Looks into objects whose classes are defined in the owner's file.
    """
    attributes = dict(vars(owner))
    saved = [*module.parameters(), *module.buffers()]
    if isinstance(owner, Optimizer):
        saved += tree_leaves(list(owner.state.values()))
        for name in OPTIMIZER_ATTRIBUTES:
            attributes.pop(name, None)
    saved_ids = {id(tensor) for tensor in saved if isinstance(tensor, Tensor)}
    return {
        name: [leaf for leaf in leaves_of(value, type(owner)) if id(leaf) not in saved_ids]
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
            if leaf.dtype.kind in "biufc":  # a NumPy array of bools or numbers
                yield torch.as_tensor(leaf)
        elif isinstance(leaf, torch.Generator):
            yield leaf.get_state()
        elif hasattr(leaf, "bit_generator"):  # a numpy.random.Generator
            yield str(leaf.bit_generator.state)
        elif isinstance(leaf, random.Random):
            yield str(leaf.getstate())
        elif type(leaf).__module__ == owner.__module__ and hasattr(leaf, "__dict__"):
            yield from leaves_of(vars(leaf), owner)
