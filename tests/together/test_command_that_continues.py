"""A stopped run prints the command that continues it, as it was started."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from test_train import summary_of

STOPS = """import os, signal
from tiny import Tiny

class Stops(Tiny):
    def on_step(self, run, report):
        if run.step == 2 and run.resumed_from_step is None:
            os.kill(os.getpid(), signal.SIGUSR1)
"""


@pytest.mark.parametrize(
    "command",
    [
        "dist_amp train",
        pytest.param("torchrun --nproc_per_node=2 -m dist_amp.train", marks=pytest.mark.slow),
        pytest.param("dist_amp launch --nproc_per_node=2", marks=pytest.mark.slow),
        pytest.param("dist_amp demo --nproc_per_node=2", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_says_the_whole_command_that_continues_it(launch, tmp_path, command):
    (tmp_path / "stops.py").write_text(STOPS)
    words = "--task.target stops.py:Stops --task.args.seed 5 --train.global_batch_size auto"
    words += " --run.device cpu --use_amp false --train.steps 8 --run.resume never"
    environ = launch.environ({"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
    run = partial(subprocess.run, shell=True, cwd=tmp_path, env=environ, text=True)
    said = run(f"{command} {words}", stdout=subprocess.PIPE).stdout
    (folder,) = (tmp_path / "runs").iterdir()
    again = f"{command} {words} --run.dir runs/{folder.name} --run.resume auto"
    assert f"by SIGUSR1; continue with {again}\n" in said
    assert run(again).returncode == 0
    assert summary_of(folder)["resumed_from_step"] > 1
