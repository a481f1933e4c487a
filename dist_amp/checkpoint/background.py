"""One save: copy this rank's part of the state, then write it in a thread (overview: saver.py).

1. `without_replicas` selects the part: a tensor that several ranks hold is written by one of them.
2. `Staging` copies it to host memory (pinned with a GPU), which all saves reuse, because allocating
   takes longer than copying. torch's DefaultStager (2.13.0) fails on tensor subclasses, on sparse
   tensors, and where memory can't be pinned.
3. The thread runs the stages in `Save._write`. After each, all ranks exchange results and errors.
4. `Save.wait`, on the main thread, detects a save that makes no progress.
A save that training waits for skips 1 and 2; torch's planner then leaves out the replicas.
"""

import shutil
import time
import warnings
from collections.abc import Callable
from concurrent import futures
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_with_path

from dist_amp.checkpoint.format import (
    CONFIG,
    Entry,
    Manifest,
    State,
    checkpoint_folder,
    hash_files,
    publish,
    quarantine_after,
    reason,
    remove_old_checkpoints,
)
from dist_amp.config.text import to_toml
from dist_amp.distributed.process import in_thread
from dist_amp.errors import Failure, Transient, some_of
from dist_amp.files import appears, run_dir, sync_folder, write_synced
from dist_amp.step import Run
from dist_amp.world import World

# First words of those sections of the state, such as "observer NAME", that differ between ranks.
PER_RANK_SECTIONS = ("ranks", "task", "observer")


class Planner(DefaultSavePlanner):
    """torch's planner, which also calls `progress` before each tensor is written.

    All saves of a run use one planner, so that rank 0 plans only what has changed. Planning takes
    about 90 us for each shard of each rank (measured for 64 to 1,024 ranks).
    """

    progress: Callable[[], object]

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key = uuid4().hex  # torch's default is one cache for the whole process

    def resolve_data(self, write_item: Any) -> Any:
        self.progress()
        return super().resolve_data(write_item)


class Save:
    """A save in progress. future: the thread's result; is_stuck: whether `wait` has given up."""

    def __init__(
        self, run: Run, state: State, manifest: Manifest, planner: Planner, staging: Any = None
    ):
        """staging: copies this rank's part first. None: the thread writes `state` uncopied."""
        self.folder = checkpoint_folder(run.folder, manifest.step)
        self.is_stuck = False
        self._temporary = self.folder.with_name(f".{self.folder.name}.writing")
        self._run_folder = run.folder
        self._world = run.world
        self._config = run.config
        self._best_metric = getattr(run.task, "best_metric", "loss")
        self._manifest = manifest
        self._planner = planner
        self._files: dict[str, Entry] = {}
        self._owns_folder = run.world.is_main  # this rank makes, publishes and removes folders
        if "://" in run_dir(run.folder):  # on object storage, each node has a local folder
            self._owns_folder = run.world.local_rank == 0
        self._enter("")
        if staging is not None:
            state = staging.copy(without_replicas(state, run.world))
        self._state = state
        self.future = in_thread(self._write, "checkpoint writer")

    def _enter(self, stage: str) -> None:
        """Record for `wait` that a stage, or its next tensor, begins; "": waits for other ranks."""
        self._progress = (time.monotonic(), stage)

    def wait(self) -> None:
        """Wait until the threads of all ranks have ended; every rank calls it.

        Raises Failure if the save fails; Transient if it is stuck for run.timeout_seconds.
        """
        timeout = self._config.run.timeout_seconds
        while True:
            futures.wait([self.future], min(1.0, timeout / 10))
            since, stage = self._progress
            note = (self.future.done(), time.monotonic() - since, stage)
            notes = self._world.gather(note)
            if all(is_done for is_done, _, _ in notes):
                self.is_stuck = False
                return self.future.result()
            seconds = min(idle for is_done, idle, _ in notes if not is_done)
            self.is_stuck = seconds >= timeout  # no unfinished rank has made progress
            if self.is_stuck:
                places = [f"rank {n} in {stage}" for n, (_, _, stage) in enumerate(notes) if stage]
                raise Transient(
                    f"{self.folder} could not be written: it has made no progress for "
                    f"run.timeout_seconds={timeout:g} ({some_of(places)}); check the file system"
                )

    def _write(self) -> None:
        """Write and publish the checkpoint. Raises Failure on all ranks if one fails."""
        if self._world.device.type == "cuda":  # a new thread would use the first GPU
            torch.cuda.set_device(self._world.device)
        try:
            self._on_all_ranks("make_folder", self._make_folder)
            self._on_all_ranks("find_folder", self._find_folder)
            for entries in self._on_all_ranks("write_shards", self._write_shards):
                self._files |= entries
            self._on_all_ranks("finish", self._finish)
        except Failure as error:
            if self._owns_folder:  # what was written may be what has filled the disk
                shutil.rmtree(self._temporary, ignore_errors=True)
            raise Failure(
                f"checkpoint {self.folder} could not be written: {error}; the previous one is kept"
            ) from error

    def _on_all_ranks(self, name: str, stage: Callable[[], Any]) -> list[Any]:
        """Run a stage; returns all ranks' results. Raises Failure on every rank if one fails."""
        result = None
        failure = ""
        self._enter(name)
        try:
            result = stage()
        except CheckpointException as error:  # torch raises it on all ranks: name one that failed
            failure = f"rank {next(iter(error.failures), self._world.rank)}: {reason(error)}"
        except Exception as error:
            failure = f"rank {self._world.rank}: {reason(error)}"
        self._enter("")
        outcomes = [(result, failure)] * self._world.world_size
        if self._world.background is not None:
            dist.all_gather_object(outcomes, (result, failure), group=self._world.background)
        for _, failure in outcomes:
            if failure:
                raise Failure(failure)
        return [result for result, _ in outcomes]

    def _make_folder(self) -> None:
        # A checkpoint of this step or a later one exists only if the run did not resume from it.
        if self._world.is_main:
            for path in quarantine_after(self._run_folder, self._manifest.step - 1):
                self._world.warn(f"a checkpoint is damaged or of another run: renamed to {path}")
        elif self._owns_folder:  # a node's local copy of what rank 0 has renamed
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._owns_folder:
            # The temporary folder exists if a run was killed while writing this checkpoint.
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary.mkdir(parents=True)
            sync_folder(self._run_folder)
            write_synced(self._temporary / CONFIG, to_toml(self._config))

    def _find_folder(self) -> None:
        if not appears(self._temporary):
            raise Failure("run.dir is not on a disk that all ranks share; put it on one")

    def _write_shards(self) -> dict[str, Entry]:
        # torch warns if there is no process group. No catch_warnings: threads share the filters.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        self._planner.progress = partial(self._enter, "write_shards")
        write_tensors(
            self._state,
            storage_writer=FileSystemWriter(self._temporary),
            planner=self._planner,
            process_group=self._world.background,
            no_dist=self._world.world_size == 1,
        )
        paths = list(self._temporary.glob(f"__{self._world.rank}_*"))  # this rank's .distcp files
        if self._world.is_main:
            paths += [self._temporary / CONFIG, self._temporary / ".metadata"]
        return hash_files(paths)

    def _finish(self) -> None:
        if self._owns_folder:
            publish(self._temporary, self.folder, replace(self._manifest, files=self._files))
            keep = self._config.checkpoint.keep
            for problem in remove_old_checkpoints(self._run_folder, keep, self._best_metric):
                self._world.warn(problem)


class Staging:
    """Host memory for a copy of this rank's part of the state; all saves of a run reuse it."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._buffers: dict[tuple[Any, ...], Tensor] = {}  # by path in the state, dtype and shape

    @torch.no_grad()
    def copy(self, state: State) -> State:
        """Copy the state's tensors into this memory, over the previous save's."""
        copy: State = tree_map_with_path(self._copy_leaf, state)
        if self._on_gpu:  # the copies are non-blocking
            torch.cuda.current_stream().synchronize()
        return copy

    def _copy_leaf(self, path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if is_traceable_wrapper_subclass(leaf):  # made of tensors: a DTensor, torchao's moments
            names, context = leaf.__tensor_flatten__()
            parts = {name: self._copy_leaf((*path, name), getattr(leaf, name)) for name in names}
            subclass: Any = type(leaf)
            return subclass.__tensor_unflatten__(parts, context, leaf.size(), leaf.stride())
        if leaf.layout is not torch.strided:  # sparse: its size may change, so nothing is reused
            return leaf.detach().to("cpu", copy=True)
        key = (path, leaf.dtype, leaf.size(), leaf.stride())
        if key not in self._buffers:
            try:
                self._buffers[key] = torch.empty_like(leaf, device="cpu", pin_memory=self._on_gpu)
            except RuntimeError:  # no more memory can be pinned; the copy takes longer without
                self._buffers[key] = torch.empty_like(leaf, device="cpu")
        return self._buffers[key].copy_(leaf, non_blocking=True)


def without_replicas(state: State, world: World) -> State:
    """The state without the replicated tensors that another rank writes.

    An ordinary tensor is written by the rank with the fewest bytes so far, which each rank computes
    alike; a DTensor by its first replica. PER_RANK_SECTIONS stay whole.
    """
    bytes_of_rank = [0] * world.world_size

    def is_written_here(value: Any) -> bool:
        if isinstance(value, DTensor):
            coordinates: Any = value.device_mesh.get_coordinate()
            dimensions = zip(coordinates, value.placements, strict=True)
            return all(index == 0 for index, placement in dimensions if placement.is_replicate())
        if not isinstance(value, Tensor):
            return True
        writer = bytes_of_rank.index(min(bytes_of_rank))
        bytes_of_rank[writer] += value.numel() * value.element_size()
        return writer == world.rank

    def part_of(section: State) -> State:
        part = {}
        for name, value in section.items():
            if isinstance(value, dict):
                part[name] = part_of(value)
            elif is_written_here(value):
                part[name] = value
        return part

    own = {name: state[name] for name in state if name.partition(" ")[0] in PER_RANK_SECTIONS}
    return part_of({name: state[name] for name in state if name not in own}) | own
