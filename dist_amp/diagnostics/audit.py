"""Audit for silent data corruption: two ranks compute the same micro-batch and compare the bits.

Before one random step of every debug.audit_every steps, each rank computes one of its own micro-
batches, and reads and computes one of another rank, up to the gradients before reduction. If bits
differ, all ranks compute that micro-batch again, and the majority decides which rank is wrong. Then
the step is taken as usual.

Docs: docs/debugging.md
"""

import platform
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dist_amp.bit_exact import seed_micro_batch
from dist_amp.diagnostics.consistency import find_mismatch
from dist_amp.diagnostics.trace import clean_name, hash_samples, hash_tensor, recorded_backward
from dist_amp.errors import ConfigError, NumericsError, some_of
from dist_amp.run import Run
from dist_amp.settings import Config
from dist_amp.telemetry.observer import Observer
from dist_amp.world import World

Hashes = tuple[int, ...]  # of a micro-batch's samples, loss, and each parameter's gradient


class Audit(Observer):
    """Raises NumericsError if bits differ. `check_settings` rejects runs in which they may."""

    def __init__(self, run: Run):
        self._run = run
        parameters = run.parallel.module.named_parameters()
        self._trained = [clean_name(name) for name, p in parameters if p.requires_grad]
        self._position = run.data.position  # position in the data before the step
        self._is_off = False

    def before_step(self, micro_batches: Sequence[Any]) -> None:
        """Compute two micro-batches and compare. Raises NumericsError on all ranks."""
        run = self._run
        world = run.world
        ranks = world.world_size
        every: Any = run.config.debug.audit_every  # not "off"
        position = self._position
        self._position = run.data.position
        choice = choose(run.config.run.seed, every, run.step, ranks, len(micro_batches))
        if choice is None or self._is_off:
            return
        number, shift = choice
        with world.clock.hold("diagnostics"):
            own = self._hashes(number, world.rank, micro_batches[number])
            other = self._recomputed(position, number, (world.rank + shift) % ranks)
            rows = world.stack(torch.stack([own, other]))
            # [ranks, hashes] each: row i is rank i's micro-batch, computed by rank i, by another.
            first, second = rows[:, 0], rows[:, 1].roll(shift, 0)
            if torch.equal(first, second):
                return
            rank = int((first != second).any(1).nonzero()[0])
            again = world.stack(self._recomputed(position, number, rank))
            values = [tuple(row.tolist()) for row in (first[rank], second[rank], *again)]
            self._report(number, [rank, (rank - shift) % ranks, *range(ranks)], values)

    def _recomputed(self, position: int, number: int, rank: int) -> Tensor:
        """Hashes of a micro-batch of `rank`, read and computed here. Every rank calls it."""
        data = self._run.data
        _, shards = next(replace(data.plan, rank=rank).steps(position))
        with self._run.parallel.no_side_effects():
            [(batch, _)] = data.fetched([shards[number]])
            return self._hashes(number, rank, batch)

    def _hashes(self, number: int, rank: int, batch: Any) -> Tensor:
        """Hashes of samples, loss and each gradient, 0 if there is none: [hashes] int64, on CPU."""
        run = self._run
        device = run.world.device
        factor = run.scaler.scale_tensor / run.data.plan.micro_batch_size
        with run.parallel.no_side_effects():
            micro_batch = number * run.world.world_size + rank
            seed_micro_batch(run.config.run.seed, run.step, micro_batch)
            _, events = recorded_backward(
                run, run.task, batch, factor, lambda values: hash_tensor(values[0]), ()
            )
        by_name = {event.name: event.values for event in events}  # "": the loss
        zero = torch.zeros((), dtype=torch.int64, device=device)
        gradients = [by_name.get(name, zero) for name in self._trained]
        return torch.stack([hash_samples([batch], device), by_name[""], *gradients]).cpu()

    def _report(self, number: int, ranks: Sequence[int], values: Sequence[Hashes]) -> None:
        """Raise an error, or warn that the task is not repeatable. ranks, values: see `verdict`."""
        run = self._run
        names = ["samples", "loss", *(f"gradient of {name}" for name in self._trained)]
        pairs = zip(names, *values[:2], strict=True)
        different = [name for name, first, second in pairs if first != second]
        text = f"audit of step {run.step + 1}, micro-batch {number} of rank {ranks[0]}: "
        text += f"{some_of(different)} differ when computed again"
        places = run.world.gather(f"{platform.node()}, {run.world.device}")
        if not (wrong := verdict(ranks, values, places)):
            self._is_off = True
            run.world.warn(
                f"{text}, even on the same rank: this is no corruption, but the task is not "
                "repeatable, for example because it draws from a generator that dist_amp does not "
                "seed; no more steps are audited"
            )
            return
        if mismatch := find_mismatch(run):
            wrong += f"; {mismatch}"
        raise NumericsError(
            f"{text}; {wrong}; resume from a checkpoint without the faulty hardware. If "
            "dist_amp.verify --bit_exact fails for this task on other machines too, the hardware "
            "is not at fault: the task is not deterministic"
        )


def check_settings(config: Config, world: World) -> None:
    """Raises ConfigError on all ranks if bits may differ without corruption."""
    models = world.gather(device_model(world.device))
    reason = ""
    if not config.parallel.bit_exact:
        reason = "needs parallel.bit_exact=true: otherwise ranks do not compute the same bits"
    elif len(models) == 1:
        reason = "needs another rank to compute again, but there is one process"
    elif len(set(models)) > 1:
        reason = f"needs ranks on equal devices, but they are on {', '.join(sorted(set(models)))}"
    if reason:
        every = config.debug.audit_every
        raise ConfigError(f"debug.audit_every={every} {reason}; use debug.audit_every=off")


def device_model(device: torch.device) -> str:
    """The GPU model, or the CPU's instruction set, which determine the kernels."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU with {torch.backends.cpu.get_cpu_capability()}"


def choose(
    seed: int, every: int, step: int, ranks: int, micro_batches: int
) -> tuple[int, int] | None:
    """What to audit in a step, the same on every rank; None for most steps.

    Returns (index of the micro-batch in the step, shift); rank i also computes rank i + shift's.
    """
    window, step_in_window = divmod(step, every)
    generator = random.Random(f"audit {seed} {window}")  # same in every process, unlike hash(...)
    if step_in_window != generator.randrange(every):
        return None
    return generator.randrange(micro_batches), generator.randrange(1, ranks)


def verdict(ranks: Sequence[int], values: Sequence[Hashes], places: Sequence[str]) -> str:
    """Which ranks are faulty, or that this can't be told; "" if the task is not repeatable.

    ranks: who computed the micro-batch, in order: its own rank, another one, then all ranks again.
    values: the hashes from each of these computations. places: each rank's host and device.
    """
    # The first two ranks computed it twice. They are unsteady if their two results differ.
    unsteady = {ranks[i] for i in (0, 1) if values[i] != values[2 + ranks[i]]}
    other_samples = len({value[0] for value in values}) > 1
    likely, count = Counter(values).most_common(1)[0]
    is_majority = 2 * count > len(values)
    if (unsteady and other_samples) or (len(unsteady) == 2 and not is_majority):
        return ""  # random draws in the task are more likely than faulty hardware
    wrong = unsteady
    if is_majority:
        wrong = {rank for rank, value in zip(ranks, values, strict=True) if value != likely}
    if not wrong:
        return "which rank is wrong can't be told: no result has a majority"
    return f"faulty: {', '.join(f'rank {rank} ({places[rank]})' for rank in sorted(wrong))}"
