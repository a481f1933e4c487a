"""What is known of a run so far, for whoever has to explain how it ended."""

from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from dist_amp.fast.process_group import shared_store
from dist_amp.run import Run
from dist_amp.settings import Config
from dist_amp.world import World


@dataclass
class Supervised:
    """The block that runs sets each field as soon as it has it."""

    config: Config
    world: World
    folder: Path | None = None
    run: Run | None = None
    # Kept, because the groups may be aborted; None in one process.
    store: dist.Store | None = field(init=False, default=None)  # type: ignore[name-defined]

    def __post_init__(self) -> None:
        if dist.is_initialized():
            self.store = shared_store()
