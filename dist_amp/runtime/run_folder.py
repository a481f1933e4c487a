"""The path of the run's folder, the same on every rank."""

import hashlib
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

from dist_amp.errors import ConfigError
from dist_amp.settings import RunConfig
from dist_amp.world import World


def run_folder(config: RunConfig, world: World) -> Path:
    """The path of the run's folder, the same on every rank; a torchrun restart gets that of its first attempt."""
    if not config.dir:
        raise ConfigError("run.dir is empty; give a folder's path, or auto")
    if config.dir != "auto":
        return Path(config.dir)
    name = hashlib.sha256(_launch_id().encode()).hexdigest()[:6]
    earlier = sorted(Path("runs").glob(f"*-{name}"))
    fresh = Path("runs") / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{name}"
    return Path(world.from_main(str(earlier[-1] if earlier else fresh)))


def _launch_id() -> str:
    """An identifier shared by all attempts of one launch and by no other launch.

    Under torchrun: its agent's process and start time, because the agent outlives its workers.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return f"{socket.gethostname()} {os.getpid()} {time.time_ns()}"
    agent = os.getppid()
    try:
        started = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:  # /proc exists only on Linux
        started = ""
    return f"{os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {agent} {started}"
