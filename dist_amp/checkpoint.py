"""Save and resume all that is stateful, with torch.distributed.checkpoint: any strategy reads any other's.

A checkpoint is taken by the training loop, which copies the state to the host's memory, and written in the background
while training goes on. What makes the files trustworthy, and safe to read, is in checkpoint_files.py.
"""

import math
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

from dist_amp.checkpoint_files import Manifest, Reader, Refused, fault_of, read_into, read_manifest, reason, set_aside
from dist_amp.checkpoint_writing import Snapshot, write
from dist_amp.config import Failure, Range
from dist_amp.resume import check_data, check_fit, config_hash
from dist_amp.runtime import DataError, World, seed_all

if TYPE_CHECKING:
    from dist_amp.run import Run


@dataclass(frozen=True)
class CheckpointConfig:
    every: Annotated[int, Range(low=1)] | Literal["off"] = 100
    """Steps between checkpoints; there is one at the end, and one when a signal stops the run. off: none at all."""
    keep: Annotated[int, Range(low=2)] = 2
    """How many of the newest checkpoints stay; the one with the lowest held-out loss stays beside them."""
    async_save: bool = True
    """Write in the background, from a copy of the state in the host's memory; false: training waits."""
    on_failure: Literal["go_on", "stop"] = "go_on"
    """When a checkpoint can't be written: warn and try again at the next one, or end the run."""


def save(run: "Run") -> Path:
    """Write a checkpoint of the run as it stands after `run.step` steps; every rank calls it, and waits for it."""
    snapshot = take(run, copy=False)
    if not _is_there(snapshot, run.world):
        write(snapshot, run.world)
    return snapshot.folder


def _is_there(snapshot: Snapshot, world: World) -> bool:
    """Whether the step is saved already, as where a run stops right after it was resumed; what is damaged is not."""
    there = False
    if world.is_main and snapshot.folder.exists():
        there = not fault_of(snapshot.folder)
        if not there:
            set_aside(snapshot.folder)
    return world.from_main(str(there)) == "True"


def take(run: "Run", copy: bool) -> Snapshot:
    """The state of the run now; every rank calls it. copy: into the host's memory, so that training may go on."""
    state = _state(run)
    state["model"] |= run.parallel.averaged_statistics()
    state["interval"] = run.world.gather(run.metrics.interval)
    state = _my_share(state, run.world)
    if copy:
        state = FileSystemWriter(run.folder).stage(state)
    world, plan = run.world, run.data.plan
    manifest = Manifest(
        step=run.step,
        samples=run.data.position,
        world_size=world.world_size,
        strategy=run.parallel.strategy,
        precision=run.precision.name,
        device=world.device.type,
        seed=run.config.run.seed,
        global_batch_size=plan.global_batch_size,
        data_length=plan.length,
        data_fingerprint=_fingerprint(run),
        optimizer=_groups(run),
        config_hash=config_hash(run.config_text),
        evaluation=run.metrics.evaluation,
        evaluated_step=run.metrics.evaluated_step,
        best=run.metrics.best,
        versions={"python": sys.version.split()[0], "torch": torch.__version__},
    )
    return Snapshot(run.folder, state, manifest, run.config_text, run.config.checkpoint.keep, on_host=copy)


def _my_share(state: dict[str, Any], world: World) -> dict[str, Any]:
    """The state without the whole tensors that are another rank's to write: of equal copies one is enough.

    A rank's own part stands under its number, and parts of a sharded tensor are all different.
    """
    bytes_of = [0] * world.world_size

    def keep(value: Any) -> bool:
        if not isinstance(value, Tensor) or hasattr(value, "to_local"):
            return True
        lightest = bytes_of.index(min(bytes_of))
        bytes_of[lightest] += value.numel() * value.element_size()
        return lightest == world.rank

    def share(part: dict[str, Any]) -> dict[str, Any]:
        split = {name: share(value) if isinstance(value, dict) else value for name, value in part.items()}
        return {name: value for name, value in split.items() if keep(value)}

    return {name: part if name == "ranks" else share({name: part}).get(name, {}) for name, part in state.items()}


class Saver:
    """The main job's checkpoints: one at a time, in the background if checkpoint.async_save says so."""

    def __init__(self, run: "Run"):
        self._run = run
        self._pending: Future[None] | None = None

    def save(self, wait: bool) -> None:
        """Save the run as it stands; every rank calls it. wait: until it is written, and fail if it can't be."""
        self._finish()
        in_background = self._run.config.checkpoint.async_save and not wait
        snapshot = take(self._run, copy=in_background)
        if _is_there(snapshot, self._run.world):
            return
        self._pending = Future()
        if in_background:
            # Not a pool's thread: Python would wait for that at its exit, however badly the run has ended.
            Thread(target=_write, args=(snapshot, self._run.world, self._pending), daemon=True).start()
        else:
            _write(snapshot, self._run.world, self._pending)
            self._finish(must=wait)

    def look(self) -> None:
        """At a log step: whether a save has ended, and how; every rank calls it, and learns the same."""
        if self._pending is None:
            return
        done = torch.tensor(float(self._pending.done()))
        if self._run.world.control is not None:
            dist.all_reduce(done, dist.ReduceOp.MIN, group=self._run.world.control)
        if done:
            self._finish()

    def _finish(self, must: bool = False) -> None:
        """Wait for the save that is under way. Errors: Failure where it failed and the run is not to go on."""
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        except Failure as error:
            if must or self._run.config.checkpoint.on_failure == "stop":
                raise
            self._run.world.warn(f"{error}; checkpoint.on_failure=go_on tries again at the next one")

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Let a save that is under way end; not for long where ranks may have parted, since all must take part."""
        if self._pending is not None:
            # Half of what the others' collectives wait for this rank, if it alone has failed.
            together = kind is None or issubclass(kind, Failure)
            with suppress(Exception):
                self._pending.result(timeout=self._run.config.run.timeout_seconds / 2 if together else 5.0)


def _write(snapshot: Snapshot, world: World, outcome: "Future[None]") -> None:
    try:
        if world.device.type == "cuda":  # a thread begins with the first
            torch.cuda.set_device(world.device)
        write(snapshot, world)
        outcome.set_result(None)
    except BaseException as error:
        outcome.set_exception(error)


def load(run: "Run", path: Path) -> None:
    """Set the run to the state that `save` wrote to `path`, from any world size and strategy; every rank calls it."""
    world = run.world
    try:
        manifest = read_manifest(path)
        reader = Reader(path, manifest.files)
        metadata = reader.read_metadata()
        check_data(path, manifest, run.data.plan.length, _fingerprint(run), run.config.run.allow_config_change, world)
        if manifest.step:  # before its first step, a run's buckets are not yet settled either
            _settle_buckets(run)
        for own in run.optimizer.torch_optimizer.state.values():
            if "step" in own:  # AdamW's may be one tensor for all parameters, and is read for each
                own["step"] = own["step"].clone()
        state = _state(run)
        same_world = (manifest.world_size, manifest.device) == (world.world_size, world.device.type)
        if not same_world:
            del state["ranks"]
        if manifest.precision != "fp16":
            del state["scaler"]
        if "expected_weights" not in metadata.state_dict_metadata:  # of before there were any
            del state["expected_weights"]
        state["interval"] = torch.zeros(manifest.world_size, len(run.metrics.interval), dtype=torch.float64)
        check_fit(path, manifest, metadata, state, _groups(run))
        read_into(state, reader, alone=world.world_size == 1)
    except Refused as error:
        raise DataError(f"checkpoint {path} is refused: {error}") from None
    except CheckpointException as error:
        raise DataError(f"checkpoint {path} can't be loaded: {reason(error)}") from error
    _set_state(run, manifest, state, same_world)


def _set_state(run: "Run", manifest: Manifest, state: dict[str, Any], same_world: bool) -> None:
    groups = get_optimizer_state_dict(run.model, run.optimizer.torch_optimizer)["param_groups"]
    set_state_dict(
        run.model,
        run.optimizer.torch_optimizer,
        model_state_dict=state["model"],
        optim_state_dict={"state": state["optimizer"], "param_groups": groups},
    )
    run.optimizer.bind_learning_rate()
    if "scaler" in state:
        run.precision.load_state_dict(state["scaler"])
    if (weights := state.get("expected_weights")) is not None and torch.fmax(*weights) > 0:
        run.parallel.expect(weights)
    run.step, run.data.position = manifest.step, manifest.samples
    run.metrics.resume(manifest.evaluation, manifest.evaluated_step, manifest.best, state["interval"], same_world)
    if same_world:
        own = state["ranks"][str(run.world.rank)]
        _set_statistics(run, own["statistics"])
        set_random_state(own["random"], run.world)
    else:  # ranks without a past: not seeded as at the start, or dropout would draw its first masks again
        seed_all((run.config.run.seed + 1 + run.world.rank + 1_000_003 * run.step) % 2**63)


def _set_statistics(run: "Run", statistics: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, statistic in run.parallel.batch_statistics().items():
            statistic.copy_(statistics[name])


def _fingerprint(run: "Run") -> str:
    """Rank 0's, on every rank; made once, with the generators left as they are."""
    if not run.data.agreed_fingerprint:
        random_numbers = random_state(run.world)
        run.data.agreed_fingerprint = run.world.from_main(run.data.fingerprint() if run.world.is_main else "")
        set_random_state(random_numbers, run.world)
    return run.data.agreed_fingerprint


def _groups(run: "Run") -> dict[str, int]:
    groups = run.optimizer.torch_optimizer.param_groups
    return {f"{run.optimizer.config.name} {group['name']}": len(group["params"]) for group in groups}


def _settle_buckets(run: "Run") -> None:
    """Give DDP the bucket layout that it has after its first step.

    It lays its buckets out anew after its first backward, and three ranks or more sum in another order then: without
    this a resumed run's first step would differ from the uninterrupted one's in the last bit.
    """
    if run.parallel.strategy != "ddp" or run.world.world_size < 3:
        return
    with as_it_was(run):
        (batch, _), *_ = run.data.at(0)
        batch = getattr(batch, "batch", batch)
        for _ in range(2):
            with run.precision.autocast():
                loss = run.task.loss_sum(run.model, batch)
            run.precision.backward(loss)


def _state(run: "Run") -> dict[str, Any]:
    """All that a step depends on, as tensors: the state to save, or the places that a load fills."""
    model, optimizer = get_state_dict(run.model, run.optimizer.torch_optimizer)
    statistics = {
        name: own.clone() for name, own in run.parallel.batch_statistics().items()
    }  # the model's are averages
    own = {"random": random_state(run.world), "statistics": statistics}
    return {
        "model": model,
        "optimizer": optimizer["state"],  # its groups' settings come from the config
        "counters": run.optimizer.counters,
        "expected_weights": run.parallel.weights,
        "scaler": run.precision.state_dict(),
        "ranks": {str(run.world.rank): own},
    }


def rewind_point(run: "Run") -> Callable[[], None]:
    """Note the generators and batch statistics; what is returned puts them back."""
    random_numbers = random_state(run.world)
    statistics = {name: own.clone() for name, own in run.parallel.batch_statistics().items()}

    def rewind() -> None:
        _set_statistics(run, statistics)
        set_random_state(random_numbers, run.world)

    return rewind


@contextmanager
def as_it_was(run: "Run") -> Iterator[None]:
    """Whatever is run inside, generators and buffers are afterwards as they were, and there are no gradients."""
    random_numbers = random_state(run.world)
    modules = run.parallel.module.modules()
    buffers = [(m, name, b, b.clone()) for m in modules for name, b in m._buffers.items() if b is not None]
    try:
        yield
    finally:
        run.optimizer.torch_optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                written = buffer.layout == torch.strided and not torch.equal(buffer, value)
                if written:  # an expanded buffer can't be, and was not
                    buffer.copy_(value)
        set_random_state(random_numbers, run.world)


def random_state(world: World) -> dict[str, Tensor]:
    """The states of the generators of Python, NumPy, torch and the device, as tensors."""
    _, numbers, gauss = random.getstate()
    twister: Any = numpy.random.get_state(legacy=True)  # noqa: NPY002 (a task may draw from it)
    _, keys, position, has_gauss, cached = twister
    state = {
        "python": torch.tensor(numbers),
        "python_gauss": torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
        "numpy": torch.from_numpy(keys.astype(numpy.int64)),
        "numpy_gauss": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if world.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(world.device)
    return state


def set_random_state(state: dict[str, Tensor], world: World) -> None:
    gauss = state["python_gauss"].item()
    random.setstate((3, tuple(state["python"].tolist()), None if math.isnan(gauss) else gauss))
    position, has_gauss, cached = state["numpy_gauss"].tolist()
    keys = state["numpy"].numpy().astype(numpy.uint32)
    numpy.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], world.device)
