"""Core as test_security.py tests it, with launch."""

import json

from test_train import TINY

# --- what listens

LISTENS = """
import json, os
from pathlib import Path
from test_security import listening
from tiny import Tiny

class Listens(Tiny):
    def on_step(self, run, report):
        found = {str(pid): listening(pid) for pid in (os.getpid(), os.getppid())}
        Path(f"listening{run.world.rank}.json").write_text(json.dumps(found))
"""


def test_on_one_machine_launch_and_its_ranks_listen_on_loopback_alone(launch, tmp_path):
    (launch.folder / "listens.py").write_text(LISTENS)
    words = [*TINY, "--task.target", "listens:Listens", "--train.steps", "1", "--run.dir", "run"]
    done = launch.module("dist_amp.commands.launch", "--nproc-per-node", "2", *words)
    assert done.returncode == 0, done.stderr
    found = [json.loads((launch.folder / f"listening{rank}.json").read_text()) for rank in (0, 1)]
    for processes in found:
        assert len(processes) == 2  # the rank and torchrun's agent
        for addresses in processes.values():
            assert addresses, "the stores and gloo listen"
            assert set(addresses) <= {"0100007F", "00000000000000000000000001000000"}
