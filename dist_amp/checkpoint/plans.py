"""Which rank writes what: planned by the first save, and again only when the structure of the state has changed.

torch plans each save on rank 0, from the lists of shards that all ranks send there (86 to 101 us of rank 0's processor
time per shard, measured for 64 to 1,024 ranks), and sends the description of the whole checkpoint back to all of them.
Its own cache is shared by all runs of a process, and does not notice that a tensor has another dtype.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from dist_amp.fast.fused import local

NOTHING_NEW = SavePlan([], usable=False)  # torch's sign for "use the plan that you have"


class SavePlanner(DefaultSavePlanner):
    """torch's planner of saves, which keeps its plan; one for all saves of a run.

    reuse: whether the next save follows the kept plan. Set it on all ranks alike, and only if `has_plan_for` holds on
    all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reuse = False
        self._structure: Any = None  # that of the state which `_final` is for
        self._final: SavePlan | None = None  # this rank's part
        self._metadata: Metadata | None = None  # of the whole checkpoint, on rank 0

    def has_plan_for(self, state: dict[str, Any]) -> bool:
        """Whether this rank's plan of the last save fits the state."""
        self.set_up_planner(state)
        return self._final is not None and self._structure == self._described()

    def create_local_plan(self) -> SavePlan:
        if self.reuse:
            return NOTHING_NEW
        self._structure = self._final = self._metadata = None  # nothing half-new is left if a rank fails
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if self.reuse:
            return [NOTHING_NEW] * len(all_plans), Metadata({})
        plans, self._metadata = super().create_global_plan(all_plans)
        return plans, Metadata({})  # torch would send it to all ranks, which have no use for it: see Writer

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if not self.reuse:
            self._final, self._structure = super().finish_plan(new_plan), self._described()
        assert self._final is not None
        self.plan = self._final
        return self._final

    def whole_metadata(self) -> Metadata:
        """Of the checkpoint that is being saved; on rank 0."""
        assert self._metadata is not None
        return self._metadata

    def _described(self) -> Any:
        """What a plan and the metadata depend on, in the state last set up."""
        return self.mappings, {name: _description(value) for name, value in self.state_dict.items()}


class Writer(FileSystemWriter):
    """torch's writer of files, which writes the planner's metadata; the plan's own is empty."""

    def __init__(self, folder: Path, planner: SavePlanner, **options: Any):
        super().__init__(folder, **options)
        self._planner = planner

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(self._planner.whole_metadata(), results)


def _description(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return "an object"
    own = local(value)
    sharding = (value.device_mesh, value.placements) if isinstance(value, DTensor) else ()
    strides = own.stride() if own.layout is torch.strided else ()
    return type(own), own.dtype, own.layout, own.device, own.requires_grad, value.size(), own.size(), strides, sharding
