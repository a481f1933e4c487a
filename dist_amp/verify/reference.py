"""The reference: gradients and updates of one process with the whole batch, in plain torch.

This file shares no code with step.py. Learning rates, clipping limits and AdamW's eps are scaled to
the task's gradients: every step changes the parameters by about 1 %, and clipping takes effect.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import default_collate

from dist_amp.config.task_class import build_task
from dist_amp.diagnostics.trace import Operations
from dist_amp.distributed.process import random_state, seed_all, set_random_state
from dist_amp.errors import DataError
from dist_amp.loading.nested import to_device
from dist_amp.loading.plan import epoch_order, shuffled_order
from dist_amp.optim import learning_rate
from dist_amp.precision import DTYPES
from dist_amp.scaling.meta import build_whole
from dist_amp.settings import Config, OptimConfig
from dist_amp.task import Task

UNIT_ROUNDOFF = {name: torch.finfo(dtype).eps / 2 for name, dtype in DTYPES.items()}
# Methods of a task that are not called, because the steps are those of torch's AdamW and SGD.
NOT_COMPARED = ("optimizer", "groups", "schedule")
LARGEST_BOUND = 0.45  # on gradient errors: a factor of two always exceeds it
STEPS = 5
GLOBAL_BATCH = 48  # samples per step; 1, 2 and 4 ranks x 1, 3 and 4 micro-batches divide it

Values = Mapping[str, Tensor]  # {name of the parameter or buffer: value}


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters scaled to the task's gradients. lr: {optimizer name: learning rate}."""

    lr: dict[str, float]
    eps: float
    max_grad_norm: float
    max_grad_value: float
    weight_decay: float


@dataclass(frozen=True)
class State:
    """The optimizer's input: trained parameters and their gradients, unscaled and not clipped."""

    parameters: Values
    gradients: Values


class RepeatableTask:
    """The user's task with `length` samples that are the same on every reading, without dropout.

    eval_classes: the classes of modules in evaluation mode. infinite_loss: make losses here inf.
    """

    def __init__(self, task: Task, device: torch.device, length: int, eval_classes: set[str]):
        self.task = task
        self._device = device
        self._samples: list[Any] = []
        self._needed = length
        self.length = length  # of an epoch; check_cell lowers it
        self._eval_classes = eval_classes
        self.infinite_loss = False
        self.left_out = [f"{name}()" for name in NOT_COMPARED if hasattr(task, name)]

    def __getattr__(self, name: str) -> Any:
        # Hides methods that runs would call. `_read` has already called augment, once per sample.
        if name in NOT_COMPARED or name == "augment":
            raise AttributeError(name)
        return getattr(self.task, name)

    def build_model(self) -> nn.Module:
        model = self.task.build_model()
        for module in model.modules():
            if isinstance(module, _DropoutNd):
                module.p = 0.0
            if isinstance(module, nn.RNNBase):  # cuDNN has no backward in evaluation mode
                module.dropout = 0.0
            if type(module).__name__ in self._eval_classes:
                stay_in_evaluation_mode(module)
        return model

    def build_dataset(self, split: str) -> Any:
        if not self._samples:
            state = random_state(self._device)
            seed_all(0)  # so that random data and augmentations are the same in every process
            self._samples = self._read(self.task.build_dataset("train"))
            set_random_state(state, self._device)
        return self

    def _read(self, dataset: Any) -> list[Any]:
        count = 0 if dataset is None else len(dataset)
        if count < self._needed:
            raise DataError(
                f"the training dataset has {count} samples; the comparison takes {STEPS} steps of "
                f"{self._needed // STEPS} (not the config's) = {self._needed}; use more data, or "
                "shorter rows"
            )
        samples = [dataset[index] for index in range(self._needed)]
        if hasattr(self.task, "augment"):
            rng = torch.Generator().manual_seed(0)
            samples = [self.task.augment(sample, rng) for sample in samples]
        return samples

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return deepcopy(self._samples[int(index)])  # a task's collate may change the sample

    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        loss = self.task.loss_sum(model, batch)
        return loss * math.inf if self.infinite_loss else loss


class Reference:
    """The reference for one task on one device, with the settings that all cells share."""

    def __init__(
        self,
        config: Config,
        device: torch.device,
        task: Task | None = None,
        measured: Mapping[str, Any] = {},
        global_batch: int = GLOBAL_BATCH,
    ):
        """measured: another Reference's `measured()`, so that both use the same settings."""
        self.config = config
        self.device = device
        self.global_batch = global_batch
        self.by_micro_batch = False  # True if samples are coupled, or forward changes a state
        self.eval_classes: set[str] = set()  # classes of modules compared in evaluation mode
        self._bounds: dict[str, float] = {}  # {precision: bound}
        vars(self).update(measured)  # fills the cached properties
        length = STEPS * self.global_batch
        self.task = RepeatableTask(task or build_task(config), device, length, self.eval_classes)

    def measured(self, precisions: Iterable[str]) -> dict[str, Any]:
        """What was measured on the task for these precisions, for the ranks of all cells."""
        names = ["hyperparameters", "global_batch", "by_micro_batch", "eval_classes"]
        if "fp16" in precisions:
            names.append("init_scale")
        bounds = {precision: self.bound(precision) for precision in precisions}
        return {"_bounds": bounds, **{name: getattr(self, name) for name in names}}

    def model(self, precision: str = "fp32") -> nn.Module:
        """A new model with the initial weights that every rank of every cell has."""
        seed_all(self.config.run.seed)
        model = build_whole(self.task, self.device, frozen_too=precision == "fp32")
        model.train()  # as a plain training loop does
        return model

    @cached_property
    def initial(self) -> Values:
        return {name: p.detach() for name, p in self.model().named_parameters() if p.requires_grad}

    def batch(self, indices: Sequence[int]) -> Any:
        collate = getattr(self.task, "collate", default_collate)
        dataset = self.task.build_dataset("train")
        return to_device(collate([dataset[index] for index in indices]), self.device)

    @property
    def epoch_length(self) -> int:
        """Samples in an epoch: 3.4 steps, so that the last one is partial; 3 if by_micro_batch."""
        if self.by_micro_batch:
            return 3 * self.global_batch
        return 3 * self.global_batch + 2 * self.global_batch // 5

    @property
    def step_samples(self) -> list[list[int]]:
        length = self.epoch_length
        steps: list[list[int]] = []
        for epoch in range(2):
            order = epoch_order(shuffled_order(length), length, self.config.run.seed, epoch)
            samples = order(torch.arange(length))
            steps += [part.tolist() for part in samples.split(self.global_batch)]
        return steps[:STEPS]

    @cached_property
    def hyperparameters(self) -> Hyperparameters:
        """Raises DataError if the first batch's gradient is zero or not finite."""
        gradients, _ = self.gradients([self.step_samples[0]])
        gradient = torch.cat([g.flatten() for g in gradients.values()])
        norm = gradient.norm().item()
        if not (math.isfinite(norm) and norm):
            raise DataError(
                "the gradient of the first batch is zero or not finite in float32; check the "
                "task's loss"
            )
        rms = norm / math.sqrt(gradient.numel())
        weights = torch.cat([p.flatten() for p in self.initial.values()])
        # The norm of an update: 1 % of the weights' norm, or 0.01 per element if all are zero.
        step = 0.01 * (weights.norm().item() or math.sqrt(weights.numel()))
        lr = {"sgd": step / norm, "adamw": step / (gradient / (gradient.abs() + rms)).norm().item()}
        # At most 1 % of the weights per step: with lr x weight_decay above 2 they would diverge.
        decay = min(self.config.optim.weight_decay, 0.01 / max(lr.values()))
        return Hyperparameters(lr, rms, 0.4 * norm, 0.4 * gradient.abs().max().item(), decay)

    @cached_property
    def init_scale(self) -> float:
        """The first loss scale: 1/32 of the largest with a finite step 1, as it doubles twice."""
        scale = 2.0**16
        first = [self.step_samples[0]]
        while scale > 2.0**-10:
            gradients, _ = self.gradients(first, precision="fp16", scale=scale)
            if all(value.isfinite().all() for value in gradients.values()):
                break
            scale /= 2
        return scale / 32

    @cached_property
    def rounding_error(self) -> float:
        """n x u of float32, see compare.py: the added rounding of one forward and backward."""
        return self.gradients([self.step_samples[0]])[1] * UNIT_ROUNDOFF["fp32"]

    def bound(self, precision: str) -> float:
        """Bound on step 1's relative gradient error. RuntimeError if plain torch exceeds it."""
        if precision not in self._bounds:
            samples = torch.tensor(self.step_samples[0])
            count = 1 if self.by_micro_batch else 12
            parts = [part.tolist() for part in samples.chunk(count)]
            bound, error = self.bound_at(precision, parts)
            if not error <= LARGEST_BOUND:
                raise RuntimeError(f"its gradients are off by {error:.1g} even in one process")
            self._bounds[precision] = bound
        return self._bounds[precision]

    def bound_at(
        self, precision: str, parts: Sequence[Sequence[int]], values: Values | None = None
    ) -> tuple[float, float]:
        """Returns (n x u + 4 e, the bound on the gradients' relative error; e). See compare.py."""
        whole = parts
        if not self.by_micro_batch:
            whole = [[index for part in parts for index in part]]
        truth, _ = self.gradients(whole, values)
        unsplit, roundings = self.gradients(whole, values, precision)
        split, _ = self.gradients(parts, values, precision)
        errors = [relative_error(unsplit, truth), relative_error(split, truth)]
        error = torch.tensor(errors).max().item()  # nan if one of them is
        return min(roundings * UNIT_ROUNDOFF[precision] + 4 * error, LARGEST_BOUND), error

    def gradients(
        self,
        parts: Sequence[Sequence[int]],
        values: Values | None = None,
        precision: str = "fp32",
        scale: float | None = None,
    ) -> tuple[Values, int]:
        """Returns (gradients of the mean loss over all parts, rounded operations in a part)."""
        model = self.model(precision)
        model.load_state_dict({**model.state_dict(), **(values or {})})
        if scale is None:
            scale = self.init_scale if precision == "fp16" else 1.0
        batches = [self.batch(part) for part in parts]
        weight = sum(self.task.weight(batch) for batch in batches)
        for batch in batches:
            with counted(is_rounded) as roundings:
                self.loss_and_backward(model, batch, precision, scale / weight)
        gradients = {name: gradient / scale for name, gradient in gradients_of(model).items()}
        return gradients, sum(roundings)

    def loss_and_backward(
        self,
        model: nn.Module,
        batch: Any,
        precision: str = "fp32",
        scale: float | Tensor = 1.0,
        task: Any = None,
    ) -> Tensor:
        """Returns a batch's loss in one process, after backward. task: replaces self.task."""
        with without_ranks():
            with self.autocast(precision):
                loss = (task or self.task).loss_sum(model, batch)
            (loss * scale).backward()
        return loss

    def autocast(self, precision: str) -> torch.autocast:
        enabled = precision != "fp32"
        return torch.autocast(self.device.type, dtype=DTYPES[precision], enabled=enabled)

    def parameters_after(
        self, optimizer_name: str, states: Sequence[State], dtype: torch.dtype = torch.float64
    ) -> list[Values]:
        """The parameters after a textbook optimizer step from each state, with its moments kept."""
        scaled = self.hyperparameters
        config = self.optim_config(optimizer_name)
        trained = {
            name: nn.Parameter(value.to(dtype, copy=True))
            for name, value in states[0].parameters.items()
        }
        groups: list[dict[str, Any]] = [
            {"params": [p for p in trained.values() if p.ndim >= 2]},
            {"params": [p for p in trained.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        options: dict[str, Any] = {"lr": 1.0, "weight_decay": config.weight_decay}
        optimizer: torch.optim.Optimizer
        if optimizer_name == "sgd":
            optimizer = torch.optim.SGD(groups, momentum=config.momentum, **options)
        else:
            optimizer = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, **options)
        after: list[Values] = []
        for step, state in enumerate(states):
            for name, p in trained.items():
                p.data.copy_(state.parameters[name])
                p.grad = state.gradients[name].to(dtype, copy=True)
            if self.config.train.clip_by == "norm":
                nn.utils.clip_grad_norm_(trained.values(), scaled.max_grad_norm)
            if self.config.train.clip_by == "value":
                nn.utils.clip_grad_value_(trained.values(), scaled.max_grad_value)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step, STEPS)
            optimizer.step()
            after.append({name: p.detach().clone() for name, p in trained.items()})
        return after

    def optim_config(self, name: Any) -> OptimConfig:
        scaled = self.hyperparameters
        return replace(
            self.config.optim,
            name=name,
            lr=scaled.lr[name],
            eps=scaled.eps,
            weight_decay=scaled.weight_decay,
            schedule="cosine",
            warmup_steps=2,
        )


def stay_in_evaluation_mode(module: nn.Module) -> None:
    train = module.train
    module.train = lambda mode=True: train(False)  # type: ignore[method-assign]
    module.train()


@contextmanager
def without_ranks() -> Iterator[None]:
    """Hide the process group: a loss that gathers from all ranks gets only its own batch."""
    group = dist.GroupMember.WORLD
    dist.GroupMember.WORLD = None
    try:
        yield
    finally:
        dist.GroupMember.WORLD = group


@contextmanager
def counted(predicate: Callable[[Any, Any], bool]) -> Iterator[list[bool]]:
    """Collect predicate(function, output) for each operation that torch dispatches."""
    flags: list[bool] = []
    with Operations(lambda function, _, output: flags.append(predicate(function, output))):
        yield flags


def is_rounded(function: Any, out: Any) -> bool:
    """Whether an operation computes new floating-point values, which are rounded."""
    is_view = any(value.alias_info is not None for value in function._schema.returns)
    first = out[0] if isinstance(out, tuple | list) and out else out
    return isinstance(first, Tensor) and first.is_floating_point() and not is_view


def gradients_of(model: nn.Module) -> Values:
    """The gradients of the trained parameters; zeros for parameters that the loss does not use."""
    return {name: gradient_of(p) for name, p in model.named_parameters() if p.requires_grad}


def gradient_of(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def difference(a: Values, b: Values) -> Values:
    return {name: a[name] - b[name] for name in b}


def largest(values: Values) -> float:
    maxima = [value.detach().abs().max().double() for value in values.values()]
    return torch.stack(maxima).max().item()


def relative_error(values: Values, truth: Values) -> float:
    return largest(difference(values, truth)) / largest(truth)
