"""What you write: a plain class with four methods, chosen by `--task.target my_file:MyTask`.

No base class and no registry: `Task` only documents them. Optional methods and attributes:

    collate(samples)        list of samples -> batch; default: PyTorch's default collate
    augment(sample, rng)    sample -> training sample; draw random numbers from `rng` only, a
                            torch.Generator seeded by run.seed, epoch and sample: then world size
                            and workers change nothing
    blocks(model)           list of modules: the layers to shard, compile or recompute one by one;
                            default: see scaling/blocks.py
    units(model)            more modules that FSDP gathers on their own, such as an untied
                            embedding and head; each forward must call each once
    couples_samples         True if the loss compares samples of a micro-batch, gathered over ranks
    tokens(batch)           int: the number of tokens in a batch, for tokens per second
    flops_per_item(model)   number: floating-point operations of one sample's forward and backward,
                            for MFU; a multiply-add counts as two, recomputation as none;
                            telemetry.mfu.count_flops counts them
    metrics(model, batch)   {name: scalar sum} for evaluation, each divided by the total weight as
                            the loss is, or {name: (sum, weight)}; `model` is without DDP's wrapper;
                            if "loss" is among them, loss_sum is not called
    load(model)             fills the parameters, sharded or whole, from pretrained files; with it,
                            build_model's parameters are on the meta device
    export(model, folder)   writes what `export --format hf` exports; default:
                            model.save_pretrained(folder)
    sample(model)           a sample from the trained model: a text, or an image [C, H, W] in 0..1
    groups(model)           list of dicts: "params" (names, fnmatch patterns, or parameters of
                            `model`, which is already sharded), and optionally "name", "lr_scale"
                            (times optim.lr) and "weight_decay"
    optimizer(groups, lr)   a torch optimizer of these groups; each step sets its learning rates
    schedule(step)          the factor of optim.lr after `step` applied steps, including warm-up;
                            read once, so it may depend on `step` only; see also Schedule.factor
    state_dict(), load_state_dict(state)
                            what the task keeps beside the model, such as a queue or a teacher; a
                            checkpoint saves each rank's
    unsaved                 names of attributes that each step sets anew, which need no saving
    best_metric             keep the best checkpoint by "max:accuracy" or "min:error"; default: loss
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
# Saved in a checkpoint; set by the scaler for one step; or made again by Muon (_exchanges).
SAVED_OF_OPTIMIZER = ("state", "param_groups", "grad_scale", "found_inf", "_exchanges")


class Task(Protocol):
    """The methods that the loop calls. A batch is collated samples, moved to the device."""

    def build_model(self) -> nn.Module:
        """The model, on the CPU, in float32; the random seed is set, the same on all ranks."""

    def build_dataset(self, split: str) -> Any:
        """The samples of "train" or "validation": an object with len() and [], or None for none."""

    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss, summed over what `weight` counts: a float32 scalar on the model's device.

        Call `model(...)` once, and none of its parts: on several ranks it is wrapped or sharded.
        Don't change its parameters: autocast casts each only once per step.
        """

    def weight(self, batch: Any) -> float | Tensor:
        """The loss's divisor, summed over all ranks and micro-batches: a number or a scalar."""


def call_task(
    kind: type[Failure], name: str, method: Callable[..., Any], *args: Any, when: str = ""
) -> Any:
    """Call the task's method. Errors: `kind`, in one line with the file and line of the error."""
    try:
        return method(*args)
    except Failure:
        raise
    except Exception as error:
        raise kind(f"the task's {name} failed{when}: {in_one_line(error)}; fix it") from error


def built_model(task: Task) -> nn.Module:
    """The task's model, before train(). Errors: DataError for one that can't be trained."""
    module = task.build_model()
    check_model(module)
    return module


def build_split(task: Task, split: Literal["train", "validation"], world: World) -> Any:
    """The task's dataset of a split; local rank 0 builds it first and fills the node's caches."""
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
    """What a task or an optimizer keeps: {attribute: tensors, numbers, texts, generators' states}.

    Leaves out the model's tensors, and what a checkpoint saves of an optimizer. Looks into objects
    whose classes are defined in the owner's file.
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
        elif hasattr(leaf, "bit_generator"):  # a numpy.random.Generator
            yield str(leaf.bit_generator.state)
        elif isinstance(leaf, random.Random):
            yield str(leaf.getstate())
        elif type(leaf).__module__ == owner.__module__ and hasattr(leaf, "__dict__"):
            yield from leaves_of(vars(leaf), owner)
