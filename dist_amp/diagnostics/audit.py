"""Audit for silent corruption: micro-batches are computed again by other ranks, to the bit.

In one random step of every debug.audit_every, right before its update, each rank also computes
another rank's micro-batch, from its samples to its gradients before they are reduced. Where bits
differ, all ranks compute it once more, and the majority tells which rank is wrong.

Docs: docs/debugging.md
"""

import platform
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from dist_amp.bit_exact import seed_micro_batch
from dist_amp.diagnostics.consistency import find_mismatch
from dist_amp.diagnostics.trace import (
    Event,
    Recorder,
    clean_name,
    hash_samples,
    hash_tensor,
    recorded,
)
from dist_amp.errors import ConfigError, NumericsError, some_of
from dist_amp.parallel import Parallel
from dist_amp.run import Run
from dist_amp.settings import Config
from dist_amp.step import loss_of, weights_of
from dist_amp.telemetry.observer import Observer
from dist_amp.telemetry.step_report import StepReport
from dist_amp.world import World

Hashes = tuple[int, ...]  # of the samples, the loss, and the gradient of each parameter


def hash_for_audit(values: Sequence[Tensor]) -> Tensor:
    """Scalar int64 on the device, of one tensor."""
    # Zeros are as good as no gradient: DDP gives them to an idle expert after the backward.
    return hash_tensor(values[0]) * values[0].any()


class Audit(Observer):
    """Errors: NumericsError where bits differ. `check_settings` says where they can't be equal."""

    def __init__(self, run: Run):
        self._run = run
        parameters = run.parallel.module.named_parameters()
        self._trained = [clean_name(name) for name, p in parameters if p.requires_grad]
        self._names = ["samples", "loss", *(f"gradient of {name}" for name in self._trained)]
        self._position = run.data.position  # of the data before the step
        self._events: list[Event] | None = None  # of an audited step
        self._is_off = False
        self._recording = ExitStack()

    def before_step(self, micro_batches: Sequence[Any]) -> None:
        run = self._run
        ranks = run.world.world_size
        seed = run.config.run.seed
        choice = choose(seed, run.config.debug.audit_every, run.step, ranks, len(micro_batches))
        if choice is None or self._is_off:
            return
        self._number, self._shift = choice
        self._step = run.step
        self._task = run.task
        weights = weights_of(run.task, micro_batches, run.world.device)
        total = run.parallel.sum_over_ranks(weights).mean()
        # The gradient that train_step gives to a loss sum, rounded as there.
        self._factor = run.scaler.scale(torch.ones_like(total)) / total
        self._samples = hash_samples([micro_batches[self._number]], run.world.device)
        recording = recorded(run, hash_for_audit, ("gradient",), only=self._number)
        self._events = self._recording.enter_context(recording)
        self._recording.enter_context(run.optimizer.register_step_pre_hook(self._audit))

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        self._audit()  # of a skipped step, which may not have called the optimizer
        self._recording.close()  # not within the hook: the optimizer walks through all of them
        self._position = self._run.data.position

    def close(self, error: BaseException | None = None) -> None:
        self._recording.close()

    def _audit(self, *_: Any) -> None:
        """Compute another rank's micro-batch, and compare. Errors: NumericsError on all ranks."""
        if self._events is None:
            return
        world = self._run.world
        with world.clock.hold("diagnostics"):
            in_step = self._hashes(self._samples, self._events)
            self._events = None
            again = self._compute((world.rank + self._shift) % world.world_size)
            rows = world.stack(torch.stack([in_step, again]))
            in_step = rows[:, 0]
            again = rows[:, 1].roll(self._shift, 0)  # by the rank whose micro-batch it is
            if torch.equal(in_step, again):
                return
            rank = int((in_step != again).any(1).nonzero()[0])
            ranks = [rank, (rank - self._shift) % world.world_size, *range(world.world_size)]
            values = torch.stack([in_step[rank], again[rank], *world.stack(self._compute(rank))])
            self._report(ranks, [*map(tuple, values.tolist())])

    def _compute(self, rank: int) -> Tensor:
        """Hashes of a rank's micro-batch, computed here: as `names`. Every rank calls it."""
        run = self._run
        parallel = run.parallel
        gradients = [p.grad for p in parallel.parameters]
        for p in parallel.parameters:
            p.grad = None
        plan = replace(run.data.plan, rank=rank)
        _, shards = next(plan.steps(self._position))
        seed = run.config.run.seed
        recorder = Recorder(
            self._task, parallel.module, hash_for_audit, ("gradient",), drop_gradients=True
        )
        with parallel.no_side_effects(), unreduced(parallel), recorder:
            [(batch, _)] = run.data.fetched([shards[self._number]])
            seed_micro_batch(seed, self._step, self._number * run.world.world_size + rank)
            with run.precision.autocast():
                loss = loss_of(recorder, run.model, batch, run.world.device)
            loss.backward(self._factor)
        for p, gradient in zip(parallel.parameters, gradients, strict=True):
            p.grad = gradient
        return self._hashes(hash_samples([batch], run.world.device), recorder.events)

    def _hashes(self, samples: Tensor, events: Sequence[Event]) -> Tensor:
        """By `names`, 0 for a parameter without a gradient: int64 on the host."""
        (loss,) = (event.values for event in events if event.kind == "loss")
        by_name = {event.name: event.values for event in events if event.kind == "gradient"}
        zero = torch.zeros_like(loss)
        hashes = [samples, loss, *(by_name.get(name, zero) for name in self._trained)]
        return torch.stack(hashes).cpu()

    def _report(self, ranks: Sequence[int], values: Sequence[Hashes]) -> None:
        """Arguments: as for `verdict`."""
        run = self._run
        pairs = zip(self._names, *values[:2], strict=True)
        different = [name for name, first, second in pairs if first != second]
        text = f"audit of step {self._step + 1}, micro-batch {self._number} of rank {ranks[0]}: "
        text += f"other bits of {some_of(different)} when computed again"
        places = run.world.gather(f"{platform.node()}, {run.world.device}")
        if not (who := verdict(ranks, values, places)):
            self._is_off = True
            run.world.warn(
                f"{text}, also by the same rank: not corruption, but a task that is not "
                "repeatable, as if it drew from a generator that is not seeded by dist_amp; no "
                "more steps are audited"
            )
            return
        if mismatch := find_mismatch(run):
            who += f"; {mismatch}"
        raise NumericsError(
            f"{text}; {who}; resume from a checkpoint without faulty hardware. If dist_amp.verify "
            "--bit_exact fails for this task on other machines too, it is not the hardware: the "
            "task is not deterministic"
        )


def check_settings(config: Config, world: World) -> None:
    """Errors: ConfigError, on all ranks, where other bits would be no sign of corruption."""
    reason = ""
    if not config.parallel.bit_exact:
        reason = "needs parallel.bit_exact=true: otherwise ranks do not compute the same bits"
    elif world.world_size == 1:
        reason = "needs another rank, which computes again, and this is one process"
    else:
        kinds = world.gather(kind_of(world.device))
        for rank, kind in enumerate(kinds):
            if kind != kinds[0]:
                reason = f"needs ranks on equal devices: {kinds[0]} (rank 0), {kind} (rank {rank})"
    if reason:
        every = config.debug.audit_every
        raise ConfigError(f"debug.audit_every={every} {reason}; use debug.audit_every=off")


def kind_of(device: torch.device) -> str:
    """What decides which kernels a device runs."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU with {torch.backends.cpu.get_cpu_capability()}"


def choose(
    seed: int, every: int | Literal["off"], step: int, ranks: int, micro_batches: int
) -> tuple[int, int] | None:
    """What is audited in a step, counted from 0; None in most. A function of these numbers alone.

    (number of the micro-batch in each rank's step, how many ranks on is the one that it belongs to)
    """
    assert every != "off"
    window, place = divmod(step, every)
    generator = random.Random(f"audit {seed} {window}")  # the same in every process, unlike a hash
    if place != generator.randrange(every):
        return None
    return generator.randrange(micro_batches), generator.randrange(1, ranks)


@contextmanager
def unreduced(parallel: Parallel) -> Iterator[None]:
    """A context around a forward and backward whose gradients are not reduced over ranks."""
    model: Any = parallel.model
    if not parallel.sharded:
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def verdict(ranks: Sequence[int], values: Sequence[Hashes], places: Sequence[str]) -> str:
    """Which ranks are wrong, as far as can be known; "" if the task is not repeatable.

    ranks: that of the micro-batch in the step, one that computed it again, then all once more.
    values: what each of these computed. places: where each of all ranks is.
    """
    pairs = list(zip(ranks, values, strict=True))
    likely, count = Counter(values).most_common(1)[0]
    wrong = Counter(rank for rank, value in pairs if value != likely)
    # The first two computed it twice, and may differ from themselves.
    unsteady = {rank for rank, value in pairs[:2] if value != values[2 + rank]}
    if unsteady and len({value[0] for value in values}) > 1:
        return ""
    if 2 * count <= len(values):  # no majority
        if len(unsteady) == 2:
            return ""
        wrong = Counter({rank: wrong[rank] for rank in unsteady})
    if not wrong:
        sides: dict[Hashes, set[int]] = {}
        for rank, value in pairs:
            sides.setdefault(value, set()).add(rank)
        text = " against ".join(f"ranks {sorted(side)}" for side in sides.values())
        return f"{text}, each with the same result twice: which is wrong can't be told"
    texts = [
        f"rank {rank} ({places[rank]}) in {wrong[rank]} of {ranks.count(rank)} computations"
        for rank in sorted(wrong)
    ]
    return f"wrong is {', '.join(texts)}"
