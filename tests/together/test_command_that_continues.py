"""A stopped run prints the command that continues it, as it was started."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_train import summary_of
from tiny import Tiny, make_run

from dist_amp.supervise.stop import next_command_text

STOPS = """import os, signal
from tiny import Tiny

class Stops(Tiny):
    def on_step(self, run, report):
        if run.step == 2 and run.resumed_from_step is None:
            os.kill(os.getpid(), signal.SIGUSR1)
"""


AGAIN = "--run.dir unused --run.resume auto"
BY_SLURM = "to continue, start the same job again with --run.dir unused (RUN_DIR of slurm.sbatch)"


@pytest.mark.parametrize(
    ("started", "environ", "said"),
    [
        ("python {0}/dist_amp train --a 1", {}, f"continue with dist_amp train --a 1 {AGAIN}"),
        ("{0}/python -m dist_amp.train", {}, f"continue with python -m dist_amp.train {AGAIN}"),
        ("python -m x --run.dir unused", {}, f"continue with python -m x {AGAIN}"),
        ("python own.py", {"DIST_AMP_COMMAND": "demo '1 2'"}, f"continue with demo '1 2' {AGAIN}"),
        ("python -m dist_amp.train", {"SLURM_JOB_ID": "7"}, BY_SLURM),
    ],
)
def test_the_command_that_continues_is_the_one_that_started_with_the_runs_folder(
    started, environ, said, tmp_path, monkeypatch
):
    run = make_run(None, Tiny())
    for name in ("dist_amp", "python"):
        (tmp_path / name).touch(mode=0o755)
    for name, value in {"PATH": str(tmp_path), **environ}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "orig_argv", started.format(tmp_path).split())
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="dist_amp.train"))
    assert next_command_text(run) == said


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "dist_amp train",
        "torchrun --nproc_per_node=2 -m dist_amp.train",
        "dist_amp launch --nproc_per_node=2",
        "dist_amp demo --nproc_per_node=2",
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
